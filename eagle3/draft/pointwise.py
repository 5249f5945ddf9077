"""What a step computes of each number or pair of numbers alone, as operations that save little: SwiGLU saves its input,
where autograd would save two more tensors of half the width, and a rotation saves its angles."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.draft.rope import Rotation


class Pointwise(NamedTuple):
    """One way to compute both.

    swiglu(x): silu(gate) * up [tokens, I] for x = [gate, up] [tokens, 2I].
    swiglu_backward(grad, x): the gradient of x.
    rotate(x, rotation, heads, dtype): cuts x [tokens, sum(heads) * d], in the rotation's dtype, into parts of so many
        heads, each [tokens, heads, d], rounded to dtype once. Rotates all parts, or all but the last of several (which
        are the values).
    rotate_backward(grads, rotation): the gradient of x, in the rotation's dtype.
    """

    name: str
    swiglu: Callable[[Tensor], Tensor]
    swiglu_backward: Callable[[Tensor, Tensor], Tensor]
    rotate: Callable[[Tensor, Rotation, Sequence[int], torch.dtype], list[Tensor]]
    rotate_backward: Callable[[Sequence[Tensor], Rotation], Tensor]


def pointwise_candidates(device: torch.device, dtype: torch.dtype) -> list[Pointwise]:
    """The kernels that can compute it, the usual one first."""
    if device.type != "cuda" or dtype == torch.float64:
        return [PLAIN_POINTWISE]
    from eagle3.draft.fused_pointwise import FUSED_POINTWISE  # Triton comes with torch's CUDA build

    return [FUSED_POINTWISE, PLAIN_POINTWISE]


class SwiGLU(torch.autograd.Function):
    """apply(x, kernel)"""

    @staticmethod
    def forward(ctx, x, kernel):
        ctx.kernel = kernel
        ctx.save_for_backward(x)
        return kernel.swiglu(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.kernel.swiglu_backward(grad, *ctx.saved_tensors), None


class Rotate(torch.autograd.Function):
    """apply(x, *rotation, heads, dtype, kernel)"""

    @staticmethod
    def forward(ctx, x, cos, sin, heads, dtype, kernel):
        ctx.kernel = kernel
        ctx.save_for_backward(cos, sin)
        return tuple(kernel.rotate(x, Rotation(cos, sin), heads, dtype))

    @staticmethod
    def backward(ctx, *grads):
        return ctx.kernel.rotate_backward(grads, Rotation(*ctx.saved_tensors)), *(None,) * 5


def rotated(heads: Sequence[int]) -> Sequence[int]:
    """The parts that are rotated."""
    return heads[:-1] or heads


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    (gate, up), d_x = x.chunk(2, -1), torch.empty_like(x)
    d_gate, d_up = d_x.chunk(2, -1)
    torch.mul(grad, F.silu(gate), out=d_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=d_gate)
    return d_x


def _rotate(x: Tensor, rotation: Rotation, heads: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    parts = x.unflatten(1, (sum(heads), -1)).split(list(heads), 1)
    turned = [rotation(part).to(dtype) for part in rotated(parts)]
    # a view as values would keep the whole of x
    return [*turned, *(part.to(dtype, copy=True) for part in parts[len(turned) :])]


def _rotate_backward(grads: Sequence[Tensor], rotation: Rotation) -> Tensor:
    parts = [grad.to(rotation.cos.dtype) for grad in grads]
    turned = [rotation(part, back=True) for part in rotated(parts)]
    return torch.cat((*turned, *parts[len(turned) :]), 1).flatten(1)


PLAIN_POINTWISE = Pointwise("plain", _swiglu, _swiglu_backward, _rotate, _rotate_backward)
