"""The DeepSpeed engine: its file filled from the recipe, its groups from the topology, its gradients read back."""

import inspect
import json
import logging
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import constants
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from pydantic import ValidationError
from torch import Tensor

from eagle3.draft.interchange import is_cut
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import SharedUserError
from eagle3.objective.model import DraftObjective
from eagle3.parallel.sizes import stream_samples
from eagle3.parallel.topology import DeepSpeedGroups, Topology
from eagle3.parsing import parse_json
from eagle3.recipe import Training

# Sections and keys that are filled here or refused by value, and those that DeepSpeed alone reads.
OURS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("bf16", "optimizer", "zero_optimization", "scheduler", "fp16", "sequence_parallel_size"),
)
DEEPSPEEDS = (
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc", "timers"),
    *("comms_logger", "flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet", "checkpoint", "data_types"),
    *("communication_data_type", "prescale_gradients", "gradient_predivide_factor", "zero_allow_untested_optimizer"),
)


def deepspeed_config(path: Path, training: Training, data_ranks: int) -> dict[str, Any]:
    """Read a DeepSpeed file and fill what is "auto" from the recipe.

    Raises UserError where the file and the recipe disagree, or the file asks for what this project does not do.
    """
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SharedUserError(f"{path}: {error.strerror}; pass --deepspeed ds_configs/zero2.json") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SharedUserError(f"{path}: not valid JSON ({error}); mend the file") from error
    if not isinstance(config, dict):
        raise SharedUserError(f"{path}: holds {type(config).__name__}, not sections; compare ds_configs/zero2.json")
    wanted = {
        "train_batch_size": training.global_batch_size,
        "train_micro_batch_size_per_gpu": stream_samples(training.global_batch_size, data_ranks, training.accumulation),
        "gradient_accumulation_steps": training.accumulation,
        "gradient_clipping": training.gradient_clipping,
        "bf16.enabled": training.dtype == "bfloat16",
        "bf16.check_grad_overflow": True,
        "optimizer.params.lr": training.learning_rate,
        "optimizer.params.betas": list(training.betas),
        "optimizer.params.weight_decay": training.weight_decay,
    }
    for key, value in wanted.items():
        _fill(path, config, key, value)
    _refuse_unsupported(path, config)
    config["optimizer"].setdefault("type", "AdamW")
    config["optimizer"]["params"].setdefault("torch_adam", True)
    config.setdefault("steps_per_print", 2**31)
    return config


def start_engine(
    objective: DraftObjective,
    topology: Topology,
    config: dict[str, Any],
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
) -> DeepSpeedEngine:
    """Wrap the objective in DeepSpeed (ZeRO, AdamW) with this topology's groups. `schedule` makes the rate's schedule."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    objective.universal_checkpoint_info = universal_checkpoint_info(objective.draft, "draft.")
    engine, *_ = deepspeed.initialize(
        model=objective,
        model_parameters=[parameter for parameter in objective.parameters() if parameter.requires_grad],
        config=config,
        mpu=DeepSpeedGroups(topology),
        lr_scheduler=schedule,
    )
    return engine


def gradient_scale(data_ranks: int, accumulation: int) -> int:
    """What a rank's surrogate loss is multiplied by: ZeRO-2 averages over data ranks and the engine divides by the
    accumulation steps, while the loss's weights already hold the counts of the whole batch. (Sums over sequence ranks
    are sums.)"""
    return data_ranks * accumulation


def universal_checkpoint_info(draft: Eagle3Draft, prefix: str) -> dict[str, Any]:
    """How DeepSpeed's universal checkpoints join the parts that tensor-parallel ranks hold of the trained parameters, whose
    names it sees behind `prefix`."""
    halves, rows, whole = [], [], []
    for name, parameter in _trained(draft):
        pattern = f"^{re.escape(prefix + name)}$"
        if not is_cut(parameter):
            whole.append(pattern)
        elif parameter.partition_stride == 2:  # [gate; up], each cut by itself
            halves.append(pattern)
        elif parameter.partition_dim == 1:
            rows.append(pattern)
    return {
        constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        # equal on all ranks, up to the rounding of a GPU's reductions; "replicated" would be refused for that
        constants.PARAMETER_TO_AVERAGE_PATTERNS: whole,
        constants.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: rows,
        constants.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0: halves,
    }


def full_gradients(draft: Eagle3Draft) -> dict[str, Tensor]:
    """The reduced gradients that the optimiser will see, whole and in fp32, by parameter name. Every rank must call it."""
    return {name: safe_get_full_grad(parameter) for name, parameter in _trained(draft)}


def full_weights(draft: Eagle3Draft) -> dict[str, Tensor]:
    """The optimiser's fp32 weights, whole, by parameter name. Every rank must call it."""
    return {name: safe_get_full_fp32_param(parameter) for name, parameter in _trained(draft)}


def _trained(draft: Eagle3Draft) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for name, parameter in draft.named_parameters() if parameter.requires_grad]


def _fill(path: Path, config: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        config = config.setdefault(section, {})
        if not isinstance(config, dict):
            raise SharedUserError(f"{path}: {section}: {config!r} is not a section; compare ds_configs/zero2.json")
    found = config.get(name, "auto")
    if found != "auto" and found != value:
        raise SharedUserError(
            f'{path}: {key} is {found!r} but the recipe says {value!r}; set it to "auto" or make them agree'
        )
    config[name] = value


def _refuse_unsupported(path: Path, config: dict[str, Any]) -> None:
    for section in ("zero_optimization", "fp16", "scheduler"):
        if not isinstance(config.get(section, {}), dict):
            raise SharedUserError(
                f"{path}: {section}: {config[section]!r} is not a section; compare ds_configs/zero2.json"
            )
    _refuse_unknown(path, "", config, (*OURS, *DEEPSPEEDS), "this project uses nothing of that name")
    zero = config.get("zero_optimization", {})
    known = [field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()]
    _refuse_unknown(path, "zero_optimization.", zero, known, "ZeRO has no such key in this DeepSpeed")
    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("zero_optimization", *first["loc"][:1])))
        raise SharedUserError(f"{path}: {key}: {first['msg']:.300}; see DeepSpeed's documentation") from error
    known = [*inspect.signature(torch.optim.AdamW).parameters, "torch_adam", "adam_w_mode"]
    _refuse_unknown(path, "optimizer.params.", config["optimizer"]["params"], known, "AdamW has no such parameter")
    stage = zero.get("stage", 0)
    if stage not in (1, 2):
        raise SharedUserError(
            f"{path}: zero_optimization.stage is {stage}; this project uses 1 or 2, the draft is small"
        )
    if config["optimizer"].get("type", "AdamW") != "AdamW":
        raise SharedUserError(f"{path}: optimizer.type is {config['optimizer']['type']!r}; use AdamW")
    for section in ("scheduler", "fp16", "sequence_parallel_size"):
        if config.get(section) and (section != "fp16" or config["fp16"].get("enabled")):
            raise SharedUserError(f"{path}: {section} is not used here; remove it, the recipe's training section rules")


def _refuse_unknown(path: Path, section: str, values: dict[str, Any], known: Sequence[str], what: str) -> None:
    """Raises UserError for a key of the section that is none of the known ones; DeepSpeed passes over most of them."""
    for key in values:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            asked = f"did you mean {section}{near[0]}?" if near else "remove it"
            raise SharedUserError(f"{path}: {section}{key:.100}: {what}; {asked}")
