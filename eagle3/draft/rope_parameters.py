"""The parameters of a draft's rope, as transformers names them: which there are, how config.json spells them, and what
is refused."""

import math
from itertools import chain
from typing import Any

from eagle3.errors import UserError, refuse, shown
from eagle3.parsing import is_number

# The required and the optional keys of each rope type.
ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "attn_factor", "truncate"),
    ),
}
_ROPE_NUMBERS = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "attn_factor", "partial_rotary_factor"),
)


def rope_parameters(values: dict[str, Any]) -> dict[str, Any]:
    """Reads the rope parameters from either spelling: `rope_parameters`, or `rope_theta` beside `rope_scaling` (in
    which the type may be called `type`)."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"config.json: the rope parameters are {shown(rope)}, not a dictionary; fix the file")
    rope, theta = dict(rope), values.get("rope_theta") or 10000.0
    rope.setdefault("rope_type", rope.pop("type", None) or "default")
    rope.setdefault("rope_theta", float(theta) if is_number(theta) else theta)
    if rope["rope_type"] == "yarn" and values.get("max_position_embeddings"):  # as transformers and SGLang do
        rope.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    return rope


def complete_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters with their defaults, and with YaRN's attention factor under every name that readers know. Raises
    UserError for a rope that no draft can have."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, **parameters}
    kind = rope["rope_type"]
    nested = [name for name, value in rope.items() if isinstance(value, dict)]
    numbers = {name: rope[name] for name in _ROPE_NUMBERS if rope.get(name) is not None}
    refuse(
        "draft config",
        (
            nested,
            f"rope_parameters differ by layer type ({', '.join(nested)}); give the draft's one layer one of them, with "
            "model.draft.rope_parameters",
        ),
        *(
            (
                not (is_number(value) and (value > 0 or value == 0 and name.startswith("mscale"))),
                f"{name} of its rope is {shown(value)}, not a positive number; fix rope_parameters",
            )
            for name, value in numbers.items()
        ),
        (
            kind not in [*ROPE_TYPES],
            f"rope_type {shown(kind)} is not one that a draft can have ({', '.join(ROPE_TYPES)}); give it one, for "
            "example the target's without its scaling: "
            f"model.draft.rope_parameters='{{rope_type: default, rope_theta: {rope['rope_theta']}}}'",
        ),
    )
    refuse(
        "draft config",
        *(
            (rope.get(key) is None, f"rope_type {kind!r} needs {key}; add it to rope_parameters")
            for key in ROPE_TYPES[kind][0]
        ),
        (
            rope.get("partial_rotary_factor") not in (None, 1, 1.0),
            "partial_rotary_factor is not 1; serving engines rotate the whole head of an EAGLE3 "
            "draft: set model.draft.rope_parameters without it",
        ),
    )
    return _with_attention_factor(rope) if kind == "yarn" else rope


def check_rope_keys(rope: dict[str, Any]) -> dict[str, Any]:
    """Returns a recipe's rope parameters unchanged. Raises ValueError for a type that a draft cannot have, and for a
    key that the type ignores. (A target's own parameters may have more keys: see rope_parameters.)"""
    kind = rope.get("rope_type", "default")
    if "type" in rope:
        raise ValueError("type is not a key here; write rope_type")
    if kind not in [*ROPE_TYPES]:
        raise ValueError(f"rope_type {shown(kind)} is not supported; use one of {', '.join(ROPE_TYPES)}")
    own = ("rope_type", "rope_theta", *chain(*ROPE_TYPES[kind]))
    if unknown := [name for name in rope if name not in own]:
        raise ValueError(f"{shown(unknown[0])} is not a key of rope_type {kind}, which takes {', '.join(own)}")
    return rope


def yarn_reach(rope: dict[str, Any]) -> int:
    """The positions to which YaRN stretches a rope; 0 for another rope. Readers take max_position_embeddings for scaled
    ones, and vLLM 0.33.0 serves no longer context (config/model.py)."""
    factors = rope.get("factor"), rope.get("original_max_position_embeddings")
    return int(math.prod(factors)) if rope.get("rope_type") == "yarn" and all(map(is_number, factors)) else 0


def _with_attention_factor(rope: dict[str, Any]) -> dict[str, Any]:
    """Writes YaRN's attention factor in a form from which every reader gets the same number. transformers reads
    attention_factor, or mscale and mscale_all_dim. Engines multiply their own default, 0.1 ln(factor) + 1, by
    attn_factor, and may not know the other keys."""
    rope = dict(rope)
    one, all_dim, multiplier = (rope.pop(name, None) for name in ("mscale", "mscale_all_dim", "attn_factor"))
    stretch = 0.1 * math.log(max(rope["factor"], 1))
    if rope.get("attention_factor") is None:
        if one and all_dim:
            rope["attention_factor"] = (one * stretch + 1) / (all_dim * stretch + 1)
        elif multiplier is not None:
            rope["attention_factor"] = multiplier * (stretch + 1)
        else:
            return rope
    return rope | {"attn_factor": rope["attention_factor"] / (stretch + 1)}
