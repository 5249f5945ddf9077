"""Checkpoints, the learning rate and the run folder: what a run finds again after it was killed or damaged."""

import json
import math
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from small_engine import RUN, advance, same, small_engine, weights

from eagle3.errors import UserError
from eagle3.training.checkpoint import Checkpoints
from eagle3.training.engine import warmup_cosine
from eagle3.training.run_folder import RunFolder


@pytest.fixture(scope="module")
def engine(topology):
    return small_engine(topology)


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def checkpoints(tmp_path, warnings):
    return Checkpoints(tmp_path, keep=2, run=RUN, warn=warnings.append)


def at(checkpoints, step):
    return checkpoints.folder / f"step-{step:08d}"


def names(checkpoints):
    """Names of checkpoints, finished and unfinished. (DeepSpeed leaves scripts of its own beside them.)"""
    return sorted(path.name for path in checkpoints.folder.glob("step-*"))


def steps(*numbers):
    return [f"step-{number:08d}" for number in numbers]


def test_a_loaded_checkpoint_continues_bit_for_bit(engine, checkpoints):
    advance(engine, 3)
    checkpoints.save(engine, 3, {"best_step": 2, "best_acceptance": 1.5}, None)
    saved, rate = weights(engine), engine.get_lr()

    def go_on():
        advance(engine, 2)
        return weights(engine), engine.get_lr(), random.random(), np.random.random(), torch.rand(3).tolist()

    undisturbed = go_on()
    assert not same(undisturbed[0], saved) and undisturbed[1] != rate
    advance(engine)  # a third step, which loading must undo
    assert checkpoints.load_newest(engine) == (3, {"best_step": 2, "best_acceptance": 1.5})
    assert same(weights(engine), saved) and engine.get_lr() == rate
    again = go_on()
    assert same(undisturbed[0], again[0]) and undisturbed[1:] == again[1:]


def test_pruning_keeps_the_last_two_and_the_best(engine, checkpoints):
    listings = []
    for step, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 5), (6, 5), (12, 5), (13, 5)):
        checkpoints.save(engine, step, {}, best)
        listings.append(names(checkpoints))
    expected = [(1,), (1, 2), (2, 3), (2, 3, 4), (4, 5), (5, 6), (5, 6, 12), (5, 12, 13)]
    assert listings == [steps(*numbers) for numbers in expected]
    assert checkpoints.load_whole(engine, 5) == (5, {})


def changed(change):
    """Damage to a file's content."""
    return lambda path: path.write_bytes(change(path.read_bytes()))


def double(path):
    shutil.copy(path, path.with_name(path.name.replace("rank_0", "rank_1", 1)))


cut_off = changed(lambda content: content[:-1])
flip_a_bit = changed(lambda content: bytes([content[0] ^ 1]) + content[1:])
MANIFESTS = [
    *(changed(lambda _, new=new: new) for new in (b"", b"\xff\xfe\x00", b"[]", b"{}", b"[" * 200_000, b"9" * 5000)),
    changed(lambda content: content.replace(f'"{RUN}"'.encode(), b"7")),
    changed(lambda content: content.replace(RUN.encode(), RUN.upper().encode())),
    changed(lambda content: re.sub(rb'"files": {[^}]*}', b'"files": ["a"]', content)),
    changed(lambda content: re.sub(rb'"[0-9a-f]{64}"', b'""', content)),
]


@pytest.mark.parametrize(
    ("victim", "damage", "problem"),
    [
        ("manifest.json", Path.unlink, "manifest.json is missing or damaged"),
        ("manifest.json", cut_off, "manifest.json is missing or damaged"),
        ("*_optim_states.pt", Path.unlink, "_optim_states.pt is missing"),
        ("*_model_states.pt", Path.unlink, "_model_states.pt is missing"),
        ("*_optim_states.pt", cut_off, "_optim_states.pt is damaged"),
        ("*_model_states.pt", flip_a_bit, "_model_states.pt is damaged"),
        ("*_optim_states.pt", double, "_optim_states.pt is not in manifest.json"),
        *(("manifest.json", damage, "manifest.json is missing or damaged") for damage in MANIFESTS),
    ],
)
def test_a_damaged_newest_is_passed_over_with_a_warning(engine, checkpoints, warnings, victim, damage, problem):
    checkpoints.save(engine, 1, {"of": "one"}, None)
    before = weights(engine)
    advance(engine)
    checkpoints.save(engine, 2, {"of": "two"}, None)
    (damaged,) = at(checkpoints, 2).glob(victim)
    damage(damaged)
    assert checkpoints.load_newest(engine) == (1, {"of": "one"})
    assert same(weights(engine), before)
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{at(checkpoints, 2)}: ") and f"{problem}; renamed to unusable-step" in warnings[0]


def test_damaged_ones_do_not_push_out_what_a_resumed_run_writes(engine, checkpoints, warnings):
    checkpoints.keep = 3
    for step in (1, 8, 9):
        checkpoints.save(engine, step, {}, None)
    checkpoints.keep = 2
    for step in (8, 9):
        (at(checkpoints, step) / "manifest.json").unlink()
    assert checkpoints.load_newest(engine) == (1, {}) and len(warnings) == 2
    checkpoints.save(engine, 2, {}, None)
    assert names(checkpoints) == steps(1, 2)


