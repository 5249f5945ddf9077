"""Reads the DeepSpeed file, fills it in from the recipe, and refuses it if the two disagree. Imports DeepSpeed only to
check the keys that DeepSpeed reads."""

import inspect
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial, reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eagle3.errors import SharedUserError
from eagle3.parallel.sizes import stream_samples
from eagle3.parsing import read_json_object
from eagle3.recipe.schema import Training

ZERO2 = Path(__file__).parents[2] / "ds_configs" / "zero2.json"
# Sections and keys that are filled in or checked here, and those that only DeepSpeed reads.
OURS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("bf16", "optimizer", "zero_optimization", "scheduler", "fp16", "sequence_parallel_size"),
)
DEEPSPEEDS = (
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc", "timers"),
    *("comms_logger", "flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet", "checkpoint", "data_types"),
    *("communication_data_type", "prescale_gradients", "gradient_predivide_factor", "zero_allow_untested_optimizer"),
)


def read_deepspeed_file(path: Path, training: Training, data_ranks: int) -> dict[str, Any]:
    """Reads a DeepSpeed file, and fills in its "auto" values from the recipe.

    Raises UserError if the file and the recipe disagree, or if the file asks for something that is not supported.
    """
    remedy = f"pass --deepspeed {ZERO2}"
    config = read_json_object(path, remedy, f"fix the file, or {remedy}", SharedUserError)
    required = {
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
    for key, value in required.items():
        *sections, name = key.split(".")
        section = reduce(partial(_section, path), sections, config)
        if section.get(name, "auto") not in ("auto", value):
            raise SharedUserError(
                f'{path}: {key} is {section[name]!r} but the recipe says {value!r}; set it to "auto" or make them agree'
            )
        section[name] = value
    _refuse_unsupported(path, config)
    config["optimizer"]["params"].setdefault("torch_adam", True)
    config.setdefault("steps_per_print", 2**31)
    return config


def deepspeed_config(path: Path, training: Training, data_ranks: int) -> dict[str, Any]:
    """Reads a DeepSpeed config file and fills it in from the recipe. Raises UserError if the two disagree, or if
    DeepSpeed or torch does not know a key of ZeRO or AdamW."""
    import torch
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = read_deepspeed_file(path, training, data_ranks)
    try:
        DeepSpeedZeroConfig(**config["zero_optimization"])
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("zero_optimization", *first["loc"][:1])))
        raise SharedUserError(f"{path}: {key}: {first['msg']:.300}; see DeepSpeed's documentation") from error
    known = [*inspect.signature(torch.optim.AdamW).parameters, "torch_adam", "adam_w_mode"]
    _refuse_unknown(path, "optimizer.params.", config["optimizer"]["params"], known, "AdamW has no such parameter")
    return config


def _section(path: Path, config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.setdefault(name, {})
    if not isinstance(section, dict):
        raise SharedUserError(f"{path}: {name}: {section!r} is not a section; compare ds_configs/zero2.json")
    return section


def _refuse_unsupported(path: Path, config: dict[str, Any]) -> None:
    _refuse_unknown(path, "", config, (*OURS, *DEEPSPEEDS), "this project uses nothing of that name")
    zero = _section(path, config, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (1, 2):
        raise SharedUserError(
            f"{path}: zero_optimization.stage is {stage}; this project uses 1 or 2, the draft is small"
        )
    if config["optimizer"].setdefault("type", "AdamW") != "AdamW":
        raise SharedUserError(f"{path}: optimizer.type is {config['optimizer']['type']!r}; use AdamW")
    unused = {key: config.get(key) for key in ("scheduler", "fp16", "sequence_parallel_size")}
    unused |= {f"zero_optimization.{key}": zero.get(key) for key in ("offload_optimizer", "offload_param")}
    for key, value in unused.items():
        off = isinstance(value, dict) and (value == {"enabled": False} or value.get("device") == "none")
        if value and not off:
            raise SharedUserError(f"{path}: {key} is not used here; remove it")


def _refuse_unknown(path: Path, section: str, values: dict[str, Any], known: Sequence[str], what: str) -> None:
    """Raises UserError for an unknown key in the section. DeepSpeed itself ignores most unknown keys."""
    for key in values:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            remedy = f"did you mean {section}{near[0]}?" if near else "remove it"
            raise SharedUserError(f"{path}: {section}{key:.100}: {what}; {remedy}")
