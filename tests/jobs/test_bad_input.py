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
from places import ZERO2
from safetensors.torch import save_file
from tiny_run import conversations, deepspeed, finish, launch, make_target, write_recipe
from transformers import AutoConfig

from eagle3 import hub
from eagle3.draft.derivation import derive_draft
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import UserError
from eagle3.jobs.provenance import store_provenance
from eagle3.jobs.train import train
from eagle3.preflight.inputs import require_inputs
from eagle3.recipe.loading import dump_recipe, load_recipe
from eagle3.states.store.folder import FORMAT
from eagle3.targets.checkpoint import target_config
from eagle3.text.conversations import read_conversations


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


def complaint(recipe, topology, *overrides, deepspeed=ZERO2, resume=False):
    """Train's message about the mistake. Asserts that the run folders are as before."""
    before = runs(recipe)

    def work():
        train(load_recipe(recipe, list(overrides)), deepspeed, topology, "yes" if resume else "no")

    message = refusal(work)
    assert runs(recipe) == before
    return message


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
        ("hidden_state.mode=live", ["hidden_state:", "did you mean hidden_states?"]),
        ("training.profile.strat=3", ["training.profile.strat:", "value 3", "did you mean training.profile.start?"]),
        ("training.optimiser=adam", ["training.optimiser:", "unknown key", "train.py --print-recipe shows all keys"]),
        ("memory.recompute=on", ["memory.recompute (value true)", "'none', 'attention_kept' or 'full'"]),
        ("data.template_variables=no_think", ["dictionary, as in data.template_variables={name: value}"]),
        ("training=3", ["training (value 3): is a section; write training={key: value}, or its keys below it"]),
        ("training.betas=[0.9]", ["training.betas.1: missing"]),
        ("training.ttt_steps=seven", ["training.ttt_steps", "'seven'", "integer"]),
        ("training.ttt_steps=2.5", ["training.ttt_steps", "2.5", "integer"]),
        ("training.ttt_steps=null", ["training.ttt_steps", "null", "integer"]),
        ("training.loss=mse", ["training.loss", "'mse'", "'kl', 'lk_alpha' or 'lk_lambda'"]),
        ("data.train=chats.jsonl", ["data.train", "'chats.jsonl'", "list"]),
        ("data.train.0=a", ["data.train.0", "train is not a section"]),
        ("training=fast", ["training", "'fast'"]),
        ("output.dir=", ["output.dir=", "has no value", "output.dir=null for none"]),
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
    for path, what in ((tmp_path / "nowhere.yaml", "no such recipe"), (tmp_path, "is a folder, not a recipe")):
        with pytest.raises(UserError, match=f"^{path}: {what}; name a YAML file with --recipe"):
            load_recipe(path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n{}\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"rows.jsonl: is data, not a recipe; name it in one, as data.train="):
        load_recipe(rows)


# Data -----------------------------------------------------------------------------------------------------------------


def test_data_that_cannot_be_read_is_named(recipe, topology):
    absent = recipe.parent / "absent.jsonl"
    assert complaint(recipe, topology, f"data.train=[{absent}]").startswith(f"{absent}: no such file or folder")
    assert complaint(recipe, topology, f"data.held_out=[{absent}]").startswith(f"{absent}: no such file or folder")
    absent = recipe.parent / "absent.jinja"
    assert complaint(recipe, topology, f"data.chat_template={absent}").startswith(f"{absent}: cannot be read")
    data = write_rows(recipe, [])
    assert complaint(recipe, topology).startswith(f"{data}: holds no rows; give data")
    data.write_text('{"messages": []}\n{"messages": [\n', encoding="utf-8")
    assert complaint(recipe, topology).startswith(f"{data}:")
    write_rows(recipe, [*conversations(2), {"prompt": "no form that is known"}])
    assert complaint(recipe, topology).startswith(f"{data}:3: ")


