"""Proves kernels for SwiGLU (see proof.py)."""

from collections.abc import Iterator, Sequence

import torch

from eagle3.draft.swiglu import SwiGLU
from eagle3.kernels.proof import BOUNDS, TIMED_ROWS, Comparison, Demand, Verdict, judge

ROWS, WIDTH, TIMED_WIDTH = 37, 1100, 2**13  # of a case; its width is not a multiple of a program's


def prove_swiglu(kernels: Sequence[SwiGLU], demand: Demand, device: torch.device, timed: bool) -> list[Verdict]:
    generator = torch.Generator().manual_seed(ROWS)
    x, grad = (torch.randn(ROWS, width, generator=generator).to(demand.dtype) for width in (2 * WIDTH, WIDTH))
    leaf = x.to(torch.float64, copy=True).requires_grad_()
    gate, up = leaf.chunk(2, 1)
    expected = gate / (1 + (-gate).exp()) * up
    (d_x,) = torch.autograd.grad(expected, leaf, grad.double())

    def compare(kernel: SwiGLU) -> Iterator[Comparison]:
        for name, actual, right in (
            ("out", kernel.forward(x.to(device)), expected.detach()),
            ("dx", kernel.backward(grad.to(device), x.to(device)), d_x),
        ):
            yield Comparison(name, actual, right, BOUNDS[demand.dtype])

    def call(kernel: SwiGLU) -> None:
        kernel.backward(kernel.forward(inputs), inputs)

    inputs = torch.empty(TIMED_ROWS if timed else 0, 2 * TIMED_WIDTH, dtype=demand.dtype, device=device).normal_()
    return [judge(kernel, compare, call if timed else None, device) for kernel in kernels]
