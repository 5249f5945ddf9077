"""Writes what a forward captured into a job's spool, inside an engine, from threads of its own."""

import logging
import shutil
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.durable import writing
from eagle3.states.rows import KeptRows, Rows
from eagle3.states.spool import REMEDY, Ticket, WantedRows, fail, foreign, is_wanted, spool_bytes
from eagle3.states.store.shard import Encoding
from eagle3.states.store.writer import ShardWriter

ENCODING_THREADS = 2
# Most bytes that one writer may have queued for the spool; beyond that, the forward waits.
MOST_WAITING = 1 << 30

logger = logging.getLogger(__name__)


class RequestRows(NamedTuple):
    """The rows of one request in a forward."""

    ticket: Ticket
    owner: int  # the rank that writes them; every rank has all hidden states
    start: int  # where they begin among the forward's tokens
    rows: slice  # where they are in the sample
    wanted: WantedRows  # of the whole sample

    @property
    def seen(self) -> Tensor:
        """[n] bool: those whose auxiliary states are wanted."""
        return self.wanted.seen[self.rows]

    @property
    def taught(self) -> Tensor:
        """[n] bool: those whose predictions are wanted."""
        return self.wanted.taught[self.rows]

    def places(self, mask: Tensor) -> Tensor:
        """Where the rows of a mask [n] are among the forward's tokens."""
        return mask.nonzero().flatten() + self.start


class SpoolWriter:
    """Writes rows from one thread, in the order in which they arrive. Only complete samples appear in a job's
    folder."""

    def __init__(self, folder: Path, encoding: Encoding) -> None:
        self.folder, self.encoding, self.dtype = folder, encoding, encoding.number_format
        self.open: dict[Ticket, SampleShard] = {}
        self.waiting = 0
        self.room = threading.Condition()
        self.encoders = ThreadPoolExecutor(ENCODING_THREADS, thread_name_prefix="spool-encode")
        # Without this, the thread's GPU would be the machine's first, whichever this rank's is.
        own_gpu = (torch.cuda.set_device, (torch.cuda.current_device(),)) if torch.cuda.is_available() else ()
        self.thread = ThreadPoolExecutor(1, "spool", *own_gpu)
        self.copies: torch.cuda.Stream | None = None  # made with the first rows on a GPU

    def take(self, share: RequestRows, ids: Tensor, rows: Rows) -> None:
        """Queue the wanted rows of a share. Returns once their copy to the host is under way.

        ids: [n], of all the share's tokens
        """
        event = None
        if rows.aux.is_cuda:
            self.copies = self.copies or torch.cuda.Stream(rows.aux.device)
            self.copies.wait_stream(torch.cuda.current_stream(rows.aux.device))
        with torch.cuda.stream(self.copies):  # none on a CPU
            teacher = replace(rows.teacher, values=rows.teacher.values.to(self.dtype))
            on_host, ids_on_host = Rows(rows.aux.to(self.dtype), teacher).map(_to_host), _to_host(ids)
            if self.copies:
                event = self.copies.record_event()
        if self.copies:
            for tensor in (ids, *rows.named().values()):  # whose memory the forward may use again after the copy
                tensor.record_stream(self.copies)
        size = sum(tensor.nbytes for tensor in on_host.named().values())
        with self.room:
            self.room.wait_for(lambda: not self.waiting or self.waiting + size <= MOST_WAITING)
            self.waiting += size
        self.thread.submit(self._deliver, share, ids_on_host, on_host, event, size)

    def refuse(self, ticket: Ticket, reason: str) -> None:
        """Tell the job why it will not get a sample, once what was queued before is written."""
        self.thread.submit(self.give_up, ticket, reason)

    def _deliver(self, share: RequestRows, ids: Tensor, rows: Rows, event: torch.cuda.Event | None, size: int) -> None:
        """Write rows that were queued.

        event: recorded after the copies to the host; None if those are complete
        size: size of the rows in bytes
        """
        try:
            if event:
                event.synchronize()
            with writing(self.folder, REMEDY):
                self._write(share, ids, rows)
        except Exception as error:  # whatever went wrong, the job must be told
            self.give_up(share.ticket, str(error) or repr(error))
        finally:
            with self.room:
                self.waiting -= size
                self.room.notify_all()

    def _write(self, share: RequestRows, ids: Tensor, rows: Rows) -> None:
        ticket, first_row = share.ticket, share.rows.start
        job = self.folder / ticket.job
        if first_row == 0 and ticket in self.open:  # the engine has retracted the request and starts over
            self.open.pop(ticket).discard()
        for stale_ticket in [other for other in self.open if not (self.folder / other.job).is_dir()]:
            self.open.pop(stale_ticket).discard()
        if not self._there(job):  # the job has ended, or this machine does not share the folder
            return
        if ticket not in self.open:
            if first_row:
                if not (job / ticket.mark("failed")).exists():
                    self.give_up(
                        ticket,
                        f"row {first_row} of a sample came first, the others from a cache; start the engine without a "
                        "prefix cache (SGLang: --disable-radix-cache)",
                    )
                return
            self.open[ticket] = SampleShard(job, ticket, share.wanted, self.encoding, self.encoders)
        shard = self.open[ticket]
        if shard.sample.tokens != first_row:
            self.give_up(ticket, f"rows {shard.sample.tokens} to {first_row} of a sample never came")
            return
        shard.append(ids, share.wanted.loss_mask[share.rows], KeptRows(share.seen, share.taught, rows))
        if shard.sample.tokens >= ticket.tokens:
            shard.publish()
            del self.open[ticket]

    def _there(self, job: Path) -> bool:
        """Whether a job is waiting there. The spool must be our own folder: a link in somebody else's could lead
        anywhere."""
        return job.is_dir() and not foreign(self.folder)

    def give_up(self, ticket: Ticket, reason: str) -> None:
        """Tell the job why it will not get a sample."""
        logger.error("%s: %s", ticket.text, reason)
        try:
            if ticket in self.open:
                self.open.pop(ticket).discard()
            if self._there(job := self.folder / ticket.job) and is_wanted(job, ticket):
                fail(job, ticket, reason)
        except Exception as error:  # again, whatever went wrong
            logger.error("%s: the job cannot be told: %r", ticket.text, error)


