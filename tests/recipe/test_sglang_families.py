"""SGLang and the families: its draft class loads the drafts that their recipes export, and the targets that take drafts
are known."""

import json
import re
from pathlib import Path

import pytest
import torch
from family_run import run_recipe
from family_targets import VOCABULARY, architecture, make_family_target, with_class
from places import FAMILIES, RECIPES
from safetensors.torch import load_file, save_file
from sglang_case import capturing_server, hook_of, in_sglang, largest_errors, target_behind
from test_sglang_capture import ALLOWED

from eagle3.draft.config import DraftConfig
from eagle3.draft.derivation import default_aux_layers
from eagle3.jobs.derived import shape_draft
from eagle3.recipe.loading import load_recipe
from eagle3.states.rows import Rows
from eagle3.targets.checkpoint import target_config
from eagle3.targets.sglang.version import EAGLE3_TARGETS
from eagle3.targets.transformers import load_target

pytestmark = pytest.mark.sglang

# In addition to the four families of test_sglang_capture.
COMPARED = (
    *("qwen2.5-7b", "phi-4", "glm-4.5-air", "glm-4.7-flash", "deepseek-v2-lite", "kimi-k2", "kimi-k2.5"),
    *("gemma-3-27b", "gemma-4-31b", "gemma-4-26b-a4b", "qwen3-next-80b-a3b", "qwen3.5-27b", "qwen3.5-35b-a3b"),
)
# Tensors that transformers does not save under the names of the published checkpoints, which alone SGLang knows.
PUBLISHED = {
    "gemma-3-27b": {"vision_tower.": "vision_tower.vision_model."},
    "kimi-k2.5": {
        "language_model.model.blocks.": "language_model.model.layers.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
        "model.mm_projector.": "mm_projector.",
    },
}
# Their image processors, without which SGLang serves text alone, are not among the test data.
TEXT_ALONE = ("kimi-k2.5", "gemma-4-31b", "gemma-4-26b-a4b", "qwen3.5-27b", "qwen3.5-35b-a3b")
# SGLang's norms inside latent attention take the config's eps, where transformers takes 1e-6.
EPS_OF_ITS_OWN = ("glm-4.7-flash", "kimi-k2.5")
# Targets whose rounding is larger than that of the four families.
ROUNDS_MORE = ("kimi-k2.5", "gemma-4-31b", "gemma-4-26b-a4b", "qwen3-next-80b-a3b", "qwen3.5-27b", "qwen3.5-35b-a3b")


@pytest.fixture(scope="module")
def verdicts(topology, tmp_path_factory) -> dict[str, tuple[int, str]]:
    """For each recipe, the exit code and line of the check of its export."""
    work, exports = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("exports")
    for recipe in with_class():
        (work / recipe).mkdir()
        run_recipe(recipe, make_family_target(recipe, work / recipe / "target"), work / recipe, topology)
        (work / recipe / "run" / "export").rename(exports / recipe)
    return in_sglang("tests/support/sglang_says.py", "drafts", *(exports / recipe for recipe in with_class()))


@pytest.mark.parametrize("recipe", with_class())
def test_the_draft_of_every_recipe_is_taken_whole(verdicts, recipe):
    code, line = verdicts[recipe]
    assert code == 0, line
    assert "takes all 15 tensors" in line


LIST_TARGETS = """
import json
from sglang.srt.models.registry import ModelRegistry
models = ModelRegistry.models.items()
print(json.dumps([name for name, model in models if hasattr(model, "set_eagle3_layers_to_capture")]))
"""
NO_TARGETS = re.compile(r"NextN$|MTP$|Eagle3?$|Assistant|^EmbeddingGemma|^MindSpore")  # drafts, and what has no drafts


def test_the_targets_that_take_a_draft_are_those_that_sglang_has():
    assert {name for name in in_sglang("-c", LIST_TARGETS) if not NO_TARGETS.search(name)} == EAGLE3_TARGETS


def test_the_default_layers_are_those_that_sglang_captures_for_a_draft_that_names_none():
    types = {architecture(recipe): target_config(FAMILIES / recipe).model_type for recipe in with_class()}
    served = sorted(types.keys() & EAGLE3_TARGETS)
    captured = in_sglang("tests/support/sglang_says.py", "layers", *served)
    assert captured == {name: list(default_aux_layers(48, types[name])) for name in served}


