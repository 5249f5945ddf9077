"""The recipe: keys that are left out, values in odd spellings, and what is printed of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from places import RECIPES

from eagle3.errors import UserError
from eagle3.preflight.inputs import OUTPUTS, files_of
from eagle3.recipe.data import Named, Section
from eagle3.recipe.loading import dump_recipe, leaves, load_recipe
from eagle3.recipe.schema import Recipe

SMALLEST = {"model": {"target": "some/model"}, "data": {"train": ["chats.jsonl"]}, "output": {"dir": "runs/one"}}


def read(folder, **sections):
    """Reads a recipe with the three required keys and `sections` from a file, as for users."""
    values = {name: SMALLEST.get(name, {}) | sections.get(name, {}) for name in SMALLEST | sections}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return load_recipe(path)


FAR = {
    "model": {"aux_layers": [0, 2, 4], "draft": {"rope_parameters": {"rope_type": "yarn", "factor": 8.0}}},
    "data": {"held_out": ["a.parquet", "b.json"], "chat_template": "chat.jinja", "max_samples": 7},
    "training": {"learning_rate": 3.14159e-7, "betas": [0.8, 0.999], "profile": {"start": 5}, "loss": "lk_lambda"},
    "tracking": {"wandb_project": "null"},
}


@pytest.mark.parametrize("sections", [{}, FAR], ids=["three keys", "values far from the defaults"])
def test_a_dumped_recipe_is_the_same_recipe(tmp_path, sections):
    recipe = read(tmp_path, **sections)
    assert recipe.training.profile is None or recipe.training.profile.steps == 3
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(dumped) == recipe
    assert dump_recipe(load_recipe(dumped)) == dump_recipe(recipe)


def test_a_dumped_recipe_writes_out_every_default(tmp_path):
    written = yaml.safe_load(dump_recipe(read(tmp_path)))
    said = [f"{key}." for key, _ in leaves(written)]
    unsaid = {key for key, _ in keys_of(Recipe) if not any(each.startswith(f"{key}.") for each in said)}
    assert unsaid == {
        *("data.train.path", "data.train.weight", "data.train.samples", "data.spans.length", "data.spans.per_document"),
        *("training.profile.start", "training.profile.steps"),
    }
    assert written["training"]["betas"] == [0.9, 0.95] and written["data"]["cache_dir"] == "~/.cache/eagle3"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_that_is_shipped_loads(path):
    recipe = load_recipe(path)
    assert recipe.training.global_batch_size % recipe.training.accumulation == 0


def test_overrides_change_single_keys_and_the_last_one_wins(tmp_path):
    plain = read(tmp_path)
    changed = load_recipe(
        tmp_path / "recipe.yaml",
        [
            "training.ttt_steps=3",
            "training.ttt_steps=5",  # the last one
            "model.draft.vocab_size=1000",  # two sections deep, neither in the file
            "data.train=[a.jsonl, b.jsonl]",
            "model.aux_layers=[1, 3, 5]",
            "output.dir=runs/a=b",  # only the first = is a separator
            "training.profile={start: 2, steps: 1}",
            "data.seed=-3",
        ],
    )
    assert (changed.training.ttt_steps, changed.model.draft.vocab_size, changed.data.seed) == (5, 1000, -3)
    assert changed.data.train == ["a.jsonl", "b.jsonl"] and changed.model.aux_layers == [1, 3, 5]
    assert str(changed.output.dir) == "runs/a=b"
    assert (changed.training.profile.start, changed.training.profile.steps) == (2, 1)
    untouched = ("hidden_states", "evaluation", "tracking", "parallelism")
    assert all(getattr(changed, name) == getattr(plain, name) for name in untouched)
    assert changed.training.learning_rate == plain.training.learning_rate


def test_an_override_can_put_a_key_back_to_nothing(tmp_path):
    assert read(tmp_path, training={"max_steps": 9}).training.max_steps == 9
    assert load_recipe(tmp_path / "recipe.yaml", ["training.max_steps=null"]).training.max_steps is None
    with pytest.raises(UserError, match=r"'training.max_steps=' has no value; write training.max_steps=VALUE, or null"):
        load_recipe(tmp_path / "recipe.yaml", ["training.max_steps="])  # a shell's variable may have been empty


@pytest.mark.parametrize("spelling", ["1e-4", "1E-4", "0.0001", "1.0e-4", "'1e-4'"])
def test_a_learning_rate_is_a_number_however_it_is_written(tmp_path, spelling):
    """YAML 1.1 reads `1e-4`, without a dot, as text."""
    read(tmp_path)
    path = tmp_path / "recipe.yaml"
    assert load_recipe(path, [f"training.learning_rate={spelling}"]).training.learning_rate == 1e-4
    path.write_text(path.read_text(encoding="utf-8") + f"training:\n  learning_rate: {spelling}\n", encoding="utf-8")
    assert load_recipe(path).training.learning_rate == 1e-4


def test_true_and_false_are_taken_where_they_belong(tmp_path):
    recipe = read(tmp_path, model={"draft": {"fc_norm": True}}, tracking={"tensorboard": False})
    assert recipe.model.draft.fc_norm and not recipe.tracking.tensorboard


@pytest.mark.parametrize("layers", [[4], [*range(8)]])
def test_a_draft_may_read_one_to_eight_layers(tmp_path, layers):
    assert read(tmp_path, model={"aux_layers": layers}).model.aux_layers == layers


TRAINING = (
    *("ttt_steps=0", "step_decay=0", "step_decay=1.1", "learning_rate=0", "learning_rate=.nan", "learning_rate=.inf"),
    *("weight_decay=.nan", "gradient_clipping=.inf", "betas=[0.9, 1.0]", "betas=[0.9]", "warmup_fraction=1"),
    "loss=mse",
)
# Of true and false, YAML has many spellings.
BOOLEANS = (
    *("training.ttt_steps=true", "training.learning_rate=yes", "training.max_steps=true", "data.max_length=on"),
    *("training.gradient_clipping=false", "model.draft.hidden_size=true", "data.held_out_fraction=false"),
    *("training.betas=[false, 0.9]", "model.aux_layers=[false, 1, 2]"),
)
LAYERS = ([3, 1, 2], [1, 1, 2], [], [*range(9)], [-1, 1, 2], [1, 2.5, 3])


@pytest.mark.parametrize(
    "override",
    [
        *(f"training.{each}" for each in TRAINING),
        *BOOLEANS,
        *(f"model.aux_layers={each}" for each in LAYERS),
        *("data.held_out_fraction=1", "data.train=[]", "data.max_length=1"),
        *("model.target_dtype=int8", "evaluation.new_tokens=1"),
    ],
)
def test_a_value_that_its_key_cannot_have_is_refused_with_the_key(tmp_path, override):
    read(tmp_path)
    section, _, name = override.partition("=")[0].rpartition(".")
    with pytest.raises(UserError, match=rf"command line: .*: {section}\W.*{name}.*; "):
        load_recipe(tmp_path / "recipe.yaml", [override])


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "http://host:30000/v1", "host", ""])
def test_a_server_that_is_no_url_of_a_root_is_refused_with_the_form(tmp_path, url):
    with pytest.raises(UserError, match="target.servers.*write http://host:port"):
        read(tmp_path, target={"servers": [url]})


def test_a_servers_url_may_end_with_a_slash_and_one_that_nobody_would_ask_is_refused(tmp_path):
    servers = {"servers": ["http://host:30000/"]}
    assert read(tmp_path, target={"backend": "sglang"} | servers).target.servers == ["http://host:30000"]
    with pytest.raises(UserError, match="servers are named but backend is 'transformers'.*set target.backend=sglang"):
        read(tmp_path, target=servers)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "linear", "factor": 4}, "write rope_type"),
        ({"factor": 8}, "'factor' is not a key of rope_type default, which takes rope_type, rope_theta;"),
        ({"rope_type": "linear", "factor": 2, "beta_fast": 32}, "'beta_fast' is not a key of .* linear.*factor;"),
        ({"rope_type": "longrope"}, "'longrope' is not supported; use one of default, linear, llama3, yarn;"),
        ({"rope_type": ["yarn"]}, "is not supported"),
        ({"full_attention": {"rope_theta": 1e6}}, "'full_attention' is not a key"),
    ],
    ids=str,
)
def test_a_rope_key_that_would_change_nothing_is_refused_with_those_that_do(tmp_path, rope, message):
    with pytest.raises(UserError, match=f"model.draft.rope_parameters: .*{message}"):
        read(tmp_path, model={"draft": {"rope_parameters": rope}})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.1},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    ],
    ids=str,
)
def test_a_rope_with_the_keys_of_its_type_is_taken_as_it_is(tmp_path, rope):
    recipe = read(tmp_path, model={"draft": {"rope_parameters": rope}})
    assert recipe.model.draft.rope_parameters == rope


DRAFT_FILES = ("model.draft.config", "model.draft.init_from", "model.draft.vocabulary")


@pytest.mark.parametrize("key", [*DRAFT_FILES, "data.chat_template", "data.cache_dir", "target.spool", "output.dir"])
def test_a_url_in_the_place_of_a_path_is_refused_without_its_password(tmp_path, key):
    read(tmp_path)
    password = "secret" * 12  # longer than the part of a value that a line shows
    with pytest.raises(UserError, match=rf"{key} .*\*\*\*@host.*: is a URL; name a local file or folder") as caught:
        load_recipe(tmp_path / "recipe.yaml", [f"{key}=https://user:{password}@host/x?token={password}"])
    assert "secret" not in str(caught.value)
    load_recipe(tmp_path / "recipe.yaml", [f"{key}=some/folder"])


# Keys whose type is a text that may name files, and what compares those files when a run is resumed.
TEXTS = {
    "model.target": "its fingerprint",
    "data.train": "the samples' checksum",
    "data.train.path": "the samples' checksum",
    "data.held_out": "the samples' checksum",
    "hidden_states.path": "the store's provenance",
    "target.spool": "nothing: it holds one job's rows",
}


def parts(kind: Any) -> Iterator[Any]:
    """A type, and all types and annotations that it is made of."""
    yield kind
    for part in get_args(kind):
        yield from parts(part)


def keys_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Every key at any depth, with the parts of its type."""
    for name, field in section.model_fields.items():
        made_of = [*parts(field.annotation), *field.metadata]
        yield prefix + name, made_of
        for inner in made_of:
            if isinstance(inner, type) and issubclass(inner, Section):
                yield from keys_of(inner, f"{prefix}{name}.")


def test_every_file_that_a_recipe_can_name_is_found_by_the_type_of_its_key(tmp_path):
    """A key that is added with such a type is among the digested files, or this test names it."""
    keys = dict(keys_of(Recipe))
    paths = [key for key, made_of in keys.items() if Path in made_of]
    assert {"model.draft.config", "data.chat_template"} < {*paths} and {*OUTPUTS} < {*paths}
    texts = {key for key, made_of in keys.items() if get_args(Named)[1] in made_of and Path not in made_of}
    assert texts == TEXTS.keys()
    read(tmp_path)
    recipe = load_recipe(tmp_path / "recipe.yaml", [f"{key}={tmp_path / key}" for key in paths])
    assert files_of(recipe) == {key: tmp_path / key for key in paths if key not in OUTPUTS}
