"""The learning rate over a run: a linear warm-up, then a cosine."""

import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(steps: int, warmup_fraction: float, final_fraction: float) -> Callable[[int], float]:
    """Share of the learning rate for step 0..steps-1: rises over the first warmup_fraction of the steps (never from 0
    itself, which would waste a step), then falls as a cosine to final_fraction."""
    warmup = round(steps * warmup_fraction)

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))

    return share


def scheduler(steps: int, warmup_fraction: float, final_fraction: float) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """What DeepSpeed takes as lr_scheduler: it steps and checkpoints it."""
    return lambda optimizer: LambdaLR(optimizer, warmup_cosine(steps, warmup_fraction, final_fraction))
