"""Writes what a hook saw into jobs' folders: a sample's rows as they come, whole samples under their names."""

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

from eagle3.states.rows import Rows
from eagle3.states.spool import Ticket, fail, is_own_folder
from eagle3.states.store.shard import Encoding, index_name
from eagle3.states.store.shard_writer import OpenSample, ShardWriter

ENCODING_THREADS = 2
# Bytes on their way to the spool through one writer; with more, the forward waits.
MOST_WAITING = 1 << 30

logger = logging.getLogger(__name__)


class Delivery(NamedTuple):
    """Rows of one request from one forward, `before` of which came earlier. ready: their copies to the host; None where they lie
    there."""

    ticket: Ticket
    before: int
    ids: Tensor
    rows: Rows
    ready: torch.cuda.Event | None

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.rows.named().values())


class SpoolWriter:
    """Writes rows in the order in which they come, from one thread; whole samples appear in their job's folder."""

    def __init__(self, folder: Path, encoding: Encoding) -> None:
        self.folder, self.encoding, self.dtype = folder, encoding, encoding.number_format
        self.open: dict[Ticket, OpenShard] = {}
        self.waiting = 0
        self.room = threading.Condition()
        self.encoders = ThreadPoolExecutor(ENCODING_THREADS, thread_name_prefix="spool-encode")
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="spool")

    def take(self, ticket: Ticket, before: int, ids: Tensor, rows: Rows) -> None:
        """Rows `before` and on of a request; returns when their copy to the host is on its way."""
        teacher = replace(rows.teacher, values=rows.teacher.values.to(self.dtype))
        on_host = Rows(rows.aux.to(self.dtype), teacher).map(_to_host)
        ids, ready = _to_host(ids), None
        if rows.aux.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        delivery = Delivery(ticket, before, ids, on_host, ready)
        with self.room:
            self.room.wait_for(lambda: not self.waiting or self.waiting + delivery.bytes <= MOST_WAITING)
            self.waiting += delivery.bytes
        self.thread.submit(self._deliver, delivery)

    def _deliver(self, delivery: Delivery) -> None:
        try:
            self._write(delivery)
        except Exception as error:  # whatever it is, the job must hear of it
            self.give_up(delivery.ticket, str(error) or repr(error))
        finally:
            with self.room:
                self.waiting -= delivery.bytes
                self.room.notify_all()

    def _write(self, delivery: Delivery) -> None:
        ticket, job = delivery.ticket, self.folder / delivery.ticket.job
        if delivery.ready:
            delivery.ready.synchronize()
        if delivery.before == 0 and ticket in self.open:  # SGLang took the request back and begins again
            self.open.pop(ticket).discard()
        for ended in [other for other in self.open if not (self.folder / other.job).is_dir()]:
            self.open.pop(ended).discard()
        if not self._there(job):  # ended, or on a machine that does not share this folder
            return
        if ticket not in self.open:
            if delivery.before:
                if not (job / ticket.mark("failed")).exists():
                    self.give_up(
                        ticket,
                        f"sglang: row {delivery.before} of a sample came first; start the server with --disable-radix-cache",
                    )
                return
            self.open[ticket] = OpenShard(job, ticket, self.encoding, self.encoders)
        shard = self.open[ticket]
        if shard.sample.rows != delivery.before:
            self.give_up(ticket, f"sglang: rows {shard.sample.rows} to {delivery.before} of a sample never came")
            return
        shard.append(delivery)
        if shard.sample.rows >= ticket.tokens:
            shard.publish()
            del self.open[ticket]

    def _there(self, job: Path) -> bool:
        """Whether a job waits there; what others put into a folder of theirs could lead anywhere."""
        return is_own_folder(self.folder) and job.is_dir()

    def give_up(self, ticket: Ticket, reason: str) -> None:
        """Tell the job why it will not get a sample."""
        logger.error("%s: %s", ticket.text, reason)
        try:
            if ticket in self.open:
                self.open.pop(ticket).discard()
            if self._there(job := self.folder / ticket.job):
                fail(job, ticket, reason)
        except Exception as error:  # as above
            logger.error("%s: cannot be told to the job: %r", ticket.text, error)


class OpenShard:
    """A sample on its way into a job's folder: written in a folder of its own, so that another server that was given the
    same request cannot disturb it, then moved."""

    def __init__(self, job: Path, ticket: Ticket, encoding: Encoding, encoders: Executor) -> None:
        self.job, self.ticket = job, ticket
        self.folder = job / f"writing-{token_hex(6)}"
        self.folder.mkdir()
        try:
            self.shard = ShardWriter(self.folder, ticket.shard, encoding, encoders, provenance_digest=None)
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.sample = OpenSample(self.shard, ticket.sample_id)

    def append(self, delivery: Delivery) -> None:
        nothing = torch.zeros(len(delivery.ids), dtype=torch.bool)
        self.sample.append(delivery.ids, loss_mask=nothing, seen=~nothing, taught=~nothing, rows=delivery.rows)

    def publish(self) -> None:
        self.sample.end()
        self.shard.publish()
        if (self.job / index_name(self.ticket.shard)).exists():  # another server was quicker, and it may be being read
            self.discard()
            return
        for name in (self.ticket.shard, index_name(self.ticket.shard)):  # the index last: it says that all is there
            (self.folder / name).replace(self.job / name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def discard(self) -> None:
        self.shard.discard()
        shutil.rmtree(self.folder, ignore_errors=True)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the host; of a GPU's tensor into pinned memory, whole when an event recorded now has passed."""
    if not tensor.is_cuda:
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
