"""Write safely below data.cache_dir: into a temporary folder, which is renamed once it is complete.

Leftovers of killed processes are removed.
"""

import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from eagle3.durable import Lock, lock, writing
from eagle3.errors import UserError
from eagle3.sealed import DAMAGE

LOCK = "owner.lock"  # holds the host's name
# Temporary names of tokenised data, downloads and demo targets.
OURS = re.compile(r"\.([0-9a-f]{32}|.+-[0-9a-f]{16}\.jsonl|demo-target-[0-9a-f]{16})\.[a-z0-9_]{8}")
# Such a folder outlives its owner, so that the next process on that host can go on with what is in it.
UNFINISHED = re.compile(r"\.([0-9a-f]{32}|demo-target-[0-9a-f]{16})\.[A-Za-z0-9_-]*\.unfinished")
QUIET_SECONDS = 86_400.0


class Unresumable(UserError):
    """An error after which what was written into a resumable folder is of no more use."""


@contextmanager
def beside(path: Path, resumable: bool = False) -> Iterator[Path]:
    """Provide a temporary folder beside `path`, and remove it at the end. Raises UserError if the folder cannot be
    created, or if writing into it raises an OSError in the caller's block.

    resumable: if the caller's block ends early, the folder stays, and the next call for `path` provides it again. A
    disk that cannot take more, and Unresumable, still remove it.
    """
    remedy = "free space, or set data.cache_dir (of regenerate.py: --cache-dir) to a folder that this user may write"
    with writing(path.parent, remedy):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        temporary, owner = (_claimed(path) if resumable else None) or _made(path)
        with owner:
            kept = False
            try:
                yield temporary
            except BaseException as error:
                kept = resumable and not isinstance(error, (OSError, Unresumable))
                raise
            finally:
                if not kept:
                    _remove(temporary, path.name)


def _made(path: Path) -> tuple[Path, BinaryIO]:
    """A new temporary folder beside `path`, and the file that locks it."""
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    file = (folder / LOCK).open("wb")
    lock(file)  # without locks, other processes assume that this one lives
    file.write(socket.gethostname().encode())  # an unlocked file with a name means a dead owner
    file.flush()
    return folder, file


def _claimed(path: Path) -> tuple[Path, BinaryIO] | None:
    """This host's unfinished folder for `path`, found or made, and the file that locks it; None if another process may
    have it."""
    folder = _unfinished(path)
    with suppress(OSError):  # another user's, or its owner has just finished
        folder.mkdir(exist_ok=True)
        return folder, _held(folder)
    return None


def _unfinished(path: Path) -> Path:
    host = re.sub("[^A-Za-z0-9_-]", "_", socket.gethostname())  # locks may not reach other hosts
    return path.parent / f".{path.name}.{host}.unfinished"


def _held(folder: Path) -> BinaryIO:
    """The file that locks a folder, locked. Raises BlockingIOError if another process may have it."""
    file = (folder / LOCK).open("a+b")
    if lock(file) is Lock.HELD and os.path.samestat(os.fstat(file.fileno()), (folder / LOCK).stat()):
        return file
    file.close()
    raise BlockingIOError(f"{folder} is locked")


def remove_unfinished(path: Path) -> None:
    """Remove this host's unfinished folder for `path`, which is whole now, unless a process is at work in it."""
    with suppress(OSError), _held(_unfinished(path)):
        _remove(_unfinished(path), path.name)


def _remove(folder: Path, name: str) -> None:
    """Remove a folder of ours. It gets a name of its own first, because a process that claimed it after its lock file
    is gone would lose what it writes. name: of what the folder was for"""
    with suppress(OSError):
        shutil.rmtree(folder.rename(folder.with_name(f".{name}.{secrets.token_hex(4)}")))


@contextmanager
def replacing_folder(
    folder: Path, keep: Callable[[Path], bool] = lambda _: False, resumable: bool = False
) -> Iterator[Path]:
    """Provide a temporary folder to write into, which then replaces `folder`. Raises UserError if it cannot be written.

    keep: decides whether an existing folder stays instead, because a faster process wrote it and may be reading it
    resumable: as for `beside`; the folder holds what an earlier process wrote into it

    A reader sees the old folder, briefly none, or the complete new one, and after an exception the old one. Files that
    a reader has open stay readable.
    """
    with beside(folder, resumable) as temporary:
        replacement = temporary / "new"
        replacement.mkdir(exist_ok=True)
        yield replacement
        while True:
            try:
                os.rename(replacement, folder)
                break
            except OSError:  # there is an older one, or another process has just put one there
                if not os.path.lexists(folder):
                    raise
            if keep(folder):
                break
            previous = Path(tempfile.mkdtemp(dir=temporary)) / folder.name  # a link takes no folder's place
            with suppress(FileNotFoundError):  # another process was faster
                os.rename(folder, previous)
                if keep(previous):  # it appeared between the check and the rename: put it back
                    replacement = previous


def opens(load: Callable[[Path], Any], folder: Path) -> bool:
    """Whether `load`, which checks a whole folder, accepts `folder`, so that it can be kept."""
    try:
        load(folder)
    except DAMAGE:
        return False
    return True


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left half-written in `folder`."""
    for leftover in folder.iterdir():
        ours, unfinished = OURS.fullmatch(leftover.name), UNFINISHED.fullmatch(leftover.name)
        with suppress(OSError):  # its owner is just finishing
            if ours and _is_abandoned(leftover):
                shutil.rmtree(leftover)
            elif unfinished and _is_quiet(leftover):
                with _held(leftover):
                    _remove(leftover, unfinished[1])


def _is_abandoned(leftover: Path) -> bool:
    """Whether the owner is dead. A free lock proves it only if the owner ran on this host, because some file systems do
    not share locks between hosts. If the lock proves nothing, a day without changes counts as proof."""
    with suppress(FileNotFoundError), (leftover / LOCK).open("r+b") as file:  # no file: killed before it had a lock
        host = file.read().decode()
        if lock(file) is not Lock.HELD:  # its owner has it, or there are no locks
            return False
        if host == socket.gethostname():
            return True
    return _is_quiet(leftover)


def _is_quiet(leftover: Path) -> bool:
    return time.time() - max(path.lstat().st_mtime for path in (leftover, *leftover.rglob("*"))) > QUIET_SECONDS
