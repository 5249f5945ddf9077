"""Embedding and lm_head, read directly from checkpoints like those that families publish: sharded, nested, quantised,
with copies."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from family_targets import LAYERS, make_family_target, published_config, with_class
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.errors import UserError
from eagle3.targets import head as head_module
from eagle3.targets.checkpoint import load_causal_lm
from eagle3.targets.head import load_target_head

INDEX = "model.safetensors.index.json"
Weights = dict[str, Tensor]


PUBLISHED = {recipe: published_config(recipe) for recipe in with_class()}
METHODS = {recipe: (each.get("quantization_config") or {}).get("quant_method") for recipe, each in PUBLISHED.items()}
FP8, MXFP4 = ([recipe for recipe in METHODS if METHODS[recipe] == method] for method in ("fp8", "mxfp4"))
SEVERAL_PARTS = [recipe for recipe, config in PUBLISHED.items() if "text_config" in config]
PREDICTING = [recipe for recipe, config in PUBLISHED.items() if config.get("num_nextn_predict_layers")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    """The family's tiny checkpoint, made once. Do not write to it."""
    folders: dict[str, Path] = {}

    def of(recipe: str) -> Path:
        if recipe not in folders:
            folders[recipe] = make_family_target(recipe, tmp_path_factory.mktemp(recipe) / "target")
        return folders[recipe]

    return of