class SampleShard(ShardWriter):
    """A sample being written to a job's folder. It is written in a separate folder, so that another server with the
    same request cannot interfere, and then moved."""

    def __init__(self, job: Path, ticket: Ticket, wanted: WantedRows, encoding: Encoding, encoders: Executor) -> None:
        self.job, self.ticket = job, ticket
        encoding = replace(encoding, reach=wanted.reach)
        teacher_bytes = int(wanted.taught.sum()) * encoding.width("last") * encoding.number_format.itemsize
        folder = job / f"writing-{token_hex(6)}"
        folder.mkdir()
        try:
            super().__init__(folder, ticket.shard, encoding, encoders, provenance_digest=None)
            self.reserve(spool_bytes(encoding, wanted), teacher_bytes)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.begin(ticket.sample_id)

    def publish(self) -> None:
        self.end()
        super().publish()
        place = self.job / self.shard
        # Another server may have been faster. Then its sample is in use, or was, and is not wanted any more.
        if is_wanted(self.job, self.ticket) and not place.exists():
            (self.folder / self.shard).replace(place)
            if not is_wanted(self.job, self.ticket):  # since that moment
                place.unlink(missing_ok=True)
        self.discard()

    def discard(self) -> None:
        super().discard()
        shutil.rmtree(self.folder, ignore_errors=True)


def _to_host(tensor: Tensor) -> Tensor:
    """Copy to the host. A copy from a GPU is in pinned memory, and complete once an event recorded now completes."""
    if not tensor.is_cuda:
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
