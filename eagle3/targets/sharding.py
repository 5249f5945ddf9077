"""Logits that tensor-parallel ranks of a target hold by vocabulary shard: what the teacher says, and the draft's columns
of them dealt to the ranks that train on the rows, without any rank ever having all of a row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from eagle3.states.batches import deal_streams
from eagle3.targets.logits import BLOCK_ROWS, TeacherSummary

# Above every token id, so that it loses when ranks look for the lowest id of the largest logit.
_ELSEWHERE = torch.iinfo(torch.int64).max


@torch.no_grad()
def summarize_sharded(logits: Tensor, first_id: int, valid: int, group: ProcessGroup) -> TeacherSummary:
    """Argmax (ties: lowest id) and logsumexp over the full vocabulary, on every rank. Collective over `group`.

    logits [N, V/tp]: the same N rows on every rank, tokens first_id, first_id + 1, ... of the vocabulary. valid: how many
    of these columns are tokens; what follows is padding, whatever it holds. Sums are fp32 (fp64 for fp64 logits), in
    copies of some rows at a time; of each row a maximum, a logsumexp and an id cross ranks.
    """
    assert 0 <= valid <= logits.shape[1], f"{valid} tokens in a shard of {logits.shape[1]} columns"
    exact = torch.promote_types(logits.dtype, torch.float32)
    rows = len(logits)
    own = torch.full((2, rows), float("-inf"), dtype=exact, device=logits.device)  # largest logit, logsumexp
    best = torch.full((rows,), _ELSEWHERE, device=logits.device)
    for start in range(0, rows if valid else 0, BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        columns = logits[block, :valid].to(exact)
        own[0, block], best[block] = columns.max(-1)
        own[1, block] = columns.logsumexp(-1)
        del columns  # before the next block's
    best = torch.where(best == _ELSEWHERE, best, best + first_id)
    if group.size() == 1:
        return TeacherSummary(best, own[1])
    peaks = own.clone()
    dist.all_reduce(peaks, dist.ReduceOp.MAX, group)
    best = torch.where(own[0] == peaks[0], best, _ELSEWHERE)
    dist.all_reduce(best, dist.ReduceOp.MIN, group)
    total = torch.exp(own[1] - peaks[1])
    dist.all_reduce(total, group=group)
    return TeacherSummary(best, peaks[1] + total.log())


@dataclass(frozen=True)
class DraftColumns:
    """The draft vocabulary over vocabulary shards.

    local [n] int64: columns of this rank's shard that are draft tokens, ascending. widths: their number on each rank of
    `group`; together they are the draft vocabulary, in its order.
    """

    local: Tensor
    widths: tuple[int, ...]
    group: ProcessGroup

    @classmethod
    def of(cls, draft_ids: Tensor, first_id: int, valid: int, group: ProcessGroup) -> Self:
        """Collective over `group`. draft_ids [Vd] int64: the tokens of the draft vocabulary, ascending, the same on every
        rank; first_id, valid: see `summarize_sharded`. Ranks hold the vocabulary in their order, as SGLang and
        Megatron-core cut it."""
        local = draft_ids[(draft_ids >= first_id) & (draft_ids < first_id + valid)] - first_id
        told = torch.tensor([first_id, valid, len(local)], device=draft_ids.device)
        everyones = [torch.empty_like(told) for _ in range(group.size())]
        dist.all_gather(everyones, told, group=group)
        firsts, valids, widths = zip(*torch.stack(everyones).tolist(), strict=True)
        ends = [first + width for first, width in zip(firsts, valids, strict=True) if width]
        assert ends == sorted(ends) and bool((draft_ids.diff() > 0).all()), "shards and draft tokens ascend"
        assert sum(widths) == len(draft_ids), f"{sum(widths)} of {len(draft_ids)} draft tokens are in exactly one shard"
        return cls(local, widths, group)

    @property
    def size(self) -> int:
        """Vd."""
        return sum(self.widths)

    def exchange(self, logits: Tensor, rows: Sequence[int], out: Tensor) -> None:
        """Collective. From logits [n, V/tp], all rows and this rank's shard, to out [rows[own rank], Vd], its own rows and
        the whole draft vocabulary; out may be a part of a larger tensor. rows: how many of the n rows each rank gets, in
        the order of the ranks; 0 for some is fine. Only draft columns cross ranks, each to one rank.
        """
        mine, width = rows[self.group.rank()], len(self.local)
        assert len(logits) == sum(rows) and out.shape == (mine, self.size)
        chosen = logits.index_select(1, self.local)
        if self.group.size() == 1:
            out.copy_(chosen)
            return
        arriving = [mine * each for each in self.widths]
        arrived = chosen.new_empty(sum(arriving))
        dist.all_to_all_single(arrived, chosen.flatten(), arriving, [each * width for each in rows], group=self.group)
        # `out` lies row by row, what arrived rank by rank.
        for part, piece in zip(out.split(self.widths, 1), arrived.split(arriving), strict=True):
            part.copy_(piece.view_as(part))

    def redistribute(
        self,
        logits: Callable[[Tensor], Tensor],
        rows: Sequence[Tensor],
        dtype: torch.dtype,
        block_rows: int = BLOCK_ROWS,
    ) -> Tensor:
        """Collective. This rank's rows of the draft's columns, [len(rows[own rank]), Vd] in the order of rows[own rank].

        rows: for each rank of the group the rows it keeps (int64, see `document_rows` and `sequence_rows`), the same lists
        on every rank; a row may be kept by several ranks, or by none. logits(rows [n]) -> [n, V/tp]: this rank's shard of
        the logits after these rows, in `dtype`. It is asked for `block_rows` rows a rank at a time, so that no more logits
        of the vocabulary exist; what a rank holds at once is `peak_bytes`.
        """
        group, device = self.group, self.local.device
        most, mine = max(map(len, rows)), len(rows[group.rank()])
        out = torch.empty(mine, self.size, dtype=dtype, device=device)
        for start in range(0, most, block_rows):
            block = [each[start : start + block_rows] for each in rows]
            kept = out[start : start + block_rows]
            self.exchange(logits(torch.cat(block).to(device)), [len(each) for each in block], kept)
        return out

    def peak_bytes(self, rows: Sequence[int], width: int, itemsize: int, block_rows: int = BLOCK_ROWS) -> int:
        """What this rank holds at once in `redistribute`: its rows, and for a block of all ranks' rows the shard's logits,
        their draft columns, and what arrives. rows: of each rank; width: columns of a shard, padding included; itemsize:
        of a logit. What `logits` itself needs for a block comes on top."""
        mine, block = rows[self.group.rank()], [min(each, block_rows) for each in rows]
        arriving = 0 if self.group.size() == 1 else min(mine, block_rows) * self.size
        return itemsize * (mine * self.size + sum(block) * (width + len(self.local)) + arriving)


def document_rows(lengths: Sequence[int], ranks: int) -> list[Tensor]:
    """Without sequence parallelism: the rows of each rank, whole documents of a batch that lie one after the other.
    Longest first, each to the rank with the fewest rows; with more ranks than documents some get none."""
    rows, nothing = torch.arange(sum(lengths)).split(list(lengths)), torch.arange(0)
    dealt = deal_streams(lengths, ranks)
    return [torch.cat([nothing, *(rows[document] for document in documents)]) for documents in dealt]


def sequence_rows(shares: Sequence[int], ranks: int, divided: bool = False) -> list[Tensor]:
    """With sequence parallelism: the rows of each of the target's ranks, of a sequence cut into consecutive `shares` (rows
    of each sequence rank, equal or not). The target's degree is a multiple of the number of shares: the ranks r, r+1, ...
    of one share all have its rows; or, `divided`, an about equal part each, in order."""
    assert ranks % len(shares) == 0, f"{ranks} ranks of the target for {len(shares)} shares"
    each = ranks // len(shares)
    of_shares = torch.arange(sum(shares)).split(list(shares))
    if divided:
        return [part for share in of_shares for part in share.tensor_split(each)]
    return [share for share in of_shares for _ in range(each)]
