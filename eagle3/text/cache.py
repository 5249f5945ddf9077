"""Writing below data.cache_dir: beside the final place, renamed when whole; what killed processes left is removed.
Records that show whether a bit of them has flipped."""

import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from eagle3.durable import Lock, lock
from eagle3.errors import UserError

LOCK = "owner.lock"  # it holds the host's name
# Of tokenised data, downloads and demo targets, also as versions without locks named theirs.
OURS = re.compile(r"\.([0-9a-f]{32}\.|.+-[0-9a-f]{16}\.jsonl\.|demo-target-[0-9a-f]{16}[-.])[a-z0-9_]{8}")
QUIET_SECONDS = 86_400.0
# What a record may raise that is damaged, or is none.
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def sealed(record: dict[str, Any]) -> str:
    """As JSON, with a digest of itself."""
    return json.dumps({**record, "digest": _digest(record)}, indent=1)


def unsealed(text: str) -> tuple[dict[str, Any], bool]:
    """The record, and whether it had a digest, as those of older versions have not. Raises one of DAMAGE."""
    record = json.loads(text)
    if "digest" not in record:
        return record, False
    if record.pop("digest") != _digest(record):
        raise ValueError("its digest does not fit")
    return record, True


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:32]


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, removed at the end. Raises UserError, also for an OSError inside: what is done
    there is to write."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            with (temporary / LOCK).open("wb") as file:
                lock(file)  # without locks nobody will take this process for dead
                file.write(socket.gethostname().encode())  # later: who reads it and finds the lock free may remove all
                file.flush()
                yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise _unwritable(path.parent, error.strerror or str(error)) from error


@contextmanager
def replacing_folder(folder: Path, keep: Callable[[Path], bool] = lambda _: False) -> Iterator[Path]:
    """A temporary folder to write into, which then takes the place of `folder`, unless that is one to `keep`: another
    process may have been quicker, and be reading it.

    A reader sees the old folder, for a moment none, or the whole new one; after an exception, the old. Files that a reader
    has open stay readable. Raises UserError where it cannot be written.
    """
    with beside(folder) as temporary:
        written = temporary / "new"
        written.mkdir()
        yield written
        while True:
            try:
                os.rename(written, folder)
                break
            except OSError:  # an older one is there, or one that another process put there meanwhile
                if not folder.exists():
                    raise
            if keep(folder):
                break
            aside = Path(tempfile.mkdtemp(dir=temporary))
            with suppress(FileNotFoundError):  # another process was quicker
                os.rename(folder, aside)
                if keep(aside):  # it came between the look and the rename: back with it
                    written = aside


def opens(read: Callable[[Path], Any], folder: Path) -> bool:
    """Whether `read`, which looks at all of a folder, finds it whole, and so one to keep."""
    try:
        read(folder)
    except DAMAGE:
        return False
    return True


def remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed while they wrote left in `folder`."""
    for left in folder.iterdir():
        if OURS.fullmatch(left.name):
            with suppress(OSError):  # its owner ends just now
                if _is_abandoned(left):
                    shutil.rmtree(left) if left.is_dir() else left.unlink()


def _is_abandoned(left: Path) -> bool:
    """A lock that is free tells that its owner died, if that ran on this host: some file systems keep locks to one host.
    Where no lock tells, a day without a change does."""
    try:
        with (left / LOCK).open("r+b") as file:
            host = file.read().decode()
            if lock(file) is not Lock.HELD:  # by its owner, or nobody can say
                return False
            if host == socket.gethostname():
                return True
    except (FileNotFoundError, NotADirectoryError):
        pass
    newest = max(path.lstat().st_mtime for path in (left, *left.rglob("*")))
    return time.time() - newest > QUIET_SECONDS


def _unwritable(folder: Path, reason: str) -> UserError:
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    with suppress(OSError):
        reason += f", {shutil.disk_usage(there).free / 2**20:,.0f} MiB free now"
    return UserError(
        f"data.cache_dir: {folder} cannot be written ({reason}); free space there, or set data.cache_dir (of regenerate.py: "
        "--cache-dir) to a folder that this user may write"
    )