def test_a_sample_without_an_assistant_turn_stops_the_run_with_the_remedy(recipe, topology):
    """test_launchers.py drops and counts it."""
    silent, rows = {"messages": [{"role": "user", "content": "Is anybody there?"}]}, conversations(12)
    data = write_rows(recipe, [*rows[:5], silent, *rows[5:], silent])
    message = complaint(recipe, topology)
    assert message.startswith(f"{data}:6: no assistant turn; 2 samples have such a problem; ")
    assert "data.unusable=drop" in message


def test_a_long_sample_stops_is_dropped_or_is_truncated(recipe, topology):
    rows = conversations(12)
    rows[3]["messages"][1]["content"] *= 20
    data = write_rows(recipe, rows)
    message = complaint(recipe, topology, "data.max_length=200")
    assert message.startswith(f"{data}:4: longer than 200 tokens (") and "data.max_length" in message
    assert "data.too_long=drop" in message and "data.too_long=truncate" in message

    for policy, count, account in (("drop", 11, "1 dropped: longer than 200 tokens"), ("truncate", 12, "1 truncated")):
        lines, changed = [], load_recipe(recipe, ["data.max_length=200", f"data.too_long={policy}"])
        inputs = inputs_of(changed, topology.device, lines.append)
        lengths = [*inputs.train.lengths, *inputs.held_out.lengths]
        assert len(lengths) == count and (max(lengths) == 200) == (policy == "truncate")
        assert any(account in line for line in lines)


def test_held_out_samples_that_are_trained_on_are_warned_of(recipe, topology):
    rows, lines = conversations(12), []
    write_rows(recipe, rows)
    path = write_rows(recipe, rows[:3], "held_out.jsonl")
    inputs_of(load_recipe(recipe, [f"data.held_out=[{path}]"]), topology.device, lines.append)
    assert any("data.held_out: 3 of 3 samples are also trained on" in line for line in lines)
    lines.clear()
    inputs_of(load_recipe(recipe), topology.device, lines.append)
    assert not any("also trained on" in line for line in lines)


def test_rows_of_which_none_can_be_read_are_of_another_form(recipe, topology):
    data = recipe.parent / "other.jsonl"
    data.write_text("".join(json.dumps({"chat": row}) + "\n" for row in conversations(3)), encoding="utf-8")
    with pytest.raises(UserError, match="no row can be read, so the files may be of another form") as caught:
        inputs_of(load_recipe(recipe, [f"data.train=[{data}]"]), topology.device, print)
    assert "data.malformed=drop" not in str(caught.value)


def test_a_home_folder_is_found_behind_a_tilde(recipe, monkeypatch):
    monkeypatch.setenv("HOME", str(recipe.parent))
    read = load_recipe(recipe, ["output.dir=~/run", "data.train=[~/a.jsonl]", "model.target=~/target"])
    assert read.output.dir == recipe.parent / "run" and read.model.target == str(recipe.parent / "target")
    assert read.data.train == [str(recipe.parent / "a.jsonl")]


WEIGHTS, CUT_OFF = "model.safetensors", r"cut off, or a git-lfs pointer\); download it again"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json: no such file; copy it there"),
        (lambda folder: (folder / WEIGHTS).unlink(), "no weights in this folder"),
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


def test_no_sample_left_is_said_with_the_reason(recipe, topology):
    silent = [{"messages": [{"role": "user", "content": f"Is anybody there, {number}?"}]} for number in range(3)]
    data = write_rows(recipe, silent, "silent.jsonl")
    drop = "data.unusable=drop"
    expected = f"{data}: no usable sample among 3 (3: no assistant turn); give other data"
    assert complaint(recipe, topology, drop, f"data.train=[{data}]") == expected
    assert complaint(recipe, topology, drop, f"data.held_out=[{data}]") == expected  # training data is there


