"""One block of the loss from its logits, in torch's operators: cross-entropies, best tokens, acceptance rates, and the
gradient of the logits."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3.attention.shared import add_product

# Larger than every draft id, so that it loses when ranks take the minimum id of the largest logit.
ELSEWHERE = torch.iinfo(torch.int64).max


class Logits(NamedTuple):
    """Logits of one block, on one tensor-parallel rank; whoever takes them may overwrite them."""

    draft: Tensor  # [K, m, v] fp32 or wider
    teacher: Tensor  # [m, v], likewise
    teacher_lse: Tensor  # [m]: log-sum-exp over the target's full vocabulary, in the same dtype


class BlockSoftmaxes(Protocol):
    """The softmaxes of one block: p of the draft, q of the teacher over the draft vocabulary, f of the teacher over its
    full vocabulary."""

    # [K, m] int64: lowest draft id of the largest logit, ELSEWHERE if only other ranks have one as large
    best: Tensor
    cross_entropy: Tensor  # [K, m]: this rank's terms of -sum q log p

    def finish(
        self, counted: Tensor, weights: Sequence[tuple[float, float]] | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Returns this rank's terms of the acceptance rate sum_v min(f, p) [K, m] and, given the weights of
        cross-entropy and acceptance rate of each step, the gradient of the logits [K, m, v] in `dtype`, 0 in rows that
        are not `counted` [K, m]. May be called once."""


def share_peaks(
    top: Tensor, best: Tensor, z_top: Tensor, columns: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Maxima [K + 1, m] over all ranks' columns, the teacher's last, and `best` as draft ids.

    top, best: [K, m], this rank's largest logits and their columns. z_top: [m], of the teacher.
    """
    peaks = torch.cat((top, z_top[None]))
    if group.size() > 1:
        dist.all_reduce(peaks, dist.ReduceOp.MAX, group)
        best = torch.where(top == peaks[:-1], best + group.rank() * columns, ELSEWHERE)
    return peaks, best


class PlainSoftmaxes:
    """BlockSoftmaxes in place of the logits, one step at a time, to save memory."""

    def __init__(self, logits: Logits, group: dist.ProcessGroup) -> None:
        """Ranks share one MAX and one SUM all-reduce."""
        draft, z, self.group = logits.draft, logits.teacher, group
        self.full = torch.exp(z - logits.teacher_lse[:, None])
        peaks, self.best = share_peaks(*draft.max(-1), z.amax(-1), draft.shape[-1], group)
        draft.sub_(peaks[:-1, :, None])
        self.q = z.sub_(peaks[-1, :, None]).exp_()
        products = torch.stack([torch.linalg.vecdot(self.q, step) for step in draft])
        totals = torch.cat((draft.exp_().sum(-1), self.q.sum(-1)[None]))
        if group.size() > 1:
            dist.all_reduce(totals, group=group)
        self.exp, self.total, q_total = draft, totals[:-1], totals[-1]  # p is exp / total
        self.q.div_(q_total[:, None])
        self.cross_entropy = self.total.log() * self.q.sum(-1) - products / q_total

    def finish(
        self, counted: Tensor, weights: Sequence[tuple[float, float]] | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        steps = zip(self.exp, self.total, strict=True)
        overlap = torch.stack([(self.full * total[:, None]).clamp_(max=exp).sum(-1) / total for exp, total in steps])
        if weights is not None:
            self._differentiate(counted, weights)
        return overlap, None if weights is None else self.exp.to(dtype)

    def _differentiate(self, counted: Tensor, weights: Sequence[tuple[float, float]]) -> None:
        """Turns `exp` into the gradient of the draft's logits."""
        overlapping = any(overlap for _, overlap in weights)
        if overlapping:
            steps = zip(self.exp, self.total, strict=True)
            below_sums = torch.stack(
                [torch.where(exp < self.full * total[:, None], exp, 0).sum(-1) / total for exp, total in steps]
            )
            if self.group.size() > 1:
                dist.all_reduce(below_sums, group=self.group)
        for step, (p, (cross_entropy, overlap)) in enumerate(zip(self.exp, weights, strict=True)):
            p.div_(self.total[step, :, None])
            factor = counted[step, :, None].to(p.dtype)
            if overlapping:
                term = p * ((p < self.full).to(p.dtype) - below_sums[step, :, None]) * overlap
            p.sub_(self.q).mul_(factor * cross_entropy)
            if overlapping:
                p.add_(term.mul_(factor))


class LossKernel(NamedTuple):
    """One way to compute the loss's blocks."""

    name: str
    softmaxes: Callable[[Logits, dist.ProcessGroup], BlockSoftmaxes]
    product: Callable[[Tensor, Tensor], Tensor]  # of rows [n, h] and columns [v, h]: [n, v], in fp32 or wider
    # Adds the product of [n, v] and [n, h] to the total [v, h], in fp32 or wider.
    accumulate: Callable[[Tensor, Tensor, Tensor], None]


def _product(rows: Tensor, columns: Tensor) -> Tensor:
    return (rows @ columns.t()).to(torch.promote_types(rows.dtype, torch.float32))


PLAIN = LossKernel("plain", PlainSoftmaxes, _product, add_product)
