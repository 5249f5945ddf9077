"""SIGKILL at moments by chance: of a training job of two ranks, or of a capture by two; then the same command again."""

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from ground import Ground, require, run_difference, store_difference
from launching import LIMIT, Ended, have_met
from tries import Case, Verdict, crashed, last_words

TRAINING, CAPTURES, WORLD = 20, 8, 2
VICTIMS = ("rank 0", "rank 1", "both ranks")


def cases(ground: Ground, dice: random.Random) -> Iterator[Case]:
    for kind, count in (("train", TRAINING), ("capture", CAPTURES)):
        for number in range(count):
            # Spread over the whole course, start and end included.
            moment, victim = (number + dice.random()) / count, dice.choice(VICTIMS)
            yield Case(
                f"{kind} {number:02d}, {victim}, after {moment:.0%}",
                lambda kind=kind, moment=moment, victim=victim: kill(ground, kind, moment, victim),
            )


def _recipe(ground: Ground, folder: Path) -> Path:
    return ground.recipe(
        folder,
        rows=120,
        hidden_states={"prefill_tokens": 128},
        training={"max_steps": 12, "checkpoint_every": 3},
        evaluation={"every": 6},
    )


def _undisturbed(ground: Ground) -> Path:
    def make(folder: Path) -> None:
        recipe = _recipe(ground, folder)
        require(ground.train(recipe, world=WORLD))
        require(ground.capture(recipe, world=WORLD))

    return ground.once(ground.undisturbed / "kills", make)


def kill(ground: Ground, kind: str, moment: float, victim: str) -> Verdict:
    """moment: as a share of the seconds that such a job takes."""
    whole, folder = _undisturbed(ground), ground.empty("kills")
    recipe = _recipe(ground, folder)
    command = [f"launchers/{kind}.py", "--recipe", str(recipe)]
    seconds = _pace(ground, kind)
    again = ["--resume", "auto"] if kind == "train" else []
    job = ground.launchers.start_job(WORLD, *command, *again)
    while ground.launchers.alive(job) and time.monotonic() - job[0].began < moment * seconds:
        time.sleep(0.002)
    # Ranks that have not met yet cannot miss one another: there it is their launcher that ends them, as torchrun and
    # deepspeed do at once.
    met = have_met(job[0])
    for process in job if victim == "both ranks" or not met else [job[int(victim[-1])]]:
        process.kill()
    ended = ground.launchers.finish(job, LIMIT)
    struck = -signal.SIGKILL in ended.codes
    crash = crashed(ended, killed=True)
    if crash:
        return crash._replace(detail=f"after the kill: {crash.detail}")
    resumed = ground.launchers.run_job(WORLD, *command, *again)
    return _verdict(kind, folder, whole, ended, resumed, struck)


def _pace(ground: Ground, kind: str) -> float:
    """Seconds of such a job, undisturbed."""
    key = f"{kind}, fresh {ground.launchers.fresh}"
    if key not in ground.paces:
        recipe = _recipe(ground, ground.empty("kills pace"))
        ended = require(ground.launchers.run_job(WORLD, f"launchers/{kind}.py", "--recipe", str(recipe)))
        ground.paces[key] = ended.seconds
    return ground.paces[key]


def _verdict(kind: str, folder: Path, whole: Path, ended: Ended, resumed: Ended, struck: bool) -> Verdict:
    crash = crashed(resumed)
    if crash:
        return crash._replace(detail=f"when repeated: {crash.detail}")
    if not resumed.well:
        return Verdict("lost", f"when repeated: {last_words(resumed)}")
    if kind == "train":
        difference = run_difference(folder / "run", whole / "run")
    else:
        difference = store_difference(folder / "store", whole / "store")
    if difference:
        return Verdict("silently wrong", difference)
    return Verdict("continued" if struck else "right", f"after the kill: {last_words(ended)}")
