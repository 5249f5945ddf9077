"""Export, read and load a draft: exact in both directions, and every kind of wrong file is reported in one line."""

import hashlib
import json
import os
from functools import partial

import pytest
import torch
from definition import random_case
from drafts import export
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle3.draft.config import DraftConfig
from eagle3.draft.interchange import load_weights, read_exported, shard, whole_tensors
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import UserError

SIZES = {"hidden_size": 16, "target_hidden_size": 20, "intermediate_size": 24, "max_position_embeddings": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 30, "draft_vocab_size": 12}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
T2D = torch.arange(30) % 5 < 2
D2T = T2D.nonzero().flatten() - torch.arange(12)
# What the definition has under exported names, and the tables of the vocabulary.
NAMES = {name: tuple(weight.shape) for name, weight in random_case([[1]], **SIZES).weights.items()}
NAMES |= {"d2t": (12,), "t2d": (30,)}
EMBEDDING = {"embed_tokens.weight": NAMES.pop("embed_tokens.weight")}
FC_NORM = {f"fc_norm.{third}.weight": (20,) for third in range(3)}


def _draft(topology, seed, **changes):
    """A draft whose weights are all random, including the norms."""
    torch.manual_seed(seed)
    draft = Eagle3Draft(DraftConfig(**(SIZES | changes)), topology.modules, torch.float32)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return draft


_export = partial(export, t2d=T2D)


@pytest.fixture
def exported(tmp_path, topology):
    return _export(tmp_path / "draft", _draft(topology, 0))


