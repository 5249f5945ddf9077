"""A second run on the output.dir of one that is training: the first must end as if alone, the second be turned away.

So that they meet on any machine, the first is stopped (SIGSTOP) while the second starts, and goes on when that has
ended; those of "the same instant" run freely.
"""

import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ground import Ground, require, run_difference
from launching import LIMIT, Process
from tries import Case, Verdict, crashed, last_words

STEPS = 60
LONG = f"training.max_steps={STEPS}"
# How the first is started, how the second, and when: after so many steps of the first.
WAYS = {
    "fresh, fresh": ((), (), 3),
    "fresh, --resume auto": ((), ("--resume", "auto"), 5),
    "--resume, --resume auto": (("--resume",), ("--resume", "auto"), 23),
    "fresh, fresh, at the same instant": ((), (), 0),
    "--resume auto, --resume auto, at the same instant": (("--resume", "auto"), ("--resume", "auto"), 0),
    "fresh, fresh by another spelling": ((), (), 3),
    "fresh, --resume auto by a symbolic link": ((), ("--resume", "auto"), 5),
    "fresh, fresh of two ranks": ((), (), 3),
    "fresh of two ranks, --resume auto of two ranks": ((), ("--resume", "auto"), 5),
}


def cases(ground: Ground, dice: random.Random) -> Iterator[Case]:
    for name in WAYS:
        yield Case(name, lambda name=name: meet(ground, name))


def _alone(ground: Ground, world: int) -> Path:
    def make(folder: Path) -> None:
        require(ground.train(_recipe(ground, folder), world=world))

    return ground.once(ground.undisturbed / f"shared_folder of {world}", make)


def _recipe(ground: Ground, folder: Path) -> Path:
    changes = {"training": {"max_steps": STEPS, "checkpoint_every": 4}, "evaluation": {"every": 20}}
    return ground.recipe(folder, **changes)


def meet(ground: Ground, name: str) -> Verdict:
    first_words, second_words, after = WAYS[name]
    world = 2 if name.startswith("fresh of two") else 1
    second_world = 2 if name.endswith("of two ranks") else 1
    whole, folder = _alone(ground, world), ground.empty("shared_folder")
    recipe, run = _recipe(ground, folder), folder / "run"
    if first_words == ("--resume",):  # of a run that a kill has ended
        begun = ground.launchers.start_job(world, "launchers/train.py", "--recipe", str(recipe))
        _wait_for_step(ground, begun, run, 20)
        for process in begun:
            process.kill()
        ground.launchers.finish(begun, LIMIT)
    spelling = str(run)
    if "spelling" in name:
        spelling = f"{folder}/../{folder.name}/./run"
    elif "link" in name:
        (folder / "link").symlink_to(folder)
        spelling = str(folder / "link" / "run")
    common = ("launchers/train.py", "--recipe", str(recipe))
    first = ground.launchers.start_job(world, *common, *first_words)
    if after:
        _wait_for_step(ground, first, run, after)
        for process in first:
            os.kill(process.pid, signal.SIGSTOP)
    second = ground.launchers.start_job(second_world, *common, *second_words, f"output.dir={spelling}")
    second_ended = ground.launchers.finish(second, LIMIT)
    for process in first:
        os.kill(process.pid, signal.SIGCONT)
    first_ended = ground.launchers.finish(first, 2 * LIMIT)
    if not after and second_ended.well and not first_ended.well:  # which of the two came first is chance
        first_ended, second_ended = second_ended, first_ended
    for who, one in (("first", first_ended), ("second", second_ended)):
        crash = crashed(one)
        if crash:
            return crash._replace(detail=f"the {who} run: {crash.detail}")
    if not first_ended.well:
        return Verdict("lost", f"the first run ended with {first_ended.codes}: {last_words(first_ended)}")
    difference = run_difference(run, whole / "run")
    if difference:
        return Verdict("silently wrong", f"the first run: {difference}")
    if second_ended.well:
        return Verdict("silently wrong", "the second run was not refused")
    return Verdict("refused", last_words(second_ended))


def _wait_for_step(ground: Ground, job: list[Process], run: Path, step: int) -> None:
    ground.launchers.wait_until(lambda: steps_done(run) >= step, job)


def steps_done(run: Path) -> int:
    """Of a run that is writing its metrics."""
    lines = []
    with suppress(FileNotFoundError):
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    for line in reversed(lines):
        with suppress(ValueError):
            return json.loads(line)["step"]
    return 0
