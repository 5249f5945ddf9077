"""Attention of one training-time-test step: the causal prefix K_0, V_0 over all ranks and the position's own K_1..K_k, in one
softmax."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from eagle3.attention.block import BlockOutput
from eagle3.attention.ring import Exchange, RingAttention, RingMode, SharedKeyValue
from eagle3.attention.schedule import PrefixSchedule
from eagle3.attention.ulysses import Ulysses


class KeyValue(NamedTuple):
    """key and value [tokens, kv heads, head_dim]; the key is rotated."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class TTTAttention:
    """Attention for the heads of one tensor-parallel rank, over a Ulysses and a ring group.

    The prefix is computed with the heads dealt out (Ulysses) and the keys dealt out (ring). What a query alone sees
    (own keys) is merged afterwards where its token lives, so that it crosses no ranks.
    """

    ulysses: Ulysses
    ring: RingAttention
    chunk: int = 1024

    @classmethod
    def over(
        cls,
        ulysses: ProcessGroup,
        ring: ProcessGroup,
        scale: float,
        mode: RingMode = "gather",
        chunk: int = 1024,
    ) -> "TTTAttention":
        """chunk: queries whose own keys are merged at once."""
        return cls(Ulysses(ulysses), RingAttention(ring, mode, scale), chunk)

    def start(self, prefix: KeyValue) -> Exchange:
        """Begin to share this rank's K_0, V_0 (every sequence rank has the same number of rows) for all steps."""
        joined = self.ulysses.to_heads(self.ulysses.replicate(torch.cat(prefix, -1)))
        return self.ring.start(joined.unflatten(-1, (2, -1)).permute(2, 0, 1, 3))

    def __call__(
        self,
        q: Tensor,
        shared: SharedKeyValue,
        schedules: tuple[PrefixSchedule, ...],
        own: Sequence[KeyValue] = (),
    ) -> Tensor:
        """Output [Q, heads, d] of step k for q [Q, heads, d].

        shared: of the exchange. schedules: the Ulysses group's queries against each ring rank's keys. own: K_1..K_k,
        V_1..V_k, each [Q, kv_heads, d], of which query t sees row t alone. Differentiable in every tensor.
        """
        part = self.ring(self.ulysses.to_heads(q), shared, schedules)
        out = self.ulysses.to_tokens(part.out)
        if not own:
            return out
        lse = self.ulysses.to_tokens(part.lse[..., None])[..., 0]
        keys, values = tuple(kv.key for kv in own), tuple(kv.value for kv in own)
        return _MergeOwn.apply(out, lse, q, _Merge(self.ring.scale, self.chunk), *keys, *values)


class _Merge(NamedTuple):
    """How to merge. rows: of queries at once."""

    scale: float
    rows: int

    def chunks(self, queries: int) -> Iterator[slice]:
        return (slice(start, start + self.rows) for start in range(0, queries, self.rows))


class _MergeOwn(torch.autograd.Function):
    """softmax over the prefix (as out and lse) and own keys: every term has a probability and a value. Row by row,
    so in chunks of rows, whose fp32 copies are all that there is beside the results."""

    @staticmethod
    def forward(ctx, out, lse, q, merge, *own):
        merged, total = torch.empty_like(q), torch.empty_like(lse)
        for rows in merge.chunks(len(q)):
            merged[rows], total[rows] = _merge_rows(out, lse, q, merge, own, rows)
        ctx.save_for_backward(out, lse, q, total, *own)
        ctx.merge = merge
        return merged

    @staticmethod
    def backward(ctx, grad):
        out, lse, q, total, *own = ctx.saved_tensors
        d_out, d_lse, dq = torch.empty_like(out), torch.empty_like(lse), torch.empty_like(q)
        d_own = [torch.empty_like(tensor) for tensor in own]
        for rows in ctx.merge.chunks(len(q)):
            made = _merge_rows_backward(grad, out, lse, q, total, ctx.merge, own, rows)
            d_out[rows], d_lse[rows], dq[rows] = made.out, made.lse, made.q
            for whole, part in zip(d_own, made.own, strict=True):
                whole[rows] = part
            del made
        return d_out, d_lse, dq, None, *d_own


def _merge_rows(out: Tensor, lse: Tensor, q: Tensor, merge: _Merge, own: Sequence[Tensor], rows: slice) -> BlockOutput:
    _, values, grouped, logits = _own_logits(q, own, rows, merge.scale, lse.dtype)
    total = torch.cat((lse[None, rows], logits)).logsumexp(0)
    p = (logits - total).exp().unflatten(-1, grouped.shape[1:3])
    own_part = torch.einsum("kqng,kqnd->qngd", p, values).flatten(1, 2)
    return BlockOutput(out[rows] * (lse[rows] - total).exp()[..., None] + own_part, total)


class _RowGradients(NamedTuple):
    out: Tensor
    lse: Tensor
    q: Tensor
    own: tuple[Tensor, ...]


def _merge_rows_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    total: Tensor,
    merge: _Merge,
    own: Sequence[Tensor],
    rows: slice,
) -> _RowGradients:
    keys, values, grouped, logits = _own_logits(q, own, rows, merge.scale, lse.dtype)
    upstream, lse, total = grad[rows].to(lse.dtype), lse[rows], total[rows]
    share, p = (lse - total).exp(), (logits - total).exp()
    split = upstream.unflatten(1, grouped.shape[1:3])
    prefix_dot = (upstream * out[rows]).sum(-1)
    dots = torch.einsum("qngd,kqnd->kqng", split, values).flatten(2)
    delta = share * prefix_dot + (p * dots).sum(0)  # sum(grad * merged)
    d_logits = p * (dots - delta)
    d_logits, p = ((merge.scale * d_logits).unflatten(-1, grouped.shape[1:3]), p.unflatten(-1, grouped.shape[1:3]))
    return _RowGradients(
        out=upstream * share[..., None],
        lse=share * (prefix_dot - delta),
        q=torch.einsum("kqng,kqnd->qngd", d_logits, keys).flatten(1, 2),
        own=(
            *torch.einsum("kqng,qngd->kqnd", d_logits, grouped),
            *torch.einsum("kqng,qngd->kqnd", p, split),
        ),
    )


class _OwnLogits(NamedTuple):
    """Of a chunk of rows, in fp32 at least: keys, values [k, rows, kv_heads, d], q grouped [rows, kv_heads, group, d],
    logits [k, rows, heads]."""

    keys: Tensor
    values: Tensor
    q: Tensor
    logits: Tensor


def _own_logits(q: Tensor, own: Sequence[Tensor], rows: slice, scale: float, dtype: torch.dtype) -> _OwnLogits:
    count, kv_heads = len(own) // 2, own[0].shape[1]
    q = q[rows].to(dtype).unflatten(1, (kv_heads, -1))
    keys, values = (torch.stack([t[rows].to(dtype) for t in part]) for part in (own[:count], own[count:]))
    return _OwnLogits(keys, values, q, torch.einsum("qngd,kqnd->kqng", q, keys).flatten(2) * scale)