def stored(folder: Path) -> Weights:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def written(source: Path, folder: Path, weights: Weights, shards: int = 4, **config: object) -> Path:
    """A checkpoint with these weights and the config of `source`, spread over `shards` files. A single file has no
    index."""
    folder.mkdir()
    whole = json.loads((source / "config.json").read_text("utf-8")) | config
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    names = sorted(weights)
    files = {name: f"model-{place % shards + 1:05}-of-{shards:05}.safetensors" for place, name in enumerate(names)}
    if shards == 1:
        files = dict.fromkeys(names, "model.safetensors")
    else:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}), encoding="utf-8")
    for file in set(files.values()):
        part = {name: weights[name].contiguous() for name in names if files[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    return folder


def matrix_names(weights: Weights) -> tuple[str, str | None]:
    """Names of the embedding and of the lm_head; a tied model has no lm_head."""
    (embedding,) = [name for name in weights if name.endswith("embed_tokens.weight") and ".layers." not in name]
    heads = [name for name in weights if name.endswith("lm_head.weight")]
    return embedding, heads[0] if heads else None


def assert_stored(folder: Path, weights: Weights) -> None:
    """Asserts that load_target_head returns what is stored, bit for bit."""
    embedding, head = matrix_names(weights)
    actual = load_target_head(folder)
    assert actual.embedding.dtype == weights[embedding].dtype and torch.equal(actual.embedding, weights[embedding])
    if head is None:
        assert actual.head is actual.embedding
    else:
        assert actual.head.dtype == weights[head].dtype and torch.equal(actual.head, weights[head])


@pytest.mark.parametrize("recipe", with_class())
def test_of_many_files_only_those_of_the_two_matrices_are_opened(recipe, checkpoint, tmp_path):
    """The other files hold no tensors at all."""
    weights = stored(checkpoint(recipe))
    folder = written(checkpoint(recipe), tmp_path / "sharded", weights, shards=12)
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    needed = {index[name] for name in matrix_names(weights) if name}
    spoilt = set(index.values()) - needed
    assert len(spoilt) >= 10
    for file in spoilt:
        (folder / file).write_bytes(b"no tensors")
    assert_stored(folder, weights)


@pytest.mark.parametrize("recipe", with_class())
def test_of_one_file_only_the_two_matrices_are_read(recipe, checkpoint, tmp_path, monkeypatch):
    weights, read = stored(checkpoint(recipe)), []

    class Noting:
        """safe_open, but records what is read."""

        def __init__(self, *arguments) -> None:
            self.file = safe_open(*arguments)

        def __getattr__(self, name: str):
            return getattr(self.file, name)

        def get_tensor(self, name: str) -> Tensor:
            read.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(head_module, "safe_open", Noting)
    assert_stored(written(checkpoint(recipe), tmp_path / "single", weights, shards=1), weights)
    assert sorted(read) == sorted(name for name in matrix_names(weights) if name)


@pytest.mark.parametrize("recipe", PREDICTING)
def test_copies_in_layers_for_multi_token_prediction_are_left_alone(recipe, checkpoint, tmp_path):
    weights = stored(checkpoint(recipe))
    embedding, head = matrix_names(weights)
    layer = f"model.layers.{LAYERS}."
    copies = {f"{layer}{norm}.weight": torch.ones(64) for norm in ("shared_head.norm", "enorm", "hnorm")}
    copies |= {f"{layer}embed_tokens.weight": weights[embedding] + 1, f"{layer}eh_proj.weight": torch.ones(64, 128)}
    copies |= {f"{layer}shared_head.head.weight": weights[head] + 1}
    for shards in (1, 3):
        assert_stored(written(checkpoint(recipe), tmp_path / str(shards), weights | copies, shards), weights)


def in_fp8(weights: Weights) -> Weights:
    """Linear weights in blocks of 128 x 128 with a scale each, as DeepSeek-V3 is published; the rest in bf16."""
    tensors: Weights = {}
    for name, tensor in weights.items():
        tensors[name] = tensor.to(torch.bfloat16)
        if tensor.dim() == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight")):
            rows, columns = tensor.shape
            scales = torch.full((-(-rows // 128), -(-columns // 128)), tensor.abs().max() / 448)
            tensors[name] = (tensor / scales[0, 0]).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
    return tensors


def in_mxfp4(weights: Weights) -> Weights:
    """Experts in blocks of 32 numbers of 4 bits with a shared exponent, as gpt-oss is published; the rest in bf16."""
    tensors: Weights = {}
    for name, tensor in weights.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, width, out = tensor.shape  # published transposed, as out by width
            shape = (experts, out, width // 32)
            tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.full(shape, 124, dtype=torch.uint8)
        else:
            tensors[name] = tensor.to(torch.bfloat16)
    return tensors


def quantised(recipe: str, source: Path, folder: Path, shards: int = 4) -> tuple[Path, Weights]:
    """A checkpoint that is quantised like the published one, and the weights that are stored there."""
    torch.manual_seed(7)
    weights = (in_fp8 if recipe in FP8 else in_mxfp4)(stored(source))
    config = {"quantization_config": PUBLISHED[recipe]["quantization_config"]}
    config |= dict.fromkeys(("torch_dtype", "dtype"), "bfloat16")  # under either name
    return written(source, folder, weights, shards, **config), weights


@pytest.mark.parametrize("recipe", [*FP8, *MXFP4])
def test_of_a_checkpoint_with_quantised_layers_both_matrices_are_as_stored(recipe, checkpoint, tmp_path):
    for shards in (1, 4):
        folder, weights = quantised(recipe, checkpoint(recipe), tmp_path / str(shards), shards)
        assert any(tensor.itemsize == 1 for tensor in weights.values())
        assert_stored(folder, weights)
        assert load_target_head(folder).head.dtype == torch.bfloat16


@pytest.mark.parametrize("recipe", [*FP8[:1], *MXFP4[:1]])
def test_a_quantised_checkpoint_runs_dequantised_or_is_refused_with_a_remedy(recipe, checkpoint, tmp_path):
    """transformers needs accelerate to dequantise, a package that this project does not require."""
    folder, _ = quantised(recipe, checkpoint(recipe), tmp_path / "quantised")
    if find_spec("accelerate") is None:
        with pytest.raises(UserError, match=r"cannot be read \(.*accelerate.*\); set target.backend=sglang"):
            load_causal_lm(str(folder), None, False, "auto")
    else:
        model = load_causal_lm(str(folder), None, False, "bfloat16")
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert model(input_ids=torch.arange(8)[None]).logits.isfinite().all()


@pytest.mark.parametrize("recipe", SEVERAL_PARTS)
def test_a_head_in_fp8_is_refused_with_the_remedy_and_the_embedding_still_read(recipe, checkpoint, tmp_path):
    weights = stored(checkpoint(recipe))
    embedding, head = matrix_names(weights)
    head = head or "language_model.lm_head.weight"  # in a tied checkpoint, a separate copy
    scaled = {head: weights[embedding].to(torch.float8_e4m3fn), f"{head}_scale_inv": torch.ones(4, 1)}
    folder = written(checkpoint(recipe), tmp_path / "scaled", weights | scaled)
    with pytest.raises(UserError, match="its lm_head is quantised, .*; set target.teacher=logits"):
        load_target_head(folder)
    target_head = load_target_head(folder, required=False)
    assert target_head.head is None and torch.equal(target_head.embedding, weights[embedding])


def test_a_model_of_several_parts_may_tie_in_its_own_name(checkpoint, tmp_path):
    """Mistral-Small's own config ties by default, that of its text part does not. Without an lm_head, the model is
    tied."""
    weights = stored(checkpoint("mistral-small"))
    embedding, head = matrix_names(weights)
    del weights[head]
    folder = written(checkpoint("mistral-small"), tmp_path / "tied", weights)
    assert "tie_word_embeddings" not in (folder / "config.json").read_text()
    assert_stored(folder, weights)
    refused = written(checkpoint("mistral-small"), tmp_path / "untied", weights, tie_word_embeddings=False)
    with pytest.raises(UserError, match="its checkpoint lacks lm_head.weight"):
        load_target_head(refused)
