"""A planted checkpoint runs no code, whether loaded as it is or converted, and is refused in one line."""

import hashlib
import io
import json
import os
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from small_engine import RUN, advance, same, small_engine, weights

from eagle3.errors import UserError
from eagle3.patches import FORBID, FORCE, plain_loads
from eagle3.training.checkpoint import Checkpoints, _converted
from eagle3.training.safe_loading import convert, require_plain

FILES = ("mp_rank_*_model_states.pt", "*_optim_states.pt")


class Payload:
    """Runs code when unpickled: creates the folder `mark`."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return exec, (f"import os; os.mkdir({str(self.mark)!r})",)


@pytest.fixture(scope="module")
def engine(topology):
    return small_engine(topology)


@pytest.fixture(scope="module")
def other_layout(topology):
    """An engine that converts what it loads, as with a different number of processes."""
    return small_engine(topology, checkpoint={"load_universal": True})


@pytest.fixture
def checkpoints(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    return Checkpoints(tmp_path / "checkpoints", keep=2, run=RUN, warn=pytest.fail)


@pytest.fixture
def saved(engine, checkpoints):
    """A checkpoint, in the folder where it was saved."""
    advance(engine, 2)
    checkpoints.save(engine, 2, {"best_step": 1}, None)
    return checkpoints.path(2)


def rewrite(checkpoint, pattern, change):
    """Change a checkpoint's file, and its digest in the manifest, as an attacker who plants a file would."""
    (file,) = checkpoint.glob(pattern)
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)
    manifest = checkpoint / "manifest.json"
    content = json.loads(manifest.read_text(encoding="utf-8"))
    content["files"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(content), encoding="utf-8")
    return file


def plant(checkpoint, pattern):
    """Plants a payload in a file. Returns the file, and the folder that appears if the payload runs."""
    mark = checkpoint.parent / "it-ran"
    file = rewrite(checkpoint, pattern, lambda state: state.update(planted=Payload(mark)))
    torch.load(file, weights_only=False)
    mark.rmdir()  # it runs without the guard
    return file, mark


@pytest.mark.parametrize("layout", ["engine", "other_layout"])
@pytest.mark.parametrize("pattern", FILES)
def test_resuming_from_a_planted_checkpoint_runs_nothing_and_is_one_line(request, checkpoints, saved, layout, pattern):
    engine = request.getfixturevalue(layout)
    before = weights(engine)
    file, mark = plant(saved, pattern)
    with pytest.raises(UserError, match=r"more than plain data \(.*exec.*\).*could run code; resume from") as refused:
        checkpoints.load_newest(engine)
    assert str(refused.value).startswith(f"{file}: ") and not mark.exists()
    assert same(before, weights(engine))


@pytest.mark.parametrize("pattern", FILES)
def test_deepspeeds_own_loads_refuse_what_is_planted_after_the_check(engine, saved, pattern):
    _, mark = plant(saved, pattern)
    with plain_loads(), pytest.raises(Exception, match="Weights only load failed"):
        engine.load_checkpoint(str(saved.parent), tag=saved.name, load_module_strict=False)
    assert not mark.exists()


@pytest.mark.parametrize("pattern", FILES)
def test_the_conversion_refuses_what_is_planted_after_the_check(saved, tmp_path, monkeypatch, pattern):
    _, mark = plant(saved, pattern)
    folders = ["--input_folder", str(saved), "--output_folder", str(tmp_path / "universal")]
    monkeypatch.setattr(sys, "argv", ["convert", *folders, "--num_extract_workers", "1", "--num_merge_workers", "1"])
    with pytest.raises(Exception, match="Weights only load failed"):
        convert()
    assert not mark.exists()


def test_no_python_writes_getattr_into_a_checkpoint():
    """Python 3.11.0 to 3.11.4 would write it for a member of an enumeration."""
    written = pickle.dumps(ZeroStageEnum.gradients, protocol=2)
    assert b"getattr" not in written and pickle.loads(written) is ZeroStageEnum.gradients


