"""One block of attention in plain matrix products and bounded memory: the definition of a block, for what no fused
kernel takes."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

# - full: every query sees every key.
# - causal: query i sees keys 0..i (equal lengths).
# - masked: `visible` decides.
# - banded: the last query's own key is the last key, the query before has the key before, and so on; each query sees
#   the last `window` keys up to its own (all of them if there is no window).
Visibility = Literal["full", "causal", "masked", "banded"]

# Size of the scores in one chunk; a few temporaries of this size are alive at once.
CHUNK_BYTES = 64 * 2**20


class Scoring(NamedTuple):
    """How a block's scores follow from q and k, and which of them count."""

    scale: float  # of the scores
    visibility: Visibility
    # [Q, S] bool, for `masked`. Every query must see some key: a row that sees none has no softmax, so callers leave it
    # out.
    visible: Tensor | None = None
    # Scaled scores s become softcap tanh(s / softcap), as in some targets. There is no backward for this.
    softcap: float | None = None
    window: int | None = None  # of a `banded` block; None: every key up to the query's own

    def bias(self, dtype: torch.dtype, multiple: int = 1) -> Tensor | None:
        """What to add to the scores [Q, S] of a `masked` block, in memory whose rows hold a `multiple` of numbers; None
        for others."""
        if self.visibility != "masked":
            return None
        queries, keys = self.visible.shape
        bias = torch.zeros(queries, keys + -keys % multiple, dtype=dtype, device=self.visible.device)[:, :keys]
        return bias.masked_fill_(~self.visible, float("-inf"))


class BlockOutput(NamedTuple):
    """Attention over one set of keys."""

    out: Tensor  # [queries, heads, head_dim]
    lse: Tensor  # [queries, heads]: log of the softmax's denominator, fp32 or wider


# Of q, k and v, in their own shapes; those of grouped key/value heads are already summed.
BlockGradients = tuple[Tensor, Tensor, Tensor]


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
    chunk_bytes: int = CHUNK_BYTES,
) -> BlockOutput:
    """A kernel's `forward` in fp32 or wider; out is rounded once, to q's dtype."""
    exact = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=exact, device=q.device)
    q, grouped_out, grouped_lse = (x.unflatten(1, (k.shape[1], -1)) for x in (q, out, lse))
    for heads, rows in _chunks(q, k, chunk_bytes):
        scores = _scores(q[rows, heads].to(exact), k[:, heads].to(exact), rows, scoring)
        denominators = scores.logsumexp(-1, keepdim=True)
        p = (scores - denominators).exp()
        grouped_out[rows, heads] = torch.einsum("ngqs,snd->qngd", p, v[:, heads].to(exact)).to(q.dtype)
        grouped_lse[rows, heads] = denominators[..., 0].permute(2, 0, 1)
    return BlockOutput(out, lse)


def plain_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scoring: Scoring,
    chunk_bytes: int = CHUNK_BYTES,
) -> BlockGradients:
    """A kernel's `backward` in fp32 or wider; each gradient is rounded once, to the dtype of its tensor."""
    exact = torch.promote_types(q.dtype, torch.float32)
    dq, (dk, dv) = torch.empty_like(q), (torch.zeros(x.shape, dtype=exact, device=x.device) for x in (k, v))
    delta = (grad.to(exact) * out.to(exact)).sum(-1)
    q, grad, lse, delta, grouped_dq = (x.unflatten(1, (k.shape[1], -1)) for x in (q, grad, lse, delta, dq))
    for heads, rows in _chunks(q, k, chunk_bytes):
        queries, keys, upstream = (x.to(exact) for x in (q[rows, heads], k[:, heads], grad[rows, heads]))
        p = (_scores(queries, keys, rows, scoring) - lse[rows, heads].to(exact).permute(1, 2, 0)[..., None]).exp()
        ds = torch.einsum("qngd,snd->ngqs", upstream, v[:, heads].to(exact))
        ds = scoring.scale * p * (ds - delta[rows, heads].permute(1, 2, 0)[..., None])
        grouped_dq[rows, heads] = torch.einsum("ngqs,snd->qngd", ds, keys).to(dq.dtype)
        dk[:, heads] += torch.einsum("ngqs,qngd->snd", ds, queries)
        dv[:, heads] += torch.einsum("ngqs,qngd->snd", p, upstream)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _chunks(q: Tensor, k: Tensor, chunk_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Yields chunks (key/value heads, queries) with at most chunk_bytes of scores, or one query of one such head. q is
    [queries, kv_heads, group, d]."""
    queries, kv_heads, group, _ = q.shape
    row = group * len(k) * torch.promote_types(k.dtype, torch.float32).itemsize
    rows = min(queries, max(1, chunk_bytes // row))
    heads = max(1, chunk_bytes // (row * rows))
    for head in range(0, kv_heads, heads):
        for start in range(0, queries, rows):
            yield slice(head, head + heads), slice(start, min(start + rows, queries))


def _scores(q: Tensor, k: Tensor, rows: slice, scoring: Scoring) -> Tensor:
    """Scores [kv_heads, group, Q, S] of the block's queries `rows`, -inf where a key is not seen."""
    scores = torch.einsum("qngd,snd->ngqs", q, k) * scoring.scale
    if scoring.softcap is not None:
        scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    if scoring.visibility == "full":
        return scores
    if scoring.visibility == "causal":
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(rows.start)
    else:
        visible = scoring.visible[rows]
    return scores.masked_fill(~visible, float("-inf"))
