"""What fits: the longest context of a layout, and the best layout and memory settings for a stream."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from eagle3.costs import Machine, step_seconds
from eagle3.errors import UserError
from eagle3.planner import Planned, Share, Sizes, rank_bytes

# Of a GPU's memory: the CUDA context, NCCL's and cuBLAS's buffers, and what the allocator cannot use.
RESERVED = 0.08


@dataclass(frozen=True)
class Stream:
    """tokens of one packed stream, in `documents` equal ones; supervised: the share of them that counts."""

    tokens: int
    documents: int
    supervised: float

    def share(self, planned: Planned) -> Share:
        return Share.expected(self.tokens, self.supervised, planned.sizes, self.documents)

    def needs(self, planned: Planned) -> int:
        """Bytes of a rank that trains on it."""
        return rank_bytes(planned, self.share(planned)).total()


def longest_context(planned: Planned, supervised: float, usable: float) -> int:
    """Tokens of the longest single document that a rank holds in `usable` bytes, in steps of 1024."""
    return _longest(lambda tokens: Stream(tokens, 1, supervised).needs(planned) <= usable)


def best_layout(planned: Planned, gpus: int, stream: Stream, usable: float) -> Planned | None:
    """Of all layouts and memory settings under which `stream` fits, the one that takes the least GPU time."""
    fitting = (each for each in layouts(planned, gpus) if stream.needs(each) <= usable)
    return min(fitting, key=lambda each: _cost(each, stream), default=None)


def variants(planned: Planned) -> Iterator[Planned]:
    """The same layout with every choice of the recipe's memory section."""
    for recompute in ("none", "attention_kept", "full"):
        memory = dataclasses.replace(planned.memory, recompute=recompute)
        yield dataclasses.replace(planned, memory=memory, residence="device")
    yield dataclasses.replace(planned, memory=memory, residence="host")


def layouts(planned: Planned, gpus: int) -> Iterator[Planned]:
    """Every way to deal a stream to some of the GPUs, tensor parallelism as it is, with every choice of memory."""
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


def _cost(planned: Planned, stream: Stream) -> tuple[float, float]:
    """GPU seconds a stream takes, then bytes: the fewer GPUs share it and the less is computed again, the better."""
    share, sizes = stream.share(planned), planned.sizes
    streamed = 1.001 if planned.residence == "host" else 1  # copies that compute hides, if all goes well
    seconds = step_seconds(planned, share) * streamed
    return seconds * sizes.tensor * sizes.sequence, rank_bytes(planned, share).total()


def _longest(fits: Callable[[int], bool], most: int = 2**27) -> int:
    """The largest number of tokens that `fits`, in steps of 1024 (0 where not even that many do)."""
    low, high = 0, 1
    while high * 1024 <= most and fits(high * 1024):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * 1024) else (low, middle)
    return low * 1024


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, math.isqrt(number) + 1) if number % n == 0 for n in {n, number // n}]
