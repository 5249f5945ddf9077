"""Which options the Python launchers take, and how they answer a mistyped command line: in one line, before any slow
import."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_SECONDS
from places import RECIPES, ROOT

from eagle3.command_line import RecipeParser
from eagle3.errors import UserError
from eagle3.recipe.loading import OTHER_NAMES, keys_of, load_recipe
from eagle3.recipe.schema import Recipe

QUICKSTART = RECIPES / "quickstart.yaml"
LAUNCHERS = sorted((ROOT / "launchers").glob("*.py"))


def parse(*words: str):
    parser = RecipeParser(None)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--draft", type=Path)
    return parser.parse(words)


@pytest.mark.parametrize(
    "words",
    [
        ("a.yaml", "training.epochs=2", "--quiet"),
        ("--recipe", "a.yaml", "--quiet", "training.epochs=2"),
        ("--quiet", "training.epochs=2", "a.yaml"),
    ],
)
def test_a_recipe_is_taken_with_and_without_its_option_anywhere(words):
    options = parse(*words)
    assert (options.recipe, options.named, options.overrides) == (Path("a.yaml"), True, ["training.epochs=2"])
    assert options.quiet


def test_without_a_recipe_it_is_the_default(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert (parse("training.epochs=2").recipe, parse().named) == (QUICKSTART, False)
    monkeypatch.chdir(ROOT)
    assert parse().recipe == Path("recipes/quickstart.yaml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--learning-rate", "3"),
            "'--learning-rate' is not an option; to change the recipe write training.learning_rate=3",
        ),
        (("--training.learning_rate=3",), "write training.learning_rate=3"),
        (("--lerning_rate", "3"), "write training.learning_rate=3"),
        (("--lr", "3"), "write training.learning_rate=3"),
        (("draft",), "draft is not a recipe; did you mean --draft?"),
        (("--dtype",), "write hidden_states.dtype=VALUE or training.dtype=VALUE"),
        (("training.epochs", "3"), "training.epochs has no value; write training.epochs=3"),
        (("--quite",), "'--quite' is not an option; did you mean --quiet?"),
        (("--frobnicate",), "'--frobnicate' is not an option; --help lists the options"),
        (("--draft",), "argument --draft: expected one argument; "),
        (("a.yaml", "b.yaml"), "two recipes, a.yaml and 'b.yaml'; name one"),
    ],
)
def test_a_mistyped_word_is_answered_with_what_to_write(words, message):
    with pytest.raises(UserError) as caught:
        parse(*words)
    line = str(caught.value)
    assert line.startswith("command line: ") and message in line and "\n" not in line


@pytest.mark.parametrize(
    ("text", "override", "blamed"),
    [
        ("", "training.epoch=3", "command line: 'training.epoch=3': training.epoch: unknown key"),
        (
            "",
            "training.lr=1",
            "command line: 'training.lr=1': training.lr: unknown key (value 1); did you mean training.learn",
        ),
        ("", "training.epochs=-3", "command line: 'training.epochs=-3': training.epochs (value -3): "),
        ("training: {epoch: 3}\n", "training.max_steps=3", "{path}: training.epoch: unknown key"),
        ("training: {epochs: -3}\n", "training.max_steps=3", "{path}: training.epochs (value -3): "),
    ],
)
def test_a_bad_value_is_blamed_on_the_override_or_on_the_file(tmp_path, text, override, blamed):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {{target: x}}\n{text}")
    with pytest.raises(UserError) as caught:
        load_recipe(path, [override])
    assert str(caught.value).startswith(blamed.format(path=path))


def test_resume_takes_auto_alone_for_its_value():
    resume_apart = runpy.run_path(str(ROOT / "launchers" / "train.py"))["resume_apart"]
    for words, meant in (
        ("", ""),
        ("--resume", "--resume=yes"),
        ("--resume auto", "--resume auto"),
        ("--resume a.yaml", "--resume=yes a.yaml"),
        ("--resume training.seed=5", "--resume=yes training.seed=5"),
    ):
        assert resume_apart(words.split()) == meant.split()


def test_other_trainers_names_lead_to_keys_that_are_there():
    keys = {*keys_of(Recipe)}
    assert not set(OTHER_NAMES.values()) - keys and not set(OTHER_NAMES) & keys


QWEN3 = "tests/families/qwen3-8b/chat_template.jinja"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        *(((path.name, "--help"), 0) for path in LAUNCHERS),
        *(((path.name, "--frobnicate"), 2) for path in LAUNCHERS),
        (("train.py", "data.train=[absent.jsonl]"), 2),
        (("train.py", "data.chat_template=absent.jinja"), 2),
        (("train.py", "data.train=[README.md]"), 2),
        (("train.py", "model.target=./absent"), 2),
        (("train.py", "model.target=tests/families/qwen3-8b"), 2),  # a config without a tokenizer
        (("train.py", "model.draft.init_from=tests"), 2),
        (("train.py", "model.draft.config=setup.cfg"), 2),
        (("train.py", "data.chat_template=eagle3/text/template.py"), 2),
        (("train.py", f"data.chat_template={QWEN3}", "data.template_variables={enable_thinkin: no}"), 2),
        (("train.py", "parallelism.ulysses=4"), 2),
        (("train.py", "training.global_batch_size=7", "--check", "1x2"), 2),
        (("train.py", "--check", "recipes/quickstart.yaml", "1x1"), 2),
        (("train.py", "output.dir=."), 2),
        (("train.py", "--resume", "latest"), 2),
        (("train.py", "--recipe", "recipes/quickstart.yaml", "--recipe", "recipes/quickstart.yaml"), 2),
        (("train.py", "data.held_out=null", "data.held_out_fraction=0"), 2),
        (("train.py", "hidden_states.ring=2"), 2),
        (("train.py", "--deepspeed", "setup.cfg"), 2),
        (("train.py", "eagle3"), 2),
        (("plan.py", "--gpus", "3"), 2),
        (("plan.py", "--gpu-memory", "81920"), 2),
        (("train.py", "--deepspeed", "recipes/quickstart.yaml"), 2),
        (("train.py", "--stop-code", "400"), 2),
        (("train.py", "model.target=README.md"), 2),
        (("train.py", "data.train=[https://example.org/a.jsonl]"), 2),
        (("plan.py", "--gpus", "6", "parallelism.ulysses=4"), 2),
        (("train.py", "target.backend=sglang", "target.servers=[http://127.0.0.1:9]"), 2),
        (("train.py", "--deepspeed", "absent.json"), 2),
        (("train.py", "output.dir=setup.cfg"), 2),
        (("capture.py", "target.backend=sglang", "hidden_states.path=absent", "data.train=[absent.jsonl]"), 2),
        (("capture.py", "hidden_states.path=absent", "hidden_states.ring=2"), 2),
        (("capture.py", "hidden_states.path=tests/golden"), 2),
        (("evaluate.py", "--draft", "tests/families/qwen3-8b"), 2),
        (("new_recipe.py", "--target", "acme/model", "--out", "README.md"), 2),
        (("new_recipe.py", "--target", "./absent", "--out", "absent.yaml"), 2),
        (("verify.py", "absent"), 2),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_what_can_be_said_without_pytorch_is_said_without_it(words, code):
    """Only regenerate.py may import it, for its own answers file."""
    name, *arguments = words
    command = [sys.executable, "-X", "importtime", f"launchers/{name}", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert ended.returncode == code
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("import time:")]
    assert len(lines) == (code == 2) and all(line.startswith("error: ") for line in lines)
    imported = set(re.findall(r"\| +(torch|deepspeed|transformers)$", ended.stderr, re.MULTILINE))
    assert not imported or name == "regenerate.py"
