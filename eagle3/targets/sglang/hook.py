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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from eagle3.durable import writing
from eagle3.errors import UserError
from eagle3.states.rows import KeptRows, Rows
from eagle3.states.spool import REMEDY, Ticket, WantedRows, fail, is_own_folder, spool_bytes
from eagle3.states.store.codecs import StoreDtype
from eagle3.states.store.shard import Encoding, index_name, taught_rows
from eagle3.states.store.writer import ShardWriter
from eagle3.targets.checkpoint import fingerprint
from eagle3.targets.logits import BLOCK_ROWS, DraftColumns, ShardSummary, TeacherSummary
from eagle3.targets.sglang.version import (
    WITHOUT_RESIDUAL,
    HookCall,
    Ranks,
    head_of,
    hook_call,
    loaded_checkpoint,
    local_logits,
    plain_weight,
    tensor_ranks,
    transform_of,
)
from eagle3.transfer import send

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


_streams: list[Tensor] = []  # what `read_stream` found in the current forward, [N, H] for each aux layer


def make_layer_hook(_settings: Mapping[str, Any]) -> Callable[..., None]:
    """Create the hook of the aux layers; SGLang calls this factory."""
    return read_stream


def read_stream(layer: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
    """Reads the residual stream after a layer, if SGLang would capture something else there."""
    if type(layer).__name__ in WITHOUT_RESIDUAL:
        hidden, residual = output
        _streams.append(hidden + residual)


class Wanted(NamedTuple):
    """The rows that a job wants of n tokens."""

    loss_mask: Tensor  # [n] bool
    seen: Tensor  # [n] bool: rows whose auxiliary states are wanted
    taught: Tensor  # [n] bool: rows whose predictions are wanted
    encoding: Encoding  # of the sample's shard
    sizes: tuple[int, int]  # bytes of that shard, and of the teacher's values in it

    @classmethod
    def of(cls, rows: WantedRows | None, tokens: int, encoding: Encoding) -> Self:
        size, taught = spool_bytes(encoding, tokens, rows), torch.ones(tokens, dtype=torch.bool)
        mask, seen = ~taught, taught
        if rows is not None:
            encoding = replace(encoding, window=rows.window, ttt_steps=rows.ttt_steps)
            mask, seen, taught = rows.loss_mask, encoding.seen_rows(rows.loss_mask), taught_rows(rows.loss_mask)
        values = int(taught.sum()) * encoding.width("last") * encoding.number_format.itemsize
        return cls(mask, seen, taught, encoding, (size, values))

    def __getitem__(self, rows: slice) -> Self:
        return self._replace(loss_mask=self.loss_mask[rows], seen=self.seen[rows], taught=self.taught[rows])


class Share(NamedTuple):
    """The rows of one request in a forward."""

    ticket: Ticket
    owner: int  # the rank that writes them; every rank has all hidden states
    start: int  # where they begin among the forward's tokens
    first_row: int  # where they begin in the sample
    wanted: Wanted

    def places(self, mask: Tensor) -> Tensor:
        """Where the rows of a mask [n] are among the forward's tokens."""
        return mask.nonzero().flatten() + self.start


class Taught(NamedTuple):
    """What one rank's columns say of a forward's taught rows: those of the first owner, of the second, and so on."""

    last: Tensor  # [M, H]
    summary: ShardSummary
    drafted: Tensor | None  # [M, this rank's draft columns], if logits are kept
    counts: list[int]  # how many of the rows each rank owns


class CaptureHook:
    def __init__(self, settings: HookSettings) -> None:
        self.settings = settings
        self.teacher: ServedTeacher | None = None
        self.wanted: dict[Ticket, Wanted] = {}  # of the samples that are being prefilled
        self.writers = [SpoolWriter(Path(settings.spool), settings.encoding.number_format) for _ in range(WRITERS)]
        self.flaw = foreign_checkpoint(settings.target)
        if self.flaw:
            logger.error(self.flaw)

    def writer(self, ticket: Ticket, ranks: int) -> "SpoolWriter":
        """The writer for a sample on the rank that owns it; always the same one."""
        return self.writers[_number(ticket) // ranks % WRITERS]

    @torch.no_grad()
    def __call__(self, processor: nn.Module, arguments: tuple[Any, ...], _output: object) -> None:
        """Capture from one forward. All ranks see the same requests, so they all decide alike. An exception would kill
        the server without telling the job, so the job is told instead."""
        streams, call = _streams.copy(), hook_call(arguments)
        _streams.clear()
        if streams and call:
            call = call._replace(aux=streams)
        tickets = [Ticket.parse(request) for request, _, _ in call.requests] if call else []
        if not any(tickets):
            return
        ranks = tensor_ranks()
        try:
            self._capture(processor, call, tickets, ranks)
        except Exception as error:  # whatever it is
            if not isinstance(error, UserError):
                logger.exception("capture failed")
            reason = str(error) if isinstance(error, UserError) else f"sglang: the hook failed ({error!r})"
            for ticket in filter(None, tickets):
                self.wanted.pop(ticket, None)
                self.writer(ticket, ranks.hosts.size()).refuse(ticket, reason)

    def _capture(self, processor: nn.Module, call: HookCall, tickets: Sequence[Ticket | None], ranks: Ranks) -> None:
        rank, size = ranks.hosts.rank(), ranks.hosts.size()
        self._learn_wanted(call, tickets, ranks)
        shares: list[Share] = []

        def compute() -> Taught:
            self._require_whole(call)
            shares.extend(sorted(self._shares(call, tickets, size), key=lambda share: share.owner))
            if self.teacher is None:
                self.teacher = make_teacher(processor, call.head, self.settings.draft_vocabulary)
            counts = [0] * size
            for share in shares:
                counts[share.owner] += int(share.wanted.taught.sum())
            places = torch.cat([share.places(share.wanted.taught) for share in shares])
            return self.teacher.taught(picked(call.last, places), counts)

        taught = together(compute, ranks.hosts)
        mine = [share for share in shares if share.owner == rank]
        counts = [int(share.wanted.taught.sum()) for share in mine]
        columns = (column.split(counts) for column in self.teacher.combined(taught, ranks.devices))
        parts = [call.aux] if isinstance(call.aux, Tensor) else call.aux
        for share, *teacher in zip(mine, *columns, strict=True):
            aux = torch.cat([picked(part, share.places(share.wanted.seen)) for part in parts], dim=-1)
            teacher = self.settings.encoding.teacher(*teacher)
            ids = call.ids[share.start : share.start + len(share.wanted.seen)]
            self.writer(share.ticket, size).take(share, ids, Rows(aux, teacher))

    def _learn_wanted(self, call: HookCall, tickets: Sequence[Ticket | None], ranks: Ranks) -> None:
        """Learn which rows of new samples are wanted, and forget the samples of jobs that have ended. The first rank
        looks for all, so that none can differ."""
        requests = zip(tickets, call.requests, strict=True)
        new = [ticket for ticket, (_, _, first_row) in requests if ticket and first_row == 0]
        if not new:
            return

        spool = Path(self.settings.spool)

        def look() -> tuple[dict[Ticket, WantedRows | None], list[Ticket]]:
            ended = {job for job in {ticket.job for ticket in self.wanted} if not (spool / job).is_dir()}
            found = {ticket: WantedRows.find(spool / ticket.job, ticket) for ticket in new}
            return found, [ticket for ticket in self.wanted if ticket.job in ended]

        message = [together(look if ranks.hosts.rank() == 0 else None, ranks.hosts)]
        if ranks.hosts.size() > 1:
            dist.broadcast_object_list(message, group=ranks.hosts, group_src=0)
        found, ended = message[0]
        for ticket in ended:
            del self.wanted[ticket]
        for ticket, rows in found.items():
            self.wanted[ticket] = Wanted.of(rows, ticket.tokens, self.settings.encoding)

    def _shares(self, call: HookCall, tickets: Sequence[Ticket | None], ranks: int) -> Iterator[Share]:
        start = 0
        for ticket, (_, tokens, first_row) in zip(tickets, call.requests, strict=True):
            if ticket:
                stop = first_row + tokens
                take = self.wanted.pop if stop >= ticket.tokens else self.wanted.get
                wanted = take(ticket, None) or Wanted.of(None, ticket.tokens, self.settings.encoding)
                yield Share(ticket, _number(ticket) % ranks, start, first_row, wanted[first_row:stop])
            start += tokens

    def _require_whole(self, call: HookCall) -> None:
        """Raises UserError if nothing can be captured from this call."""
        if self.flaw:
            raise UserError(self.flaw)
        if call.aux is None:
            raise UserError(
                "sglang: its class for this target gives the hook no auxiliary hidden states; set "
                "target.backend=transformers"
            )
        token_count = sum(tokens for _, tokens, _ in call.requests)
        if not token_count == len(call.ids) == len(call.last):
            raise UserError(
                f"sglang: a batch of {token_count} tokens has {len(call.ids)} ids and {len(call.last)} hidden states "
                "here; start the server as launchers/capture.py --print-server says"
            )


def foreign_checkpoint(target: str) -> str:
    """Why this server's checkpoint is not the one with the fingerprint `target`; empty if it is."""
    path, revision = loaded_checkpoint()
    try:
        loaded = fingerprint(path, revision=revision)
    except UserError as error:
        return f"sglang: what this server loaded cannot be compared with model.target ({error})"
    if loaded == target:
        return ""
    return (
        f"sglang: this server loaded {path}{f' at {revision}' if revision else ''}, which is not the checkpoint that "
        f"model.target names (fingerprint {loaded}, not {target}); start it as launchers/capture.py --print-server says"
    )


def together(work: Callable[[], Any] | None, group: dist.ProcessGroup) -> Any:
    """The result of `work`, which does not communicate. Collective over `group`. If it fails on a rank, all ranks raise
    UserError with its reason, so that none waits for another."""
    result = failure = None
    try:
        result = work() if work else None
    except UserError as error:
        failure = str(error)
    except Exception as error:  # whatever it is
        logger.exception("capture failed")
        failure = f"sglang: the hook failed ({error!r})"
    failed = torch.tensor([failure is not None], dtype=torch.int32)
    if group.size() > 1:
        dist.all_reduce(failed, dist.ReduceOp.MAX, group)
    if failed.item():
        failures = [failure]
        if group.size() > 1:
            failures = [None] * group.size()
            dist.all_gather_object(failures, failure, group=group)
        raise UserError(next(filter(None, failures)))
    return result


def picked(rows: Tensor, places: Tensor) -> Tensor:
    """The rows [m, ...] at `places` (int64 [m], on the CPU): a view if they are consecutive. An index would have to be
    copied to the GPU first."""
    if not len(places):
        return rows[:0]
    first, stop = int(places[0]), int(places[-1]) + 1
    in_order = stop - first == len(places) and bool((places.diff() == 1).all())
    return rows[first:stop] if in_order else rows[send(places, rows.device)]


def _number(ticket: Ticket) -> int:
    """A number, the same on every rank, that decides which rank and which writer gets a sample."""
    return int(ticket.sample_id[-8:], 16)


class SpoolWriter:
    """Writes rows from one thread, in the order in which they arrive. Only complete samples appear in a job's
    folder."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder, self.dtype = folder, dtype
        self.open: dict[Ticket, SampleShard] = {}
        self.waiting = 0
        self.room = threading.Condition()
        self.encoders = ThreadPoolExecutor(ENCODING_THREADS, thread_name_prefix="spool-encode")
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="spool", initializer=partial(_use_device, _device()))
        self.copies: torch.cuda.Stream | None = None  # made with the first rows on a GPU

    def take(self, share: Share, ids: Tensor, rows: Rows) -> None:
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

    def _deliver(self, share: Share, ids: Tensor, rows: Rows, event: torch.cuda.Event | None, size: int) -> None:
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

    def _write(self, share: Share, ids: Tensor, rows: Rows) -> None:
        ticket, first_row = share.ticket, share.first_row
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
            self.open[ticket] = SampleShard(job, ticket, share.wanted, self.encoders)
        shard = self.open[ticket]
        if shard.sample.tokens != first_row:
            self.give_up(ticket, f"sglang: rows {shard.sample.tokens} to {first_row} of a sample never came")
            return
        wanted = share.wanted
        shard.append(ids, wanted.loss_mask, KeptRows(wanted.seen, wanted.taught, rows))
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

    def __init__(self, job: Path, ticket: Ticket, wanted: Wanted, encoders: Executor) -> None:
        self.job = job
        folder = job / f"writing-{token_hex(6)}"
        folder.mkdir()
        try:
            super().__init__(folder, ticket.shard, wanted.encoding, encoders, provenance_digest=None)
            self.reserve(*wanted.sizes)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.begin(ticket.sample_id)

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


def _device() -> int | None:
    """The GPU of this rank; None on a CPU."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _use_device(device: int | None) -> None:
    """In a thread of this rank, whose GPU would otherwise be the first."""
    if device is not None:
        torch.cuda.set_device(device)


def _to_host(tensor: Tensor) -> Tensor:
    """Copy to the host. A copy from a GPU is in pinned memory, and complete once an event recorded now completes."""
    if not tensor.is_cuda:
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


# The teacher's values for each row, from logits of which no rank has all columns --------------------------------------


class ServedTeacher(ABC):
    """Computes the target's predictions for some rows.

    processor, module: SGLang's logits processor and its lm_head, sharded over the server's ranks or whole on each
    draft_ids: [Vd] tokens of the draft vocabulary, if their logits are kept
    """

    def __init__(self, processor: nn.Module, module: Any, draft_ids: Tensor | None = None) -> None:
        self.processor, self.module, self.head, self.draft_ids = processor, module, head_of(module), draft_ids
        self.columns: DraftColumns | None = None

    @abstractmethod
    def logits(self, last: Tensor) -> Tensor:
        """Logits [n, V/tp] in this rank's columns for last hidden states [n, H]."""

    def taught(self, last: Tensor, counts: list[int]) -> Taught:
        """What this rank's columns say of rows `last` [M, H], of which `counts` belong to each rank, the first one's
        first. Logits exist for one block of rows at a time, and are computed once."""
        first, valid, local = self.head.first_id, self.head.valid, None
        if self.draft_ids is not None:
            local = self.draft_ids[(self.draft_ids >= first) & (self.draft_ids < first + valid)] - first
        summaries, drafted = [], []
        for block in last.split(BLOCK_ROWS):
            logits = self.logits(block)
            if local is not None:
                drafted.append(logits.index_select(1, local))
            summaries.append(ShardSummary.of(logits, first, valid))
            del logits  # before the next block's are made
        return Taught(last, ShardSummary.cat(summaries), torch.cat(drafted) if drafted else None, counts)

    def combined(self, taught: Taught, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        """The teacher's values, argmax and logsumexp of the rows that belong to this rank. Collective over `group`."""
        start = sum(taught.counts[: group.rank()])
        own = slice(start, start + taught.counts[group.rank()])
        if self.head.whole:
            summary = TeacherSummary(taught.summary.best, taught.summary.logsumexp)
        else:
            summary = taught.summary.merged(group)
        if taught.drafted is None:
            values = taught.last[own]
        elif self.head.whole:
            values = taught.drafted[own]
        else:
            if self.columns is None:
                self.columns = DraftColumns.of(self.draft_ids, self.head.first_id, self.head.valid, group)
            values = self.columns.exchange(taught.drafted, taught.counts)
        return values, summary.argmax[own], summary.logsumexp[own]


class HiddenTeacher(ServedTeacher):
    """Keeps last hidden states, to which training applies the lm_head."""

    def __init__(self, processor: nn.Module, module: Any) -> None:
        super().__init__(processor, module)
        self.weight = plain_weight(module)
        if self.weight is None:
            raise UserError(
                "target.teacher: hidden, but this target's lm_head is not a plain matrix (quantised, or with a bias), "
                "which training could apply; set target.teacher=logits"
            )
        self.half_matmul = self.weight.is_cuda and self.weight.dtype in (torch.bfloat16, torch.float16)
        self.matrix = (self.weight if self.half_matmul else self.weight.float()).T
        self.transform = transform_of(processor)

    def logits(self, last: Tensor) -> Tensor:
        if self.half_matmul:
            return self.transform.apply(torch.mm(last.to(self.weight.dtype), self.matrix, out_dtype=torch.float32))
        return self.transform.apply(last.float() @ self.matrix)


class LogitsTeacher(ServedTeacher):
    """Keeps the model's own logits for the draft vocabulary, in the order of draft ids."""

    def logits(self, last: Tensor) -> Tensor:
        return local_logits(self.processor, self.module, last)


def make_teacher(processor: nn.Module, module: Any, draft_vocabulary: str | None) -> ServedTeacher:
    """Create a server's teacher on one rank.

    processor, module: SGLang's logits processor and lm_head
    draft_vocabulary: file with d2t, if logits are kept; otherwise None

    Raises UserError if this target cannot have such a teacher.
    """
    if draft_vocabulary is None:
        return HiddenTeacher(processor, module)
    try:
        d2t = load_file(draft_vocabulary)["d2t"]
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(
            f"{draft_vocabulary}: has no draft vocabulary that SGLang could read ({error}); share that folder among "
            "the server's machines, and run capture.py again"
        ) from error
    return LogitsTeacher(processor, module, (d2t + torch.arange(len(d2t))).to(head_of(module).device))
