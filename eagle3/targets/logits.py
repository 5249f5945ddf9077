"""A target's logits: the head and the transform that compute them, and the part of them that training needs.

If tensor-parallel ranks hold the logits in vocabulary shards, every rank gets the same summaries (argmax and logsumexp)
as without shards, and the draft vocabulary's columns for its own rows. No rank ever holds a whole row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3.errors import UserError

# Number of rows whose full-vocabulary logits exist at a time.
BLOCK_ROWS = 512
# Above every token id, so that it loses when ranks look for the lowest id among the largest logits.
_ELSEWHERE = torch.iinfo(torch.int64).max


def check_tokens(ids: Tensor, number: int, limit: int) -> None:
    """Raises UserError if document `number` has no tokens, or a token id outside the embedding of `limit` rows."""
    if ids.numel() == 0:
        raise UserError(f"target: document {number} has no tokens; leave it out")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= limit:
        raise UserError(
            f"target: document {number} has token id {low if low < 0 else high}, outside the vocabulary of "
            f"{limit}; tokenise with this target's own tokenizer"
        )


@dataclass(frozen=True)
class LogitTransform:
    """Transforms the lm_head's logits as the model does: multiplies them by `scale`, then caps them softly at +-`cap`.

    Model families that do both do them in this order.
    """

    scale: float = 1.0
    cap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """Transform in place."""
        if self.scale != 1:
            logits.mul_(self.scale)
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits


@dataclass(frozen=True)
class TargetHead:
    """The target's frozen embedding and lm_head; the same tensor if the target ties them."""

    embedding: Tensor  # [V, Ht]
    # [V, Ht]; None if it is not a plain matrix (quantised, biased) and only the model itself can compute logits. V is
    # then the embedding's.
    head: Tensor | None
    transform: LogitTransform = LogitTransform()  # applied to head @ hidden state

    @property
    def vocab_size(self) -> int:
        return len(self.embedding if self.head is None else self.head)

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state, Ht."""
        return (self.embedding if self.head is None else self.head).shape[1]


class TeacherSummary(NamedTuple):
    """The target's full distribution in each row, reduced to two numbers."""

    argmax: Tensor  # [N] int64, over the full vocabulary
    logsumexp: Tensor  # [N] fp32 (fp64 for fp64 inputs), over the full vocabulary

    @classmethod
    def of(cls, logits: Tensor) -> Self:
        """logits: [N, V]. Ties go to the lowest id."""
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return cls(exact.argmax(-1), exact.logsumexp(-1))


Summary = TypeVar("Summary", bound=NamedTuple)


def by_blocks(
    last: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    summarize: Callable[[Tensor], Summary],
    columns: Tensor | None = None,
    block_rows: int = BLOCK_ROWS,
) -> tuple[Summary, Tensor | None]:
    """Compute the logits of last hidden states [N, Ht], which exist for one block of rows at a time. Returns their
    summary, and those in `columns` [n] as [N, n]; None without columns."""
    summaries, chosen = [], []
    for rows in last.split(block_rows):
        logits = logits_of(rows)
        if columns is not None:
            chosen.append(logits.index_select(1, columns))
        summaries.append(summarize(logits))
        del logits  # before the next block's are made
    summary = type(summaries[0])(*map(torch.cat, zip(*summaries, strict=True)))
    return summary, torch.cat(chosen) if chosen else None


@torch.no_grad()
def summarize_teacher(
    last: Tensor, head: Tensor, block_rows: int = BLOCK_ROWS, transform: LogitTransform = LogitTransform()
) -> TeacherSummary:
    """Argmax and logsumexp of `transform(last @ head.T)`, last [N, Ht], head [V, Ht], for `block_rows` rows at a time.

    Logits are fp32 even for bf16 inputs (fp64 for fp64 ones) and exist for one block at a time. Ties go to the lowest
    id.
    """
    summary, _ = by_blocks(last, exact_logits(head, transform, last.dtype), TeacherSummary.of, block_rows=block_rows)
    return summary