def _rewrite(folder, change):
    """Apply `change` to the dictionary of exported tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _refusal(action, *arguments):
    """The one line of the UserError that the action raises."""
    with pytest.raises(UserError) as caught:
        action(*arguments)
    message = str(caught.value)
    assert "\n" not in message and "; " in message, "where: what; remedy"
    return message


def _digest(tensors):
    """A digest of every tensor's name, description and elements, one element at a time."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = tensors[name].view(torch.int16) if tensors[name].dtype == torch.bfloat16 else tensors[name]
        kind = str(tensors[name].dtype).split(".")[1]
        digest.update(f'["{name}", "{kind}", {list(array.shape)}]\n'.encode())
        for element in array.numpy().reshape(-1):
            digest.update(element.tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("with_embedding", [True, False], ids=["embedding", "no embedding"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"fc_norm": True, "norm_output": True}, {"qk_norm": True, "attention_bias": True}, {"rope_parameters": YARN}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exported_weights_come_back_bit_for_bit(tmp_path, topology, dtype, changes, with_embedding):
    """In fp32 bit for bit, in bf16 after rounding. An embedding that was not exported does not change."""
    source, draft = _draft(topology, 1, **changes), _draft(topology, 2, **changes)
    own_embedding = draft.embedding.weight.detach().clone()
    exported = read_exported(_export(tmp_path, source, dtype=dtype, with_embedding=with_embedding))
    assert exported.config.different_sizes(source.draft_config) == []
    assert torch.equal(exported.d2t, D2T) and torch.equal(exported.t2d, T2D)
    assert {weight.dtype for weight in exported.weights.values()} == {dtype}
    load_weights(draft, exported, topology.tensor)
    for (name, actual), (_, sent) in zip(draft.named_parameters(), source.named_parameters(), strict=True):
        expected = own_embedding if name == "embedding.weight" and not with_embedding else sent.to(dtype).float()
        assert torch.equal(actual, expected), name


@pytest.mark.parametrize("fc_norm", [False, True])
@pytest.mark.parametrize("with_embedding", [False, True])
def test_the_file_holds_exactly_the_tensors_that_engines_load(tmp_path, topology, fc_norm, with_embedding):
    draft = _draft(topology, 3, fc_norm=fc_norm)
    folder = _export(tmp_path, draft, dtype=torch.bfloat16, with_embedding=with_embedding)
    tensors = load_file(folder / "model.safetensors")
    expected = NAMES | (FC_NORM if fc_norm else {}) | (EMBEDDING if with_embedding else {})
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    kinds = {"d2t": torch.int64, "t2d": torch.bool}
    assert all(tensor.dtype == kinds.get(name, torch.bfloat16) for name, tensor in tensors.items())
    assert torch.equal((torch.arange(12) + tensors["d2t"]), tensors["t2d"].nonzero().flatten())
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "sha256_of_tensors": _digest(tensors)}
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("umask", [0o022, 0o027], ids=oct)
def test_both_files_are_as_readable_as_the_umask_says(tmp_path, topology, umask):
    before = os.umask(umask)
    try:
        folder = _export(tmp_path / "draft", _draft(topology, 13))
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == 2 * [0o666 & ~umask]


def test_one_rank_has_every_tensor_whole_and_nothing_is_copied(topology):
    draft = _draft(topology, 15)
    parameters = dict(draft.named_parameters())
    whole = whole_tensors(parameters, draft, topology.tensor)
    assert list(whole) == list(parameters)
    for name, parameter in parameters.items():
        assert whole[name] is parameter and shard(parameter, parameter, topology.tensor) is parameter


def test_exporting_again_replaces_the_files(exported, topology):
    newer = _draft(topology, 5)
    _export(exported, newer)
    assert torch.equal(read_exported(exported).weights["fc.weight"], newer.fc.weight)


def test_config_json_says_what_serving_engines_read(tmp_path, topology):
    changes = {"rope_parameters": YARN, "aux_layers": (1, 4, 8), "fc_norm": True, "token_ids": {"bos_token_id": 7}}
    folder = _export(tmp_path, _draft(topology, 6, **changes), dtype=torch.bfloat16)
    values = json.loads((folder / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLMEagle3"] and values["num_hidden_layers"] == 1
    assert {name: values[name] for name in SIZES} == SIZES
    assert values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 4, 8]
    assert values["eagle_aux_hidden_state_layer_ids"] == [2, 5, 9]  # vLLM's count, see test_vllm.py
    assert values["eagle_config"]["use_aux_hidden_state"] is True
    assert values["rope_parameters"] == YARN
    assert values["rope_theta"] == 1e6
    assert values["rope_scaling"] == {name: value for name, value in YARN.items() if name != "rope_theta"}
    assert values["fc_norm"] is True and values["norm_output"] is False
    assert values["torch_dtype"] == values["dtype"] == "bfloat16" and values["bos_token_id"] == 7


@pytest.mark.parametrize("rope", [{}, {"rope_theta": 1e6}, {"rope_type": "default"}], ids=str)
def test_rope_keys_left_out_mean_the_defaults_that_config_json_states_without_a_scaling(rope):
    """A recipe may set rope_parameters by hand."""
    values, whole = DraftConfig(**SIZES, rope_parameters=rope).to_json("float32"), DEFAULT_ROPE | rope
    assert values["rope_parameters"] == whole and values["rope_theta"] == whole["rope_theta"]
    assert values["rope_scaling"] is None


LLAMA3 = YARN | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS = {"plain": {}, "llama3": {"rope_parameters": LLAMA3}, "everything": {"rope_parameters": YARN}}
CONFIGS["everything"] |= {"aux_layers": (0, 2, 5), "fc_norm": True, "norm_output": True, "rms_norm_eps": 1e-5}
CONFIGS["everything"]["token_ids"] = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None}
every_config = pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)


@every_config
def test_a_config_comes_back_from_its_json_whole(changes):
    no_ids = {"token_ids": dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))}
    config = DraftConfig(**(SIZES | no_ids | changes))
    assert DraftConfig.from_json(json.loads(json.dumps(config.to_json("float32"))), "config.json") == config


@every_config
@pytest.mark.parametrize("old_key", ["rope_type", "type"])
def test_either_spelling_of_rope_alone_gives_the_same_config(changes, old_key):
    """transformers 4 wrote rope_theta and rope_scaling (older versions with its kind as `type`), 5 writes
    rope_parameters."""
    config = DraftConfig(**(SIZES | changes))
    new = config.to_json("float32")
    old = {name: value for name, value in new.items() if name != "rope_parameters"}
    if scaling := old["rope_scaling"]:
        old["rope_scaling"] = {old_key if name == "rope_type" else name: value for name, value in scaling.items()}
    new = {name: value for name, value in new.items() if name not in ("rope_theta", "rope_scaling")}
    for values in (old, new):
        assert DraftConfig.from_json(values, "config.json").rope_parameters == config.rope_parameters


MINIMAL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "vocab_size": 30}
LAYERS, SLIDING, FULL = "eagle_aux_hidden_state_layer_ids", "sliding_attention", "full_attention"


def _layers(nested, top):
    """Keys of a config.json that name auxiliary layers for SGLang and for vLLM."""
    return {"eagle_config": {LAYERS: nested}, LAYERS: top}


