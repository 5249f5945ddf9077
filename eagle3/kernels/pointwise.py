"""Proves kernels for SwiGLU and the rotation of heads (see proof.py)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3.draft.pointwise import Pointwise
from eagle3.draft.rope import Rotation
from eagle3.kernels.proof import TIMED_ROWS, Case, KernelDemand, KernelVerdict, drawing, judge

ROWS, WIDTH, TIMED_WIDTH = 37, 1100, 2**13  # of a case; its width is not a multiple of a program's


def prove_pointwise(
    kernels: Sequence[Pointwise], demand: KernelDemand, device: torch.device, timed: bool
) -> list[KernelVerdict]:
    heads, kv_heads = demand.own_heads
    every = (heads, kv_heads, kv_heads)
    cases = [_case(demand, device, each, ROWS, WIDTH) for each in ((heads,), (kv_heads, kv_heads), every)]
    large = _case(demand, device, every, TIMED_ROWS, TIMED_WIDTH) if timed else None
    return judge(kernels, cases, large, demand, device)


def _case(demand: KernelDemand, device: torch.device, heads: Sequence[int], rows: int, width: int) -> Case:
    draw, head_dim = drawing(demand, device, seed=rows), demand.head_dim
    x, d_out = draw(rows, 2 * width), draw(rows, width)
    projected = draw(rows, sum(heads) * head_dim, dtype=demand.exact)
    angles = draw(rows, 1, head_dim // 2, dtype=demand.exact)
    d_parts, rotation = [draw(rows, each, head_dim) for each in heads], Rotation(angles.cos(), angles.sin())

    def run(kernel: Pointwise) -> tuple[Tensor, ...]:
        """SwiGLU and its gradient, the rotated parts as one tensor, and their gradient."""
        parts = kernel.rotate(projected, rotation, heads, demand.dtype)
        out, d_x = kernel.swiglu(x), kernel.swiglu_backward(d_out, x)
        return out, d_x, torch.cat(parts, 1), kernel.rotate_backward(d_parts, rotation)

    def define() -> dict[str, Tensor]:
        leaves = [each.cpu().double().clone().requires_grad_() for each in (x, projected)]
        gate, up = leaves[0].chunk(2, 1)
        out = gate / (1 + (-gate).exp()) * up
        whole, turning = leaves[1].unflatten(1, (-1, head_dim)), sum(heads[:-1] or heads)
        exact = angles.cpu().double()
        turned = torch.complex(*whole[:, :turning].chunk(2, -1)) * torch.polar(torch.ones_like(exact), exact)
        parts = torch.cat((torch.cat((turned.real, turned.imag), -1), whole[:, turning:]), 1)
        upstream = [each.cpu().double() for each in (d_out, torch.cat(d_parts, 1))]
        d_x, d_projected = torch.autograd.grad((out, parts), leaves, upstream)
        return {
            "SwiGLU": out.detach(),
            "SwiGLU's gradient": d_x,
            "rotation": parts.detach(),
            "rotation's gradient": d_projected,
        }

    return Case(run, define)