def test_the_process_that_converts_guards_itself(topology, saved):
    _, mark = plant(saved, FILES[0])
    with pytest.raises(UserError, match="cannot be converted"), _converted(saved):
        pytest.fail("it was converted")
    assert not mark.exists()


def adam_state(content):
    return content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]


# The planted data is plain, but has a different structure than training writes.
OTHER_DATA = {
    "no step": (FILES[0], lambda content: content.pop("step"), "KeyError: 'step'"),
    "a step that is a text": (FILES[0], lambda content: content.update(step="3"), "step: '3'"),
    "another step": (FILES[0], lambda content: content.update(step=4), "step: 4"),
    "a list for the weights": (FILES[0], lambda content: content.update(module=[]), "Error"),
    "random numbers of another size": (FILES[0], lambda content: content.update(torch_rng=torch.zeros(3)), "Error"),
    "no optimizer state": (FILES[1], lambda content: content.clear(), "KeyError"),
    "a list for the optimizer state": (FILES[1], lambda content: content.update(optimizer_state_dict=[1]), "Error"),
    "moments of another shape": (
        FILES[1],
        lambda content: adam_state(content).update(exp_avg=torch.ones(1)),
        r"moments of \[\[1\], ",
    ),
    "a moment missing": (FILES[1], lambda content: adam_state(content).pop("exp_avg_sq"), "'exp_avg'"),
    "a moment that is not finite": (
        FILES[1],
        lambda content: adam_state(content)["exp_avg_sq"][0].fill_(float("nan")),
        "not finite",
    ),
}


@pytest.mark.parametrize("what", OTHER_DATA)
def test_other_data_are_one_line_and_moved_away_leave_the_checkpoint_before_to_continue(
    engine, checkpoints, saved, what
):
    """The run continues bit for bit, even in the process that met the data."""
    expected = weights(engine)
    advance(engine)
    checkpoints.save(engine, 3, {}, None)
    newest, (pattern, change, reason) = checkpoints.path(3), OTHER_DATA[what]
    rewrite(newest, pattern, change)
    with pytest.raises(UserError, match=f"^{newest}: holds other data .*{reason}.*; move this folder away") as refused:
        checkpoints.load_newest(engine)
    assert "\n" not in str(refused.value)
    newest.rename(saved.parent / "away")
    assert checkpoints.load_newest(engine) == (2, {"best_step": 1}) and same(weights(engine), expected)


def test_a_converted_checkpoint_continues_as_the_one_that_was_saved(engine, other_layout, checkpoints, saved):
    expected = weights(engine)
    advance(other_layout)
    assert checkpoints.load_newest(other_layout) == (2, {"best_step": 1}) and same(weights(other_layout), expected)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(SimpleNamespace(a=1), id="a class that Megatron-core allows for the process"),
        pytest.param(np.array([None]), id="an array of objects, which are pointers"),
    ],
)
def test_nothing_but_what_deepspeeds_files_need_is_read(saved, content):
    file = rewrite(saved, FILES[1], lambda state: state.update(planted=content))
    with pytest.raises(UserError, match=f"{file.name}: is not loaded"):
        require_plain(saved)


def test_the_guard_overrides_whoever_calls_and_leaves_the_process_as_it_was(monkeypatch):
    monkeypatch.setenv(FORBID, "1")
    monkeypatch.delenv(FORCE, raising=False)
    file = io.BytesIO()
    torch.save(SimpleNamespace(a=1), file)
    environment, allowed = dict(os.environ), set(torch.serialization.get_safe_globals())
    with pytest.raises(Exception, match="Weights only load failed"), plain_loads():
        file.seek(0)
        torch.load(file, weights_only=False)
    assert dict(os.environ) == environment and set(torch.serialization.get_safe_globals()) == allowed
    file.seek(0)
    assert torch.load(file, weights_only=False) == SimpleNamespace(a=1)
