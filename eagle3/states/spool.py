"""The spool: a folder in which a target leaves hidden states for a job, as one-sample shards, until the job ends.

    SPOOL/JOB/owner.lock            locked while the job's owner lives; once it is unlocked, the folder may be swept
    SPOOL/JOB/reserve               given up for a SHARD.failed if the disk is full
    SPOOL/JOB/SHARD.wanted          says which rows of a sample are wanted; there from its request to its removal, so
                                    that a sample which comes too late is recognised and dropped
    SPOOL/JOB/SHARD.safetensors     one sample, in the store's format; appears when it is complete
    SPOOL/JOB/SHARD.failed          says why this sample will not come
    SPOOL/JOB/SHARD.read-N          exists once reader N is done with the sample

Producers and readers of hidden states share nothing else: no process group, no socket. Both run as the same user. The
folder must belong to that user alone, because it is usually in /dev/shm, where everybody may write.
"""

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple, Self

import torch
from torch import Tensor

from eagle3.durable import lock, write_text, writing
from eagle3.errors import NO_SPACE, SharedUserError, UserError
from eagle3.parallel.sequence import Reach, covered
from eagle3.parsing import parse_json
from eagle3.states.capture import token_bytes
from eagle3.states.rows import Rows
from eagle3.states.store.files import DamagedStore, LocalFiles
from eagle3.states.store.reader import ANY_TOKEN, HiddenStateStore, Location
from eagle3.states.store.shard import DATA_START, Encoding, read_index, taught_rows

LOCK = "owner.lock"
HELD = b"held\n"
RESERVE, RESERVED = "reserve", 1 << 16  # bytes
GONE = ".gone-"
JOB = re.compile(f"({re.escape(GONE)})?[0-9a-f]{{16}}")
POLL_SECONDS = 0.002
# Seconds after which a waiting reader checks again whether the owner is still alive.
OWNER_SECONDS = 1.0
HEADER = "eagle3"
REMEDY = "free space, or name another folder in target.spool"  # if the spool cannot be written
# Anyone with access to a server can choose a request's id, so only ids that name a file in the spool are accepted.
REQUEST = re.compile(HEADER + r":([0-9a-f]{16}):(shard-[0-9a-f]{8}-\d{47,}\.safetensors):([0-9a-f]{32}):(\d+)")


class Ticket(NamedTuple):
    """A sample that a job has requested. `text` is the request's id; it tells the target's side where to leave rows."""

    job: str
    shard: str  # name of the file that will hold it
    sample_id: str
    tokens: int  # rows of the complete sample

    @classmethod
    def of(cls, job: str, sample_id: str, tokens: int, time_asked: int) -> Self:
        """The ticket for a sample's next request.

        sample_id: 32 hex digits
        time_asked: a number that differs between requests for the same sample and number of tokens: the loader's
            channel, then a count of earlier requests. Ranks that pass the same number get the same file name.
        """
        return cls(job, f"shard-{time_asked:08x}-{int(sample_id, 16):039d}{tokens:08d}.safetensors", sample_id, tokens)

    @property
    def text(self) -> str:
        return ":".join((HEADER, self.job, self.shard, self.sample_id, str(self.tokens)))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The ticket that a request's id stands for; None if the id does not come from this project."""
        match = REQUEST.fullmatch(text)
        return match and cls(match[1], match[2], match[3], int(match[4]))

    def mark(self, kind: str) -> str:
        return self.shard.removesuffix(".safetensors") + f".{kind}"


@dataclass(frozen=True)
class WantedRows:
    """What a job reads of a sample: predictions at the rows that teach, and auxiliary states at the rows that a draft
    of this reach reads."""

    loss_mask: Tensor  # [T] bool
    reach: Reach = Reach()
    every: bool = False  # whether the predictions at all rows are wanted

    @classmethod
    def all(cls, tokens: int) -> Self:
        """Everything of a sample."""
        return cls(torch.zeros(tokens, dtype=torch.bool), every=True)

    @cached_property
    def seen(self) -> Tensor:
        """[T] bool: rows whose auxiliary states are wanted."""
        return self.reach.rows(self.loss_mask)

    @cached_property
    def taught(self) -> Tensor:
        """[T] bool: rows whose predictions are wanted."""
        return torch.ones_like(self.loss_mask) if self.every else taught_rows(self.loss_mask)


