"""Attention of one training-time-test step: the causal prefix K_0, V_0 over all ranks, the position's own K_1..K_k, and
an optional sink, in one softmax."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from eagle3.attention.ring import Exchange, PositionScore, RingAttention, RingMode
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
    (own keys, sink) is merged afterwards where its token lives, so that it crosses no ranks.
    """

    ulysses: Ulysses
    ring: RingAttention

    @classmethod
    def over(
        cls,
        ulysses: ProcessGroup,
        ring: ProcessGroup,
        scale: float,
        mode: RingMode = "gather",
        score: PositionScore | None = None,
    ) -> "TTTAttention":
        return cls(Ulysses(ulysses), RingAttention(ring, mode, scale, score))

    def start(self, prefix: KeyValue) -> Exchange:
        """Begin to share this rank's K_0, V_0 (every sequence rank has the same number of rows)."""
        joined = self.ulysses.to_heads(self.ulysses.replicate(torch.cat(prefix, -1)))
        return self.ring.start(torch.stack(joined.chunk(2, -1)))

    def finish(self, exchange: Exchange) -> Tensor:
        """The shared K_0, V_0, to be given to every step."""
        return self.ring.finish(exchange)

    def __call__(
        self,
        q: Tensor,
        shared: Tensor,
        schedules: tuple[PrefixSchedule, ...],
        own: Sequence[KeyValue] = (),
        sink: Tensor | None = None,
        step: int = 0,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Output [Q, heads, d] of step k for q [Q, heads, d].

        shared: from `finish`. schedules: the Ulysses group's queries against each ring rank's keys. own: K_1..K_k,
        V_1..V_k, each [Q, kv_heads, d], of which query t sees row t alone. sink [heads]: one more logit without a
        value. step (k) and positions [Q] of the queries' rows are for a `score` alone. Differentiable in every tensor.
        """
        part = self.ring(self.ulysses.to_heads(q), shared, schedules, step)
        out = self.ulysses.to_tokens(part.out)
        if not own and sink is None:
            return out
        lse = self.ulysses.to_tokens(part.lse[..., None])[..., 0]
        keys, values = tuple(kv.key for kv in own), tuple(kv.value for kv in own)
        own_logit = partial(_own_logit, ring=self.ring, step=step, positions=positions)
        return _MergeOwn.apply(out, lse, q, sink, own_logit, *keys, *values)


class _MergeOwn(torch.autograd.Function):
    """softmax over the prefix (as out and lse), own keys and sink: every term has a probability and a value."""

    @staticmethod
    def forward(ctx, out, lse, q, sink, own_logit, *own):
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        logits = [own_logit(q, key, index=index + 1) for index, key in enumerate(keys)]
        every = [lse, *logits] if sink is None else [lse, *logits, sink.to(lse.dtype).expand_as(lse)]
        total = torch.stack(every).logsumexp(0)
        merged = out * (lse - total).exp()[..., None]
        for logit, value in zip(logits, values, strict=True):
            merged += _grouped((logit - total).exp(), value)[..., None].mul(value[:, :, None]).flatten(1, 2)
        ctx.save_for_backward(out, lse, q, sink, total, *own)
        ctx.own_logit = own_logit
        return merged.to(q.dtype)

    @staticmethod
    def backward(ctx, grad):
        out, lse, q, sink, total, *own = ctx.saved_tensors
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        exact = lse.dtype
        grad = grad.to(exact)
        share = (lse - total).exp()
        prefix_dot = (grad * out).sum(-1)
        terms = []
        delta = share * prefix_dot  # sum(grad * merged)
        for index, (key, value) in enumerate(zip(keys, values, strict=True)):
            leaves = [tensor.detach().to(exact).requires_grad_() for tensor in (q, key)]
            with torch.enable_grad():
                logit = ctx.own_logit(*leaves, index=index + 1)
            p = (logit.detach() - total).exp()
            dot = (_grouped(grad, value) * value[:, :, None].to(exact)).sum(-1).flatten(1)
            delta += p * dot
            terms.append((leaves, logit, p, dot))
        dq = torch.zeros(q.shape, dtype=exact, device=q.device)
        key_gradients, value_gradients = [], []
        for (leaves, logit, p, dot), key, value in zip(terms, keys, values, strict=True):
            from_q, from_key = torch.autograd.grad(logit, leaves, p * (dot - delta))
            dq += from_q
            key_gradients.append(from_key.to(key.dtype))
            value_gradients.append((_grouped(p, value)[..., None] * _grouped(grad, value)).sum(2).to(value.dtype))
        d_sink = None if sink is None else -((sink - total).exp() * delta).sum(0).to(sink.dtype)
        d_lse = share * (prefix_dot - delta)
        d_out = (grad * share[..., None]).to(out.dtype)
        return d_out, d_lse, dq.to(q.dtype), d_sink, None, *key_gradients, *value_gradients


def _own_logit(
    q: Tensor, key: Tensor, *, index: int, ring: RingAttention, step: int, positions: Tensor | None
) -> Tensor:
    """Scores [Q, heads] of q [Q, heads, d] with its own K_index [Q, kv_heads, d], in fp32 at least."""
    exact = torch.promote_types(q.dtype, torch.float32)
    logit = (_grouped(q, key).to(exact) * key[:, :, None].to(exact)).sum(-1).flatten(1) * ring.scale
    return logit if ring.score is None else ring.score(logit.t(), positions + step, positions + index).t()


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """[Q, heads, ...] -> [Q, kv_heads, group, ...], beside the key/value heads that each group shares."""
    return x.unflatten(1, (key.shape[1], -1))
