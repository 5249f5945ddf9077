"""Captures hidden states of a job's requests into its spool. Runs inside SGLang, on every tensor-parallel rank.

A server is started with this module's `make` as the factory of a forward hook on its logits processor
(`version.capture_flags`). In each prefill forward, the hook gets some rows of several requests. The teacher's values
for each row are combined from the ranks' vocabulary shards. Then the rank that owns a request writes its rows in the
store's format, from a separate thread, while the next forward runs.
"""

import logging
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from eagle3.errors import UserError
from eagle3.states.rows import Rows
from eagle3.states.spool import Ticket, fail, is_own_folder
from eagle3.states.store.codecs import StoreDtype
from eagle3.states.store.shard import Encoding, index_name
from eagle3.states.store.writer import ShardWriter
from eagle3.targets.logits import BLOCK_ROWS, DraftColumns, TeacherSummary, summarize_sharded
from eagle3.targets.sglang.version import (
    HookCall,
    head_of,
    hook_call,
    local_logits,
    plain_weight,
    transform_of,
)

# Number of threads that write samples in parallel; each writes about 0.5 GB/s.
WRITERS = 4
ENCODING_THREADS = 2
# Most bytes that one writer may have queued for the spool; beyond that, the forward waits.
MOST_WAITING = 1 << 30

logger = logging.getLogger(__name__)


class HookSettings(NamedTuple):
    """The settings of a server's hook, shared by all jobs that use the server."""

    spool: str  # folder that holds the jobs' folders
    dtype: StoreDtype  # number format of the rows
    target: str  # fingerprint of the target's checkpoint, which jobs compare with theirs
    hidden_size: int  # width of the target's hidden states
    # For a store of logits: a safetensors file with d2t, its digest, and the number of draft tokens.
    draft_vocabulary: str | None = None
    vocabulary_digest: str | None = None
    vocabulary_size: int | None = None

    @property
    def encoding(self) -> Encoding:
        """How rows are written in the spool."""
        return Encoding("none", self.dtype, self.hidden_size, teacher_width=self.vocabulary_size)


def make(settings: Mapping[str, Any]) -> "CaptureHook":
    """Create the hook; SGLang calls this factory. settings: HookSettings as JSON values."""
    return CaptureHook(HookSettings(**settings))


