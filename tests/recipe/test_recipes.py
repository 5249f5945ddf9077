"""Every recipe for a model, with its target's published config: it parses, plans and fits, and its claims are true."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml
from places import FAMILIES, ROOT, ZERO2
from transformers import (
    FalconH1Config,
    Gemma4TextConfig,
    GPT2Config,
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

from eagle3.draft.config import DraftConfig, drafted_tokens
from eagle3.draft.derivation import derive_draft, derived_rope
from eagle3.draft.rope import RotaryEmbedding
from eagle3.errors import UserError
from eagle3.jobs.claims import Claim, Claims, read_claims, recipes_table
from eagle3.jobs.new_recipe import (
    BEGIN,
    GPU_BYTES,
    NODE,
    new_recipe_text,
    planned,
    refreshed,
    rope_in_words,
)
from eagle3.jobs.plan import planned_step
from eagle3.jobs.prospect import Prospect, require_judgeable
from eagle3.planning.fitting import RESERVED, PlannedStream
from eagle3.recipe.loading import checked_recipe, load_recipe
from eagle3.recipe.schema import Recipe
from eagle3.targets.checkpoint import target_config
from eagle3.targets.facts import TargetFacts, is_stateful, read_facts, recurrent_layers

OWN_TARGETS = ("quickstart", "long-context-demo")  # recipes whose target is made by the run itself
RECIPES = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.yaml")) if path.stem not in OWN_TARGETS}
CLAIMS = read_claims(ROOT / "recipes" / "claims.toml")
NO_CLASS = "ling-flash-2.0"  # its code comes with the checkpoint
INT4 = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}  # in the spelling of compressed-tensors
every_recipe = pytest.mark.parametrize("name", RECIPES)


@pytest.fixture(scope="module")
def facts() -> dict[str, TargetFacts]:
    """The facts from the published config, by recipe."""
    return {name: read_facts(str(FAMILIES / name)) for name in RECIPES}


def recipe_of(name: str) -> Recipe:
    return load_recipe(RECIPES[name])


def origin_of(name: str) -> dict:
    return yaml.safe_load((FAMILIES / name / "origin.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def new_recipe(launcher):
    return partial(launcher, "new_recipe.py")


def test_every_published_config_has_a_recipe_but_the_one_without_a_class():
    assert {folder.name for folder in FAMILIES.iterdir() if folder.is_dir()} - {NO_CLASS} == RECIPES.keys()


@every_recipe
def test_a_recipe_plans_and_fits_on_one_node(name, facts):
    recipe = recipe_of(name)
    planned = planned_step(Prospect.of(recipe, facts[name].config), NODE, ZERO2, packed=True)
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


def test_latent_attention_gets_heads_of_its_own():
    draft = derived(target_config(FAMILIES / "deepseek-v3"))
    assert (draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim) == (56, 8, 128)
    assert draft.num_attention_heads * draft.head_dim == draft.hidden_size == 7168


def test_heads_that_do_not_divide_the_hidden_size_are_not_the_drafts():
    draft = derived(target_config(FAMILIES / "glm-4.5-air"))  # 96 heads of 128 on 4,096
    assert (draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim) == (32, 8, 128)


def test_the_mlp_is_as_wide_as_what_a_token_passes_through():
    wide = {name: derived(target_config(FAMILIES / name)).intermediate_size for name in RECIPES}
    assert wide["gpt-oss-20b"] == 4 * 2880  # four experts, and no dense layer
    assert wide["llama-4-scout"] == 16384  # its dense layers'
    assert wide["qwen3-coder-480b-a35b"] == 8 * 2560  # wider than its intermediate_size, which no layer has
    assert wide["deepseek-v3"] == 18432 and wide["llama-3.1-8b"] == 14336


def test_of_layers_of_unlike_sizes_the_draft_is_as_those_of_full_attention_unless_their_heads_are_too_wide():
    def heads(width: int) -> tuple[int, int, int]:
        draft = derived(Gemma4TextConfig(global_head_dim=width))
        assert draft.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
        return draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim

    assert (heads(256), heads(512)) == ((8, 4, 256), (8, 4, 128))


def test_experts_alone_make_an_mlp():
    assert derived(Qwen3_5MoeTextConfig()).intermediate_size == 8 * 512


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


def test_of_ropes_by_layer_type_the_draft_has_that_of_full_attention():
    assert derived_rope(target_config(FAMILIES / "gemma-3-27b")) == {
        "rope_type": "linear",
        "factor": 8.0,
        "rope_theta": 1e6,
    }


def test_a_partial_rotation_becomes_a_whole_one():
    assert derived_rope(target_config(FAMILIES / "glm-4.5-air")) == {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (MambaConfig(), "MambaConfig.*num_attention_heads is None.*model.draft.head_dim, num_attention_heads"),
        (PretrainedConfig(), "hidden_size is None"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "'dynamic'.*rope_parameters",
        ),
    ],
)
def test_what_a_config_lacks_is_said_in_one_line(config, missing):
    with pytest.raises(UserError, match=missing) as mistake:
        derived(config)
    assert "\n" not in str(mistake.value)


# launchers/new_recipe.py ---------------------------------------------------------------------------------------------


def test_a_new_recipe_is_one_that_plans_and_fits(new_recipe, tmp_path):
    out = tmp_path / "mine.yaml"
    code, output, _ = new_recipe("--target", FAMILIES / "qwen3-8b", "--id", "me/My-Qwen", "--out", out)
    recipe = load_recipe(out)
    assert code == 0 and "Qwen3ForCausalLM, 8B parameters" in output
    assert recipe.model.target == "me/My-Qwen" and recipe.output.dir == Path("runs/my-qwen")
    assert new_recipe("--target", FAMILIES / "qwen3-8b", "--out", out)[0] == 2  # does not overwrite


def test_a_target_alone_is_a_valid_recipe(tmp_path):
    path = tmp_path / "alone.yaml"
    path.write_text("model: {target: Qwen/Qwen3-8B}\n", encoding="utf-8")
    recipe = load_recipe(path)
    assert recipe.output.dir == Path("runs/qwen3-8b") and recipe.data.train == ["preset:ultrachat"]
    known = read_facts(str(FAMILIES / "qwen3-8b"))
    assert planned(recipe, known, NODE, ZERO2).draft.hidden_size == 4096


def test_sizes_that_a_config_leaves_to_its_class_are_named(new_recipe, tmp_path):
    changed("qwen3-8b", hidden_size=None, vocab_size=None)(tmp_path)
    code, output, _ = new_recipe("--target", tmp_path, "--out", tmp_path / "x.yaml")
    assert code == 0 and "transformers takes hidden_size 4,096, vocab_size 151,936" in output
    published = {name: set(read_facts(str(FAMILIES / name)).assumed) for name in ("gemma-3-27b", "llama-4-scout")}
    assert published == {"gemma-3-27b": {"vocab_size", "max_position_embeddings"}, "llama-4-scout": set()}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3.5-27b", {"text_config": None}, "gives none of the sizes of its language model"),
        ("qwen3-8b", {"architectures": [3]}, "has 3 in architectures, which is not the name of a class"),
        ("qwen3-8b", {"num_key_value_heads": 0}, "has num_key_value_heads 0, which is no size"),
        ("qwen3.5-27b", {"text_config": {"hidden_size": -1}}, "has text_config.hidden_size -1, which is no size"),
        ("qwen3-8b", {"quantization_config": "fp8"}, "has quantization_config 'fp8', which is not a dict"),
    ],
)
def test_a_config_that_cannot_be_right_is_refused_by_its_key(new_recipe, tmp_path, family, changes, message):
    changed(family, **changes)(tmp_path)
    code, _, errors = new_recipe("--target", tmp_path, "--out", tmp_path / "x.yaml")
    assert code == 2 and message in errors and errors.count("\n") == 1
    (tmp_path / "config.json").unlink()
    assert "its config.json is not there" in new_recipe("--target", tmp_path, "--out", tmp_path / "x.yaml")[2]


def test_a_target_whose_state_cannot_be_rolled_back_is_not_judged_after_training():
    config = target_config(FAMILIES / "qwen3.5-27b")
    for recipe in ("qwen3.5-27b", "qwen3-next-80b-a3b"):
        assert load_recipe(RECIPES[recipe]).evaluation.conversations == 0
    recipe = load_recipe(RECIPES["qwen3.5-27b"], ["evaluation.conversations=4"])
    Prospect.of(recipe, config)  # planning and capturing do not judge
    with pytest.raises(UserError, match="evaluation.conversations: 4, but the target's layers carry a state"):
        require_judgeable(recipe, config)


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


def test_a_class_that_keeps_its_layers_elsewhere_is_refused(new_recipe, tmp_path):
    GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    code, _, errors = new_recipe("--target", tmp_path, "--out", tmp_path / "x.yaml")
    assert code == 2 and "no list of decoder layers" in errors and not (tmp_path / "x.yaml").exists()


def test_a_small_target_is_counted_in_millions(new_recipe, tmp_path):
    """The target has four layers of 32 x (4 x 32 + 3 x 96) weights, their norms, and an embedding that is also the
    head."""
    small = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 50_000, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True}
    changed("qwen3-8b", **small, **heads)(tmp_path)
    out = tmp_path / "x.yaml"
    code, output, _ = new_recipe("--target", tmp_path, "--out", out)
    assert code == 0 and "Qwen3ForCausalLM, 1.7M parameters" in output
    text = out.read_text(encoding="utf-8")
    assert "(1.7M parameters)" in text and "# target: 1.7M parameters, 3.3 MB as stored" in text


def test_a_target_of_short_context_is_planned_no_longer_than_that(new_recipe, tmp_path):
    changed("qwen3-8b", max_position_embeddings=2048)(tmp_path)
    out = tmp_path / "x.yaml"
    code, output, _ = new_recipe("--target", tmp_path, "--out", out)
    assert code == 0 and load_recipe(out).data.max_length == 2048
    closing = out.read_text(encoding="utf-8").partition(BEGIN)[2]
    assert re.findall(r" GPUs +([\d,]+) tokens", closing) == ["2,048"] * 2 and "at most" not in closing
    assert ("training.dtype=float32" in output) == (not torch.cuda.is_available())


@pytest.mark.parametrize(
    ("quantised", "head", "size"),
    [
        ({"quant_method": "gptq", "bits": 4, "lm_head": True}, True, 0.55),
        ({"quant_method": "gptq", "bits": 8, "lm_head": False}, False, 1.0),
        ({"quant_method": "awq", "bits": 4}, False, 0.55),
        ({"quant_method": "compressed-tensors", "ignore": ["re:.*lm_head"], "config_groups": INT4}, False, 0.55),
        ({"quant_method": "compressed-tensors", "ignore": ["model.lm_head"], "config_groups": INT4}, False, 0.55),
        ({"quant_method": "compressed-tensors", "ignore": [], "config_groups": INT4}, True, 0.55),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, False, 0.55),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, False, 0.55),
        ({"quant_method": "fp8"}, False, 1.0),
        (None, False, 2.0),
    ],
)
def test_a_quantised_head_gets_its_targets_own_logits_for_a_teacher(new_recipe, tmp_path, quantised, head, size):
    changed("qwen3-8b", quantization_config=quantised)(tmp_path)
    code, output, _ = new_recipe("--target", tmp_path, "--out", tmp_path / "x.yaml")
    recipe = load_recipe(tmp_path / "x.yaml")
    assert code == 0 and (recipe.target.teacher == "logits") == head == ("lm_head is quantised" in output)
    assert (recipe.model.draft.lm_head == "random") == head
    facts = read_facts(str(tmp_path))
    assert facts.bytes / facts.parameters == pytest.approx(size)


@pytest.mark.parametrize(("family", "size"), [("qwen3-8b", "one GPU"), ("deepseek-v3", "many")])
@pytest.mark.parametrize("engine", [True, False])
def test_a_recipe_lets_transformers_run_what_it_can_where_sglang_is_missing(facts, family, size, engine):
    text = new_recipe_text("owner/model", facts[family], ZERO2, engine=engine)
    values = yaml.safe_load(text)
    by_sglang = engine or size == "many"
    assert values["target"]["backend"] == ("sglang" if by_sglang else "transformers")
    assert values["hidden_states"]["mode"] == ("stored" if by_sglang else "live")


def test_keys_on_the_command_line_make_a_recipe_where_a_config_tells_too_little(new_recipe, tmp_path):
    changed("qwen3-8b", rope_scaling={"rope_type": "dynamic", "factor": 2.0})(tmp_path)
    code, _, err = new_recipe("--target", tmp_path, "--out", tmp_path / "x.yaml")
    assert code == 2 and "'dynamic' is not one that a draft can have" in err
    keys = ["model.draft.rope_parameters={rope_type: default, rope_theta: 1000000}", "data.max_length=2048"]
    assert new_recipe("--target", tmp_path, "--out", tmp_path / "x.yaml", *keys)[0] == 0
    recipe = load_recipe(tmp_path / "x.yaml")
    assert recipe.model.draft.rope_parameters == {"rope_type": "default", "rope_theta": 1000000}
    assert recipe.data.max_length == 2048
    code, _, err = new_recipe("--target", tmp_path, "--out", tmp_path / "y.yaml", "model.draft.rope=1")
    assert code == 2 and "did you mean" in err


def test_a_target_beyond_one_node_asks_for_servers(new_recipe, tmp_path):
    assert new_recipe("--target", FAMILIES / "deepseek-v3", "--out", tmp_path / "x.yaml")[0] == 0
    assert "start SGLang servers over more" in (tmp_path / "x.yaml").read_text(encoding="utf-8").replace("\n# ", " ")


def test_a_context_of_millions_is_not_the_drafts_unless_asked_for(new_recipe, tmp_path):
    assert new_recipe("--target", FAMILIES / "llama-4-scout", "--out", tmp_path / "x.yaml")[0] == 0
    assert load_recipe(tmp_path / "x.yaml").model.draft.max_position_embeddings == 262_144


def test_a_vocabulary_below_32_000_is_drafted_whole():
    assert [drafted_tokens(None, size) for size in (151_936, 1024)] == [32_000, 1024]
    with pytest.raises(UserError, match="2000 draft tokens of a target vocabulary of 1024"):
        drafted_tokens(2000, 1024)


def test_a_chosen_layout_is_kept_and_its_accumulation_fits(facts):
    overrides = ["data.max_length=131072", "parallelism.ring=4"]
    text = new_recipe_text("owner/model", facts["llama-3.3-70b"], ZERO2, overrides)
    values = yaml.safe_load(text)
    assert values["parallelism"] == {"ring": 4} and values["training"]["accumulation"] == 32 // 2


def test_the_keys_of_a_new_recipe_say_how_its_config_is_read(new_recipe, tmp_path):
    own_code(tmp_path)
    arguments = ("--target", tmp_path, "--out", tmp_path / "x.yaml")
    assert "model.trust_remote_code=true" in new_recipe(*arguments)[2]
    code, _, errors = new_recipe(*arguments, "model.trust_remote_code=true")
    assert "trust_remote_code" not in errors, errors


def test_a_drafts_config_gives_its_whole_shape_and_the_recipes_keys_override_it(tmp_path, facts):
    name, target = "qwen3-8b", facts["qwen3-8b"].config
    other = replace(
        Prospect.of(recipe_of(name), target).shape,
        **dict.fromkeys(("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"), True),
        **{"intermediate_size": 512, "draft_vocab_size": 16_000, "aux_layers": (2, 10, 20), "window": 64},
    )
    (tmp_path / "config.json").write_text(json.dumps(other.to_json("bfloat16")), encoding="utf-8")
    model = {"target": str(FAMILIES / name), "draft": {"config": str(tmp_path / "config.json")}}

    def shape(**changes) -> DraftConfig:
        draft = model["draft"] | changes.pop("draft", {})
        recipe = checked_recipe({"model": {**model, **changes, "draft": draft}, "data": {"train": ["x"]}}, "test")
        return Prospect.of(recipe, target).shape

    assert shape() == other
    overridden = shape(aux_layers=[1, 2, 3], draft={"vocab_size": 100, "window": 32, "intermediate_size": 256})
    assert overridden == replace(other, aux_layers=(1, 2, 3), draft_vocab_size=100, window=32, intermediate_size=256)


def test_refresh_changes_nothing_but_what_follows_from_the_keys(new_recipe, tmp_path):
    path = tmp_path / "recipe.yaml"
    shutil.copy(RECIPES["gpt-oss-20b"], path)
    before = path.read_text(encoding="utf-8")
    path.write_text(before.replace("vocab_size: 32000", "vocab_size: 16000"), encoding="utf-8")
    assert new_recipe("--refresh", path, "--target", FAMILIES / "gpt-oss-20b")[0] == 0
    after = path.read_text(encoding="utf-8")
    assert "16,000 of 201,088 tokens" in after and after.split(BEGIN)[0] == before.split(BEGIN)[0].replace(
        "32000", "16000"
    )


def changed(name: str, **changes):
    """Writes a published config with changed values; None removes a key."""

    def make(folder: Path) -> None:
        values = json.loads((FAMILIES / name / "config.json").read_text(encoding="utf-8")) | changes
        values = {key: value for key, value in values.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")

    return make


def unknown_architecture(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["FooForCausalLM"], "model_type": "foo"}))


def no_language_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["ViTModel"], "model_type": "vit"}))


def own_code(folder: Path) -> None:
    shutil.copy(FAMILIES / NO_CLASS / "config.json", folder)


def no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("make", "missing"),
    [
        (unknown_architecture, "no model class for architecture FooForCausalLM (model_type 'foo')"),
        (own_code, "no model class for architecture BailingMoeV2ForCausalLM"),
        (no_language_model, "is not a causal language model"),
        (no_json, "config cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "config.json"),
        (changed("qwen3-8b", architectures=["Qwen3ForSequenceClassification"]), "is not a causal language model"),
        (changed("qwen3-8b", architectures=["BertForMaskedLM"], model_type="bert"), "is not a causal language model"),
        (changed("qwen3-8b", quantization_config={"quant_method": "new"}), "does not say its bits"),
        (changed("qwen3-8b", hidden_size="4096"), "has a value that transformers"),
        (
            changed("qwen3-8b", rope_scaling={"rope_type": "banana", "factor": 2.0}),
            "banana",
        ),
        (
            lambda folder: MambaConfig(architectures=["MambaForCausalLM"]).save_pretrained(folder),
            "num_attention_heads is None",
        ),
        (lambda folder: None, "its config.json is not there"),
    ],
)
def test_a_target_that_cannot_be_one_is_refused_with_what_is_missing(new_recipe, tmp_path, make, missing):
    folder = tmp_path / "target"
    folder.mkdir()
    make(folder)
    code, _, err = new_recipe("--target", folder, "--out", tmp_path / "x.yaml")
    assert code == 2 and missing in err and "Traceback" not in err and not (tmp_path / "x.yaml").exists()
    assert [line for line in err.splitlines() if line.startswith("error: ")]


def test_a_recipe_that_names_an_unknown_architecture_fails_with_what_is_missing(new_recipe, tmp_path):
    """As it would in train.py, capture.py and plan.py."""
    folder = tmp_path / "target"
    folder.mkdir()
    own_code(folder)
    with pytest.raises(UserError, match="BailingMoeV2ForCausalLM.*trust_remote_code=true"):
        target_config(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name --target"),
        (("--refresh", "absent.yaml"), "no such recipe"),
        (("--refresh", ROOT / "recipes" / "quickstart.yaml", "--target", FAMILIES / "qwen3-8b"), "has no lines"),
        (
            ("--refresh", ROOT / "recipes" / "qwen3-8b.yaml", "data.max_length=9"),
            "data.max_length=9 is for a new recipe",
        ),
        (("--table", "absent.md"), "no such file"),
        (("--target", FAMILIES / "qwen3-8b", "--out", "x.yaml", "data=3"), "data"),
        (("--target", FAMILIES / "qwen3-8b", "--out", "x.yaml", "training.global_batch_size=4"), "global_batch_size"),
        (("--target", FAMILIES / "qwen3-8b", "--out", "x.yaml", "parallelism.ring=5"), "ring 5"),
        (("--table", ROOT / "setup.cfg"), "has no lines"),
        (("--target", "./absent", "--out", "x.yaml"), "no such folder"),
        (("--target", FAMILIES / "qwen3-8b", "--out", "absent/x.yaml"), "there is no folder absent"),
        (("--target", FAMILIES / "qwen3-8b", "--table", ROOT / "docs" / "models.md"), "name --target"),
    ],
)
def test_mistakes_are_said_in_one_line(new_recipe, arguments, message):
    code, _, err = new_recipe(*arguments)
    assert code == 2 and message in err and "Traceback" not in err
