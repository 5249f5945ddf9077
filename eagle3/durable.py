"""Files that survive a kill: whole under their name, or not there."""

import os
from contextlib import suppress
from pathlib import Path
from secrets import token_hex


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text`; a kill leaves the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    publish(partial, path)


def create_text(path: Path, text: str) -> None:
    """Write `text` unless `path` exists; of several processes that do so at a time one wins, and a kill leaves a whole
    file or none."""
    temporary = path.with_name(f".{path.name}.{token_hex(4)}")
    try:
        temporary.write_text(text, encoding="utf-8")
        flush(temporary)
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)


def publish(partial: Path, path: Path) -> None:
    """Give a finished file or folder its name once its bytes are on disk; the name is on disk before this returns."""
    flush(partial)
    partial.replace(path)
    flush(path.parent)


def move_aside(path: Path) -> Path:
    """Rename what an earlier run left to the first free name: run -> run.1, result.json -> result.1.json."""
    stem, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    number = 1
    while (aside := path.with_name(f"{stem}.{number}{suffix}")).exists():
        number += 1
    path.rename(aside)
    return aside


def flush(path: Path) -> None:
    """fsync a file, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
