"""Every user mistake is reported in one line with the place, the value and the remedy, and leaves earlier runs
alone."""

import json
import os
import re
import shutil
import time
from dataclasses import replace

import huggingface_hub
import pytest
import torch
from drafts import export
from jobs import inputs_of, job_of
from places import RECIPES, ZERO2
from safetensors.torch import save_file
from tiny_run import conversations, deepspeed, finish, launch, make_target, write_recipe
from transformers import AutoConfig

from eagle3 import hub
from eagle3.draft.derivation import derive_draft
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import UserError
from eagle3.jobs.job import store_provenance
from eagle3.jobs.train import train
from eagle3.parallel.topology import start_distributed
from eagle3.preflight.inputs import require_inputs
from eagle3.recipe.loading import dump_recipe, load_recipe
from eagle3.states.store.folder import FORMAT
from eagle3.targets.checkpoint import target_config
from eagle3.text.conversations import read_conversations
from eagle3.training.deepspeed_file import deepspeed_config

WEIGHTS, CUT_OFF = "model.safetensors", r"cut off, or a git-lfs pointer\); download it again"


@pytest.fixture
def recipe(tmp_path, target):
    """The path of a recipe that would train, beside an earlier run in its output.dir."""
    path = write_recipe(tmp_path, target)
    earlier = tmp_path / "run"
    (earlier / "checkpoints").mkdir(parents=True)
    (earlier / "metrics.jsonl").write_text('{"step": 1, "kind": "train"}\n', encoding="utf-8")
    return path


def runs(recipe):
    """Every file in the folders named run*, with its bytes. No mistake may change, move or add to these."""
    files = [path for folder in recipe.parent.glob("run*") for path in (folder, *folder.rglob("*"))]
    return {str(path): path.read_bytes() if path.is_file() else None for path in files}


@pytest.fixture
def refused(recipe, topology):
    """Asserts that train refuses some overrides with a message of this pattern, and leaves the run folders as they
    were."""

    def require_refusal(pattern, *overrides, deepspeed=ZERO2, resume="no"):
        before = runs(recipe)
        message = refusal(lambda: train(load_recipe(recipe, list(overrides)), deepspeed, topology, resume))
        assert re.search(pattern, message), message
        assert runs(recipe) == before

    return require_refusal


def refusal(action, *arguments):
    """The one line of the UserError that the action raises."""
    with pytest.raises(UserError) as caught:
        action(*arguments)
    message = str(caught.value)
    where, colon, rest = message.partition(": ")
    assert "\n" not in message and where and rest and len(message) < 500, message[:1000]
    return message


