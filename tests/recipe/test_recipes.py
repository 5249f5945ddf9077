"""Every recipe for a model, with its target's published config: it parses, plans and fits, and its claims are true."""

import json
from dataclasses import replace
from typing import get_args

import pytest
import yaml
from claims import Claim, Claims, read_claims, recipes_table
from places import FAMILIES, ROOT, ZERO2
from transformers import (
    FalconH1Config,
    Gemma4TextConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MiniMaxConfig,
    PretrainedConfig,
    Qwen3_5MoeTextConfig,
    RecurrentGemmaConfig,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3.draft.config import DraftConfig
from eagle3.draft.derivation import derive_draft, derived_rope
from eagle3.draft.rope import RotaryEmbedding
from eagle3.errors import UserError
from eagle3.jobs.derived import shape_draft, vocabulary_size
from eagle3.jobs.gate import can_be_judged
from eagle3.jobs.new_recipe import GPU_BYTES, NODE, planned, refreshed, rope_in_words
from eagle3.jobs.plan import planned_step
from eagle3.planning.fitting import RESERVED, PlannedStream
from eagle3.recipe.loading import checked_recipe, load_recipe
from eagle3.recipe.schema import Draft, Recipe
from eagle3.targets.checkpoint import target_config
from eagle3.targets.facts import TargetFacts, is_stateful, read_facts, recurrent_layers

OWN_TARGETS = ("quickstart", "long-context-demo")  # recipes whose target is made by the run itself
RECIPES = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.yaml")) if path.stem not in OWN_TARGETS}
CLAIMS = read_claims(ROOT / "recipes" / "claims.toml")
NO_CLASS = "ling-flash-2.0"  # its code comes with the checkpoint
every_recipe = pytest.mark.parametrize("name", RECIPES)


@pytest.fixture(scope="module")
def facts() -> dict[str, TargetFacts]:
    """The facts from the published config, by recipe."""
    return {name: read_facts(str(FAMILIES / name)) for name in RECIPES}


def recipe_of(name: str) -> Recipe:
    return load_recipe(RECIPES[name])


def origin_of(name: str) -> dict:
    return yaml.safe_load((FAMILIES / name / "origin.yaml").read_text(encoding="utf-8"))


def test_every_published_config_has_a_recipe_but_the_one_without_a_class():
    assert {folder.name for folder in FAMILIES.iterdir() if folder.is_dir()} - {NO_CLASS} == RECIPES.keys()


@every_recipe
def test_a_recipe_plans_and_fits_on_one_node_or_if_its_batch_is_smaller_on_one_gpu(name, facts):
    recipe = recipe_of(name)
    gpus = NODE if recipe.training.global_batch_size >= NODE else 1
    planned = planned_step(recipe, shape_draft(recipe, facts[name].config), gpus, ZERO2, packed=True)
    documents, left = divmod(recipe.training.global_batch_size, planned.sizes.data * recipe.training.accumulation)
    assert left == 0
    stream = PlannedStream(documents * recipe.data.max_length, documents, 1.0)
    assert stream.needs(planned) <= GPU_BYTES * (1 - RESERVED)


@every_recipe
def test_a_recipe_says_of_its_target_what_the_published_config_says(name, facts):
    recipe, known = recipe_of(name), facts[name]
    assert recipe.model.target == origin_of(name)["model"]
    assert CLAIMS[name].architecture == known.architecture
    assert CLAIMS[name].context == known.config.max_position_embeddings >= recipe.data.max_length
    assert CLAIMS[name].rope == rope_in_words(planned(recipe, known, NODE, ZERO2).draft)


@every_recipe
def test_what_a_recipe_says_of_layouts_and_disk_is_what_the_planner_says_now(name, facts):
    text = RECIPES[name].read_text(encoding="utf-8")
    assert refreshed(text, recipe_of(name), facts[name], ZERO2, name) == text


@every_recipe
def test_a_draft_reaches_as_far_as_its_target(name, facts):
    """The draft has the rope that lets its target reach long contexts, and its context is not shorter unless the recipe
    says so (for a table of ten million positions)."""
    draft, config = planned(recipe_of(name), facts[name], NODE, ZERO2).draft, facts[name].config
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    rope = {"proportional": rope | {"rope_type": "default"}}.get(rope["rope_type"], rope)  # as Gemma 4 rotates a part
    for key in ("rope_type", "rope_theta", "factor", "original_max_position_embeddings"):
        assert draft.rope_parameters.get(key) == rope.get(key)
    own = config.max_position_embeddings
    assert draft.max_position_embeddings == (own if own <= 2**20 else 262_144)


@every_recipe
def test_the_config_of_an_export_is_one_that_transformers_reads(name, facts):
    """Checked at the size of the model itself, because engines read the config through transformers."""
    draft = planned(recipe_of(name), facts[name], NODE, ZERO2).draft
    read = LlamaConfig(**json.loads(json.dumps(draft.to_json("bfloat16"))))
    assert read.head_dim == draft.head_dim and read.rope_parameters == draft.rope_parameters
    assert RotaryEmbedding(draft).scaling == pytest.approx(LlamaRotaryEmbedding(read).attention_scaling)


def test_the_documentation_has_the_table_of_these_recipes():
    assert CLAIMS.keys() == RECIPES.keys()
    assert recipes_table(ROOT / "recipes") in (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


def test_a_claim_without_a_word_is_refused():
    claims = dict.fromkeys(get_args(Claim), "unknown")
    known = {"architecture": "A", "context": 1, "rope": "default"}
    Claims(**known, unverified=claims)
    with pytest.raises(ValueError, match="weights must stand once"):
        Claims(**known, unverified={claim: why for claim, why in claims.items() if claim != "weights"})
    with pytest.raises(ValueError, match="config must stand once"):
        Claims(**known, verified=["config"], unverified=claims)


# Derived drafts ------------------------------------------------------------------------------------------------------


def derived(config: PretrainedConfig, **changes):
    return derive_draft(config, draft_vocab_size=100, aux_layers=(1, 2, 3), **changes)


@pytest.mark.parametrize(
    ("family", "heads"),
    [("deepseek-v3", (56, 8, 128)), ("glm-4.5-air", (32, 8, 128))],
    ids=["latent attention", "96 heads of 128 on 4,096"],
)
def test_where_the_targets_heads_do_not_divide_its_hidden_size_the_draft_has_heads_of_its_own(family, heads):
    draft = derived(target_config(FAMILIES / family))
    assert (draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim) == heads
    assert draft.num_attention_heads * draft.head_dim == draft.hidden_size


def test_the_mlp_is_as_wide_as_what_a_token_passes_through():
    wide = {name: derived(target_config(FAMILIES / name)).intermediate_size for name in RECIPES}
    assert wide["gpt-oss-20b"] == 4 * 2880  # four experts, and no dense layer
    assert wide["llama-4-scout"] == 16384  # its dense layers'
    assert wide["qwen3-coder-480b-a35b"] == 8 * 2560  # wider than its intermediate_size, which no layer has
    assert wide["deepseek-v3"] == 18432 and wide["llama-3.1-8b"] == 14336
    assert derived(Qwen3_5MoeTextConfig()).intermediate_size == 8 * 512  # experts alone


def test_of_layers_of_unlike_sizes_the_draft_is_as_those_of_full_attention_unless_their_heads_are_too_wide():
    def heads(width: int) -> tuple[int, int, int]:
        draft = derived(Gemma4TextConfig(global_head_dim=width))
        assert draft.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
        return draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim

    assert (heads(256), heads(512)) == ((8, 4, 256), (8, 4, 128))


def test_heads_that_are_given_need_none_of_the_targets():
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    rest = {"intermediate_size": 64, "max_position_embeddings": 100, "rope_parameters": {"rope_type": "default"}}
    assert derived(MambaConfig(), **heads, **rest).head_dim == 64


def test_yarn_of_a_target_without_an_original_context_is_what_transformers_reads():
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    draft = derived(LlamaConfig(rope_parameters=dict(rope), max_position_embeddings=4096))
    assert draft.rope_parameters["original_max_position_embeddings"] == 4096
    with pytest.raises(UserError, match="'yarn' needs original_max_position_embeddings"):
        derived(LlamaConfig(), rope_parameters=rope)


def test_what_the_recipe_says_wins_over_what_is_derived():
    draft = derived(GptOssConfig(), intermediate_size=64, num_attention_heads=8, rms_norm_eps=1e-3)
    assert (draft.intermediate_size, draft.num_attention_heads, draft.rms_norm_eps) == (64, 8, 1e-3)


def test_of_ropes_by_layer_type_the_draft_has_that_of_full_attention_and_a_partial_rotation_becomes_a_whole_one():
    by_type, partial = (derived_rope(target_config(FAMILIES / name)) for name in ("gemma-3-27b", "glm-4.5-air"))
    assert by_type == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert partial == {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (MambaConfig(), "MambaConfig.*num_attention_heads is None.*model.draft.head_dim, num_attention_heads"),
        (PretrainedConfig(), "hidden_size is None"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "'dynamic'.*rope_parameters"),
    ],
)
def test_what_a_config_lacks_is_said_in_one_line(config, missing):
    with pytest.raises(UserError, match=missing) as mistake:
        derived(config)
    assert "\n" not in str(mistake.value)


def test_a_target_whose_state_cannot_be_rolled_back_is_not_judged_after_training():
    config = target_config(FAMILIES / "qwen3.5-27b")
    for recipe in ("qwen3.5-27b", "qwen3-next-80b-a3b"):
        assert load_recipe(RECIPES[recipe]).evaluation.conversations == 0
    recipe = load_recipe(RECIPES["qwen3.5-27b"], ["evaluation.conversations=4"])
    shape_draft(recipe, config)  # a capture does not judge
    with pytest.raises(UserError, match="evaluation.conversations: 4, but the target's layers carry a state"):
        can_be_judged(recipe, config)


@pytest.mark.parametrize(
    ("config", "stateful"),
    [
        (FalconH1Config(), True),  # attention and a state in the same layer
        (RecurrentGemmaConfig(), True),  # whose config has no layer_types
        (Lfm2Config(layer_types=["conv", "full_attention"] * 16), True),
        (MiniMaxConfig(), True),
        (MambaConfig(), True),
        (LlamaConfig(), False),
        (GptOssConfig(), False),
        (Gemma4TextConfig(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_state_beside_or_in_place_of_attention_is_known_from_the_config(config, stateful):
    assert is_stateful(config) == stateful


def test_of_the_recipes_targets_only_those_with_linear_attention_carry_a_state(facts):
    carrying = {name for name, known in facts.items() if is_stateful(known.config)}
    assert carrying == {name for name, known in facts.items() if recurrent_layers(known.config)} != set()


def test_a_vocabulary_below_32_000_is_drafted_whole():
    assert [vocabulary_size(Draft(), size) for size in (151_936, 1024)] == [32_000, 1024]
    with pytest.raises(UserError, match="2000 draft tokens of a target vocabulary of 1024"):
        vocabulary_size(Draft(vocab_size=2000), 1024)


def test_a_drafts_config_gives_its_whole_shape_and_the_recipes_keys_override_it(tmp_path, facts):
    name, target = "qwen3-8b", facts["qwen3-8b"].config
    other = replace(
        shape_draft(recipe_of(name), target),
        **dict.fromkeys(("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"), True),
        **{"intermediate_size": 512, "draft_vocab_size": 16_000, "aux_layers": (2, 10, 20), "window": 64},
    )
    (tmp_path / "config.json").write_text(json.dumps(other.to_json("bfloat16")), encoding="utf-8")
    model = {"target": str(FAMILIES / name), "draft": {"config": str(tmp_path / "config.json")}}

    def shape(**changes) -> DraftConfig:
        draft = model["draft"] | changes.pop("draft", {})
        recipe = checked_recipe({"model": {**model, **changes, "draft": draft}, "data": {"train": ["x"]}}, "test")
        return shape_draft(recipe, target)

    assert shape() == other
    overridden = shape(aux_layers=[1, 2, 3], draft={"vocab_size": 100, "window": 32, "intermediate_size": 256})
    assert overridden == replace(other, aux_layers=(1, 2, 3), draft_vocab_size=100, window=32, intermediate_size=256)
