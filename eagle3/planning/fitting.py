"""Finds what fits: the longest context for a layout, and the best layout and memory settings for a stream."""

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from eagle3.planning.memory import rank_bytes
from eagle3.planning.step import MACHINE, Planned, RankShare, Sizes, step_seconds

# Share of a GPU's memory taken by the CUDA context, by buffers of NCCL and cuBLAS, and by fragmentation.
RESERVED = 0.08


@dataclass(frozen=True)
class PlannedStream:
    """A packed stream of equally long documents."""

    tokens: int  # number of tokens in the whole stream
    documents: int
    supervised: float  # share of the tokens that is supervised
    spans: int = 1  # runs of supervised tokens per document

    def share(self, planned: Planned) -> RankShare:
        """The share to expect of one rank, if all tokens are different and the last part of each document or span is
        supervised."""
        sizes, window, supervised, spans = planned.sizes, planned.draft.window, self.supervised, self.spans
        longest, teacher = math.ceil(self.tokens / self.documents), math.ceil(self.tokens * supervised / sizes.sequence)
        if planned.query_selection == "all":
            supervised, spans = 1.0, 1
        counting, reach = longest * supervised, longest if window is None else min(window, longest)
        clipped = max(0.0, counting - (longest - reach))  # queries with a window cut off by the document's start
        pairs = round(self.documents * (counting * reach - clipped**2 / 2))
        # Each run of supervised tokens needs the keys of a window before it.
        queries, keys = self.tokens * supervised, min(self.tokens, self.documents * (counting + spans * reach))
        mine, shared = math.ceil(queries / sizes.sequence), math.ceil(keys / sizes.sequence)
        # Rows that are both keys and queries of a rank, counted on the first Ulysses rank, which has the fewest.
        both = max(0, queries - (sizes.ulysses - 1) * (keys - queries)) / sizes.sequence / sizes.ring
        rows = round(shared + mine - both)
        return RankShare(shared, mine, teacher, rows, longest, pairs, rows)

    def needs(self, planned: Planned) -> int:
        """Bytes that one rank needs to train on this stream."""
        return rank_bytes(planned, self.share(planned)).total()


# The search for the longest context goes in multiples of STEP, up to MOST_TOKENS.
STEP = 1024
MOST_TOKENS = 2**27


def longest_context(planned: Planned, document: Callable[[int], PlannedStream], usable: float) -> int | None:
    """Length in tokens, a multiple of STEP, of the longest single document that fits into `usable` bytes per rank; None
    if it exceeds MOST_TOKENS. document: returns the stream for a document with a given number of tokens."""
    lengths = range(STEP, MOST_TOKENS + 1, STEP)
    fitting = bisect_left(lengths, True, key=lambda tokens: document(tokens).needs(planned) > usable)
    return None if fitting == len(lengths) else fitting * STEP


def longest_of_any_layout(planned: Planned, gpus: int, supervised: float, usable: float) -> int | None:
    """Like longest_context, but over all layouts and memory settings that `gpus` GPUs allow."""
    most = 0
    for each in layouts(planned, gpus):
        if PlannedStream(most + STEP, 1, supervised).needs(each) <= usable:
            longest = longest_context(each, lambda tokens: PlannedStream(tokens, 1, supervised), usable)
            if longest is None:
                return None
            most = longest
    return most


class Fitted(NamedTuple):
    """A layout, and a stream that fits. A stream that the recipe packs depends on the layout."""

    planned: Planned
    stream: PlannedStream


def best_layout(
    planned: Planned, gpus: int, stream_of: Callable[[Sizes], PlannedStream | None], usable: float
) -> Fitted | None:
    """The layout and memory settings with the least GPU time per token, of all those whose stream fits; None if none
    fits. stream_of: returns the stream for a layout, or None if the layout cannot have one."""
    candidates = ((each, stream_of(each.sizes)) for each in layouts(planned, gpus))
    fitting = (Fitted(*each) for each in candidates if each[1] is not None and each[1].needs(each[0]) <= usable)
    return min(fitting, key=_cost, default=None)


def variants(planned: Planned) -> Iterator[Planned]:
    """The same layout with every setting of the recipe's memory section."""
    for recompute in ("none", "attention_kept", "full"):
        memory = dataclasses.replace(planned.memory, recompute=recompute)
        yield dataclasses.replace(planned, memory=memory, residence="device")
    yield dataclasses.replace(planned, memory=memory, residence="host")


def layouts(planned: Planned, gpus: int) -> Iterator[Planned]:
    """Every way to spread a stream over some or all of the GPUs, without changing tensor parallelism, with every memory
    setting."""
    tensor = planned.sizes.tensor
    for sequence in _divisors(gpus // tensor) if gpus % tensor == 0 else ():
        for ulysses in _divisors(sequence):
            if ulysses * tensor > MACHINE.node or not planned.draft.is_divided_by(tensor, ulysses):
                continue
            sizes = Sizes(tensor, ulysses, sequence // ulysses, gpus // (tensor * sequence))
            for mode in ("gather", "p2p") if sizes.ring > 1 else ("gather",):
                yield from variants(dataclasses.replace(planned, sizes=sizes, ring_mode=mode))


def _cost(fitted: Fitted) -> tuple[float, float]:
    """GPU seconds per token, then bytes. Both favour layouts in which fewer GPUs share a stream and less is
    recomputed."""
    planned, stream = fitted
    streamed = 1.001 if planned.residence == "host" else 1  # the copies should overlap with computation
    seconds = step_seconds(planned, stream.share(planned)) * streamed
    return seconds * planned.sizes.tensor * planned.sizes.sequence / stream.tokens, stream.needs(planned)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, math.isqrt(number) + 1) if number % n == 0 for n in {n, number // n}]