def exact_logits(head: Tensor, transform: LogitTransform, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A function that computes `transform(last @ head.T)` [n, V] in fp32, even from bf16 (in fp64 from fp64), for last
    hidden states [n, Ht] on the head's device. head: [V, Ht]. dtype: of the hidden states."""
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    # Half-precision products are exact in fp32, so a tensor-core matmul that returns its fp32 sums equals an fp32
    # matmul and takes a fraction of the time. torch has it only on CUDA; elsewhere the head is converted once, for all
    # calls.
    half_matmul = head.is_cuda and dtype == head.dtype and dtype in (torch.bfloat16, torch.float16)
    weight = (head if half_matmul else head.to(accumulate)).T

    def logits(last: Tensor) -> Tensor:
        rows = last.to(dtype if half_matmul else accumulate)
        product = torch.mm(rows, weight, out_dtype=torch.float32) if half_matmul else rows @ weight
        return transform.apply(product)

    return logits


# By vocabulary shard --------------------------------------------------------------------------------------------------


class ShardSummary(NamedTuple):
    """What one rank's columns say of N rows; fp32, or fp64 for fp64 logits."""

    peak: Tensor  # [N]: largest logit; -inf without columns
    best: Tensor  # [N] int64: its token id (ties: lowest)
    logsumexp: Tensor  # [N]

    @classmethod
    @torch.no_grad()
    def of(cls, logits: Tensor, first_id: int, valid: int) -> Self:
        """Takes one copy of the logits, so callers pass a block of rows at a time.

        logits: [n, V/tp], for tokens first_id, first_id + 1, ... of the vocabulary
        valid: how many of these columns are tokens; the rest are padding, whose values do not matter
        """
        assert 0 <= valid <= logits.shape[1], f"{valid} tokens in a shard of {logits.shape[1]} columns"
        exact = torch.promote_types(logits.dtype, torch.float32)
        if not valid:
            nothing = logits.new_full((len(logits),), float("-inf"), dtype=exact)
            return cls(nothing, torch.full_like(nothing, _ELSEWHERE, dtype=torch.int64), nothing)
        columns = logits[:, :valid].to(exact, copy=True)
        peak, best = columns.max(-1)
        total = columns.sub_(peak[:, None]).exp_().sum(-1)
        return cls(peak, best + first_id, peak + total.log())

    @torch.no_grad()
    def merged(self, group: dist.ProcessGroup) -> TeacherSummary:
        """The summary over the full vocabulary, on every rank. Collective over `group`, whose ranks have the same rows.
        They exchange a maximum, a logsumexp and an id per row."""
        peaks = torch.stack((self.peak, self.logsumexp))
        dist.all_reduce(peaks, dist.ReduceOp.MAX, group)
        best = torch.where(self.peak == peaks[0], self.best, _ELSEWHERE)
        dist.all_reduce(best, dist.ReduceOp.MIN, group)
        total = torch.exp(self.logsumexp - peaks[1])
        dist.all_reduce(total, group=group)
        return TeacherSummary(best, peaks[1] + total.log())


def local_columns(draft_ids: Tensor, first_id: int, valid: int) -> Tensor:
    """The columns [n] int64 of a shard that are draft tokens, ascending. For the arguments see `draft_widths`."""
    return draft_ids[(draft_ids >= first_id) & (draft_ids < first_id + valid)] - first_id


def draft_widths(draft_ids: Tensor, first_id: int, valid: int, group: dist.ProcessGroup) -> list[int]:
    """How many of its columns are draft tokens, for each rank of `group`. In rank order, these form the draft
    vocabulary in its own order. Collective over `group`.

    draft_ids: [Vd] int64, the tokens of the draft vocabulary, ascending, the same on every rank
    first_id, valid: see `ShardSummary.of`

    Shards must be in rank order, as in SGLang and Megatron-core.
    """
    width = len(local_columns(draft_ids, first_id, valid))
    shard_info = torch.tensor([first_id, valid, width], device=draft_ids.device)
    all_info = [torch.empty_like(shard_info) for _ in range(group.size())]
    dist.all_gather(all_info, shard_info, group=group)
    firsts, valids, widths = torch.stack(all_info).T.tolist()
    ends = [first + width for first, width in zip(firsts, valids, strict=True) if width]
    assert ends == sorted(ends) and bool((draft_ids.diff() > 0).all()), "shards and draft tokens ascend"
    assert sum(widths) == len(draft_ids), f"{sum(widths)} of {len(draft_ids)} draft tokens are in exactly one shard"
    return widths


def exchange_columns(drafted: Tensor, widths: Sequence[int], rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange logits so that each rank gets its own rows with the whole draft vocabulary: [rows[own rank], Vd].
    Collective over `group`.

    drafted: [n, widths[own rank]], this rank's draft columns of all rows: those of the first rank, of the second, ...
    widths: see `draft_widths`
    rows: how many of the n rows each rank gets, in rank order; may be 0 for some

    Only draft columns are sent, each row to a single rank.
    """
    own_count, own_width = rows[group.rank()], widths[group.rank()]
    assert drafted.shape == (sum(rows), own_width)
    receive_sizes = [own_count * width for width in widths]
    incoming = drafted.new_empty(sum(receive_sizes))
    dist.all_to_all_single(
        incoming, drafted.flatten(), receive_sizes, [count * own_width for count in rows], group=group
    )
    # the result is laid out row by row, but the data arrived rank by rank
    pieces = zip(incoming.split(receive_sizes), widths, strict=True)
    return torch.cat([piece.view(own_count, width) for piece, width in pieces], 1)
