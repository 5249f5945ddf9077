"""The numbers of a global batch: its loss, with the weights that make one backward pass exact for it; accuracies and
acceptance rates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar, assert_never

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3.objective.chains import ChainCounts
from eagle3.objective.distill import StepSums, StepWeights
from eagle3.parallel.topology import Topology
from eagle3.tensors import send


@dataclass(frozen=True)
class LossConfig:
    """Which loss, and its constants."""

    name: Literal["kl", "lk_alpha", "lk_lambda"] = "kl"
    step_decay: float = 0.8  # TTT step k counts step_decay**k
    # What the cross-entropy is divided by: counted positions or tokens. `samples`: each position counts as its share in
    # the mean over its sample's, and the sum is divided by the samples.
    normalization: Literal["counted", "tokens", "samples"] = "counted"
    kl_scale: float = 1.0  # of lk_lambda
    kl_decay: float = 3.0  # of lk_lambda

    @property
    def needs_sums(self) -> bool:
        """True if the gradient's weights depend on the batch's acceptance rate, so that a forward pass has to come
        first."""
        return self.name in ("lk_alpha", "lk_lambda")

    def step_loss(self, cross_entropy: Tensor, acceptance: Tensor) -> Tensor:
        """The loss of one TTT step, given its mean cross-entropy and mean acceptance rate over the global batch (fp64
        scalars)."""
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
    """Positions and tokens of the global batch, [K] int64 each, on the CPU."""

    counted: Tensor  # supervised positions of each step whose teacher token is in the draft vocabulary
    supervised: Tensor  # supervised positions of each step
    samples: Tensor  # samples with supervised positions in each step
    tokens: Tensor  # sum of the document lengths, for each step the same

    def positions(self, config: LossConfig) -> Tensor:
        """[K]: what a sum over positions is divided by for their mean."""
        return self.samples if config.normalization == "samples" else self.counted


def step_weights(config: LossConfig, counts: BatchCounts, sums: StepSums | None) -> StepWeights:
    """Derivatives of the loss with respect to the batch's sums.

    By the chain rule, a rank that backpropagates sum_k weights.cross_entropy[k] * CE_k + weights.overlap[k] * A_k over
    its own positions contributes exactly its share of the global loss's gradient, so only these 2K numbers have to
    cross ranks. `sums`, over the global batch, is required if `config.needs_sums`.
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
    """[K]; 0 for a step without counted positions."""
    divisors = getattr(counts, config.normalization).tolist(), counts.positions(config).tolist()
    return torch.stack(
        [
            config.step_loss(summed / divisor, accepted / count) if count else 0 * summed
            for summed, accepted, divisor, count in zip(cross_entropy, overlap, *divisors, strict=True)
        ]
    )


@dataclass(frozen=True)
class Metrics:
    """Metrics of a global batch; lists have K entries, one per TTT step."""

    loss: float  # sum over k of step_decay**k * step_losses[k]
    step_losses: list[float]
    accuracy: list[float]  # share of supervised positions where the draft's best token is the teacher's
    acceptance_rate: list[float]  # mean probability, over counted positions, that sampling accepts the draft's token
    counted: int
    supervised: int
    tokens: int


def batch_metrics(config: LossConfig, sums: StepSums, counts: BatchCounts) -> Metrics:
    """Metrics from `sums` and `counts` over the global batch, both on the CPU."""
    steps = _step_losses(config, sums.cross_entropy, sums.overlap, counts)
    return Metrics(
        loss=float(_decayed(config, steps)),
        step_losses=steps.tolist(),
        accuracy=(sums.correct / counts.supervised.clamp(min=1)).tolist(),
        acceptance_rate=(sums.overlap / counts.positions(config).clamp(min=1)).tolist(),
        counted=int(counts.counted[0]),
        supervised=int(counts.supervised[0]),
        tokens=int(counts.tokens[0]),
    )


Summed = TypeVar("Summed", BatchCounts, StepSums, ChainCounts)


def batch_sum(parts: Sequence[Summed], topology: Topology) -> Summed:
    """The sum over this rank's streams and over the ranks that have others or other parts of them, on the CPU."""
    packed = send(sum(torch.stack(tuple(each)) for each in parts), topology.device)
    dist.all_reduce(packed, group=topology.batch)
    return type(parts[0])(*packed.cpu())
