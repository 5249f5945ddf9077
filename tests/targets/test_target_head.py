"""Embedding and lm_head, read from a checkpoint's files and compared with those of the model that transformers
loads."""

import json
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
import transformers
import transformers.dynamic_module_utils
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, PhiConfig, PhiForCausalLM, PreTrainedModel

from eagle3.errors import UserError
from eagle3.targets.checkpoint import load_causal_lm
from eagle3.targets.head import load_target_head, model_head
from eagle3.targets.logits import LogitTransform, TargetHead
from eagle3.targets.transformers import load_target

SHAPE = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SHAPE |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# What is special about each:
FAMILIES = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "gpt_oss": ("GptOss", EXPERTS),
    "gemma2": ("Gemma2", {"final_logit_softcapping": 3.0}),  # tied; it scales embeddings in code
    "granite": ("Granite", {"logits_scaling": 6.0}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),  # tied
    "gpt_neox": ("GPTNeoX", {}),  # its checkpoints call lm_head embed_out
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save(family: str, folder: Path, dtype: torch.dtype = torch.float32, shards: str = "5GB") -> Path:
    torch.manual_seed(4)
    name, changes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SHAPE | changes)
    getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).save_pretrained(folder, max_shard_size=shards)
    return folder


def whole_model(folder: Path, dtype: str | torch.dtype = "auto") -> PreTrainedModel:
    return load_causal_lm(str(folder), None, False, dtype)


def of_whole_model(folder: Path, dtype: str | torch.dtype = "auto") -> TargetHead:
    return model_head(str(folder), whole_model(folder, dtype), required=True)


def assert_same(actual: TargetHead, expected: TargetHead) -> None:
    for one, other in ((actual.embedding, expected.embedding), (actual.head, expected.head)):
        assert one.dtype == other.dtype and torch.equal(one, other)
        assert one.untyped_storage().nbytes() == one.nbytes and not one.requires_grad
    assert (actual.head is actual.embedding) == (expected.head.data_ptr() == expected.embedding.data_ptr())
    assert actual.transform == expected.transform


def rewrite(folder: Path, change) -> None:
    """Apply `change` to the tensors of a single-file checkpoint."""
    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_that_of_the_whole_model_bit_for_bit(family, dtype, tmp_path):
    save(family, tmp_path, dtype)
    for number_format in ("auto", "bfloat16" if dtype == torch.float32 else torch.float32):
        assert_same(load_target_head(tmp_path, dtype=number_format), of_whole_model(tmp_path, number_format))
    assert load_target_head(tmp_path).embedding.dtype == dtype
    changed = family in ("gemma2", "granite", "cohere")
    assert (load_target_head(tmp_path).transform != LogitTransform()) == changed


