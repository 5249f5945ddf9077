"""The shape of a draft (sizes, rope, window): read from an exported config.json and written back to one."""

import hashlib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from eagle3.draft.rope_parameters import complete_rope, rope_parameters
from eagle3.durable import file_digest
from eagle3.errors import UserError, refuse, shown
from eagle3.parsing import is_number, read_json_object

# Under eagle_config, layers count from 0, for SGLang; at the top level they count from 1, for vLLM. See _aux_layers.
_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
# What engines know a draft by. vLLM has a class for drafts whose queries and keys are normed, as Qwen3's are.
_PLAIN = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
_NORMED = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
_SLIDING, _FULL = "sliding_attention", "full_attention"
MOST_AUX_LAYERS = 8  # that a draft reads
DRAFTED_TOKENS = 32_000  # size of the draft vocabulary in EAGLE3's own drafts
# Sizes that tensor parallelism divides.
TENSOR_PARALLEL = ("num_key_value_heads", "num_attention_heads", "intermediate_size", "draft_vocab_size")
_SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class DraftConfig:
    """The sizes, rope and window of one EAGLE3 draft. Raises UserError if the sizes contradict each other."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = field(default_factory=dict)  # as in transformers: rope_type, rope_theta, ...
    aux_layers: tuple[int, ...] | None = None  # 0-based target layers whose outputs the draft reads
    num_aux_hidden_states: int = 3  # how many those are, also if it is not known which
    fc_norm: bool = False  # whether each of the target's states is normed before they are fused
    norm_output: bool = False  # whether a step hands on its normed output instead of the un-normed one
    # Of drafts from elsewhere; recipes have no keys for them.
    norm_before_fc: bool = False  # whether the target's states are normed together before they are fused
    norm_before_residual: bool = False  # whether attention's output is added to the normed hidden state
    qk_norm: bool = False  # whether each head's queries and keys are normed before they are rotated
    attention_bias: bool = False  # whether the projections into and out of attention have biases
    window: int | None = None  # most keys that a query sees, its own included; None: all
    token_ids: dict[str, Any] = field(default_factory=dict)  # the target's bos_, eos_ and pad_token_id

    def __post_init__(self) -> None:
        names = (*_SHAPE, "target_hidden_size", "vocab_size", "draft_vocab_size", "max_position_embeddings")
        sizes = {name: getattr(self, name) for name in names}
        refuse(
            "draft config",
            *(
                (
                    not (is_number(size) and isinstance(size, int) and size > 0),
                    f"{name} is {shown(size)}, not a number of 1 or more; give one under model.draft",
                )
                for name, size in sizes.items()
            ),
            (
                not (is_number(self.rms_norm_eps) and self.rms_norm_eps > 0),
                f"rms_norm_eps is {shown(self.rms_norm_eps)}, not a positive number; give one under model.draft",
            ),
        )
        refuse(
            "draft config",
            (
                self.num_attention_heads % self.num_key_value_heads,
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}; change one of them under model.draft",
            ),
            (
                self.hidden_size % self.num_attention_heads,
                f"num_attention_heads {self.num_attention_heads} does not divide hidden_size {self.hidden_size}, "
                "which no serving engine loads; change it under model.draft",
            ),
            (
                self.draft_vocab_size > self.vocab_size,
                f"draft vocabulary {self.draft_vocab_size} exceeds the target's {self.vocab_size}; "
                f"set model.draft.vocab_size to at most {self.vocab_size}",
            ),
        )
        if self.aux_layers is not None:
            object.__setattr__(self, "num_aux_hidden_states", len(self.aux_layers))
        object.__setattr__(self, "rope_parameters", complete_rope(self.rope_parameters))

    @property
    def aux_width(self) -> int:
        """Width of the target's states that the draft fuses, side by side."""
        return self.num_aux_hidden_states * self.target_hidden_size

    def is_divided_by(self, tensor: int, ulysses: int = 1) -> bool:
        """Whether so many ranks can share the draft. (Ulysses replicates key/value heads that are too few.)"""
        whole = all(getattr(self, name) % tensor == 0 for name in TENSOR_PARALLEL)
        return whole and self.num_attention_heads // tensor % ulysses == 0

    def holds_chain(self, steps: int) -> bool:
        """Whether the window has room for the keys of a chain of `steps` tokens."""
        return self.window is None or self.window >= steps

    @classmethod
    def from_json(cls, values: dict[str, Any], origin: str) -> "DraftConfig":
        """Parses the `values` of an exported config.json. origin: name of the file for errors."""
        needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        eagle = values.get("eagle_config") or {}
        layers, act = values.get("num_hidden_layers", 1), values.get("hidden_act", "silu")
        refuse(
            origin,
            *(
                (name not in values, f"{name} is missing; this is not the config.json of an EAGLE3 draft")
                for name in needed
            ),
            *(
                (
                    not isinstance(values.get(name), int) or values[name] < 1,
                    f"{name} is {shown(values.get(name))}, not a number of 1 or more; fix the file",
                )
                for name in needed
            ),
            (not isinstance(eagle, dict), f"eagle_config is {shown(eagle)}, not a dictionary; fix the file"),
            (
                values.get("partial_rotary_factor") not in (None, 1.0),
                "partial_rotary_factor is not supported; use a draft without it",
            ),
            (
                layers != 1,
                f"has {shown(layers)} layers, but an EAGLE3 draft has one; name the export of a run",
            ),
            (act != "silu", f"hidden_act is {shown(act)}, but only silu is supported; use a draft with silu"),
        )
        heads, aux_layers = values["num_attention_heads"], _aux_layers(values, eagle, origin)
        return cls(
            hidden_size=values["hidden_size"],
            target_hidden_size=values.get("target_hidden_size") or values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            vocab_size=values["vocab_size"],
            draft_vocab_size=values.get("draft_vocab_size") or values["vocab_size"],
            max_position_embeddings=values.get("max_position_embeddings") or 2048,
            rms_norm_eps=values.get("rms_norm_eps") or 1e-6,
            rope_parameters=rope_parameters(values),
            aux_layers=aux_layers,
            num_aux_hidden_states=_aux_states(values, aux_layers, origin),
            fc_norm=bool(values.get("fc_norm") or values.get("use_aux_norm")),
            norm_output=bool(values.get("norm_output")),
            norm_before_fc=bool(eagle.get("norm_before_fc", values.get("norm_before_fc"))),
            norm_before_residual=bool(values.get("norm_before_residual")),
            qk_norm=values.get("model_type") == _NORMED["model_type"],
            attention_bias=bool(values.get("attention_bias")),
            window=_window(values, origin),
            token_ids={name: values.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        )

    def to_json(self, dtype: str) -> dict[str, Any]:
        """The contents of config.json as SGLang and vLLM read it, with the rope as both transformers 4 and transformers
        5 spell it."""
        rope = dict(self.rope_parameters)
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        return {
            **(_NORMED if self.qk_norm else _PLAIN),
            "num_hidden_layers": 1,
            **{name: getattr(self, name) for name in _SHAPE},
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if rope["rope_type"] == "default" else scaling,
            "rope_parameters": rope,
            "hidden_act": "silu",
            "attention_bias": self.attention_bias,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            **self.token_ids,
            "torch_dtype": dtype,
            "dtype": dtype,
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            **{name: True for name in ("norm_before_fc", "norm_before_residual") if getattr(self, name)},
            # without the last, transformers drops the window from a config of type qwen3
            **(
                {"layer_types": [_SLIDING], "sliding_window": self.window, "use_sliding_window": True}
                if self.window
                else {}
            ),
            "num_aux_hidden_states": self.num_aux_hidden_states,
            _AUX_LAYERS: [layer + 1 for layer in self.aux_layers] if self.aux_layers else None,
            "eagle_config": {
                _AUX_LAYERS: list(self.aux_layers) if self.aux_layers else None,
                "use_aux_hidden_state": True,
            },
        }

    def different_sizes(self, other: "DraftConfig") -> list[str]:
        """Names the fields that make `other` have different weights, or compute something different with them. The
        window does not count, because weights can be trained further with any window."""
        ignored = ("token_ids", "window", "aux_layers" if None in (self.aux_layers, other.aux_layers) else "")
        names = (item.name for item in fields(self) if item.name not in ignored)
        return [name for name in names if getattr(self, name) != getattr(other, name)]


def draft_digest(folder: Path) -> str:
    """Digest of an exported draft: of its config and weights. Equal drafts have equal digests, wherever they are."""
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    return hashlib.sha256("".join(map(file_digest, files)).encode()).hexdigest()[:32]


def read_draft_config(path: Path) -> DraftConfig:
    """Reads a draft's config.json. Raises UserError if it cannot be read, or does not describe a draft."""
    values = read_json_object(path, "name the config.json of a draft", "export the draft again or fix the file")
    return DraftConfig.from_json(_plain(values, str(path)), str(path))


def _plain(values: dict[str, Any], origin: str) -> dict[str, Any]:
    """The keys of a config.json as this project exports them. Speculators (src/speculators/models/eagle3/config.py)
    puts those of the layer into a section of their own. Raises UserError if it describes another kind of draft."""
    kind = values.get("speculators_model_type")
    if kind is None:
        return values
    layer = values.get("transformer_layer_config")
    if kind != "eagle3" or not isinstance(layer, dict):
        raise UserError(f"{origin}: describes a draft of type {shown(kind)}, not EAGLE3; name an EAGLE3 draft")
    given = {name: value for name, value in values.items() if value is not None}
    return {"norm_before_residual": True} | layer | given  # True is vLLM's default for this format


def _aux_layers(values: dict[str, Any], eagle: dict[str, Any], origin: str) -> tuple[int, ...] | None:
    """The 0-based target layers that a config.json and its eagle_config name; None if neither names any.

    SGLang reads the ids in eagle_config, which count from 0. vLLM reads those at the top level, and captures the input
    of the layer with that number, i.e. the output of the layer before; without them, it uses its model's default. Older
    exports have only the ids in eagle_config, and drafts from other trainers may have only those at the top level.
    DeepSpec's (deepspec/modeling/eagle3) have target_layer_ids, which count from 0.
    """
    nested, top = _layer_ids(eagle, f"{origin}: eagle_config.", 0), _layer_ids(values, f"{origin}: ", 1)
    from_zero = _layer_ids(values, f"{origin}: ", 0, "target_layer_ids")
    if nested and top and [layer + 1 for layer in nested] != top:
        raise UserError(
            f"{origin}: eagle_config.{_AUX_LAYERS} {nested} (counted from 0, for SGLang) and {_AUX_LAYERS} {top} "
            "(counted from 1, for vLLM) are not the same layers; remove the one that the draft was not trained on"
        )
    layers = nested or [layer - 1 for layer in top] or from_zero
    return tuple(layers) or None


def _aux_states(values: dict[str, Any], layers: tuple[int, ...] | None, origin: str) -> int:
    """How many target layers a config.json says that the draft reads, given those that it names. Raises UserError if
    the two are not the same, or no draft has so many."""
    states = values.get("num_aux_hidden_states") or len(layers or range(3))
    named = states if layers is None else len(layers)
    refuse(
        origin,
        (
            type(states) is not int or not 1 <= states <= MOST_AUX_LAYERS or states != named,
            f"num_aux_hidden_states is {shown(states)}, and {named} layers are named; a draft reads 1 to "
            f"{MOST_AUX_LAYERS}: fix the file",
        ),
    )
    return states


def _window(values: dict[str, Any], origin: str) -> int | None:
    """The window as vLLM reads it: `sliding_window` applies to the layers that `layer_types` calls sliding. Raises
    UserError if readers could disagree about the draft's one layer."""
    kinds, window = values.get("layer_types") or [], values.get("sliding_window")
    off = not values.get("use_sliding_window", values.get("model_type") != _NORMED["model_type"])
    if not isinstance(kinds, list) or any(kind not in (_SLIDING, _FULL) for kind in kinds):
        raise UserError(f"{origin}: layer_types is {shown(kinds)}; a draft's layer is {_SLIDING} or {_FULL}")
    refuse(
        origin,
        (len(set(kinds)) > 1, f"layer_types is {shown(kinds)}, but a draft has one layer; name only its kind"),
        (
            not kinds and window is not None and not off,
            f"sliding_window is {shown(window)} but layer_types does not say whether the layer has it; add "
            f'"layer_types": ["{_SLIDING}"], or remove sliding_window',
        ),
    )
    if _SLIDING not in kinds:
        return None
    refuse(
        origin,
        (off, f"layer_types says {_SLIDING}, but use_sliding_window is false; remove one of them"),
        (window is None, f"layer_types says {_SLIDING}, but sliding_window is missing; add the number of keys"),
        (
            not (type(window) is int and window > 0),
            f"sliding_window is {shown(window)}, not a number of keys, 1 or more; fix the file",
        ),
    )
    return window


def _layer_ids(values: dict[str, Any], place: str, first: int, key: str = _AUX_LAYERS) -> list[int]:
    layers = values.get(key) or []
    if not isinstance(layers, list) or any(type(layer) is not int or layer < first for layer in layers):
        raise UserError(f"{place}{key} is {layers!r}, not a list of layers counted from {first}; fix the file")
    return layers
