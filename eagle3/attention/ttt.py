"""Attention of one training-time-test step: the causal prefix K_0, V_0 and the position's own K_1..K_k, one softmax."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.attention.block import (
    BlockOutput,
    Visibility,
    block_attention,
    block_attention_backward,
    merge_blocks,
)

# Queries of one block. Long enough for dense kernels, short enough that the masked diagonal stays a small share.
QUERY_BLOCK = 512


class Piece(NamedTuple):
    """Queries [start, stop) against keys [start, stop), both counted along the rank's own query and key tensors."""

    queries: slice
    keys: slice
    visibility: Visibility


@dataclass(frozen=True)
class PrefixSchedule:
    """Which blocks make up the attention of all queries to the prefix.

    query_rows [Q], key_rows [S]: ascending rows of the stream. A query sees the keys of its document up to its own row.
    """

    query_rows: Tensor
    key_rows: Tensor
    pieces: tuple[Piece, ...]

    def visible(self, piece: Piece) -> Tensor | None:
        """The mask [queries, keys] of a `masked` piece."""
        if piece.visibility != "masked":
            return None
        return self.key_rows[None, piece.keys] <= self.query_rows[piece.queries, None]


def schedule_prefix(
    query_rows: Tensor, key_rows: Tensor, query_documents: Tensor, key_documents: Tensor, block: int = QUERY_BLOCK
) -> PrefixSchedule:
    """Cut the attention of ascending query rows to ascending key rows into dense pieces.

    Each block of queries of one document is a full rectangle over the keys before its first row, and a square on the
    diagonal, which needs a mask only where the queries have gaps. Documents: int64, one number a row. The keys must
    hold every query's own row (a query that sees no key has no softmax) and all rows between.
    """
    assert bool(torch.isin(query_rows, key_rows).all()), "a query's own row is not among the keys"
    pieces = []
    last_query, last_key = _ends(query_documents), _ends(key_documents)
    starts = {int(document): start for document, start, _ in last_key}
    for document, first, end in last_query:
        for start in range(first, end, block):
            stop = min(start + block, end)
            low = starts[document]
            middle = int(torch.searchsorted(key_rows, query_rows[start]))
            high = int(torch.searchsorted(key_rows, query_rows[stop - 1], right=True))
            if middle > low:
                pieces.append(Piece(slice(start, stop), slice(low, middle), "full"))
            dense = high - middle == stop - start
            pieces.append(Piece(slice(start, stop), slice(middle, high), "causal" if dense else "masked"))
    return PrefixSchedule(query_rows, key_rows, tuple(pieces))


def ttt_attention(
    q: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    own_keys: tuple[Tensor, ...],
    own_values: tuple[Tensor, ...],
    schedule: PrefixSchedule,
    scale: float,
) -> Tensor:
    """Output [Q, heads, d] of step k for q [Q, heads, d].

    prefix_key, prefix_value [S, kv_heads, d] are K_0, V_0; own_keys, own_values hold K_1..K_k, V_1..V_k, each
    [Q, kv_heads, d], of which query t sees row t alone. Differentiable in every tensor.
    """
    return _TTTAttention.apply(q, prefix_key, prefix_value, schedule, scale, *own_keys, *own_values)


class _TTTAttention(torch.autograd.Function):
    """Blocks merged by log-sum-exp; backward block by block with the merged output and lse, which is exact."""

    @staticmethod
    def forward(ctx, q, prefix_key, prefix_value, schedule, scale, *own):
        exact = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty(q.shape, dtype=exact, device=q.device)
        lse = torch.full(q.shape[:2], float("-inf"), dtype=exact, device=q.device)
        seen_until = 0
        for piece in schedule.pieces:
            rows = piece.queries
            part = block_attention(
                q[rows],
                prefix_key[piece.keys],
                prefix_value[piece.keys],
                scale,
                piece.visibility,
                schedule.visible(piece),
            )
            part = BlockOutput(part.out.to(exact), part.lse.to(exact))
            if rows.start < seen_until:
                part = merge_blocks(BlockOutput(out[rows], lse[rows]), part)
            out[rows], lse[rows] = part
            seen_until = rows.stop
        steps = len(own) // 2
        for key, value in zip(own[:steps], own[steps:], strict=True):
            logit = (_grouped(q, key).to(exact) * key[:, :, None].to(exact)).sum(-1).flatten(1) * scale
            value = value.to(exact).repeat_interleave(q.shape[1] // value.shape[1], 1)
            out, lse = merge_blocks(BlockOutput(out, lse), BlockOutput(value, logit))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, prefix_key, prefix_value, out, lse, *own)
        ctx.schedule, ctx.scale = schedule, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        q, prefix_key, prefix_value, out, lse, *own = ctx.saved_tensors
        exact, scale = lse.dtype, ctx.scale
        dq = torch.zeros(q.shape, dtype=exact, device=q.device)
        dk = torch.zeros(prefix_key.shape, dtype=exact, device=q.device)
        dv = torch.zeros(prefix_value.shape, dtype=exact, device=q.device)
        for piece in ctx.schedule.pieces:
            rows = piece.queries
            part = block_attention_backward(
                grad[rows],
                q[rows],
                prefix_key[piece.keys],
                prefix_value[piece.keys],
                out[rows],
                lse[rows],
                scale,
                piece.visibility,
                ctx.schedule.visible(piece),
            )
            dq[rows] += part.q
            dk[piece.keys] += part.k
            dv[piece.keys] += part.v
        own_gradients = []
        steps = len(own) // 2
        if steps:
            upstream = grad.to(exact)
            delta = (upstream * out.to(exact)).sum(-1)
        for key, value in zip(own[:steps], own[steps:], strict=True):
            queries, shares = _grouped(q, key).to(exact), _grouped(upstream, key)
            wide_key, wide_value = key[:, :, None].to(exact), value[:, :, None].to(exact)
            p = ((queries * wide_key).sum(-1) * scale - lse.unflatten(1, queries.shape[1:3])).exp()
            ds = p * ((shares * wide_value).sum(-1) - delta.unflatten(1, p.shape[1:])) * scale
            dq += (ds[..., None] * wide_key).flatten(1, 2)
            own_gradients.append(
                ((ds[..., None] * queries).sum(2).to(key.dtype), (p[..., None] * shares).sum(2).to(value.dtype))
            )
        key_gradients, value_gradients = zip(*own_gradients, strict=True) if own_gradients else ((), ())
        return (
            dq.to(q.dtype),
            dk.to(prefix_key.dtype),
            dv.to(prefix_value.dtype),
            None,
            None,
            *key_gradients,
            *value_gradients,
        )


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """[Q, heads, d] -> [Q, kv_heads, group, d], beside the key/value heads that each group shares."""
    return x.unflatten(1, (key.shape[1], -1))


def _ends(documents: Tensor) -> list[tuple[int, int, int]]:
    """(document, first index, end index) of each run in an ascending list of document numbers."""
    numbers, counts = torch.unique_consecutive(documents, return_counts=True)
    stops = counts.cumsum(0)
    return list(zip(numbers.tolist(), (stops - counts).tolist(), stops.tolist(), strict=True))
