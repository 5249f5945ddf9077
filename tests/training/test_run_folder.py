"""No two runs write to one folder, a run loads only its own checkpoints, and a full disk at a run's end destroys
nothing."""

import json
import multiprocessing
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from limits import HANG_SECONDS
from places import ZERO2
from safetensors.torch import load, load_file
from tiny_run import make_target, metrics, run_script, write_recipe

from eagle3.console import Console
from eagle3.durable import move_aside
from eagle3.errors import UserError
from eagle3.jobs.train import train
from eagle3.recipe.loading import dump_recipe, load_recipe
from eagle3.recipe.schema import Tracking
from eagle3.training.claim import CLAIM, PATIENCE, Claim, holder_of
from eagle3.training.run_folder import RunFolder
from eagle3.training.tracking import Tracker

# model.draft.config of a run here.
SHAPE = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": 300, "max_position_embeddings": 256, "rms_norm_eps": 1e-06},
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
WAYS = ("fresh", "resumed", "auto", "link", "relative", "two ranks")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def path(tmp_path, target):
    """That of a recipe."""
    return write_recipe(tmp_path, target)


def test_a_run_does_not_write_into_its_target(tmp_path, path, target):
    recipe = load_recipe(path)
    for place in (target, target / "run"):
        with pytest.raises(UserError, match="lies in model.target"):
            RunFolder(place).check(recipe, "no")
    assert not RunFolder(tmp_path / "run").check(recipe, "no")


def test_a_run_has_a_folder_of_its_own(tmp_path, path, monkeypatch):
    """It must not be the folder of the run's data, nor the one in which the run was started. Files in a folder called
    checkpoints may be somebody else's."""
    rows = tmp_path / "data" / "rows.jsonl"
    rows.parent.mkdir()
    (tmp_path / "conversations.jsonl").rename(rows)
    recipe = load_recipe(path, [f"data.train=[{rows}]"])
    with pytest.raises(UserError, match="contains data.train.0. .*rows.jsonl.*which a run there would write beside"):
        RunFolder(rows.parent).check(recipe, "no")
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "deeper")
    with pytest.raises(UserError, match="contains the working directory"):
        RunFolder(tmp_path / "deep").check(recipe, "no")
    other = tmp_path / "other"
    other.mkdir()
    for name in ("recipe.yaml", "run_id.txt"):
        (other / name).touch()
    with pytest.raises(UserError, match="other/export: lies in the folder of another run, .*other; "):
        RunFolder(other / "export").check(recipe, "no")
    theirs = tmp_path / "theirs" / "checkpoints"
    theirs.mkdir(parents=True)
    assert not RunFolder(theirs.parent).check(recipe, "auto")
    (theirs / "mine.pt").touch()
    for resume in ("no", "auto"):
        with pytest.raises(UserError, match="checkpoints: has a name that a run would use, but was not left by one"):
            RunFolder(theirs.parent).check(recipe, resume)


def test_an_exported_run_without_checkpoints_is_not_begun_over(tmp_path, path):
    recipe, folder = load_recipe(path), RunFolder(tmp_path / "run")
    folder.export.mkdir(parents=True)
    folder.checkpoints.mkdir()
    folder.recipe.write_text(dump_recipe(recipe), encoding="utf-8")
    folder.identity.touch()
    assert folder.check(recipe, "yes")  # killed before its first checkpoint
    (folder.export / "config.json").touch()
    for resume in ("yes", "auto"):
        with pytest.raises(UserError, match="checkpoints: holds no checkpoint, though this run exported its draft"):
            folder.check(recipe, resume)
    assert not folder.check(recipe, "no")


