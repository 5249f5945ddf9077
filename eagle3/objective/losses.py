"""The losses of one step as functions of two means, and the weights that make one backward pass exact for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.objective.distill import StepSums

# (mean cross-entropy, mean acceptance rate) of a step, fp64 scalars over the global batch -> the step's loss
StepLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LossConfig:
    """name: kl, lk_alpha or lk_lambda. normalization: counted or tokens (what the cross-entropy is divided by)."""

    name: str = "kl"
    step_decay: float = 0.8
    normalization: str = "counted"
    kl_scale: float = 1.0
    kl_decay: float = 3.0

    @property
    def needs_sums(self) -> bool:
        """True where the gradient's weights depend on the batch's acceptance rate, so a forward pass must come first."""
        return self.name != "kl"

    def step_loss(self) -> StepLoss:
        return {"kl": _kl, "lk_alpha": _lk_alpha, "lk_lambda": self._lk_lambda}[self.name]

    def _lk_lambda(self, cross_entropy: Tensor, acceptance: Tensor) -> Tensor:
        weight = self.kl_scale * torch.exp(-self.kl_decay * acceptance.detach())
        return weight * cross_entropy + (1 - weight) * (1 - acceptance)


def _kl(cross_entropy: Tensor, acceptance: Tensor) -> Tensor:
    return cross_entropy


def _lk_alpha(cross_entropy: Tensor, acceptance: Tensor) -> Tensor:
    return -torch.log(acceptance)


class BatchCounts(NamedTuple):
    """Over the global batch: counted, supervised [K] int64 positions of each step; tokens, the sum of document lengths."""

    counted: Tensor
    supervised: Tensor
    tokens: int

    def __add__(self, other: "BatchCounts") -> "BatchCounts":
        return BatchCounts(*(a + b for a, b in zip(self, other, strict=True)))


class StepWeights(NamedTuple):
    """[K] fp64: what a step's summed cross-entropy and summed acceptance rate are multiplied by in the surrogate loss."""

    cross_entropy: Tensor
    overlap: Tensor


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
    zeros = torch.zeros(len(counts.counted), dtype=torch.float64)
    cross_entropy = (zeros if sums is None else sums.cross_entropy).clone().requires_grad_()
    overlap = (zeros if sums is None else sums.overlap).clone().requires_grad_()
    with torch.enable_grad():
        steps = _step_losses(config, cross_entropy, overlap, counts)
        loss = _decayed(config, steps)
        found = torch.autograd.grad(loss, (cross_entropy, overlap), allow_unused=True)
    return StepWeights(*(zeros if gradient is None else gradient for gradient in found))


def _decayed(config: LossConfig, steps: Tensor) -> Tensor:
    return (config.step_decay ** torch.arange(len(steps), dtype=torch.float64) * steps).sum()


def _step_losses(config: LossConfig, cross_entropy: Tensor, overlap: Tensor, counts: BatchCounts) -> Tensor:
    loss, losses = config.step_loss(), []
    for step, counted in enumerate(counts.counted.tolist()):
        if not counted:
            losses.append(0 * cross_entropy[step])
            continue
        divisor = counts.tokens if config.normalization == "tokens" else counted
        losses.append(loss(cross_entropy[step] / divisor, overlap[step] / counted))
    return torch.stack(losses)