def test_of_the_hub_only_the_files_with_a_matrix_are_wanted_in_the_revision_asked_for(tmp_path, monkeypatch):
    """Loaded without a connection, from a cache that has no other files."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    cached, expected = tmp_path / "models--some--model", {}
    (cached / "refs").mkdir(parents=True)
    for family, revision in (("llama", "main"), ("llama_tied", "v2")):
        commit = family.encode().hex().ljust(40, "0")
        snapshot = save(family, cached / "snapshots" / commit, shards="10KB")
        (cached / "refs" / revision).write_text(commit)
        expected[revision] = of_whole_model(snapshot)
        index = json.loads((snapshot / "model.safetensors.index.json").read_text())["weight_map"]
        for file in set(index.values()) - {index[EMBEDDING], index.get(HEAD)}:
            (snapshot / file).unlink()
    assert_same(load_target_head("some/model", trust_remote_code=False), expected["main"])
    assert_same(load_target_head("some/model", revision="v2"), expected["v2"])
    with pytest.raises(UserError, match="config cannot be read .* check the id, the connection"):
        load_target_head("some/model", revision="v3")


def test_a_config_without_a_dtype_leaves_the_stored_one(tmp_path):
    save("qwen3", tmp_path, torch.bfloat16)
    configure(tmp_path, dtype=None)
    assert_same(load_target_head(tmp_path), of_whole_model(tmp_path))


def test_tied_weights_that_are_both_stored_are_one_only_if_equal(tmp_path):
    for name, factor in (("same", 1), ("different", 2)):
        folder = save("llama_tied", tmp_path / name)
        rewrite(folder, lambda weights, factor=factor: weights | {HEAD: weights[EMBEDDING] * factor})
        target_head = load_target_head(folder)
        assert_same(target_head, of_whole_model(folder))
        assert (target_head.head is target_head.embedding) == (factor == 1)


def test_a_tied_weight_may_be_stored_as_either(tmp_path):
    save("llama_tied", tmp_path)
    rewrite(tmp_path, lambda weights: {HEAD if name == EMBEDDING else name: each for name, each in weights.items()})
    assert_same(load_target_head(tmp_path), of_whole_model(tmp_path))


def wrapped(folder: Path, **more: torch.Tensor) -> Path:
    """The tiny Llama as the text part of a Llava, with additional tensors."""
    save("llama", folder)
    text = json.loads((folder / "config.json").read_text())
    vision = {"model_type": "clip_vision_model", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    config = {"model_type": "llava", "text_config": text, "vision_config": vision, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    rewrite(folder, lambda weights: {f"language_model.{name}": each for name, each in weights.items()} | more)
    return folder


def test_the_text_part_of_a_checkpoint_of_several_parts_is_found(tmp_path):
    others = {
        "audio.embed_tokens.weight": torch.zeros(8, 32),  # another shape
        "audio.lm_head.weight": torch.zeros(128, 16),
        "language_model.model.layers.3.embed_tokens.weight": torch.zeros(128, 32),  # for multi-token prediction
    }
    save("llama", tmp_path / "alone")
    assert_same(load_target_head(wrapped(tmp_path / "wrapped", **others)), of_whole_model(tmp_path / "alone"))


def test_two_tensors_that_could_be_the_matrix_are_refused(tmp_path):
    folder = wrapped(tmp_path, **{"talker.model.embed_tokens.weight": torch.zeros(128, 32)})
    both = "language_model.model.embed_tokens.* and talker.* could both be model.embed_tokens"
    with pytest.raises(UserError, match=both):
        load_target_head(folder)


@pytest.mark.parametrize(("family", "tensor"), [("llama", HEAD), ("llama", EMBEDDING), ("llama_tied", EMBEDDING)])
@pytest.mark.parametrize("required", [True, False])
def test_a_checkpoint_that_lacks_a_matrix_is_refused(family, tensor, required, tmp_path):
    save(family, tmp_path)
    rewrite(tmp_path, lambda weights: {name: each for name, each in weights.items() if name != tensor})
    with pytest.raises(UserError, match=f"its checkpoint lacks {tensor}; name the checkpoint of a whole"):
        load_target_head(tmp_path, required=required)


@pytest.mark.parametrize(("tensor", "name"), [(HEAD, "lm_head"), (EMBEDDING, "embedding")])
def test_a_matrix_that_is_not_finite_is_refused_from_the_files_and_in_a_loaded_model(tensor, name, tmp_path):
    save("llama", tmp_path)
    rewrite(tmp_path, lambda weights: weights | {tensor: weights[tensor].index_fill(0, torch.tensor(99), torch.nan)})
    for read in (load_target_head, of_whole_model):
        with pytest.raises(UserError, match=f"{name} holds numbers that are not finite"):
            read(tmp_path)


def test_a_layer_that_is_not_finite_is_refused_before_anything_is_judged(tmp_path):
    save("llama", tmp_path)
    rewrite(tmp_path, lambda weights: weights | {"model.norm.weight": weights["model.norm.weight"] * torch.nan})
    with pytest.raises(UserError, match="its logits are not finite"):
        load_target(tmp_path, aux_layers=(0, 1, 2))


def quantisations() -> dict[str, dict[str, torch.Tensor]]:
    """What quantised checkpoints store in place of a matrix."""
    return {
        "int8": {"weight": torch.ones(128, 32, dtype=torch.int8)},
        "fp8": {"weight": torch.ones(128, 32).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 1)},
        "scaled bf16": {"weight": torch.ones(128, 32, dtype=torch.bfloat16), "weight_scale": torch.ones(128, 1)},
        "gptq": {"qweight": torch.ones(4, 128, dtype=torch.int32), "scales": torch.ones(1, 128)},
        "4 bits": {"weight": torch.ones(2048, 1, dtype=torch.uint8), "weight.absmax": torch.ones(64)},
    }


@pytest.mark.parametrize("kind", quantisations())
def test_a_quantised_head_is_left_to_the_model_if_it_may_be_and_a_quantised_embedding_never(kind, tmp_path):
    weights = load_file(save("llama", tmp_path) / "model.safetensors")

    def quantise(matrix: str) -> None:
        stored = {matrix.replace("weight", name, 1): each for name, each in quantisations()[kind].items()}
        rewrite(tmp_path, lambda _: {name: each for name, each in weights.items() if name != matrix} | stored)

    quantise(HEAD)
    with pytest.raises(UserError, match="its lm_head is quantised, not linear without bias, .* target.teacher=logits"):
        load_target_head(tmp_path)
    actual = load_target_head(tmp_path, required=False)
    assert actual.head is None and torch.equal(actual.embedding, weights[EMBEDDING]) and actual.vocab_size == 128
    quantise(EMBEDDING)
    for required in (True, False):
        with pytest.raises(UserError, match="its embedding model.embed_tokens.weight is quantised"):
            load_target_head(tmp_path, required=required)


def test_a_head_with_a_bias_is_refused_where_required_and_else_left_to_the_model(tmp_path):
    model = PhiForCausalLM(PhiConfig(**{name: each for name, each in SHAPE.items() if name != "head_dim"}))
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="its lm_head is a Linear with a bias, .* target.teacher=logits"):
        load_target_head(tmp_path)
    target_head = load_target_head(tmp_path, required=False)
    assert target_head.head is None and torch.equal(target_head.embedding, model.model.embed_tokens.weight)


def test_what_does_not_fit_the_config_or_has_no_weights_is_refused(tmp_path):
    save("llama", tmp_path)
    configure(tmp_path, vocab_size=130)
    with pytest.raises(
        UserError, match=r"embed_tokens.weight is \[128, 32\] in its checkpoint, but \[130, 32\] by its config"
    ):
        load_target_head(tmp_path)
    configure(tmp_path, vocab_size=128)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="causal language model cannot be read"):
        load_target_head(tmp_path)


def test_a_model_that_brings_its_own_code_is_loaded_by_it(tmp_path, monkeypatch):
    """The code doubles the head that it loads."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = save("llama", tmp_path / "model")
    (folder / "modeling_doubled.py").write_text(
        "from transformers import LlamaForCausalLM\n\n\n"
        "class Doubled(LlamaForCausalLM):\n"
        "    @classmethod\n"
        "    def from_pretrained(cls, *arguments, **keywords):\n"
        "        loaded = super().from_pretrained(*arguments, **keywords)\n"
        "        loaded[0].lm_head.weight.data.mul_(2)\n"
        "        return loaded\n"
    )
    configure(folder, auto_map={"AutoModelForCausalLM": "modeling_doubled.Doubled"})
    plain = LlamaForCausalLM.from_pretrained(folder)
    for trust, factor in ((True, 2), (False, 1)):
        target_head = load_target_head(folder, trust_remote_code=trust)
        assert torch.equal(target_head.head, plain.lm_head.weight * factor)


