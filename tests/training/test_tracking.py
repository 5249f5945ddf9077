"""Where a run's numbers are written: TensorBoard's events and Weights & Biases' file hold the same as metrics.jsonl."""

import json
import math
import os
import struct
import subprocess
import sys

import pytest
import wandb
from limits import HANG_SECONDS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from eagle3.console import Console
from eagle3.errors import UserError
from eagle3.recipe.schema import Tracking
from eagle3.training.tracking import Tracker

# (step, kind, values) as training writes them; and, by name, the numbers of each step
WRITTEN = [
    (1, "train", {"loss": 2.5, "step_losses": [1.5, math.nan], "tokens": 7, "learning_rate": 1e-4}),
    (1, "skipped", {"gradient_norm": math.inf, "samples": ["a", "b"]}),
    (2, "train", {"loss": 2.25, "step_losses": [1.25, 1.0], "tokens": 9, "learning_rate": 5e-5}),
    (2, "held_out", {"loss": 3.5, "contexts": [512, 1024], "acceptance_by_context": [0.5, None]}),
]
EXPECTED = {
    "train/loss": {1: 2.5, 2: 2.25},
    "train/step_losses/0": {1: 1.5, 2: 1.25},
    "train/step_losses/1": {2: 1.0},
    "train/tokens": {1: 7, 2: 9},
    "train/learning_rate": {1: 1e-4, 2: 5e-5},
    "held_out/loss": {2: 3.5},
    "held_out/acceptance_by_context/512": {2: 0.5},
}

RUN = "0123456789abcdef" * 2
CONFIG = {"training": {"epochs": 2}, "hidden_states": {"path": "https://ann:hunter2@host/states?token=hunter2"}}


def write_all(folder, console=Console(False), config=CONFIG, **where) -> None:
    tracker = Tracker(folder, Tracking(**{"tensorboard": False} | where), RUN, config, console)
    for step, kind, values in WRITTEN:
        tracker.write(step, kind, values)
    tracker.close()


def test_metrics_jsonl_has_every_record_and_null_for_what_is_no_number(tmp_path):
    write_all(tmp_path)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["kind"]) for record in records] == [(step, kind) for step, kind, _ in WRITTEN]
    assert records[0]["step_losses"] == [1.5, None]
    assert records[1] == {"step": 1, "kind": "skipped", "gradient_norm": None, "samples": ["a", "b"]}


def test_tensorboard_reads_every_number_at_its_step(tmp_path):
    write_all(tmp_path, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    actual = {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}
    assert actual == {name: pytest.approx(values, rel=1e-6) for name, values in EXPECTED.items()}  # events are in fp32


def test_a_disk_too_full_for_tensorboard_is_one_warning_and_the_run_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1.0)
    events = tmp_path / "tensorboard" / f"events.out.tfevents.1.000000.{os.getpid()}"
    events.parent.mkdir()
    events.symlink_to("/dev/full")
    write_all(tmp_path, tensorboard=True, console=Console(True))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {events}: cannot be written (No space left on device)") and "free space" in line
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(WRITTEN)


def test_weights_and_biases_has_every_number_at_its_step(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    write_all(tmp_path, wandb_project="drafts")
    wandb.teardown()  # its service writes the file's last block when it ends
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = wandb_records(file.read_bytes())
    (started,) = [record.run for record in records if record.HasField("run")]
    assert (started.project, started.run_id, started.display_name) == ("drafts", RUN, tmp_path.name)
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    masked = {"path": "https://***@host/states?token=***"}
    assert {name: config[name] for name in CONFIG} == CONFIG | {"hidden_states": masked}
    actual = {}
    for record in records:
        if record.HasField("history"):
            items = ((item.key or "/".join(item.nested_key), item.value_json) for item in record.history.item)
            values = {name: json.loads(value) for name, value in items}
            for name in (name for name in values if not name.startswith("_")):
                actual.setdefault(name, {})[values["_step"]] = values[name]
    assert actual == EXPECTED


def test_weights_and_biases_without_a_valid_key_is_refused_before_anything_is_moved(tmp_path):
    """Runs in separate processes, whose home directory has no key."""
    program = "from eagle3.training.tracking import require_account; require_account('drafts')"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment["HOME"] = str(tmp_path)
    for more, refused in (
        ({}, True),
        ({"WANDB_MODE": "offline"}, False),
        ({"WANDB_API_KEY": 40 * "a"}, False),
        ({"WANDB_API_KEY": 5 * "a"}, True),
    ):
        command, told = [sys.executable, "-c", program], "run `wandb login`, set WANDB_MODE=offline"
        process = subprocess.run(
            command, env=environment | more, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
        )
        assert process.returncode == refused and (told in process.stderr) == refused
        assert "eprecated" not in process.stderr


def test_a_resumed_run_goes_on_in_weights_and_biases_and_its_command_line_stays_here(tmp_path):
    """Runs in separate processes, because each has its own command line."""
    program = (
        "import sys; from pathlib import Path; from test_tracking import write_all; "
        f"write_all(Path({str(tmp_path)!r}), wandb_project='drafts', "
        f"config={{'parallelism': {{'ring': int(sys.argv[1])}}}})"
    )
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_CONSOLE": "off", "PYTHONPATH": ":".join(sys.path)}
    for ring in (1, 2):  # another layout
        command = [sys.executable, "-c", program, str(ring), "https://host/states?token=hunter2"]
        subprocess.run(command, env=environment, capture_output=True, check=True)
    files = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert {file.stem for file in files} == {f"run-{RUN}"} and len(files) == 2
    assert all(b"hunter2" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def wandb_records(data: bytes) -> list[Record]:
    """The records of a file that fits into its format's first block of 32 KiB: seven bytes of the file itself, then
    seven bytes before each record (checksum, length, 1 for a whole record)."""
    assert data[:4] == b":W&B" and len(data) < 32768
    records, place = [], 7
    while place < len(data):
        length, kind = struct.unpack_from("<HB", data, place + 4)
        assert kind == 1
        records.append(Record.FromString(data[place + 7 : place + 7 + length]))
        place += 7 + length
    return records


def test_weights_and_biases_without_a_key_is_said_in_one_line(tmp_path, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    wandb.teardown()  # it reads the environment once
    with pytest.raises(UserError, match="tracking.wandb_project: 'drafts'.*; run `wandb login`") as mistake:
        write_all(tmp_path, wandb_project="drafts")
    assert "\n" not in str(mistake.value)
