"""One block of attention with its log-sum-exp, forward and backward: the unit that every layout is built from."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3.attention.cuda import (
    efficient_attention,
    efficient_attention_backward,
    flash_attention,
    flash_attention_backward,
    flash_heads,
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
    """This block's share of the gradients: with P = exp(scale q k^T - lse), dS = P * (grad v^T - sum(grad * out)).

    If a query has several blocks, `out` and `lse` are the ones *merged over all of them*; each block's backward is then
    exact on its own. A kernel reads `out` only to form that sum, and rounds it to q's dtype first.
    """
    _, backward = _KERNELS[kernel_name(q.device, q.dtype, q.shape[-1], scoring.visibility)]
    return backward(grad, q, k, v, out, lse, scoring)


def head_groups(q: Tensor, k: Tensor, scoring: Scoring) -> Iterator[tuple[slice, slice]]:
    """Splits a block's heads for its backward pass, so that what a kernel takes stays bounded however long the block
    is. Yields slices of the key/value heads and of their query heads."""
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    most = kv_heads
    if kernel_name(q.device, q.dtype, q.shape[-1], scoring.visibility) == "cuda flash":
        most = flash_heads(len(q), len(k), group, q.shape[-1])
    for first in range(0, kv_heads, most):
        last = min(first + most, kv_heads)
        yield slice(first, last), slice(first * group, last * group)


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
