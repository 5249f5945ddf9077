"""A target's embedding and lm_head, from a loaded model or straight from the files of its checkpoint."""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import cached_file
from transformers.utils.logging import disable_progress_bar

from eagle3.errors import UserError
from eagle3.targets.checkpoint import load_causal_lm, readable, weight_files, whole_config
from eagle3.targets.logits import LogitTransform, TargetHead
from eagle3.tensors import require_finite

# Config fields that change logits: the power at which they are factors, and the caps. Model families use different
# names for the same thing.
FACTORS = {"logit_scale": 1, "output_multiplier": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
CAPS = ("final_logit_softcapping", "logits_soft_cap")
# safetensors' names for number formats that are not quantised.
NUMBER_FORMATS = ("F64", "F32", "BF16", "F16")


def load_target_head(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: str | torch.dtype = "auto",
    required: bool = True,
) -> TargetHead:
    """Load only the embedding and lm_head, on the CPU, to train with a target that runs elsewhere or ran earlier.

    Reads nothing else from the checkpoint, and downloads from the hub only the files that hold these two. Tensor names
    come from transformers' model, which is built without weights on the meta device. A model with its own Python code
    (trust_remote_code) is loaded whole and then dropped, because only that code knows which weights it reads. Refuses
    pickled weights (PyTorch's .bin).

    dtype: a torch dtype, its name, or "auto" (the config's dtype, or as stored if the config names none)
    required: whether the lm_head must be a plain matrix; a store of logits does not need one

    Raises UserError if the checkpoint cannot be read, if a weight is missing or matches several tensors, and if the
    embedding is quantised.
    """
    name = str(name_or_path)
    config = whole_config(name, revision, trust_remote_code)
    own_code = trust_remote_code and AutoModelForCausalLM.__name__ in (getattr(config, "auto_map", None) or {})
    disable_progress_bar()  # download bars garble logs
    with readable(name, "embedding and lm_head"):
        files = None if own_code else weight_files(name, revision)
        if files is not None:
            return _read_head(_Stored(name, revision, files), config, dtype, required)
    return model_head(name, load_causal_lm(name, revision, trust_remote_code, dtype), required)


def model_head(name: str, model: PreTrainedModel, required: bool) -> TargetHead:
    """Embedding and lm_head of a loaded model. A head that is not a plain matrix becomes None or, if `required`,
    raises UserError."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight.detach()
    plain = _is_linear(head) and head.weight.is_floating_point() and head.weight.itemsize > 1
    if required and not plain:
        raise _unusable(name, head, quantised=False)
    return _sound_head(name, embedding, head.weight.detach() if plain else None, model)


def _sound_head(name: str, embedding: Tensor, head: Tensor | None, model: PreTrainedModel) -> TargetHead:
    """The head of these matrices. Raises UserError if they are not finite."""
    matrices = {"embedding": embedding} if head is None else {"embedding": embedding, "lm_head": head}
    require_finite(matrices, f"target {name!r}", "download it again, or choose another target")
    return TargetHead(embedding, head, _transform_of(model))


def _transform_of(model: PreTrainedModel) -> LogitTransform:
    """The transform that a model applies to its logits, according to the config of its language part."""
    config = model.config.get_text_config(decoder=True)
    values = {name: value for name, value in config.to_dict().items() if value is not None}
    factors = FACTORS | ({"logits_scaling": 1} if config.model_type.startswith("hyperclovax") else {})
    scale = math.prod((values[name] ** power for name, power in factors.items() if name in values), start=1.0)
    return LogitTransform(scale, next((values[name] for name in CAPS if name in values), None))


def _is_linear(head: nn.Module | None) -> bool:
    """Whether the head is a linear layer without bias, whose weight is the plain matrix."""
    return (
        isinstance(head, nn.Linear) and head.bias is None and head.weight.shape == (head.out_features, head.in_features)
    )


def _unusable(name: str, head: nn.Module | None, quantised: bool) -> UserError:
    biased = isinstance(head, nn.Linear) and head.bias is not None
    description = "quantised" if quantised else f"a {type(head).__name__}{' with a bias' if biased else ''}"
    return UserError(
        f"target {name!r}: its lm_head is {description}, not linear without bias, which training cannot load; set "
        "target.teacher=logits, or choose another target"
    )


class _Stored(NamedTuple):
    """A checkpoint in safetensors."""

    name: str
    revision: str | None
    files: dict[str, str]  # file name by tensor

    def file(self, tensor: str) -> safe_open:
        """The file of this tensor, whose slice of it knows shape and number format without reading values."""
        return safe_open(cached_file(self.name, self.files[tensor], revision=self.revision), "pt")


class _Place(NamedTuple):
    """Where a weight is stored."""

    parameter: str  # its name in the model
    shape: list[int]  # its shape in the model
    tensor: str | None  # its name in the checkpoint; None if missing
    quantised: bool  # stored in parts, or not as a matrix of numbers


def _read_head(stored: _Stored, config: PretrainedConfig, dtype: str | torch.dtype, required: bool) -> TargetHead:
    # A multi-part config may tie the embeddings at the top level only, not in its text part.
    ties = getattr(config, "tie_word_embeddings", False)
    # If transformers has no causal language model for the whole config, it has one for the text part.
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
        return _sound_head(stored.name, matrix, None, model)
    weight = matrix if head is embedding else _read(stored, head, dtype)
    # If both are stored although tied, transformers uses the separate head only if the two differ.
    return _sound_head(stored.name, matrix, matrix if tied and torch.equal(matrix, weight) else weight, model)


def _names_in_model(model: PreTrainedModel, tensors: Iterable[str]) -> dict[str, str]:
    """Map transformers' names to the checkpoint's. Many checkpoints have tensor names of their own
    (`embed_out.weight`), which transformers renames on loading."""
    conversions, names = get_model_conversion_mapping(model), {}
    for tensor in sorted(tensors):
        model_name = tensor
        for conversion in conversions:
            model_name, _ = conversion.rename_source_key(model_name)
        names[model_name] = tensor
    return names


def _place(stored: _Stored, names: dict[str, str], model: PreTrainedModel, module: nn.Module) -> _Place:
    path = next(path for path, submodule in model.named_modules() if submodule is module)
    parameter, shape = f"{path}.weight", list(module.weight.shape)
    key = parameter if parameter in names else _alike(stored, names, parameter, shape)
    stem = f"{path.rpartition('.')[2]}." if key is None else key.removesuffix("weight")
    quantised = any(f".{stem}" in f".{name}" and not name.endswith((".weight", ".bias")) for name in names)
    if key is not None:
        quantised |= stored.file(names[key]).get_slice(names[key]).get_dtype() not in NUMBER_FORMATS
    return _Place(parameter, shape, names.get(key), quantised)


def _alike(stored: _Stored, names: dict[str, str], parameter: str, shape: list[int]) -> str | None:
    """The only tensor of this shape whose name ends with `parameter` or, failing that, with a shorter suffix of it.

    A multi-part checkpoint may use a different prefix than the model of its text part. Tensors in numbered layers do
    not count, because layers for multi-token prediction have their own copies.
    """
    ends = parameter.split(".")
    for start in range(len(ends) - 1):
        ending = "." + ".".join(ends[start:])
        candidates = [name for name in names if f".{name}".endswith(ending) and not re.search(r"\.\d+\.", name)]
        matches = [name for name in candidates if stored.file(names[name]).get_slice(names[name]).get_shape() == shape]
        if len(matches) > 1:
            raise UserError(
                f"target {stored.name!r}: {names[matches[0]]} and {names[matches[1]]} in its checkpoint could both be "
                f"{parameter}; name the checkpoint of a causal language model alone in model.target"
            )
        if matches:
            return matches[0]
    return None


def _read(stored: _Stored, place: _Place, dtype: str | torch.dtype | None) -> Tensor:
    if place.quantised:
        raise UserError(
            f"target {stored.name!r}: its embedding {place.parameter} is quantised, but the draft starts from it; "
            "choose a target with a plain one"
        )
    if place.tensor is None:
        raise UserError(
            f"target {stored.name!r}: its checkpoint lacks {place.parameter}; name the checkpoint of a whole causal "
            "language model in model.target"
        )
    file = stored.file(place.tensor)
    shape = file.get_slice(place.tensor).get_shape()
    if shape != place.shape:
        raise UserError(
            f"target {stored.name!r}: {place.tensor} is {shape} in its checkpoint, but {place.shape} by its config; "
            "name the folder of a complete checkpoint in model.target"
        )
    tensor = file.get_tensor(place.tensor)
    return tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)  # None: as stored
