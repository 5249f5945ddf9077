"""An exported draft, rewritten as other trainers and engines publish theirs, from the keys that they document."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def specforge(values: dict, tensors: dict) -> dict:
    """SpecForge: the same names, without an embedding."""
    tensors.pop("embed_tokens.weight", None)
    return values


def safeailab(values: dict, tensors: dict) -> dict:
    """SafeAILab (eagle/traineagle3/config.json): no sizes of its own but the usual ones, in fp16."""
    for name, tensor in tensors.items():
        tensors[name] = tensor.half() if tensor.is_floating_point() else tensor
    for key in ("fc_norm", "norm_output", "eagle_config", "eagle_aux_hidden_state_layer_ids", "rope_parameters"):
        values.pop(key, None)
    return values


def speculators(values: dict, tensors: dict) -> dict:
    """vllm-project/speculators: the layer's shape in a section, the layer under `layers.0`, parts of the target."""
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
    width = values["target_hidden_size"]
    tensors |= {"verifier_norm.weight": torch.ones(width), "verifier_lm_head.weight": torch.ones(12, width)}
    own = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", "fc_norm", "norm_output")
    layer = {name: value for name, value in values.items() if name not in (*own, "eagle_config", "architectures")}
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": layer,
        "norm_before_residual": False,
        "norm_before_fc": False,
        **{name: values[name] for name in own},
    }


def vllm(values: dict, tensors: dict) -> dict:
    """As vLLM holds it in memory: projections fused, everything under `model.`, token ids in d2t."""
    for fused, parts in (("self_attn.qkv", ("q", "k", "v")), ("mlp.gate_up", ("gate", "up"))):
        place = f"midlayer.{fused.partition('.')[0]}"
        names = [f"{place}.{part}_proj.weight" for part in parts]
        tensors[f"midlayer.{fused}_proj.weight"] = torch.cat([tensors.pop(name) for name in names])
    for name in [name for name in tensors if name not in ("d2t", "t2d", "lm_head.weight")]:
        tensors[f"model.{name.replace('midlayer.', 'layers.0.')}"] = tensors.pop(name)
    tensors["d2t"] = tensors["t2d"].nonzero().flatten()
    return values


def deepspec(values: dict, tensors: dict) -> dict:
    """deepseek-ai/DeepSpec (deepspec/modeling/eagle3/qwen3): the target's config with few keys more, normed queries and
    keys, and the whole vocabulary."""
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
    del tensors["d2t"], tensors["t2d"]
    layers = values["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    for name in [name for name in values if "eagle" in name or name in ("draft_vocab_size", "num_aux_hidden_states")]:
        del values[name]
    return values | {
        "architectures": ["Qwen3Eagle3Model"],
        "layer_types": ["full_attention"],
        "target_layer_ids": layers,
        "ttt_length": 7,
        "step_loss_decay": 0.8,
    }


def legacy_norms(values: dict, tensors: dict) -> dict:
    """SGLang's former names of fc_norm."""
    for number, third in enumerate(("low", "mid", "high")):
        tensors[f"aux_norm_{third}.weight"] = tensors.pop(f"fc_norm.{number}.weight")
    values["use_aux_norm"] = values.pop("fc_norm")
    return values


def rewritten(folder: Path, change) -> Path:
    values, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(change(values, tensors)))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


LAYOUTS = (specforge, safeailab, speculators, vllm)