def want(folder: Path, ticket: Ticket, rows: WantedRows) -> None:
    """Say in a job's folder that a sample is wanted, and which of its rows."""
    edges = torch.nn.functional.pad(rows.loss_mask.to(torch.int8), (1, 1)).diff().nonzero().flatten().tolist()
    settings = {**rows.reach._asdict(), "every": rows.every}
    write_text(folder / ticket.mark("wanted"), json.dumps({"edges": edges, "settings": settings}))


def wanted_rows(folder: Path, ticket: Ticket) -> WantedRows:
    """The rows that are wanted of a sample. Raises FileNotFoundError if it is not wanted, or no longer."""
    values = parse_json((folder / ticket.mark("wanted")).read_bytes())
    edges = torch.tensor(values["edges"], dtype=torch.long)
    mask = covered(edges[::2], edges[1::2], ticket.tokens)
    return WantedRows(mask, Reach.of(values["settings"]), values["settings"]["every"])


def is_wanted(folder: Path, ticket: Ticket) -> bool:
    return (folder / ticket.mark("wanted")).exists()


def spool_bytes(encoding: Encoding, wanted: WantedRows) -> int:
    """Size of a sample in the spool, without its index and tables, which take a few bytes per chunk."""
    shares = (float(rows.float().mean()) for rows in (wanted.taught, wanted.seen))
    return DATA_START + round(len(wanted.loss_mask) * token_bytes(encoding, *shares))


class Spool(AbstractContextManager):
    """A job's own folder in the spool `folder`. The job's owner creates it, and `close` removes it with all its
    contents.

    Raises UserError if `folder` cannot be written, does not belong to this user alone, or lacks room for the
    `most_bytes` that may wait there.
    """

    def __init__(self, folder: str | Path, report: Callable[[str], None] = print, most_bytes: int = 0) -> None:
        self.folder = Path(folder)
        self.job = token_hex(8)
        self.path = self.folder / self.job
        own_folder(self.folder)
        with writing(self.folder, REMEDY):
            removed_jobs = sweep(self.folder)
            free = shutil.disk_usage(self.folder).free
            if free < most_bytes:
                raise UserError(
                    f"target.spool: {folder} has {free / 2**30:.3g} GiB free, but {most_bytes / 2**30:.3g} may wait "
                    "there; lower target.spool_gib, or name another folder (in a container: give /dev/shm more)"
                )
            self.path.mkdir(mode=0o700)
            self._lock = (self.path / LOCK).open("wb")
            lock(self._lock)
            self._lock.write(HELD)  # from now on, a free lock means a dead owner
            self._lock.flush()
            (self.path / RESERVE).write_bytes(bytes(RESERVED))
        if removed_jobs:
            report(f"{folder}: removed what {removed_jobs} ended job{'s' if removed_jobs > 1 else ''} had left")

    def readers(self, ticket: Ticket, count: int) -> int:
        """Number of readers, out of `count`, that are done with the sample."""
        return sum((self.path / ticket.mark(f"read-{reader}")).exists() for reader in range(count))

    def remove(self, ticket: Ticket, readers: int) -> None:
        """Delete a sample and its marks."""
        marks = map(ticket.mark, ("failed", *(f"read-{reader}" for reader in range(readers))))
        # First the mark: whoever publishes the sample at this moment looks for it afterwards.
        for name in (ticket.mark("wanted"), ticket.shard, *marks):
            (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        _remove(self.path)
        self._lock.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def own_folder(folder: Path) -> None:
    """Create a spool that belongs to this user alone, or check that an existing one does. Raises UserError if it cannot
    be created, or if others may write to it."""
    with writing(folder, REMEDY):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if problem := foreign(folder):
        raise UserError(
            f"target.spool: {folder} {problem}, so others could read or change what is trained on; name a folder that "
            "does not exist yet, on the same file system"
        )


def foreign(folder: Path) -> str:
    """The reason why others may write to the folder; empty if they may not. Raises OSError."""
    status = folder.lstat()
    flaws = {
        "is a symbolic link": stat.S_ISLNK(status.st_mode),
        f"belongs to user {status.st_uid}, not to {os.geteuid()}": status.st_uid != os.geteuid(),
        f"may be written by others (mode {stat.S_IMODE(status.st_mode):o})": status.st_mode & 0o022,
    }
    return next((flaw for flaw, found in flaws.items() if found), "")


def sweep(folder: Path) -> int:
    """Remove the folders of this user's jobs whose owner process has died, and return their number. Folders that an
    earlier sweep left half-removed are removed, too, but not counted. Nothing else in `folder` is touched, and no link
    is followed."""
    count = 0
    jobs = [path for path in folder.iterdir() if JOB.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]
    for job in jobs:
        with suppress(OSError):  # another job is sweeping, too, or we may not look inside
            if job.lstat().st_uid != os.geteuid():
                continue
            if job.name.startswith(GONE):
                shutil.rmtree(job, ignore_errors=True)
            elif _abandoned(job):
                _remove(job)
                count += 1
    return count


def _abandoned(job: Path) -> bool:
    """Whether the job's owner locked this folder at some point and has died since."""
    with open(job / LOCK, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW)) as file:
        return file.read(len(HELD) + 1) == HELD and lock(file) == "held"


