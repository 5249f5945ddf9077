"""Proves kernels for the blocks of attention, and for own keys (see proof.py)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3.attention.block import Kernel, OwnKernel
from eagle3.attention.plain import BlockOutput, Scoring
from eagle3.kernels.proof import TIMED_ROWS, Case, KernelDemand, KernelVerdict, drawing, judge

OWN_ROWS = 37  # of a case; not a multiple of a program's


def prove_blocks(
    kind: str, kernels: Sequence[Kernel], demand: KernelDemand, device: torch.device, timed: bool
) -> list[KernelVerdict]:
    """Verdicts on the kernels for one kind of block (a field of BlockKernels)."""
    # queries and keys: odd numbers, of which one is less than a kernel's tile
    shapes = {
        "causal": [(1, 1), (37, 37), (203, 203)],
        "windowed": [(67, 67), (61, (demand.window or 0) + 75)],  # some queries see a whole window, others less
        "banded": [(67, 131), (141, 301)],  # never short
    }.get(kind, [(1, 131), (72, 1), (5, 131), (141, 301)])
    cases = [_block(kind, demand, device, *shape) for shape in shapes]
    large = _block(kind, demand, device, TIMED_ROWS, TIMED_ROWS, alone=True) if timed else None
    return judge(kernels, cases, large, demand, device)


def prove_own(
    kernels: Sequence[OwnKernel], demand: KernelDemand, device: torch.device, timed: bool
) -> list[KernelVerdict]:
    """Verdicts on the kernels for the own keys of step 1, and of the last step."""
    last = demand.steps - 1
    cases = [_own(demand, device, OWN_ROWS, step) for step in sorted({1, last})]
    return judge(kernels, cases, _own(demand, device, TIMED_ROWS, last) if timed else None, demand, device)


def _block(kind: str, demand: KernelDemand, device: torch.device, queries: int, keys: int, alone: bool = False) -> Case:
    """A block whose queries, unless it stands alone, also see keys in another block: its output is merged over both.

    As in training, rows are those of longer tensors, keys and values stand in one tensor, and the merged output is in
    fp32 or wider."""
    groups = demand.kv_heads if alone else min(2, demand.kv_heads)  # all heads are alike
    draw = drawing(demand, device, seed=queries + keys)
    q, grad = draw(2, queries + 3, groups * demand.heads // demand.kv_heads, demand.head_dim)[:, 2:-1]
    k, v = draw(2, keys + 3, groups, demand.head_dim)[:, 2:-1]
    visible, windowed = _visible(kind, queries, keys, demand), kind == "windowed"
    scoring = Scoring(
        scale=demand.head_dim**-0.5,
        visibility="banded" if windowed else kind,
        visible=visible.to(device) if kind == "masked" else None,
        window=demand.window if windowed else None,
    )
    expected, merged = {}, None
    if not alone:
        others = draw(2, 29, groups, demand.head_dim)
        expected, merged = _define(*(x.cpu().double() for x in (q, k, v, grad, others)), visible, scoring.scale)
        merged = [each.to(device, demand.exact) for each in merged]

    def run(kernel: Kernel) -> tuple[Tensor, ...]:
        """The block's out and lse, and its shares of the gradients of q, k and v."""
        output = kernel.forward(q, k, v, scoring)
        return *output, *kernel.backward(grad, q, k, v, *(merged or output), scoring)

    return Case(run, lambda: expected)


def _visible(kind: str, queries: int, keys: int, demand: KernelDemand) -> Tensor:
    """[Q, S]: which keys each query sees. A query's own key is as far from the last key as it from the last query."""
    own, key = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    if kind == "full":
        return torch.ones(queries, keys, dtype=torch.bool)
    if kind == "masked":
        return ((own * 7 + key * 3) % 5 < 2) | (key == keys // 2)
    return key <= own if kind != "windowed" else (key <= own) & (key > own - demand.window)


def _define(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, others: Tensor, visible: Tensor, scale: float
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


def _own(demand: KernelDemand, device: torch.device, rows: int, step: int) -> Case:
    """Attention over a prefix, and own keys. The prefix of the first query is empty."""
    (heads, kv_heads), draw = demand.own_heads, drawing(demand, device, seed=rows + step)
    out, q, grad = draw(3, rows, heads, demand.head_dim)
    lse, own = draw(rows, heads, dtype=demand.exact), draw(2 * step, rows, kv_heads, demand.head_dim)
    out[0], lse[0], scale = 0, float("-inf"), demand.head_dim**-0.5

    def run(kernel: OwnKernel) -> tuple[Tensor, ...]:
        """out and lse over all keys, the own keys' share of q's gradient, and the gradient of own keys and values."""
        output = kernel.forward(BlockOutput(out, lse), q, tuple(own), scale)
        dq, *d_own = kernel.backward(grad, output, q, tuple(own), scale)
        return *output, dq, torch.stack(d_own)

    def define() -> dict[str, Tensor]:
        leaves = [x.cpu().double().clone().requires_grad_() for x in (q, own)]
        keys, values = leaves[1].repeat_interleave(heads // kv_heads, 2).chunk(2)
        prefix, prefix_lse, upstream = (x.cpu().double() for x in (out, lse, grad))
        logits = torch.cat((prefix_lse[None], (leaves[0] * keys).sum(-1) * scale))
        whole = (logits.softmax(0)[..., None] * torch.cat((prefix[None], values))).sum(0)
        dq, d_own = torch.autograd.grad(whole, leaves, upstream)
        return {"out": whole.detach(), "lse": logits.logsumexp(0).detach(), "dq": dq, "d_own": d_own}

    return Case(run, define)
