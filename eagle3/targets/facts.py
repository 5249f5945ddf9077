"""Facts about a target from its config alone: class, size, quantisation, and whether it can be a target."""

import re
from typing import NamedTuple

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer, LinearAttentionCacheLayerMixin
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from eagle3.draft.derivation import active_experts
from eagle3.errors import SharedUserError, UserError
from eagle3.targets.checkpoint import config_values, decoder_layers, readable, whole_config

# Layers that read a document through a state of fixed size (transformers' name for them).
RECURRENT = "linear_attention"
# Sizes that a config should state rather than leave to its class's defaults.
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")


class TargetFacts(NamedTuple):
    """Facts about a target that follow from its config."""

    architecture: str  # the class that config.json names
    config: PretrainedConfig  # of the language part
    parameters: int  # of the language part
    expert_parameters: int  # those of routed experts, of which a token reads only a few
    bytes: float  # size of its weights as stored
    quantised_head: bool  # whether the lm_head is quantised as well
    has_layers: bool  # whether transformers' class has its layers where `TransformersTarget` reads their states
    assumed: dict[str, int]  # sizes that config.json lacks, with the defaults that transformers assumes

    @property
    def context(self) -> int | None:
        """Longest context in tokens; None if the config does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def chosen_experts(self) -> float:
        """The share of a layer's routed experts that a token reads; 1 if there are none."""
        names = ("num_experts", "n_routed_experts", "num_local_experts")
        number = next((value for name in names if (value := getattr(self.config, name, None))), None)
        chosen = active_experts(self.config)
        return chosen / number if self.expert_parameters and number and chosen else 1.0

    def engine_gpus(self, usable: float) -> int:
        """Number of GPUs, a power of two, that hold the weights if each has `usable` bytes for them."""
        gpus = 1
        while self.bytes > gpus * usable:
            gpus *= 2
        return gpus


def read_facts(name: str, revision: str | None = None, trust_remote_code: bool = False) -> TargetFacts:
    """Read a target's facts from the config of a hub id or folder.

    Builds the model without its weights; with trust_remote_code, the checkpoint's own code builds it, if there is any.
    Raises UserError if transformers has no such causal language model.
    """
    with readable(name, "config"):
        values, root_config = config_values(name, revision), whole_config(name, revision, trust_remote_code)
        config = root_config.get_text_config(decoder=True)
        known_classes = {
            _plain(name)
            for names in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
            for name in names.values()
        }
        assumed = _assumed(values, root_config)
        if len(assumed) == len(NEEDED):
            raise UserError(
                f"target {name!r}: its config.json gives none of the sizes of its language model; name the folder of a "
                "complete checkpoint"
            )
        architecture = (values.get("architectures") or [None])[0]
        own_code = trust_remote_code and "AutoModelForCausalLM" in (values.get("auto_map") or {})
        model_config = root_config if own_code or type(root_config) in MODEL_FOR_CAUSAL_LM_MAPPING else config
        if not own_code and (
            type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING
            or (architecture and _plain(architecture) not in known_classes)
        ):
            raise UserError(
                f"target {name!r}: {architecture or type(config).__name__} is not a causal language model of "
                "transformers; choose a decoder-only target with an lm_head (docs/new-model.md says what it must have)"
            )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=own_code)
        quantization = next(
            (part["quantization_config"] for part in _parts(values) if part.get("quantization_config")), {}
        )
        return TargetFacts(
            architecture or type(model).__name__,
            config,
            model.num_parameters(),
            sum(weight.numel() for part, weight in model.named_parameters() if "experts" in part.split(".")),
            model.num_parameters() * _bytes_a_weight(quantization),
            _quantises_head(quantization),
            decoder_layers(model) is not None,
            assumed,
        )


def recurrent_layers(config: PretrainedConfig) -> list[int]:
    """The layers that carry a state from token to token, instead of attending."""
    return [layer for layer, kind in enumerate(getattr(config, "layer_types", None) or ()) if kind == RECURRENT]


