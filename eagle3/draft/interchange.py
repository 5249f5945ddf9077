"""Between the names that serving engines load and the draft's Megatron parameters, both ways, exactly."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.draft.config import DraftConfig, read_draft_config
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import UserError

EMBEDDING = "embed_tokens.weight"
# exported name <- parameter of Eagle3Draft; gate_proj and up_proj are the halves of linear_fc1 and are dealt with apart
_NAMES = {
    EMBEDDING: "embedding.weight",
    "fc.weight": "fc.weight",
    "midlayer.input_layernorm.weight": "layer.input_layernorm.weight",
    "midlayer.hidden_norm.weight": "layer.hidden_norm.weight",
    "midlayer.post_attention_layernorm.weight": "layer.pre_mlp_layernorm.weight",
    "midlayer.self_attn.q_proj.weight": "layer.self_attention.linear_q.weight",
    "midlayer.self_attn.k_proj.weight": "layer.self_attention.linear_k.weight",
    "midlayer.self_attn.v_proj.weight": "layer.self_attention.linear_v.weight",
    "midlayer.self_attn.o_proj.weight": "layer.self_attention.linear_proj.weight",
    "midlayer.mlp.down_proj.weight": "layer.mlp.linear_fc2.weight",
    "norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_FC1 = "layer.mlp.linear_fc1.weight"
_GATE, _UP = "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"


@dataclass(frozen=True)
class ExportedDraft:
    """A draft as read from disk: its config, tensors under exported names, and the draft vocabulary (d2t, t2d)."""

    config: DraftConfig
    weights: dict[str, Tensor]
    d2t: Tensor
    t2d: Tensor
    origin: str


def exported_tensors(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by parameter name of Eagle3Draft (weights or gradients, a subset will do) under their exported names."""
    exported = {}
    inverse = {parameter: name for name, parameter in _NAMES.items()}
    for parameter, tensor in named.items():
        if parameter == _FC1:
            exported[_GATE], exported[_UP] = tensor.chunk(2)
        elif parameter.startswith("fc_norm."):
            exported[parameter] = tensor
        else:
            exported[inverse[parameter]] = tensor
    return exported


def load_weights(draft: Eagle3Draft, exported: ExportedDraft) -> None:
    """Copy an exported draft into `draft`. Raises UserError on a missing, unknown or misshapen tensor; a missing
    embedding is left as it is (the caller takes the target's)."""
    weights, places = dict(exported.weights), {}
    names = {parameter: name for name, parameter in _NAMES.items()}
    for parameter, tensor in draft.named_parameters():
        if parameter == _FC1:
            places[_GATE], places[_UP] = tensor.chunk(2)
        else:
            places[names.get(parameter, parameter)] = tensor
    for name, place in places.items():
        if name not in weights and name != EMBEDDING:
            raise UserError(f"{exported.origin}: {name} is missing; export the draft again, or train without init_from")
        if name in weights and weights[name].shape != place.shape:
            raise UserError(
                f"{exported.origin}: {name} has shape {list(weights[name].shape)}, the draft here has "
                f"{list(place.shape)}; use a checkpoint of this shape, or take its shape with model.draft.config"
            )
    unknown = weights.keys() - places.keys()
    if unknown:
        raise UserError(f"{exported.origin}: {min(unknown)} is not a weight of an EAGLE3 draft; export the draft again")
    with torch.no_grad():
        for name, weight in weights.items():
            places[name].copy_(weight)


def export_draft(
    folder: Path,
    draft: Eagle3Draft,
    weights: dict[str, Tensor],
    *,
    d2t: Tensor,
    t2d: Tensor,
    dtype: torch.dtype,
    with_embedding: bool,
) -> None:
    """Write config.json and model.safetensors as SGLang and vLLM load them.

    weights: by parameter name of Eagle3Draft, whole (not split over ranks), usually the optimiser's fp32 masters.
    """
    tensors = exported_tensors(weights)
    if not with_embedding:
        tensors.pop(EMBEDDING, None)
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    tensors["d2t"], tensors["t2d"] = d2t.cpu().contiguous(), t2d.cpu().contiguous()
    config = draft.draft_config.to_json(str(dtype).removeprefix("torch."))
    save_file(tensors, folder / "model.safetensors.partial", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "model.safetensors.partial").replace(folder / "model.safetensors")


def read_exported(folder: Path, weights_name: str = "model.safetensors") -> ExportedDraft:
    """Read an exported draft. Raises UserError where a file is missing, damaged, or no EAGLE3 draft."""
    config, path = read_draft_config(folder / "config.json"), folder / weights_name
    if not path.is_file():
        raise UserError(f"{path}: no such file; name a folder that export wrote")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: damaged ({error}); copy or export it again") from error
    for name, kind in (("d2t", torch.int64), ("t2d", torch.bool)):
        if name not in tensors or tensors[name].dtype != kind:
            raise UserError(f"{path}: {name} ({kind}) is missing; this is not an EAGLE3 draft")
    d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d")
    targets = torch.arange(len(d2t)) + d2t
    if (
        len(d2t) != config.draft_vocab_size
        or len(t2d) != config.vocab_size
        or not torch.equal(t2d.nonzero().flatten(), targets)
    ):
        raise UserError(f"{path}: d2t and t2d do not agree with each other or with config.json; export the draft again")
    return ExportedDraft(config, tensors, d2t, t2d, str(folder))
