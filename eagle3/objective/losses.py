"""The losses of one step as functions of two means, and the weights that make one backward pass exact for them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.objective.distill import StepSums, StepWeights


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

    def step_loss(self, cross_entropy: Tensor, acceptance: Tensor) -> Tensor:
        """Of a step, from its mean cross-entropy and mean acceptance rate over the global batch, fp64 scalars."""
        if self.name == "kl":
            return cross_entropy
        if self.name == "lk_alpha":
            return -torch.log(acceptance)
        weight = self.kl_scale * torch.exp(-self.kl_decay * acceptance.detach())
        return weight * cross_entropy + (1 - weight) * (1 - acceptance)


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
