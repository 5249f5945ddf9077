"""Folders that cannot be written or belong to others, secrets and names in what is published, text without end, ranks
that die."""

import os
import random
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from ground import Ground, contents, loss_of, require, run_difference
from hostile_text import finished_run
from launching import Ended, have_met
from shared_folder import steps_done
from tries import Case, NotHere, Verdict, crashed, judge, last_words

SECRET = "hunter2secret"
MEGABYTES, MOST_MIB = 100, 3 * 1024
NOBODY = 65534
# The others of a job must be gone so long after one of them was killed.
ALONE_SECONDS = 120


def cases(ground: Ground, dice: random.Random) -> Iterator[Case]:
    with read_only(ground.empty("probe")):
        pass
    for name in ("data.cache_dir, empty", "data.cache_dir, filled", "output.dir", "the store, captured into"):
        yield Case(f"read-only: {name}", lambda name=name: _read_only(ground, name))
    yield Case("read-only: the store, trained from", lambda: _read_only(ground, "the store, trained from"))
    for policy in ("truncate", "split"):
        yield Case(f"one text row of {MEGABYTES} MB, {policy}", lambda policy=policy: _long_row(ground, policy))
    for name in ("a foreign owner", "writable by all", "a symbolic link", "neighbours"):
        yield Case(f"spool: {name}", lambda name=name: _spool(ground, name))
    for key in ("hidden_states.path", "data.train"):
        yield Case(f"?token= in {key}, report", lambda key=key: _token_in_report(ground, key))
        yield Case(f"?token= in {key}, log", lambda key=key: _token_in_log(ground, key))
    yield Case("a target's name full of HTML and Markdown", lambda: _card(ground))
    yield Case("modes of the exported files", lambda: _modes(ground))
    for number in range(4):
        rank, delay = number % 2, dice.uniform(0.0, 1.5)
        yield Case(
            f"capture.py: rank {rank} killed {delay:.1f} s after its first line",
            lambda rank=rank, delay=delay: _killed_capture(ground, rank, delay),
        )
    for rank in (0, 1):
        step = dice.randrange(2, 12)
        yield Case(
            f"train.py: rank {rank} killed at step {step}",
            lambda rank=rank, step=step: _killed_training(ground, rank, step),
        )


# Folders --------------------------------------------------------------------------------------------------------------


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A read-only bind mount of a folder on itself. Raises NotHere."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "--bind", str(folder), str(folder)]
    mounting = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounting.returncode:
        raise NotHere(f"no right to mount ({mounting.stderr.strip()}); run as root, or in `unshare -Urm`")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _whole(ground: Ground) -> Path:
    """Cache, store and run from the store."""

    def make(folder: Path) -> None:
        recipe = ground.recipe(folder)
        require(ground.capture(recipe))
        require(ground.train(recipe, "hidden_states.mode=stored"))

    return ground.once(ground.undisturbed / "places", make)


def _read_only(ground: Ground, name: str) -> Verdict:
    whole, folder = _whole(ground), ground.empty("hostile_places")
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    shutil.rmtree(folder / "run")
    text = (whole / "recipe.yaml").read_text(encoding="utf-8").replace(str(whole), str(folder))
    # The cache knows rows by their contents, not by their file.
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    recipe = folder / "recipe.yaml"
    place = folder / {"data": "cache", "outp": "run", "the ": "store"}[name[:4]]
    if name.endswith(("empty", "into")):
        shutil.rmtree(place)
    before = contents(folder)
    with read_only(place):
        if name.endswith("into"):
            ended = ground.capture(recipe)
            return judge(ended, lambda: "captured into a folder that cannot be written", loss_of(folder, before))
        ended = ground.train(recipe, "hidden_states.mode=stored")
    run = folder / "run"
    verdict = judge(ended, lambda: run_difference(run, whole / "run"), loss_of(folder, before))
    if verdict.outcome == "refused" and name.endswith(("filled", "from")):
        return Verdict("broken promise", f"nothing was to be written there, but: {verdict.detail}")
    return verdict


