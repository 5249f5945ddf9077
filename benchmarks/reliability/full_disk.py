"""A disk that fills up: tokenised cache, store, checkpoints, export; then room, and the same command again.

Each try has a tmpfs of its own, cut to so many bytes more than is used: for cache, store and checkpoints before the
command, for the export at the moment when the last checkpoint is there. Needs the right to mount: root, or `unshare
-Urm`.
"""

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ground import Ground, require, run_difference, store_difference
from launching import LIMIT, Ended
from tries import Case, NotHere, Verdict, crashed, judge, last_words, warned

KINDS = ("cache", "store", "checkpoint", "export")
# Shares of what an undisturbed command leaves on the disk.
LEVELS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99)
ROOM, PAGE = 256 << 20, 4096
STEPS = 6
LAST = f"step-{STEPS:08d}"


def cases(ground: Ground, dice: random.Random) -> Iterator[Case]:
    with small_disk(ground.empty("probe")):
        pass
    for kind in KINDS:
        for level in LEVELS:
            yield Case(f"{kind}, room for {level:.0%}", lambda kind=kind, level=level: fill(ground, kind, level))


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A tmpfs mounted on `folder`. Raises NotHere."""
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "none", str(folder)], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        raise NotHere(f"no right to mount ({mount.stderr.strip()}); run as root, or in `unshare -Urm`")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def used(disk: Path) -> int:
    stats = os.statvfs(disk)
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize


def resize(disk: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


def _start(ground: Ground, kind: str, folder: Path, disk: Path) -> list[str]:
    """The command, what `kind` names on the disk."""
    rows = {"cache": 600, "store": 200}.get(kind, 24)
    recipe = ground.recipe(
        folder,
        rows=rows,
        data={"train": [str(folder / "conversations.jsonl")], "held_out_fraction": 0.25, "workers": 1}
        | {"cache_dir": str((disk if kind == "cache" else folder) / "cache")},
        hidden_states={"path": str((disk if kind == "store" else folder) / "store")},
        training={"max_steps": STEPS if kind in ("checkpoint", "export") else 2},
        output={"dir": str((disk if kind in ("checkpoint", "export") else folder) / "run")},
    )
    if kind == "store":
        return ["launchers/capture.py", "--recipe", str(recipe)]
    return ["launchers/train.py", "--recipe", str(recipe), "--resume", "auto"]


def _undisturbed(ground: Ground, kind: str) -> Path:
    """The result, beside the number of bytes that it takes on a disk."""

    def make(folder: Path) -> None:
        disk = folder / "disk"
        disk.mkdir()
        with small_disk(disk):
            require(ground.launchers.run(*_start(ground, kind, folder, disk)))
            counted = disk / "run" / "export" if kind == "export" else disk
            files = [path for path in counted.rglob("*") if path.is_file()]
            pages = sum(-(-file.stat().st_size // PAGE) for file in files)
            (folder / "bytes").write_text(str(pages * PAGE), encoding="utf-8")
            subprocess.run(["cp", "-r", f"{disk}/.", str(folder / "kept")], check=True)

    return ground.once(ground.undisturbed / f"full_disk of {kind}", make)


def fill(ground: Ground, kind: str, level: float) -> Verdict:
    whole, folder = _undisturbed(ground, kind), ground.empty("full_disk")
    disk = folder / "disk"
    disk.mkdir()
    room = int(level * int((whole / "bytes").read_text(encoding="utf-8"))) // PAGE * PAGE
    with small_disk(disk):
        command = _start(ground, kind, folder, disk)
        if kind == "export":
            ended = _cut_at_export(ground, command, disk, room)
        else:
            resize(disk, used(disk) + room + PAGE)  # the page of a folder that is the disk's own
            ended = ground.launchers.run(*command)
        resize(disk, ROOM)
        crash = crashed(ended)
        if crash:
            return crash._replace(detail=f"{room >> 10} KB free: {crash.detail}")
        hurt = not ended.well or warned(ended)
        words, again = last_words(ended), ground.launchers.run(*command) if hurt else ended
        verdict = judge(again, lambda: _difference(kind, folder, disk, whole), good="continued" if hurt else "right")
        left = [] if verdict.outcome not in ("right", "continued") else leftovers(disk)
    if verdict.outcome == "refused":
        return Verdict("lost", f"{room >> 10} KB free: with room: {verdict.detail}")
    if left:
        return Verdict("broken promise", f"{room >> 10} KB free: left behind for good: {left[0]} ({len(left)} in all)")
    return verdict._replace(detail=f"{room >> 10} KB free: {words}; with room: {verdict.detail}")


def _cut_at_export(ground: Ground, command: list[str], disk: Path, room: int) -> Ended:
    """Stop the process when its last checkpoint has its name, cut the disk, let it go on."""
    process = ground.launchers.start(*command)
    while not (disk / "run" / "checkpoints" / LAST).exists() and ground.launchers.alive([process]):
        time.sleep(0.0002)
    if process.ended is None:
        os.kill(process.pid, signal.SIGSTOP)
        assert not (disk / "run" / "export" / "model.safetensors").exists(), "looked too late"
        resize(disk, used(disk) + room)
        os.kill(process.pid, signal.SIGCONT)
    return ground.launchers.finish([process], LIMIT)


def _difference(kind: str, folder: Path, disk: Path, whole: Path) -> str | None:
    if kind == "store":
        return store_difference(disk / "store", whole / "kept" / "store")
    if kind == "cache":
        return run_difference(folder / "run", whole / "run")
    return run_difference(disk / "run", whole / "kept" / "run")


def leftovers(disk: Path) -> list[str]:
    """Half-written files and folders that nobody will look at again."""
    names = (path for path in disk.rglob("*") if path.name.startswith(".") or path.suffix == ".partial")
    return [str(path.relative_to(disk)) for path in names if path.suffix != ".lock"]