@pytest.mark.parametrize("held_out", ["none", "without prompts"])
def test_held_out_data_that_cannot_be_judged_is_refused_before_training(recipe, topology, held_out):
    """Before training, rather than after hours of it."""
    plain = [{"text": f"The tale of {number} goes on without a question."} for number in range(4)]
    path = write_rows(recipe, plain, "plain.jsonl")
    override = "data.held_out_fraction=0" if held_out == "none" else f"data.held_out=[{path}]"
    assert "evaluation.conversations" in complaint(recipe, topology, "evaluation.conversations=2", override)


@pytest.mark.parametrize("override", ["draft_tokens=1000", "new_tokens=100000"])
def test_an_answer_that_leaves_no_place_for_a_prompt_is_refused_by_its_keys(recipe, topology, override):
    message = complaint(recipe, topology, "evaluation.conversations=2", f"evaluation.{override}")
    assert message.startswith("evaluation.new_tokens: ") and "evaluation.draft_tokens" in message
    assert "the target's context of 256; lower them" in message and "-" not in message.replace("held-out", "")


def test_identical_samples_cannot_be_held_out(recipe, topology):
    write_rows(recipe, conversations(1) * 5)
    assert complaint(recipe, topology).startswith("data: all 5 samples are identical")


# The target -----------------------------------------------------------------------------------------------------------


def test_a_target_that_is_not_there_or_not_whole_is_named(recipe, topology, target, tmp_path):
    absent = tmp_path / "absent"
    assert complaint(recipe, topology, f"model.target={absent}").startswith(f"target '{absent}': no such folder; name")
    absent.mkdir()
    message = complaint(recipe, topology, f"model.target={absent}")
    assert message.startswith(f"target '{absent}': its ") and "model.target" in message
    shutil.copytree(target, absent, dirs_exist_ok=True)
    (absent / "model.safetensors").write_bytes((target / "model.safetensors").read_bytes()[:-100])
    message = complaint(recipe, topology, f"model.target={absent}")
    assert message.startswith(f"target '{absent}': its causal language model cannot be read")
    (absent / "model.safetensors").unlink()
    message = complaint(recipe, topology, f"model.target={absent}")
    assert message.startswith(f"target '{absent}': its causal language model cannot be read")


def test_a_draft_given_as_target_is_called_a_draft(recipe, topology, tmp_path):
    """An export has no tokenizer, and to copy one there would help nobody."""
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 300}))
    message = complaint(recipe, topology, f"model.target={draft}")
    assert message.startswith(f"target '{draft}': is a draft, not a target; name")
    with pytest.raises(UserError, match="is a draft, not a target"):
        require_inputs(load_recipe(recipe, [f"model.target={draft}"]))
    with pytest.raises(UserError, match="is a draft, not a target"):
        target_config(draft)


def test_a_target_without_chat_template_asks_for_one(recipe, topology, target, tmp_path):
    bare = make_target(tmp_path / "bare", template=None)
    message = complaint(recipe, topology, f"model.target={bare}")
    assert message.startswith(f"{recipe.parent / 'conversations.jsonl'}:1: ") and "data.chat_template" in message


def test_a_broken_chat_template_is_named(recipe, topology):
    template = recipe.parent / "chat.jinja"
    template.write_text("{% for message in messages %}\n{{ message.content }\n{% endfor %}", encoding="utf-8")
    assert complaint(recipe, topology, f"data.chat_template={template}").startswith(f"{template}:2: unexpected '}}'")
    template.write_text("{% if messages %}" * 3000 + "{% endif %}" * 3000, encoding="utf-8")
    with pytest.raises(UserError, match=f"^{template}: nested too deep to be parsed; fix data.chat_template"):
        require_inputs(load_recipe(recipe, [f"data.chat_template={template}"]))


# The draft ------------------------------------------------------------------------------------------------------------


