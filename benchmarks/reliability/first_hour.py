"""Mistakes of a new user's first hour: data in a common form under an unexpected name, a draft given as target, short
chats judged by context, commands from another folder, and a stop while the quickstart makes its target."""

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from ground import Ground, contents, conversations, loss_of, require, run_difference
from hostile_text import finished_run
from launching import Ended
from tries import Case, Verdict, crashed, judge, last_words

ROWS = 16
# Of the quickstart's recipe: a smaller target, which still takes longer than the time between two saves.
SMALL_DEMO = (
    "model.demo.hidden_size=96",
    "model.demo.intermediate_size=192",
    "model.demo.steps=500",
    "model.demo.answers=64",
    "model.demo.answer_tokens=4",
    "data.held_out=['demo_answers:held_out']",
)
DEMO_LIMIT = 1200  # its text is the standard library, and its steps use all cores
SAVED_WITHIN = 120  # seconds; its state is saved a few times a minute


def cases(ground: Ground, dice: random.Random) -> Iterator[Case]:
    for name, write in DATA.items():
        yield Case(f"data: {name}", lambda write=write: _data(ground, write))
    for script in ("prepare.py", "train.py", "capture.py"):
        yield Case(f"an export given as target, {script}", lambda script=script: _export_as_target(ground, script))
    yield Case("short chats judged by context", lambda: _by_context(ground))
    yield Case("a diagnosis started in another folder", lambda: _diagnosis(ground))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        yield Case(f"{number.name} while the demo target is made", lambda number=number: _demo(ground, number))


def _json_list(folder: Path, rows: list[dict], indent: int | None) -> Path:
    path = folder / "list.jsonl"
    path.write_text(json.dumps(rows, indent=indent), encoding="utf-8")
    return path


def _alpaca(folder: Path, rows: list[dict]) -> Path:
    path = folder / "alpaca.json"
    turns = [[turn["content"] for turn in row["messages"]] for row in rows]
    path.write_text(
        json.dumps([{"instruction": question, "input": "", "output": answer} for question, answer in turns]),
        encoding="utf-8",
    )
    return path


# What writes the undisturbed run's rows in another form.
DATA: dict[str, Callable[[Path, list[dict]], Path]] = {
    "a JSON list named .jsonl, on one line": lambda folder, rows: _json_list(folder, rows, None),
    "a JSON list named .jsonl, over many lines": lambda folder, rows: _json_list(folder, rows, 1),
    "Alpaca rows": _alpaca,
}


def _data(ground: Ground, write: Callable[[Path, list[dict]], Path]) -> Verdict:
    """The same conversations make the same draft."""
    folder = ground.empty("first_hour")
    data = write(folder, conversations(ROWS))
    ended = ground.train(ground.recipe(folder), f"data.train=[{data}]")
    return judge(ended, lambda: run_difference(folder / "run", finished_run(ground)))


def _export_as_target(ground: Ground, script: str) -> Verdict:
    folder, export = ground.empty("first_hour"), finished_run(ground) / "export"
    loss = loss_of(export, contents(export))
    words = ("--recipe", str(ground.recipe(folder)), f"model.target={export}")
    ended = ground.launchers.run(f"launchers/{script}", *words)
    return judge(ended, lambda: "taken for a target", loss)


def _by_context(ground: Ground) -> Verdict:
    """The README's step 5, on conversations of a few dozen tokens."""
    folder = ground.empty("first_hour")
    recipe, export = ground.recipe(folder), finished_run(ground) / "export"
    words = ("--recipe", str(recipe), "--draft", str(export), "--by-context", "--out", str(folder / "by_context.json"))
    ended = ground.launchers.run("launchers/evaluate.py", *words, "evaluation.new_tokens=16")
    if crash := crashed(ended):
        return crash
    if not ended.well:
        return Verdict("broken promise", f"nothing was judged; {last_words(ended)}")
    judged = json.loads((folder / "by_context.json").read_text(encoding="utf-8"))["contexts"]
    verified = sum(each["verifications"] for each in judged)
    return Verdict("right" if verified else "silently wrong", f"{len(judged)} contexts, {verified} verifications")


def _diagnosis(ground: Ground) -> Verdict:
    """The launcher runs in the checkout, and the draft lies elsewhere."""
    folder = ground.empty("first_hour")
    recipe, export = ground.recipe(folder, evaluation={"conversations": 4}), folder / "drafts" / "export"
    export.parent.mkdir()
    os.symlink(finished_run(ground) / "export", export)
    here = ground.root / "diagnosis.json"
    before = here.exists()
    words = ("--recipe", str(recipe), "--draft", str(export), "evaluation.new_tokens=16")
    ended = ground.launchers.run("launchers/diagnose.py", *words)
    if crash := crashed(ended):
        return crash
    if here.exists() and not before:
        here.unlink()
        return Verdict("broken promise", "written into the folder that the command ran in")
    there = (export.parent / "diagnosis.json").is_file()  # the exit code is 1 if it found a fault
    return Verdict("right" if there else "broken promise", last_words(ended))


def _demo(ground: Ground, number: signal.Signals) -> Verdict:
    """The command again goes on where the first one was, to the same target."""
    whole = ground.once(ground.undisturbed / "demo", lambda folder: _made(require(_prepare(ground, folder)), folder))
    folder = ground.empty("first_hour")
    process = ground.launchers.start("launchers/prepare.py", *_words(folder))

    def states() -> list[Path]:
        """Those that are written whole: until then their names begin with a dot."""
        kept = folder.glob("cache/.demo-target-*/*")
        return [path for path in kept if path.name not in ("new", "owner.lock") and path.name[0] != "."]

    saved = ground.launchers.wait_until(lambda: bool(states()), [process], SAVED_WITHIN)
    os.kill(process.pid, number)
    stopped = ground.launchers.finish([process], DEMO_LIMIT)
    crash = crashed(stopped, killed=number == signal.SIGKILL)
    if crash and (stopped.late or stopped.codes != (-number,)):  # it may end by the signal itself
        return crash
    if not saved or not states():
        return Verdict("lost", f"nothing of what was done is left; {last_words(stopped)}")
    again = _prepare(ground, folder)

    def difference() -> str | None:
        if states():
            return "the state of an unfinished target is still there"
        made, right = (_target_files(place) for place in (folder, whole))
        return None if made == right else "another target"

    return judge(again, difference, good="continued")


def _words(folder: Path) -> tuple[str, ...]:
    return (*SMALL_DEMO, f"data.cache_dir={folder / 'cache'}", f"output.dir={folder / 'run'}")


def _prepare(ground: Ground, folder: Path) -> Ended:
    return ground.launchers.run("launchers/prepare.py", *_words(folder), limit=DEMO_LIMIT)


def _made(ended: Ended, folder: Path) -> None:
    if not _target_files(folder):
        raise RuntimeError(f"no demo target was made:\n{ended.output}")


def _target_files(folder: Path) -> dict[str, str]:
    """Digests of the demo target's files, but for its records, which have the seconds."""
    (target,) = (folder / "cache").glob("demo-target-*")
    return {name: digest for name, digest in contents(target).items() if name not in ("training.json", "record.json")}
