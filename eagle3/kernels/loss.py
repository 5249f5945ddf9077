"""Proves kernels for the loss (see proof.py).

The gradient of the acceptance rate sum min(f, p) jumps where p = f. Of about as many elements as the bound says p and f
are so close that rounding changes sides, which is an error of about the bound's root in the L2 norm.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3.kernels.proof import BOUNDS, TIMED_ROWS, Case, KernelDemand, KernelVerdict, drawing, judge
from eagle3.objective.distill import StepWeights, Teacher, distill, loss_row_bytes
from eagle3.objective.softmaxes import LossKernel


def prove_loss(
    kernels: Sequence[LossKernel], demand: KernelDemand, device: torch.device, timed: bool, group: dist.ProcessGroup
) -> list[KernelVerdict]:
    """Verdicts on the kernels for the loss of cross-entropies alone, and for that of acceptance rates. group: of this
    rank alone."""
    # more columns than a kernel's block has, and not a multiple of it
    small = replace(demand, hidden=min(demand.hidden, 64), columns=min(demand.columns, 1537))
    cases = [_case(small, device, group, 37, overlap) for overlap in (False, True)]
    large = _case(demand, device, group, TIMED_ROWS // 8) if timed else None
    return judge(kernels, cases, large, demand, device)


def _case(
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