def _long_row(ground: Ground, policy: str) -> Verdict:
    folder = ground.empty("hostile_places")
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        file.write('{"text": "')
        for number in range(MEGABYTES * 2**20 // 32):
            file.write(f"line {number % 99991:06d} of one long text. "[:32])
        file.write('"}\n')
        for number in range(8):
            file.write(f'{{"text": "A short one, number {number}, to be held out."}}\n')
    data = {"train": [str(folder / "rows.jsonl")], "held_out_fraction": 0.0, "cache_dir": str(folder / "cache")}
    data |= {"too_long": policy, "max_length": 256, "workers": 1}
    ended = ground.launchers.run("launchers/prepare.py", "--recipe", str(ground.recipe(folder, data=data)), limit=600)
    verdict = judge(ended)
    if ended.peak_mib > MOST_MIB:
        verdict = Verdict("broken promise", f"more than {MOST_MIB:,} MiB; {verdict.outcome}, {verdict.detail}")
    return verdict._replace(detail=f"{ended.peak_mib:,.0f} MiB at most, {ended.seconds:.0f} s: {verdict.detail}")


# Spool ----------------------------------------------------------------------------------------------------------------


def _spool(ground: Ground, name: str) -> Verdict:
    folder = ground.empty("hostile_places") / "spool"
    neighbour = folder / "someone's work"
    if name == "a symbolic link":
        real = folder.parent / "elsewhere"
        real.mkdir()
        os.chown(real, NOBODY, NOBODY)
        folder.symlink_to(real)
    else:
        folder.mkdir()
    if name == "a foreign owner":
        os.chown(folder, NOBODY, NOBODY)
    elif name == "writable by all":
        folder.chmod(0o777)
    elif name == "neighbours":  # two folders that look a little like a job's, and are not
        folder.chmod(0o700)
        for theirs in (neighbour, folder / ".gone-on-holiday"):
            theirs.mkdir()
            (theirs / "owner.lock").write_text("held\n", encoding="utf-8")
            (theirs / "thesis.txt").write_text("years of work", encoding="utf-8")
    before = contents(folder)
    ended = ground.launchers.run(str(Path(__file__).with_name("open_spool.py")), str(folder), limit=60)
    verdict = judge(ended, loss=loss_of(folder, before))
    if verdict.outcome != "right":
        return verdict
    gone = loss_of(folder, before)()
    if gone:
        return Verdict("lost", gone)
    status = folder.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        return Verdict("broken promise", f"used: owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}")
    return verdict


# What others get to read ----------------------------------------------------------------------------------------------


def _with_token(recipe: dict, key: str) -> dict:
    section, name = key.split(".")
    url = f"https://127.0.0.1:1/store?name=x&token={SECRET}"
    recipe[section][name] = [url] if isinstance(recipe[section][name], list) else url
    return recipe


def _shown(ended: Ended, files: list[Path]) -> str | None:
    if SECRET in ended.output:
        return "the token is in the output"
    leaks = [path.name for path in files if path.is_file() and SECRET in path.read_text("utf-8", "replace")]
    return f"the token is in {leaks[0]}" if leaks else None


def _token_in_report(ground: Ground, key: str) -> Verdict:
    """In the recipe of a finished run, of which report and card are made again."""
    folder = ground.empty("hostile_places")
    run = folder / "run"
    shutil.copytree(finished_run(ground), run)
    (run / "export" / "README.md").unlink()
    recipe = _with_token(yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8")), key)
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    ended = ground.launchers.run("launchers/report.py", str(run))
    return _published(ended, [run / "report.html", run / "export" / "README.md", run / "export" / "config.json"])


def _token_in_log(ground: Ground, key: str) -> Verdict:
    folder = ground.empty("hostile_places")
    path = ground.recipe(folder, hidden_states={"mode": "stored", "dtype": "float32", "path": "x"})
    recipe = _with_token(yaml.safe_load(path.read_text(encoding="utf-8")), key)
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    ended = ground.train(path)
    return _published(ended, [])


def _published(ended: Ended, files: list[Path]) -> Verdict:
    verdict, shown = judge(ended), _shown(ended, files)
    if shown and verdict.outcome in ("right", "refused"):
        return Verdict("broken promise", shown)
    return verdict


def _card(ground: Ground) -> Verdict:
    folder = ground.empty("hostile_places")
    name = "<img src=x onerror=alert(1)>](http:x) | `a`"
    shutil.copytree(ground.target(), folder / name)
    ended = ground.train(ground.recipe(folder, model=_named(str(folder / name))))
    verdict = judge(ended)
    for path in (folder / "run" / "export" / "README.md", folder / "run" / "report.html"):
        if ended.well and re.search(r"(?<!\\)<img src=x", _outside_code(path)):
            return Verdict("broken promise", f"{path.name} has the name as it is")
    return verdict


def _outside_code(path: Path) -> str:
    """Of Markdown: the text without front matter, fenced blocks and code spans, where HTML is inert, as it is after a
    backslash. Of HTML: all."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        for inert in (r"\A---\n.*?\n---\n", r"^(```+).*?^\1", r"(`+)(?!`).+?(?<!`)\1(?!`)"):
            text = re.sub(inert, "", text, flags=re.DOTALL | re.MULTILINE)
    return text


def _named(target: str) -> dict:
    return {"target": target, "target_dtype": "float32", "aux_layers": [0, 2, 3], "draft": {"vocab_size": 200}}


def _modes(ground: Ground) -> Verdict:
    run = finished_run(ground)
    files = [run / "draft_vocabulary.safetensors", run / "export" / "model.safetensors", run / "export" / "config.json"]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in files}
    detail = ", ".join(f"{name} {mode:o}" for name, mode in modes.items())
    return Verdict("right" if len(set(modes.values())) == 1 else "broken promise", detail)


# Ranks ----------------------------------------------------------------------------------------------------------------


def _killed_capture(ground: Ground, rank: int, delay: float) -> Verdict:
    folder = ground.empty("hostile_places")
    recipe = ground.recipe(folder, rows=400, hidden_states=_slow(folder))
    job = ground.launchers.start_job(2, "launchers/capture.py", "--recipe", str(recipe))
    ground.launchers.wait_until(lambda: have_met(job[0]), job)
    spoke = time.monotonic()
    while ground.launchers.alive(job) and time.monotonic() - spoke < delay:
        time.sleep(0.002)
    return _after_kill(ground, job, rank, lambda output: None)


def _slow(folder: Path) -> dict:
    """Batches of a sample or two."""
    return {"dtype": "float32", "path": str(folder / "store"), "shard_tokens": 200, "prefill_tokens": 64}


def _killed_training(ground: Ground, rank: int, step: int) -> Verdict:
    folder = ground.empty("hostile_places")
    recipe = ground.recipe(folder, rows=120, training={"max_steps": 200, "checkpoint_every": 50})
    job = ground.launchers.start_job(2, "launchers/train.py", "--recipe", str(recipe))
    ground.launchers.wait_until(lambda: steps_done(folder / "run") >= step, job)
    named = re.compile(rf"rank {rank}\b.*step \d+")
    return _after_kill(
        ground, job, rank, lambda output: None if named.search(output) else "no line names the rank and its step"
    )


def _after_kill(ground: Ground, job: list, rank: int, flaw: Callable[[str], str | None]) -> Verdict:
    """What the other rank makes of it."""
    job[rank].kill()
    struck = time.monotonic()
    ended = ground.launchers.finish(job, struck - job[0].began + ALONE_SECONDS)
    crash = crashed(ended, killed=True)
    if crash:
        return crash
    if ended.well:
        return Verdict("right", "the kill came after its end")
    alone = time.monotonic() - struck
    fault = flaw(ended.output)
    detail = f"the other ended {alone:.0f} s later: {last_words(ended)}"
    return Verdict("broken promise", f"{fault}; {detail}") if fault else Verdict("refused", detail)
