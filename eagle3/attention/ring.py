"""The ring layer: attention of this rank's queries to the keys and values of every ring rank, exact in both directions.

Keys and values either come to stay (`gather`: exchanged once, their gradient goes back once) or travel round in every
call (`p2p`: memory stays flat). Both visit the shares in the same order, own share first, and merge them by log-sum-exp,
so that both give the same numbers; both communicate while they compute.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from eagle3.attention.block import (
    BlockOutput,
    Score,
    absorb_lse_gradient,
    block_attention,
    block_attention_backward,
    merge_blocks,
    takes_bands,
)
from eagle3.attention.schedule import Piece, PrefixSchedule

RingMode = Literal["gather", "p2p"]
# (scaled scores, query positions, key positions) -> scores: elementwise, differentiable, positions broadcast to scores
PositionScore = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class RingAttention:
    """Attention over one ring. scale: of the scores; `score` changes scaled scores where a target needs it."""

    group: ProcessGroup
    mode: RingMode
    scale: float
    score: PositionScore | None = None

    def start(self, key_value: Tensor) -> "Exchange":
        """Begin the exchange of this rank's keys and values [2, S, kv_heads, d]; S is the same on every ring rank."""
        if self.mode == "p2p" or self.group.size() == 1:
            return Exchange(key_value, None)
        transfer = _Transfer()
        return Exchange(_StartGather.apply(key_value, self.group, transfer), transfer)

    def finish(self, exchange: "Exchange") -> "SharedKeyValue":
        """What every call reads: all ranks' keys and values, or this rank's for `p2p`."""
        gradient = KeyValueGradient()
        if exchange.transfer is not None:
            key_value = _FinishGather.apply(exchange.mine, self.group, exchange.transfer, gradient)
        else:
            own = exchange.mine if self.mode == "p2p" else exchange.mine[None]
            key_value = _CollectGradient.apply(own, gradient)
        return SharedKeyValue(key_value, gradient)

    def __call__(
        self, q: Tensor, shared: "SharedKeyValue", schedules: tuple[PrefixSchedule, ...], ahead: int = 0
    ) -> BlockOutput:
        """q [Q, heads, d] -> out [Q, heads, d] and lse [Q, heads], both differentiable; 0 and -inf for a query that
        sees nothing (a pad). schedules: these queries against the keys of each ring rank; `ahead`: how far a query's
        own position is beyond its row's (the step k), which only `score` sees."""
        return BlockOutput(*_RingAttention.apply(q, shared.key_value, shared.gradient, self, schedules, ahead))

    def block_score(self, schedule: PrefixSchedule, piece: Piece, ahead: int) -> Score | None:
        if self.score is None:
            return None
        queries, keys = schedule.positions(piece)
        return lambda scores: self.score(scores, queries + ahead, keys)


@dataclass
class KeyValueGradient:
    """The gradient of shared keys and values: every call's backward adds its part, in fp32 at least, and whoever shared
    them takes the sum. (Autograd would round each call's part to the keys' number format, and hold two at a time.)"""

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
    """key_value [ring, 2, S, kv_heads, d], or [2, S, kv_heads, d] of this rank for `p2p`, with its gradient's place."""

    key_value: Tensor
    gradient: KeyValueGradient = field(default_factory=KeyValueGradient)

    def detached(self) -> "SharedKeyValue":
        """The same for a graph of its own, whose backward adds to the same gradient."""
        return SharedKeyValue(self.key_value.detach().requires_grad_(), self.gradient)


class Exchange(NamedTuple):
    """This rank's keys and values, and what is under way of the others', if anything is."""

    mine: Tensor
    transfer: "_Transfer | None"


@dataclass
class _Transfer:
    """A collective under way: the gather, or in the backward pass the reduce-scatter."""

    buffer: Tensor | None = None
    work: dist.Work | None = None

    def wait(self) -> Tensor:
        self.work.wait()
        buffer, self.buffer, self.work = self.buffer, None, None
        return buffer


