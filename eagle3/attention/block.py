"""One block of attention with its log-sum-exp, forward and backward: the unit that every layout is made of."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

# full: every query sees every key. causal: query i sees keys 0..i (equal lengths). masked: `visible` says.
Visibility = Literal["full", "causal", "masked"]
# Changes scaled scores [heads, queries, keys], elementwise and differentiably, before the softmax.
Score = Callable[[Tensor], Tensor]


class BlockOutput(NamedTuple):
    """out [queries, heads, head_dim]; lse [queries, heads], the log of the softmax's denominator, fp32 at least."""

    out: Tensor
    lse: Tensor


class BlockGradients(NamedTuple):
    """Gradients of q, k, v in their own shapes; those of grouped key/value heads are already summed."""

    q: Tensor
    k: Tensor
    v: Tensor


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    visibility: Visibility,
    visible: Tensor | None = None,
    score: Score | None = None,
) -> BlockOutput:
    """softmax(scale q k^T) v over one block.

    q [Q, heads, d]; k, v [S, kv_heads, d] with heads a multiple of kv_heads; visible [Q, S] bool for `masked`, in which
    every query must see some key (a row that sees none has no softmax; callers leave such blocks out). `score` takes
    the path of plain matrix products.
    """
    if _takes_plain_path(q, score):
        return _plain_forward(q, k, v, scale, visibility, visible, score)
    mask = _additive(visible, q.dtype) if visibility == "masked" else None
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _heads_first(q), _heads_first(k), _heads_first(v), 0.0, visibility == "causal", attn_mask=mask, scale=scale
    )
    return BlockOutput(out[0].transpose(0, 1), lse[0].transpose(0, 1))


def block_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    visibility: Visibility,
    visible: Tensor | None = None,
    score: Score | None = None,
) -> BlockGradients:
    """This block's share of the gradients.

    `out` and `lse` are those *merged over all blocks of the query*: with them each block's backward is exact on its own
    (P = exp(scale q k^T - lse), dS = P * (grad v^T - sum(grad * out))).
    """
    if _takes_plain_path(q, score):
        return _plain_backward(grad, q, k, v, out, lse, scale, visibility, visible, score)
    mask = _additive(visible, q.dtype) if visibility == "masked" else None
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _heads_first(grad),
        _heads_first(q),
        _heads_first(k),
        _heads_first(v),
        _heads_first(out.to(q.dtype)),
        lse.transpose(0, 1)[None].contiguous(),
        0.0,
        visibility == "causal",
        attn_mask=mask,
        scale=scale,
    )
    return BlockGradients(*(gradient[0].transpose(0, 1) for gradient in gradients))


def absorb_lse_gradient(out: Tensor, grad: Tensor, grad_lse: Tensor) -> Tensor:
    """The output to hand to `block_attention_backward` where lse has an upstream gradient too.

    A kernel reads the output only to form sum(grad * out), from which the gradient of lse has to be subtracted
    (dS = P * (grad v^T - sum(grad * out) + grad_lse)); so out - grad_lse * grad / |grad|^2 makes any kernel exact. A row
    with grad 0 must have grad_lse 0, as every function of a merged output has. In fp32 at least.
    """
    exact = torch.promote_types(out.dtype, torch.float32)
    grad = grad.to(exact)
    unit = grad / grad.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(exact).tiny)
    squared = (grad * unit).sum(-1, keepdim=True)  # |grad|^2 / max|grad|, which does not underflow
    return out.to(exact) - torch.where(squared > 0, grad_lse[..., None] / squared, 0) * unit


def merge_blocks(a: BlockOutput, b: BlockOutput) -> BlockOutput:
    """Attention over the union of two disjoint key sets from the attention over each (log-sum-exp merge)."""
    lse = torch.logaddexp(a.lse, b.lse)
    out = a.out * (a.lse - lse).exp()[..., None] + b.out * (b.lse - lse).exp()[..., None]
    return BlockOutput(out, lse)


def _takes_plain_path(q: Tensor, score: Score | None) -> bool:
    return q.device.type != "cpu" or q.dtype == torch.bfloat16 or score is not None


def _heads_first(x: Tensor) -> Tensor:
    """[tokens, heads, d] -> [1, heads, tokens, d], contiguous as torch's kernels want it."""
    return x.transpose(0, 1)[None].contiguous()


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))[
        None, None
    ]


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Scores [kv_heads, group, Q, S] in fp32 at least."""
    exact = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(exact).unflatten(1, (k.shape[1], -1))
    return torch.einsum("qngd,snd->ngqs", grouped, k.to(exact)) * scale


def _hide(scores: Tensor, visibility: Visibility, visible: Tensor | None) -> Tensor:
    """-inf where unseen."""
    if visibility == "causal":
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores if visible is None else scores.masked_fill(~visible, float("-inf"))


def _changed(score: Score | None, scores: Tensor) -> Tensor:
    return scores if score is None else score(scores.flatten(0, 1)).view_as(scores)


def _plain_forward(q, k, v, scale, visibility, visible, score=None) -> BlockOutput:
    """The same in matrix products: for devices and dtypes without a kernel here, and the reference of the tests."""
    scores = _hide(_changed(score, _scores(q, k, scale)), visibility, visible)
    lse = scores.logsumexp(-1)
    out = torch.einsum("ngqs,snd->qngd", (scores - lse[..., None]).exp(), v.to(scores.dtype)).flatten(1, 2)
    return BlockOutput(out.to(q.dtype), lse.flatten(0, 1).transpose(0, 1))


def _plain_backward(grad, q, k, v, out, lse, scale, visibility, visible, score=None) -> BlockGradients:
    raw = _scores(q, k, scale).requires_grad_(score is not None)
    with torch.enable_grad():
        changed = _changed(score, raw)
    scores = _hide(changed.detach(), visibility, visible)
    exact, groups = scores.dtype, (k.shape[1], -1)
    lse = lse.to(exact).transpose(0, 1).unflatten(0, groups)[..., None]
    p = (scores - lse).exp()
    grad = grad.to(exact)
    delta = (grad * out.to(exact)).sum(-1).transpose(0, 1).unflatten(0, groups)[..., None]
    grad = grad.unflatten(1, groups)
    ds = p * (torch.einsum("qngd,snd->ngqs", grad, v.to(exact)) - delta)
    if score is not None:
        (ds,) = torch.autograd.grad(changed, raw, ds)
    ds = ds * scale
    dq = torch.einsum("ngqs,snd->qngd", ds, k.to(exact)).flatten(1, 2)
    dk = torch.einsum("ngqs,qngd->snd", ds, q.to(exact).unflatten(1, groups))
    dv = torch.einsum("ngqs,qngd->snd", p, grad)
    return BlockGradients(dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))
