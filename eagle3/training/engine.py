"""The DeepSpeed engine: passes it the topology's groups and a learning-rate schedule, and reads back whole gradients
and weights."""

import logging
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import constants
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from eagle3.draft.interchange import is_cut
from eagle3.draft.model import Eagle3Draft
from eagle3.objective.model import DraftObjective
from eagle3.parallel.topology import DeepSpeedGroups, Topology


def start_engine(
    objective: DraftObjective,
    topology: Topology,
    config: dict[str, Any],
    schedule: Callable[[int], float] | None = None,
) -> DeepSpeedEngine:
    """Wraps the objective in DeepSpeed (ZeRO, AdamW) with this topology's groups. schedule: the learning rate's factor
    in each step; DeepSpeed steps it and stores it in checkpoints."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    objective.universal_checkpoint_info = _universal_checkpoint_info(objective.draft)
    engine, *_ = deepspeed.initialize(
        model=objective,
        model_parameters=[parameter for parameter in objective.parameters() if parameter.requires_grad],
        config=config,
        mpu=DeepSpeedGroups(topology),
        lr_scheduler=partial(LambdaLR, lr_lambda=schedule) if schedule else None,
    )
    return engine


def warmup_cosine(steps: int, warmup_fraction: float, final_fraction: float) -> Callable[[int], float]:
    """Returns the function that maps a step, 0..steps-1, to the learning rate's factor. The factor rises over the first
    `warmup_fraction` of the steps, starting above 0 so as not to waste a step, and then falls along a cosine to
    `final_fraction`."""
    warmup = round(steps * warmup_fraction)

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))

    return share


def gradient_scale(data_ranks: int, accumulation: int) -> int:
    """The factor for a rank's surrogate loss. The factor undoes two divisions: ZeRO-2 averages over data ranks, and the
    engine divides by the accumulation steps, but the loss's weights already account for the whole batch. (Over sequence
    ranks, gradients are summed.)"""
    return data_ranks * accumulation


def _universal_checkpoint_info(draft: Eagle3Draft) -> dict[str, Any]:
    """Tells DeepSpeed's universal checkpoints how to join the tensor-parallel parts of the trained parameters."""
    parameters = {f"^{re.escape('draft.' + name)}$": parameter for name, parameter in _trained(draft)}
    sharded = {pattern: parameter for pattern, parameter in parameters.items() if is_cut(parameter)}
    # [gate; up]: each half is cut by itself
    halves = [pattern for pattern, parameter in sharded.items() if parameter.partition_stride == 2]
    rows = [pattern for pattern, parameter in sharded.items() if parameter.partition_dim == 1 and pattern not in halves]
    return {
        constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        # Equal on all ranks up to rounding in a GPU's reductions; "replicated" would reject even such differences.
        constants.PARAMETER_TO_AVERAGE_PATTERNS: [pattern for pattern in parameters if pattern not in sharded],
        constants.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: rows,
        constants.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0: halves,
    }


def full_gradients(draft: Eagle3Draft) -> dict[str, Tensor]:
    """The reduced gradients that the optimiser will see, whole and in fp32, by parameter name. Collective."""
    return {name: safe_get_full_grad(parameter) for name, parameter in _trained(draft)}


def full_weights(draft: Eagle3Draft) -> dict[str, Tensor]:
    """The optimiser's fp32 weights, whole, by parameter name. Collective."""
    return {name: safe_get_full_fp32_param(parameter) for name, parameter in _trained(draft)}


def _trained(draft: Eagle3Draft) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for name, parameter in draft.named_parameters() if parameter.requires_grad]
