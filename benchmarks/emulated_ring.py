"""Emulates one rank of a ring in a single process: what `gather` makes the rank hold and compute, with random numbers
for what the other ranks would send. Also thins out schedules, so that only a part is computed."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eagle3.attention.ring import Exchange, RingAttention
from eagle3.attention.schedule import PrefixSchedule
from eagle3.attention.shared import SharedGradient, SharedTensor

THIN_WINDOW = 1024  # keys


@dataclass(frozen=True)
class EmulatedRing(RingAttention):
    """Holds and computes what `gather` does on one of `ranks` ring ranks, in a single process. The other ranks' keys
    and values are random, and all shares are joined into one, with this rank's first (see `joined`)."""

    ranks: int = 1

    def start(self, key_value: Tensor) -> Exchange:
        return _RandomExchange(key_value, self.ranks)


class _RandomExchange(Exchange):
    def __init__(self, key_value: Tensor, ranks: int) -> None:
        super().__init__(key_value)
        self.ranks = ranks

    @cached_property
    def shared(self) -> SharedTensor:
        gradient = SharedGradient()
        return SharedTensor(_GatherRandom.apply(self.mine, self.ranks, gradient), gradient)


class _GatherRandom(torch.autograd.Function):
    """Own keys and values [2, S, kv_heads, d] -> [1, 2, ranks * S, kv_heads, d]. Backward: what a reduce-scatter would
    return, without the other ranks' contributions."""

    @staticmethod
    def forward(ctx, mine, ranks, gradient):
        ctx.gradient, ctx.own = gradient, mine.shape[1]
        ctx.set_materialize_grads(False)
        gathered = mine.new_empty(1, 2, ranks * ctx.own, *mine.shape[2:]).normal_()
        gathered[0, :, : ctx.own] = mine
        ctx.save_for_backward(gathered)
        return gathered

    @staticmethod
    def backward(ctx, _):
        (gathered,) = ctx.saved_tensors
        own = ctx.gradient.take(gathered)[0, :, : ctx.own].clone()
        return own.to(gathered.dtype), None, None


def joined(shares: Sequence[PrefixSchedule], rank: int) -> PrefixSchedule:
    """Joins the schedules of all ring ranks' keys into one, over the keys in the ring's order: this rank's first, then
    those of the rank before it, and so on."""
    order = [(rank - hop) % len(shares) for hop in range(len(shares))]
    pieces, start = [], 0
    for source in order:
        for piece in shares[source].pieces:
            keys = slice(start + piece.keys.start, start + piece.keys.stop)
            pieces.append(piece._replace(keys=keys))
        start += len(shares[source].key_rows)
    key_rows = torch.cat([shares[source].key_rows for source in order])
    return dataclasses.replace(shares[rank], key_rows=key_rows, pieces=tuple(pieces))


def thinned(schedule: PrefixSchedule) -> PrefixSchedule:
    """A schedule that takes the same memory at a fraction of the time. Keeps one full piece for each run of queries,
    and all pieces that are not full; or, if all pieces are bands, shortens their window."""
    if schedule.window is None and {piece.visibility for piece in schedule.pieces} == {"banded"}:
        return dataclasses.replace(schedule, window=THIN_WINDOW)
    seen: set[tuple[int, int]] = set()
    pieces = []
    for piece in schedule.pieces:
        run = piece.queries.start, piece.queries.stop
        if piece.visibility != "full" or run not in seen:
            pieces.append(piece)
        if piece.visibility == "full":
            seen.add(run)
    return dataclasses.replace(schedule, pieces=tuple(pieces))
