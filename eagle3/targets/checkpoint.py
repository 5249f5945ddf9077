"""Read a target's checkpoint: config, tokenizer, fingerprint, or the whole model."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

import torch
import transformers
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import RemoteEntryNotFoundError
from safetensors import safe_open
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import get_tokenizer_config, tokenizer_class_from_name
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, has_file, logging

from eagle3.errors import UserError, shown
from eagle3.hub import require_folder, require_hub, require_no_draft
from eagle3.parsing import DEEPEST, is_too_deep, read_json_object

PICKLED = ("*.bin", "*.bin.index.json", "*.pth", "*.pt", "*.ckpt", "*.pkl")  # PyTorch's formats
# What transformers would build, and training count, one by one.
MOST = {"num_hidden_layers": 1000, "vocab_size": 1 << 24}
QUANTISED_REMEDY = (
    "set target.backend=sglang, which runs it as it is, or name a copy that is not quantised in model.target"
)


def target_config(
    name_or_path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """The config of the target's language model (the text part of a multimodal one). Raises UserError if unreadable."""
    return whole_config(str(name_or_path), revision, trust_remote_code).get_text_config(decoder=True)


def whole_config(name: str, revision: str | None, trust_remote_code: bool) -> PretrainedConfig:
    """The config of the whole target, with all its parts.

    If transformers does not know the model_type but does know the architecture (Kimi-K2 is a DeepSeek-V3), returns a
    config of that architecture's type. Raises UserError if the config cannot be read, or needs code that is neither
    installed nor allowed; the message names what is missing.
    """
    with readable(name, "config"):
        values = config_values(name, revision)
        if trust_remote_code or values.get("model_type") in (None, *CONFIG_MAPPING):
            return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
        architectures = values.get("architectures") or []
        types = [kind for kind, model in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if model in architectures]
        if not types:
            hint = (
                " or set model.trust_remote_code=true to run the code that comes with this checkpoint, if you trust it,"
                if values.get("auto_map")
                else ""
            )
            raise UserError(
                f"target {name!r}: transformers {transformers.__version__} has no model class for architecture "
                f"{', '.join(architectures or ['(none named)'])} (model_type {values['model_type']!r}); install a "
                f"transformers that has it,{hint} or choose another target (docs/new-model.md says what a target must "
                "have)"
            )
        config = CONFIG_MAPPING[types[0]].from_dict(
            {key: value for key, value in values.items() if key not in ("model_type", "auto_map")}
        )
        config.name_or_path = name
        return config


def config_values(name: str, revision: str | None) -> dict:
    """The contents of config.json, without the defaults of a config class."""
    with readable(name, "config"):
        values, _ = PretrainedConfig.get_config_dict(name, revision=revision)
    if flaw := _flaw(values):
        raise UserError(
            f"target {name!r}: its config.json {flaw}; fix it, or name the folder of another checkpoint in model.target"
        )
    require_no_draft(name, values)
    return values


def _flaw(values: object) -> str | None:
    """What in a config.json would break this program or transformers without a word about the cause, as the end of a
    sentence that begins with the file."""
    if not values or not isinstance(values, dict):
        return "is not there, or holds no object"
    if is_too_deep(values):
        return f"is nested deeper than {DEEPEST} levels"
    for part in (values, *values.values()):
        for name, most in MOST.items() if isinstance(part, dict) else ():
            if isinstance(number := part.get(name), int) and number > most:
                return f"has {name} {shown(number)}, more than {most:,}"
    return None


