"""The ring layer: attention of this rank's queries to the keys and values of every ring rank, with exact gradients.

Keys and values either stay once gathered (`gather`: exchanged once, and their gradient returns once) or travel around
the ring in every call (`p2p`: memory stays flat). Both modes visit the shares in the same order, this rank's own first,
and merge them by log-sum-exp, so they give the same numbers. Both overlap communication with computation.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3.attention.block import (
    BlockOutput,
    absorb_lse_gradient,
    block_attention,
    block_attention_backward,
    merge_blocks,
    takes_bands,
)
from eagle3.attention.plain import Scoring
from eagle3.attention.schedule import Piece, PrefixSchedule

RingMode = Literal["gather", "p2p"]


@dataclass(frozen=True)
class RingAttention:
    """Attention over one ring."""

    group: dist.ProcessGroup
    mode: RingMode
    scale: float  # of the scores
    softcap: float | None = None  # see `block_attention`

    def start(self, key_value: Tensor) -> "Exchange":
        """Begins to exchange this rank's keys and values [2, S, kv_heads, d]; S is the same on every ring rank."""
        if self.mode == "gather" and self.group.size() > 1:
            return _Gather(key_value, self.group)
        return Exchange(key_value if self.mode == "p2p" else key_value[None])

    def __call__(self, q: Tensor, shared: "SharedKeyValue", schedules: tuple[PrefixSchedule, ...]) -> BlockOutput:
        """Maps q [Q, heads, d] to out [Q, heads, d] and lse [Q, heads], which are 0 and -inf for a query that sees
        nothing (padding). Without a softcap both are differentiable.

        schedules: what these queries see of the keys of each ring rank.
        """
        return BlockOutput(*_RingAttention.apply(q, shared.key_value, shared.gradient, self, schedules))

    def scoring(self, schedule: PrefixSchedule, piece: Piece) -> Scoring:
        return Scoring(self.scale, piece.visibility, schedule.visible(piece), self.softcap, schedule.window)


@dataclass
class KeyValueGradient:
    """The gradient of shared keys and values. Every call's backward adds its part, in fp32 or wider, and whoever shared
    them takes the sum. (Autograd would round each part to the dtype of the keys, and hold two at a time.)"""

    total: Tensor | None = None

    def like(self, key_value: Tensor) -> Tensor:
        if self.total is None:
            exact = torch.promote_types(key_value.dtype, torch.float32)
            self.total = torch.zeros(key_value.shape, dtype=exact, device=key_value.device)
        return self.total

    def take(self, key_value: Tensor) -> Tensor:
        total, self.total = self.like(key_value), None
        return total


@dataclass(frozen=True)
class SharedKeyValue:
    """Keys and values that every call reads, and the sum of their gradient."""

    key_value: Tensor  # [ring, 2, S, kv_heads, d]; for `p2p` this rank's [2, S, kv_heads, d]
    gradient: KeyValueGradient = field(default_factory=KeyValueGradient)


class Exchange:
    """Keys and values on their way to their readers. In this base class they are already in place: `key_value` has
    SharedKeyValue's shape."""

    def __init__(self, key_value: Tensor) -> None:
        self.mine = key_value

    @cached_property
    def shared(self) -> SharedKeyValue:
        """What every call reads; the first access waits for it."""
        gradient = KeyValueGradient()
        return SharedKeyValue(self.collect(gradient), gradient)

    def collect(self, gradient: KeyValueGradient) -> Tensor:
        return _CollectGradient.apply(self.mine, gradient)


class _Gather(Exchange):
    """Gathers the keys and values of all ring ranks."""

    def __init__(self, key_value: Tensor, group: dist.ProcessGroup) -> None:
        self.group, self.transfer = group, _Transfer()
        super().__init__(_StartGather.apply(key_value, group, self.transfer))

    def collect(self, gradient: KeyValueGradient) -> Tensor:
        return _FinishGather.apply(self.mine, self.group, self.transfer, gradient)


@dataclass
class _Transfer:
    """A collective under way: the gather or, in the backward pass, the reduce-scatter."""

    buffer: Tensor | None = None
    work: dist.Work | None = None

    def wait(self) -> Tensor:
        self.work.wait()
        buffer, self.buffer, self.work = self.buffer, None, None
        return buffer


class _StartGather(torch.autograd.Function):
    """Forward starts the all-gather; backward finishes the reduce-scatter of the gradient."""

    @staticmethod
    def forward(ctx, key_value, group, transfer):
        ctx.transfer, ctx.dtype = transfer, key_value.dtype
        transfer.buffer = key_value.new_empty((group.size(), *key_value.shape))
        transfer.work = dist.all_gather_single(
            transfer.buffer.flatten(0, 1), key_value.contiguous(), group=group, async_op=True
        )
        return key_value.view_as(key_value)

    @staticmethod
    def backward(ctx, grad):
        return ctx.transfer.wait().to(ctx.dtype), None, None


