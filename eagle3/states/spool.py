"""Where a running target leaves hidden states for a job: a folder of one-sample shards, gone when the job is.

    SPOOL/JOB/owner.lock            locked while the job's owner lives; who finds it free may sweep the folder
    SPOOL/JOB/SHARD.safetensors     one sample, in the store's own format, with every row's last hidden state
    SPOOL/JOB/SHARD.json            its index; written last, so the sample is there when its index is
    SPOOL/JOB/SHARD.failed          why there will be no such sample
    SPOOL/JOB/SHARD.read-N          reader N has what it wants of it

Nothing else is shared by who makes hidden states and who reads them: no process group, no socket. Both run as one user,
to whom alone the folder belongs: /dev/shm, where it lies as a rule, is everybody's.
"""

import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO, NamedTuple, Self

import torch
from torch import Tensor

from eagle3.durable import write_text
from eagle3.errors import SharedUserError, UserError
from eagle3.states.rows import Rows
from eagle3.states.store.files import LocalFiles
from eagle3.states.store.reader import HiddenStateStore, Location, RowRequest
from eagle3.states.store.shard import ShardIndex, hold, index_name

LOCK = "owner.lock"
HELD = b"held\n"
GONE = ".gone-"
JOB = re.compile(f"({re.escape(GONE)})?[0-9a-f]{{16}}")
POLL_SECONDS = 0.002
# A reader that finds nothing looks whether the owner lives, as often.
OWNER_SECONDS = 1.0
HEADER = "eagle3"
# Whoever may ask a server may choose an id; it names a file below the spool's folder, or nothing.
REQUEST = re.compile(HEADER + r":([0-9a-f]{16}):(shard-[0-9a-f]{8}-\d{47,}\.safetensors):([0-9a-f]{32}):(\d+)")


class Ticket(NamedTuple):
    """A sample that a job asked for; its text is the request's id, which is all that the target's side is told.

    shard: the name of the file it will lie in. tokens: how many rows make it whole.
    """

    job: str
    shard: str
    sample_id: str
    tokens: int

    @classmethod
    def of(cls, job: str, sample_id: str, tokens: int, time_asked: int) -> Self:
        """time_asked: how often that many tokens of the sample were asked for before; who counts the same comes to the
        same name. sample_id: hexadecimal, 32 digits."""
        return cls(job, f"shard-{time_asked:08x}-{int(sample_id, 16):039d}{tokens:08d}.safetensors", sample_id, tokens)

    @property
    def text(self) -> str:
        return ":".join((HEADER, self.job, self.shard, self.sample_id, str(self.tokens)))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """None for the id of a request that is not this project's."""
        found = REQUEST.fullmatch(text)
        return found and cls(found[1], found[2], found[3], int(found[4]))

    @property
    def index(self) -> str:
        return index_name(self.shard)

    def mark(self, kind: str) -> str:
        return self.shard.removesuffix(".safetensors") + f".{kind}"


class Spool(AbstractContextManager):
    """A job's own folder, made by its owner and removed by `close`, with whatever is in it.

    Raises UserError where `folder` cannot be written, is not this user's alone, or has no room for the `most_bytes` that
    may wait there.
    """

    def __init__(self, folder: str | Path, report: Callable[[str], None] = print, most_bytes: int = 0) -> None:
        self.folder = Path(folder)
        self.job = token_hex(8)
        self.path = self.folder / self.job
        own_folder(self.folder)
        try:
            swept = sweep(self.folder)
            free = shutil.disk_usage(self.folder).free
            if free < most_bytes:
                raise UserError(
                    f"target.spool: {folder} has {free / 2**30:.3g} GiB free, {most_bytes / 2**30:.3g} may wait there; lower "
                    "target.spool_gib, or name another folder (in a container: give /dev/shm more)"
                )
            self.path.mkdir(mode=0o700)
            self._lock = (self.path / LOCK).open("wb")
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        hold(self._lock)
        self._lock.write(HELD)  # from now on a free lock means a dead owner
        self._lock.flush()
        if swept:
            report(f"{folder}: removed what {swept} ended job{'s' if swept > 1 else ''} had left")

    def readers(self, ticket: Ticket, count: int) -> int:
        """How many of `count` readers have what they want."""
        return sum((self.path / ticket.mark(f"read-{reader}")).exists() for reader in range(count))

    def remove(self, ticket: Ticket, readers: int) -> None:
        """Delete a sample and its marks."""
        marks = [ticket.mark("failed"), *(ticket.mark(f"read-{reader}") for reader in range(readers))]
        for name in (ticket.index, ticket.shard, *marks):
            (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        _remove(self.path)
        self._lock.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def own_folder(folder: Path) -> None:
    """Make a spool for this user alone, or check that it is one. Raises UserError where it cannot be made, or others may
    write there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = _not_ours(folder)
    except OSError as error:
        raise _unwritable(folder, error) from error
    if problem:
        raise UserError(
            f"target.spool: {folder} {problem}, so others could read or change what is trained on; name a folder that "
            "is not there yet, on the same file system"
        )


def is_own_folder(folder: Path) -> bool:
    try:
        return not _not_ours(folder)
    except OSError:
        return False


def _not_ours(folder: Path) -> str:
    """Why others may write into the folder; nothing where they may not."""
    found = folder.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "is a symbolic link"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to {os.geteuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"may be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(f"target.spool: {folder} cannot be written ({error}); name another folder")


def sweep(folder: Path) -> int:
    """Remove the folders of this user's jobs whose owner is dead; how many there were. Nothing else in `folder` is
    touched, and no link followed."""
    swept = 0
    with os.scandir(folder) as entries:
        jobs = [Path(entry) for entry in entries if JOB.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)]
    for job in jobs:
        with suppress(OSError):  # another job sweeps, too; or it is not ours to look into
            if job.lstat().st_uid != os.geteuid():
                continue
            if job.name.startswith(GONE):
                shutil.rmtree(job, ignore_errors=True)
            elif _abandoned(job):
                _remove(job)
                swept += 1
    return swept


def _abandoned(job: Path) -> bool:
    """Whether a job's owner has locked this folder once and is dead."""
    with open(job / LOCK, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW)) as file:
        return file.read(len(HELD) + 1) == HELD and not _is_held(file)