class CaptureHook:
    def __init__(self, settings: HookSettings) -> None:
        self.settings = settings
        self.teacher: ServedTeacher | None = None
        self.writers = [SpoolWriter(Path(settings.spool), settings.encoding) for _ in range(WRITERS)]

    def writer(self, ticket: Ticket, ranks: int = 1) -> "SpoolWriter":
        """The writer for a sample on the rank that owns it; always the same one."""
        return self.writers[_number(ticket) // ranks % WRITERS]

    @torch.no_grad()
    def __call__(self, processor: nn.Module, arguments: tuple[Any, ...], _output: object) -> None:
        """Capture from one forward. All ranks see the same requests, so they all decide alike."""
        call = hook_call(arguments)
        tickets = [Ticket.parse(request) for request, _, _ in call.requests] if call else []
        if not any(tickets):
            return
        flaw = self._flaw(processor, call)
        if flaw:  # an exception would kill the server without telling the job
            for ticket in filter(None, tickets):
                self.writer(ticket).give_up(ticket, flaw)
            return
        ranks, rank = self.teacher.group.size(), self.teacher.group.rank()
        rows: list[list[Tensor]] = [[] for _ in range(ranks)]
        own_requests: list[tuple[Ticket, int]] = []
        parts = torch.arange(len(call.ids)).split([tokens for _, tokens, _ in call.requests])
        for ticket, (_, _, first_row), part in zip(tickets, call.requests, parts, strict=True):
            if ticket:
                owner = _number(ticket) % ranks  # the rank that writes; every rank has all hidden states
                rows[owner].append(part)
                own_requests += [(ticket, first_row)] if owner == rank else []
        empty = torch.empty(0, dtype=torch.int64)
        teacher_values, summary = self.teacher.says(call.last, [torch.cat([empty, *each]) for each in rows])
        aux = call.aux if isinstance(call.aux, Tensor) else torch.cat(list(call.aux), dim=-1)
        for (ticket, first_row), positions, values in zip(
            own_requests, rows[rank], teacher_values.split([*map(len, rows[rank])]), strict=True
        ):
            part = slice(int(positions[0]), int(positions[-1]) + 1)
            teacher = self.settings.encoding.teacher(values, summary.argmax[part], summary.logsumexp[part])
            self.writer(ticket, ranks).take(ticket, first_row, call.ids[part], Rows(aux[part], teacher))

    def _flaw(self, processor: nn.Module, call: HookCall) -> str | None:
        """Why nothing can be captured from this call, or None. Creates the teacher on the first call."""
        if call.aux is None:
            return (
                "sglang: its class for this target gives the hook no auxiliary hidden states; set "
                "target.backend=transformers"
            )
        token_count = sum(tokens for _, tokens, _ in call.requests)
        if not token_count == len(call.ids) == len(call.last):
            return (
                f"sglang: a batch of {token_count} tokens has {len(call.ids)} ids and {len(call.last)} hidden states "
                "here; start the server as launchers/capture.py --print-server says"
            )
        if self.teacher is None:
            try:
                self.teacher = make_teacher(processor, call.head, self.settings.draft_vocabulary)
            except UserError as error:
                return str(error)
        return None


def _number(ticket: Ticket) -> int:
    """A number, the same on every rank, that decides which rank and which writer gets a sample."""
    return int(ticket.sample_id[-8:], 16)


class SpoolWriter:
    """Writes rows from one thread, in the order in which they arrive. Only complete samples appear in a job's
    folder."""

    def __init__(self, folder: Path, encoding: Encoding) -> None:
        self.folder, self.encoding, self.dtype = folder, encoding, encoding.number_format
        self.open: dict[Ticket, SampleShard] = {}
        self.waiting = 0
        self.room = threading.Condition()
        self.encoders = ThreadPoolExecutor(ENCODING_THREADS, thread_name_prefix="spool-encode")
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="spool")

    def take(self, ticket: Ticket, first_row: int, ids: Tensor, rows: Rows) -> None:
        """Queue the rows of a request that begin at row `first_row`. Returns once their copy to the host is under
        way."""
        teacher = replace(rows.teacher, values=rows.teacher.values.to(self.dtype))
        on_host = Rows(rows.aux.to(self.dtype), teacher).map(_to_host)
        ids, event = _to_host(ids), None
        if rows.aux.is_cuda:
            event = torch.cuda.Event()
            event.record()
        size = sum(tensor.nbytes for tensor in on_host.named().values())
        with self.room:
            self.room.wait_for(lambda: not self.waiting or self.waiting + size <= MOST_WAITING)
            self.waiting += size
        self.thread.submit(self._deliver, ticket, first_row, ids, on_host, event, size)

    def _deliver(
        self, ticket: Ticket, first_row: int, ids: Tensor, rows: Rows, event: torch.cuda.Event | None, size: int
    ) -> None:
        """Write rows that were queued.

        event: recorded after the copies to the host; None if those are complete
        size: size of the rows in bytes
        """
        try:
            if event:
                event.synchronize()
            self._write(ticket, first_row, ids, rows)
        except Exception as error:  # whatever went wrong, the job must be told
            self.give_up(ticket, str(error) or repr(error))
        finally:
            with self.room:
                self.waiting -= size
                self.room.notify_all()

    def _write(self, ticket: Ticket, first_row: int, ids: Tensor, rows: Rows) -> None:
        """Write one forward's rows of a request; `first_row` rows came earlier."""
        job = self.folder / ticket.job
        if first_row == 0 and ticket in self.open:  # SGLang has retracted the request and starts over
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
                        f"sglang: row {first_row} of a sample came first; start the server with --disable-radix-cache",
                    )
                return
            self.open[ticket] = SampleShard(job, ticket, self.encoding, self.encoders)
        shard = self.open[ticket]
        if shard.sample.tokens != first_row:
            self.give_up(ticket, f"sglang: rows {shard.sample.tokens} to {first_row} of a sample never came")
            return
        shard.take(ids, rows)
        if shard.sample.tokens >= ticket.tokens:
            shard.publish()
            del self.open[ticket]

    def _there(self, job: Path) -> bool:
        """Whether a job is waiting there. The spool must be our own folder: a link in somebody else's could lead
        anywhere."""
        return is_own_folder(self.folder) and job.is_dir()

    def give_up(self, ticket: Ticket, reason: str) -> None:
        """Tell the job why it will not get a sample."""
        logger.error("%s: %s", ticket.text, reason)
        try:
            if ticket in self.open:
                self.open.pop(ticket).discard()
            if self._there(job := self.folder / ticket.job):
                fail(job, ticket, reason)
        except Exception as error:  # again, whatever went wrong
            logger.error("%s: the job cannot be told: %r", ticket.text, error)


