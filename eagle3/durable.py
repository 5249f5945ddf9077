"""Files that survive a kill: whole under their name, or not there."""

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text`; a kill leaves the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    publish(partial, path)


def publish(partial: Path, path: Path) -> None:
    """Give a finished file or folder its name once its bytes are on disk; the name is on disk before this returns."""
    flush(partial)
    partial.replace(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """fsync a file, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