def _remove(job: Path) -> None:
    """Renamed first, so that who still writes there by path finds nothing, and cannot add to what is being deleted."""
    gone = job.with_name(GONE + job.name)
    with suppress(FileNotFoundError):
        job.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def fail(folder: Path, ticket: Ticket, reason: str) -> None:
    """Say in a job's folder why a sample will not come; nothing where the job is gone."""
    with suppress(FileNotFoundError):
        write_text(folder / ticket.mark("failed"), reason)


class SpoolReader:
    """Reads samples of a job's folder as they come. number: of this reader among those who read every sample."""

    def __init__(self, path: Path, number: int) -> None:
        self.path, self.number = path, number
        self.files = LocalFiles(path)
        self.store = HiddenStateStore(self.files, {}, {}, provenance_digest=None)  # the folder is one job's

    def wait(self, ticket: Ticket) -> Location:
        """Until the sample is there. Raises UserError where it failed, or where the job's owner is gone."""
        index, failed, looked = self.path / ticket.index, self.path / ticket.mark("failed"), time.monotonic()
        while not index.exists():
            with suppress(FileNotFoundError):  # as a rule; or the owner has just removed all
                raise SharedUserError(failed.read_text(encoding="utf-8"))
            if time.monotonic() - looked > OWNER_SECONDS:
                looked = time.monotonic()
                os.listdir(self.path.parent)  # a network file system then looks again at what it took for absent
                self._require_owner()
            time.sleep(POLL_SECONDS)
        try:
            found = ShardIndex.parse(index.read_bytes(), ticket.index, str(self.path))
        except FileNotFoundError:
            raise self._owner_gone() from None
        entry = found.samples[0]
        if (entry.id, entry.tokens) != (ticket.sample_id, ticket.tokens):
            raise SharedUserError(
                f"{index}: holds another sample ({entry.id}, {entry.tokens} tokens); start the job again"
            )
        return Location(found, entry)

    def read(self, location: Location, aux: Tensor, teacher: Tensor) -> Rows:
        """Rows of a sample, as `RowRequest` has them; each row may be read."""
        return self.store.read_at([location], [RowRequest(location.entry.id, aux, teacher)])[0]

    def require_tokens(self, location: Location, ids: Tensor) -> None:
        """Raises UserError unless the sample was made from these ids [T]."""
        if not torch.equal(self.store.tokens_at([location])[0].ids, ids.long()):
            raise UserError(
                f"{self.path}: hidden states of sample {location.entry.id} belong to other tokens; a server that "
                "serves from a cache does that: start it as launchers/capture.py --print-server says"
            )

    def done(self, ticket: Ticket) -> None:
        """This reader has all it wants; the sample may go when all have."""
        self.forget(ticket)
        (self.path / ticket.mark(f"read-{self.number}")).touch()

    def forget(self, ticket: Ticket) -> None:
        """Let go of the sample's memory map: on tmpfs a deleted file takes memory while it is mapped."""
        self.store.forget(ticket.shard)
        self.files.forget(ticket.shard)

    def _require_owner(self) -> None:
        with suppress(FileNotFoundError), (self.path / LOCK).open("rb") as file:
            if _is_held(file):
                return
        raise self._owner_gone()

    def _owner_gone(self) -> SharedUserError:
        return SharedUserError(
            f"{self.path}: the process that asks the target for hidden states has ended; see what it said, and continue with "
            "--resume"
        )


def _is_held(file: BinaryIO) -> bool:
    """Whether a live process holds the lock; True where the file system cannot say."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False
