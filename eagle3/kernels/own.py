"""Proves kernels for own keys (see proof.py)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.attention.block import OwnKernel
from eagle3.attention.plain import BlockOutput
from eagle3.kernels.proof import BOUNDS, LSE_BOUND, TIMED_ROWS, Case, KernelDemand, KernelVerdict, judge

ROWS = 37  # of a case; not a multiple of a program's


def prove_own(
    kernels: Sequence[OwnKernel], demand: KernelDemand, device: torch.device, timed: bool
) -> list[KernelVerdict]:
    """Verdicts on the kernels for the own keys of step 1, and of the last step."""
    bound, last = BOUNDS[demand.dtype], demand.steps - 1
    inputs = [_OwnInputs.random(ROWS, step, demand) for step in sorted({1, last})]
    cases = [
        Case(each.to(device, demand.dtype).run, each.define(), bound, {"lse": min(LSE_BOUND, bound)}) for each in inputs
    ]
    large = _OwnInputs.random(TIMED_ROWS, last, demand).to(device, demand.dtype) if timed else None
    return judge(kernels, cases, large and large.run, device)


class _OwnInputs(NamedTuple):
    """Attention over a prefix, and own keys. The prefix of the first query is empty."""

    out: Tensor  # [Q, heads, d]
    lse: Tensor  # [Q, heads]
    q: Tensor  # [Q, heads, d]
    grad: Tensor  # [Q, heads, d]
    own: Tensor  # [2k, Q, kv_heads, d]

    @classmethod
    def random(cls, rows: int, step: int, demand: KernelDemand) -> "_OwnInputs":
        """In fp64 on the CPU, rounded to the job's format."""
        generator = torch.Generator().manual_seed(rows + step)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(demand.dtype).double()

        heads, kv_heads = demand.own_heads
        wide = rows, heads, demand.head_dim
        out, q, grad = (draw(*wide) for _ in range(3))
        lse, own = draw(*wide[:2]), draw(2 * step, rows, kv_heads, demand.head_dim)
        out[0], lse[0] = 0, float("-inf")
        return cls(out, lse, q, grad, own)

    def to(self, device: torch.device, dtype: torch.dtype) -> "_OwnInputs":
        out, q, grad, own = (x.to(device, dtype) for x in (self.out, self.q, self.grad, self.own))
        return _OwnInputs(out, self.lse.to(device, torch.promote_types(dtype, torch.float32)), q, grad, own)

    def run(self, kernel: OwnKernel) -> tuple[Tensor, ...]:
        """out and lse over all keys, the own keys' share of q's gradient, and the gradient of own keys and values."""
        scale, own = self.q.shape[-1] ** -0.5, tuple(self.own)
        output = kernel.forward(BlockOutput(self.out, self.lse), self.q, own, scale)
        dq, *d_own = kernel.backward(self.grad, output, self.q, own, scale)
        return *output, dq, torch.stack(d_own)

    def define(self) -> dict[str, Tensor]:
        """What `run` should return, by autograd."""
        q, own = (x.clone().requires_grad_() for x in (self.q, self.own))
        group = q.shape[1] // own.shape[2]
        keys, values = own.repeat_interleave(group, 2).chunk(2)
        logits = torch.cat((self.lse[None], (q * keys).sum(-1) * q.shape[-1] ** -0.5))
        out = (logits.softmax(0)[..., None] * torch.cat((self.out[None], values))).sum(0)
        dq, d_own = torch.autograd.grad(out, (q, own), self.grad)
        return {"out": out.detach(), "lse": logits.logsumexp(0).detach(), "dq": dq, "d_own": d_own}
