"""Derives the draft's shape, and the layers that it reads, from its target's config, for any model family. Each rule
names the config keys that it reads."""

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

from eagle3.draft.config import DraftConfig
from eagle3.draft.rope_parameters import rope_parameters, yarn_reach
from eagle3.errors import UserError

# How configs call the number of experts that a token uses.
ACTIVE_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk")
# The head width and the number of key/value heads for which serving kernels are made, used if the target's heads do not
# suit a draft; and the widest heads that those kernels take.
HEAD_DIM, WIDEST_HEAD = 128, 256
KEY_VALUE_HEADS = 8
PARTIAL_OR_IMAGES = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")  # keys that no draft's rope has
HEADS = {"num_attention_heads", "num_key_value_heads", "head_dim"}
# Types of targets whose published drafts, and therefore SGLang (minimax_m3_vl.py), take the layers after the usual.
ONE_LATER = frozenset(("minimax_m3_vl", "minimax_m3_vl_text"))


def derive_draft(
    target: PretrainedConfig, *, draft_vocab_size: int, aux_layers: tuple[int, ...], **changes: Any
) -> DraftConfig:
    """Derives the config of a draft for a target with this (text) config.

    Sizes, eps, context and rope are the target's, because the draft reads the target's hidden states at the target's
    positions. For targets that are not dense models with ordinary heads, see `_heads`, `_intermediate_size` and
    `derived_rope`. Raises UserError, with the recipe key to set, if the config lacks something that the draft needs.

    changes: fields of DraftConfig that override the derived values; None keeps the derived value.
    """
    overrides = {name: value for name, value in changes.items() if value is not None}
    target = _full_attention_layer(target)
    values = {
        "target_hidden_size": _of(target, "hidden_size"),
        "vocab_size": _of(target, "vocab_size"),
        "rms_norm_eps": getattr(target, "rms_norm_eps", 1e-6),
        "draft_vocab_size": draft_vocab_size,
        "aux_layers": aux_layers,
        "token_ids": {name: getattr(target, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        **({} if overrides.keys() >= HEADS else _heads(target)),
        **overrides,
    }
    values.setdefault("hidden_size", values["target_hidden_size"])
    values["rope_parameters"] = values.get("rope_parameters") or derived_rope(target)
    rules = {
        "intermediate_size": _intermediate_size,
        "max_position_embeddings": lambda its: max(
            _of(its, "max_position_embeddings"), yarn_reach(values["rope_parameters"])
        ),
    }
    return DraftConfig(**values, **{name: rule(target) for name, rule in rules.items() if name not in values})


def _full_attention_layer(target: PretrainedConfig) -> PretrainedConfig:
    """The target's config or, if its layers have different sizes (Gemma 4), the config of the last layer with full
    attention."""
    if not getattr(target, "per_layer_attributes", None):
        return target
    kinds = getattr(target, "layer_types", None) or []
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    return target.per_layer_config[full[-1] if full else -1]


def derived_rope(target: PretrainedConfig) -> dict[str, Any]:
    """The target's rope, including the llama3 or YaRN factors that let it reach long contexts.

    If the rope differs by layer type, this is the one for full attention, since the draft attends to everything. A
    partial rotation (in Gemma 4's words a proportional one) becomes a full one with the same base over more pairs,
    because that is how serving engines rotate drafts. Positions of images (mrope) are left out: those of text are the
    plain ones.
    """
    values = target.to_dict()
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if isinstance(rope.get("full_attention"), dict):
        values = {"rope_parameters": rope["full_attention"]}
    draft_rope = rope_parameters(values)
    for key in PARTIAL_OR_IMAGES:
        draft_rope.pop(key, None)
    if draft_rope["rope_type"] == "proportional" and draft_rope.get("factor", 1.0) == 1.0:
        draft_rope = {key: value for key, value in draft_rope.items() if key != "factor"} | {"rope_type": "default"}
    return draft_rope


def _heads(target: PretrainedConfig) -> dict[str, int]:
    """num_attention_heads, num_key_value_heads and head_dim. Some targets have heads that no draft can have: latent
    attention (kv_lora_rank; three head widths, and a key for each head), or a number of heads that does not divide the
    hidden size (GLM-4.5). Their drafts get hidden_size / 128 heads. Heads too wide for serving kernels (Gemma 4) become
    narrower."""
    hidden = _of(target, "hidden_size")
    wide = (getattr(target, "head_dim", None) or 0) > WIDEST_HEAD
    latent = getattr(target, "kv_lora_rank", None)
    if latent or (hidden % _of(target, "num_attention_heads") and not wide):
        heads = max(hidden // HEAD_DIM, 1)
        keys = KEY_VALUE_HEADS if heads % KEY_VALUE_HEADS == 0 else heads
        return {"num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": min(HEAD_DIM, hidden)}
    heads = target.num_attention_heads
    own_keys, own_width = getattr(target, "num_key_value_heads", None), getattr(target, "head_dim", None)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads if own_keys is None else _of(target, "num_key_value_heads"),
        "head_dim": HEAD_DIM if wide else hidden // heads if own_width is None else _of(target, "head_dim"),
    }


def active_experts(target: PretrainedConfig) -> int | None:
    """The number of experts that a token uses in a layer, under any of the names that configs have for it."""
    return next((number for name in ACTIVE_EXPERTS if (number := getattr(target, name, None))), None)


def _intermediate_size(target: PretrainedConfig) -> int:
    """The width of the widest MLP that a token passes through in the target: a dense layer (in Llama 4,
    intermediate_size_mlp), or all experts that a token uses in a layer together. An expert's width is
    moe_intermediate_size or, without that key, intermediate_size."""
    dense = getattr(target, "intermediate_size_mlp", None)
    experts = getattr(target, "num_local_experts", None) or getattr(target, "num_experts", None)
    active = active_experts(target) or 1
    if getattr(target, "moe_intermediate_size", None):
        return max(active * _of(target, "moe_intermediate_size"), getattr(target, "intermediate_size", None) or 0)
    return dense or _of(target, "intermediate_size") * (active if experts else 1)


def _of(target: PretrainedConfig, name: str) -> int:
    value = getattr(target, name, None)
    if isinstance(value, bool) or not isinstance(value, int):
        remedy = {
            "hidden_size": "choose a decoder-only target",
            "vocab_size": "choose a decoder-only target",
            "moe_intermediate_size": "give model.draft.intermediate_size",
            **dict.fromkeys(
                sorted(HEADS), f"choose a target with attention, or give model.draft.{', '.join(sorted(HEADS))}"
            ),
        }.get(name, f"give model.draft.{name}")
        raise UserError(
            f"target config ({type(target).__name__}): {name} is {value!r}, so no draft can be derived; {remedy}"
        )
    return value


def default_aux_layers(num_layers: int, model_type: str | None = None) -> tuple[int, int, int]:
    """The layers that EAGLE3 reads, 0-based: 1, n//2-1 and n-4; if n < 8, shifted just enough to stay distinct.

    These are the layers of the EAGLE3 reference implementation and of the engines that serve its drafts. The last layer
    is avoided: SGLang captures each layer's input, and no layer takes the last one's output as input. Only a target
    with three layers leaves no other choice.

    model_type: of the target's config, for the families whose drafts read others
    """
    if num_layers < 3:
        raise UserError(f"target: has {num_layers} layers, EAGLE3 reads three; choose a target with at least 3 layers")
    if num_layers == 3:
        return 0, 1, 2
    if model_type in ONE_LATER and num_layers >= 8:
        return 2, num_layers // 2, num_layers - 3
    low = min(1, num_layers - 4)
    middle = min(max(num_layers // 2 - 1, low + 1), num_layers - 3)
    high = max(num_layers - 4, middle + 1)
    return low, middle, high


def check_aux_layers(aux_layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return `aux_layers` as a tuple. Raises UserError unless they are ascending layers below `num_layers`."""
    layers = tuple(aux_layers)
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= num_layers:
        raise UserError(
            f"model.aux_layers: {list(layers)} does not fit a target with {num_layers} layers; "
            f"name different layers of 0..{num_layers - 1}, low to high"
        )
    return layers
