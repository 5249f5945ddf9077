"""Drafts in the forms in which other trainers and engines publish them are read as what they are."""

import json

import pytest
import torch
from drafts import export
from published_drafts import LAYOUTS, deepspec, legacy_norms, rewritten, specforge, speculators
from safetensors.torch import load_file, save_file
from test_interchange import D2T, SIZES, T2D, _draft, _export

from eagle3.draft.interchange import load_weights, read_exported
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import UserError
from eagle3.targets.sglang.draft_check import require_known

IDS = T2D.nonzero().flatten()


@pytest.mark.parametrize("change", LAYOUTS)
def test_a_draft_in_every_published_form_has_the_tensors_that_it_was_written_with(tmp_path, topology, change):
    own = read_exported(_export(tmp_path / "own", _draft(topology, 1)))
    read = read_exported(rewritten(_export(tmp_path / "other", _draft(topology, 1)), change))
    shape = ("token_ids", "aux_layers")
    assert {**vars(read.config), **dict.fromkeys(shape)} == {**vars(own.config), **dict.fromkeys(shape)}
    assert torch.equal(read.d2t, D2T) and torch.equal(read.t2d, T2D)
    assert read.weights.keys() == own.weights.keys() - ({"embed_tokens.weight"} if change is specforge else set())
    for name, tensor in read.weights.items():
        assert torch.equal(tensor.float(), own.weights[name].to(tensor.dtype).float()), name


def test_the_norms_of_other_trainers_are_read(tmp_path, topology):
    own = read_exported(_export(tmp_path / "own", _draft(topology, 2, fc_norm=True)))
    read = read_exported(rewritten(_export(tmp_path / "other", _draft(topology, 2, fc_norm=True)), legacy_norms))
    assert read.config.fc_norm and read.weights.keys() == own.weights.keys()
    folder = rewritten(
        _export(tmp_path / "normed", _draft(topology, 2, norm_before_fc=True, norm_before_residual=True)), speculators
    )
    values = json.loads((folder / "config.json").read_text())
    del values["norm_before_residual"]  # true, as vLLM takes it
    (folder / "config.json").write_text(json.dumps(values | {"norm_before_fc": True}))
    normed = read_exported(folder)
    assert normed.config.norm_before_fc and normed.config.norm_before_residual
    load_weights(Eagle3Draft(normed.config, topology.modules_alone, torch.float32), normed, topology.tensor)
    assert "input_norm.weight" in normed.weights
    with pytest.raises(UserError, match="SGLang does not know norm_before_residual.*--engine transformers"):
        require_known(normed.config, folder)


def test_a_draft_of_deepspec_reads_five_layers_the_whole_vocabulary_and_has_normed_heads(tmp_path, topology):
    vocabulary, layers = SIZES["vocab_size"], (1, 3, 5, 7, 9)
    shape = {"draft_vocab_size": vocabulary, "qk_norm": True, "attention_bias": True, "aux_layers": layers}
    draft = _draft(topology, 8, **shape)
    own, other = (export(tmp_path / name, draft) for name in ("own", "other"))
    own, read = read_exported(own), read_exported(rewritten(other, deepspec))
    assert vars(read.config) == vars(own.config)
    assert read.config.different_sizes(draft.draft_config) == []
    assert bool(read.t2d.all()) and len(read.t2d) == vocabulary and not read.d2t.any()
    assert read.weights.keys() == own.weights.keys() > {f"midlayer.self_attn.{name}_norm.weight" for name in "qk"}
    loaded = Eagle3Draft(read.config, topology.modules_alone, torch.float32)
    load_weights(loaded, read, topology.tensor)
    pairs = zip(loaded.parameters(), draft.parameters(), strict=True)
    assert all(torch.equal(weight, written) for weight, written in pairs)
    with pytest.raises(UserError, match="SGLang does not know qk_norm.*--engine transformers"):
        require_known(read.config, tmp_path)


def test_a_draft_in_several_files_is_read_whole_and_its_index_names_no_file_elsewhere(tmp_path, topology):
    folder = _export(tmp_path / "draft", _draft(topology, 3))
    own, tensors = read_exported(folder), load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-0000{number % 2 + 1}-of-00002.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    read = read_exported(folder)
    assert all(torch.equal(read.weights[name], tensor) for name, tensor in own.weights.items())
    index.write_text(json.dumps({"weight_map": places | {"fc.weight": "../model.safetensors"}}))
    with pytest.raises(UserError, match="weight_map does not name files of this folder"):
        read_exported(folder)


@pytest.mark.parametrize("missing", ["d2t", "t2d"])
@pytest.mark.parametrize("as_ids", [False, True])
def test_one_of_the_vocabularys_tables_is_enough(tmp_path, topology, missing, as_ids):
    def change(values: dict, tensors: dict) -> dict:
        tensors["d2t"] = IDS.clone() if as_ids else tensors["d2t"]
        del tensors[missing]
        return values

    read = read_exported(rewritten(_export(tmp_path / "draft", _draft(topology, 4)), change))
    assert torch.equal(read.d2t, D2T) and torch.equal(read.t2d, T2D)


def test_a_draft_of_the_whole_vocabulary_needs_no_tables_and_its_head_may_be_tied(tmp_path, topology):
    def tied(values: dict, tensors: dict) -> dict:
        for name in ("d2t", "t2d", "lm_head.weight"):
            del tensors[name]
        return values

    folder = export(tmp_path / "draft", _draft(topology, 5, draft_vocab_size=SIZES["vocab_size"]))
    read = read_exported(rewritten(folder, tied))
    assert torch.equal(read.weights["lm_head.weight"], read.weights["embed_tokens.weight"])
    assert bool(read.t2d.all()) and len(read.t2d) == SIZES["vocab_size"] and not read.d2t.any()


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_another_kind_of_draft_is_named(tmp_path, topology, kind):
    """Nothing but its name makes the second one EAGLE3."""
    values = {"speculators_model_type": kind}
    folder = rewritten(_export(tmp_path / "draft", _draft(topology, 6)), lambda _, tensors: values)
    with pytest.raises(UserError, match=f"describes a draft of type '{kind}', not EAGLE3"):
        read_exported(folder)


def test_what_a_draft_has_beyond_eagle3_is_named(tmp_path, topology):
    def with_query_norm(values: dict, tensors: dict) -> dict:
        tensors["layers.0.self_attn.q_norm.weight"] = torch.ones(6)
        return values

    read = read_exported(rewritten(_export(tmp_path / "draft", _draft(topology, 7)), with_query_norm))
    with pytest.raises(
        UserError, match='midlayer.self_attn.q_norm.weight is in its weights.*"model_type": "qwen3"; write it there'
    ):
        load_weights(_draft(topology, 7), read, topology.tensor)
