"""One block of attention with its log-sum-exp, forward and backward: the unit that every layout is built from."""

from collections.abc import Callable
from typing import Any, Literal

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
    Scoring,
    Visibility,
    plain_attention,
    plain_attention_backward,
)

Kernel = Literal["cpu", "cuda flash", "cuda efficient", "plain"]


def kernel_name(
    device: torch.device, dtype: torch.dtype, head_dim: int, visibility: Visibility, softcap: float | None = None
) -> Kernel:
    """Chooses the kernel for a block from its inputs alone. Plain matrix products handle what no fused kernel does."""
    if softcap is not None:
        return "plain"
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda" or dtype == torch.float64 or head_dim % 8 or head_dim > 256:
        return "plain"
    return "cuda efficient" if dtype == torch.float32 or visibility == "masked" else "cuda flash"


def takes_bands(q: Tensor, softcap: float | None = None) -> bool:
    """Whether blocks with these queries may be `banded`."""
    return kernel_name(q.device, q.dtype, q.shape[-1], "banded", softcap) == "cuda flash"


def block_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> BlockOutput:
    """softmax(scale q k^T) v over one block.

    q is [Q, heads, d]; k and v are [S, kv_heads, d], where heads is a multiple of kv_heads. Only blocks for which
    `takes_bands` is true may be `banded`.
    """
    assert scoring.visibility != "banded" or takes_bands(q, scoring.softcap)
    forward, _ = _KERNELS[kernel_name(q.device, q.dtype, q.shape[-1], scoring.visibility, scoring.softcap)]
    return forward(q, k, v, scoring)


def block_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring
) -> BlockGradients:
    """This block's share of the gradients.

    `out` and `lse` must be the ones *merged over all blocks of the query*; with them each block's backward is exact on
    its own (P = exp(scale q k^T - lse), dS = P * (grad v^T - sum(grad * out))). A CUDA kernel rounds `out` to q's
    dtype; the `out` from `absorb_lse_gradient` already has it.
    """
    _, backward = _KERNELS[kernel_name(q.device, q.dtype, q.shape[-1], scoring.visibility)]
    return backward(grad, q, k, v, out, lse, scoring)


def absorb_lse_gradient(out: Tensor, grad: Tensor, grad_lse: Tensor) -> Tensor:
    """The `out` [Q, heads, d] to pass to `block_attention_backward` if lse has an upstream gradient too; in the dtype
    of grad.

    A kernel only reads the output to form delta = sum(grad * out), from which the gradient of lse has to be subtracted
    (dS = P * (grad v^T - delta + grad_lse)). So any row o with sum(grad * o) = delta - grad_lse makes any kernel exact.
    The one returned is 0 except where grad is largest and, in half precision, second largest: the first entry gives
    that sum up to its own rounding, the second corrects that rounding. In bf16 the remaining error is 2^-16 of the sum,
    and 2^-8 only if the rest of grad's row is 0 or almost 0. A row with grad 0 must have grad_lse 0, which holds for
    every function of a merged output.
    """
    exact = torch.promote_types(out.dtype, torch.float32)
    rest = ((grad.to(exact) * out.to(exact)).sum(-1) - grad_lse.to(exact))[..., None]
    if grad.dtype == exact or grad.shape[-1] == 1:
        places = grad.abs().argmax(-1, keepdim=True)
    else:
        places = grad.abs().topk(2, -1).indices
    limit = torch.finfo(grad.dtype).max
    entries = []
    for factor in grad.gather(-1, places).to(exact).split(1, -1):
        entry = torch.where(factor != 0, rest / factor, 0).clamp(-limit, limit).to(grad.dtype)
        rest = rest - entry.to(exact) * factor
        entries.append(entry)
    return torch.zeros_like(grad).scatter_(-1, places, torch.cat(entries, -1))


def merge_blocks(a: BlockOutput, b: BlockOutput) -> BlockOutput:
    """Attention over the union of two disjoint key sets, from the attention over each (log-sum-exp merge)."""
    lse = torch.logaddexp(a.lse, b.lse)
    out = a.out * (a.lse - lse).exp()[..., None] + b.out * (b.lse - lse).exp()[..., None]
    return BlockOutput(out, lse)


def _cpu_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> BlockOutput:
    """Uses torch's flash kernel, in fp32 or wider: in bf16 it would sum the gradients of keys and values in bf16, and
    without matrix instructions for bf16 it is slower as well."""
    exact = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(_cpu_layout(x, exact) for x in (q, k, v)), **_cpu_arguments(scoring, exact)
    )
    return BlockOutput(out[0].transpose(0, 1).to(q.dtype), lse[0].transpose(0, 1))


def _cpu_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring
) -> BlockGradients:
    exact = torch.promote_types(q.dtype, torch.float32)
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(_cpu_layout(x, exact) for x in (grad, q, k, v, out)),
        lse.transpose(0, 1)[None].contiguous(),
        **_cpu_arguments(scoring, exact),
    )
    return BlockGradients(*(gradient[0].transpose(0, 1).to(q.dtype) for gradient in gradients))


def _cpu_layout(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Maps [tokens, heads, d] to [1, heads, tokens, d], contiguous, as the kernel expects."""
    return x.transpose(0, 1)[None].to(dtype, memory_format=torch.contiguous_format)


def _cpu_arguments(scoring: Scoring, dtype: torch.dtype) -> dict[str, Any]:
    causal = scoring.visibility == "causal"
    return {"dropout_p": 0.0, "is_causal": causal, "attn_mask": scoring.bias(dtype), "scale": scoring.scale}


# (forward, backward), with the parameters of `block_attention` and `block_attention_backward`.
_KERNELS: dict[Kernel, tuple[Callable[..., BlockOutput], Callable[..., BlockGradients]]] = {
    "cpu": (_cpu_attention, _cpu_attention_backward),
    "cuda flash": (flash_attention, flash_attention_backward),
    "cuda efficient": (efficient_attention, efficient_attention_backward),
    "plain": (plain_attention, plain_attention_backward),
}