@pytest.mark.parametrize(
    ("keys", "read"),
    [
        ({}, {"target_hidden_size": 16, "num_key_value_heads": 4, "head_dim": 4, "draft_vocab_size": 30}),
        ({}, {"aux_layers": None, "fc_norm": False, "norm_output": False, "window": None}),
        (_layers([1, 4, 8], [2, 5, 9]), {"aux_layers": (1, 4, 8)}),
        (_layers([1, 4, 8], None), {"aux_layers": (1, 4, 8)}),
        (_layers([], [2, 5, 9]), {"aux_layers": (1, 4, 8)}),
        ({LAYERS: [2, 5, 9]}, {"aux_layers": (1, 4, 8)}),
        ({"layer_types": [SLIDING], "sliding_window": 16}, {"window": 16}),
        ({"layer_types": [FULL], "sliding_window": 16}, {"window": None}),
        ({"layer_types": [FULL, FULL], "sliding_window": None}, {"window": None}),
        ({"sliding_window": 4096, "use_sliding_window": False}, {"window": None}),
        ({"sliding_window": None}, {"window": None}),
    ],
    ids=str,
)
def test_config_json_is_read_as_engines_read_it_with_the_usual_values_of_keys_left_out(keys, read):
    config = DraftConfig.from_json(MINIMAL | keys, "config.json")
    assert {name: getattr(config, name) for name in read} == read


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (_layers([1, 4, 8], [1, 4, 8]), ("[1, 4, 8] (counted from 0", "[1, 4, 8] (counted from 1", "remove the one")),
        (_layers([1, 4, 8], [2, 5, 10]), ("[1, 4, 8]", "[2, 5, 10]")),
        (_layers(None, [0, 4, 8]), ("[0, 4, 8]", "counted from 1")),
        (_layers([-1, 4, 8], None), ("eagle_config.eagle_aux", "[-1, 4, 8]", "counted from 0")),
        (_layers(7, None), ("7",)),
        (_layers(["1", 4, 8], None), ("['1', 4, 8]",)),
        (_layers(None, [True, 4, 8]), ("[True, 4, 8]",)),
        ({"sliding_window": 16}, ("sliding_window is 16 but layer_types does not say",)),
        ({"sliding_window": 16, "layer_types": []}, ("sliding_window is 16 but layer_types does not say",)),
        ({"sliding_window": 16, "layer_types": [SLIDING, FULL]}, ("but a draft has one layer",)),
        (
            {"sliding_window": 16, "layer_types": [SLIDING], "use_sliding_window": False},
            ("use_sliding_window is false",),
        ),
        ({"layer_types": [SLIDING]}, ("sliding_window is missing",)),
        ({"layer_types": ["chunked_attention"]}, ("a draft's layer is",)),
        *(
            ({"layer_types": [SLIDING], "sliding_window": value}, ("not a number of keys",))
            for value in (0, -1, "16", True, 1.5)
        ),
    ],
    ids=str,
)
def test_what_engines_would_read_differently_is_refused_with_its_values(keys, parts):
    message = _refusal(DraftConfig.from_json, MINIMAL | keys, "some/config.json")
    assert message.startswith("some/config.json: ") and all(part in message for part in parts), message


EVERY_NAME = sorted({*NAMES, *FC_NORM} - {"d2t", "t2d"})


@pytest.fixture
def not_loaded(tmp_path, topology):
    """The refusal of a draft to load the export of a draft of its shape with other tensors. It names the folder."""

    def refusal(change, **shape):
        folder = _export(tmp_path / "draft", _draft(topology, 7, **shape))
        _rewrite(folder, change)
        message = _refusal(load_weights, _draft(topology, 8, **shape), read_exported(folder), topology.tensor)
        assert str(folder) in message
        return message

    return refusal


@pytest.mark.parametrize("name", EVERY_NAME)
def test_a_missing_tensor_is_named(not_loaded, name):
    message = not_loaded(lambda tensors: tensors.pop(name), fc_norm=True)
    assert name in message and "missing" in message


@pytest.mark.parametrize("name", ["midlayer.self_attn.q_proj.bias", "fc_norm.0.weight", "fc_norm.3.weight"])
def test_an_unknown_tensor_is_named(not_loaded, name):
    assert name in not_loaded(lambda tensors: tensors.update({name: torch.ones(20)}))


