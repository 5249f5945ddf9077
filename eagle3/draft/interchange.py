"""Converts drafts between Megatron parameters and the files that serving engines load, exactly and in both
directions."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.draft.config import DraftConfig, read_draft_config
from eagle3.draft.model import Eagle3Draft
from eagle3.draft.published import plain_tensors
from eagle3.durable import flush, publish, require_access
from eagle3.errors import UserError
from eagle3.parsing import read_json_object
from eagle3.tensors import require_finite

CONFIG, WEIGHTS = "config.json", "model.safetensors"
DIGEST = "sha256_of_tensors"  # a key in the weights' metadata; engines ignore it
EMBEDDING = "embed_tokens.weight"
# Parameter of Eagle3Draft -> names of its equal parts in an export. fc_norm and input_norm have the same names in both.
_NAMES = {
    "embedding.weight": (EMBEDDING,),
    "fc.weight": ("fc.weight",),
    "layer.input_layernorm.weight": ("midlayer.input_layernorm.weight",),
    "layer.hidden_norm.weight": ("midlayer.hidden_norm.weight",),
    "layer.pre_mlp_layernorm.weight": ("midlayer.post_attention_layernorm.weight",),
    "layer.self_attention.linear_q.weight": ("midlayer.self_attn.q_proj.weight",),
    "layer.self_attention.linear_k.weight": ("midlayer.self_attn.k_proj.weight",),
    "layer.self_attention.linear_v.weight": ("midlayer.self_attn.v_proj.weight",),
    "layer.self_attention.linear_proj.weight": ("midlayer.self_attn.o_proj.weight",),
    "layer.self_attention.linear_q.bias": ("midlayer.self_attn.q_proj.bias",),
    "layer.self_attention.linear_k.bias": ("midlayer.self_attn.k_proj.bias",),
    "layer.self_attention.linear_v.bias": ("midlayer.self_attn.v_proj.bias",),
    "layer.self_attention.linear_proj.bias": ("midlayer.self_attn.o_proj.bias",),
    "layer.self_attention.q_norm.weight": ("midlayer.self_attn.q_norm.weight",),
    "layer.self_attention.k_norm.weight": ("midlayer.self_attn.k_norm.weight",),
    "layer.mlp.linear_fc1.weight": ("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"),
    "layer.mlp.linear_fc2.weight": ("midlayer.mlp.down_proj.weight",),
    "norm.weight": ("norm.weight",),
    "lm_head.weight": ("lm_head.weight",),
}
# Part of a weight's name that not every draft has -> the entry in config.json that goes with it.
_ENTRIES = {
    "fc_norm": '"fc_norm": true',
    "input_norm": '"norm_before_fc": true',
    **dict.fromkeys(("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"), '"attention_bias": true'),
    **dict.fromkeys(("q_norm", "k_norm"), '"model_type": "qwen3"'),
}


@dataclass(frozen=True)
class ExportedDraft:
    """A draft read from disk."""

    config: DraftConfig
    weights: dict[str, Tensor]  # exported name -> tensor
    d2t: Tensor  # d2t and t2d: the draft vocabulary
    t2d: Tensor
    origin: str  # where the draft was read, for messages
    doubts: tuple[str, ...] = ()  # what engines may read differently than this project does


def exported_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames tensors (weights or gradients, all or some) from Eagle3Draft's parameter names to exported names."""
    exported: dict[str, Tensor] = {}
    for parameter, tensor in tensors.items():
        names = _NAMES.get(parameter, (parameter,))
        exported |= zip(names, tensor.chunk(len(names)), strict=True)
    return exported


