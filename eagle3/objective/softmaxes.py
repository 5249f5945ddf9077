"""One block of the loss from its logits, in torch's operators: cross-entropies, best tokens, acceptance rates, and the
gradient of the logits."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Larger than every draft id, so that it loses when ranks take the minimum id of the largest logit.
ELSEWHERE = torch.iinfo(torch.int64).max


def share_peaks(tops: Tensor, best: Tensor, columns: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Maxima over all ranks' columns, and `best` as draft ids.

    tops: [K + 1, m], this rank's largest logits, the teacher's last. best: [K, m], the columns of the draft's.
    """
    peaks = tops.clone()
    dist.all_reduce(peaks, dist.ReduceOp.MAX, group)
    return peaks, torch.where(tops[:-1] == peaks[:-1], best + group.rank() * columns, ELSEWHERE)


class PlainSoftmaxes:
    """In place of the logits, one step at a time, to save memory. Ranks share one MAX and one SUM all-reduce."""

    def __init__(self, draft: Tensor, teacher: Tensor, teacher_lse: Tensor, group: dist.ProcessGroup) -> None:
        self.full, self.group = torch.exp(teacher - teacher_lse[:, None]), group
        top, self.best = draft.max(-1)
        peaks = torch.cat((top, teacher.amax(-1)[None]))
        if group.size() > 1:
            peaks, self.best = share_peaks(peaks, self.best, draft.shape[-1], group)
        draft.sub_(peaks[:-1, :, None])
        self.q = teacher.sub_(peaks[-1, :, None]).exp_()
        products = torch.stack([torch.linalg.vecdot(self.q, step) for step in draft])
        totals = torch.cat((draft.exp_().sum(-1), self.q.sum(-1)[None]))
        if group.size() > 1:
            dist.all_reduce(totals, group=group)
        self.exp, self.total, q_total = draft, totals[:-1], totals[-1]  # p is exp / total
        self.q.div_(q_total[:, None])
        self.cross_entropy = self.total.log() * self.q.sum(-1) - products / q_total
        self.logsumexp = self.total.log() + peaks[:-1]

    def finish(self, factors: Tensor | None, overlaps: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        steps = zip(self.exp, self.total, strict=True)
        overlap = torch.stack([(self.full * total[:, None]).clamp_(max=exp).sum(-1) / total for exp, total in steps])
        if factors is None:
            return overlap, None
        if overlaps:
            steps = zip(self.exp, self.total, strict=True)
            below_sums = torch.stack(
                [torch.where(exp < self.full * total[:, None], exp, 0).sum(-1) / total for exp, total in steps]
            )
            if self.group.size() > 1:
                dist.all_reduce(below_sums, group=self.group)
        for step, p in enumerate(self.exp):
            p.div_(self.total[step, :, None])
            of_cross_entropy, of_overlap = factors[:, step, :, None]
            if overlaps:
                term = p * ((p < self.full).to(p.dtype) - below_sums[step, :, None])
            p.sub_(self.q).mul_(of_cross_entropy)
            if overlaps:
                p.add_(term.mul_(of_overlap))
        return overlap, self.exp.to(dtype)  # now the gradient


class LossKernel(NamedTuple):
    """One way to compute the loss's blocks.

    softmaxes(draft, teacher, teacher_lse, group): those of one block: p of the draft, q of the teacher over the draft
        vocabulary, f of the teacher over its full vocabulary. draft [K, m, v] and teacher [m, v] are logits in fp32 or
        wider, on one tensor-parallel rank, and may be overwritten; teacher_lse [m] is the log-sum-exp over the target's
        full vocabulary. Has
        best: [K, m] int64, the lowest draft id of the largest logit, ELSEWHERE if only other ranks have one as large
        cross_entropy: [K, m], this rank's terms of -sum q log p
        logsumexp: [K, m], of the draft's logits, over all ranks' columns
        finish(factors, overlaps, dtype): this rank's terms of the acceptance rate sum_v min(f, p) [K, m] and the
            gradient of the logits [K, m, v] in `dtype`; to be called once. factors: [2, K, m], what each row's
            cross-entropy and acceptance rate are multiplied by; None: without gradient. Where both are 0, a row does
            not count. overlaps: whether any of the latter is not 0.
    product(rows [n, h], columns [v, h]): [n, v], in fp32 or wider.
    """

    name: str
    softmaxes: Callable[[Tensor, Tensor, Tensor, dist.ProcessGroup], Any]
    product: Callable[[Tensor, Tensor], Tensor]
    overwrites: bool  # whether the gradient of the logits takes their place; see `loss_row_bytes`


PLAIN = LossKernel(
    "plain",
    PlainSoftmaxes,
    lambda rows, columns: (rows @ columns.t()).to(torch.promote_types(rows.dtype, torch.float32)),
    overwrites=True,
)
