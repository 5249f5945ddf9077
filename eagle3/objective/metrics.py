"""What is reported of a batch: loss, accuracies, acceptance, and the acceptance length that they simulate."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from eagle3.objective.distill import StepSums
from eagle3.objective.losses import BatchCounts, LossConfig, loss_value


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


def sum_sums(sums: StepSums, group: ProcessGroup) -> StepSums:
    """The sum over the ranks of `group`, on the CPU."""
    packed: Tensor = torch.stack(tuple(sums))
    dist.all_reduce(packed, group=group)
    return StepSums(*packed.cpu())
