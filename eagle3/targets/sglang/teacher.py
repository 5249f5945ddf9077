"""What the target says after each row, inside SGLang: from logits of which no rank has all columns."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from eagle3.errors import UserError
from eagle3.targets.interface import BLOCK_ROWS, TeacherSummary
from eagle3.targets.sglang.version import Head, head_of, local_logits, plain_weight, transform_of
from eagle3.targets.sharding import DraftColumns, summarize_sharded

logger = logging.getLogger(__name__)


class TeacherWords(NamedTuple):
    """Of one forward's N rows: kept [M, W], what the draft's teacher will be made from, for the M rows this rank writes;
    argmax [N] int64 and logsumexp [N] over the full vocabulary."""

    kept: Tensor
    argmax: Tensor
    logsumexp: Tensor


class ServedTeacher(Protocol):
    group: ProcessGroup

    def says(self, last: Tensor, rows: Sequence[Tensor]) -> TeacherWords:
        """Collective over `group`. last [N, H]; rows: for each rank, int64, the rows that it writes."""


class HiddenTeacher:
    """Keeps last hidden states; training applies the lm_head to them."""

    def __init__(self, processor: nn.Module, head: Any) -> None:
        self.head: Head = head_of(head)
        self.group = self.head.group
        self.weight = plain_weight(head)
        if self.weight is None:
            raise UserError(
                "target.teacher: hidden, but this target's lm_head is no plain matrix (quantised, or with a bias), which "
                "training could not apply; set target.teacher=logits"
            )
        self.half_matmul = self.weight.is_cuda and self.weight.dtype in (torch.bfloat16, torch.float16)
        self.columns = (self.weight if self.half_matmul else self.weight.float()).T
        self.transform = transform_of(processor)

    def says(self, last: Tensor, rows: Sequence[Tensor]) -> TeacherWords:
        said = _summaries(last, self._logits, self.head)
        return TeacherWords(_chosen(last, rows[self.group.rank()]), *said)

    def _logits(self, last: Tensor) -> Tensor:
        if self.half_matmul:
            return self.transform.apply(torch.mm(last.to(self.weight.dtype), self.columns, out_dtype=torch.float32))
        return self.transform.apply(last.float() @ self.columns)


class LogitsTeacher:
    """Keeps the model's own logits of the draft vocabulary's tokens, in the order of draft ids."""

    def __init__(self, processor: nn.Module, head: Any, draft_ids: Tensor) -> None:
        self.processor, self.module = processor, head
        self.head = head_of(head)
        self.group = self.head.group
        self.columns = DraftColumns.of(draft_ids.to(self.head.device), self.head.first_id, self.head.valid, self.group)
        self.peak = 0  # bytes, largest so far

    def says(self, last: Tensor, rows: Sequence[Tensor]) -> TeacherWords:
        said = _summaries(last, self._logits, self.head)
        one = self._logits(last[:1])
        kept = self.columns.redistribute(lambda chosen: self._logits(last[chosen]), rows, one.dtype)
        peak = self.columns.peak_bytes([len(each) for each in rows], one.shape[1], one.element_size())
        if peak > self.peak:
            self.peak = peak
            logger.warning("teacher logits: up to %.1f MiB on this rank, for %d rows", peak / 2**20, len(last))
        return TeacherWords(kept, *said)

    def _logits(self, last: Tensor) -> Tensor:
        return local_logits(self.processor, self.module, last)


def _chosen(last: Tensor, rows: Tensor) -> Tensor:
    """Rows of `last`, ascending; a view where they are consecutive, as they are with one rank: an index would have to reach the
    GPU first, and the forward wait for it."""
    if not len(rows):
        return last[:0]
    first, stop = int(rows[0]), int(rows[-1]) + 1
    return last[first:stop] if stop - first == len(rows) else last[rows.to(last.device)]


def _summaries(last: Tensor, logits: Callable[[Tensor], Tensor], head: Head) -> TeacherSummary:
    """Logits of one block of rows at a time exist."""
    blocks = last.split(BLOCK_ROWS)
    said = [summarize_sharded(logits(block), head.first_id, head.valid, head.group) for block in blocks]
    return TeacherSummary(*map(torch.cat, zip(*said, strict=True)))


def make_teacher(processor: nn.Module, head: Any, draft_vocabulary: str | None) -> ServedTeacher:
    """Collective over the head's group. processor, head: SGLang's logits processor and lm_head. draft_vocabulary: file with d2t
    where logits are kept, else None. Raises UserError, on every rank or on none, where the target cannot be taught so."""
    if draft_vocabulary is None:
        return HiddenTeacher(processor, head)
    told, draft_ids, reason = head_of(head), None, None
    try:
        d2t = load_file(draft_vocabulary)["d2t"]
        draft_ids = d2t + torch.arange(len(d2t))
    except (OSError, SafetensorError, KeyError) as error:
        reason = f"{draft_vocabulary}: has no draft vocabulary that SGLang could read ({error}); run capture.py again"
    failed = torch.tensor([reason is not None], dtype=torch.int32, device=told.device)
    dist.all_reduce(failed, dist.ReduceOp.MAX, told.group)
    if failed.item():
        raise UserError(reason or f"{draft_vocabulary}: another rank of the server cannot read it; share that folder")
    return LogitsTeacher(processor, head, draft_ids)
