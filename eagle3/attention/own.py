"""The block of a query's own keys K_1..K_k: each query sees its own row of them, and no other query does."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.attention.plain import BlockOutput

# Rows whose copies in fp32 or wider the plain kernel holds at once.
PLAIN_ROWS = 256


class OwnKernel(NamedTuple):
    """One way to add own keys to the attention over a prefix. In all of it, q is [Q, heads, d]; own is K_1..K_k, then
    V_1..V_k, each [Q, kv_heads, d].

    forward(prefix, q, own, scale): attention over the prefix and own keys in one softmax, given that over the prefix.
    backward(grad, output, q, own, scale): own keys' share of the gradient of q, and the gradients of `own`, given the
        output over the prefix and own keys, and its gradient.
    """

    name: str
    forward: Callable[[BlockOutput, Tensor, Sequence[Tensor], float], BlockOutput]
    backward: Callable[[Tensor, BlockOutput, Tensor, Sequence[Tensor], float], tuple[Tensor, ...]]


def own_candidates(device: torch.device, dtype: torch.dtype) -> list[OwnKernel]:
    """The kernels that can add own keys, the usual one first."""
    if device.type != "cuda" or dtype == torch.float64:
        return [PLAIN_OWN]
    from eagle3.attention.fused_own import FUSED_OWN  # Triton comes with torch's CUDA build

    return [FUSED_OWN, PLAIN_OWN]


def _plain(prefix: BlockOutput, q: Tensor, own: Sequence[Tensor], scale: float) -> BlockOutput:
    out, lse = torch.empty_like(q), torch.empty_like(prefix.lse)
    for rows in _chunks(q):
        _, values, grouped, logits = _logits(q[rows], [x[rows] for x in own], scale, lse.dtype)
        lse[rows] = torch.cat((prefix.lse[None, rows], logits)).logsumexp(0)
        share = (prefix.lse[rows] - lse[rows]).exp()
        p = (logits - lse[rows]).exp().unflatten(-1, grouped.shape[1:3])
        out[rows] = prefix.out[rows] * share[..., None] + torch.einsum("kqng,kqnd->qngd", p, values).flatten(1, 2)
    return BlockOutput(out, lse)


def _plain_backward(
    grad: Tensor, output: BlockOutput, q: Tensor, own: Sequence[Tensor], scale: float
) -> tuple[Tensor, ...]:
    gradients = [torch.empty_like(tensor) for tensor in (q, *own)]
    for rows in _chunks(q):
        out, lse = (tensor[rows] for tensor in output)
        keys, values, grouped, logits = _logits(q[rows], [x[rows] for x in own], scale, lse.dtype)
        upstream, p = grad[rows].to(lse.dtype), (logits - lse).exp()
        split = upstream.unflatten(1, grouped.shape[1:3])
        dots = torch.einsum("qngd,kqnd->kqng", split, values).flatten(2)
        d_logits = scale * p * (dots - (upstream * out).sum(-1))
        d_logits, p = (each.unflatten(-1, grouped.shape[1:3]) for each in (d_logits, p))
        parts = (
            torch.einsum("kqng,kqnd->qngd", d_logits, keys).flatten(1, 2),
            *torch.einsum("kqng,qngd->kqnd", d_logits, grouped),
            *torch.einsum("kqng,qngd->kqnd", p, split),
        )
        for whole, part in zip(gradients, parts, strict=True):
            whole[rows] = part
        del parts
    return tuple(gradients)


def _chunks(q: Tensor) -> list[slice]:
    return [slice(start, start + PLAIN_ROWS) for start in range(0, len(q), PLAIN_ROWS)]


def _logits(
    q: Tensor, own: Sequence[Tensor], scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """keys, values [k, rows, kv_heads, d], q grouped [rows, kv_heads, group, d] and logits [k, rows, heads], all in
    `dtype`."""
    q = q.to(dtype).unflatten(1, (own[0].shape[1], -1))
    halves = own[: len(own) // 2], own[len(own) // 2 :]
    keys, values = (torch.stack([tensor.to(dtype) for tensor in half]) for half in halves)
    return keys, values, q, torch.einsum("qngd,kqnd->kqng", q, keys).flatten(2) * scale


PLAIN_OWN = OwnKernel("plain", _plain, _plain_backward)
