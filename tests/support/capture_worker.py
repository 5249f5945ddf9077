"""Runs launchers (capture.py, train.py) in forks of this process. As under a plain `srun`, nothing ends the other ranks
if one dies. Some ranks are killed on the way. For tests/jobs/test_capture.py.

python tests/support/capture_worker.py same RECIPE FOLDER      what stores hold, by how they were captured
python tests/support/capture_worker.py killed RECIPE FOLDER    how ranks end, and what they say, if one of two is
killed or slow
"""

import hashlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from processes import begin_ranks, ended, run_launcher
from store_cases import read_rows

import eagle3.jobs.derived
import eagle3.jobs.supply
import eagle3.jobs.train  # noqa: F401

# Above and below: what the launchers import, so that the forks need not.
from eagle3.states.store.files import open_files
from eagle3.states.store.folder import read_manifest
from eagle3.states.store.reader import HiddenStateStore
from eagle3.states.store.shard import taught_rows

WRITES = {"rename", "replace", "link", "fsync", "write", "open"}


def launcher(script: str, arguments: list[str], *manner) -> None:
    """Runs one rank. manner: a function that makes the rank kill itself on the way or be slow, and its arguments."""
    if manner:
        manner[0](*manner[1:])
    run_launcher(script, arguments)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_at_write(number: int) -> None:
    """Kills this process at the `number`-th disk call of the thread that writes samples."""
    calls = 0

    def watch(_frame, event, function) -> None:
        nonlocal calls
        if event == "c_call" and function.__name__ in WRITES and threading.current_thread().name.startswith("write"):
            calls += 1
            if calls == number:
                die()

    threading.setprofile(watch)


def dies_at_place(rank: int, place: str) -> None:
    """Kills `rank` some heartbeats after it has reached that place."""

    def watch(frame, event, _argument) -> None:
        reached = event == "return" and frame.f_code.co_qualname == "Watchdog.at"
        if reached and frame.f_locals["place"].startswith(place):
            watchdog = frame.f_locals["self"]
            latest = watchdog.count + 3  # by then, all have heard where this rank is
            while watchdog.count < latest:
                time.sleep(0.1)
            die()

    if int(os.environ["RANK"]) == rank:
        sys.setprofile(watch)


def at_batches(act: Callable[[int], None]) -> None:
    """Calls `act` with the number of each batch of short samples that this process has begun."""
    numbers = itertools.count(1)

    def watch(frame, event, _argument) -> None:
        if event == "return" and frame.f_code.co_name == "begin" and frame.f_back.f_code.co_name == "capture":
            act(next(numbers))

    sys.setprofile(watch)


def stops_at_batch(number: int) -> None:
    """Sends SIGTERM to this process, as a batch system does, once it has begun its `number`-th batch."""
    at_batches(lambda batch: os.kill(os.getpid(), signal.SIGTERM) if batch == number else None)


def takes_longer(rank: int) -> None:
    """Makes `rank` slower at each of its batches."""
    if int(os.environ["RANK"]) == rank:
        at_batches(lambda batch: time.sleep(2.5))


def begin_capture(recipe: str, store: Path, *arguments: str, ranks: int = 1, manner: tuple = ()) -> list:
    keys = [f"hidden_states.path={store}", "hidden_states.shard_tokens=120", "hidden_states.prefill_tokens=400"]
    return begin_ranks(
        ranks, partial(launcher, "capture.py", ["--recipe", recipe, "--quiet", *keys, *arguments], *manner)
    )


def content(store: Path) -> dict[str, str]:
    """For each sample, a digest of everything stored about it."""
    opened = HiddenStateStore.open(str(store), read_manifest(open_files(str(store))).provenance)
    digests = {}
    for sample_id in opened.locations:
        tokens = opened.tokens_at([opened.locations[sample_id]])[0]
        teacher = taught_rows(tokens.loss_mask).nonzero().flatten()
        rows = read_rows(opened, sample_id, torch.arange(len(tokens.ids)), teacher)
        data = b"".join(rows_of.numpy().tobytes() for rows_of in (*rows.named().values(), tokens.ids))
        digests[sample_id] = hashlib.sha256(data).hexdigest()
    return digests


def same(recipe: str, folder: Path) -> None:
    jobs = [
        begin_capture(recipe, folder / "undisturbed"),
        begin_capture(recipe, folder / "three ranks", ranks=3),
        begin_capture(recipe, folder / "two parts", "--part", "0/2"),
        begin_capture(recipe, folder / "two parts", "--part", "1/2", ranks=2),
    ]
    store = folder / "killed"
    for number in (40, 90, 140):
        assert ended(begin_capture(recipe, store, manner=(dies_at_write, number))) == [-signal.SIGKILL]
    stored = {"killed": len(content(store))}
    jobs.append(begin_capture(recipe, store, ranks=2))
    store, one_shard = folder / "stopped", "hidden_states.shard_tokens=100000"
    assert all(ended(begin_capture(recipe, store, one_shard, ranks=2, manner=(stops_at_batch, 2))))
    stored["stopped"] = len(content(store))
    jobs.append(begin_capture(recipe, store))
    assert not any(code for job in jobs for code in ended(job))
    stores = {path.name: content(path) for path in folder.iterdir()}
    print(json.dumps({"stored before": stored, "stores": stores}))


def killed(recipe: str, folder: Path) -> None:
    jobs = {}
    for script, rank, place in (
        ("capture.py", 1, "loading the target"),
        ("capture.py", 1, "capturing sample"),
        ("capture.py", 0, "capturing sample"),
        ("train.py", 0, "step 2"),
    ):
        name = f"{script} {rank} {place}"
        keys = [f"hidden_states.path={folder / name}", f"output.dir={folder / name}"]
        arguments = ["--recipe", recipe, "--quiet", *keys]
        jobs[name] = begin_ranks(2, partial(launcher, script, arguments, dies_at_place, rank, place))
    short = ("hidden_states.prefill_tokens=44", "hidden_states.ring=2", "training.hang_minutes=0.35")
    jobs["unequal"] = begin_capture(recipe, folder / "unequal", *short, ranks=2, manner=(takes_longer, 1))
    for name, processes in jobs.items():
        print(f"{name}: ended with {ended(processes)}", flush=True)


if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one thread per process, however many processes there are
    {"same": same, "killed": killed}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
