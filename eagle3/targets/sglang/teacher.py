"""What the target says after each row, inside SGLang: from logits of which no rank has all columns."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from eagle3.errors import UserError
from eagle3.targets.logits import BLOCK_ROWS, TeacherSummary
from eagle3.targets.sglang.version import head_of, local_logits, plain_weight, transform_of
from eagle3.targets.sharding import DraftColumns, summarize_sharded

logger = logging.getLogger(__name__)


class ServedTeacher(ABC):
    """processor, module: SGLang's logits processor and lm_head, which is sharded over `group`."""

    def __init__(self, processor: nn.Module, module: Any) -> None:
        self.processor, self.module = processor, module
        self.head = head_of(module)
        self.group = self.head.group

    def says(self, last: Tensor, rows: Sequence[Tensor]) -> tuple[Tensor, TeacherSummary]:
        """Collective over `group`. last [N, H]: of one forward; rows: for each rank, int64, the rows that it writes. Returns
        what the draft's teacher will be made from, [M, W], for the M rows that this rank writes; and the summary of all N.
        Logits of one block of rows at a time exist."""
        told = self.head.first_id, self.head.valid, self.group
        blocks = [summarize_sharded(self.logits(block), *told) for block in last.split(BLOCK_ROWS)]
        return self.kept(last, rows), TeacherSummary(*map(torch.cat, zip(*blocks, strict=True)))

    @abstractmethod
    def logits(self, last: Tensor) -> Tensor:
        """[n, V/tp] of this rank's columns after rows last [n, H]."""

    @abstractmethod
    def kept(self, last: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """See `says`."""


class HiddenTeacher(ServedTeacher):
    """Keeps last hidden states; training applies the lm_head to them."""

    def __init__(self, processor: nn.Module, head: Any) -> None:
        super().__init__(processor, head)
        self.weight = plain_weight(head)
        if self.weight is None:
            raise UserError(
                "target.teacher: hidden, but this target's lm_head is no plain matrix (quantised, or with a bias), which "
                "training could not apply; set target.teacher=logits"
            )
        self.half_matmul = self.weight.is_cuda and self.weight.dtype in (torch.bfloat16, torch.float16)
        self.columns = (self.weight if self.half_matmul else self.weight.float()).T
        self.transform = transform_of(processor)

    def logits(self, last: Tensor) -> Tensor:
        if self.half_matmul:
            return self.transform.apply(torch.mm(last.to(self.weight.dtype), self.columns, out_dtype=torch.float32))
        return self.transform.apply(last.float() @ self.columns)

    def kept(self, last: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """A view where they are consecutive, as they are with one rank: an index would have to reach the GPU first, and the
        forward wait for it."""
        own = rows[self.group.rank()]
        if not len(own):
            return last[:0]
        first, stop = int(own[0]), int(own[-1]) + 1
        return last[first:stop] if stop - first == len(own) else last[own.to(last.device)]


class LogitsTeacher(ServedTeacher):
    """Keeps the model's own logits of the draft vocabulary's tokens, in the order of draft ids."""

    def __init__(self, processor: nn.Module, head: Any, draft_ids: Tensor) -> None:
        super().__init__(processor, head)
        self.columns = DraftColumns.of(draft_ids.to(self.head.device), self.head.first_id, self.head.valid, self.group)
        self.peak = 0  # bytes, largest so far

    def logits(self, last: Tensor) -> Tensor:
        return local_logits(self.processor, self.module, last)

    def kept(self, last: Tensor, rows: Sequence[Tensor]) -> Tensor:
        one = self.logits(last[:1])
        kept = self.columns.redistribute(lambda chosen: self.logits(last[chosen]), rows, one.dtype)
        peak = self.columns.peak_bytes([len(each) for each in rows], one.shape[1], one.element_size())
        if peak > self.peak:
            self.peak = peak
            logger.warning("teacher logits: up to %.1f MiB on this rank, for %d rows", peak / 2**20, len(last))
        return kept


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