class _FinishGather(torch.autograd.Function):
    """Forward finishes the all-gather. Backward runs after that of every call and starts the reduce-scatter of the
    gradient; the tensor that it returns is only filled once _StartGather's backward has waited for it."""

    @staticmethod
    def forward(ctx, key_value, group, transfer, gradient):
        ctx.group, ctx.transfer, ctx.gradient = group, transfer, gradient
        ctx.set_materialize_grads(False)
        gathered = transfer.wait()
        ctx.save_for_backward(gathered)
        return gathered

    @staticmethod
    def backward(ctx, _):
        (gathered,) = ctx.saved_tensors
        total = ctx.gradient.take(gathered)
        ctx.transfer.buffer = total.new_empty(total.shape[1:])
        ctx.transfer.work = dist.reduce_scatter_single(
            ctx.transfer.buffer, total.flatten(0, 1), group=ctx.group, async_op=True
        )
        return gathered.new_empty(gathered.shape[1:]), None, None, None


class _CollectGradient(torch.autograd.Function):
    """Backward runs after that of every call and returns the sum of their gradients."""

    @staticmethod
    def forward(ctx, key_value, gradient):
        ctx.gradient = gradient
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(key_value)
        return key_value.view_as(key_value)

    @staticmethod
    def backward(ctx, _):
        (key_value,) = ctx.saved_tensors
        return ctx.gradient.take(key_value).to(key_value.dtype), None


class _RingAttention(torch.autograd.Function):
    """Forward and backward over all shares; each block's backward uses the output and lse merged over all of them."""

    @staticmethod
    def forward(ctx, q, key_value, gradient, ring, schedules):
        exact = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=exact, device=q.device)
        lse = torch.full(q.shape[:2], float("-inf"), dtype=exact, device=q.device)
        for source, (key, value) in _shares(key_value, ring):
            schedule = schedules[source]
            for piece in schedule.dense_pieces(takes_bands(q, ring.softcap)):
                rows, keys = piece.queries, piece.keys
                part = block_attention(q[rows], key[keys], value[keys], ring.scoring(schedule, piece))
                out[rows], lse[rows] = merge_blocks(BlockOutput(out[rows], lse[rows]), part)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, key_value, out, lse)
        ctx.gradient, ctx.ring, ctx.schedules = gradient, ring, schedules
        ctx.set_materialize_grads(False)  # grad_lse stays None if lse was not used, as without own keys
        return out, lse

    @staticmethod
    def backward(ctx, grad, grad_lse):
        q, key_value, out, lse = ctx.saved_tensors
        ring = ctx.ring
        assert ring.softcap is None, "no draft has a softcap"
        grad = torch.zeros_like(out) if grad is None else grad
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        for source, (key, value), gradient in _shares_with_gradients(key_value, ctx.gradient, ring):
            schedule = ctx.schedules[source]
            for piece in schedule.dense_pieces(takes_bands(q)):
                rows, keys = piece.queries, piece.keys
                part = block_attention_backward(
                    grad[rows],
                    q[rows],
                    key[keys],
                    value[keys],
                    out[rows] if grad_lse is None else absorb_lse_gradient(out[rows], grad[rows], grad_lse[rows]),
                    lse[rows],
                    ring.scoring(schedule, piece),
                )
                dq[rows] += part.q
                gradient[0, keys] += part.k
                gradient[1, keys] += part.v
        return dq.to(q.dtype), None, None, None, None


def _shares(key_value: Tensor, ring: RingAttention) -> Iterator[tuple[int, Tensor]]:
    """Yields (ring rank, its keys and values [2, S, kv_heads, d]), own share first; `p2p` passes each one on while it
    is in use."""
    sources = [(ring.group.rank() - hop) % ring.group.size() for hop in range(ring.group.size())]
    if ring.mode == "gather":
        yield from ((source, key_value[source]) for source in sources)
        return
    for source in sources[:-1]:
        transfer = _PassedOn(key_value, ring.group)
        yield source, key_value
        key_value = transfer.wait()
    yield sources[-1], key_value


def _shares_with_gradients(
    key_value: Tensor, gradient: KeyValueGradient, ring: RingAttention
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """`_shares` with, for each share, a tensor to add its gradient to, which ends up in `gradient`."""
    total = gradient.like(key_value)
    if ring.mode == "gather":
        for source, block in _shares(key_value, ring):
            yield source, block, total[source]
        return
    transfer = None
    for source, block in _shares(key_value, ring):
        part = torch.zeros_like(total)
        yield source, block, part
        if transfer:  # what earlier ranks have added to the gradient of this share
            part += transfer.wait()
        transfer = _PassedOn(part, ring.group)
    total += transfer.wait()  # after the last hop it is back on its own rank


class _PassedOn:
    """A tensor on its way to the next ring rank, while one from the previous rank comes in."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        self.sent, self.received, self.works = tensor.contiguous(), tensor, []
        if group.size() > 1:
            self.received = torch.empty_like(self.sent)
            following, previous = (dist.get_global_rank(group, (group.rank() + hop) % group.size()) for hop in (1, -1))
            self.works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, self.sent, following, group),
                    dist.P2POp(dist.irecv, self.received, previous, group),
                ]
            )

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received
