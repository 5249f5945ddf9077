"""Runs inside SGLang, on every tensor-parallel rank: takes hidden states of a job's requests into its spool.

A server is started with this module's `make` as a forward hook on its logits processor (`version.capture_flags`). Each
prefill forward shows it some rows of several requests. What the teacher says after each row is summed up over the ranks'
parts of the vocabulary; then the rank that a request falls to writes its rows, in the store's format, from a thread of its
own, while the next forward runs.
"""

import logging
import queue
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eagle3.data.spool import Ticket, fail
from eagle3.data.store.codecs import StoreDtype
from eagle3.data.store.shard import Encoding, index_name
from eagle3.data.store.shard_writer import OpenSample, ShardWriter
from eagle3.errors import UserError
from eagle3.target.interface import HiddenStates
from eagle3.target.sglang.teacher import Teacher, make_teacher
from eagle3.target.sglang.version import hook_call

# Threads that write samples beside each other, and threads that encode for each. One writes about 0.5 GB/s.
WRITERS, ENCODING_THREADS = 4, 2
# Bytes on their way to the spool through one of them; with more, the forward waits.
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
        self.teacher: Teacher | None = None
        self.writers = [SpoolWriter(settings) for _ in range(WRITERS)]

    def writer(self, ticket: Ticket, ranks: int = 1) -> "SpoolWriter":
        """Who writes a sample on its rank; always the same."""
        return self.writers[_number(ticket) // ranks % WRITERS]

    @torch.no_grad()
    def __call__(self, processor: nn.Module, arguments: tuple[Any, ...], _output: object) -> None:
        call = hook_call(arguments)
        asked = [Ticket.parse(request) for request, _, _ in call.requests] if call else []
        if not any(asked):
            return
        if self.teacher is None:
            try:
                self.teacher = make_teacher(processor, call.head, self.settings.draft_vocabulary)
            except (UserError, OSError) as error:  # an exception would end the server, and say nothing to the job
                for ticket in filter(None, asked):
                    self.writer(ticket).give_up(ticket, str(error))
                return
        ranks, me = self.teacher.group.size(), self.teacher.group.rank()
        rows: list[list[Tensor]] = [[] for _ in range(ranks)]
        mine: list[tuple[Ticket, int]] = []
        start = 0
        for ticket, (_, tokens, before) in zip(asked, call.requests, strict=True):
            if ticket:
                owner = _number(ticket) % ranks  # who writes; every rank has the hidden states of all
                rows[owner].append(torch.arange(start, start + tokens))
                mine += [(ticket, before)] if owner == me else []
            start += tokens
        assert start == len(call.ids) == len(call.last), f"{len(call.ids)} rows in a batch whose requests have {start}"
        nothing = torch.empty(0, dtype=torch.int64)
        chosen = [torch.cat([nothing, *each]) for each in rows]
        said = self.teacher.says(call.last, chosen)
        aux = call.aux if isinstance(call.aux, Tensor) else torch.cat(list(call.aux), dim=-1)
        done = 0
        for (ticket, before), at in zip(mine, rows[me], strict=True):
            part = slice(int(at[0]), int(at[-1]) + 1)
            kept = said.kept[done : done + len(at)]
            done += len(at)
            states = HiddenStates(aux[part], kept, said.argmax[part], said.logsumexp[part])
            self.writer(ticket, ranks).take(ticket, before, call.ids[part], states)


def _number(ticket: Ticket) -> int:
    """By which samples are dealt out, the same on every rank."""
    return int(ticket.sample_id[-8:], 16)


class Rows(NamedTuple):
    """Rows of one request from one forward. ready: their copies to the host; None where they lie there."""

    ticket: Ticket
    before: int
    ids: Tensor
    states: HiddenStates
    ready: torch.cuda.Event | None

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in vars(self.states).values())


