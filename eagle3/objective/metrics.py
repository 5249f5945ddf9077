"""What is reported of a batch: loss, accuracies, acceptance, the acceptance length that they simulate, and that length by
the context of the positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from eagle3.objective.distill import StepSums
from eagle3.objective.losses import BatchCounts, LossConfig, loss_value
from eagle3.parallel.sequence import SequencePlan, Stream

SHORTEST = 512  # tokens; the first context of every list


@dataclass(frozen=True)
class Metrics:
    """Over a global batch. step_losses, accuracy, acceptance_rate: K numbers, one a TTT step.

    accuracy: share of supervised positions where the draft's best token is the teacher's. acceptance_rate: mean
    probability that sampling would accept the draft's token, over counted positions. simulated_acceptance_length: sum
    over k of the product of accuracy[0..k], the drafted tokens that greedy verification would accept.
    """

    loss: float
    step_losses: list[float]
    accuracy: list[float]
    acceptance_rate: list[float]
    simulated_acceptance_length: float
    counted: int
    supervised: int
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def batch_metrics(config: LossConfig, sums: StepSums, counts: BatchCounts) -> Metrics:
    """`sums` and `counts` over the global batch, on the CPU."""
    value = loss_value(config, sums, counts)
    accuracy = sums.correct / counts.supervised.clamp(min=1)
    return Metrics(
        loss=float(value.loss),
        step_losses=value.steps.tolist(),
        accuracy=accuracy.tolist(),
        acceptance_rate=(sums.overlap / counts.counted.clamp(min=1)).tolist(),
        simulated_acceptance_length=float(accuracy.cumprod(0).sum()),
        counted=int(counts.counted[0]),
        supervised=int(counts.supervised[0]),
        tokens=counts.tokens,
    )


def sum_counts(counts: BatchCounts, group: ProcessGroup, device: torch.device) -> BatchCounts:
    """The sum over the ranks of `group` (those with different streams or parts of one)."""
    packed = torch.cat((counts.counted, counts.supervised, torch.tensor([counts.tokens]))).to(device)
    dist.all_reduce(packed, group=group)
    packed, steps = packed.cpu(), len(counts.counted)
    return BatchCounts(packed[:steps], packed[steps : 2 * steps], int(packed[-1]))


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
    doublings = ((longest - 1) // SHORTEST).bit_length() if longest > SHORTEST else 0
    return [SHORTEST * 2**doubling for doubling in range(doublings + 1)]


def count_by_context(stream: Stream, plan: SequencePlan, correct: Tensor, contexts: Sequence[int]) -> ContextCounts:
    """This rank's part of one stream. correct [K, M] bool: of Distilled. contexts [B]: ascending; a position belongs to the
    first one that is not below it, and all must be below the last."""
    context = torch.bucketize(stream.position[plan.teacher], torch.tensor(contexts))
    nothing = torch.zeros(len(contexts), len(correct), dtype=torch.int64)
    return ContextCounts(*(nothing.index_add(0, context, hits.cpu().t().long()) for hits in (correct, plan.supervised)))


Sums = TypeVar("Sums", StepSums, ContextCounts)


def sum_sums(sums: Sums, group: ProcessGroup, device: torch.device | None = None) -> Sums:
    """The sum over the ranks of `group`, on the CPU. device: where the group exchanges tensors, None for where they are."""
    packed = torch.stack(tuple(sums)).to(device)
    dist.all_reduce(packed, group=group)
    return type(sums)(*packed.cpu())