def test_a_store_that_live_training_does_not_read_may_change_its_place(tmp_path, path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.identity.touch()
    folder.recipe.write_text(dump_recipe(load_recipe(path)), encoding="utf-8")
    assert folder.check(load_recipe(path, ["hidden_states.path=states"]), "yes")
    with pytest.raises(UserError, match="hidden_states.mode was 'live'"):
        folder.check(load_recipe(path, ["hidden_states.path=states", "hidden_states.mode=stored"]), "yes")


# Two runs, one folder: processes of launchers/train.py ----------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, target):
    """What the runs of tests/support/shared_folder_worker.py printed, by case, with the case's folder."""
    base = tmp_path_factory.mktemp("shared")
    folders = {name: base / name for name in ("entered", "at_once", "unlocked", "torn")}
    for folder in folders.values():
        folder.mkdir()
    recipes = [str(write_recipe(folder, target, output={"check_export": False})) for folder in folders.values()]
    output = run_script("tests/support/shared_folder_worker.py", *recipes)
    return {name: case | {"folder": folders[name]} for name, case in json.loads(output.splitlines()[-1]).items()}


@pytest.mark.parametrize("way", WAYS)
def test_a_second_run_is_refused_with_the_holder_before_anything_is_written(outcomes, way):
    """The worker has compared the folder's content, and has checked that every rank ended with the same code."""
    code, output = outcomes["entered"][way]
    *_, line = output.splitlines()
    assert code == 2 and line.startswith("error: ") and "another run writes this folder" in line
    assert f"(process {outcomes['entered']['holder']} on " in line and ", since 20" in line and "set output.dir" in line


def test_the_check_before_a_job_names_the_holder_and_passes(outcomes):
    code, output = outcomes["entered"]["check"]
    assert code == 0 and "begins " in output
    assert f"warning: {outcomes['entered']['folder'] / 'run'}: another run writes this folder (process" in output


def test_a_dead_holders_folder_is_free_at_once_and_the_run_goes_on_under_its_identity(outcomes):
    code, output = outcomes["entered"]["after"]
    assert code == 0 and "checkpoint written" in output and "moved to" not in output
    assert CLAIM not in outcomes["entered"]["left"] and "run_id.txt" in outcomes["entered"]["left"]


def test_of_runs_that_start_together_one_wins_and_the_others_move_nothing(outcomes):
    code, output = outcomes["at_once"]["winner"]
    assert code == 0 and "checkpoint written" in output and output.count("moved to") == 1
    for code, output in outcomes["at_once"]["others"]:
        assert code == 2 and "another run writes this folder" in output and output.count("error: ") == 1
    aside = sorted(path.name for path in outcomes["at_once"]["folder"].glob("run*"))
    assert aside == ["run", "run.1"]
    assert [path.name for path in (outcomes["at_once"]["folder"] / "run.1").iterdir()] == ["checkpoints", "recipe.yaml"]


def test_without_locks_both_runs_say_so_and_the_first_ends_before_it_writes_into_the_seconds_folder(outcomes):
    (code, output), (second_code, second_output) = outcomes["unlocked"]["one"], outcomes["unlocked"]["two"]
    assert "warning: " in output and output.count("has no locks") == second_output.count("has no locks") == 1
    assert code == 2 and "no longer this run's (taken by process" in output.splitlines()[-1]
    assert "Traceback" not in output
    assert second_code == 0 and "moved to" in second_output
    assert outcomes["unlocked"]["of"] == [(outcomes["unlocked"]["folder"] / "run" / "run_id.txt").read_text().strip()]


def test_a_checkpoint_of_which_one_rank_cannot_write_its_part_is_none(outcomes):
    code, output = outcomes["torn"]["torn"]
    assert code == 2 and "the checkpoint of step 2 cannot be written" in output and "Traceback" not in output
    assert outcomes["torn"]["left"] == []


# The claim ------------------------------------------------------------------------------------------------------------


def test_a_claim_leaves_no_trace_where_nothing_was_written(tmp_path):
    folder = tmp_path / "a" / "b"
    Claim(folder, "node").release()
    assert not list(tmp_path.iterdir())
    folder.mkdir(parents=True)
    Claim(folder, "node").release()
    assert not list(folder.iterdir())


def test_who_holds_a_folder_is_said_and_a_stranger_cannot_say_more_than_a_line(tmp_path):
    assert holder_of(tmp_path) is None and holder_of(tmp_path / "absent") is None
    claim = Claim(tmp_path, "n1")
    assert " on n1, since 20" in holder_of(tmp_path)
    (tmp_path / CLAIM).write_bytes(b"\x1b[2J\xff" + 500 * b"x" + b"\nmore")
    assert "\n" not in holder_of(tmp_path) and len(holder_of(tmp_path)) <= 200
    began = time.monotonic()
    with pytest.raises(UserError, match="another run writes this folder") as refused:
        Claim(tmp_path, "n2")
    assert str(refused.value).isprintable()
    assert time.monotonic() - began >= PATIENCE
    with pytest.raises(UserError, match="no longer this run's .taken by"):
        claim.require()
    (tmp_path / CLAIM).unlink()
    with pytest.raises(UserError, match="was moved, or its run.lock removed"):
        claim.require()
    claim.release()


def take_turns(folder: Path, alone: Path, turns: int) -> None:
    for turn in range(turns):
        while True:
            try:
                claim = Claim(folder, "node")
                break
            except UserError:
                continue
        alone.touch(exist_ok=False)
        if turn % 2:
            (folder / "result").touch()
            shutil.move(folder / "result", folder.with_name(f"{alone.name}.moved"))
        alone.unlink()
        claim.release()


def test_claims_that_come_and_go_together_never_overlap(tmp_path):
    """At its end, each removes the file and the folder, which others may have just opened."""
    folder, alone = tmp_path / "run", tmp_path / "alone"
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=take_turns, args=(folder, alone, 60)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANG_SECONDS)
    assert [process.exitcode for process in processes] == [0] * 4
    assert not alone.exists() and not list(folder.glob("*"))


