"""Attention of one training-time-test (TTT) step: the causal prefix K_0, V_0 over all ranks, and each position's own
K_1..K_k, in one softmax."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from deepspeed.sequence.layer import _SeqAllToAll
from torch import Tensor
from torch.distributed import ProcessGroup

from eagle3.attention.block import BlockKernels, BlockOutput, OwnKernel, own_candidates
from eagle3.attention.ring import Exchange, RingAttention, RingMode
from eagle3.attention.schedule import PrefixSchedule
from eagle3.attention.shared import SharedTensor

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
    own: OwnKernel | None = None  # None: the usual one

    @classmethod
    def over(
        cls,
        ulysses: ProcessGroup,
        ring: ProcessGroup,
        scale: float,
        mode: RingMode = "gather",
        kernels: BlockKernels | None = None,
        own: OwnKernel | None = None,
    ) -> "TTTAttention":
        """Builds the attention on these process groups. kernels: see RingAttention."""
        return cls(Ulysses(ulysses), RingAttention(ring, mode, scale, kernels=kernels), own)

    def start(self, prefix: KeyValue) -> Exchange:
        """Starts to share this rank's K_0, V_0, for use in all steps. Every sequence rank has the same number of
        rows."""
        key_value = self.ulysses.to_heads(self.ulysses.replicate(torch.cat(prefix, -1)))
        return self.ring.start(key_value.unflatten(-1, (2, -1)).permute(2, 0, 1, 3))

    def __call__(
        self,
        q: Tensor,
        shared: SharedTensor,
        schedules: tuple[PrefixSchedule, ...],
        own: Sequence[KeyValue] = (),
    ) -> Tensor:
        """Output [Q, heads, d] of step k for q [Q, heads, d]; differentiable in every tensor.

        shared: from the exchange.
        schedules: what the Ulysses group's queries see of each ring rank's keys.
        own: K_1..K_k, V_1..V_k, each [Q, kv_heads, d]; query t sees only row t of them.
        """
        keys, values = zip(*own, strict=True) if own else ((), ())
        return _Attend.apply(self, schedules, shared.gradient, shared.tensor, q, *keys, *values)

    def own_kernel(self, q: Tensor) -> OwnKernel:
        return self.own or own_candidates(q.device, q.dtype)[0]


class _Attend(torch.autograd.Function):
    """One softmax over the prefix and own keys. Own keys are one more block, and a block's backward pass is exact by
    itself, given the output and the log-sum-exp of all blocks (see Kernel)."""

    @staticmethod
    def forward(ctx, attention, schedules, gradient, key_value, q, *own):
        ctx.attention, ctx.schedules, ctx.gradient = attention, schedules, gradient
        ulysses, ring = attention.ulysses, attention.ring
        queries = ulysses.to_heads(q)
        output = _moved(ring(queries, key_value, schedules), ulysses.to_tokens)
        if own:
            output = attention.own_kernel(q).forward(output, q, own, ring.scale)
        ctx.save_for_backward(key_value, q, queries, *output, *own)
        return output.out

    @staticmethod
    def backward(ctx, grad):
        key_value, q, queries, out, lse, *own = ctx.saved_tensors
        ulysses, ring = ctx.attention.ulysses, ctx.attention.ring
        output = BlockOutput(out, lse)
        dq, *d_own = ctx.attention.own_kernel(q).backward(grad, output, q, own, ring.scale) if own else (None,)
        output = _moved(output, ulysses.to_heads)
        d_queries = ring.backward(ulysses.to_heads(grad), queries, key_value, output, ctx.schedules, ctx.gradient)
        del output
        d_queries = ulysses.to_tokens(d_queries if ulysses.group.size() == 1 else d_queries.to(q.dtype))
        dq = d_queries.to(q.dtype) if dq is None else dq.add_(d_queries)
        return None, None, None, None, dq, *d_own


def _moved(output: BlockOutput, move: Callable[[Tensor], Tensor]) -> BlockOutput:
    return BlockOutput(move(output.out), move(output.lse[..., None])[..., 0])