def exported(folder, target, topology, **changes):
    """Exports a random draft for the tiny target. changes: to its config."""
    config = derive_draft(AutoConfig.from_pretrained(target), draft_vocab_size=200, aux_layers=(1, 2, 3))
    draft = Eagle3Draft(replace(config, **changes), topology.modules, torch.float32)
    return export(folder, draft, with_embedding=False)


def test_a_given_vocabulary_that_tensor_ranks_cannot_divide_is_refused_as_it_is(recipe, topology, target, tmp_path):
    """By its own size, and not by that of the vocabulary that would have been chosen, which could be divided."""
    size = json.loads((target / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    save_file({"t2d": torch.arange(size) < 199}, tmp_path / "odd.safetensors")
    given = f"model.draft.vocabulary={tmp_path / 'odd.safetensors'}"
    message = complaint(recipe, topology, given, "model.draft.vocab_size=null", "parallelism.tensor=2")
    assert message.startswith("parallelism.tensor: 2 does not divide the draft's draft_vocab_size 199; ")


def test_a_warm_start_from_another_shape_names_the_size(recipe, topology, target, tmp_path):
    wide = exported(tmp_path / "wide", target, topology, hidden_size=64, target_hidden_size=64)
    message = complaint(recipe, topology, f"model.draft.init_from={wide}")
    assert message.startswith(f"{wide}: hidden_size is 64, ") and "32" in message and "init_from" in message
    assert "name the export of a draft for this target, or train without init_from" in message
    other = exported(tmp_path / "other", target, topology, vocab_size=250)
    assert str(other) in complaint(recipe, topology, f"model.draft.init_from={other}")
    same = f"model.draft.init_from={exported(tmp_path / 'same', target, topology)}"
    for key, value in (("model.draft.intermediate_size", 96), ("model.aux_layers", [0, 1, 2])):
        remedy = f"leave out {key} and set model.draft.config to {tmp_path / 'same'}/config.json, or train without"
        assert remedy in complaint(recipe, topology, same, f"{key}={value}")
    config = json.loads((tmp_path / "same" / "config.json").read_text(encoding="utf-8"))
    window = {"layer_types": ["sliding_attention"], "sliding_window": 5}
    (tmp_path / "same" / "config.json").write_text(json.dumps(config | window), encoding="utf-8")
    assert "has a window of 5 keys, this run's draft full attention; set" in complaint(recipe, topology, same)
    message = complaint(recipe, topology, same, "model.draft.vocab_size=100")
    assert (
        message.startswith("model.draft.vocab_size: 100, but ")
        and "has 200 draft tokens; leave vocab_size out" in message
    )


def test_a_warm_start_that_is_missing_or_damaged_is_named(recipe, topology, target, tmp_path):
    absent = tmp_path / "absent"
    message = complaint(recipe, topology, f"model.draft.init_from={absent}")
    assert message.startswith(f"{absent / 'config.json'}: no such file; name")
    damaged = exported(tmp_path / "damaged", target, topology)
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:-100])
    message = complaint(recipe, topology, f"model.draft.init_from={damaged}")
    assert message.startswith(f"{damaged / 'model.safetensors'}: damaged")


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
        (["training.profile={start: 10, steps: 2}", "training.max_steps=3"], "^training.profile.start: 10, .*step 3; "),
        (["training.global_batch_size=7", "training.accumulation=2"], "training.global_batch_size 7 .*use 6 or 8$"),
        (["training.global_batch_size=2", "training.accumulation=4"], "use 4$"),
    ],
    ids=str,
)
def test_a_value_that_this_run_cannot_have_is_refused(recipe, topology, overrides, message):
    """The draft cannot be built, the target has no such layers, or the run does not come out even."""
    assert re.search(message, line := complaint(recipe, topology, *overrides)), line


# DeepSpeed ------------------------------------------------------------------------------------------------------------