def shard(whole: Tensor, parameter: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of a whole tensor, cut as Megatron-core cuts `parameter` over the tensor-parallel `group`.

    With a partition stride of 2, the two halves [gate; up] are cut separately. If the group's size does not divide
    the vocabulary, the embedding's last parts are padded with zeros. May return a view of `whole`, or `whole` itself.
    """
    if group.size() == 1 or not is_cut(parameter):
        return whole
    dim = parameter.partition_dim
    runs = whole.unflatten(dim, (parameter.partition_stride, -1)).transpose(0, dim + 1)
    size = -(-len(runs) // group.size())
    part = runs[group.rank() * size :][:size].transpose(0, dim + 1)
    missing = size - part.shape[dim + 1]
    return F.pad(part, (0, 0) * (part.dim() - dim - 2) + (0, missing)).flatten(dim, dim + 1)


def whole_tensors(tensors: dict[str, Tensor], draft: Eagle3Draft, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Joins the ranks' parts of tensors (weights or gradients, by parameter name of `draft`) into whole tensors on
    every rank.

    Collective over the tensor-parallel `group`: every rank passes the same names in the same order, and tensors on a
    device that the group's backend supports. Padding is removed from the embedding. Tensors that are not cut are
    returned as they are, and so are all tensors if the group has one rank.
    """
    if group.size() == 1:
        return dict(tensors)
    parameters, whole = dict(draft.named_parameters()), {}
    for name, tensor in tensors.items():
        parameter = parameters[name]
        assert tensor.shape == parameter.shape, f"{name}: {tensor.shape} is not a rank's part, {parameter.shape}"
        if not is_cut(parameter):
            whole[name] = tensor
            continue
        parts = tensor.new_empty(group.size(), *tensor.shape)
        dist.all_gather_single(parts.flatten(0, 1), tensor.detach().contiguous(), group)
        dim = parameter.partition_dim
        runs = parts.unflatten(dim + 1, (parameter.partition_stride, -1))  # [tp, ..., runs, part of a run, ...]
        padded = runs.movedim(0, dim + 1).flatten(dim, dim + 2)
        whole[name] = padded.narrow(dim, 0, _whole_shape(parameter, draft, group)[dim])
    return whole


def load_weights(draft: Eagle3Draft, exported: ExportedDraft, group: dist.ProcessGroup) -> None:
    """Copies an exported draft into `draft`: from each tensor, the part that belongs to this rank of the
    tensor-parallel `group`. Raises UserError if a tensor is missing, unknown or misshapen. The embedding may be
    missing; the draft's then stays as it is (callers use the target's)."""
    sources = [(parameter, _NAMES.get(name, (name,))) for name, parameter in draft.named_parameters()]
    shapes = {}
    for parameter, exported_names in sources:
        rows, *others = _whole_shape(parameter, draft, group)
        shapes |= {name: [rows // len(exported_names), *others] for name in exported_names}
    for name, shape in shapes.items():
        if name not in exported.weights and name != EMBEDDING:
            raise UserError(f"{exported.origin}: {name} is missing; export the draft again, or train without init_from")
        if name in exported.weights and list(exported.weights[name].shape) != shape:
            raise UserError(
                f"{exported.origin}: {name} has shape {list(exported.weights[name].shape)}, the draft here has "
                f"{shape}; use a checkpoint of this shape, or take its shape with model.draft.config"
            )
    unknown = exported.weights.keys() - shapes.keys()
    if unknown:
        entry = next((its for part, its in _ENTRIES.items() if part in min(unknown)), None)
        raise UserError(
            f"{exported.origin}: {min(unknown)} is in its weights, but config.json does not say {entry}; write it there"
            if entry
            else f"{exported.origin}: {min(unknown)} is not a weight of an EAGLE3 draft; export the draft again"
        )
    with torch.no_grad():
        for parameter, exported_names in sources:
            tensors = [exported.weights[name] for name in exported_names if name in exported.weights]
            if tensors:
                whole = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
                parameter.copy_(shard(whole, parameter, group))


def is_cut(parameter: Tensor) -> bool:
    """Whether tensor parallelism cuts the parameter. Megatron-core marks such parameters. Those of torch's own modules
    (fc, norms) have no mark, and are whole on every rank."""
    return getattr(parameter, "tensor_model_parallel", False)


def _whole_shape(parameter: Tensor, draft: Eagle3Draft, group: dist.ProcessGroup) -> list[int]:
    shape = list(parameter.shape)
    if is_cut(parameter):
        shape[parameter.partition_dim] *= group.size()
    if parameter is draft.embedding.weight:
        shape[0] = draft.draft_config.vocab_size
    return shape


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
    """Writes config.json and model.safetensors as SGLang and vLLM load them. Either writes both, or raises an OSError
    or SafetensorError and leaves the folder unchanged. Other files in the folder stay.

    weights: whole tensors (see whole_tensors), by Eagle3Draft's parameter names; usually the optimiser's fp32 masters.
    """
    config = draft.draft_config.to_json(str(dtype).removeprefix("torch."))
    tensors = exported_tensors(weights)
    if not with_embedding:
        tensors.pop(EMBEDDING, None)
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    tensors["d2t"], tensors["t2d"] = d2t.cpu().contiguous(), t2d.cpu().contiguous()
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt", DIGEST: tensor_digest(tensors)})
        _order_header(partial / WEIGHTS)
        # save_file creates a file that only its owner can read, while config.json follows the umask.
        (partial / WEIGHTS).chmod((partial / CONFIG).stat().st_mode)
        for name in (WEIGHTS, CONFIG):
            flush(partial / name)
        folder.mkdir(exist_ok=True)
        # Renaming takes no space. A kill in between leaves no config.json, i.e. no draft, rather than a mixture of two.
        (folder / CONFIG).unlink(missing_ok=True)
        publish(partial / WEIGHTS, folder / WEIGHTS)
        publish(partial / CONFIG, folder / CONFIG)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_exported(folder: Path, weights_name: str = WEIGHTS) -> ExportedDraft:
    """Reads a draft that this project or another trainer exported (see `published`). Raises UserError if a file is
    missing, damaged, or does not belong to an EAGLE3 draft, or if a weight is not finite.

    The tensors must match the digest that the export stored with them. Drafts from elsewhere have no digest.
    """
    config, path = read_draft_config(folder / CONFIG), folder / weights_name
    tensors = {}
    for file in _weight_files(path):
        tensors |= _read_weights(file)
    written = next((tensor for name, tensor in tensors.items() if name.rpartition(".")[2] == "d2t"), None)
    require_finite(tensors, str(path), "train or export the draft again")
    tensors = plain_tensors(tensors, config, str(path))
    d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d")
    return ExportedDraft(config, tensors, d2t, t2d, str(folder), tuple(_doubts(folder / CONFIG, written, d2t)))


def _doubts(config: Path, written: Tensor | None, d2t: Tensor) -> Iterator[str]:
    """written: d2t as it stands in the file, if it does."""
    if written is not None and not torch.equal(written.long(), d2t):
        yield "d2t holds token ids, and engines add each one's place to it: write d2t[i] = id - i"
    values = read_json_object(config, "name the config.json of a draft", "export the draft again or fix the file")
    rope, theta = values.get("rope_parameters") or {}, values.get("rope_theta")
    if theta is not None and theta != rope.get("rope_theta", theta):
        yield (
            f"config.json has rope_theta {theta} and, in rope_parameters, {rope['rope_theta']}: engines may read "
            "either, so write the right one to both"
        )


def _weight_files(path: Path) -> list[Path]:
    """The file of a draft's weights, or the files that its index names."""
    index = path.with_name(f"{path.name}.index.json")
    if path.is_file() or not index.is_file():
        if not path.is_file():
            raise UserError(
                f"{path}: no such file; name the folder of a draft in safetensors (a pickled pytorch_model.bin is not "
                "read, because that could run code: convert it)"
            )
        return [path]
    names = read_json_object(index, "copy the draft again", "copy the draft again").get("weight_map")
    if not isinstance(names, dict) or any(Path(str(name)).name != name for name in names.values()):
        raise UserError(f"{index}: weight_map does not name files of this folder; copy the draft again")
    return [path.with_name(name) for name in sorted(set(names.values()))]


def _read_weights(path: Path) -> dict[str, Tensor]:
    require_access(path)
    try:
        with safe_open(path, "pt") as file:
            digest = (file.metadata() or {}).get(DIGEST)
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: damaged ({error}); copy or export it again") from error
    if digest is not None and digest != tensor_digest(tensors):
        raise UserError(
            f"{path}: damaged, or changed after it was exported (its {DIGEST} is not that of its tensors); export the "
            "draft again, or copy it again from its source"
        )
    return tensors


def tensor_digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256, in hexadecimal, over contiguous CPU tensors in the order of their names: for each tensor a line of JSON
    (name, dtype, shape), then its bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        header = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        digest.update(json.dumps(header).encode() + b"\n")
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _order_header(path: Path) -> None:
    """Sorts the header's metadata, whose order safetensors leaves to chance, so that equal drafts give equal files."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        file.seek(8)
        file.write(json.dumps(header, separators=(",", ":")).encode().ljust(size))