@pytest.mark.parametrize("name", EVERY_NAME)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(not_loaded, name):
    shape = list({**NAMES, **FC_NORM}[name])
    wrong = [*shape[:-1], shape[-1] + 2]
    message = not_loaded(lambda tensors: tensors.update({name: torch.zeros(wrong)}), fc_norm=True)
    assert all(part in message for part in (name, str(wrong), str(shape), "model.draft.config"))


def test_gate_and_up_of_unequal_sizes_are_refused_though_they_add_up(not_loaded):
    sizes = {"midlayer.mlp.gate_proj.weight": torch.zeros(22, 16), "midlayer.mlp.up_proj.weight": torch.zeros(26, 16)}
    message = not_loaded(lambda tensors: tensors.update(sizes))
    assert "[22, 16]" in message and "[24, 16]" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_flipped_bit_of_any_tensor_is_noticed_and_a_draft_without_a_digest_is_read(tmp_path, topology, dtype):
    path = _export(tmp_path / "draft", _draft(topology, 0), dtype=dtype) / "model.safetensors"
    whole, size = path.read_bytes(), int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    for name, described in header.items():
        if name in ("__metadata__", "d2t", "t2d"):  # the last two contradict each other earlier
            continue
        flipped = bytearray(whole)
        flipped[8 + size + described["data_offsets"][1] - 1] ^= 1
        path.write_bytes(flipped)
        message = _refusal(read_exported, path.parent)
        assert (
            message.startswith(f"{path}: damaged, or changed after it was exported") and "export the draft" in message
        )
        del header["__metadata__"]["sha256_of_tensors"]
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + flipped[8 + size :])
        read_exported(path.parent)
        header["__metadata__"]["sha256_of_tensors"] = "anything"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_its_name_whoever_exported_it(exported, value):
    _rewrite(exported, lambda tensors: tensors["midlayer.mlp.up_proj.weight"][1].fill_(value))  # without a digest
    message = _refusal(read_exported, exported)
    assert message.startswith(f"{exported / 'model.safetensors'}: midlayer.mlp.up_proj.weight ")


def test_equal_drafts_are_equal_files(tmp_path, topology):
    files = {(_export(tmp_path / name, _draft(topology, 0)) / "model.safetensors").read_bytes() for name in "abcdef"}
    assert len(files) == 1


TABLES = {
    "neither table": lambda tensors: (tensors.pop("d2t"), tensors.pop("t2d")),
    "another offset": lambda tensors: tensors["d2t"].add_(1),
    "descending ids": lambda tensors: tensors.update(d2t=(D2T + torch.arange(12)).flip(0) - torch.arange(12)),
    "one token less": lambda tensors: tensors["t2d"].logical_and_(torch.arange(30) > 0),
    "one token more": lambda tensors: tensors["t2d"].logical_or_(torch.arange(30) == 29),
    "fewer draft ids": lambda tensors: tensors.update(d2t=D2T[:-1].clone()),
    "a smaller target": lambda tensors: tensors.update(t2d=T2D[:-1].clone()),
    "outside the target": lambda tensors: tensors["d2t"][-1:].add_(1000),
}


@pytest.mark.parametrize("change", TABLES.values(), ids=TABLES)
def test_tables_of_the_vocabulary_that_contradict_each_other_or_are_missing_are_named(exported, change):
    _rewrite(exported, change)
    message = _refusal(read_exported, exported)
    assert str(exported / "model.safetensors") in message and "d2t" in message and "t2d" in message


@pytest.mark.parametrize("size", [0, 4, 200, -1], ids=["nothing", "half a length", "half a header", "all but a byte"])
def test_a_truncated_file_is_named(exported, size):
    path = exported / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert str(path) in _refusal(read_exported, exported)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(exported, missing):
    (exported / missing).unlink()
    assert str(exported / missing) in _refusal(read_exported, exported)


WRONG = {
    "hidden_size": None,
    "vocab_size": None,
    "num_hidden_layers": 2,
    "hidden_act": "gelu",
    "num_key_value_heads": 3,
    "draft_vocab_size": 31,
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4},
}


@pytest.mark.parametrize("key", WRONG)
def test_a_config_json_of_another_kind_of_draft_is_refused(key):
    """A value of None here means that the key is removed."""
    values = {name: value for name, value in (MINIMAL | {key: WRONG[key]}).items() if value is not None}
    _refusal(DraftConfig.from_json, values, "config.json")