class Planted(type(Path())):
    """Makes a file when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path(self),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_a_pickled_checkpoint_is_refused_in_one_line_and_not_opened(tmp_path, name):
    save("qwen3", tmp_path)
    torch.save({**load_file(tmp_path / "model.safetensors"), "x": Planted(tmp_path / "ran")}, tmp_path / name)
    (tmp_path / "model.safetensors").unlink()
    for load in (load_target_head, whole_model):
        with pytest.raises(UserError, match=f"its weights are pickled \\('{name}'\\).*convert them to safetensors"):
            load(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"lm_head.weight": "../../x.safetensors"}}, "'lm_head.weight' in '../../x.safetensors'"),
        ({"weight_map": {"lm_head.weight": "/etc/x.safetensors"}}, "'/etc/x.safetensors', which is not"),
        ({"weight_map": {"lm_head.weight": "part/../../x.safetensors"}}, "in the checkpoint's folder"),
        ({"weight_map": {"lm_head.weight": "pytorch_model.bin"}}, "'pytorch_model.bin', which is not a safetensors"),
        ({"weight_map": ["x"]}, "has no weight_map"),
        ({"weight_map": {"lm_head.weight": 1}}, "'lm_head.weight' in 1, which is not a safetensors file"),
        ([], "holds list, not an object"),
        (b"[" * 200_000, "nested deeper than 100 levels"),
        (b'{"weight_map": ' + b"1" * 5000 + b"}", "5,000 digits"),
        (b"\xff", "not valid JSON"),
    ],
)
def test_an_index_that_is_damaged_or_leaves_its_folder_is_refused(tmp_path, index, message):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    save("qwen3", folder)
    (folder / "model.safetensors").rename(tmp_path / "x.safetensors")  # outside, for an index that leads there
    path = folder / "model.safetensors.index.json"
    path.write_bytes(index if isinstance(index, bytes) else json.dumps(index).encode())
    for load in (load_target_head, whole_model):
        with pytest.raises(UserError) as caught:
            load(folder)
        assert str(caught.value).startswith(f"{path}: ")
        assert message in str(caught.value) and len(str(caught.value)) < 500


def test_links_of_a_folder_may_lead_anywhere_as_in_the_hubs_cache(tmp_path):
    save("qwen3", tmp_path / "model")
    expected = of_whole_model(tmp_path / "model")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "blobs" / "0123")
    (tmp_path / "model" / "one.safetensors").symlink_to("../blobs/0123")
    with safe_open(tmp_path / "blobs" / "0123", "pt") as file:
        index = {"metadata": {}, "weight_map": dict.fromkeys(file.keys(), "one.safetensors")}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(load_target_head(tmp_path / "model"), expected)
    whole_model(tmp_path / "model")


TWO = b'{"model.embed_tokens.weight":{"dtype":"F32","shape":[4,4],"data_offsets":[0,64]}%s}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        (2**63).to_bytes(8, "little") + b"{}",
        b"\x80\x1a\6" + b"\0" * 5 + b"[" * 400_000,
        *(
            len(header).to_bytes(8, "little") + header + b"\0" * 64
            for header in (
                TWO % b',"lm_head.weight":{"dtype":"F32","shape":[4,4],"data_offsets":[32,96]}',
                TWO.replace(b"[4,4]", b"[4,9223372036854775807]") % b"",
                TWO.replace(b"F32", b"F33") % b"",
                TWO % b',"x":3',
            )
        ),
    ],
)
def test_a_damaged_safetensors_file_is_refused_in_one_line(tmp_path, content):
    save("qwen3", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    for load in (load_target_head, whole_model):
        with pytest.raises(UserError) as caught:
            load(tmp_path)
        assert str(caught.value).startswith(f"target '{tmp_path}': its ") and len(str(caught.value)) < 500