def test_nothing_is_loaded_where_there_is_none_and_nothing_begun_where_every_one_is_damaged(
    engine, checkpoints, warnings
):
    assert checkpoints.load_newest(engine) is None and not warnings
    for step in (1, 2):
        checkpoints.save(engine, step, {}, None)
        (at(checkpoints, step) / "manifest.json").unlink()
    before = weights(engine)
    with pytest.raises(UserError, match="no intact checkpoint .*step-00000002: .*step-00000001: .*without --resume"):
        checkpoints.load_newest(engine)
    assert same(weights(engine), before) and names(checkpoints) == steps(1, 2)


def test_the_best_is_passed_over_with_a_warning_where_it_is_gone_or_damaged(engine, checkpoints, warnings):
    checkpoints.save(engine, 1, {}, None)
    (model,) = at(checkpoints, 1).glob("*_model_states.pt")
    cut_off(model)
    advance(engine)
    before = weights(engine)
    assert checkpoints.load_whole(engine, 1) is None and checkpoints.load_whole(engine, 7) is None
    assert [warning.partition(": ")[0] for warning in warnings] == [str(at(checkpoints, step)) for step in (1, 7)]
    assert same(weights(engine), before)


def test_a_checkpoint_of_more_processes_is_refused_before_anything_is_loaded(engine, checkpoints):
    checkpoints.save(engine, 1, {}, None)
    (first,) = at(checkpoints, 1).glob("*_optim_states.pt")
    second = first.with_name(first.name.replace("rank_0", "rank_1", 1))
    shutil.copy(first, second)
    manifest = json.loads((at(checkpoints, 1) / "manifest.json").read_text())
    manifest["files"][second.name] = manifest["files"][first.name]
    (at(checkpoints, 1) / "manifest.json").write_text(json.dumps(manifest))
    advance(engine)
    before = weights(engine)
    with pytest.raises(UserError, match=f"{at(checkpoints, 1)}: written by 2 processes .*, this job has 1 .*; start"):
        checkpoints.load_newest(engine)
    assert same(weights(engine), before)


def test_another_runs_checkpoint_is_never_loaded(engine, checkpoints, warnings):
    """It is loaded neither as the newest nor as the best for the export, and the line names both runs."""
    own, other = checkpoints.run, RUN[::-1]
    checkpoints.save(engine, 1, {"of": "own"}, None)
    before = weights(engine)
    advance(engine)
    checkpoints.run = other
    checkpoints.save(engine, 2, {"of": "other"}, None)
    checkpoints.run = own
    assert checkpoints.load_whole(engine, 2) is None
    assert checkpoints.load_newest(engine) == (1, {"of": "own"}) and same(weights(engine), before)
    prefix = f"{at(checkpoints, 2)}: written by run {other}, this is run {own}; "
    assert [warning.removeprefix(prefix) for warning in warnings] == [
        "the last weights are used instead",
        "renamed to unusable-step-00000002; the checkpoint before it is used",
    ]
    shutil.rmtree(at(checkpoints, 1))
    (checkpoints.folder / "unusable-step-00000002").rename(at(checkpoints, 2))
    with pytest.raises(UserError, match=f"of this run .*written by run {other}, this is run {own}"):
        checkpoints.load_newest(engine)
    assert same(weights(engine), before) and names(checkpoints) == steps(2)


def test_an_unfinished_checkpoint_is_ignored_and_then_overwritten(engine, checkpoints, warnings):
    checkpoints.save(engine, 1, {}, None)
    unfinished = checkpoints.folder / "step-00000002.partial"
    shutil.copytree(at(checkpoints, 1), unfinished)  # even one that looks whole
    (unfinished / "leftover").write_text("of a killed writer")
    (at(checkpoints, 1) / ".nfs0000000000000001").write_text("of a file system")
    assert checkpoints.load_newest(engine) == (1, {}) and not warnings
    checkpoints.save(engine, 2, {}, None)
    assert names(checkpoints) == steps(1, 2)
    assert not (at(checkpoints, 2) / "leftover").exists()
    assert checkpoints.load_newest(engine) == (2, {}) and not warnings


def test_the_same_step_is_replaced_by_a_resumed_run(engine, checkpoints):
    checkpoints.save(engine, 1, {"run": "first"}, None)
    advance(engine)
    again = weights(engine)
    checkpoints.save(engine, 1, {"run": "second"}, None)
    assert names(checkpoints) == steps(1)
    advance(engine)
    assert checkpoints.load_newest(engine) == (1, {"run": "second"})
    assert same(weights(engine), again)


# The learning rate ----------------------------------------------------------------------------------------------------


