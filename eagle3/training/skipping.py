"""Optimiser steps that are not taken: a gradient that is not finite, or far too large, would spoil weights and moments."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import is_invalid_grad_norm
from torch import Tensor


class Taken(NamedTuple):
    """How an optimiser step went. norm: of the gradients before clipping, nan where it is not finite. skipped: nothing was
    changed."""

    norm: float
    skipped: bool


class NormLimit:
    """Makes an engine skip a step whose gradient norm is above `limit`, as DeepSpeed does where it is not finite."""

    def __init__(self, engine: DeepSpeedEngine, limit: float) -> None:
        self.optimizer, self.limit, self.found = engine.optimizer, limit, math.nan
        self._norm = engine.optimizer.scaled_global_norm
        engine.optimizer.scaled_global_norm = self._limited  # which its `step` asks for

    def taken(self) -> Taken:
        """Of the step that the engine has just made."""
        norm, self.found = self.found, math.nan
        return Taken(norm, self.optimizer.overflow)

    def _limited(self, norm_type: int = 2) -> Tensor | float:
        norm = self._norm(norm_type)
        self.found = math.nan if is_invalid_grad_norm(norm) else float(norm)
        return norm if self.found <= self.limit else math.inf


def describe_skipped(step: int, taken: Taken, limit: float, samples: Sequence[str]) -> str:
    """For people. limit: above which steps are skipped; samples: ids of the step's."""
    found = f"{taken.norm:.4g}, above training.skip_above_norm {limit:g}" if math.isfinite(taken.norm) else "not finite"
    return f"step {step}, skipped for its gradient norm, {found}, with the samples {', '.join(samples)}"
