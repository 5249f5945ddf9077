"""Muon, the optimiser of the demo target's matrices: more is learnt in the few minutes that a quickstart has."""

import torch


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024, github.com/KellerJordan/Muon) in float32, for matrices only, without weight decay.

    torch.optim.Muon orthogonalises in bfloat16, which a CPU without bfloat16 units does so slowly that a whole step of
    a model this small took 1.1 instead of 0.65 core-seconds, at the same loss.
    """

    def __init__(self, matrices: list[torch.Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                average = self.state[weight].setdefault("average", torch.zeros_like(weight))
                average.lerp_(weight.grad, 1 - group["momentum"])
                update = _orthogonalised(weight.grad.lerp(average, group["momentum"]))
                rows, columns = weight.shape
                weight.sub_(update, alpha=group["lr"] * max(1, rows / columns) ** 0.5)


def _orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """`matrix` with its singular values moved to about 1: five quintic Newton-Schulz steps, coefficients of Muon."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (2.0315 * gram @ gram - 4.7750 * gram) @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T