def weight_files(name: str, revision: str | None) -> dict[str, str] | None:
    """Map each tensor that transformers would load to its safetensors file. None if the checkpoint has no such files or
    the hub is out of reach, which loading will report.

    Raises UserError if all weights are pickled, because reading them could run code, and if the index is damaged or
    names files outside the folder.
    """
    if has_file(name, SAFE_WEIGHTS_NAME, revision):
        with safe_open(cached_file(name, SAFE_WEIGHTS_NAME, revision=revision), "pt") as weights:
            return dict.fromkeys(weights.keys(), SAFE_WEIGHTS_NAME)
    if has_file(name, SAFE_WEIGHTS_INDEX_NAME, revision):
        return indexed_files(Path(cached_file(name, SAFE_WEIGHTS_INDEX_NAME, revision=revision)))
    pickles = [file.name for pattern in PICKLED for file in sorted(Path(name).glob(pattern))]
    if pickles:
        raise UserError(
            f"target {name!r}: its weights are pickled ({shown(pickles[0])}), and reading such a file can run code "
            "that it holds; convert them to safetensors, or name a checkpoint in safetensors in model.target"
        )
    return None


def indexed_files(index: Path) -> dict[str, str]:
    """Read each tensor's file from the index. File names must stay in the folder, but links may lead out of it, as
    those in the hub's cache do."""
    remedy = "copy or download it again"
    files = read_json_object(index, remedy, remedy).get("weight_map")
    if not isinstance(files, dict):
        raise UserError(f"{index}: has no weight_map of tensors and files; {remedy}")
    for tensor, file in files.items():
        path = PurePosixPath(str(file))
        if path.is_absolute() or ".." in path.parts or path.suffix != ".safetensors":
            raise UserError(
                f"{index}: has {shown(tensor)} in {shown(file)}, which is not a safetensors file in the checkpoint's "
                "folder; do not use this checkpoint, or fix the index"
            )
    return files


def load_tokenizer(
    name_or_path: str | Path, *, revision: str | None = None, trust_remote_code: bool | Literal["tokenizer"] = False
) -> PreTrainedTokenizerBase:
    """The target's tokenizer. trust_remote_code: as in a recipe. Raises UserError if there is none."""
    name = str(name_or_path)
    with readable(name, "tokenizer"):
        # Pass the config; otherwise transformers reads it itself and fails on an unknown model_type.
        config = whole_config(name, revision, trust_remote_code is True)
        if not trust_remote_code and (code := tokenizer_code(name, revision)):
            raise UserError(
                f"target {name!r}: its tokenizer is Python code ({shown(code)}); read it, and set "
                "model.trust_remote_code=tokenizer to let it run, or name a folder with a tokenizer.json"
            )
        return AutoTokenizer.from_pretrained(
            name, config=config, revision=revision, trust_remote_code=bool(trust_remote_code)
        )


def tokenizer_code(name: str, revision: str | None = None) -> str | None:
    """The class, as `file.Class`, of a tokenizer that is the checkpoint's own code. None if transformers can do
    without, because it has the tokenizer's class, or there is a tokenizer.json: from other files it makes a tokenizer
    that may split text in another way."""
    with readable(name, "tokenizer"):
        config = get_tokenizer_config(name, revision=revision)
        files = config.get("auto_map") or {}
        classes = files.get("AutoTokenizer") if isinstance(files, dict) else files  # a list in old checkpoints
        named = [each for each in ([classes] if isinstance(classes, str) else classes or []) if isinstance(each, str)]
        if not named or tokenizer_class_from_name(config.get("tokenizer_class") or ""):
            return None
        if not Path(name).is_dir():
            with contextlib.suppress(RemoteEntryNotFoundError):  # not if the hub is out of reach
                hf_hub_download(name, "tokenizer.json", revision=revision)
                return None
        return None if Path(name, "tokenizer.json").is_file() else named[0]


def fingerprint(name_or_path: str | Path, *, revision: str | None = None) -> str:
    """A target's identity for provenance, as 32 hex digits. Takes milliseconds per weight file.

    A hub id is identified by its commit. A folder is identified by config.json, the weights' index, and each weight
    file's name, size and sampled bytes. (A fine-tuned copy has the same names, sizes and headers, but different bytes.)
    Changes to a few values between the samples go unnoticed. The path does not count, so the folder can be moved.
    """
    name, digest = str(name_or_path), hashlib.sha256()
    with readable(name, "config"):
        config = Path(cached_file(name, "config.json", revision=revision))
        if not Path(name).is_dir():
            digest.update(f"{name}@{config.parent.name}".encode())  # snapshots/<commit>/config.json in the hub's cache
            return digest.hexdigest()[:32]
        digest.update(config.read_bytes())
        for pattern in ("*.index.json", "*.safetensors", "*.bin"):
            for file in sorted(Path(name).glob(pattern)):
                digest.update(f"{file.name} {file.stat().st_size}".encode() + b"".join(_sampled_bytes(file)))
    return digest.hexdigest()[:32]


