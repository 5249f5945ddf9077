"""Rows to distil, shared by the tests of one process and of tensor-parallel groups."""

from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.objective.distill import StepWeights, Teacher

STEPS, HIDDEN, WIDE = 3, 8, 6
# weights of the cross-entropy and of the overlap, for each step
WEIGHTS = {
    "cross-entropy": StepWeights(*torch.tensor([[1.0, 0.8, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)),
    "overlap": StepWeights(*torch.tensor([[0.0, 0.0, 0.0], [-0.3, 0.0, -2.0]], dtype=torch.float64)),
    "both": StepWeights(*torch.tensor([[0.5, 2.0, 1.0], [-1.0, 0.1, -0.7]], dtype=torch.float64)),
}


class Rows(NamedTuple):
    """The first arguments of `distill`."""

    outputs: Tensor
    head: Tensor
    teacher: Teacher
    query_of: Tensor


def random_rows(
    teacher_rows: int, queries: int, draft_vocabulary: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Rows:
    """Random teacher, heads and outputs, some of which agree with the teacher; a query serves other rows at other
    steps."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    outputs, head = normal(STEPS, queries, HIDDEN), normal(draft_vocabulary, HIDDEN)
    head = 2 * head / head.norm(dim=-1, keepdim=True)  # so that an output equal to a row prefers its token
    target_head, last = normal(2 * draft_vocabulary, WIDE, scale=0.6), normal(teacher_rows, WIDE)
    z = last @ target_head.T
    best = z.argmax(-1)  # the draft vocabulary is the first half of the target's
    query_of = torch.stack(
        [torch.randperm(max(queries, teacher_rows), generator=generator)[:teacher_rows] for _ in range(STEPS)]
    )
    query_of[query_of >= queries] = -1
    query_of[torch.rand(STEPS, teacher_rows, generator=generator) >= 0.9] = -1
    for step in range(STEPS):
        agreeing = (query_of[step] >= 0) & (best < draft_vocabulary) & (torch.arange(teacher_rows) % 2 == 0)
        outputs[step, query_of[step, agreeing]] = 2 * head[best[agreeing]]
    teacher = Teacher(
        last=last,
        head=target_head[:draft_vocabulary],
        best=torch.where(best < draft_vocabulary, best, -1),
        logsumexp=z.logsumexp(-1),
        written=torch.where(best < draft_vocabulary, best, -1).roll(1),
    )
    return Rows(outputs.requires_grad_(), head.requires_grad_(), teacher, query_of)
