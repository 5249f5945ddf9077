"""One block of attention with its log-sum-exp, forward and backward: the unit that every layout is built from. A
query's own keys K_1..K_k are a block, too: it sees its own row of them, and no other query does."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle3.attention.cuda import (
    efficient_attention,
    efficient_attention_backward,
    flash4_attention,
    flash4_attention_backward,
    flash_attention,
    flash_attention_backward,
    has_flash4,
    heads_at_once,
)
from eagle3.attention.plain import (
    BlockGradients,
    BlockOutput,
    Scoring,
    Visibility,
    plain_attention,
    plain_attention_backward,
)

# Rows whose copies in fp32 or wider the plain kernel holds at once.
PLAIN_ROWS = 256


class Kernel(NamedTuple):
    """One way to compute blocks, forward and backward.

    forward(q, k, v, scoring): softmax(scale q k^T) v over one block, and its log-sum-exp. q is [Q, heads, d]; k and v
        are [S, kv_heads, d], where heads is a multiple of kv_heads.
    backward(grad, q, k, v, out, lse, scoring): this block's share of the gradients: with P = exp(scale q k^T - lse),
        dS = P * (grad v^T - sum(grad * out)). If a query has several blocks, `out` and `lse` are the ones *merged over
        all of them*; each block's backward is then exact on its own. A kernel reads `out` only to form that sum, and
        rounds it to q's dtype first.
    copies_gradients: whether `backward` holds fp32 copies of the gradients of all query heads.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, Scoring], BlockOutput]
    backward: Callable[..., BlockGradients]
    copies_gradients: bool = False


class BlockKernels(NamedTuple):
    """The kernel for each kind of block. None: blocks of this kind are cut into other kinds."""

    full: Kernel
    causal: Kernel
    masked: Kernel
    banded: Kernel | None  # without a window
    windowed: Kernel | None  # banded, with a window

    def of(self, visibility: Visibility, window: int | None) -> Kernel | None:
        return getattr(self, "windowed" if visibility == "banded" and window is not None else visibility)


def block_candidates(
    device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None = None
) -> dict[str, list[Kernel]]:
    """For each kind of block, the kernels that can compute it, the usual one first. Plain matrix products come last;
    they compute what no fused kernel does. Only flash kernels take bands."""
    fused = device.type == "cuda" and softcap is None and dtype != torch.float64 and head_dim % 8 == 0
    fused = fused and head_dim <= 256
    usual = [CPU] if device.type == "cpu" and softcap is None else []
    masked = [EFFICIENT] if fused else usual
    half = fused and dtype != torch.float32
    bands = [*([FLASH4] if has_flash4(device) else []), FLASH] if half else []
    return {
        **{kind: [*bands, *masked, PLAIN] for kind in ("full", "causal")},
        "masked": [*masked, PLAIN],
        "banded": bands,
        "windowed": bands,
    }


def usual_kernels(
    device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None = None
) -> BlockKernels:
    """The kernels that are used unless others were chosen."""
    of = block_candidates(device, dtype, head_dim, softcap)
    return BlockKernels(**{kind: kernels[0] if kernels else None for kind, kernels in of.items()})


def head_groups(q: Tensor, k: Tensor, kernel: Kernel) -> Iterator[tuple[slice, slice]]:
    """Splits a block's heads for its backward pass, so that what a kernel takes stays bounded however long the block
    is. Yields slices of the key/value heads and of their query heads."""
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    most = heads_at_once(len(q), len(k), group, q.shape[-1]) if kernel.copies_gradients else kv_heads
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
    return tuple(gradient[0].transpose(0, 1).to(q.dtype) for gradient in gradients)


def _cpu_layout(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Maps [tokens, heads, d] to [1, heads, tokens, d], contiguous, as the kernel expects."""
    return x.transpose(0, 1)[None].to(dtype, memory_format=torch.contiguous_format)


def _cpu_arguments(scoring: Scoring, dtype: torch.dtype) -> dict[str, Any]:
    causal = scoring.visibility == "causal"
    return {"dropout_p": 0.0, "is_causal": causal, "attn_mask": scoring.bias(dtype), "scale": scoring.scale}


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


def _plain_own(prefix: BlockOutput, q: Tensor, own: Sequence[Tensor], scale: float) -> BlockOutput:
    out, lse = torch.empty_like(q), torch.empty_like(prefix.lse)
    for rows in _chunks(q):
        _, values, grouped, logits = _logits(q[rows], [x[rows] for x in own], scale, lse.dtype)
        lse[rows] = torch.cat((prefix.lse[None, rows], logits)).logsumexp(0)
        share = (prefix.lse[rows] - lse[rows]).exp()
        p = (logits - lse[rows]).exp().unflatten(-1, grouped.shape[1:3])
        out[rows] = prefix.out[rows] * share[..., None] + torch.einsum("kqng,kqnd->qngd", p, values).flatten(1, 2)
    return BlockOutput(out, lse)


def _plain_own_backward(
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


CPU = Kernel("cpu", _cpu_attention, _cpu_attention_backward)
FLASH4 = Kernel("flash4", flash4_attention, flash4_attention_backward, copies_gradients=True)
FLASH = Kernel("flash", flash_attention, flash_attention_backward, copies_gradients=True)
EFFICIENT = Kernel("efficient", efficient_attention, efficient_attention_backward)
PLAIN = Kernel("plain", plain_attention, plain_attention_backward)
PLAIN_BLOCKS = BlockKernels(PLAIN, PLAIN, PLAIN, banded=None, windowed=None)
PLAIN_OWN = OwnKernel("plain", _plain_own, _plain_own_backward)