def is_stateful(config: PretrainedConfig, model: type[PreTrainedModel] | None = None) -> bool:
    """Whether layers carry a state from token to token, alone or beside attention, according to the model's class
    (transformers' `_is_stateful`) or to the caches that transformers gives such layers (linear attention, short
    convolutions). What a rejected draft did to such a state cannot be undone.

    config: of the language part
    model: the class, if known; default: transformers' for this config
    """
    model = model or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    caches = [DYNAMIC_LAYER_TYPE_MAPPING.get(kind, DynamicLayer) for kind in getattr(config, "layer_types", None) or ()]
    return getattr(model, "_is_stateful", False) or any(
        issubclass(cache, LinearAttentionCacheLayerMixin) for cache in caches
    )


def require_no_state(name: str, config: PretrainedConfig, model: type[PreTrainedModel] | None = None) -> None:
    """Raises UserError if transformers cannot judge drafts with this target. config, model: as for `is_stateful`."""
    if is_stateful(config, model):
        raise SharedUserError(
            f"target {name!r}: its layers carry a state from token to token, which cannot be rolled back after a "
            "rejected draft; judge the draft with evaluate.py --engine sglang"
        )


def length_ropes(config: PretrainedConfig) -> dict[str, int]:
    """The rope types by which transformers rotates a prompt according to the length of the longest one in its batch
    (transformers' `dynamic_rope_update`), each with the most tokens of a prompt that is rotated like all shorter
    ones."""
    ropes, limits = getattr(config, "rope_parameters", None) or {}, {}  # for the whole model, or one per layer type
    for rope in (ropes, *ropes.values()):
        kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
        if kind == "longrope":
            limits[kind] = rope["original_max_position_embeddings"]
        elif "dynamic" in kind:
            limits[kind] = config.max_position_embeddings
    return limits


def _plain(architecture: str) -> str:
    """A class's name without what checkpoints spell in their own way: Kimi's and EXAONE's differ from
    transformers'."""
    return architecture.replace("_", "").lower()


def _parts(values: dict) -> list[dict]:
    """The whole of config.json and its sections (text_config and others)."""
    parts = [part for key, part in values.items() if key.endswith("_config") and isinstance(part, dict)]
    return [values, *parts]


def _assumed(values: dict, config: PretrainedConfig) -> dict[str, int]:
    """The needed sizes that config.json gives neither for the whole nor for the language part, under these names or the
    model family's own, with the defaults of the family's class."""
    language = config.get_text_config(decoder=True)
    own = [part for key, part in values.items() if isinstance(part, dict) and getattr(config, key, None) is language]
    if language is not config and not own and not config.sub_configs:  # code of the checkpoint's own, with any parts
        own = _parts(values)
    given = {name for part in (values, *own) for name in part}
    return {
        key: getattr(language, key)
        for key in NEEDED
        if hasattr(language, key) and given.isdisjoint((key, language.attribute_map.get(key)))
    }


def _bytes_a_weight(quantization: dict) -> float:
    """Bytes per weight, from quantization_config. The scales of 4-bit weights add a tenth. Raises UserError for an
    unknown form."""
    method, groups = quantization.get("quant_method"), list((quantization.get("config_groups") or {}).values())
    bits = quantization.get("bits") or {"fp8": 8, "mxfp4": 4, "awq": 4}.get(method)
    if groups and isinstance(groups[0], dict):  # compressed-tensors
        bits = (groups[0].get("weights") or {}).get("num_bits")
    if method == "bitsandbytes":
        bits = 4 if quantization.get("load_in_4bit") else 8
    if "FP4" in str(quantization.get("quant_algo")):  # ModelOpt
        bits = 4
    if quantization and bits is None:
        raise UserError(
            f"target config: quantization_config of method {method!r} does not say its bits in a way known here; name "
            "the checkpoint that is not quantised as --target, and this one with --id"
        )
    bits = bits or 16
    return bits / 8 * (1.1 if bits <= 4 else 1.0)


def _quantises_head(quantization: dict) -> bool:
    """Whether the lm_head is quantised. GPTQ says so itself; compressed-tensors and ModelOpt list what is excluded."""
    exclusions = quantization.get("ignore") or []
    if quantization.get("quant_method") in ("compressed-tensors", "modelopt"):
        patterns = [name.removeprefix("re:") for name in exclusions if name.startswith("re:")]
        excluded = any(name.rpartition(".")[2] == "lm_head" for name in exclusions)
        return not excluded and not any(re.match(pattern, "lm_head") for pattern in patterns)
    return bool(quantization.get("lm_head"))