class _StartGather(torch.autograd.Function):
    """Forward: the all-gather begins. Backward: the reduce-scatter of the gradient ends."""

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
    """Forward: the all-gather ends. Backward, after that of every call: the reduce-scatter of the gradient begins; what
    is handed on is only filled when _StartGather's backward has waited for it."""

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
    """Backward, after that of every call: their sum."""

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
    """Over the shares, forward and backward; each block's backward with the output and lse merged over all of them."""

    @staticmethod
    def forward(ctx, q, key_value, gradient, ring, schedules, ahead):
        exact = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=exact, device=q.device)
        lse = torch.full(q.shape[:2], float("-inf"), dtype=exact, device=q.device)
        for source, (key, value) in _shares(key_value, ring):
            schedule = schedules[source]
            for piece in schedule.dense_pieces(takes_bands(q, ring.score is not None)):
                rows, keys, score = piece.queries, piece.keys, ring.block_score(schedule, piece, ahead)
                part = block_attention(
                    q[rows],
                    key[keys],
                    value[keys],
                    ring.scale,
                    piece.visibility,
                    schedule.visible(piece),
                    score,
                    schedule.window,
                )
                part = BlockOutput(part.out.to(exact), part.lse.to(exact))
                out[rows], lse[rows] = merge_blocks(BlockOutput(out[rows], lse[rows]), part)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, key_value, out, lse)
        ctx.gradient, ctx.ring, ctx.schedules, ctx.ahead = gradient, ring, schedules, ahead
        ctx.set_materialize_grads(False)  # nobody has used lse where there are no own keys
        return out, lse

    @staticmethod
    def backward(ctx, grad, grad_lse):
        q, key_value, out, lse = ctx.saved_tensors
        ring = ctx.ring
        grad = torch.zeros_like(out) if grad is None else grad
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        for source, (key, value), gradient in _shares_with_gradients(key_value, ctx.gradient, ring):
            schedule = ctx.schedules[source]
            for piece in schedule.dense_pieces(takes_bands(q, ring.score is not None)):
                rows, keys, score = piece.queries, piece.keys, ring.block_score(schedule, piece, ctx.ahead)
                part = block_attention_backward(
                    grad[rows],
                    q[rows],
                    key[keys],
                    value[keys],
                    out[rows] if grad_lse is None else absorb_lse_gradient(out[rows], grad[rows], grad_lse[rows]),
                    lse[rows],
                    ring.scale,
                    piece.visibility,
                    schedule.visible(piece),
                    score,
                    schedule.window,
                )
                dq[rows] += part.q
                gradient[0, keys] += part.k
                gradient[1, keys] += part.v
        return dq.to(q.dtype), None, None, None, None, None


def _shares(key_value: Tensor, ring: RingAttention) -> Iterator[tuple[int, Tensor]]:
    """(ring rank, its keys and values [2, S, kv_heads, d]), own share first; `p2p` passes each on while it is used."""
    size, rank = ring.group.size(), ring.group.rank()
    block = key_value
    for hop in range(size):
        source = (rank - hop) % size
        if ring.mode == "gather":
            yield source, key_value[source]
            continue
        coming = _PassedOn(block, ring.group) if hop + 1 < size else None
        yield source, block
        if coming:
            block = coming.wait()


def _shares_with_gradients(
    key_value: Tensor, gradient: KeyValueGradient, ring: RingAttention
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """`_shares` with a place to add each share's gradient to, which ends up in `gradient`."""
    total = gradient.like(key_value)
    if ring.mode == "gather":
        for source, block in _shares(key_value, ring):
            yield source, block, total[source]
        return
    travelling = None
    for source, block in _shares(key_value, ring):
        part = torch.zeros_like(total)
        yield source, block, part
        if travelling:  # what the ranks before this one have added to the gradient of the same share
            part += travelling.wait()
        travelling = _PassedOn(part, ring.group)
    total += travelling.wait()  # after the last hop it is home


class _PassedOn:
    """A tensor on its way to the next ring rank, while the previous one's comes in."""

    def __init__(self, tensor: Tensor, group: ProcessGroup) -> None:
        self.sent, self.received, self.works = tensor.contiguous(), tensor, []
        if group.size() > 1:
            self.received = torch.empty_like(self.sent)
            following, previous = (dist.get_global_rank(group, (group.rank() + way) % group.size()) for way in (1, -1))
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
