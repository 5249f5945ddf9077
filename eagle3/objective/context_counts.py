"""Acceptance by context length, estimated from hidden states: the same hits that the metrics count, by their position."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from eagle3.parallel.sequence import SequencePlan, Stream

SHORTEST = 512  # tokens; the first context of every list


class ContextCounts(NamedTuple):
    """Positions by context, [B, K] int64, one column a TTT step: supervised ones, and those of them where the draft's best
    token is the teacher's."""

    correct: Tensor
    supervised: Tensor

    def __add__(self, other: "ContextCounts") -> "ContextCounts":
        return ContextCounts(*(a + b for a, b in zip(self, other, strict=True)))

    def acceptance(self) -> list[float | None]:
        """Of each context: the drafted tokens that greedy verification would accept, as in Metrics; None where nothing of
        that context is supervised."""
        accuracy = self.correct.double() / self.supervised.clamp(min=1)  # of integers alone it would be fp32
        lengths = accuracy.cumprod(1).sum(1).tolist()
        return [length if seen else None for length, seen in zip(lengths, self.supervised[:, 0].tolist(), strict=True)]


def contexts_up_to(longest: int) -> list[int]:
    """512, 1024, 2048, ... tokens, the last at least `longest`."""
    found = [SHORTEST]
    while found[-1] < longest:
        found.append(2 * found[-1])
    return found


def count_by_context(stream: Stream, plan: SequencePlan, correct: Tensor, contexts: Sequence[int]) -> ContextCounts:
    """This rank's part of one stream. correct [K, M] bool: of Distilled. contexts [B]: ascending; a position belongs to the
    first one that is not below it, and all must be below the last."""
    context = torch.bucketize(stream.position[plan.teacher], torch.tensor(contexts))
    nothing = torch.zeros(len(contexts), len(correct), dtype=torch.int64)
    return ContextCounts(*(nothing.index_add(0, context, hits.cpu().t().long()) for hits in (correct, plan.supervised)))


def sum_context_counts(counts: ContextCounts, group: ProcessGroup, device: torch.device) -> ContextCounts:
    """The sum over the ranks of `group` (those with different streams or parts of one)."""
    packed = torch.stack(tuple(counts)).to(device)
    dist.all_reduce(packed, group=group)
    return ContextCounts(*packed.cpu())