def _sampled_bytes(file: Path, pieces: int = 64, size: int = 4096) -> Iterator[bytes]:
    """`pieces` evenly spaced parts of the file, including its first and last bytes; all of it if it is small."""
    last = max(file.stat().st_size - size, 0)
    with file.open("rb") as stream:
        for start in sorted({last * i // (pieces - 1) for i in range(pieces)}):
            stream.seek(start)
            yield stream.read(size)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Inside the block, transformers logs only errors."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def load_causal_lm(
    name: str, revision: str | None, trust_remote_code: bool, dtype: str | torch.dtype
) -> PreTrainedModel:
    """Load the whole model on the CPU. Raises UserError if it cannot be read, or if weights are missing."""
    config = whole_config(name, revision, trust_remote_code)
    # transformers' sdpa attention silently drops this cap.
    capped = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None
    logging.disable_progress_bar()  # progress bars garble logs
    quantization = getattr(config, "quantization_config", None)
    with (
        readable(name, "causal language model", QUANTISED_REMEDY if quantization else None),
        without_warnings(),  # it would list every missing weight; our one-line error names only the first
    ):
        weight_files(name, revision)
        # In transformers' tables, some multimodal models are not causal language models, although they decode text.
        multimodal = (
            type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        )
        loader = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
        model, loading_info = loader.from_pretrained(
            name,
            config=config,
            revision=revision,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            **({"attn_implementation": "eager"} if capped else {}),
        )
    # transformers only warns, and fills missing weights with random numbers.
    if mismatches := sorted(loading_info["mismatched_keys"]):
        key, actual_shape, config_shape = mismatches[0]
        raise UserError(
            f"target {name!r}: {len(mismatches)} of its weights have other sizes than config.json says ({key}: "
            f"{list(actual_shape)}, not {list(config_shape)}); copy the config.json that belongs to the weights"
        )
    if missing := sorted(map(str, loading_info["missing_keys"])):
        raise UserError(
            f"target {name!r}: its checkpoint lacks {len(missing)} weights of {type(model).__name__} ({missing[0]} "
            "first); name the checkpoint of a whole causal language model in model.target"
        )
    return model


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The decoder that transformers names or, if it has no layers of its own (Llama 4), the model inside it that
    does."""
    decoder = model.get_decoder()
    models = [part for part in decoder.children() if isinstance(part, PreTrainedModel) and hasattr(part, "layers")]
    return decoder if hasattr(decoder, "layers") or len(models) != 1 else models[0]


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """The decoder's layers; None if they are not where most of transformers' classes have them."""
    decoder = decoder_of(model)
    layers = getattr(decoder, "layers", None)
    return layers if decoder is not model and isinstance(layers, nn.ModuleList) else None


@contextlib.contextmanager
def readable(name: str, part: str, remedy: str | None = None) -> Iterator[None]:
    """Turn errors that transformers and the hub raise for an unreadable checkpoint into a one-line UserError.

    remedy: its end; default: the advice to name a complete checkpoint
    """
    require_folder(name)
    try:
        if not Path(name).is_dir() and not isinstance(try_to_load_from_cache(name, "config.json"), str):
            require_hub()
        yield
    except UserError:
        raise
    except Exception as error:  # a damaged file can cause any exception: tokenizers raises plain Exceptions
        remedy = remedy or (
            "fix it, or name the folder of a complete checkpoint in model.target"
            if Path(name).is_dir()
            else f"there is no such folder in {Path.cwd()}: name a downloaded one in model.target, or check the id, "
            "the connection and your access to it"
        )
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        raise UserError(f"target {name!r}: its {part} cannot be read ({reason}); {remedy}") from error
