"""Captures hidden states of a job's requests into its spool. Runs inside SGLang, on every tensor-parallel rank.

A server is started with this module's `CaptureHook` as a forward hook on its logits processor
(`version.capture_flags`). In each prefill forward, the hook gets some rows of several requests. The teacher's values
for each row are combined from the ranks' vocabulary shards. Then the rank that owns a request writes its rows in the
store's format, from a separate thread, while the next forward runs.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from eagle3.errors import UserError
from eagle3.states.rows import Rows
from eagle3.states.spool import Ticket, WantedRows, wanted_rows
from eagle3.states.spool_writer import RequestRows, SpoolWriter
from eagle3.states.store.codecs import StoreDtype
from eagle3.states.store.shard import Encoding
from eagle3.targets.checkpoint import fingerprint
from eagle3.targets.logits import (
    ShardSummary,
    TeacherSummary,
    by_blocks,
    draft_widths,
    exact_logits,
    exchange_columns,
    local_columns,
)
from eagle3.targets.sglang.version import (
    WITHOUT_RESIDUAL,
    HookCall,
    head_of,
    hook_call,
    loaded_checkpoint,
    local_logits,
    plain_weight,
    tensor_ranks,
    transform_of,
)
from eagle3.tensors import send

# Number of threads that write samples in parallel; each writes about 0.5 GB/s.
WRITERS = 4

logger = logging.getLogger(__name__)


class HookSettings(NamedTuple):
    """The settings of a server's hook, shared by all jobs that use the server."""

    spool: str  # folder that holds the jobs' folders
    dtype: StoreDtype  # number format of the rows
    target: str  # fingerprint of the target's checkpoint, which jobs compare with theirs
    hidden_size: int  # width of the target's hidden states
    aux_layers: int = 3  # how many layers' states a row has
    # For a store of logits: a safetensors file with d2t, named by its digest, and the number of draft tokens.
    draft_vocabulary: str | None = None
    vocabulary_size: int | None = None

    @property
    def encoding(self) -> Encoding:
        """How rows are written in the spool."""
        return Encoding(
            "none", self.dtype, self.hidden_size, aux_layers=self.aux_layers, teacher_width=self.vocabulary_size
        )


_streams: list[Tensor] = []  # what `read_stream` found in the current forward, [N, H] for each aux layer


def make_layer_hook(_settings: Mapping[str, Any]) -> Callable[..., None]:
    """Create the hook of the aux layers; SGLang calls this factory."""
    return read_stream


