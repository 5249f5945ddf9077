"""Attention of one training-time-test (TTT) step: the causal prefix K_0, V_0 over all ranks, and each position's own
K_1..K_k, in one softmax."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from deepspeed.sequence.layer import _SeqAllToAll
from torch import Tensor
from torch.distributed import ProcessGroup

from eagle3.attention.block import BlockOutput
from eagle3.attention.ring import Exchange, RingAttention, RingMode, SharedKeyValue
from eagle3.attention.schedule import PrefixSchedule

# DeepSpeed's layout is [tokens, batch, heads, width].
TOKENS, BATCH, HEADS = 0, 1, 2


class KeyValue(NamedTuple):
    """Keys and values of some rows."""

    key: Tensor  # [tokens, kv heads, head_dim], rotated
    value: Tensor  # [tokens, kv heads, head_dim]


@dataclass(frozen=True)
class Ulysses:
    """Trades tokens for heads among the U ranks of a group, by DeepSpeed's all-to-all. Differentiable; does nothing for
    U = 1."""

    group: ProcessGroup

    def to_heads(self, x: Tensor) -> Tensor:
        """Maps [tokens, heads, width] for this rank's tokens to [U * tokens, heads / U, width] for this rank's heads,
        with tokens in rank order. heads must be a multiple of U (otherwise the collective would hang)."""
        assert x.shape[1] % self.group.size() == 0, f"{x.shape[1]} heads over {self.group.size()} Ulysses ranks"
        return self._exchange(x, HEADS, TOKENS)

    def to_tokens(self, x: Tensor) -> Tensor:
        """The way back: maps [U * tokens, heads / U, width] to [tokens, heads, width]."""
        return self._exchange(x, TOKENS, HEADS)

    def replicate(self, x: Tensor) -> Tensor:
        """Repeats each key/value head of [tokens, kv_heads, width] so that their number is a multiple of U and each
        rank has the ones that its query heads need. Autograd sums the gradients of the copies."""
        kv_heads = x.shape[1]
        return x.repeat_interleave(self.group.size() // math.gcd(self.group.size(), kv_heads), 1)

    def _exchange(self, x: Tensor, scatter: int, gather: int) -> Tensor:
        if self.group.size() == 1:
            return x
        return _SeqAllToAll.apply(self.group, x[:, None].contiguous(), scatter, gather, BATCH)[:, 0]


@dataclass(frozen=True)
class TTTAttention:
    """Attention for the heads of one tensor-parallel rank, over a Ulysses and a ring group.

    The prefix is computed with heads dealt to Ulysses ranks and keys dealt to ring ranks. What only one query sees (its
    own keys) is merged afterwards on the rank of that token, so it never crosses ranks.
    """

    ulysses: Ulysses
    ring: RingAttention
    chunk: int = 1024  # queries whose own keys are merged at once

    @classmethod
    def over(
        cls,
        ulysses: ProcessGroup,
        ring: ProcessGroup,
        scale: float,
        mode: RingMode = "gather",
        chunk: int = 1024,
    ) -> "TTTAttention":
        """Builds the attention on these process groups."""
        return cls(Ulysses(ulysses), RingAttention(ring, mode, scale), chunk)

    def start(self, prefix: KeyValue) -> Exchange:
        """Starts to share this rank's K_0, V_0, for use in all steps. Every sequence rank has the same number of
        rows."""
        key_value = self.ulysses.to_heads(self.ulysses.replicate(torch.cat(prefix, -1)))
        return self.ring.start(key_value.unflatten(-1, (2, -1)).permute(2, 0, 1, 3))

    def __call__(
        self,
        q: Tensor,
        shared: SharedKeyValue,
        schedules: tuple[PrefixSchedule, ...],
        own: Sequence[KeyValue] = (),
    ) -> Tensor:
        """Output [Q, heads, d] of step k for q [Q, heads, d]; differentiable in every tensor.

        shared: from the exchange.
        schedules: what the Ulysses group's queries see of each ring rank's keys.
        own: K_1..K_k, V_1..V_k, each [Q, kv_heads, d]; query t sees only row t of them.
        """
        part = self.ring(self.ulysses.to_heads(q), shared, schedules)
        out = self.ulysses.to_tokens(part.out)
        if not own:
            return out
        lse = self.ulysses.to_tokens(part.lse[..., None])[..., 0]
        keys, values = zip(*own, strict=True)
        return _MergeOwn.apply(out, lse, q, self.ring.scale, self.chunk, *keys, *values)


class _MergeOwn(torch.autograd.Function):
    """One softmax over the prefix (given as out and lse) and own keys: every term has a probability and a value. It
    works row by row, so it runs in chunks of rows, whose fp32 copies are the only memory it takes besides the
    results."""

    @staticmethod
    def forward(ctx, out, lse, q, scale, chunk, *own):
        merged, total = torch.empty_like(q), torch.empty_like(lse)
        ctx.scale, ctx.chunks = scale, [slice(start, start + chunk) for start in range(0, len(q), chunk)]
        for rows in ctx.chunks:
            merged[rows], total[rows] = _merge_rows(out[rows], lse[rows], q[rows], [x[rows] for x in own], scale)
        ctx.save_for_backward(out, lse, q, total, *own)
        return merged

    @staticmethod
    def backward(ctx, grad):
        out, lse, q, total, *own = ctx.saved_tensors
        gradients = [torch.empty_like(tensor) for tensor in (out, lse, q, *own)]
        for rows in ctx.chunks:
            tensors = (tensor[rows] for tensor in (grad, out, lse, q, total))
            parts = _merge_rows_backward(*tensors, [x[rows] for x in own], ctx.scale)
            for whole, part in zip(gradients, parts, strict=True):
                whole[rows] = part
            del parts, part
        return *gradients[:3], None, None, *gradients[3:]


def _merge_rows(out: Tensor, lse: Tensor, q: Tensor, own: Sequence[Tensor], scale: float) -> BlockOutput:
    _, values, grouped, logits = _own_logits(q, own, scale, lse.dtype)
    total = torch.cat((lse[None], logits)).logsumexp(0)
    p = (logits - total).exp().unflatten(-1, grouped.shape[1:3])
    own_part = torch.einsum("kqng,kqnd->qngd", p, values).flatten(1, 2)
    return BlockOutput(out * (lse - total).exp()[..., None] + own_part, total)


def _merge_rows_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, total: Tensor, own: Sequence[Tensor], scale: float
) -> tuple[Tensor, ...]:
    """Gradients of out, lse, q and each tensor in `own`."""
    keys, values, grouped, logits = _own_logits(q, own, scale, lse.dtype)
    upstream, share, p = grad.to(lse.dtype), (lse - total).exp(), (logits - total).exp()
    split = upstream.unflatten(1, grouped.shape[1:3])
    prefix_dot = (upstream * out).sum(-1)
    dots = torch.einsum("qngd,kqnd->kqng", split, values).flatten(2)
    delta = share * prefix_dot + (p * dots).sum(0)  # sum(grad * merged)
    d_logits = p * (dots - delta)
    d_logits, p = ((scale * d_logits).unflatten(-1, grouped.shape[1:3]), p.unflatten(-1, grouped.shape[1:3]))
    return (
        upstream * share[..., None],
        share * (prefix_dot - delta),
        torch.einsum("kqng,kqnd->qngd", d_logits, keys).flatten(1, 2),
        *torch.einsum("kqng,qngd->kqnd", d_logits, grouped),
        *torch.einsum("kqng,qngd->kqnd", p, split),
    )


def _own_logits(
    q: Tensor, own: Sequence[Tensor], scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """keys, values [k, rows, kv_heads, d], q grouped [rows, kv_heads, group, d] and logits [k, rows, heads], all in
    `dtype`."""
    q = q.to(dtype).unflatten(1, (own[0].shape[1], -1))
    halves = own[: len(own) // 2], own[len(own) // 2 :]
    keys, values = (torch.stack([tensor.to(dtype) for tensor in half]) for half in halves)
    return keys, values, q, torch.einsum("qngd,kqnd->kqng", q, keys).flatten(2) * scale
