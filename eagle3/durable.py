"""Files that survive a kill or a full disk: whole under their name, or not there. Locks that a kill releases.
Digests that tell what has changed."""

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from safetensors import SafetensorError

from eagle3.errors import UserError


class Lock(Enum):
    """What became of an attempt to lock a file. UNKNOWN: its file system has no locks."""

    HELD = "held"
    TAKEN = "taken"
    UNKNOWN = "unknown"


def lock(file: BinaryIO) -> Lock:
    """Lock a file (flock) for as long as it is open and this process lives, without waiting for another's lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.TAKEN
    except OSError:
        return Lock.UNKNOWN
    return Lock.HELD


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Around what writes `path`: raises UserError where it cannot be. remedy: beginning with "free space", in whose place another
    remedy stands where it is not space that is missing."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        place = next(place for place in (path, *path.absolute().parents) if place.exists())
        if getattr(error, "errno", errno.ENOSPC) in (errno.ENOSPC, errno.EDQUOT):
            reason += f"; {shutil.disk_usage(place).free / 2**30:.3g} GiB are free"
        else:
            remedy = remedy.replace("free space", "make it writable for this user", 1)
        raise UserError(f"{path}: cannot be written ({reason}); {remedy}") from error


def file_digest(path: Path) -> str:
    """SHA-256 of a file, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str, private: bool = False) -> None:
    """Replace `path` by `text`; a kill or a full disk leaves the old file or the new one. private: only its owner may read
    it."""
    write_bytes(path, text.encode("utf-8"), private)


def replace_text(path: Path, text: str) -> Path | None:
    """As `write_text`, but a file that is there is moved aside, once `text` is on disk; returns where to."""
    return write_bytes(path, text.encode("utf-8"), aside=True)


def write_bytes(path: Path, content: bytes, private: bool = False, aside: bool = False) -> Path | None:
    """As `write_text`, and with `aside` as `replace_text`."""
    partial, moved = path.with_name(path.name + ".partial"), None
    try:
        with partial.open("wb") as file:
            if private:
                os.fchmod(file.fileno(), 0o600)  # before there is anything to read
            file.write(content)
        if aside and path.exists():
            flush(partial)  # before the earlier one loses its name
            moved = move_aside(path)
        publish(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return moved


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


def move_aside(path: Path, name: Path | None = None) -> Path:
    """Rename what an earlier run left to the first free name: run -> run.1, result.json -> result.1.json. name: after which
    it is called, where that is not its own."""
    name = name or path
    stem, suffix = (name.name, "") if path.is_dir() else (name.stem, name.suffix)
    number = 1
    while (aside := name.with_name(f"{stem}.{number}{suffix}")).exists():
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
