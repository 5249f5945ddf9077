"""Folders below data.cache_dir: written aside, renamed once they are complete, and compared with their digests whenever
they are found.

Leftovers of killed processes are removed, or continued.
"""

import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from eagle3.console import Say, Warned
from eagle3.durable import DAMAGE, file_digest, lock, read_sealed, sealed, writing
from eagle3.errors import UserError

LOCK = "owner.lock"
RECORD = "record.json"  # the digests of the other files, sealed under the folder's name
# What tokenised data, downloads and demo targets are written into. It outlives its owner, so that the next process can
# go on with what is in it.
UNFINISHED = re.compile(r"\.([0-9a-f]{32}|.+-[0-9a-f]{16})\..+\.unfinished")
QUIET_SECONDS = 86_400.0


class Unresumable(UserError):
    """An error after which what was written into a resumable folder is of no more use."""


def found(folder: Path, what: str, report: Say) -> bool:
    """Whether the folder is there, and is as it was written under this name. Warns of one that is not: it will be made
    again. what: the folder's contents, in words"""
    if not os.path.lexists(folder):
        return False
    damage = _damage(folder)
    if damage is not None:
        report(Warned(f"{what} {folder} is damaged ({damage:.200}); making it again"))
        return False
    with suppress(OSError), _held(_unfinished(folder)):  # of no more use, unless a process is at work in it
        _remove(_unfinished(folder))
    return True


def _damage(folder: Path) -> str | None:
    """None if all files of a folder are as they were written, and under this name."""
    try:
        for name, digest in read_sealed(folder / RECORD, folder.name)["files"].items():
            if file_digest(folder / name) != digest:
                return f"{name} does not fit its digest"
    except DAMAGE as error:
        return str(error)
    return None


@contextmanager
def replacing_folder(folder: Path, resumable: bool = False) -> Iterator[Path]:
    """Provide a temporary folder to write into, which then gets its record and replaces `folder`, unless a faster
    process has put a whole one there. Raises UserError if it cannot be written.

    resumable: if the caller's block ends early, what it has written stays for the next call. A disk that cannot take
    more, and Unresumable, still remove it.

    A reader sees the old folder, briefly none, or the complete new one, and after an exception the old one. Files that
    a reader has open stay readable.
    """
    remedy = "free space, or set data.cache_dir (of regenerate.py: --cache-dir) to a folder that this user may write"
    with writing(folder.parent, remedy):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder.parent)
        temporary, owner = _claimed(folder)
        with owner:
            try:
                replacement = temporary / "new"
                replacement.mkdir(exist_ok=True)
                yield replacement
                digests = {path.name: file_digest(path) for path in replacement.iterdir() if path.name != RECORD}
                (replacement / RECORD).write_text(json.dumps(sealed({"files": digests}, folder.name)))
                _put(replacement, folder)
            except BaseException as error:
                if not resumable or isinstance(error, (OSError, Unresumable)):
                    _remove(temporary)
                raise
            _remove(temporary)


def _claimed(folder: Path) -> tuple[Path, BinaryIO]:
    """A folder for what will be `folder`, found or made, and the file that locks it."""
    temporary = _unfinished(folder)
    with suppress(OSError):  # another process or user has it, or there are no locks
        temporary.mkdir(exist_ok=True)
        return temporary, _held(temporary)
    prefix = temporary.name.removesuffix("unfinished")
    temporary = Path(tempfile.mkdtemp(prefix=prefix, suffix=".unfinished", dir=folder.parent))
    file = (temporary / LOCK).open("wb")
    lock(file)
    return temporary, file


def _unfinished(folder: Path) -> Path:
    host = re.sub("[^A-Za-z0-9_-]", "_", socket.gethostname())  # locks may not reach other hosts
    return folder.with_name(f".{folder.name}.{host}.unfinished")


def _held(folder: Path) -> BinaryIO:
    """The file that locks a folder, locked. Raises BlockingIOError if another process may have it."""
    file = (folder / LOCK).open("a+b")
    if lock(file) == "held" and os.path.samestat(os.fstat(file.fileno()), (folder / LOCK).stat()):
        return file
    file.close()
    raise BlockingIOError(f"{folder} is locked")


def _put(replacement: Path, folder: Path) -> None:
    """Give a folder its name, unless a whole one has it, which a process may be reading."""
    while True:
        try:
            replacement.rename(folder)
            return
        except OSError:  # there is an older one, or another process has just put one there
            if not os.path.lexists(folder):
                raise
        if _damage(folder) is None:
            return
        previous = Path(tempfile.mkdtemp(dir=replacement.parent)) / folder.name  # a link takes no folder's place
        with suppress(FileNotFoundError):  # another process was faster
            folder.rename(previous)


def _remove(temporary: Path) -> None:
    """Remove a temporary folder. It gets a name of its own first, because a process that claimed it after its lock file
    is gone would lose what it writes."""
    with suppress(OSError):
        prefix = temporary.name.removesuffix("unfinished")
        shutil.rmtree(temporary.rename(temporary.with_name(f"{prefix}{secrets.token_hex(4)}.unfinished")))


def _remove_leftovers(folder: Path) -> None:
    """Remove what has not changed for a day, and no process is at work in. Not earlier: what a killed process left is
    for the next one that makes the same."""
    for leftover in folder.iterdir():
        with suppress(OSError):  # its owner is just finishing
            if (
                UNFINISHED.fullmatch(leftover.name)
                and time.time() - max(path.lstat().st_mtime for path in (leftover, *leftover.rglob("*")))
                > QUIET_SECONDS
            ):
                with _held(leftover):
                    _remove(leftover)
