"""The cases on which kernels are proven (see proof.py): of the blocks of attention and of own keys, of SwiGLU and the
rotation of heads, and of the loss.

The gradient of the loss's acceptance rate sum min(f, p) jumps where p = f. Of about as many elements as the bound says
p and f are so close that rounding changes sides, which is an error of about the bound's root in the L2 norm.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3.attention.block import Kernel, OwnKernel
from eagle3.attention.plain import BlockOutput, Scoring
from eagle3.draft.pointwise import Pointwise
from eagle3.draft.rope import Rotation
from eagle3.kernels.proof import BOUNDS, TIMED_ROWS, Case, KernelDemand, KernelVerdict, drawing, judge
from eagle3.objective.distill import StepWeights, Teacher, distill, loss_row_bytes
from eagle3.objective.softmaxes import LossKernel

ROWS, WIDTH, TIMED_WIDTH = 37, 1100, 2**13  # of a case; they are no multiples of a program's


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
    cases = [_own(demand, device, ROWS, step) for step in sorted({1, last})]
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


def prove_pointwise(
    kernels: Sequence[Pointwise], demand: KernelDemand, device: torch.device, timed: bool
) -> list[KernelVerdict]:
    heads, kv_heads = demand.own_heads
    every = (heads, kv_heads, kv_heads)
    cases = [_pointwise_case(demand, device, each, ROWS, WIDTH) for each in ((heads,), (kv_heads, kv_heads), every)]
    large = _pointwise_case(demand, device, every, TIMED_ROWS, TIMED_WIDTH) if timed else None
    return judge(kernels, cases, large, demand, device)


def _pointwise_case(demand: KernelDemand, device: torch.device, heads: Sequence[int], rows: int, width: int) -> Case:
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


def prove_loss(
    kernels: Sequence[LossKernel], demand: KernelDemand, device: torch.device, timed: bool, group: dist.ProcessGroup
) -> list[KernelVerdict]:
    """Verdicts on the kernels for the loss of cross-entropies alone, and for that of acceptance rates. group: of this
    rank alone."""
    # more columns than a kernel's block has, and not a multiple of it
    small = replace(demand, hidden=min(demand.hidden, 64), columns=min(demand.columns, 1537))
    cases = [_loss_case(small, device, group, 37, overlap) for overlap in (False, True)]
    large = _loss_case(demand, device, group, TIMED_ROWS // 8) if timed else None
    return judge(kernels, cases, large, demand, device)


def _loss_case(
    demand: KernelDemand, device: torch.device, group: dist.ProcessGroup, rows: int, overlap: bool = False
) -> Case:
    """`distill`, with the gradients of each step's sum of cross-entropies or, with `overlap`, of acceptance rates.
    Every teacher row but each fifth has a query of its own. The best token of each seventh row is outside the draft
    vocabulary."""
    draw, steps, hidden = drawing(demand, device, seed=rows), demand.steps, demand.hidden
    outputs, last = draw(steps, rows, hidden), draw(rows, hidden)
    # for logits of about 1: a kernel's relative error in a probability is its error in the logit
    head, teacher_head = draw(2, demand.columns, hidden) / hidden**0.5
    row = torch.arange(rows, device=device)
    query_of = torch.where((row + torch.arange(steps, device=device)[:, None]) % 5 == 0, -1, row)
    best = torch.where(row % 7 == 3, -1, row * 31 % demand.columns)
    # as if the target's full vocabulary had a tenth more probability than the draft's
    lse = (last @ teacher_head.t()).to(demand.exact).logsumexp(-1) + 0.1
    weights, nothing = 1 + torch.arange(steps).double() / 10, torch.zeros(steps, dtype=torch.float64)
    name = "acceptance rate" if overlap else "cross-entropy"
    bound = BOUNDS[demand.dtype] ** (0.5 if overlap else 1)
    bounds = {f"{name}'s gradient of {of}": bound for of in ("outputs", "lm_head")}

    def run(kernel: LossKernel) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (outputs, head)]
        # several blocks, the last one shorter
        size = (rows * 3 // 7) * loss_row_bytes(steps, *head.shape, head.dtype, kernel.overwrites)
        distilled = distill(
            *leaves,
            Teacher(last, teacher_head, best, lse),
            query_of,
            StepWeights(nothing, weights) if overlap else StepWeights(weights, nothing),
            group,
            block_bytes=size,
            kernel=kernel,
        )
        gradients = torch.autograd.grad(distilled.surrogate, leaves)
        return distilled.sums.overlap if overlap else distilled.sums.cross_entropy, *gradients

    def define() -> dict[str, Tensor]:
        """By autograd with dense softmaxes."""
        leaves = [x.cpu().double().clone().requires_grad_() for x in (outputs, head)]
        taught, taught_head, taught_lse, token, queries = (x.cpu() for x in (last, teacher_head, lse, best, query_of))
        z = taught.double() @ taught_head.double().t()
        logits = leaves[0][torch.arange(steps)[:, None], queries.clamp(min=0)] @ leaves[1].t()
        if overlap:
            terms = torch.minimum((z - taught_lse.double()[:, None]).exp(), logits.softmax(-1)).sum(-1)
        else:
            terms = -(z.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        sums = torch.where((queries >= 0) & (token >= 0), terms, 0).sum(1)
        gradients = torch.autograd.grad((sums * weights).sum(), leaves)
        return {name: sums.detach(), **dict(zip(bounds, gradients, strict=True))}

    return Case(run, define, bounds)