def write_rows(recipe, rows, name="conversations.jsonl"):
    path = recipe.parent / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# The recipe -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("training.learning_rat=1", ["training.learning_rat:", "value 1", "did you mean training.learning_rate?"]),
        ("model.draft.vocabsize=9", ["model.draft.vocabsize:", "value 9", "did you mean model.draft.vocab_size?"]),
        ("trainning.epochs=3", ["trainning:", "did you mean training?"]),
        ("training.profile.strat=3", ["training.profile.strat:", "value 3", "did you mean training.profile.start?"]),
        ("training.optimiser=adam", ["training.optimiser:", "unknown key", "train.py --print-recipe shows all keys"]),
        ("memory.recompute=on", ["memory.recompute (value true)", "'none', 'attention_kept' or 'full'"]),
        ("data.template_variables=no_think", ["dictionary, as in data.template_variables={name: value}"]),
        ("training=3", ["training (value 3): is a section; write training={key: value}, or its keys below it"]),
        ("training.betas=[0.9]", ["training.betas.1 (value [0.9]): Field required"]),
        ("training.ttt_steps=seven", ["training.ttt_steps", "'seven'", "integer"]),
        ("training.ttt_steps=null", ["training.ttt_steps", "null", "integer"]),
        ("training.loss=mse", ["training.loss", "'mse'", "'kl', 'lk_alpha' or 'lk_lambda'"]),
        ("data.train=chats.jsonl", ["data.train", "'chats.jsonl'", "list"]),
        ("output.dir=", ["output.dir=", "has no value", "write output.dir=VALUE, or null if it may be none"]),
        ("hidden_states.mode=stored", ["hidden_states", "path is not set", "capture.py"]),
        ("parallelism.ulysses=0", ["parallelism.ulysses", "value 0", "greater than or equal to 1"]),
        ("model.aux_layers=[3, 1, 2]", ["model", "[3, 1, 2]", "low to high"]),
        ("training.ttt_steps", ["'training.ttt_steps'", "section.key=value"]),
        ("=3", ["'=3'", "section.key=value"]),
        ("model.target.name=x", ["model.target.name=x", "target is not a section"]),
        ("training.betas=[0.9", ["training.betas=[0.9", "not valid YAML"]),
    ],
)
def test_a_mistake_in_a_key_or_value_names_it(recipe, override, parts):
    message = refusal(load_recipe, recipe, [override])
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"model: {target: [\n", "not valid YAML"),
        (b"model:\n\ttarget: x\n", "not valid YAML"),
        (b"\xff\xfe\x00model", "not valid YAML"),
        (b"- model\n- data\n", "holds list, not sections; begin with `model:`"),
        (b"", "model: missing; add it, see recipes/quickstart.yaml"),
        (b"model:\ndata: {train: [x]}\noutput: {dir: x}\n", "model"),
        (b"model: {target: x}\ndata: {train: [x]}\noutptu: {dir: x}\n", "did you mean output?"),
        (b"model: {target: x}\ndata: {train: [x]}\noutput: {dir: x}\n1: 2\n", "1"),
    ],
)
def test_a_file_that_is_no_recipe_is_named(tmp_path, content, expected):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    message = refusal(load_recipe, path)
    assert message.startswith(f"{path}: ") and expected in message, message


def test_a_missing_recipe_is_named(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n{}\n", encoding="utf-8")
    for path, what in (
        (
            tmp_path / "nowhere.yaml",
            "no such recipe; name a YAML file with --recipe, for example recipes/quickstart.yaml$",
        ),
        (RECIPES / "quikstart.yaml", f"no such recipe; .* for example {RECIPES}/quickstart.yaml$"),
        (tmp_path, "is a folder, not a recipe; name a YAML file with --recipe"),
        (rows, "is data, not a recipe; name it in one, as data.train="),
    ):
        with pytest.raises(UserError, match=f"^{path}: {what}"):
            load_recipe(path)


# Data -----------------------------------------------------------------------------------------------------------------


def test_data_that_cannot_be_read_is_named(refused, recipe):
    absent = recipe.parent / "absent"
    for key in ("train", "held_out"):
        refused(f"^{absent}: no such file or folder", f"data.{key}=[{absent}]")
    refused(f"^{absent}: cannot be read", f"data.chat_template={absent}")
    data = write_rows(recipe, [])
    refused(f"^{data}: holds no rows; give data")
    data.write_text('{"messages": []}\n{"messages": [\n', encoding="utf-8")
    refused(f"^{data}:")
    write_rows(recipe, [*conversations(2), {"prompt": "no form that is known"}])
    refused(f"^{data}:3: ")


def test_held_out_samples_that_are_trained_on_are_warned_of(recipe, topology):
    rows, lines = conversations(12), []
    write_rows(recipe, rows)
    path = write_rows(recipe, rows[:3], "held_out.jsonl")
    inputs_of(load_recipe(recipe, [f"data.held_out=[{path}]"]), topology.device, lines.append)
    assert any("data.held_out: 3 of 3 samples are also trained on" in line for line in lines)
    lines.clear()
    inputs_of(load_recipe(recipe), topology.device, lines.append)
    assert not any("also trained on" in line for line in lines)


def test_a_home_folder_is_found_behind_a_tilde(recipe, monkeypatch):
    monkeypatch.setenv("HOME", str(recipe.parent))
    read = load_recipe(recipe, ["output.dir=~/run", "data.train=[~/a.jsonl]", "model.target=~/target"])
    assert read.output.dir == recipe.parent / "run" and read.model.target == str(recipe.parent / "target")
    assert read.data.train == [str(recipe.parent / "a.jsonl")]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json: no such file; copy it there"),
        (lambda folder: (folder / WEIGHTS).unlink(), "no weights .* in this folder"),
        (lambda folder: os.truncate(folder / WEIGHTS, 1000), CUT_OFF),
        (lambda folder: os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 1), CUT_OFF),
        (lambda folder: (folder / WEIGHTS).write_text("version https://git-lfs"), "a git-lfs pointer"),
    ],
)
def test_a_targets_folder_that_lacks_something_is_told_by_a_look_at_its_files(recipe, tmp_path, damage, message):
    folder = shutil.copytree(load_recipe(recipe).model.target, tmp_path / "copied")
    changed = load_recipe(recipe, [f"model.target={folder}"])
    require_inputs(changed)
    damage(folder)
    with pytest.raises(UserError, match=message):
        require_inputs(changed)


