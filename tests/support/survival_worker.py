"""Runs of two and more ranks that are killed, stopped, or meet a full disk, for tests/jobs/test_survival.py.

python tests/support/survival_worker.py CASE RECIPE ARGUMENT...
"""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from processes import begin_ranks, ended, run_launcher
from tiny_run import metrics

import eagle3.jobs.train
import eagle3.reporting.report  # noqa: F401  what the launcher imports


def run(world: int, recipe: str, overrides: list[str], meanwhile: Callable = lambda processes: None) -> list[int]:
    """Runs train.py. Returns the exit codes of the ranks, which must all end once the first has ended. `meanwhile` does
    something to the processes."""
    words = ["--recipe", recipe, *overrides, "--resume", "auto", "--stop-code", "75"]
    processes = begin_ranks(world, partial(run_launcher, "train.py", words))
    threading.Thread(target=meanwhile, args=(processes,), daemon=True).start()
    while all(process.exitcode is None for process in processes):
        time.sleep(0.01)
    codes = ended(processes)
    late = [rank for rank, code in enumerate(codes) if code is None]
    assert not late, f"ranks {late} did not notice that the first had ended"
    return codes


def killed(recipe: str, world: str, moments: str, steps: str, *overrides: str) -> None:
    """One run is killed at seeded moments and resumed, another is not: folders `killed` and `whole`."""
    folder, dice, world = Path(recipe).parent, random.Random(7), int(world)
    words = [*overrides, f"training.max_steps={steps}"]
    began = time.monotonic()
    assert run(world, recipe, [*words, f"output.dir={folder / 'whole'}"]) == [0] * world
    pace = (time.monotonic() - began) / int(steps)
    for moment in range(int(moments)):
        step = (moment + 1) * (int(steps) - 1) // int(moments)
        rank, delay = dice.randrange(world), dice.uniform(0, pace)

        def kill(processes, rank=rank, step=step, delay=delay, before=changed(folder / "killed")) -> None:
            # wait until this job has made a step: while it forms, only its launcher would end it
            while changed(folder / "killed") == before or steps_done(folder / "killed") < step:
                time.sleep(0.002)
            time.sleep(delay)
            os.kill(processes[rank].pid, signal.SIGKILL)

        codes = run(world, recipe, [*words, f"output.dir={folder / 'killed'}"], kill)
        print(f"killed rank {rank} {delay:.3f} s after step {step}: exit codes {codes}", flush=True)
        assert codes[rank] == -signal.SIGKILL or codes == [0] * world, "the last moment may come after the end"
        exported = (folder / "killed" / "export").exists()  # then all that is left is for each rank to end
        assert codes == [0] * world or all(codes) or exported, "nobody ends well in a broken job"
    assert run(world, recipe, [*words, f"output.dir={folder / 'killed'}"]) == [0] * world


def stopped(recipe: str, *overrides: str) -> None:
    """Twice, one of two ranks gets a signal. Then the run continues to its end."""
    run_folder = Path(recipe).parent / "stopped"
    words = [*overrides, f"output.dir={run_folder}"]
    for number, after in ((signal.SIGTERM, 2), (signal.SIGUSR1, 5)):

        def send(processes, number=number, after=after) -> None:
            while steps_done(run_folder) < after:
                time.sleep(0.002)
            os.kill(processes[1].pid, number)

        assert run(2, recipe, words, send) == [75, 75]
        newest = max(path.name for path in (run_folder / "checkpoints").glob("step-*"))
        assert newest == f"step-{steps_done(run_folder):08d}", newest
    assert run(2, recipe, words) == [0, 0]


def full(recipe: str, mounted: str, larger: str, *overrides: str) -> None:
    """The disk is full at the second checkpoint; with more room the run goes on."""
    words = [*overrides, f"output.dir={mounted}/run"]
    assert run(2, recipe, words) == [2, 2]
    names = [path.name for path in Path(mounted, "run", "checkpoints").iterdir() if path.name.startswith("step-")]
    print(f"kept {names}", flush=True)
    assert os.system(f"mount -o remount,size={larger} {mounted}") == 0
    assert run(2, recipe, words) == [0, 0]


def changed(folder: Path) -> int:
    """When the run last wrote its metrics, in nanoseconds."""
    try:
        return (folder / "metrics.jsonl").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def steps_done(folder: Path) -> int:
    try:
        return max((record["step"] for record in metrics(folder)), default=0)
    except (FileNotFoundError, ValueError):  # not there yet, or half a line
        return 0


if __name__ == "__main__":
    {"killed": killed, "stopped": stopped, "full": full}[sys.argv[1]](*sys.argv[2:])
