"""The ring layer: attention of this rank's queries to the keys and values of every ring rank, with exact gradients.

In mode `gather`, keys and values are exchanged once and kept, and their gradient is returned once. In mode `p2p` they
travel around the ring in every call, so memory stays flat. Both modes visit the shares in the same order, this rank's
own first, and merge them by log-sum-exp, so they give the same numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3.attention.block import BlockKernels, head_groups, merge_blocks, usual_kernels
from eagle3.attention.plain import BlockOutput, Scoring
from eagle3.attention.schedule import Piece, PrefixSchedule, overlap
from eagle3.attention.shared import SharedGradient, SharedTensor

RingMode = Literal["gather", "p2p"]


@dataclass(frozen=True)
class RingAttention:
    """Attention over one ring."""

    group: dist.ProcessGroup
    mode: RingMode
    scale: float  # of the scores
    softcap: float | None = None  # see Scoring
    kernels: BlockKernels | None = None  # None: `usual_kernels`

    def start(self, key_value: Tensor) -> "Exchange":
        """Begins to exchange this rank's keys and values [2, S, kv_heads, d]; S is the same on every ring rank."""
        if self.mode == "gather" and self.group.size() > 1:
            return _Gather(key_value, self.group)
        return Exchange(key_value if self.mode == "p2p" else key_value[None])

    def __call__(self, q: Tensor, key_value: Tensor, schedules: tuple[PrefixSchedule, ...]) -> BlockOutput:
        """Maps q [Q, heads, d] to out [Q, heads, d] and lse [Q, heads], which are 0 and -inf for a query that sees
        nothing (padding). Not differentiable by itself; `backward` gives its gradients.

        key_value: as in Exchange.
        schedules: what these queries see of the keys of each ring rank.
        """
        exact = torch.promote_types(q.dtype, torch.float32)
        kernels, pieces, merging, whole = self._plan(schedules, q)
        if not whole:
            out = torch.zeros(q.shape, dtype=exact if merging else q.dtype, device=q.device)
            lse = torch.full(q.shape[:2], float("-inf"), dtype=exact, device=q.device)
        reached = 0  # rows before this may already hold the output of a piece
        for source, (key, value) in _shares(key_value, self):
            for piece in pieces[source]:
                scoring, rows, keys = self._scoring(schedules[source], piece), piece.queries, piece.keys
                kernel = kernels.of(piece.visibility, scoring.window)
                part = kernel.forward(q[rows], key[keys], value[keys], scoring)
                if whole:
                    out, lse = part
                else:
                    merged = rows.start < reached
                    out[rows], lse[rows] = merge_blocks(BlockOutput(out[rows], lse[rows]), part) if merged else part
                reached = max(reached, rows.stop)
        return BlockOutput(out.to(q.dtype), lse)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        key_value: Tensor,
        output: BlockOutput,
        schedules: tuple[PrefixSchedule, ...],
        gradient: SharedGradient,
    ) -> Tensor:
        """Returns the gradient of q [Q, heads, d], in fp32 or wider if it is a sum over blocks, and adds those of the
        keys and values to `gradient`.

        output: merged over all blocks, as a kernel's `backward` wants it.
        """
        assert self.softcap is None, "no draft has a softcap"
        kernels, pieces, merging, whole = self._plan(schedules, q)
        dq = None if whole else torch.zeros(q.shape, dtype=output.lse.dtype if merging else q.dtype, device=q.device)
        reached = 0
        for source, (key, value), share_gradient in _shares_with_gradients(key_value, gradient, self):
            for piece in pieces[source]:
                scoring, rows, keys = self._scoring(schedules[source], piece), piece.queries, piece.keys
                kernel = kernels.of(piece.visibility, scoring.window)
                for kv_heads, heads in head_groups(q[rows], key[keys], kernel):
                    part, dk, dv = kernel.backward(
                        *(tensor[rows, heads] for tensor in (grad, q)),
                        *(tensor[keys, kv_heads] for tensor in (key, value)),
                        *(tensor[rows, heads] for tensor in output),
                        scoring,
                    )
                    if dq is None:  # the first heads of the single block, which may be all
                        dq = part if part.shape == q.shape else torch.empty_like(q)
                    if dq is not part:
                        dq[rows, heads] = dq[rows, heads] + part if rows.start < reached else part
                    share_gradient[0, keys, kv_heads] += dk
                    share_gradient[1, keys, kv_heads] += dv
                reached = max(reached, rows.stop)
        return dq

    def _plan(
        self, schedules: tuple[PrefixSchedule, ...], q: Tensor
    ) -> tuple[BlockKernels, list[list[Piece]], bool, bool]:
        """The kernels, each ring rank's pieces, whether outputs of several pieces have to be merged, and whether a
        single piece has all queries, so that what a kernel returns is the whole result."""
        kernels = self.kernels or usual_kernels(q.device, q.dtype, q.shape[-1], self.softcap)
        bands = [kernels.of("banded", schedule.window) is not None for schedule in schedules]
        pieces = [[*schedule.dense_pieces(band)] for schedule, band in zip(schedules, bands, strict=True)]
        sources = [source for source in self.sources if pieces[source]]
        merging = len(sources) > 1 or any(overlap(pieces[source]) for source in sources)
        whole = not merging and any(piece.queries == slice(0, len(q)) for piece in chain(*pieces))
        return kernels, pieces, merging, whole

    @property
    def sources(self) -> list[int]:
        """The ring ranks in the order in which their shares are visited: this rank first."""
        return [(self.group.rank() - hop) % self.group.size() for hop in range(self.group.size())]

    def _scoring(self, schedule: PrefixSchedule, piece: Piece) -> Scoring:
        return Scoring(self.scale, piece.visibility, schedule.visible(piece), self.softcap, schedule.window)


class Exchange:
    """Keys and values on their way to their readers: [ring, 2, S, kv_heads, d]; for `p2p` this rank's [2, S, kv_heads,
    d]. This base class moves nothing."""

    def __init__(self, key_value: Tensor) -> None:
        self.mine = key_value

    @cached_property
    def shared(self) -> SharedTensor:
        """What every call reads; the first access waits for it."""
        return SharedTensor.of(self.mine)


class _Gather(Exchange):
    """Gathers the keys and values of all ring ranks."""

    def __init__(self, key_value: Tensor, group: dist.ProcessGroup) -> None:
        self.group, self.transfer = group, _Transfer()
        super().__init__(_StartGather.apply(key_value, group, self.transfer))

    @cached_property
    def shared(self) -> SharedTensor:
        gradient = SharedGradient()
        return SharedTensor(_FinishGather.apply(self.mine, self.group, self.transfer, gradient), gradient)


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
    """Forward finishes the all-gather. Backward runs when the backward passes of all calls are done, and starts the
    reduce-scatter of the gradient. What it returns is a placeholder: _StartGather's backward waits for the result."""

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


def _shares(key_value: Tensor, ring: RingAttention) -> Iterator[tuple[int, Tensor]]:
    """Yields (ring rank, its keys and values [2, S, kv_heads, d]), own share first; `p2p` passes each one on while it
    is in use."""
    sources = ring.sources
    if ring.mode == "gather":
        yield from ((source, key_value[source]) for source in sources)
        return
    for source in sources[:-1]:
        transfer = _PassedOn(key_value, ring.group)
        yield source, key_value
        key_value = transfer.wait()
    yield sources[-1], key_value


def _shares_with_gradients(
    key_value: Tensor, gradient: SharedGradient, ring: RingAttention
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Like `_shares`, with a third tensor: what the caller adds to it ends up in `gradient` on the rank that owns the
    share."""
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
