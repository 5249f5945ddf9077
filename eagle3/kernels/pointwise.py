"""Proves kernels for SwiGLU and the rotation of heads (see proof.py)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.draft.pointwise import Pointwise
from eagle3.draft.rope import Rotation
from eagle3.kernels.proof import BOUNDS, TIMED_ROWS, Case, KernelDemand, KernelVerdict, judge

ROWS, WIDTH, TIMED_WIDTH = 37, 1100, 2**13  # of a case; its width is not a multiple of a program's


def prove_pointwise(
    kernels: Sequence[Pointwise], demand: KernelDemand, device: torch.device, timed: bool
) -> list[KernelVerdict]:
    heads, kv_heads = demand.own_heads
    every = (heads, kv_heads, kv_heads)
    parts = ((heads,), (kv_heads, kv_heads), every)
    inputs = [_PointwiseInputs.random(demand, each, ROWS, WIDTH, device) for each in parts]
    cases = [Case(each.run, each.define(), BOUNDS[demand.dtype], {}) for each in inputs]
    large = _PointwiseInputs.random(demand, every, TIMED_ROWS, TIMED_WIDTH, device) if timed else None
    return judge(kernels, cases, large and large.run, device)


class _PointwiseInputs(NamedTuple):
    """Inputs of both, with the gradients of their results."""

    x: Tensor  # [tokens, 2I]
    d_out: Tensor  # [tokens, I]
    projected: Tensor  # [tokens, sum(heads) * d], in fp32 or wider, like the angles
    angles: Tensor  # [tokens, 1, d / 2]
    d_parts: Sequence[Tensor]  # each [tokens, heads, d]

    @classmethod
    def random(
        cls, demand: KernelDemand, heads: Sequence[int], rows: int, width: int, device: torch.device
    ) -> "_PointwiseInputs":
        generator, exact = torch.Generator(device).manual_seed(rows), torch.promote_types(demand.dtype, torch.float32)

        def draw(*shape: int, dtype: torch.dtype = demand.dtype) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        head_dim = demand.head_dim
        return cls(
            draw(rows, 2 * width),
            draw(rows, width),
            draw(rows, sum(heads) * head_dim, dtype=exact),
            draw(rows, 1, head_dim // 2, dtype=exact),
            [draw(rows, each, head_dim) for each in heads],
        )

    def run(self, kernel: Pointwise) -> tuple[Tensor, ...]:
        """SwiGLU and its gradient, the rotated parts as one tensor, and their gradient."""
        rotation, heads = Rotation(self.angles.cos(), self.angles.sin()), [part.shape[1] for part in self.d_parts]
        parts = kernel.rotate(self.projected, rotation, heads, self.x.dtype)
        out, d_x = kernel.swiglu(self.x), kernel.swiglu_backward(self.d_out, self.x)
        return out, d_x, torch.cat(parts, 1), kernel.rotate_backward(self.d_parts, rotation)

    def define(self) -> dict[str, Tensor]:
        """What `run` should return, by autograd, in fp64 on the CPU."""
        x, d_out, projected, angles, *d_parts = (each.cpu().double() for each in (*self[:-1], *self.d_parts))
        x, projected = (each.clone().requires_grad_() for each in (x, projected))
        gate, up = x.chunk(2, 1)
        out = gate / (1 + (-gate).exp()) * up
        whole, turning = projected.unflatten(1, (-1, 2 * angles.shape[-1])), d_parts[:-1] or d_parts
        count = sum(part.shape[1] for part in turning)
        turned = torch.complex(*whole[:, :count].chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        parts = torch.cat((torch.cat((turned.real, turned.imag), -1), whole[:, count:]), 1)
        d_x, d_projected = torch.autograd.grad((out, parts), (x, projected), (d_out, torch.cat(d_parts, 1)))
        return {
            "SwiGLU": out.detach(),
            "SwiGLU's gradient": d_x,
            "rotation": parts.detach(),
            "rotation's gradient": d_projected,
        }
