"""Proves kernels for the loss (see proof.py).

The gradient of the acceptance rate sum min(f, p) jumps where p = f. Of about as many elements as the bound says p and f
are so close that rounding changes sides, which is an error of about the bound's root in the L2 norm.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3.kernels.proof import BOUNDS, TIMED_ROWS, Case, KernelDemand, KernelVerdict, judge
from eagle3.objective.distill import LossBlocks, StepWeights, Teacher, distill, loss_row_bytes
from eagle3.objective.softmaxes import LossKernel


def prove_loss(
    kernels: Sequence[LossKernel], demand: KernelDemand, device: torch.device, timed: bool, group: dist.ProcessGroup
) -> list[KernelVerdict]:
    """Verdicts on the kernels for the loss of cross-entropies alone, and for that of acceptance rates. group: of this
    rank alone."""
    # more columns than a kernel's block has, and not a multiple of it
    exact, bound = _LossInputs.exact(rows=37, columns=min(demand.columns, 1537), demand=demand), BOUNDS[demand.dtype]
    inputs, jumps = exact.to(device, demand.dtype), {f"acceptance rate's {of}": bound**0.5 for of in GRADIENTS}
    cases = [
        Case(partial(inputs.run, group=group, overlap=overlap), exact.define(overlap), bound, jumps)
        for overlap in (False, True)
    ]
    timed_run = partial(_LossInputs.random(demand, device).run, group=group) if timed else None
    return judge(kernels, cases, timed_run, device)


GRADIENTS = ("gradient of outputs", "gradient of lm_head")


class _LossInputs(NamedTuple):
    """Arguments of `distill`."""

    outputs: Tensor  # [K, Q, H]
    head: Tensor  # [Vd, H]
    last: Tensor  # [M, H]
    teacher_head: Tensor  # [Vd, H]
    best: Tensor  # [M]
    lse: Tensor  # [M]
    query_of: Tensor  # [K, M]

    @classmethod
    def random(cls, demand: KernelDemand, device: torch.device) -> "_LossInputs":
        """For timing: the draft's whole shape, an eighth of TIMED_ROWS."""
        rows, hidden = TIMED_ROWS // 8, demand.hidden
        numbers = {"dtype": demand.dtype, "device": device}
        outputs, last = torch.randn(demand.steps, rows, hidden, **numbers), torch.randn(rows, hidden, **numbers)
        head, teacher_head = torch.randn(2, demand.columns, hidden, **numbers).div_(hidden**0.5)
        best = torch.zeros(rows, dtype=torch.int64, device=device)
        lse = torch.full((rows,), math.log(demand.columns) + 1, device=device)
        return cls(
            outputs, head, last, teacher_head, best, lse, torch.arange(rows, device=device).repeat(demand.steps, 1)
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> "_LossInputs":
        outputs, head, last, teacher_head = (x.to(device, dtype) for x in self[:4])
        lse = self.lse.to(device, torch.promote_types(dtype, torch.float32))
        return _LossInputs(outputs, head, last, teacher_head, self.best.to(device), lse, self.query_of.to(device))

    def run(self, kernel: LossKernel, group: dist.ProcessGroup, overlap: bool = False) -> tuple[Tensor, ...]:
        """Each step's sum of cross-entropies (with `overlap`, of acceptance rates), and its gradients of outputs and
        lm_head."""
        outputs, head = (x.detach().requires_grad_() for x in (self.outputs, self.head))
        teacher = Teacher(self.last, self.teacher_head, self.best, self.lse)
        weights, nothing = self.weights, torch.zeros_like(self.weights)
        # several blocks, the last one shorter
        size = (len(self.best) * 3 // 7) * loss_row_bytes(len(outputs), *head.shape, head.dtype, kernel.overwrites)
        distilled = distill(
            outputs,
            head,
            teacher,
            self.query_of,
            StepWeights(nothing, weights) if overlap else StepWeights(weights, nothing),
            group,
            blocks=LossBlocks(size, kernel),
        )
        gradients = torch.autograd.grad(distilled.surrogate, (outputs, head))
        return distilled.sums.overlap if overlap else distilled.sums.cross_entropy, *gradients

    @property
    def weights(self) -> Tensor:
        """[K] fp64, on the CPU."""
        return 1 + torch.arange(len(self.outputs)).double() / 10

    @classmethod
    def exact(cls, rows: int, columns: int, demand: KernelDemand) -> "_LossInputs":
        """In fp64 on the CPU, rounded to the job's format. Every teacher row but each fifth has a query of its own. The
        best token of each seventh row is outside the draft vocabulary."""
        generator = torch.Generator().manual_seed(rows)
        steps, hidden = demand.steps, min(demand.hidden, 64)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(demand.dtype).double()

        row = torch.arange(rows)
        query_of = torch.where((row + torch.arange(steps)[:, None]) % 5 == 0, -1, row)
        best = torch.where(row % 7 == 3, -1, torch.randint(columns, (rows,), generator=generator))
        # short rows, for logits of about 1: a kernel's relative error in a probability is its error in the logit
        head, teacher_head = ((draw(columns, hidden) / 8).to(demand.dtype).double() for _ in range(2))
        last = draw(rows, hidden)
        # as if the target's full vocabulary had a tenth more probability than the draft's
        lse = (last @ teacher_head.t()).logsumexp(-1) + 0.1
        return cls(draw(steps, rows, hidden), head, last, teacher_head, best, lse, query_of)

    def define(self, overlap: bool) -> dict[str, Tensor]:
        """What `run` should return, by autograd with dense softmaxes."""
        outputs, head = (x.clone().requires_grad_() for x in (self.outputs, self.head))
        z = self.last @ self.teacher_head.t()
        counted = (self.query_of >= 0) & (self.best >= 0)
        logits = outputs[torch.arange(len(outputs))[:, None], self.query_of.clamp(min=0)] @ head.t()
        if overlap:
            name, rows = "acceptance rate", torch.minimum((z - self.lse[:, None]).exp(), logits.softmax(-1)).sum(-1)
        else:
            name, rows = "cross-entropy", -(z.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        sums = torch.where(counted, rows, 0).sum(1)
        gradients = torch.autograd.grad((sums * self.weights).sum(), (outputs, head))
        names = (f"{name}'s {of}" for of in GRADIENTS)
        return {name: sums.detach(), **dict(zip(names, gradients, strict=True))}
