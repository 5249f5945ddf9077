"""Proves kernels for the blocks of attention (see proof.py)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.attention.block import Kernel
from eagle3.attention.plain import Scoring
from eagle3.kernels.proof import BOUNDS, LSE_BOUND, TIMED_ROWS, Case, KernelDemand, KernelVerdict, judge


def prove_blocks(
    kind: str, kernels: Sequence[Kernel], demand: KernelDemand, device: torch.device, timed: bool
) -> list[KernelVerdict]:
    """Verdicts on the kernels for one kind of block (a field of BlockKernels)."""
    cases = [_case(queries, keys, kind, demand, device) for queries, keys in _shapes(kind, demand)]
    return judge(kernels, cases, _BlockInputs.random(kind, demand, device).run if timed else None, device)


def _shapes(kind: str, demand: KernelDemand) -> list[tuple[int, int]]:
    """Queries and keys of the cases: odd numbers, of which one is less than a kernel's tile."""
    shapes = {
        "causal": [(1, 1), (37, 37), (203, 203)],
        "windowed": [(67, 67), (61, (demand.window or 0) + 75)],  # some queries see a whole window, others less
        "banded": [(67, 131), (141, 301)],  # never short
    }
    return shapes.get(kind, [(1, 131), (72, 1), (5, 131), (141, 301)])


def _visible(kind: str, queries: int, keys: int, demand: KernelDemand) -> Tensor:
    """[Q, S]: which keys each query sees. A query's own key is as far from the last key as it from the last query."""
    own, key = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    if kind == "full":
        return torch.ones(queries, keys, dtype=torch.bool)
    if kind == "masked":
        return ((own * 7 + key * 3) % 5 < 2) | (key == keys // 2)
    return key <= own if kind != "windowed" else (key <= own) & (key > own - demand.window)


class _BlockInputs(NamedTuple):
    """A block, and the output that its backward pass gets."""

    q: Tensor  # [Q, heads, d]
    k: Tensor  # [S, kv_heads, d]
    v: Tensor  # [S, kv_heads, d]
    grad: Tensor  # [Q, heads, d]
    out: Tensor  # [Q, heads, d], merged over several blocks; likewise:
    lse: Tensor  # [Q, heads]
    scoring: Scoring

    @classmethod
    def random(cls, kind: str, demand: KernelDemand, device: torch.device) -> "_BlockInputs":
        """For timing: this rank's heads, TIMED_ROWS queries and keys."""
        wide, narrow = ((TIMED_ROWS, heads, demand.head_dim) for heads in (demand.heads, demand.kv_heads))
        q, grad, out = (torch.randn(wide, dtype=demand.dtype, device=device) for _ in range(3))
        k, v = torch.randn(2, *narrow, dtype=demand.dtype, device=device)
        lse = torch.full(wide[:2], 9.0, dtype=torch.promote_types(demand.dtype, torch.float32), device=device)
        scoring = _scoring(kind, _visible(kind, TIMED_ROWS, TIMED_ROWS, demand).to(device), demand)
        return cls(q, k, v, grad, out, lse, scoring)

    def to(self, device: torch.device, dtype: torch.dtype) -> "_BlockInputs":
        """On a device. As in training, rows are those of longer tensors, keys and values stand in one tensor, and the
        merged output is in fp32 or wider."""
        exact = torch.promote_types(dtype, torch.float32)
        q, grad = (_inside(x.to(device, dtype)) for x in (self.q, self.grad))
        k, v = torch.stack([_inside(x.to(device, dtype)) for x in (self.k, self.v)])
        out, lse, visible = self.out.to(device, exact), self.lse.to(device, exact), self.scoring.visible
        scoring = self.scoring._replace(visible=None if visible is None else visible.to(device))
        return _BlockInputs(q, k, v, grad, out, lse, scoring)

    def run(self, kernel: Kernel) -> tuple[Tensor, ...]:
        """The block's out and lse, and its shares of the gradients of q, k and v."""
        output = kernel.forward(self.q, self.k, self.v, self.scoring)
        return *output, *kernel.backward(self.grad, self.q, self.k, self.v, self.out, self.lse, self.scoring)


def _inside(x: Tensor) -> Tensor:
    """The same rows inside a longer tensor."""
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 2, 1))[2:-1]


def _scoring(kind: str, visible: Tensor, demand: KernelDemand) -> Scoring:
    windowed = kind == "windowed"
    return Scoring(
        scale=demand.head_dim**-0.5,
        visibility="banded" if windowed else kind,
        visible=visible if kind == "masked" else None,
        window=demand.window if windowed else None,
    )


def _case(queries: int, keys: int, kind: str, demand: KernelDemand, device: torch.device) -> Case:
    """A block whose queries also see keys in another block: its output is merged over both."""
    generator = torch.Generator().manual_seed(queries + keys)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(demand.dtype).double()

    groups = min(2, demand.kv_heads)  # all heads are alike
    wide, narrow = (groups * demand.heads // demand.kv_heads, demand.head_dim), (groups, demand.head_dim)
    q, grad = draw(queries, *wide), draw(queries, *wide)
    k, v = draw(keys, *narrow), draw(keys, *narrow)
    visible = _visible(kind, queries, keys, demand)
    others = draw(29, *narrow), draw(29, *narrow)
    expected, merged = _define(q, k, v, grad, visible, others, demand.head_dim**-0.5)
    inputs = _BlockInputs(q, k, v, grad, *merged, _scoring(kind, visible, demand)).to(device, demand.dtype)
    bound = BOUNDS[demand.dtype]
    return Case(inputs.run, expected, bound, {"lse": min(LSE_BOUND, bound)})


def _define(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, visible: Tensor, others: tuple[Tensor, Tensor], scale: float
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """One softmax over the block's keys and the others, by autograd in fp64. The block has its own copy of q, so that
    its share of q's gradient is known by itself."""
    group = q.shape[1] // k.shape[1]
    own, k, v = (x.clone().requires_grad_() for x in (q, k, v))

    def scores(q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("qhd,shd->qhs", q, k.repeat_interleave(group, 1)) * scale

    inside = scores(own, k).masked_fill(~visible[:, None], float("-inf"))
    values = torch.cat((v, others[1])).repeat_interleave(group, 1)
    both = torch.cat((inside, scores(q, others[0])), -1)
    merged = torch.einsum("qhs,shd->qhd", both.softmax(-1), values)
    dq, dk, dv = torch.autograd.grad(merged, (own, k, v), grad)
    block = torch.einsum("qhs,shd->qhd", inside.softmax(-1), v.repeat_interleave(group, 1))
    expected = {"out": block.detach(), "lse": inside.logsumexp(-1).detach(), "dq": dq, "dk": dk, "dv": dv}
    return expected, (merged.detach(), both.logsumexp(-1).detach())
