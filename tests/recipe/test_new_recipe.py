"""new_recipe.py: from a config alone to a recipe that plans and fits, or to one line that says what is missing."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from places import FAMILIES, RECIPES, ZERO2
from transformers import GPT2Config, MambaConfig

from eagle3.jobs.new_recipe import BEGIN, NODE, new_recipe_text, planned
from eagle3.recipe.loading import load_recipe
from eagle3.targets.facts import read_facts

QWEN3 = ("--target", FAMILIES / "qwen3-8b")
INT4 = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}  # in the spelling of compressed-tensors


@pytest.fixture
def new_recipe(launcher):
    return partial(launcher, "new_recipe.py")


def test_a_new_recipe_is_one_that_plans_and_fits(new_recipe, tmp_path):
    out = tmp_path / "mine.yaml"
    code, output, _ = new_recipe(*QWEN3, "--id", "me/My-Qwen", "--out", out)
    recipe = load_recipe(out)
    assert code == 0 and "Qwen3ForCausalLM, 8B parameters" in output
    assert recipe.model.target == "me/My-Qwen" and recipe.output.dir == Path("runs/my-qwen")
    assert new_recipe(*QWEN3, "--out", out)[0] == 2  # does not overwrite


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
def test_a_recipe_lets_transformers_run_what_it_can_where_sglang_is_missing(family, size, engine):
    values = yaml.safe_load(text_for(family, engine=engine))
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


def text_for(family: str, *overrides: str, **options) -> str:
    """A new recipe for a target with the family's published config."""
    return new_recipe_text("owner/model", read_facts(str(FAMILIES / family)), ZERO2, print, overrides, **options)


def test_a_target_beyond_one_node_asks_for_servers():
    assert "start SGLang servers over more" in text_for("deepseek-v3").replace("\n# ", " ")


def test_a_context_of_millions_is_not_the_drafts_unless_asked_for():
    assert yaml.safe_load(text_for("llama-4-scout"))["model"]["draft"]["max_position_embeddings"] == 262_144


def test_a_chosen_layout_is_kept_and_its_accumulation_fits():
    values = yaml.safe_load(text_for("llama-3.3-70b", "data.max_length=131072", "parallelism.ring=4"))
    assert values["parallelism"] == {"ring": 4} and values["training"]["accumulation"] == 32 // 2


def test_the_keys_of_a_new_recipe_say_how_its_config_is_read(new_recipe, tmp_path):
    NO_CLASS(tmp_path)
    arguments = ("--target", tmp_path, "--out", tmp_path / "x.yaml")
    assert "model.trust_remote_code=true" in new_recipe(*arguments)[2]
    code, _, errors = new_recipe(*arguments, "model.trust_remote_code=true")
    assert "trust_remote_code" not in errors, errors


def test_refresh_changes_nothing_but_what_follows_from_the_keys(new_recipe, tmp_path):
    path = tmp_path / "recipe.yaml"
    shutil.copy(RECIPES / "gpt-oss-20b.yaml", path)
    before = path.read_text(encoding="utf-8")
    path.write_text(before.replace("vocab_size: 32000", "vocab_size: 16000"), encoding="utf-8")
    assert new_recipe("--refresh", path, "--target", FAMILIES / "gpt-oss-20b")[0] == 0
    after = path.read_text(encoding="utf-8")
    assert "16,000 of 201,088 tokens" in after
    assert after.split(BEGIN)[0] == before.split(BEGIN)[0].replace("32000", "16000")


def changed(name: str, **changes):
    """Writes a published config with changed values; None removes a key."""
    values = json.loads((FAMILIES / name / "config.json").read_text(encoding="utf-8")) | changes
    return written(**{key: value for key, value in values.items() if value is not None})


def written(**values):
    return lambda folder: (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")


NO_CLASS = changed("ling-flash-2.0")  # whose code comes with the checkpoint
GPT2, MAMBA = GPT2Config(architectures=["GPT2LMHeadModel"]), MambaConfig(architectures=["MambaForCausalLM"])


@pytest.mark.parametrize(
    ("make", "missing"),
    [
        (written(architectures=["Foo"], model_type="foo"), "no model class for architecture Foo (model_type 'foo')"),
        (NO_CLASS, "no model class for architecture BailingMoeV2ForCausalLM"),
        (written(architectures=["ViTModel"], model_type="vit"), "is not a causal language model"),
        (changed("qwen3-8b", architectures=["Qwen3ForSequenceClassification"]), "is not a causal language model"),
        (changed("qwen3-8b", architectures=["BertForMaskedLM"], model_type="bert"), "is not a causal language model"),
        (changed("qwen3-8b", architectures=[3]), "config cannot be read (AttributeError: 'int' object has no"),
        (lambda folder: None, "its config.json is not there"),
        (lambda folder: (folder / "config.json").write_text("{"), "config cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "config.json"),
        (changed("qwen3.5-27b", text_config=None), "gives none of the sizes of its language model"),
        (changed("qwen3.5-27b", text_config={"hidden_size": -1}), "cannot be read (RuntimeError: Trying to create"),
        (changed("qwen3-8b", num_hidden_layers=10**9), "has num_hidden_layers 1000000000, more than 1,000"),
        (changed("qwen3-8b", num_key_value_heads=0), "config cannot be read (ZeroDivisionError: "),
        (changed("qwen3-8b", hidden_size="4096"), "cannot be read (StrictDataclassFieldValidationError"),
        (changed("qwen3-8b", quantization_config="fp8"), "cannot be read (AttributeError: 'str' object has no"),
        (changed("qwen3-8b", quantization_config={"quant_method": "new"}), "does not say its bits"),
        (MAMBA.save_pretrained, "num_attention_heads is None"),
        (GPT2.save_pretrained, "no list of decoder layers"),
    ],
)
def test_a_target_that_cannot_be_one_is_refused_with_what_is_missing(new_recipe, tmp_path, make, missing):
    make(tmp_path)
    code, _, err = new_recipe("--target", tmp_path, "--out", tmp_path / "x.yaml")
    assert code == 2 and missing in err and "Traceback" not in err and not (tmp_path / "x.yaml").exists()
    assert [line for line in err.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name --target"),
        (("--refresh", "absent.yaml"), "no such recipe"),
        (("--refresh", RECIPES / "quickstart.yaml", *QWEN3), "has no lines"),
        (("--refresh", RECIPES / "qwen3-8b.yaml", "data.max_length=9"), "data.max_length=9 is for a new recipe"),
        ((*QWEN3, "--out", "x.yaml", "data=3"), "data"),
        ((*QWEN3, "--out", "x.yaml", "training.global_batch_size=4"), "global_batch_size"),
        ((*QWEN3, "--out", "x.yaml", "parallelism.ring=5"), "ring 5"),
        ((*QWEN3, "--out", "x.yaml", "model.draft.window=2"), "a window of 2 keys cannot hold a chain"),
        ((*QWEN3, "--out", "absent/x.yaml"), "there is no folder absent"),
        (("--target", "./absent", "--out", "x.yaml"), "no such folder"),
    ],
)
def test_mistakes_are_said_in_one_line(new_recipe, arguments, message):
    code, _, err = new_recipe(*arguments)
    assert code == 2 and message in err and "Traceback" not in err
