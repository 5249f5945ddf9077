"""The target's predictions for some rows, inside SGLang, from logits of which no rank has all columns."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from eagle3.errors import UserError
from eagle3.targets.logits import (
    DraftColumns,
    ShardSummary,
    TeacherSummary,
    by_blocks,
    exact_logits,
    local_columns,
)
from eagle3.targets.sglang.version import Head, head_of, local_logits, plain_weight, transform_of


class TaughtColumns(NamedTuple):
    """What one rank's columns say of a forward's taught rows: those of the first owner, of the second, and so on."""

    last: Tensor  # [M, H]
    summary: ShardSummary
    drafted: Tensor | None  # [M, this rank's draft columns], if logits are kept
    counts: list[int]  # how many of the rows each rank owns


class ServedTeacher:
    """Computes the target's predictions for some rows.

    logits: computes logits [n, V/tp] in this rank's columns for last hidden states [n, H]
    head: this rank's part of the lm_head, which is sharded over the server's ranks or whole on each
    draft_ids: [Vd] tokens of the draft vocabulary, if their logits are kept in place of last hidden states
    """

    def __init__(self, logits: Callable[[Tensor], Tensor], head: Head, draft_ids: Tensor | None = None) -> None:
        self.logits, self.head, self.draft_ids = logits, head, draft_ids
        # Found once: on a GPU, the host waits for it.
        self.local = None if draft_ids is None else local_columns(draft_ids, self.head.first_id, self.head.valid)
        self.columns: DraftColumns | None = None

    def taught(self, last: Tensor, counts: list[int]) -> TaughtColumns:
        """What this rank's columns say of rows `last` [M, H], of which `counts` belong to each rank, the first one's
        first. Logits exist for one block of rows at a time, and are computed once."""
        summarize = partial(ShardSummary.of, first_id=self.head.first_id, valid=self.head.valid)
        return TaughtColumns(last, *by_blocks(last, self.logits, summarize, self.local), counts)

    def combined(self, taught: TaughtColumns, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
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


def make_teacher(processor: nn.Module, module: Any, draft_vocabulary: str | None) -> ServedTeacher:
    """Create a server's teacher on one rank. It keeps last hidden states, to which training applies the lm_head, or the
    model's own logits for the draft vocabulary, in the order of draft ids.

    processor, module: SGLang's logits processor and lm_head
    draft_vocabulary: file with d2t, if logits are kept; otherwise None

    Raises UserError if this target cannot have such a teacher.
    """
    head = head_of(module)
    if draft_vocabulary is None:
        weight = plain_weight(module)
        if weight is None:
            raise UserError(
                "target.teacher: hidden, but this target's lm_head is not a plain matrix (quantised, or with a bias), "
                "which training could apply; set target.teacher=logits"
            )
        return ServedTeacher(exact_logits(weight, transform_of(processor), weight.dtype), head)
    try:
        d2t = load_file(draft_vocabulary)["d2t"]
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(
            f"{draft_vocabulary}: has no draft vocabulary that SGLang could read ({error}); share that folder among "
            "the server's machines, and run capture.py again"
        ) from error
    draft_ids = (d2t + torch.arange(len(d2t))).to(head.device)
    return ServedTeacher(partial(local_logits, processor, module), head, draft_ids)
