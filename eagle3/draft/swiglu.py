"""SwiGLU as one operation that saves its input alone; autograd would save two more tensors of half the width."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class SwiGLU(NamedTuple):
    """One way to compute silu(gate) * up for x = [gate, up] [tokens, 2I].

    forward(x): the result [tokens, I].
    backward(grad, x): the gradient of x.
    """

    name: str
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


def swiglu_candidates(device: torch.device, dtype: torch.dtype) -> list[SwiGLU]:
    """The kernels that can compute it, the usual one first."""
    if device.type != "cuda" or dtype == torch.float64:
        return [PLAIN_SWIGLU]
    from eagle3.draft.fused_swiglu import FUSED_SWIGLU  # Triton comes with torch's CUDA build

    return [FUSED_SWIGLU, PLAIN_SWIGLU]


def swiglu(x: Tensor, kernel: SwiGLU | None = None) -> Tensor:
    """Differentiable. kernel: None: the usual one."""
    return _SwiGLU.apply(x, kernel or swiglu_candidates(x.device, x.dtype)[0])


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kernel):
        ctx.kernel = kernel
        ctx.save_for_backward(x)
        return kernel.forward(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.kernel.backward(grad, *ctx.saved_tensors), None


def _plain(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _plain_backward(grad: Tensor, x: Tensor) -> Tensor:
    (gate, up), d_x = x.chunk(2, -1), torch.empty_like(x)
    d_gate, d_up = d_x.chunk(2, -1)
    torch.mul(grad, F.silu(gate), out=d_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=d_gate)
    return d_x


PLAIN_SWIGLU = SwiGLU("plain", _plain, _plain_backward)