@pytest.mark.parametrize("held_out", ["none", "without prompts"])
def test_held_out_data_that_cannot_be_judged_is_refused_before_training(refused, recipe, held_out):
    plain = [{"text": f"The tale of {number} goes on without a question."} for number in range(4)]
    path = write_rows(recipe, plain, "plain.jsonl")
    override = "data.held_out_fraction=0" if held_out == "none" else f"data.held_out=[{path}]"
    refused("evaluation.conversations", "evaluation.conversations=2", override)


@pytest.mark.parametrize("override", ["draft_tokens=1000", "new_tokens=100000"])
def test_an_answer_that_leaves_no_place_for_a_prompt_is_refused_by_its_keys(refused, override):
    message = "^evaluation.new_tokens: .*evaluation.draft_tokens.*the target's context of 256; lower them"
    refused(message, "evaluation.conversations=2", f"evaluation.{override}")


# The target -----------------------------------------------------------------------------------------------------------


def test_a_target_that_is_not_there_or_not_whole_is_named(refused, target, tmp_path):
    absent = tmp_path / "absent"
    refused(f"^target '{absent}': no such folder; name", f"model.target={absent}")
    absent.mkdir()
    refused(f"^target '{absent}': its .*model.target", f"model.target={absent}")
    shutil.copytree(target, absent, dirs_exist_ok=True)
    (absent / WEIGHTS).write_bytes((target / WEIGHTS).read_bytes()[:-100])
    refused(f"^target '{absent}': its causal language model cannot be read", f"model.target={absent}")
    (absent / WEIGHTS).unlink()
    refused(f"^target '{absent}': its causal language model cannot be read", f"model.target={absent}")


def test_a_draft_given_as_target_is_called_a_draft(refused, recipe, tmp_path):
    """An export has no tokenizer, and to copy one there would help nobody."""
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 300}))
    refused(f"^target '{draft}': is a draft, not a target; name", f"model.target={draft}")
    with pytest.raises(UserError, match="is a draft, not a target"):
        require_inputs(load_recipe(recipe, [f"model.target={draft}"]))


def test_a_target_without_chat_template_asks_for_one(refused, recipe, tmp_path):
    bare = make_target(tmp_path / "bare", template=None)
    refused(f"^{recipe.parent / 'conversations.jsonl'}:1: .*data.chat_template", f"model.target={bare}")


def test_a_broken_chat_template_is_named(refused, recipe):
    template = recipe.parent / "chat.jinja"
    template.write_text("{% for message in messages %}\n{{ message.content }\n{% endfor %}", encoding="utf-8")
    refused(f"^{template}:2: unexpected '}}'", f"data.chat_template={template}")
    template.write_text("{% if messages %}" * 3000 + "{% endif %}" * 3000, encoding="utf-8")
    with pytest.raises(UserError, match=f"^{template}: nested too deep to be parsed; fix data.chat_template"):
        require_inputs(load_recipe(recipe, [f"data.chat_template={template}"]))


# The draft ------------------------------------------------------------------------------------------------------------


def exported(folder, target, topology, **changes):
    """Exports a random draft for the tiny target. changes: to its config."""
    config = derive_draft(AutoConfig.from_pretrained(target), draft_vocab_size=200, aux_layers=(1, 2, 3))
    draft = Eagle3Draft(replace(config, **changes), topology.modules, torch.float32)
    return export(folder, draft, with_embedding=False)


