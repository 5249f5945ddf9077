"""What a global batch comes to: its loss, with the weights that make one backward pass exact for it; accuracies,
acceptance, the acceptance length that they simulate, and that length by the context of the positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, assert_never

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from eagle3.objective.distill import StepSums, StepWeights
from eagle3.parallel.sequence import SequencePlan, Stream

SHORTEST = 512  # tokens; the first context of every list


@dataclass(frozen=True)
class LossConfig:
    """normalization: what the cross-entropy is divided by."""

    name: Literal["kl", "lk_alpha", "lk_lambda"] = "kl"
    step_decay: float = 0.8
    normalization: Literal["counted", "tokens"] = "counted"
    kl_scale: float = 1.0
    kl_decay: float = 3.0

    @property
    def needs_sums(self) -> bool:
        """True where the gradient's weights depend on the batch's acceptance rate, so a forward pass must come first."""
        return self.name != "kl"

    def step_loss(self, cross_entropy: Tensor, acceptance: Tensor) -> Tensor:
        """Of a step, from its mean cross-entropy and mean acceptance rate over the global batch, fp64 scalars."""
        match self.name:
            case "kl":
                return cross_entropy
            case "lk_alpha":
                return -torch.log(acceptance)
            case "lk_lambda":
                weight = self.kl_scale * torch.exp(-self.kl_decay * acceptance.detach())
                return weight * cross_entropy + (1 - weight) * (1 - acceptance)
            case unknown:
                assert_never(unknown)


class BatchCounts(NamedTuple):
    """Over the global batch: counted, supervised [K] int64 positions of each step; tokens, the sum of document lengths."""

    counted: Tensor
    supervised: Tensor
    tokens: int

    def __add__(self, other: "BatchCounts") -> "BatchCounts":
        return BatchCounts(*(a + b for a, b in zip(self, other, strict=True)))


class LossValue(NamedTuple):
    """loss: sum over k of step_decay**k * steps[k]; steps [K] fp64."""

    loss: Tensor
    steps: Tensor


def loss_value(config: LossConfig, sums: StepSums, counts: BatchCounts) -> LossValue:
    """The definition's loss from the sums over the whole global batch. A step without counted positions gives 0."""
    steps = _step_losses(config, sums.cross_entropy, sums.overlap, counts)
    return LossValue(_decayed(config, steps), steps)


def step_weights(config: LossConfig, counts: BatchCounts, sums: StepSums | None) -> StepWeights:
    """Derivatives of the loss in the batch's sums.

    A rank that backpropagates sum_k weights.cross_entropy[k] * CE_k + weights.overlap[k] * A_k over its own positions
    contributes its exact share of the global loss's gradient (chain rule), so nothing but these 2K numbers has to
    cross ranks. `sums` over the global batch are needed where `config.needs_sums`.
    """
    assert sums is not None or not config.needs_sums
    at = (
        torch.zeros(2, len(counts.counted), dtype=torch.float64) if sums is None else (sums.cross_entropy, sums.overlap)
    )
    leaves = [part.clone().requires_grad_() for part in at]
    with torch.enable_grad():
        loss = _decayed(config, _step_losses(config, *leaves, counts))
        return StepWeights(*torch.autograd.grad(loss, leaves, materialize_grads=True))


def _decayed(config: LossConfig, steps: Tensor) -> Tensor:
    return (config.step_decay ** torch.arange(len(steps), dtype=torch.float64) * steps).sum()


def _step_losses(config: LossConfig, cross_entropy: Tensor, overlap: Tensor, counts: BatchCounts) -> Tensor:
    losses = []
    for summed, accepted, counted in zip(cross_entropy, overlap, counts.counted.tolist(), strict=True):
        divisor = counts.tokens if config.normalization == "tokens" else counted
        losses.append(config.step_loss(summed / divisor, accepted / counted) if counted else 0 * summed)
    return torch.stack(losses)


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
