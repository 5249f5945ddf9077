"""SwiGLU in Triton: one kernel forward and one backward, each of which reads and writes every number once. In fp16,
bf16 or fp32, computed in fp32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3.draft.swiglu import SwiGLU

COLUMNS = 1024  # of one program


@triton.jit
def _forward_kernel(x, out, width, COLUMNS: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real, x = at < width, x + 2 * row * width
    gate, up = tl.load(x + at, mask=real).to(tl.float32), tl.load(x + width + at, mask=real).to(tl.float32)
    tl.store(out + row * width + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=real)


@triton.jit
def _backward_kernel(grad, x, d_x, width, COLUMNS: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real, x, d_x = at < width, x + 2 * row * width, d_x + 2 * row * width
    gate, up = tl.load(x + at, mask=real).to(tl.float32), tl.load(x + width + at, mask=real).to(tl.float32)
    upstream, share = tl.load(grad + row * width + at, mask=real).to(tl.float32), tl.sigmoid(gate)
    d_gate, d_up = upstream * up * share * (1 + gate * (1 - share)), upstream * gate * share
    tl.store(d_x + at, d_gate.to(d_x.dtype.element_ty), mask=real)
    tl.store(d_x + width + at, d_up.to(d_x.dtype.element_ty), mask=real)


def _launch(kernel, *tensors: Tensor) -> None:
    rows, width = tensors[0].shape[0], min(tensor.shape[1] for tensor in tensors)
    if rows:
        kernel[rows, triton.cdiv(width, COLUMNS)](*tensors, width, COLUMNS=COLUMNS)


@torch.library.custom_op("eagle3::swiglu", mutates_args=())
def fused_swiglu(x: Tensor) -> Tensor:
    out = _empty(x)
    _launch(_forward_kernel, x, out)
    return out


@fused_swiglu.register_fake
def _empty(x: Tensor) -> Tensor:
    return x.new_empty(len(x), x.shape[1] // 2)


@torch.library.custom_op("eagle3::swiglu_backward", mutates_args=())
def fused_swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    d_x = torch.empty_like(x)
    _launch(_backward_kernel, grad.contiguous(), x, d_x)
    return d_x


fused_swiglu_backward.register_fake(lambda grad, x: torch.empty_like(x))
FUSED_SWIGLU = SwiGLU("fused", fused_swiglu, fused_swiglu_backward)
