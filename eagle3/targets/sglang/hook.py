"""Runs inside SGLang, on every tensor-parallel rank: takes hidden states of a job's requests into its spool.

A server is started with this module's `make` as a forward hook on its logits processor (`version.capture_flags`). Each
prefill forward shows it some rows of several requests. What the teacher says after each row is summed up over the ranks'
parts of the vocabulary; then the rank that a request falls to writes its rows, in the store's format, from a thread of its
own, while the next forward runs.
"""

import logging
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eagle3.errors import UserError
from eagle3.states.rows import Rows
from eagle3.states.spool import Ticket, fail, is_own_folder
from eagle3.states.store.codecs import StoreDtype
from eagle3.states.store.shard import Encoding, index_name
from eagle3.states.store.shard_writer import ShardWriter
from eagle3.targets.sglang.teacher import ServedTeacher, make_teacher
from eagle3.targets.sglang.version import HookCall, hook_call

# Threads that write samples beside each other; one writes about 0.5 GB/s.
WRITERS = 4
ENCODING_THREADS = 2
# Bytes on their way to the spool through one writer; with more, the forward waits.
MOST_WAITING = 1 << 30

logger = logging.getLogger(__name__)


class HookSettings(NamedTuple):
    """What a server's hook is told; all of a server's jobs share it.

    spool: folder of the jobs' folders. dtype: number format of the rows. target: fingerprint of the checkpoint, which jobs
    compare. hidden_size: of the target. draft_vocabulary: where logits are kept, a safetensors file with d2t, with its
    digest and size.
    """

    spool: str
    dtype: StoreDtype
    target: str
    hidden_size: int
    draft_vocabulary: str | None = None
    vocabulary_digest: str | None = None
    vocabulary_size: int | None = None

    @property
    def encoding(self) -> Encoding:
        """Of the rows in the spool."""
        return Encoding("none", self.dtype, self.hidden_size, teacher_width=self.vocabulary_size)


def make(settings: Mapping[str, Any]) -> "CaptureHook":
    """What SGLang calls to make the hook. settings: HookSettings, as JSON."""
    return CaptureHook(HookSettings(**settings))


class CaptureHook:
    def __init__(self, settings: HookSettings) -> None:
        self.settings = settings
        self.teacher: ServedTeacher | None = None
        self.writers = [SpoolWriter(Path(settings.spool), settings.encoding) for _ in range(WRITERS)]

    def writer(self, ticket: Ticket, ranks: int = 1) -> "SpoolWriter":
        """Who writes a sample on its rank; always the same."""
        return self.writers[_number(ticket) // ranks % WRITERS]

    @torch.no_grad()
    def __call__(self, processor: nn.Module, arguments: tuple[Any, ...], _output: object) -> None:
        """On every rank with the same requests: what is decided here is decided alike on all."""
        call = hook_call(arguments)
        asked = [Ticket.parse(request) for request, _, _ in call.requests] if call else []
        if not any(asked):
            return
        flaw = self._flaw(processor, call)
        if flaw:  # an exception would end the server, and say nothing to the job
            for ticket in filter(None, asked):
                self.writer(ticket).give_up(ticket, flaw)
            return
        ranks, me = self.teacher.group.size(), self.teacher.group.rank()
        rows: list[list[Tensor]] = [[] for _ in range(ranks)]
        mine: list[tuple[Ticket, int]] = []
        parts = torch.arange(len(call.ids)).split([tokens for _, tokens, _ in call.requests])
        for ticket, (_, _, before), part in zip(asked, call.requests, parts, strict=True):
            if ticket:
                owner = _number(ticket) % ranks  # who writes; every rank has the hidden states of all
                rows[owner].append(part)
                mine += [(ticket, before)] if owner == me else []
        nothing = torch.empty(0, dtype=torch.int64)
        all_kept, summary = self.teacher.says(call.last, [torch.cat([nothing, *each]) for each in rows])
        aux = call.aux if isinstance(call.aux, Tensor) else torch.cat(list(call.aux), dim=-1)
        for (ticket, before), at, kept in zip(mine, rows[me], all_kept.split([*map(len, rows[me])]), strict=True):
            part = slice(int(at[0]), int(at[-1]) + 1)
            teacher = self.settings.encoding.teacher(kept, summary.argmax[part], summary.logsumexp[part])
            self.writer(ticket, ranks).take(ticket, before, call.ids[part], Rows(aux[part], teacher))

    def _flaw(self, processor: nn.Module, call: HookCall) -> str | None:
        """Why nothing can be captured from this call, if so. Makes the teacher at the first call."""
        if call.aux is None:
            return "sglang: its class for this target shows the hook no auxiliary hidden states; set target.backend=transformers"
        counted = sum(tokens for _, tokens, _ in call.requests)
        if not counted == len(call.ids) == len(call.last):
            return (
                f"sglang: a batch of {counted} tokens has {len(call.ids)} ids and {len(call.last)} hidden states here; start "
                "the server as launchers/capture.py --print-server says"
            )
        if self.teacher is None:
            try:
                self.teacher = make_teacher(processor, call.head, self.settings.draft_vocabulary)
            except UserError as error:
                return str(error)
        return None


def _number(ticket: Ticket) -> int:
    """By which samples are dealt out, the same on every rank."""
    return int(ticket.sample_id[-8:], 16)


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
        self.open: dict[Ticket, SampleShard] = {}
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
            self.open[ticket] = SampleShard(job, ticket, self.encoding, self.encoders)
        shard = self.open[ticket]
        if shard.sample.tokens != delivery.before:
            self.give_up(ticket, f"sglang: rows {shard.sample.tokens} to {delivery.before} of a sample never came")
            return
        shard.take(delivery)
        if shard.sample.tokens >= ticket.tokens:
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


class SampleShard(ShardWriter):
    """A sample on its way into a job's folder: written in a folder of its own, so that another server that was given the
    same request cannot disturb it, then moved."""

    def __init__(self, job: Path, ticket: Ticket, encoding: Encoding, encoders: Executor) -> None:
        self.job = job
        own = job / f"writing-{token_hex(6)}"
        own.mkdir()
        try:
            super().__init__(own, ticket.shard, encoding, encoders, provenance_digest=None)
        except OSError:
            shutil.rmtree(own, ignore_errors=True)
            raise
        self.begin(ticket.sample_id)

    def take(self, delivery: Delivery) -> None:
        nothing = torch.zeros(len(delivery.ids), dtype=torch.bool)
        self.append(delivery.ids, loss_mask=nothing, seen=~nothing, taught=~nothing, rows=delivery.rows)

    def publish(self) -> None:
        self.end()
        super().publish()
        if (self.job / index_name(self.shard)).exists():  # another server was quicker, and it may be being read
            self.discard()
            return
        for name in (self.shard, index_name(self.shard)):  # the index last: it says that all is there
            (self.folder / name).replace(self.job / name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def discard(self) -> None:
        super().discard()
        shutil.rmtree(self.folder, ignore_errors=True)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the host; of a GPU's tensor into pinned memory, whole when an event recorded now has passed."""
    if not tensor.is_cuda:
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