def _remove(job: Path) -> None:
    """Delete a job's folder. It is renamed first, so that late writers cannot find it and add files to it."""
    trash = job.with_name(GONE + job.name)
    with suppress(FileNotFoundError):
        job.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def fail(folder: Path, ticket: Ticket, reason: str) -> None:
    """Leave a note in a job's folder that says why a sample will not come. Does nothing if the job is gone."""
    note = folder / ticket.mark("failed")
    with suppress(FileNotFoundError):
        try:
            write_text(note, reason)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            (folder / RESERVE).unlink(missing_ok=True)
            write_text(note, reason)


class SpoolReader:
    """Reads samples from a job's folder as they arrive.

    number: this reader's number among the job's readers; every reader reads every sample
    vocab_size: of the target, see HiddenStateStore
    """

    def __init__(self, path: Path, number: int, vocab_size: int = ANY_TOKEN) -> None:
        self.path, self.number = path, number
        self.store = HiddenStateStore(LocalFiles(path), {}, {}, vocab_size)

    def wait(self, ticket: Ticket, ids: Tensor) -> Location:
        """Wait until the sample is there. Raises UserError if it failed, if it was not made from these ids [T], or if
        the job's owner is gone."""
        shard, failure_note, last_look = self.path / ticket.shard, self.path / ticket.mark("failed"), time.monotonic()
        while not shard.exists():
            with suppress(FileNotFoundError):  # there is usually no note, or the owner has just removed everything
                raise SharedUserError(failure_note.read_text(encoding="utf-8"))
            if time.monotonic() - last_look > OWNER_SECONDS:
                last_look = time.monotonic()
                os.listdir(self.path.parent)  # makes a network file system look again for files that were absent
                self._require_owner()
            time.sleep(POLL_SECONDS)
        try:
            index = read_index(self.store.files, ticket.shard)
            location = Location(index, index.samples[0])
            (stored,) = self.store.tokens_at([location])
        except DamagedStore as error:
            raise self._bad(ticket.tokens, error) from error
        if not torch.equal(stored.ids, ids.long()):
            raise UserError(
                f"{self.path}: hidden states of sample {ticket.sample_id} belong to other tokens; a server that serves "
                "from a cache does that: start it as launchers/capture.py --print-server says"
            )
        return location

    def read(self, location: Location, aux: Tensor, teacher: Tensor) -> Rows:
        """Read rows of a sample (see `RowNumbers`), which must be there (`kept`). Raises UserError if the bytes are not
        those that a server wrote, or predictions are out of range."""
        try:
            return self.store.read_at([location], [(aux, teacher)])[0]
        except DamagedStore as error:
            raise self._bad(location.entry.tokens, error) from error

    def _bad(self, tokens: int, error: DamagedStore) -> UserError:
        self._require_owner()  # who removes everything when it ends
        return UserError(
            f"{self.path}: SGLang left a bad sample of {tokens:,} tokens ({error.flaw}); look at its log, start it as "
            "launchers/capture.py --print-server says, and continue (train.py with --resume)"
        )

    def kept(self, location: Location) -> tuple[Tensor, Tensor]:
        """Masks [T] of a sample's rows whose auxiliary states, and whose predictions, are there."""
        return location.kept(self.store.tokens_at([location])[0].loss_mask)

    def done(self, ticket: Ticket) -> None:
        """Mark the sample as read by this reader. It is deleted once all readers have marked it."""
        (self.path / ticket.mark(f"read-{self.number}")).touch()

    def _require_owner(self) -> None:
        """Raises UserError if the owner is gone. If the file system has no locks, the owner counts as alive."""
        with suppress(FileNotFoundError), (self.path / LOCK).open("rb") as file:
            if lock(file) != "held":
                return
        raise SharedUserError(
            f"{self.path}: the process that requests hidden states from the target has ended; see its output, and "
            "continue with --resume"
        )