def test_a_sample_longer_than_the_draft_reaches_is_refused(recipe, topology):
    short = ["model.draft.max_position_embeddings=16"]
    with pytest.raises(UserError, match=r"data.max_length: a sample has \d+ tokens.*reaches 16.*rope_parameters"):
        train(load_recipe(recipe, short), ZERO2, topology)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"train_batch_size": 32}, ["train_batch_size is 32", "recipe says 4", '"auto"']),
        ({"gradient_accumulation_steps": 3}, ["gradient_accumulation_steps is 3", "recipe says 1"]),
        ({"gradient_clipping": 1.0}, ["gradient_clipping is 1.0", "recipe says 0.5"]),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, ["optimizer.params.lr is 0.001", "0.002"]),
        ({"optimizer": {"type": "Lamb", "params": {}}}, ["optimizer.type is 'Lamb'", "AdamW"]),
        ({"optimizer": "AdamW"}, ["optimizer", "'AdamW' is not a section"]),
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, ["learning_rate", "remove it"]),
        ({"bf16": {"enabled": True}}, ["bf16.enabled is True", "recipe says False"]),
        ({"zero_optimization": {"stage": 3}}, ["zero_optimization.stage is 3", "uses 1 or 2"]),
        ({"zero_optimization": {}}, ["zero_optimization.stage is 0", "uses 1 or 2"]),
        ({"zero_optimization": 2}, ["zero_optimization"]),
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, ["zero_optimization.overlap_com: Extra inputs"]),
        ({"zero_optimisation": {"stage": 1}}, ["zero_optimisation", "did you mean zero_optimization?"]),
        ({"curriculum_learning": {"enabled": True}}, ["curriculum_learning", "remove it"]),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            ["offload_optimizer", "remove it"],
        ),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, ["scheduler is not used here", "remove it"]),
        ({"fp16": {"enabled": True}}, ["fp16 is not used here", "remove it"]),
        ({"fp16": True}, ["fp16"]),
        ({"sequence_parallel_size": 2}, ["sequence_parallel_size is not used here"]),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_deepspeed_file_that_contradicts_the_recipe_is_refused(recipe, topology, changes, parts):
    path = recipe.parent / "zero.json"
    path.write_text(json.dumps(json.loads(ZERO2.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    message = complaint(recipe, topology, deepspeed=path)
    assert message.startswith(f"{path}: ") and all(part in message for part in parts), message


@pytest.mark.parametrize("content", [b"{,}", b"\xff\xfe", b"", b"[]", b"3"])
def test_a_deepspeed_file_that_is_no_json_object_is_named(recipe, topology, content):
    path = recipe.parent / "zero.json"
    path.write_bytes(content)
    assert complaint(recipe, topology, deepspeed=path).startswith(f"{path}: ")


def test_a_missing_deepspeed_file_is_named(recipe, topology, tmp_path):
    for path in (tmp_path / "absent.json", tmp_path):
        message = complaint(recipe, topology, deepspeed=path)
        assert message.startswith(f"{path}: ") and "ds_configs/zero2.json" in message


# The hidden-state store -----------------------------------------------------------------------------------------------


def test_a_store_that_is_missing_foreign_or_incomplete_is_named(recipe, topology, tmp_path, capsys):
    store = tmp_path / "store"
    stored = ("hidden_states.mode=stored", f"hidden_states.path={store}")
    message = complaint(recipe, topology, *stored)
    assert message.startswith(f"{store}: no hidden-state store here; run capture.py")
    assert "hidden_states.mode=live" in message

    plain = load_recipe(recipe)
    captured = store_provenance(job_of(plain, topology))
    store.mkdir()
    manifest = {"format": FORMAT, "provenance": captured, "record": {}}
    (store / "store.json").write_text(json.dumps(manifest), encoding="utf-8")
    capsys.readouterr()
    message = complaint(recipe, topology, *stored, "model.aux_layers=[0, 1, 2]")
    assert message.startswith(f"{store}: the store was captured with aux_layers=[1, 2, 3], this run has [0, 1, 2]; ")
    message = complaint(recipe, topology, *stored, "hidden_states.codec=fp8")
    assert "captured with codec='none', this run has 'fp8'; set hidden_states.codec to that" in message
    message = complaint(recipe, topology, *stored, "target.teacher=logits")
    assert "captured with teacher=None, this run has 'logits'" in message
    foreign = {"format": FORMAT, "provenance": {**captured, "target": 32 * "a"}, "record": {"target": "owner/other"}}
    (store / "store.json").write_text(json.dumps(foreign), encoding="utf-8")
    message = complaint(recipe, topology, *stored)
    assert f"captured with 'owner/other' as target (fingerprint {32 * 'a'}), this run's model.target has" in message
    assert "training data" not in capsys.readouterr().out, "these are said before data are read"
    (store / "store.json").write_text(json.dumps(manifest), encoding="utf-8")
    message = complaint(recipe, topology, *stored)  # the run's own store, but without samples
    assert message.startswith(f"{store}: 40 samples of this recipe are not in the store") and "capture.py" in message


# The run folder -------------------------------------------------------------------------------------------------------


def began_with(recipe):
    """Leave in the run folder the recipe and the identity of an earlier run."""
    (recipe.parent / "run" / "recipe.yaml").write_text(dump_recipe(load_recipe(recipe)), encoding="utf-8")
    (recipe.parent / "run" / "run_id.txt").write_text(32 * "1" + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.learning_rate=3e-3", "training.learning_rate was 0.002, now it is 0.003"),
        ("model.draft.fc_norm=true", "model.draft.fc_norm was False, now it is True"),
        ("training.max_steps=9", "training.max_steps was 8, now it is 9"),
        ("data.seed=1", "data.seed was 0, now it is 1"),
    ],
)
def test_resuming_with_another_recipe_names_the_key(recipe, topology, override, expected):
    began_with(recipe)
    message = complaint(recipe, topology, override, resume=True)
    assert message.startswith(f"{recipe.parent / 'run' / 'recipe.yaml'}: {expected}") and "without --resume" in message


def test_a_mistake_on_resuming_changes_nothing_of_the_run(recipe, topology):
    """Not even keys that may change on resuming."""
    began_with(recipe)
    (recipe.parent / "conversations.jsonl").unlink()
    assert "no such file" in complaint(recipe, topology, "evaluation.new_tokens=20", resume=True)


@pytest.mark.parametrize("content", [b"model: [", b"\xff\xfe", b"- model"])
def test_resuming_beside_a_damaged_recipe_names_it(recipe, topology, content):
    damaged = recipe.parent / "run" / "recipe.yaml"
    damaged.write_bytes(content)
    assert complaint(recipe, topology, resume=True).startswith(f"{damaged}: ")


def test_a_mistake_on_resuming_what_never_began_makes_no_folder(recipe, topology):
    shutil.rmtree(recipe.parent / "run")
    assert "holds no run to resume" in complaint(recipe, topology, resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_a_file_in_the_way_of_the_run_folder_is_named(recipe, topology, resume):
    file = recipe.parent / "run-notes.txt"
    file.write_text("not a folder", encoding="utf-8")
    for folder in (file, file / "below"):
        message = complaint(recipe, topology, f"output.dir={folder}", resume=resume)
        assert str(folder) in message and "output.dir" in message


# A job of processes (one alone: see test_launchers.py) ----------------------------------------------------------------


def test_a_job_of_two_processes_ends_with_one_line_and_without_a_traceback(recipe, tmp_path):
    """The first process finds the mistake while the second waits for it."""
    before, absent = runs(recipe), tmp_path / "absent.jsonl"
    job = (*deepspeed(2), "launchers/train.py", "--recipe", str(recipe))
    output = finish(launch(*job, f"data.train=[{absent}]"), code=2)
    [error] = [line for line in output.splitlines() if line.startswith("error:")]
    assert error.startswith(f"error: {absent}: no such file or folder") and "fix data.train" in error
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
