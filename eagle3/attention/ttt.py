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

from eagle3.attention.block import BlockKernels, BlockOutput
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
        kernels: BlockKernels | None = None,
    ) -> "TTTAttention":
        """Builds the attention on these process groups. kernels: see RingAttention."""
        return cls(Ulysses(ulysses), RingAttention(ring, mode, scale, kernels=kernels), chunk)

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
        keys, values = zip(*own, strict=True) if own else ((), ())
        return _Attend.apply(self, schedules, shared.gradient, shared.key_value, q, *keys, *values)


class _Attend(torch.autograd.Function):
    """One softmax over the prefix and own keys.

    The prefix's share of the softmax is exp(lse - total). With P, the softmax over the prefix alone, the gradient of
    the prefix's scores is P * share * (grad v^T - sum(grad * attended)). A block's backward computes just that, given
    grad * share as the gradient and `attended` as the output.
    """

    @staticmethod
    def forward(ctx, attention, schedules, gradient, key_value, q, *own):
        ctx.attention, ctx.schedules, ctx.gradient = attention, schedules, gradient
        ulysses = attention.ulysses
        queries = ulysses.to_heads(q)
        out, lse = attention.ring(queries, key_value, schedules)
        attended, shares = ulysses.to_tokens(out), ()
        if own:
            prefix = BlockOutput(attended, ulysses.to_tokens(lse[..., None])[..., 0])
            attended, *shares = merge_own(prefix, q, own, attention.ring.scale, attention.chunk)
        ctx.own = len(own)
        ctx.save_for_backward(key_value, q, queries, lse, attended, *own, *shares)
        return attended

    @staticmethod
    def backward(ctx, grad):
        key_value, q, queries, lse, attended, *rest = ctx.saved_tensors
        own, shares = rest[: ctx.own], rest[ctx.own :]
        attention, ulysses = ctx.attention, ctx.attention.ulysses
        d_prefix, d_own = grad, ()
        if own:
            d_prefix, dq, *d_own = merge_own_backward(
                grad, attended, q, own, *shares, attention.ring.scale, attention.chunk
            )
        output = BlockOutput(ulysses.to_heads(attended), lse)
        d_queries = attention.ring.backward(
            ulysses.to_heads(d_prefix), queries, key_value, output, ctx.schedules, ctx.gradient
        )
        del d_prefix, output
        d_queries = ulysses.to_tokens(d_queries if ulysses.group.size() == 1 else d_queries.to(q.dtype))
        dq = dq.add_(d_queries) if own else d_queries.to(q.dtype)
        return None, None, None, None, dq, *d_own


class MergedOwn(NamedTuple):
    """The prefix and own keys in one softmax."""

    attended: Tensor  # [Q, heads, d]
    total: Tensor  # [Q, heads]: log of the softmax's denominator
    share: Tensor  # [Q, heads]: the prefix's part of the softmax


def merge_own(prefix: BlockOutput, q: Tensor, own: Sequence[Tensor], scale: float, chunk: int) -> MergedOwn:
    """Merges each query's own keys with its prefix; each own key adds one score and one value to its query. Works in
    chunks of rows, whose fp32 copies are the only memory that it takes besides the results.

    own: K_1..K_k, then V_1..V_k, each [Q, kv_heads, d].
    """
    merged = MergedOwn(torch.empty_like(q), *(torch.empty_like(prefix.lse) for _ in range(2)))
    for rows in _chunks(q, chunk):
        lse = prefix.lse[rows]
        _, values, grouped, logits = _own_logits(q[rows], [x[rows] for x in own], scale, lse.dtype)
        total = torch.cat((lse[None], logits)).logsumexp(0)
        share = (lse - total).exp()
        p = (logits - total).exp().unflatten(-1, grouped.shape[1:3])
        own_part = torch.einsum("kqng,kqnd->qngd", p, values).flatten(1, 2)
        for whole, part in zip(merged, (prefix.out[rows] * share[..., None] + own_part, total, share), strict=True):
            whole[rows] = part
    return merged


def merge_own_backward(
    grad: Tensor,
    attended: Tensor,
    q: Tensor,
    own: Sequence[Tensor],
    total: Tensor,
    share: Tensor,
    scale: float,
    chunk: int,
) -> tuple[Tensor, ...]:
    """Returns the prefix's share of `grad`, and the gradients through own keys: of q, and of each tensor in `own`."""
    gradients = [torch.empty_like(tensor) for tensor in (q, q, *own)]
    for rows in _chunks(q, chunk):
        keys, values, grouped, logits = _own_logits(q[rows], [x[rows] for x in own], scale, total.dtype)
        upstream, p = grad[rows].to(total.dtype), (logits - total[rows]).exp()
        split = upstream.unflatten(1, grouped.shape[1:3])
        dots = torch.einsum("qngd,kqnd->kqng", split, values).flatten(2)
        d_logits = scale * p * (dots - (upstream * attended[rows]).sum(-1))
        d_logits, p = (each.unflatten(-1, grouped.shape[1:3]) for each in (d_logits, p))
        parts = (
            upstream * share[rows][..., None],
            torch.einsum("kqng,kqnd->qngd", d_logits, keys).flatten(1, 2),
            *torch.einsum("kqng,qngd->kqnd", d_logits, grouped),
            *torch.einsum("kqng,qngd->kqnd", p, split),
        )
        for whole, part in zip(gradients, parts, strict=True):
            whole[rows] = part
        del parts
    return tuple(gradients)


def _chunks(q: Tensor, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, len(q), chunk)]


def _own_logits(
    q: Tensor, own: Sequence[Tensor], scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """keys, values [k, rows, kv_heads, d], q grouped [rows, kv_heads, group, d] and logits [k, rows, heads], all in
    `dtype`."""
    q = q.to(dtype).unflatten(1, (own[0].shape[1], -1))
    halves = own[: len(own) // 2], own[len(own) // 2 :]
    keys, values = (torch.stack([tensor.to(dtype) for tensor in half]) for half in halves)
    return keys, values, q, torch.einsum("qngd,kqnd->kqng", q, keys).flatten(2) * scale