def test_a_fresh_run_finishes_what_a_kill_left_half_moved_aside(tmp_path, path):
    recipe = load_recipe(path)
    folder = RunFolder(recipe.output.dir)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run.aside").mkdir()
    (tmp_path / "run.aside" / "recipe.yaml").write_text("of the earlier run")
    assert not folder.check(recipe, "auto")  # no run continues half of one
    folder.hold("node", print)
    folder.begin(recipe, False, folder.identify(False), {}, print)
    folder.close()
    assert sorted(path.name for path in (tmp_path / "run.1").iterdir()) == ["checkpoints", "recipe.yaml"]
    assert folder.check(recipe, "auto") and not (tmp_path / "run.aside").exists()


def test_what_no_run_left_stays_where_it_is(copied, topology):
    """For example a target, a store or a user's files, if output.dir names their folder."""
    recipe = copied()
    folder = recipe.output.dir
    names = ("config.json", "notes.txt", "store.json", "shards/a.safetensors", "export.zip")
    others = {name: f"the content of {name}" for name in names}
    for name, text in others.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    train(recipe, ZERO2, topology)
    assert {name: (folder / name).read_text() for name in others} == others
    aside = {path.name for path in folder.with_name("run.1").iterdir()}
    assert {"recipe.yaml", "checkpoints", "export", "run_id.txt"} <= aside and not aside & {*others, "shards"}


@pytest.mark.parametrize("resume", ["yes", "auto"])
def test_a_run_whose_recipe_or_identity_is_lost_is_not_begun_anew(copied, resume):
    recipe = copied()
    folder = RunFolder(recipe.output.dir)
    folder.identity.write_bytes(b"\xff")
    with pytest.raises(UserError, match="run_id.txt: damaged; .*manifest.json"):
        folder.identify(folder.check(recipe, resume))
    folder.identity.unlink()
    with pytest.raises(UserError, match="run_id.txt: is missing; write into it "):
        folder.identify(folder.check(recipe, resume))
    folder.recipe.unlink()
    with pytest.raises(UserError, match=r"recipe.yaml: is missing, though there are checkpoints; put the run's recipe"):
        folder.check(recipe, resume)


@pytest.mark.parametrize(
    ("key", "file", "change"),
    [
        ("model.target", "target/model.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        (
            "model.target's tokenizer",
            "target/tokenizer.json",
            lambda content: content.replace(b'"<|im_end|>"', b'"<|im_over|>"'),
        ),
        ("data.chat_template", "target/chat_template.jinja", lambda content: content + b"{# changed #}"),
        ("data.train", "conversations.jsonl", lambda content: content.replace(b"story 3.", b"story three.")),
        ("model.draft.config", "draft.json", lambda content: content.replace(b"10000.0", b"20000.0")),
    ],
)
def test_a_run_is_not_continued_with_another_target_or_other_data(copied, trained, target, topology, key, file, change):
    path = target / file.removeprefix("target/") if file.startswith("target/") else trained.parent / file
    content, recipe = path.read_bytes(), copied()
    before = RunFolder(recipe.output.dir).metrics.read_bytes()
    assert change(content) != content
    try:
        path.write_bytes(change(content))
        with pytest.raises(UserError, match=rf"inputs.json: {key} had the digest [0-9a-f]{{32}} when .*; restore"):
            train(recipe, ZERO2, topology, "auto")
    finally:
        path.write_bytes(content)
    assert RunFolder(recipe.output.dir).metrics.read_bytes() == before