def test_the_rate_rises_in_equal_parts_peaks_and_ends_low():
    share = warmup_cosine(steps=100, warmup_fraction=0.1, final_fraction=0.2)
    rates = [share(step) for step in range(100)]
    assert rates[:10] == pytest.approx([number / 11 for number in range(1, 11)])  # never 0
    assert rates[10] == max(rates) == 1
    for step in range(10, 100):
        assert rates[step] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi * (step - 10) / 90)) / 2)
    assert share(100) == share(1000) == pytest.approx(0.2)  # DeepSpeed asks for the rate after the last step


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("warmup", [0, 0.015, 0.5, 0.99])
def test_runs_of_a_few_steps_waste_none(steps, warmup):
    share = warmup_cosine(steps, warmup, final_fraction=0)
    assert all(0 < share(step) <= 1 for step in range(steps))


def test_the_engine_takes_the_schedules_rates(topology):
    schedule, rates = warmup_cosine(10, 0.3, 0.1), []
    engine = small_engine(topology, steps=10, schedule=schedule)
    for _ in range(10):
        rates.append(engine.get_lr()[0] / 1e-2)
        before = weights(engine)
        advance(engine)
        assert not same(before, weights(engine))
    assert rates == pytest.approx([schedule(step) for step in range(10)])


# metrics.jsonl of a killed run ----------------------------------------------------------------------------------------


def record(step: int, kind: str = "train", **numbers: float) -> str:
    return json.dumps({"step": step, "kind": kind, **numbers})


WHOLE = [record(1), record(2), record(2, "held_out"), record(3), record(4), record(4, "held_out"), record(5)]
FAULTS = {
    "a broken line": ([*WHOLE[:3], WHOLE[3][:-4], *WHOLE[4:]], [3], 1),
    "a line that is not text": ([*WHOLE[:3], "\udcff", *WHOLE[4:]], [3], 1),
    "a list": ([*WHOLE[:3], "[]", *WHOLE[4:]], [3], 1),
    "a nested line": ([*WHOLE[:3], "[" * 100_000, *WHOLE[4:]], [3], 1),
    "a missing line": ([*WHOLE[:3], *WHOLE[4:]], [3], 0),
    "no line": ([], [0, 1, 2, 3, 4, 5, 6], 0),
    "a duplicate": ([*WHOLE[:4], WHOLE[3], *WHOLE[4:]], [], 1),
    "another record of a step": ([*WHOLE[:4], record(3, loss=1.0), *WHOLE[4:]], [], 1),
    "renumbered upwards": ([*WHOLE[:3], record(9), *WHOLE[4:]], [3], 1),
    "renumbered downwards": ([*WHOLE[:3], record(1), *WHOLE[4:]], [3], 1),
    "exchanged": ([*WHOLE[:3], WHOLE[4], WHOLE[3], *WHOLE[5:]], [4], 1),
    "a measurement twice": ([*WHOLE[:3], WHOLE[2], *WHOLE[3:]], [], 1),
    "an unknown kind": ([*WHOLE[:3], record(3, "tests"), *WHOLE[4:]], [3], 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_metrics_is_named_and_every_other_record_is_kept(tmp_path, fault):
    folder, warnings = RunFolder(tmp_path), []
    lines, lost, dropped = FAULTS[fault]
    content = "".join(f"{line}\n" for line in [*lines, record(6)]).encode("utf-8", "surrogateescape")
    folder.metrics.write_bytes(content)
    folder.keep_metrics_until(5, warnings.append)
    kept = folder.metrics.read_text(encoding="utf-8").splitlines()
    assert kept == [line for place, line in enumerate(WHOLE) if place not in lost]
    assert len(warnings) == 1 and str(folder.metrics) in warnings[0]
    assert [path.read_bytes() for path in tmp_path.glob("metrics.1.jsonl")] == [content] * dropped
    folder.keep_metrics_until(5, warnings.append)
    assert folder.metrics.read_text(encoding="utf-8").splitlines() == kept and len([*tmp_path.iterdir()]) == 1 + dropped


EXPORTS = [record(4, "exported"), record(5, "exported")]


@pytest.mark.parametrize(
    ("content", "last", "kept"),
    [
        *(([*WHOLE, cut], 5, WHOLE) for cut in (record(6)[:-12], '{"step": 6', "{", "\0\0\0\0")),  # by a kill
        *((WHOLE, last, WHOLE[:count]) for last, count in ((5, 7), (2, 3), (0, 0))),  # the last newline is missing
        *(([*WHOLE, *EXPORTS, ""], last, [*WHOLE[:count], *EXPORTS[: last - 3]]) for last, count in ((5, 7), (4, 6))),
        ([], 0, []),
    ],
)
def test_records_up_to_the_checkpoint_are_kept_and_a_line_cut_off_by_a_kill_is_no_fault(tmp_path, content, last, kept):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("\n".join(content), encoding="utf-8")
    folder.keep_metrics_until(last, pytest.fail)
    assert folder.metrics.read_text(encoding="utf-8") == "".join(f"{line}\n" for line in kept)
    assert [*tmp_path.iterdir()] == [folder.metrics]


def test_a_run_whose_metrics_are_lost_begins_them_and_says_which_steps_they_lack(tmp_path):
    warnings = []
    RunFolder(tmp_path).keep_metrics_until(3, warnings.append)
    assert len(warnings) == 1 and "no line has step 1 to 3" in warnings[0]
