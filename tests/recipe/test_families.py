"""Every family's recipe with a tiny model of the family's real class: captured, trained, exported; and that the
captured states are right."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from family_run import DRAFT_VOCABULARY, run_recipe
from family_targets import (
    LAYERS,
    PADDED_VOCABULARY,
    SIZES,
    WITHOUT_CLASS,
    architecture,
    class_names,
    family_class,
    family_tokenizer,
    make_family_target,
    plain,
    published_config,
    recipes,
    tiny_config,
    with_class,
)
from places import FAMILIES
from tiny_run import metrics

from eagle3.draft.derivation import default_aux_layers
from eagle3.draft.interchange import read_exported
from eagle3.draft.rope import RotaryEmbedding
from eagle3.errors import UserError
from eagle3.recipe.schema import Recipe
from eagle3.targets.checkpoint import target_config
from eagle3.targets.head import load_target_head
from eagle3.targets.long_prefill import LongPrefill
from eagle3.targets.transformers import TransformersTarget, load_target

# Families with layers through which a document cannot go in chunks, and the type of such layers.
NOT_IN_CHUNKS = {
    "llama-4-scout": "chunked_attention",
    "deepseek-v3.2": "indexed_attention",
    "glm-5.1": "indexed_attention",
    "minimax-m3": "minimax_m3_sparse",
}


@dataclass(frozen=True)
class Family:
    """folder: of the tiny checkpoint. ids [T]: a document longer than any window of the layers."""

    recipe: str
    folder: Path
    target: TransformersTarget
    ids: torch.Tensor

    def own_outputs(self) -> Any:
        """The outputs of the family's own model for the document."""
        with torch.no_grad():
            return self.target.model(input_ids=self.ids[None], output_hidden_states=True, use_cache=False)


every_family = pytest.mark.parametrize("family", with_class(), indirect=True, scope="module")


@pytest.fixture(scope="module")
def family(request, tmp_path_factory) -> Family:
    folder = make_family_target(request.param, tmp_path_factory.mktemp(request.param) / "target")
    ids = torch.randint(PADDED_VOCABULARY - 32, (50,), generator=torch.Generator().manual_seed(3))
    return Family(request.param, folder, load_target(folder, dtype="float32"), ids)


