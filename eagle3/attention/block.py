"""One block of attention with its log-sum-exp, forward and backward: the unit that every layout is made of."""

from typing import Literal

import torch
from torch import Tensor

from eagle3.attention.cuda import (
    efficient_attention,
    efficient_attention_backward,
    flash_attention,
    flash_attention_backward,
)
from eagle3.attention.plain import (
    BlockGradients,
    BlockOutput,
    Visibility,
    plain_attention,
    plain_attention_backward,
)

Kernel = Literal["cpu", "cuda flash", "cuda efficient", "plain"]


def kernel_name(
    device: torch.device, dtype: torch.dtype, head_dim: int, visibility: Visibility, softcap: float | None = None
) -> Kernel:
    """The kernel of a block; its inputs alone decide. Plain products take what no fused kernel does."""
    if softcap is not None:
        return "plain"
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda" or dtype == torch.float64 or head_dim % 8 or head_dim > 256:
        return "plain"
    return "cuda efficient" if dtype == torch.float32 or visibility == "masked" else "cuda flash"


def takes_bands(q: Tensor, softcap: float | None = None) -> bool:
    """Whether blocks of these queries may be `banded`."""
    return kernel_name(q.device, q.dtype, q.shape[-1], "banded", softcap) == "cuda flash"


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    visibility: Visibility,
    visible: Tensor | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> BlockOutput:
    """softmax(scale q k^T) v over one block.

    q [Q, heads, d]; k, v [S, kv_heads, d] with heads a multiple of kv_heads; visible [Q, S] bool for `masked`, in which
    every query must see some key (a row that sees none has no softmax; callers leave such blocks out). window: of a
    `banded` block, which only what `takes_bands` names may be. softcap: scaled scores s become softcap tanh(s / softcap), as
    some targets' do; without a backward.
    """
    assert visibility != "banded" or takes_bands(q, softcap)
    match kernel_name(q.device, q.dtype, q.shape[-1], visibility, softcap):
        case "cpu":
            return _cpu_attention(q, k, v, scale, visibility, visible)
        case "cuda flash":
            return flash_attention(q, k, v, scale, visibility, window)
        case "cuda efficient":
            return efficient_attention(q, k, v, scale, visibility, visible)
        case "plain":
            return plain_attention(q, k, v, scale, visibility, visible, softcap)


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
    window: int | None = None,
) -> BlockGradients:
    """This block's share of the gradients.

    `out` and `lse` are those *merged over all blocks of the query*: with them each block's backward is exact on its own
    (P = exp(scale q k^T - lse), dS = P * (grad v^T - sum(grad * out))). A CUDA kernel rounds `out` to q's number format;
    that of `absorb_lse_gradient` is in it already.
    """
    match kernel_name(q.device, q.dtype, q.shape[-1], visibility):
        case "cpu":
            return _cpu_attention_backward(grad, q, k, v, out, lse, scale, visibility, visible)
        case "cuda flash":
            return flash_attention_backward(grad, q, k, v, out, lse, scale, visibility, window)
        case "cuda efficient":
            return efficient_attention_backward(grad, q, k, v, out, lse, scale, visibility, visible)
        case "plain":
            return plain_attention_backward(grad, q, k, v, out, lse, scale, visibility, visible)


def absorb_lse_gradient(out: Tensor, grad: Tensor, grad_lse: Tensor) -> Tensor:
    """The output [Q, heads, d] to hand to `block_attention_backward` where lse has an upstream gradient too; in the
    number format of grad.

    A kernel reads the output only to form delta = sum(grad * out), from which the gradient of lse has to be subtracted
    (dS = P * (grad v^T - delta + grad_lse)). So any row o with sum(grad * o) = delta - grad_lse makes any kernel exact.
    This one is 0 but where grad is largest, and in half precision second largest: the first entry gives that sum but for
    its own rounding, the second makes up for the rounding of the first. In bf16 that leaves 2^-16 of it, and 2^-8 only
    where the rest of grad's row is 0 or next to it. A row with grad 0 must have grad_lse 0, as every function of a merged
    output has.
    """
    exact = torch.promote_types(out.dtype, torch.float32)
    rest = ((grad.to(exact) * out.to(exact)).sum(-1) - grad_lse.to(exact))[..., None]
    if grad.dtype == exact or grad.shape[-1] == 1:
        places = grad.abs().argmax(-1, keepdim=True)
    else:
        places = grad.abs().topk(2, -1).indices
    limit = torch.finfo(grad.dtype).max
    entries = []
    for factor in grad.gather(-1, places).split(1, -1):
        factor = factor.to(exact)
        entry = torch.where(factor != 0, rest / factor, 0).clamp(-limit, limit).to(grad.dtype)
        rest = rest - entry.to(exact) * factor
        entries.append(entry)
    return torch.zeros_like(grad).scatter_(-1, places, torch.cat(entries, -1))


def merge_blocks(a: BlockOutput, b: BlockOutput) -> BlockOutput:
    """Attention over the union of two disjoint key sets from the attention over each (log-sum-exp merge)."""
    lse = torch.logaddexp(a.lse, b.lse)
    out = a.out * (a.lse - lse).exp()[..., None] + b.out * (b.lse - lse).exp()[..., None]
    return BlockOutput(out, lse)


def _cpu_attention(q, k, v, scale, visibility, visible) -> BlockOutput:
    """By torch's flash kernel, in fp32 at least: in bf16 it sums the gradients of keys and values in bf16, and without
    matrix instructions for bf16 it is slower besides."""
    exact = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(_cpu_layout(x, exact) for x in (q, k, v)),
        is_causal=visibility == "causal",
        attn_mask=_cpu_mask(visible, exact) if visibility == "masked" else None,
        scale=scale,
    )
    return BlockOutput(out[0].transpose(0, 1).to(q.dtype), lse[0].transpose(0, 1))


def _cpu_attention_backward(grad, q, k, v, out, lse, scale, visibility, visible) -> BlockGradients:
    exact = torch.promote_types(q.dtype, torch.float32)
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(_cpu_layout(x, exact) for x in (grad, q, k, v, out)),
        lse.transpose(0, 1)[None].contiguous(),
        dropout_p=0.0,
        is_causal=visibility == "causal",
        attn_mask=_cpu_mask(visible, exact) if visibility == "masked" else None,
        scale=scale,
    )
    return BlockGradients(*(gradient[0].transpose(0, 1).to(q.dtype) for gradient in gradients))


def _cpu_layout(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[tokens, heads, d] -> [1, heads, tokens, d], contiguous as the kernel wants it."""
    return x.transpose(0, 1)[None].to(dtype, memory_format=torch.contiguous_format)


def _cpu_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))[None, None]