class SpoolWriter:
    """Writes rows in the order in which they come, from one thread; whole samples appear in their job's folder."""

    def __init__(self, settings: HookSettings) -> None:
        self.folder, self.dtype = Path(settings.spool), getattr(torch, settings.dtype)
        self.encoding = settings.encoding
        self.open: dict[Ticket, OpenShard] = {}
        self.queue: queue.SimpleQueue[Rows] = queue.SimpleQueue()
        self.waiting = 0
        self.room = threading.Condition()
        self.encoders = ThreadPoolExecutor(ENCODING_THREADS, thread_name_prefix="spool-encode")
        threading.Thread(target=self._run, name="spool", daemon=True).start()

    def take(self, ticket: Ticket, before: int, ids: Tensor, states: HiddenStates) -> None:
        """Rows `before` and on of a request; returns when their copy to the host is on its way."""
        given = (ids, states.aux.to(self.dtype), states.last.to(self.dtype), states.argmax, states.logsumexp)
        ids, *kinds = (_to_host(tensor) for tensor in given)
        ready = None
        if states.aux.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        rows = Rows(ticket, before, ids, HiddenStates(*kinds), ready)
        with self.room:
            self.room.wait_for(lambda: not self.waiting or self.waiting + rows.bytes <= MOST_WAITING)
            self.waiting += rows.bytes
        self.queue.put(rows)

    def _run(self) -> None:
        while True:
            rows = self.queue.get()
            try:
                self._write(rows)
            except (OSError, UserError) as error:
                self.give_up(rows.ticket, str(error))
            with self.room:
                self.waiting -= rows.bytes
                self.room.notify_all()

    def _write(self, rows: Rows) -> None:
        ticket, job = rows.ticket, self.folder / rows.ticket.job
        if rows.ready:
            rows.ready.synchronize()
        if rows.before == 0 and ticket in self.open:  # SGLang took the request back and begins again
            self.open.pop(ticket).discard()
        if not job.is_dir():  # ended, or on a machine that does not share this folder
            if ticket in self.open:
                self.open.pop(ticket).discard()
            return
        shard = self.open.get(ticket)
        if shard is None:
            if rows.before:
                if not (job / ticket.mark("failed")).exists():
                    self.give_up(
                        ticket,
                        f"sglang: row {rows.before} of a sample came first; start the server with --disable-radix-cache",
                    )
                return
            shard = self.open[ticket] = OpenShard(job, ticket, self.encoding, self.encoders)
        if shard.sample.rows != rows.before:
            self.give_up(ticket, f"sglang: rows {shard.sample.rows} to {rows.before} of a sample never came")
            return
        shard.append(rows)
        if shard.sample.rows >= ticket.tokens:
            self.open.pop(ticket).publish()

    def give_up(self, ticket: Ticket, reason: str) -> None:
        """Tell the job why it will not get a sample."""
        logger.error("%s: %s", ticket.text, reason)
        if ticket in self.open:
            self.open.pop(ticket).discard()
        try:
            fail(self.folder / ticket.job, ticket, reason)
        except OSError as error:
            logger.error("%s: cannot be told to the job: %s", ticket.text, error)


class OpenShard:
    """A sample on its way into a job's folder: written in a folder of its own, so that another server that was given the
    same request cannot disturb it, then moved."""

    def __init__(self, job: Path, ticket: Ticket, encoding: Encoding, encoders: Executor) -> None:
        self.job, self.ticket = job, ticket
        self.folder = job / f"writing-{token_hex(6)}"
        self.folder.mkdir()
        self.shard = ShardWriter(self.folder, ticket.shard, encoding, encoders)
        self.sample: OpenSample = self.shard.begin(ticket.sample_id)

    def append(self, rows: Rows) -> None:
        nothing = torch.zeros(len(rows.ids), dtype=torch.bool)
        self.sample.append(rows.ids, loss_mask=nothing, taught=~nothing, states=rows.states)

    def publish(self) -> None:
        self.sample.end()
        self.shard.publish()
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