@every_family
def test_auxiliary_states_are_the_familys_own(family):
    (states,) = family.target.prefill([family.ids])
    expected = family.own_outputs().hidden_states
    assert len(expected) == LAYERS + 1
    for layer, aux in zip(family.target.aux_layers, states.aux.chunk(3, dim=-1), strict=True):
        assert torch.allclose(aux, expected[layer + 1][0], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(aux, expected[layer][0], rtol=1e-2, atol=1e-2)
    assert torch.allclose(states.teacher.values, expected[-1][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3.5-27b", "qwen3.5-35b-a3b"], indirect=True)
def test_text_alone_has_the_same_states_in_the_whole_multimodal_model(family):
    """That model gives each token a position in time, height and width. Of text, all three are the plain one."""
    whole = family_class(family.recipe).from_pretrained(family.folder, dtype="float32").eval()
    assert type(whole) is not type(family.target.model)
    (states,) = family.target.prefill([family.ids])
    with torch.no_grad():
        expected = whole(input_ids=family.ids[None], output_hidden_states=True, use_cache=False).hidden_states
    own = torch.cat([expected[layer + 1][0] for layer in family.target.aux_layers], dim=-1)
    assert torch.allclose(states.aux, own, rtol=1e-5, atol=1e-5)


@every_family
def test_teacher_logits_from_the_stored_head_are_the_familys_own(family):
    (states,) = family.target.prefill([family.ids])
    expected = family.own_outputs().logits[0]
    head = load_target_head(family.folder, dtype="float32")
    actual = head.transform.apply(states.teacher.values @ head.head.T)
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert torch.equal(states.teacher.argmax, expected.argmax(-1))
    assert torch.allclose(states.teacher.logsumexp, expected.logsumexp(-1), rtol=1e-4)
    assert len(set(states.teacher.argmax.tolist())) > 5  # a model with few predictions would agree with anything


@every_family
def test_the_familys_own_logits_can_be_the_teacher(family):
    """As for heads that training cannot load. Only the logits of the draft vocabulary are kept."""
    ids = torch.tensor([3, 7, 100, 250, 447])
    target = TransformersTarget(family.target.model, aux_layers=None, prefill_tokens=64, draft_ids=ids)
    (states,) = target.prefill([family.ids])
    expected = family.own_outputs().logits[0]
    assert (states.teacher.values - expected[:, ids]).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(states.teacher.argmax, expected.argmax(-1))


@every_family
def test_a_document_in_chunks_has_the_familys_own_hidden_states_or_is_refused(family, topology):
    groups = (topology.ulysses, topology.ring, topology.sequence)
    if family.recipe in NOT_IN_CHUNKS:
        with pytest.raises(UserError, match=f"has layers of type {NOT_IN_CHUNKS[family.recipe]}.* set hidden_states"):
            LongPrefill(family.target, *groups, 16)
        return
    chunks = list(LongPrefill(family.target, *groups, 16).chunks(family.ids))
    expected = family.own_outputs().hidden_states
    assert len(chunks) == -(-len(family.ids) // 16)
    expected_aux = torch.cat([expected[layer + 1][0] for layer in family.target.aux_layers], dim=-1)
    assert torch.allclose(torch.cat([chunk.aux for chunk in chunks]), expected_aux, rtol=1e-4, atol=1e-4)
    assert torch.allclose(torch.cat([chunk.teacher.values for chunk in chunks]), expected[-1][0], rtol=1e-4, atol=1e-4)


@every_family
def test_the_tiny_target_reads_its_document(family):
    """The first token affects the last row, beyond any window, and every layer adds something. A target whose outputs
    depend on nothing would agree with anything."""
    changed = torch.cat(((family.ids[:1] + 1) % 400, family.ids[1:]))
    one, other = family.target.prefill([family.ids, changed])
    for mine, theirs in zip(
        (*one.aux.chunk(3, dim=-1), one.teacher.values),
        (*other.aux.chunk(3, dim=-1), other.teacher.values),
        strict=True,
    ):
        assert 0.05 < mine.std() < 100
        assert (mine - theirs)[1].norm() > 1e-3 * mine[1].norm()
    assert (one.teacher.values - other.teacher.values)[-1].norm() > 1e-5 * one.teacher.values[-1].norm()


@every_family
def test_the_recipe_captures_trains_and_exports(family, topology, tmp_path):
    recipe = run_recipe(family.recipe, family.folder, tmp_path, topology)
    steps = metrics(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2]
    assert all(math.isfinite(step["loss"]) and step["loss"] > 0 for step in steps)
    assert all(math.isfinite(value) for step in steps for value in step["step_losses"])
    exported = read_exported(tmp_path / "run" / "export")
    assert_shaped_as(json.loads((tmp_path / "run" / "export" / "config.json").read_text()), family, recipe)
    assert_rotates_as(RotaryEmbedding(exported.config), exported.config, family)


def assert_shaped_as(exported: dict[str, Any], family: Family, recipe: Recipe) -> None:
    """Compares an exported config.json with the family's published config, made small, and with the recipe."""
    own = tiny_config(family.recipe, family_tokenizer(family.recipe))
    own = own.get("text_config", own)
    assert exported["hidden_size"] == exported["target_hidden_size"] == own["hidden_size"] == SIZES["hidden_size"]
    assert (exported["vocab_size"], exported["draft_vocab_size"]) == (PADDED_VOCABULARY, DRAFT_VOCABULARY)
    layers = default_aux_layers(LAYERS)
    assert exported["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(layers)
    assert exported["eagle_aux_hidden_state_layer_ids"] == [layer + 1 for layer in layers]  # vLLM counts from 1
    if "kv_lora_rank" not in own:  # otherwise no head of the target is like a draft's
        for name, full in (
            ("num_attention_heads", None),
            ("num_key_value_heads", "num_global_key_value_heads"),
            ("head_dim", "global_head_dim"),  # of Gemma 4's layers with full attention
        ):
            assert exported[name] == own.get(full, own.get(name, 16))
    context = recipe.model.draft.max_position_embeddings or own.get("max_position_embeddings")
    for name, value in (("max_position_embeddings", context), ("rms_norm_eps", own.get("rms_norm_eps"))):
        assert exported[name] == value or value is None  # the class's default


def assert_rotates_as(rope: RotaryEmbedding, config: Any, family: Family) -> None:
    """Asserts that the draft rotates as the published config says, and like the family's own module for full attention
    if that has the same width."""
    published = published_config(family.recipe)
    published = published.get("text_config", published)
    scaling = published.get("rope_scaling") or published.get("rope_parameters") or {}
    scaling = scaling.get("full_attention", scaling)
    others = {"type", "mscale", "mscale_all_dim", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
    expected = {name: scaling[name] for name in scaling.keys() - others}
    expected["rope_type"] = scaling.get("rope_type") or scaling.get("type") or "default"
    if expected["rope_type"] == "proportional":  # Gemma 4's word for rotating a part of the pairs
        expected["rope_type"] = "default"
    if "rope_theta" in published:
        expected["rope_theta"] = published["rope_theta"]
    actual = {name: config.rope_parameters.get(name) for name in expected}
    assert actual == expected
    own = family.target.decoder.rotary_emb
    frequencies = getattr(own, "full_attention_inv_freq", None)
    frequencies = own.inv_freq if frequencies is None else frequencies
    scale = getattr(own, "full_attention_attention_scaling", None) or own.attention_scaling
    assert rope.scaling == pytest.approx(scale)
    if 2 * len(frequencies) == config.head_dim:
        rotated = frequencies > 0  # those of Gemma 4 that are zero leave their pairs as they are
        assert rotated.all() or scaling["rope_type"] == "proportional"
        assert torch.allclose(rope.frequencies[torch.float32][rotated], frequencies[rotated], rtol=1e-6, atol=0)
    else:  # rotates a part of each head, or of latent attention's
        partial = {"partial_rotary_factor", "rotary_dim", "qk_rope_head_dim"}
        assert partial & published.keys() or partial & scaling.keys()


def test_the_families_without_a_class_are_those_that_transformers_lacks():
    lacking = {recipe for recipe in recipes() if plain(architecture(recipe)) not in class_names()}
    assert lacking == set(WITHOUT_CLASS)


@pytest.mark.parametrize("recipe", WITHOUT_CLASS)
def test_a_family_without_a_class_is_refused_by_its_name(recipe):
    assert architecture(recipe) == WITHOUT_CLASS[recipe]
    refusal = f"has no model class for architecture {WITHOUT_CLASS[recipe]}.*; install.*trust_remote_code=true"
    with pytest.raises(UserError, match=refusal):
        target_config(FAMILIES / recipe)