def read_stream(layer: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
    """Reads the residual stream after a layer, if SGLang would capture something else there."""
    if type(layer).__name__ in WITHOUT_RESIDUAL:
        hidden, residual = output
        _streams.append(hidden + residual)


class CaptureHook:
    """The hook of the logits processor, which SGLang makes. settings: HookSettings as JSON values."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings = HookSettings(**settings)
        self.teacher: ServedTeacher | None = None
        self.wanted: dict[Ticket, WantedRows] = {}  # of the samples that are being prefilled
        self.unwanted: set[Ticket] = set()  # requests that came too late: their jobs have the samples already
        self.writers = [SpoolWriter(Path(settings.spool), settings.encoding) for _ in range(WRITERS)]
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
                self.writer(ticket, ranks.cpu_group.size()).refuse(ticket, reason)

    def _capture(self, processor: nn.Module, call: HookCall, tickets: Sequence[Ticket | None], ranks: Any) -> None:
        rank, size = ranks.cpu_group.rank(), ranks.cpu_group.size()
        self._learn_wanted(call, tickets, ranks)
        tickets = [None if ticket in self.unwanted else ticket for ticket in tickets]
        if not any(tickets):
            return
        shares: list[RequestRows] = []

        def compute() -> tuple[Any, ...]:
            self._require_whole(call)
            shares.extend(sorted(self._shares(call, tickets, size), key=lambda share: share.owner))
            if self.teacher is None:
                self.teacher = ServedTeacher(processor, call.head, self.settings.draft_vocabulary)
            counts = [0] * size
            for share in shares:
                counts[share.owner] += int(share.taught.sum())
            places = torch.cat([share.places(share.taught) for share in shares])
            last = picked(call.last, places)
            return last, *self.teacher.taught(last), counts

        taught = together(compute, ranks.cpu_group)
        mine = [share for share in shares if share.owner == rank]
        counts = [int(share.taught.sum()) for share in mine]
        columns = (column.split(counts) for column in self.teacher.combined(*taught, ranks.device_group))
        parts = [call.aux] if isinstance(call.aux, Tensor) else call.aux
        for share, *teacher in zip(mine, *columns, strict=True):
            aux = torch.cat([picked(part, share.places(share.seen)) for part in parts], dim=-1)
            teacher = self.settings.encoding.teacher(*teacher)
            ids = call.ids[share.start : share.start + len(share.seen)]
            self.writer(share.ticket, size).take(share, ids, Rows(aux, teacher))

    def _learn_wanted(self, call: HookCall, tickets: Sequence[Ticket | None], ranks: Any) -> None:
        """Learn which new samples are wanted, and which of their rows, and forget the samples of jobs that have ended.
        The first rank looks for all, so that none can differ."""
        requests = zip(tickets, call.requests, strict=True)
        new = {ticket for ticket, (_, _, first_row) in requests if ticket and first_row == 0}
        if not new:
            return
        spool = Path(self.settings.spool)

        def look() -> tuple[dict[Ticket, WantedRows], set[str]]:
            found = {}
            for ticket in new:
                with suppress(FileNotFoundError):
                    found[ticket] = wanted_rows(spool / ticket.job, ticket)
            jobs = {ticket.job for ticket in self.wanted.keys() | self.unwanted}
            return found, {job for job in jobs if not (spool / job).is_dir()}

        message = [together(look if ranks.cpu_group.rank() == 0 else None, ranks.cpu_group)]
        if ranks.cpu_group.size() > 1:
            dist.broadcast_object_list(message, group=ranks.cpu_group, group_src=0)
        found, ended = message[0]
        self.wanted = {ticket: rows for ticket, rows in self.wanted.items() if ticket.job not in ended} | found
        self.unwanted = {ticket for ticket in self.unwanted | new if ticket.job not in ended} - found.keys()

    def _shares(self, call: HookCall, tickets: Sequence[Ticket | None], ranks: int) -> Iterator[RequestRows]:
        start = 0
        for ticket, (_, tokens, first_row) in zip(tickets, call.requests, strict=True):
            if ticket:
                stop = first_row + tokens
                take = self.wanted.pop if stop >= ticket.tokens else self.wanted.get
                wanted = take(ticket, None) or WantedRows.all(ticket.tokens)
                yield RequestRows(ticket, _number(ticket) % ranks, start, slice(first_row, stop), wanted)
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
    UserError with its reason, so that none waits for another. (parallel.topology's `agreed` is for jobs: it imports
    DeepSpeed and Megatron-core, and exchanges objects, which a forward pass should not wait for.)
    """
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


# The target's predictions, from logits of which no rank has all columns -----------------------------------------------


class ServedTeacher:
    """Computes the target's predictions for some rows, on one of a server's ranks. It keeps last hidden states, to
    which training applies the lm_head, or the model's own logits for the draft vocabulary, in the order of draft ids.

    processor, module: SGLang's logits processor and lm_head, which is sharded over the ranks or whole on each
    draft_vocabulary: file with d2t, if logits are kept; otherwise None

    Raises UserError if this target cannot have such a teacher.
    """

    def __init__(self, processor: nn.Module, module: Any, draft_vocabulary: str | None) -> None:
        self.head = head_of(module)
        self.draft_ids = self.local = self.widths = None
        if draft_vocabulary is None:
            weight = plain_weight(module)
            if weight is None:
                raise UserError(
                    "target.teacher: hidden, but this target's lm_head is not a plain matrix (quantised, or with a "
                    "bias), which training could apply; set target.teacher=logits"
                )
            self.logits = exact_logits(weight, transform_of(processor), weight.dtype)
            return
        try:
            d2t = load_file(draft_vocabulary)["d2t"]
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(
                f"{draft_vocabulary}: has no draft vocabulary that SGLang could read ({error}); share that folder "
                "among the server's machines, and run capture.py again"
            ) from error
        self.logits = partial(local_logits, processor, module)  # [n, V/tp], this rank's columns
        self.draft_ids = (d2t + torch.arange(len(d2t))).to(next(module.parameters()).device)
        # Found once: on a GPU, the host waits for it.
        self.local = local_columns(self.draft_ids, self.head.first_id, self.head.valid)

    def taught(self, last: Tensor) -> tuple[ShardSummary, Tensor | None]:
        """What this rank's columns say of rows `last` [M, H]: a summary and, if logits are kept, its draft columns
        [M, n]. Logits exist for one block of rows at a time, and are computed once."""
        summarize = partial(ShardSummary.of, first_id=self.head.first_id, valid=self.head.valid)
        return by_blocks(last, self.logits, summarize, self.local)

    def combined(
        self, last: Tensor, local: ShardSummary, drafted: Tensor | None, counts: list[int], group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The teacher's values, argmax and logsumexp of the rows that belong to this rank. Collective over `group`.

        last: [M, H]; local, drafted: what `taught` says of them
        counts: how many of the rows belong to each rank, the first one's first
        """
        start = sum(counts[: group.rank()])
        own = slice(start, start + counts[group.rank()])
        summary = TeacherSummary(local.best, local.logsumexp) if self.head.whole else local.merged(group)
        if drafted is None:
            values = last[own]
        elif self.head.whole:
            values = drafted[own]
        else:
            if self.widths is None:
                self.widths = draft_widths(self.draft_ids, self.head.first_id, self.head.valid, group)
            values = exchange_columns(drafted, self.widths, counts, group)
        return values, summary.argmax[own], summary.logsumexp[own]