def make_comparable_target(recipe: str, folder: Path) -> Path:
    """A tiny target of which SGLang on a CPU computes the same as transformers."""
    target = make_family_target(recipe, folder)
    config = json.loads((target / "config.json").read_text())
    own = config.get("text_config", config)
    config["experts_implementation"] = "eager"  # in transformers; its usual one has no fp64
    if recipe in TEXT_ALONE:
        config["language_model_only"] = True
    if recipe in EPS_OF_ITS_OWN:
        own["rms_norm_eps"] = 1e-6
    (target / "config.json").write_text(json.dumps(config))
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        for old, new in PUBLISHED.get(recipe, {}).items():
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        if recipe == "gemma-4-26b-a4b":
            # Only its CUDA code scales a router's input, by router.scale / sqrt(hidden size); this is 1.
            root = own["hidden_size"] ** 0.5
            tensors |= {name: torch.full_like(tensors[name], root) for name in tensors if name.endswith("router.scale")}
        save_file(tensors, file, {"format": "pt"})
    return target


def rounding(target: Path, prompts: list[torch.Tensor], rows: list[Rows]) -> float:
    """The largest error of these fp32 rows."""
    exact = load_target(target, dtype="float64").prefill(prompts)
    return max(max(largest_errors(*pair).values()) for pair in zip(rows, exact, strict=True))


@pytest.mark.parametrize("recipe", COMPARED)
def test_captured_hidden_states_are_those_of_transformers(recipe, tmp_path):
    """Gemma-3, on two ranks, calls its language model with embeddings, has a tied head that is whole on each rank, and
    SGLang leaves the residual stream out of what it captures there. Where rounding is larger (linear
    attention; scores that are not scaled), the bound is three times that of transformers: each side may have as
    much."""
    model, tensor = make_comparable_target(recipe, tmp_path / "target"), 2 if recipe == "gemma-3-27b" else 1
    settings = hook_of(tmp_path / "spool", model)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in (17, 5, 200, 31)]
    own = load_target(model)
    expected, layers = own.prefill(prompts), own.aux_layers
    allowed = 3 * rounding(model, prompts, expected) if recipe in ROUNDS_MORE else ALLOWED
    # The second flag is for the states of linear attention, which would otherwise get about half of the memory.
    with (
        capturing_server(
            model, settings, layers, ["--max-mamba-cache-size", "64"], tensor=tensor, memory_fraction=0.5
        ) as server,
        target_behind([server.url], settings, vocab_size=own.vocab_size) as target,
    ):
        for mine, other in zip(target.prefill(prompts), expected, strict=True):
            errors = largest_errors(mine, other)
            assert errors.pop("argmax") == 0 and max(errors.values()) < allowed, errors


def test_sglang_rotates_every_draft_as_training_does_at_the_size_of_the_model(tmp_path):
    """Compares the tables for all positions, without a model of that size."""
    for recipe in with_class():
        read, target = load_recipe(RECIPES / f"{recipe}.yaml"), target_config(FAMILIES / recipe)
        draft = shape_draft(read, target)
        (tmp_path / recipe).mkdir()
        (tmp_path / recipe / "config.json").write_text(json.dumps(draft.to_json("bfloat16")))
    results = in_sglang("tests/support/sglang_says.py", "rotations", *(tmp_path / recipe for recipe in with_class()))
    assert {recipe: of_recipe["apart"] for recipe, of_recipe in results.items()} == dict.fromkeys(with_class(), None)


def test_the_rotation_at_the_last_of_a_million_positions_is_sglangs_bit_for_bit(tmp_path):
    """The last of 2^20 positions, whatever the training length was. In fp32, an angle of a million radians is only
    exact to a sixteenth: a draft's keys stay those that it was trained with only because both sides round alike."""
    original = {"original_max_position_embeddings": 8192}
    ropes = {
        "plain": {"rope_type": "default", "rope_theta": 10000.0},
        "plain, theta 5e6": {"rope_type": "default", "rope_theta": 5e6},
        "llama3": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 128.0, "low_freq_factor": 1.0}
        | {"high_freq_factor": 4.0, **original},
        "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, **original},
    }
    sizes = {"hidden_size": 256, "target_hidden_size": 256, "intermediate_size": 32}
    sizes |= {"vocab_size": 8, "draft_vocab_size": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2**20}
    for name, rope in ropes.items():
        (tmp_path / name).mkdir()
        draft = DraftConfig(**sizes, **heads, rope_parameters=rope)
        (tmp_path / name / "config.json").write_text(json.dumps(draft.to_json("float32")))
    results = in_sglang("tests/support/sglang_says.py", "rotations", *(tmp_path / name for name in ropes))
    assert {name: each["differing"] for name, each in results.items()} == dict.fromkeys(ropes, 0)
    assert max(each["error"] for each in results.values()) < 1 / 16
