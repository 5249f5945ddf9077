"""Own keys in Triton: one kernel forward and one backward, each of which reads and writes every tensor once. For any
group of query heads and any width, in fp16, bf16 or fp32, with sums in fp32."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3.attention.block import OwnKernel
from eagle3.attention.plain import BlockOutput
from eagle3.operators import launch, operator

# Numbers in one program's tile [rows, group, width], of which a few are in registers at once, in fp32; and its warps.
# Twice as much of both takes four times as long on an H200, in the backward of six keys.
TILE, WARPS = 512, 1


@triton.jit
def _places(
    rows, kv_heads, GROUP: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, G: tl.constexpr, D: tl.constexpr
):
    """Where a program's rows of one key/value head are in [rows, heads, width], in [rows, kv_heads, width] and in
    [rows, heads], each with which of them are real."""
    row, head = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.program_id(1)
    group, width = tl.arange(0, G), tl.arange(0, D)
    own = row * kv_heads + head
    each = own[:, None] * GROUP + group[None, :]
    is_row, is_width = row < rows, width < WIDTH
    is_each = is_row[:, None] & (group < GROUP)[None, :]
    wide, narrow = each[:, :, None] * WIDTH + width[None, None, :], own[:, None] * WIDTH + width[None, :]
    return (
        wide,
        is_each[:, :, None] & is_width[None, None, :],
        narrow,
        is_row[:, None] & is_width[None, :],
        each,
        is_each,
    )


@triton.jit
def _read(tensor, place, real):
    return tl.load(tensor + place, mask=real, other=0.0).to(tl.float32)


@triton.jit
def _forward_kernel(
    out, lse, q, keys, values, merged_out, merged_lse, rows, kv_heads, scale,
    OWN: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One softmax, rescaled whenever its maximum rises."""
    wide, is_wide, narrow, is_narrow, each, is_each = _places(rows, kv_heads, GROUP, WIDTH, R, G, D)
    queries, total, top = _read(q, wide, is_wide), _read(out, wide, is_wide), _read(lse, each, is_each)
    weight = tl.full((R, G), 1.0, tl.float32)
    for i in tl.static_range(OWN):
        logit = scale * tl.sum(queries * _read(keys[i], narrow, is_narrow)[:, None, :], 2)
        higher = tl.maximum(top, logit)
        kept, p = tl.exp(top - higher), tl.exp(logit - higher)
        weight = weight * kept + p
        total = total * kept[:, :, None] + p[:, :, None] * _read(values[i], narrow, is_narrow)[:, None, :]
        top = higher
    total = total / weight[:, :, None]
    tl.store(merged_out + wide, total.to(merged_out.dtype.element_ty), mask=is_wide)
    tl.store(merged_lse + each, top + tl.log(weight), mask=is_each)


@triton.jit
def _backward_kernel(
    grad, out, lse, q, keys, values, dq_out, d_keys, d_values, rows, kv_heads, scale,
    OWN: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    wide, is_wide, narrow, is_narrow, each, is_each = _places(rows, kv_heads, GROUP, WIDTH, R, G, D)
    queries, upstream, total = _read(q, wide, is_wide), _read(grad, wide, is_wide), _read(lse, each, is_each)
    mean = tl.sum(upstream * _read(out, wide, is_wide), 2)
    dq = tl.zeros((R, G, D), tl.float32)
    for i in tl.static_range(OWN):
        key = _read(keys[i], narrow, is_narrow)
        p = tl.exp(scale * tl.sum(queries * key[:, None, :], 2) - total)
        d_value = tl.sum(p[:, :, None] * upstream, 1)
        tl.store(d_values[i] + narrow, d_value.to(d_values[i].dtype.element_ty), mask=is_narrow)
        dots = tl.sum(upstream * _read(values[i], narrow, is_narrow)[:, None, :], 2)
        d_logit = (scale * p * (dots - mean))[:, :, None]
        dq += d_logit * key[:, None, :]
        tl.store(d_keys[i] + narrow, tl.sum(d_logit * queries, 1).to(d_keys[i].dtype.element_ty), mask=is_narrow)
    tl.store(dq_out + wide, dq.to(dq_out.dtype.element_ty), mask=is_wide)


def _launch(kernel, q: Tensor, own: Sequence[Tensor], *arguments) -> None:
    (rows, heads, width), kv_heads = q.shape, own[0].shape[1]
    group, wide = triton.next_power_of_2(heads // kv_heads), triton.next_power_of_2(width)
    together = max(1, TILE // (group * wide))
    sizes = {"OWN": len(own) // 2, "GROUP": heads // kv_heads, "WIDTH": width, "R": together, "G": group, "D": wide}
    launch(kernel, (triton.cdiv(rows, together), kv_heads), *arguments, **sizes, num_warps=WARPS)


@operator
def own_keys(out: Tensor, lse: Tensor, q: Tensor, own: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """OwnKernel.forward, given contiguous tensors."""
    merged, merged_lse = torch.empty_like(q), torch.empty_like(lse)
    _launch(_forward_kernel, q, own, out, lse, q, *_halves(own), merged, merged_lse, len(q), own[0].shape[1], scale)
    return merged, merged_lse


@operator
def own_keys_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, own: Sequence[Tensor], scale: float
) -> list[Tensor]:
    """OwnKernel.backward, likewise."""
    dq, *d_own = gradients = [torch.empty_like(tensor) for tensor in (q, *own)]
    halves = *_halves(own), dq, *_halves(d_own)
    _launch(_backward_kernel, q, own, grad, out, lse, q, *halves, len(q), own[0].shape[1], scale)
    return gradients


def _halves(own: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return tuple(own[: len(own) // 2]), tuple(own[len(own) // 2 :])


def _contiguous(*tensors: Tensor) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors]


FUSED_OWN = OwnKernel(
    "fused",
    lambda prefix, q, own, scale: BlockOutput(*own_keys(*_contiguous(*prefix, q), _contiguous(*own), scale)),
    lambda grad, output, q, own, scale: tuple(
        own_keys_backward(*_contiguous(grad, *output, q), _contiguous(*own), scale)
    ),
)
