"""What a target's config tells of it before a weight is read: its class, size, quantisation, and whether it can be one."""

import re
from typing import NamedTuple

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from eagle3.errors import UserError
from eagle3.targets.checkpoint import config_values, readable, sound_config, whole_config
from eagle3.targets.sglang.version import EAGLE3_TARGETS

# Sizes that a config should give, and not leave to the defaults of its class.
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")


class TargetFacts(NamedTuple):
    """architecture: the class that config.json names. config: of the language part. parameters: of it. bytes: of its
    weights as stored. quantised_head: the lm_head is too. assumed: sizes that config.json does not give, by the defaults of
    transformers' class."""

    architecture: str
    config: PretrainedConfig
    parameters: int
    bytes: float
    quantised_head: bool
    assumed: dict[str, int]

    @property
    def context(self) -> int | None:
        """Tokens; None where the config does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def served(self) -> bool:
        """SGLang takes an EAGLE3 draft for it."""
        return self.architecture in EAGLE3_TARGETS

    def engine_gpus(self, usable: float) -> int:
        """A power of two of GPUs that hold the weights, each `usable` bytes of them."""
        gpus = 1
        while self.bytes > gpus * usable:
            gpus *= 2
        return gpus


def read_facts(name: str, revision: str | None = None, trust_remote_code: bool = False) -> TargetFacts:
    """From the config of a hub id or folder. Builds the model's skeleton without its weights; trust_remote_code: by the
    checkpoint's own code, where it has some. Raises UserError for what is no causal language model of transformers."""
    values, whole = config_values(name, revision), whole_config(name, revision, trust_remote_code)
    config = whole.get_text_config(decoder=True)
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()}
    named = (values.get("architectures") or [None])[0]
    own_code = trust_remote_code and "AutoModelForCausalLM" in (values.get("auto_map") or {})
    built = whole if own_code or type(whole) in MODEL_FOR_CAUSAL_LM_MAPPING else config
    if not own_code and (type(built) not in MODEL_FOR_CAUSAL_LM_MAPPING or named not in (None, *known)):
        raise UserError(
            f"target {name!r}: {named or type(config).__name__} is no causal language model of transformers; choose a "
            "decoder-only target with an lm_head (docs/new-model.md says what it must have)"
        )
    with readable(name, "model class"), sound_config(name), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built, trust_remote_code=own_code)
    quantised = next((part["quantization_config"] for part in _parts(values) if part.get("quantization_config")), {})
    return TargetFacts(
        named or type(model).__name__,
        config,
        model.num_parameters(),
        model.num_parameters() * _bytes_a_weight(quantised),
        _quantises_head(quantised),
        {key: getattr(config, key) for key in NEEDED if hasattr(config, key) and not _gives(values, config, key)},
    )


def _parts(values: dict) -> list[dict]:
    """Of config.json: all of it, and what it says of single parts (text_config and others)."""
    return [values, *(part for part in values.values() if isinstance(part, dict) and "model_type" in part)]


def _gives(values: dict, config: PretrainedConfig, key: str) -> bool:
    """Whether config.json has it, for the model or a part, under this name or the family's own."""
    return any(name in part for part in _parts(values) for name in (key, config.attribute_map.get(key)))


def _bytes_a_weight(quantised: dict) -> float:
    """By a config's quantization_config; the scales of 4 bits are a tenth more. Raises UserError for a form not known here."""
    method, groups = quantised.get("quant_method"), list((quantised.get("config_groups") or {}).values())
    bits = quantised.get("bits") or {"fp8": 8, "mxfp4": 4, "awq": 4}.get(method)
    if groups and isinstance(groups[0], dict):  # compressed-tensors
        bits = (groups[0].get("weights") or {}).get("num_bits")
    if method == "bitsandbytes":
        bits = 4 if quantised.get("load_in_4bit") else 8
    if "FP4" in str(quantised.get("quant_algo")):  # ModelOpt
        bits = 4
    if quantised and bits is None:
        raise UserError(
            f"target config: quantization_config of method {method!r} does not say its bits in a way known here; name the "
            "checkpoint that is not quantised as --target, and this one with --id"
        )
    bits = bits or 16
    return bits / 8 * (1.1 if bits <= 4 else 1.0)


def _quantises_head(quantised: dict) -> bool:
    """GPTQ says so; compressed-tensors and ModelOpt name what they leave out, by name or by pattern."""
    left_out = quantised.get("ignore") or []
    if quantised.get("quant_method") in ("compressed-tensors", "modelopt"):
        patterns = [name.removeprefix("re:") for name in left_out if name.startswith("re:")]
        named = any(name.rpartition(".")[2] == "lm_head" for name in left_out)
        return not named and not any(re.match(pattern, "lm_head") for pattern in patterns)
    return bool(quantised.get("lm_head"))
