"""Runs that share one output.dir, for tests/training/test_run_folder.py: launchers/train.py itself, in forks of this
process.

python tests/support/shared_folder_worker.py RECIPE...

A recipe's folder has the name of its case. Prints what each run said and its exit code, as JSON in the last line.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from limits import HANG_SECONDS
from processes import begin_ranks, ended, run_launcher

import eagle3.jobs.derived
import eagle3.jobs.train  # noqa: F401

# Above: what train.py imports while it runs, imported once for all forks.

ENDLESS = ("training.max_steps=100000", "training.checkpoint_every=100000", "evaluation.every=100000")


class Run(NamedTuple):
    """processes: the ranks. log: the file with their output."""

    processes: list
    log: Path

    def end(self) -> tuple[int, str]:
        """The first rank's exit code and the output; all ranks have the same code."""
        codes, output = set(ended(self.processes)), self.log.read_text()
        assert len(codes) == 1 and None not in codes, (codes, output)
        return codes.pop(), output

    def await_step(self, folder: Path, step: int = 1) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while f"step {step}/" not in self.log.read_text() or not (folder / "metrics.jsonl").exists():
            assert self.processes[0].is_alive() and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)

    def send(self, number: int) -> None:
        os.kill(self.processes[0].pid, number)


def start(recipe: Path, name: str, *words: str, world: int = 1, first: Callable = lambda: None) -> Run:
    """Starts train.py with these words. first: called in each of its processes."""
    log = recipe.parent / f"{name}.log"
    log.touch()
    return Run(begin_ranks(world, partial(_train, log, first, ["--recipe", str(recipe), *words])), log)


def _train(log: Path, first: Callable, words: list[str]) -> None:
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    first()
    run_launcher("train.py", words)


def entered(recipe: Path) -> dict:
    """Second runs try to enter the folder of a live one, in many ways. Then the first is killed, and another continues
    at once."""
    folder, link = recipe.parent / "run", recipe.parent / "link"
    link.symlink_to(folder)
    holder = start(recipe, "holder", *ENDLESS)
    holder.await_step(folder)
    before = sorted(path.name for path in recipe.parent.iterdir() if path.suffix != ".log")
    identity = (folder / "run_id.txt").read_text()
    ways = {
        "fresh": start(recipe, "fresh", *ENDLESS),
        "resumed": start(recipe, "resumed", *ENDLESS, "--resume"),
        "auto": start(recipe, "auto", *ENDLESS, "--resume", "auto"),
        "link": start(recipe, "link", *ENDLESS, f"output.dir={link}"),
        "relative": start(recipe, "relative", "output.dir=run", first=partial(os.chdir, recipe.parent)),
        "two ranks": start(recipe, "ranks", *ENDLESS, "parallelism.ulysses=2", "--resume", "auto", world=2),
        "check": start(recipe, "check", "--check", "1x1"),
    }
    outcomes = {way: run.end() for way, run in ways.items()}
    assert before == sorted(path.name for path in recipe.parent.iterdir() if path.suffix != ".log")
    assert holder.processes[0].is_alive()
    outcomes["holder"] = holder.processes[0].pid
    holder.send(signal.SIGKILL)
    holder.processes[0].join()
    after = start(recipe, "after", *ENDLESS, "--resume", "auto")
    after.await_step(folder)
    assert identity == (folder / "run_id.txt").read_text()
    after.send(signal.SIGTERM)
    outcomes["after"] = after.end()
    outcomes["left"] = sorted(path.name for path in folder.iterdir())
    return outcomes


def at_once(recipe: Path) -> dict:
    """Four fresh runs start together in the folder of one that has ended."""
    folder = recipe.parent / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "recipe.yaml").write_text("of an earlier run")
    runs = [start(recipe, f"at once {number}", *ENDLESS) for number in range(4)]
    ended = []
    while len(ended) < 3:
        ended = [run for run in runs if not run.processes[0].is_alive()]
        time.sleep(0.05)
    (winner,) = [run for run in runs if run not in ended]
    winner.await_step(folder)
    winner.send(signal.SIGTERM)
    return {"winner": winner.end(), "others": [run.end() for run in ended]}


def unlocked(recipe: Path) -> dict:
    """If flock fails, a second run takes the first one's folder. The first notices before its next checkpoint."""
    folder, endless = recipe.parent / "run", (*ENDLESS[:1], *ENDLESS[2:], "training.checkpoint_every=2")
    one = start(recipe, "one", *endless, first=refuse_locks)
    one.await_step(folder)
    two = start(recipe, "two", *endless, first=refuse_locks)
    outcomes = {"one": one.end()}
    two.await_step(folder)
    two.send(signal.SIGTERM)
    outcomes["two"] = two.end()
    manifests = [json.loads(path.read_text()) for path in folder.glob("checkpoints/step-*/manifest.json")]
    return outcomes | {"of": sorted({manifest["run"] for manifest in manifests})}


def torn(recipe: Path) -> dict:
    """The second of two ranks cannot write its part of the second checkpoint."""
    folder = recipe.parent / "run"

    def limit() -> None:
        if os.environ["RANK"] == "1":
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # Python ignores the signal and sees EFBIG

    run = start(recipe, "torn", "parallelism.ulysses=2", world=2, first=limit)
    return {"torn": run.end(), "left": sorted(path.name for path in (folder / "checkpoints").glob("step-*"))}


def refuse_locks() -> None:
    """Makes flock fail in this process from now on, as on a file system without locks: the kernel answers ENOSYS
    (seccomp)."""
    flock, load, jump_equal, give = {"x86_64": 73, "aarch64": 32}[os.uname().machine], 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | 38
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in ((load, 0, 0, 0), (jump_equal, 0, 1, flock), (give, 0, 0, refuse), (give, 0, 0, allow))
    )
    code = ctypes.create_string_buffer(program)
    filtering = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(code)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(38, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS"
    assert prctl(22, 2, filtering, 0, 0) == 0, f"PR_SET_SECCOMP: {os.strerror(ctypes.get_errno())}"


if __name__ == "__main__":
    cases = {"entered": entered, "at_once": at_once, "unlocked": unlocked, "torn": torn}
    print(json.dumps({recipe.parent.name: cases[recipe.parent.name](recipe) for recipe in map(Path, sys.argv[1:])}))
