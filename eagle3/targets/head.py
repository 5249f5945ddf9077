"""A target's embedding and lm_head, of a model that is loaded or straight from the files of its checkpoint."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils.logging import disable_progress_bar

from eagle3.errors import UserError
from eagle3.targets.checkpoint import fetched, load_causal_lm, readable, weight_files, whole_config
from eagle3.targets.logits import LogitTransform, TargetHead

# Where configs say what is done to logits, with other models' names for the same.
SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier")
DIVISORS = ("logits_scaling",)
CAPS = ("final_logit_softcapping", "logits_soft_cap")
# Model types in which DIVISORS multiply.
MULTIPLYING = ("hyperclovax",)
# Of a matrix that is not quantised, in safetensors' words.
NUMBER_FORMATS = ("F64", "F32", "BF16", "F16")


def load_target_head(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: str | torch.dtype = "auto",
    required: bool = True,
) -> TargetHead:
    """Embedding and lm_head on the CPU, for training beside a target that runs elsewhere, or ran before.

    Of a checkpoint nothing else is read, and from the hub only the files with these two are fetched, under
    the names that transformers gives them in its model (without the weights of one: it is built on the meta device). A
    model whose own Python code trust_remote_code runs is loaded whole, and then dropped, for that code alone knows what it
    reads. Pickled weights (PyTorch's .bin) are refused.

    dtype: a torch dtype, its name, or "auto" (the config's; as stored where it names none). required: that the lm_head is
    a plain matrix; a store of logits does without. Raises UserError for what cannot be read, for weights that are missing
    or could be several tensors, and for a quantised embedding.
    """
    name = str(name_or_path)
    config = whole_config(name, revision, trust_remote_code)
    own_code = trust_remote_code and AutoModelForCausalLM.__name__ in (getattr(config, "auto_map", None) or {})
    disable_progress_bar()  # of a download, which garbles a log
    with readable(name, "embedding and lm_head"):
        files = None if own_code else weight_files(name, revision)
        if files is not None:
            return _read_head(_Stored(name, revision, files), config, dtype, required)
    return model_head(name, load_causal_lm(name, revision, trust_remote_code, dtype), required)


def model_head(name: str, model: PreTrainedModel, required: bool) -> TargetHead:
    """Of a model that is loaded. required: raise UserError for an lm_head that is no plain matrix; else it is None."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight.detach()
    plain = _is_linear(head) and head.weight.is_floating_point() and head.weight.itemsize > 1
    if required and not plain:
        raise _unusable(name, head, quantised=False)
    return TargetHead(embedding, head.weight.detach() if plain else None, _transform_of(model))


def _transform_of(model: PreTrainedModel) -> LogitTransform:
    """What a model does to its logits after the lm_head, by the config of its language part."""
    values, scale = model.config.get_text_config(decoder=True).to_dict(), 1.0
    for field in (*SCALES, *DIVISORS):
        factor = 1.0 if values.get(field) is None else values[field]
        divides = field in DIVISORS and not str(values.get("model_type")).startswith(MULTIPLYING)
        scale *= 1 / factor if divides else factor
    caps = [values[field] for field in CAPS if values.get(field) is not None]
    return LogitTransform(scale, caps[0] if caps else None)


def _is_linear(head: nn.Module | None) -> bool:
    """Without a bias, and with a weight that is the matrix."""
    return (
        isinstance(head, nn.Linear) and head.bias is None and head.weight.shape == (head.out_features, head.in_features)
    )


def _unusable(name: str, head: nn.Module | None, quantised: bool) -> UserError:
    biased = isinstance(head, nn.Linear) and head.bias is not None
    found = "quantised" if quantised else f"a {type(head).__name__}{' with a bias' if biased else ''}"
    return UserError(
        f"target {name!r}: its lm_head is {found}, not linear without bias, which training cannot load; set "
        "target.teacher=logits, or choose another target"
    )


class _Stored(NamedTuple):
    """A checkpoint in safetensors. files: the name of the file of each tensor."""

    name: str
    revision: str | None
    files: dict[str, str]

    def slice(self, tensor: str) -> Any:
        """safetensors' slice of this tensor, which tells shape and number format before any of it is read."""
        return self._file(tensor).get_slice(tensor)

    def read(self, tensor: str) -> Tensor:
        return self._file(tensor).get_tensor(tensor)

    def _file(self, tensor: str) -> safe_open:
        return safe_open(fetched(self.name, self.files[tensor], self.revision), "pt")


class _Place(NamedTuple):
    """Of a weight. parameter: its name in the model. shape: it has there. tensor: its name in the checkpoint, None where
    none has it. quantised: it is stored in parts, or as something that is no matrix of numbers."""

    parameter: str
    shape: list[int]
    tensor: str | None
    quantised: bool


def _read_head(stored: _Stored, config: PretrainedConfig, dtype: str | torch.dtype, required: bool) -> TargetHead:
    # A model of several parts may tie in its own name what its text part would not.
    ties = getattr(config, "tie_word_embeddings", False)
    # What transformers does not take for a language model as a whole has one for its text part.
    config = config if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else config.get_text_config(decoder=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    dtype = model.config.dtype if dtype == "auto" else dtype
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    names = _names_in_model(model, stored.files)
    embedding = _place(stored, names, model, inputs)
    head = _place(stored, names, model, outputs) if _is_linear(outputs) else None
    if head is None or head.quantised:
        if required:
            raise _unusable(stored.name, outputs, quantised=head is not None)
        head = None
    tied = head is not None and (ties or outputs.weight is inputs.weight)
    if tied and None in (embedding.tensor, head.tensor):
        embedding = head = embedding if head.tensor is None else head
    matrix = _read(stored, embedding, dtype)
    if head is None:
        return TargetHead(matrix, None, _transform_of(model))
    own = matrix if head is embedding else _read(stored, head, dtype)
    # Of two that are stored though tied, transformers takes the head for its own only where it differs.
    return TargetHead(matrix, matrix if tied and torch.equal(matrix, own) else own, _transform_of(model))


def _names_in_model(model: PreTrainedModel, tensors: Iterable[str]) -> dict[str, str]:
    """The checkpoint's names of its tensors, by what transformers makes of them on loading: many a checkpoint has names of
    its own (`embed_out.weight`), which transformers knows."""
    conversions, names = get_model_conversion_mapping(model), {}
    for tensor in sorted(tensors):
        renamed = tensor
        for conversion in conversions:
            renamed, _ = conversion.rename_source_key(renamed)
        names[renamed] = tensor
    return names


def _place(stored: _Stored, names: dict[str, str], model: PreTrainedModel, module: nn.Module) -> _Place:
    path = next(path for path, each in model.named_modules() if each is module)
    parameter, shape = f"{path}.weight", list(module.weight.shape)
    found = parameter if parameter in names else _alike(stored, names, parameter, shape)
    stem = f"{path.rpartition('.')[2]}." if found is None else found.removesuffix("weight")
    quantised = any(f".{stem}" in f".{name}" and not name.endswith((".weight", ".bias")) for name in names)
    if found is None:
        return _Place(parameter, shape, None, quantised)
    return _Place(
        parameter, shape, names[found], quantised or stored.slice(names[found]).get_dtype() not in NUMBER_FORMATS
    )


def _alike(stored: _Stored, names: dict[str, str], parameter: str, shape: list[int]) -> str | None:
    """The only tensor of this shape whose name ends as the parameter's does, or failing that as a shorter end of it does:
    a checkpoint of several parts may have another prefix than the model of its text part. Not one of a numbered layer:
    layers for multi-token prediction have copies of their own."""
    ends = parameter.split(".")
    for start in range(len(ends) - 1):
        ending = "." + ".".join(ends[start:])
        alike = [name for name in names if f".{name}".endswith(ending) and not re.search(r"\.\d+\.", name)]
        found = [name for name in alike if stored.slice(names[name]).get_shape() == shape]
        if len(found) > 1:
            raise UserError(
                f"target {stored.name!r}: {names[found[0]]} and {names[found[1]]} in its checkpoint could both be "
                f"{parameter}; name the checkpoint of a causal language model alone in model.target"
            )
        if found:
            return found[0]
    return None


def _read(stored: _Stored, place: _Place, dtype: str | torch.dtype | None) -> Tensor:
    if place.quantised:
        raise UserError(
            f"target {stored.name!r}: its embedding {place.parameter} is quantised, and the draft begins with it; choose a "
            "target with a plain one"
        )
    if place.tensor is None:
        raise UserError(
            f"target {stored.name!r}: its checkpoint lacks {place.parameter}; name the checkpoint of a whole causal "
            "language model in model.target"
        )
    shape = stored.slice(place.tensor).get_shape()
    if shape != place.shape:
        raise UserError(
            f"target {stored.name!r}: {place.tensor} is {shape} in its checkpoint, {place.shape} by its config; name the "
            "folder of a complete checkpoint in model.target"
        )
    tensor = stored.read(place.tensor)
    return tensor if dtype is None else tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