def test_a_given_vocabulary_that_tensor_ranks_cannot_divide_is_refused_as_it_is(refused, target, tmp_path):
    """By its own size, and not by that of the vocabulary that would have been chosen, which could be divided."""
    size = json.loads((target / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    save_file({"t2d": torch.arange(size) < 199}, tmp_path / "odd.safetensors")
    given = (f"model.draft.vocabulary={tmp_path / 'odd.safetensors'}", "model.draft.vocab_size=null")
    refused("^parallelism.tensor: 2 does not divide the draft's draft_vocab_size 199", *given, "parallelism.tensor=2")


def test_a_draft_that_does_not_fit_is_refused_before_the_data_are_read(refused, recipe):
    missing = f"data.train=[{recipe.parent / 'absent.jsonl'}]"
    refused("absent.jsonl", missing, "data.held_out=null")
    refused("model.draft.window: a window of 2 keys", missing, "data.held_out=null", "model.draft.window=2")


def test_a_warm_start_from_another_shape_names_the_size(refused, topology, target, tmp_path):
    wide = exported(tmp_path / "wide", target, topology, hidden_size=64, target_hidden_size=64)
    remedy = "name the export of a draft for this target, or train without init_from"
    refused(f"^{wide}: hidden_size is 64, .*32; {remedy}", f"model.draft.init_from={wide}")
    other = exported(tmp_path / "other", target, topology, vocab_size=250)
    refused(str(other), f"model.draft.init_from={other}")
    same = exported(tmp_path / "same", target, topology)
    given = f"model.draft.init_from={same}"
    for key, value in (("model.draft.intermediate_size", 96), ("model.aux_layers", [0, 1, 2])):
        remedy = f"leave out {key} and set model.draft.config to {same}/config.json, or train without"
        refused(remedy, given, f"{key}={value}")
    config = json.loads((same / "config.json").read_text(encoding="utf-8"))
    window = {"layer_types": ["sliding_attention"], "sliding_window": 5}
    (same / "config.json").write_text(json.dumps(config | window), encoding="utf-8")
    refused("has a window of 5 keys, this run's draft full attention; set", given)
    message = "^model.draft.vocab_size: 100, but .* has 200 draft tokens; leave vocab_size out"
    refused(message, given, "model.draft.vocab_size=100")


def test_a_warm_start_that_is_missing_or_damaged_is_named(refused, topology, target, tmp_path):
    absent, damaged = tmp_path / "absent", exported(tmp_path / "damaged", target, topology)
    refused(f"^{absent / 'config.json'}: no such file; name", f"model.draft.init_from={absent}")
    (damaged / WEIGHTS).write_bytes((damaged / WEIGHTS).read_bytes()[:-100])
    refused(f"^{damaged / WEIGHTS}: damaged", f"model.draft.init_from={damaged}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.draft.vocab_size=5000"], "^model.draft.vocab_size: 5000 .*set it between 1 and "),
        (["model.aux_layers=[1, 2, 5]"], r"^model.aux_layers: \[1, 2, 5\] .*5 layers"),
        (["model.draft.hidden_size=64"], "model.draft.hidden_size: 64.*32; leave it out"),
        (["model.draft.num_key_value_heads=3"], "num_key_value_heads 3.*model.draft"),
        (["model.draft.rope_parameters={rope_type: magic}"], "'magic'.*yarn"),
        (["model.draft.rope_parameters={rope_type: yarn}"], "'yarn' needs factor"),
        (["model.draft.config=/nowhere/config.json"], "/nowhere/config.json: no such file"),
        (["model.draft.vocabulary=/nowhere/vocabulary.safetensors"], "/nowhere/vocabulary.safetensors: .*d2t"),
        (["model.draft.max_position_embeddings=16"], r"^data.max_length: a .*\d+ tokens.*reaches 16.*rope_parameters"),
        (["training.profile={start: 10, steps: 2}", "training.max_steps=3"], "^training.profile.start: 10, .*step 3; "),
        (["training.global_batch_size=7", "training.accumulation=2"], "training.global_batch_size 7 .*use 6 or 8$"),
        (["training.global_batch_size=2", "training.accumulation=4"], "use 4$"),
    ],
    ids=str,
)
def test_a_value_that_this_run_cannot_have_is_refused(refused, overrides, message):
    """The draft cannot be built, the target has no such layers, or the run does not come out even."""
    refused(message, *overrides)