# Identity, and the end of a run ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory, target, topology):
    """The recipe of a run that has ended."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "draft.json").write_text(json.dumps(SHAPE))
    draft = {"vocab_size": 200, "config": str(folder / "draft.json")}
    model = {"target": str(target), "target_dtype": "float32", "draft": draft}
    path = write_recipe(folder, target, model=model, output={"check_export": False})
    train(load_recipe(path), ZERO2, topology)
    return path


@pytest.fixture
def copied(tmp_path, trained) -> Callable:
    """Copies that run to a folder, perhaps on a separate disk. Returns its recipe."""

    def copy(folder: Path = tmp_path):
        shutil.copytree(trained.parent / "run", folder / "run")
        return load_recipe(trained, [f"output.dir={folder / 'run'}"])

    return copy


def test_a_full_disk_leaves_the_earlier_export_and_with_room_a_resumed_run_whose_steps_are_done_exports(
    copied, topology, small_disk
):
    """The disk is full of files, but small writes before the export still find room."""
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    recipe = copied(small_disk)
    folder = RunFolder(recipe.output.dir)
    expected = load((folder.export / "model.safetensors").read_bytes())
    (folder.export / "notes.md").write_text("somebody's")
    before = {path.name: path.read_bytes() for path in folder.export.iterdir()}
    # run.lock and one more: a file that replaces another, or a folder
    inodes = 1 + len([*small_disk.rglob("*")]) + 2
    subprocess.run(["mount", "-o", f"remount,nr_inodes={inodes}", str(small_disk)], check=True)
    with pytest.raises(UserError, match=r"export: cannot be written \(No space left.* are free\); .*--resume"):
        train(recipe, ZERO2, topology, "yes")
    assert before == {path.name: path.read_bytes() for path in folder.export.iterdir()}
    assert not list(folder.path.glob("*.partial"))
    subprocess.run(["mount", "-o", "remount,nr_inodes=10000", str(small_disk)], check=True)
    (folder.export / "model.safetensors").write_bytes(b"")
    train(recipe, ZERO2, topology, "yes")
    actual = load_file(folder.export / "model.safetensors")
    assert actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in actual)
    assert (folder.export / "notes.md").read_text() == "somebody's" and CLAIM not in {*folder.path.iterdir()}


def test_at_the_end_of_a_run_a_full_disk_is_a_line_and_takes_nothing(path, small_disk):
    recipe = load_recipe(path, [f"output.dir={small_disk / 'run'}"])
    folder = RunFolder(recipe.output.dir)
    folder.hold("node", print)
    identity = folder.identify(False)
    folder.begin(recipe, False, identity, {}, print)
    folder.write_evaluation({"of": "before"})
    tracker = Tracker(folder.path, Tracking(tensorboard=False), "", {}, Console(False))
    tracker.write(1, "train", {"loss": 1.0})
    before = {path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}
    with (small_disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
        while True:
            filler.write(bytes(4096))
    much = {"losses": [1 / 3] * 1000}
    for write in (
        lambda: folder.write_evaluation(much),
        lambda: folder.begin(recipe, True, identity, {}, print),
        lambda: folder.keep_metrics_until(1, pytest.fail),
        lambda: tracker.write(2, "train", much),
    ):
        with pytest.raises(UserError, match=r"cannot be written \(No space .*; 0 bytes are free\); free space"):
            write()
    with pytest.raises(OSError, match="No space"):
        folder.write_run(much)
    after = {path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}
    assert after.keys() == before.keys() and all(after[name].startswith(before[name]) for name in before)
    (small_disk / "filler").unlink()
    tracker.close()
    folder.close()
    folder.keep_metrics_until(1, pytest.fail)
    assert [record["step"] for record in metrics(folder.path)] == [1]


def test_names_of_what_is_moved_aside_do_not_meet(tmp_path):
    (tmp_path / "run.1").mkdir()
    (tmp_path / "staging").mkdir()
    assert move_aside(tmp_path / "staging", tmp_path / "run") == tmp_path / "run.2"