class SampleShard(ShardWriter):
    """A sample being written to a job's folder. It is written in a separate folder, so that another server with the
    same request cannot interfere, and then moved."""

    def __init__(self, job: Path, ticket: Ticket, encoding: Encoding, encoders: Executor) -> None:
        self.job = job
        folder = job / f"writing-{token_hex(6)}"
        folder.mkdir()
        try:
            super().__init__(folder, ticket.shard, encoding, encoders, provenance_digest=None)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.begin(ticket.sample_id)

    def take(self, ids: Tensor, rows: Rows) -> None:
        mask = torch.zeros(len(ids), dtype=torch.bool)
        self.append(ids, loss_mask=mask, seen=~mask, taught=~mask, rows=rows)

    def publish(self) -> None:
        self.end()
        super().publish()
        if (self.job / index_name(self.shard)).exists():  # another server was faster, and its sample may be in use
            self.discard()
            return
        for name in (self.shard, index_name(self.shard)):  # the index last, since it marks the sample as complete
            (self.folder / name).replace(self.job / name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def discard(self) -> None:
        super().discard()
        shutil.rmtree(self.folder, ignore_errors=True)


def _to_host(tensor: Tensor) -> Tensor:
    """Copy to the host. A copy from a GPU is in pinned memory, and complete once an event recorded now completes."""
    if not tensor.is_cuda:
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


# The teacher's values for each row, from logits of which no rank has all columns --------------------------------------


class ServedTeacher(ABC):
    """Computes the teacher's values for each row.

    processor, module: SGLang's logits processor and its lm_head, sharded over `group`
    """

    def __init__(self, processor: nn.Module, module: Any) -> None:
        self.processor, self.module = processor, module
        self.head = head_of(module)
        self.group = self.head.group

    def says(self, last: Tensor, rows: Sequence[Tensor]) -> tuple[Tensor, TeacherSummary]:
        """The teacher's values for one forward. Collective over `group`.

        last: [N, H]
        rows: for each rank, the rows that it writes (int64)

        Returns the values [M, W] of the M rows that this rank writes (last hidden states or draft logits), and the
        summary of all N rows. Logits exist for one block of rows at a time.
        """
        shard = self.head.first_id, self.head.valid, self.group
        blocks = [summarize_sharded(self.logits(block), *shard) for block in last.split(BLOCK_ROWS)]
        return self.teacher_values(last, rows), TeacherSummary(*map(torch.cat, zip(*blocks, strict=True)))

    @abstractmethod
    def logits(self, last: Tensor) -> Tensor:
        """Logits [n, V/tp] in this rank's columns for last hidden states [n, H]."""

    @abstractmethod
    def teacher_values(self, last: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """The first result of `says`."""


class HiddenTeacher(ServedTeacher):
    """Keeps last hidden states, to which training applies the lm_head."""

    def __init__(self, processor: nn.Module, head: Any) -> None:
        super().__init__(processor, head)
        self.weight = plain_weight(head)
        if self.weight is None:
            raise UserError(
                "target.teacher: hidden, but this target's lm_head is not a plain matrix (quantised, or with a bias), "
                "which training could apply; set target.teacher=logits"
            )
        self.half_matmul = self.weight.is_cuda and self.weight.dtype in (torch.bfloat16, torch.float16)
        self.columns = (self.weight if self.half_matmul else self.weight.float()).T
        self.transform = transform_of(processor)

    def logits(self, last: Tensor) -> Tensor:
        if self.half_matmul:
            return self.transform.apply(torch.mm(last.to(self.weight.dtype), self.columns, out_dtype=torch.float32))
        return self.transform.apply(last.float() @ self.columns)

    def teacher_values(self, last: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """This rank's rows of `last`; a view if they are consecutive, as they are with one rank. An index would have to
        be copied to the GPU first, and the forward would wait for it."""
        own_rows = rows[self.group.rank()]
        if not len(own_rows):
            return last[:0]
        first, stop = int(own_rows[0]), int(own_rows[-1]) + 1
        return last[first:stop] if stop - first == len(own_rows) else last[own_rows.to(last.device)]


class LogitsTeacher(ServedTeacher):
    """Keeps the model's own logits for the draft vocabulary, in the order of draft ids."""

    def __init__(self, processor: nn.Module, head: Any, draft_ids: Tensor) -> None:
        super().__init__(processor, head)
        self.columns = DraftColumns.of(draft_ids.to(self.head.device), self.head.first_id, self.head.valid, self.group)
        self.peak = 0  # largest number of bytes so far

    def logits(self, last: Tensor) -> Tensor:
        return local_logits(self.processor, self.module, last)

    def teacher_values(self, last: Tensor, rows: Sequence[Tensor]) -> Tensor:
        probe = self.logits(last[:1])
        values = self.columns.redistribute(lambda indices: self.logits(last[indices]), rows, probe.dtype)
        peak = self.columns.peak_bytes([len(each) for each in rows], probe.shape[1], probe.element_size())
        if peak > self.peak:
            self.peak = peak
            logger.warning("teacher logits: up to %.1f MiB on this rank, for %d rows", peak / 2**20, len(last))
        return values


def make_teacher(processor: nn.Module, head: Any, draft_vocabulary: str | None) -> ServedTeacher:
    """Create a server's teacher. Collective over the head's group.

    processor, head: SGLang's logits processor and lm_head
    draft_vocabulary: file with d2t, if logits are kept; otherwise None

    Raises UserError, on every rank or on none, if this target cannot have such a teacher.
    """
    if draft_vocabulary is None:
        return HiddenTeacher(processor, head)
    shard, draft_ids, reason = head_of(head), None, None
    try:
        d2t = load_file(draft_vocabulary)["d2t"]
        draft_ids = d2t + torch.arange(len(d2t))
    except (OSError, SafetensorError, KeyError) as error:
        reason = f"{draft_vocabulary}: has no draft vocabulary that SGLang could read ({error}); run capture.py again"
    failures = torch.tensor([reason is not None], dtype=torch.int32, device=shard.device)
    dist.all_reduce(failures, dist.ReduceOp.MAX, shard.group)
    if failures.item():
        raise UserError(reason or f"{draft_vocabulary}: another rank of the server cannot read it; share that folder")
    return LogitsTeacher(processor, head, draft_ids)