# DeepSpeed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"train_batch_size": 32}, 'train_batch_size is 32.*recipe says 4.*"auto"'),
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps is 3.*recipe says 1"),
        ({"gradient_clipping": 1.0}, "gradient_clipping is 1.0.*recipe says 0.5"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, "optimizer.params.lr is 0.001.*0.002"),
        ({"optimizer": {"type": "Lamb", "params": {}}}, "optimizer.type is 'Lamb'.*AdamW"),
        ({"optimizer": "AdamW"}, "optimizer.*'AdamW' is not a section"),
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, "learning_rate.*remove it"),
        ({"bf16": {"enabled": True}}, "bf16.enabled is True.*recipe says False"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage is 3.*uses 1 or 2"),
        ({"zero_optimization": {}}, "zero_optimization.stage is 0.*uses 1 or 2"),
        ({"zero_optimization": 2}, "zero_optimization"),
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "zero_optimization.overlap_com: Extra inputs"),
        ({"zero_optimisation": {"stage": 1}}, "zero_optimisation.*did you mean zero_optimization?"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning.*remove it"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "offload_optimizer.*remove it"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, "scheduler is not used here.*remove it"),
        ({"fp16": {"enabled": True}}, "fp16 is not used here.*remove it"),
        ({"fp16": True}, "fp16"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size is not used here"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_deepspeed_file_that_contradicts_the_recipe_is_refused(refused, recipe, changes, pattern):
    path = recipe.parent / "zero.json"
    path.write_text(json.dumps(json.loads(ZERO2.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    refused(f"^{path}: .*{pattern}", deepspeed=path)


def test_an_offload_that_is_off_is_no_mistake(recipe, tmp_path):
    path, config = tmp_path / "zero.json", json.loads(ZERO2.read_text(encoding="utf-8"))
    config["zero_optimization"]["offload_optimizer"] = {"device": "none", "pin_memory": True}
    path.write_text(json.dumps(config), encoding="utf-8")
    assert deepspeed_config(path, load_recipe(recipe).training, 1)


def test_a_job_without_what_a_launcher_sets_is_told_to_start_with_one(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(UserError, match="^launcher: RANK is set, but not .*MASTER_PORT; start with deepspeed or"):
        start_distributed()


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "abc"), ("MASTER_PORT", "99999"), ("RANK", "3")])
def test_what_a_launcher_set_wrongly_is_named(name, value, monkeypatch):
    for known, usual in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(known, usual)
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^launcher: .*{name}={value}.*(cannot be|is no number); start with deepspeed"):
        start_distributed()


def test_a_deepspeed_file_that_is_missing_or_no_json_object_is_named(refused, tmp_path):
    path = tmp_path / "zero.json"
    for missing in (path, tmp_path):
        refused(f"^{missing}: .*ds_configs/zero2.json", deepspeed=missing)
    for content in (b"{,}", b"\xff\xfe", b"", b"[]", b"3"):
        path.write_bytes(content)
        refused(f"^{path}: ", deepspeed=path)


# The hidden-state store -----------------------------------------------------------------------------------------------


def test_a_store_that_is_missing_foreign_or_incomplete_is_named(refused, recipe, topology, tmp_path, capsys):
    store = tmp_path / "store"
    stored = ("hidden_states.mode=stored", f"hidden_states.path={store}")
    refused(f"^{store}: no hidden-state store here; run capture.py.*hidden_states.mode=live", *stored)

    def write_manifest(captured, **record):
        manifest = {"format": FORMAT, "provenance": captured, "record": record}
        (store / "store.json").write_text(json.dumps(manifest), encoding="utf-8")

    captured = store_provenance(job_of(load_recipe(recipe), topology))
    store.mkdir()
    write_manifest(captured)
    capsys.readouterr()
    for override, message in (
        ("model.aux_layers=[0, 1, 2]", r"aux_layers=\[1, 2, 3\], this run has \[0, 1, 2\]; "),
        ("hidden_states.codec=fp8", "codec='none', this run has 'fp8'; set hidden_states.codec to that"),
        ("target.teacher=logits", "teacher=None, this run has 'logits'"),
    ):
        refused(f"^{store}: the store was captured with {message}", *stored, override)
    write_manifest({**captured, "target": 32 * "a"}, target="owner/other")
    refused(rf"captured with 'owner/other' as target \(fingerprint {32 * 'a'}\), this run's model.target has", *stored)
    assert "training data" not in capsys.readouterr().out, "these are said before data are read"
    write_manifest(captured)  # the run's own store, but without samples
    refused(f"^{store}: 40 samples of this recipe are not in the store.*capture.py", *stored)


# The run folder -------------------------------------------------------------------------------------------------------


def began_with(recipe):
    """Leave in the run folder the recipe and the identity of an earlier run."""
    (recipe.parent / "run" / "recipe.yaml").write_text(dump_recipe(load_recipe(recipe)), encoding="utf-8")
    (recipe.parent / "run" / "run_id.txt").write_text(32 * "1" + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.learning_rate=3e-3", "training.learning_rate was 0.002, now it is 0.003"),
        ("model.draft.fc_norm=true", "model.draft.fc_norm was false, now it is true"),
        ("training.max_steps=9", "training.max_steps was 8, now it is 9"),
        ("data.seed=1", "data.seed was 0, now it is 1"),
    ],
)
def test_resuming_with_another_recipe_names_the_key(refused, recipe, override, expected):
    began_with(recipe)
    refused(f"^{recipe.parent / 'run' / 'recipe.yaml'}: {expected}.*without --resume", override, resume="yes")


def test_a_mistake_on_resuming_changes_nothing_of_the_run(refused, recipe):
    """Not even keys that may change on resuming."""
    began_with(recipe)
    (recipe.parent / "conversations.jsonl").unlink()
    refused("no such file", "evaluation.new_tokens=20", resume="yes")


@pytest.mark.parametrize("content", [b"model: [", b"\xff\xfe", b"- model"])
def test_resuming_beside_a_damaged_recipe_names_it(refused, recipe, content):
    damaged = recipe.parent / "run" / "recipe.yaml"
    damaged.write_bytes(content)
    refused(f"^{damaged}: ", resume="yes")


def test_a_mistake_on_resuming_what_never_began_makes_no_folder(refused, recipe):
    shutil.rmtree(recipe.parent / "run")
    refused("holds no run to resume", resume="yes")


@pytest.mark.parametrize("resume", ["no", "yes"])
def test_a_file_in_the_way_of_the_run_folder_is_named(refused, recipe, resume):
    file = recipe.parent / "run-notes.txt"
    file.write_text("not a folder", encoding="utf-8")
    for folder in (file, file / "below"):
        refused(f"{folder}.*output.dir|output.dir.*{folder}", f"output.dir={folder}", resume=resume)


# A job of processes (one alone: see test_launchers.py) ----------------------------------------------------------------


def test_a_job_of_two_processes_ends_with_one_line_and_without_a_traceback(recipe, tmp_path):
    """The first process finds the mistake while the second waits for it."""
    before, absent = runs(recipe), tmp_path / "absent.jsonl"
    job = (*deepspeed(2), "launchers/train.py", "--recipe", str(recipe))
    output = finish(launch(*job, f"data.train=[{absent}]"), code=2)
    [error] = [line for line in output.splitlines() if line.startswith("error:")]
    assert error.startswith(f"error: data.train[0]: {absent}: no such file or folder") and "fix data.train" in error
    assert "Traceback" not in output and runs(recipe) == before


def test_a_hub_that_cannot_be_reached_is_said_without_trying_for_long(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for look, what in (
        (lambda: target_config("nobody/nothing"), "target 'nobody/nothing': its config cannot be read"),
        (lambda: read_conversations(["nobody/nothing"]), "nobody/nothing: no file or folder here"),
    ):
        hub.require_hub.cache_clear()
        began = time.process_time()
        line = refusal(look)
        assert line.startswith(what) and "http://127.0.0.1:9 cannot be reached: [Errno 111] Connection refused" in line
    assert time.process_time() - began < 10
