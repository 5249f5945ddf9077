"""What fits: the longest context of a layout, and the best layout and memory settings for a stream."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from eagle3.errors import UserError
from eagle3.planning.memory import rank_bytes
from eagle3.planning.step import Machine, Planned, Share, Sizes, step_seconds

# Share of a GPU's memory for the CUDA context, buffers of NCCL and cuBLAS, and what the allocator cannot use.
RESERVED = 0.08


@dataclass(frozen=True)
class PlannedStream:
    """One packed stream of equal documents."""

    tokens: int  # in the whole stream
    documents: int
    supervised: float  # share of the tokens
    spans: int = 1  # runs of supervised tokens per document

    def share(self, planned: Planned) -> Share:
        return Share.expected(
            self.tokens,
            self.supervised,
            planned.sizes,
            self.documents,
            planned.draft.window,
            self.spans,
            planned.query_selection,
        )

    def needs(self, planned: Planned) -> int:
        """Bytes on one rank that trains on this stream."""
        return rank_bytes(planned, self.share(planned)).total()


# The search for the longest context proceeds in multiples of STEP and ends at MOST_TOKENS.
STEP = 1024
MOST_TOKENS = 2**27


def longest_context(planned: Planned, document: Callable[[int], PlannedStream], usable: float) -> int | None:
    """Tokens, in whole STEPs, of the longest single document that a rank can hold in `usable` bytes; None if beyond
    MOST_TOKENS. document: makes the stream for a document of a given number of tokens."""

    def fits(steps: int) -> bool:
        return document(steps * STEP).needs(planned) <= usable

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high * STEP > MOST_TOKENS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * STEP


def longest_of_any_layout(planned: Planned, gpus: int, supervised: float, usable: float) -> int | None:
    """Like longest_context, over all layouts and memory settings possible with `gpus` GPUs."""
    most = 0
    for each in layouts(planned, gpus):
        if PlannedStream(most + STEP, 1, supervised).needs(each) <= usable:
            longest = longest_context(each, lambda tokens: PlannedStream(tokens, 1, supervised), usable)
            if longest is None:
                return None
            most = longest
    return most


class Fitted(NamedTuple):
    """A layout under which a stream fits, and that stream: if the recipe packs it, it depends on the layout."""

    planned: Planned
    stream: PlannedStream


def best_layout(
    planned: Planned, gpus: int, stream_of: Callable[[Sizes], PlannedStream | None], usable: float
) -> Fitted | None:
    """The layout and memory settings with the least GPU time per token, among all those under which their stream fits.
    stream_of: the stream that a layout would have, None if it can have none."""
    candidates = ((each, stream_of(each.sizes)) for each in layouts(planned, gpus))
    fitting = (Fitted(*each) for each in candidates if each[1] is not None and each[1].needs(each[0]) <= usable)
    return min(fitting, key=_cost, default=None)


def variants(planned: Planned) -> Iterator[Planned]:
    """The same layout with every choice of the recipe's memory section."""
    for recompute in ("none", "attention_kept", "full"):
        memory = dataclasses.replace(planned.memory, recompute=recompute)
        yield dataclasses.replace(planned, memory=memory, residence="device")
    yield dataclasses.replace(planned, memory=memory, residence="host")


def layouts(planned: Planned, gpus: int) -> Iterator[Planned]:
    """Every way to spread a stream over some of the GPUs, with tensor parallelism unchanged, and every choice of memory
    settings."""
    for sequence in _divisors(gpus // planned.sizes.tensor) if gpus % planned.sizes.tensor == 0 else ():
        for ulysses in _divisors(sequence):
            try:
                planned.draft.check_parallel(planned.sizes.tensor, ulysses)
            except UserError:
                continue
            if ulysses * planned.sizes.tensor > Machine().node:
                continue
            data = gpus // (planned.sizes.tensor * sequence)
            sizes = Sizes(planned.sizes.tensor, ulysses, sequence // ulysses, data)
            for mode in ("gather", "p2p") if sizes.ring > 1 else ("gather",):
                yield from variants(dataclasses.replace(planned, sizes=sizes, ring_mode=mode))


def _cost(fitted: Fitted) -> tuple[float, float]:
    """GPU seconds per token, then bytes: it is better if fewer GPUs share a stream and less is recomputed."""
    planned, stream = fitted
    streamed = 1.001 if planned.residence == "host" else 1  # if all goes well, computation hides the copies
    seconds = step_seconds(planned, stream.share(planned)) * streamed
    return seconds * planned.sizes.tensor * planned.sizes.sequence / stream.tokens, stream.needs(planned)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, math.isqrt(number) + 1) if number % n == 0 for n in {n, number // n}]
