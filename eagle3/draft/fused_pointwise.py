"""SwiGLU, and the rotation of heads, in Triton: one kernel forward and one backward each, which read and write every
number once. In fp16, bf16 or fp32, computed in fp32."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3.draft.pointwise import Pointwise, rotated
from eagle3.operators import launch, operator

COLUMNS = 512  # of one program


@triton.jit
def _swiglu_kernel(x, out, width, COLUMNS: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real, x = at < width, x + 2 * row * width
    gate, up = tl.load(x + at, mask=real).to(tl.float32), tl.load(x + width + at, mask=real).to(tl.float32)
    tl.store(out + row * width + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=real)


@triton.jit
def _swiglu_backward_kernel(grad, x, d_x, width, COLUMNS: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real, x, d_x = at < width, x + 2 * row * width, d_x + 2 * row * width
    gate, up = tl.load(x + at, mask=real).to(tl.float32), tl.load(x + width + at, mask=real).to(tl.float32)
    upstream, share = tl.load(grad + row * width + at, mask=real).to(tl.float32), tl.sigmoid(gate)
    d_gate, d_up = upstream * up * share * (1 + gate * (1 - share)), upstream * gate * share
    tl.store(d_x + at, d_gate.to(d_x.dtype.element_ty), mask=real)
    tl.store(d_x + width + at, d_up.to(d_x.dtype.element_ty), mask=real)


@triton.jit
def _pairs(cos, sin, width, turning, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    """A program's pairs: the row, the first number of each in its row, which are real, and the cosine and sine of the
    angle, which is 0 for those that do not turn. width, turning: pairs of a row, and those of them that turn."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    angle, turns = row * HALF + at % HALF, at < turning
    return (
        row,
        at + at // HALF * HALF,
        at < width,
        tl.load(cos + angle, mask=turns, other=1.0),
        tl.load(sin + angle, mask=turns, other=0.0),
    )


@triton.jit
def _rotate_kernel(x, cos, sin, parts, widths, width, turning, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    row, low, real, c, s = _pairs(cos, sin, width, turning, HALF, COLUMNS)
    x += 2 * row * width + low
    first, second = tl.load(x, mask=real).to(tl.float32), tl.load(x + HALF, mask=real).to(tl.float32)
    begin = 0
    for i in tl.static_range(len(parts)):
        mine, place = real & (low >= begin) & (low < begin + widths[i]), parts[i] + row * widths[i] + low - begin
        tl.store(place, (first * c - second * s).to(place.dtype.element_ty), mask=mine)
        tl.store(place + HALF, (second * c + first * s).to(place.dtype.element_ty), mask=mine)
        begin += widths[i]


@triton.jit
def _rotate_backward_kernel(d_x, cos, sin, parts, widths, width, turning, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    row, low, real, c, s = _pairs(cos, sin, width, turning, HALF, COLUMNS)
    first, second = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    begin = 0
    for i in tl.static_range(len(parts)):
        mine, place = real & (low >= begin) & (low < begin + widths[i]), parts[i] + row * widths[i] + low - begin
        first += tl.load(place, mask=mine, other=0.0).to(tl.float32)
        second += tl.load(place + HALF, mask=mine, other=0.0).to(tl.float32)
        begin += widths[i]
    d_x += 2 * row * width + low
    tl.store(d_x, first * c + second * s, mask=real)
    tl.store(d_x + HALF, second * c - first * s, mask=real)


def _launch(kernel, rows: int, width: int, *arguments, **constants: int) -> None:
    launch(kernel, (rows, triton.cdiv(width, COLUMNS)), *arguments, COLUMNS=COLUMNS, **constants)


def _rotating(kernel, x: Tensor, cos: Tensor, sin: Tensor, parts: Sequence[Tensor]) -> None:
    half, widths = cos.shape[-1], tuple(part.shape[1] * part.shape[2] for part in parts)
    pairs, turning = sum(widths) // 2, sum(rotated(widths)) // 2
    _launch(kernel, len(x), pairs, x, cos, sin, tuple(parts), widths, pairs, turning, HALF=half)


@operator
def swiglu(x: Tensor) -> Tensor:
    out = x.new_empty(len(x), x.shape[1] // 2)
    _launch(_swiglu_kernel, *out.shape, x, out, out.shape[1])
    return out


@operator
def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    d_x = torch.empty_like(x)
    _launch(_swiglu_backward_kernel, *grad.shape, grad, x, d_x, grad.shape[1])
    return d_x


@operator
def rotate(x: Tensor, cos: Tensor, sin: Tensor, heads: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Pointwise.rotate, given contiguous tensors."""
    parts = [x.new_empty(len(x), each, 2 * cos.shape[-1], dtype=dtype) for each in heads]
    _rotating(_rotate_kernel, x, cos, sin, parts)
    return parts


@operator
def rotate_backward(grads: Sequence[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    """Pointwise.rotate_backward, likewise."""
    d_x = cos.new_empty(len(cos), sum(grad.shape[1] for grad in grads) * 2 * cos.shape[-1])
    _rotating(_rotate_backward_kernel, d_x, cos, sin, grads)
    return d_x


FUSED_POINTWISE = Pointwise(
    "fused",
    lambda x: swiglu(x.contiguous()),
    lambda grad, x: swiglu_backward(grad.contiguous(), x.contiguous()),
    lambda x, rotation, heads, dtype: rotate(x.contiguous(), *rotation, heads, dtype),
    lambda grads, rotation: rotate_backward([grad.contiguous() for grad in grads], *rotation),
)
