"""The loss's kernel for GPUs: matrix products that keep their fp32 sums, and softmaxes in Triton.

The softmaxes read the logits twice (three times if the loss weighs the acceptance rate), where torch's operators pass
over them about thirty times. A Triton kernel's program takes one teacher row and all K steps at once, so that the
teacher's logits are read once for all of them, and goes through the columns in blocks. Its threads meet only after the
last block. Each kernel is an operator of torch.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from eagle3.attention.shared import wide_product
from eagle3.objective.softmaxes import LossKernel, share_peaks
from eagle3.operators import launch, operator

# Columns of one block, how many of them a thread takes together, and warps. Of those that were timed on an H200 these
# are the fastest: kernels reach 75% to 98% of the rate of copies.
COLUMNS, TOGETHER, WARPS = 512, 4, 4
# In place of a column beyond the end, and of the largest logit before the first: below every logit, but finite, so that
# differences are numbers. The exponential of what is beyond the end is 0 even beside the latter.
BEYOND, LOWEST = tl.constexpr(-1e38), tl.constexpr(-1e30)


@triton.jit
def _tile(draft, teacher, steps, rows, columns, row, start, STEPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Logits of all steps [STEPS, COLUMNS] and of the teacher [COLUMNS] in one block of a row."""
    k, at = tl.arange(0, STEPS), start + tl.arange(0, COLUMNS)
    inside = at < columns
    place = (k.to(tl.int64) * rows + row)[:, None] * columns + at[None, :]
    x = tl.load(draft + place, mask=(k < steps)[:, None] & inside[None, :], other=BEYOND)
    z = tl.load(teacher + row.to(tl.int64) * columns + at, mask=inside, other=BEYOND)
    return x, z, at, place


@triton.jit
def _statistics_kernel(
    draft, teacher, tops_out, totals_out, product_out, best_out,
    steps, rows, columns, STEPS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Of each row: the largest logit x and its first column, sum exp(x - top), sum exp(z - z_top) (x - top), and, after
    all steps, the teacher's largest logit z_top and sum exp(z - z_top); in one pass.

    Each thread has statistics of its own columns, which it rescales whenever their maximum rises; they come together at
    the end."""
    row = tl.program_id(0)
    SETS: tl.constexpr = COLUMNS // TOGETHER
    tops, z_top = tl.full((STEPS, SETS), LOWEST, tl.float32), tl.full((SETS,), LOWEST, tl.float32)
    totals, z_total = tl.zeros((STEPS, SETS), tl.float32), tl.zeros((SETS,), tl.float32)
    products, bests = tl.zeros((STEPS, SETS), tl.float32), tl.zeros((STEPS, SETS), tl.int32)
    for start in range(0, columns, COLUMNS):
        x, z, at, _ = _tile(draft, teacher, steps, rows, columns, row, start, STEPS, COLUMNS)
        x, z = tl.reshape(x, (STEPS, SETS, TOGETHER)), tl.reshape(z, (SETS, TOGETHER))
        highest = tl.max(x, 2)
        first = tl.min(tl.where(x == highest[:, :, None], tl.reshape(at, (1, SETS, TOGETHER)), columns), 2)
        bests = tl.where(highest > tops, first, bests)
        higher, z_higher = tl.maximum(tops, highest), tl.maximum(z_top, tl.max(z, 1))
        x, q, z_scale = x - higher[:, :, None], tl.exp(z - z_higher[:, None]), tl.exp(z_top - z_higher)
        products = z_scale[None] * (products + (tops - higher) * z_total[None]) + tl.sum(q[None] * x, 2)
        totals = totals * tl.exp(tops - higher) + tl.sum(tl.exp(x), 2)
        z_total = z_total * z_scale + tl.sum(q, 1)
        tops, z_top = higher, z_higher
    top, z_highest = tl.max(tops, 1), tl.max(z_top, 0)
    rise, z_scale = tops - top[:, None], tl.exp(z_top - z_highest)
    best = tl.min(tl.where(rise == 0.0, bests, columns), 1)
    k = tl.arange(0, STEPS)
    place, real, last = k.to(tl.int64) * rows + row, k < steps, tl.cast(steps, tl.int64) * rows + row
    tl.store(tops_out + place, top, mask=real)
    tl.store(totals_out + place, tl.sum(totals * tl.exp(rise), 1), mask=real)
    tl.store(product_out + place, tl.sum(z_scale[None] * (products + rise * z_total[None]), 1), mask=real)
    tl.store(best_out + place, best.to(tl.int64), mask=real)
    tl.store(tops_out + last, z_highest)
    tl.store(totals_out + last, tl.sum(z_total * z_scale, 0))


@triton.jit
def _normalisers(peaks, totals, teacher_lse, steps, rows, row, STEPS: tl.constexpr):
    """A row's places in [K, m] and which are real; what its logits are shifted by and their exponentials multiplied by,
    of the draft, and of the teacher for q and for f."""
    k = tl.arange(0, STEPS)
    place, real = k.to(tl.int64) * rows + row, k < steps
    last = tl.cast(steps, tl.int64) * rows + row  # a 1 comes as a constant, which has no methods
    peak, scale = tl.load(peaks + place, mask=real, other=0.0), 1 / tl.load(totals + place, mask=real, other=1.0)
    z_peak = tl.load(peaks + last)
    q_scale, f_scale = 1 / tl.load(totals + last), tl.exp(z_peak - tl.load(teacher_lse + row))
    return place, real, peak, scale, z_peak, q_scale, f_scale


@triton.jit
def _together(x, STEPS: tl.constexpr, TOGETHER: tl.constexpr):
    """Sums [STEPS, sets] of columns that a thread keeps together."""
    return tl.sum(tl.reshape(x, (STEPS, x.shape[1] // TOGETHER, TOGETHER)), 2)


@triton.jit
def _overlap_kernel(
    draft, teacher, peaks, totals, teacher_lse, overlap_out, below_out,
    steps, rows, columns, STEPS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Of each row: sum min(f, p), and sum p where p < f."""
    row = tl.program_id(0)
    place, real, peak, scale, z_peak, q_scale, f_scale = _normalisers(
        peaks, totals, teacher_lse, steps, rows, row, STEPS
    )
    overlap, below = (
        tl.zeros((STEPS, COLUMNS // TOGETHER), tl.float32),
        tl.zeros((STEPS, COLUMNS // TOGETHER), tl.float32),
    )
    for start in range(0, columns, COLUMNS):
        x, z, _, _ = _tile(draft, teacher, steps, rows, columns, row, start, STEPS, COLUMNS)
        p, f = tl.exp(x - peak[:, None]) * scale[:, None], (tl.exp(z - z_peak) * f_scale)[None, :]
        overlap += _together(tl.minimum(p, f), STEPS, TOGETHER)
        below += _together(tl.where(p < f, p, 0.0), STEPS, TOGETHER)
    tl.store(overlap_out + place, tl.sum(overlap, 1), mask=real)
    tl.store(below_out + place, tl.sum(below, 1), mask=real)


@triton.jit
def _gradient_kernel(
    draft, teacher, peaks, totals, teacher_lse, factors, below, gradient_out, overlap_out,
    steps, rows, columns, STEPS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """The gradient of each row's logits, a (p - q) + b p ([p < f] - below), and sum min(f, p) once more.

    factors: [2, K, m], a and b of each row; where both are 0, so is the gradient, whatever the logits are. below: None:
    every b is 0.
    """
    row = tl.program_id(0)
    place, real, peak, scale, z_peak, q_scale, f_scale = _normalisers(
        peaks, totals, teacher_lse, steps, rows, row, STEPS
    )
    a = tl.load(factors + place, mask=real, other=0.0)
    counts = a != 0.0
    if below is not None:
        b = tl.load(factors + tl.cast(steps, tl.int64) * rows + place, mask=real, other=0.0)
        threshold = tl.load(below + place, mask=real, other=0.0)
        counts |= b != 0.0
    overlap = tl.zeros((STEPS, COLUMNS // TOGETHER), tl.float32)
    for start in range(0, columns, COLUMNS):
        x, z, at, target = _tile(draft, teacher, steps, rows, columns, row, start, STEPS, COLUMNS)
        p, z = tl.exp(x - peak[:, None]) * scale[:, None], tl.exp(z - z_peak)
        f = (z * f_scale)[None, :]
        overlap += _together(tl.minimum(p, f), STEPS, TOGETHER)
        grad = a[:, None] * (p - (z * q_scale)[None, :])
        if below is not None:
            grad += b[:, None] * p * (tl.where(p < f, 1.0, 0.0) - threshold[:, None])
        grad = tl.where(counts[:, None], grad, 0.0).to(gradient_out.dtype.element_ty)
        tl.store(gradient_out + target, grad, mask=real[:, None] & (at < columns)[None, :])
    tl.store(overlap_out + place, tl.sum(overlap, 1), mask=real)


def _launch(kernel: Callable, draft: Tensor, *arguments: Tensor | None) -> None:
    steps, rows, columns = draft.shape
    sizes = {"STEPS": triton.next_power_of_2(steps), "COLUMNS": COLUMNS, "TOGETHER": TOGETHER}
    launch(kernel, (rows,), draft, *arguments, steps, rows, columns, **sizes, num_warps=WARPS)


@operator
def loss_statistics(draft: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tops and totals [K + 1, m], the teacher's last, product and best [K, m] (see the kernel) of fp32 logits [K, m, v]
    and [m, v]."""
    steps, rows, _ = draft.shape
    tops, totals, product = (draft.new_empty(count, rows) for count in (steps + 1, steps + 1, steps))
    best = draft.new_empty(steps, rows, dtype=torch.int64)
    _launch(_statistics_kernel, draft, teacher, tops, totals, product, best)
    return tops, totals, product, best


@operator
def loss_overlap(
    draft: Tensor, teacher: Tensor, peaks: Tensor, totals: Tensor, teacher_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """sum min(f, p) and sum p where p < f, each [K, m]. peaks, totals: [K + 1, m], the teacher's last."""
    overlap, below = draft.new_empty(draft.shape[:2]), draft.new_empty(draft.shape[:2])
    _launch(_overlap_kernel, draft, teacher, peaks, totals, teacher_lse, overlap, below)
    return overlap, below


@operator
def loss_gradient(
    draft: Tensor,
    teacher: Tensor,
    peaks: Tensor,
    totals: Tensor,
    teacher_lse: Tensor,
    factors: Tensor,
    below: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The gradient of the logits [K, m, v] in `dtype`, and sum min(f, p) [K, m] (`_gradient_kernel`)."""
    gradient, overlap = torch.empty_like(draft, dtype=dtype), draft.new_empty(draft.shape[:2])
    _launch(_gradient_kernel, draft, teacher, peaks, totals, teacher_lse, factors, below, gradient, overlap)
    return gradient, overlap


class FusedSoftmaxes:
    """For fp32 logits on CUDA. Ranks share one MAX and one SUM all-reduce, as in PlainSoftmaxes."""

    def __init__(self, draft: Tensor, teacher: Tensor, teacher_lse: Tensor, group: dist.ProcessGroup) -> None:
        self.draft, self.teacher, self.teacher_lse, self.group = draft, teacher, teacher_lse, group
        self.peaks, self.totals, product, self.best = loss_statistics(draft, teacher)
        part = q_total = self.totals[-1]
        if group.size() > 1:
            tops = self.peaks
            self.peaks, self.best = share_peaks(tops, self.best, draft.shape[-1], group)
            # This rank's sums, relative to the maxima of all ranks.
            rise = tops - self.peaks
            scale = rise.exp()
            product = scale[-1] * (product + rise[:-1] * q_total)
            self.totals = self.totals * scale
            part = self.totals[-1].clone()
            dist.all_reduce(self.totals, group=group)
            q_total = self.totals[-1]
        log_totals = self.totals[:-1].log()
        self.cross_entropy = log_totals * (part / q_total) - product / q_total
        self.logsumexp = log_totals + self.peaks[:-1]

    def finish(self, factors: Tensor | None, overlaps: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        arguments = self.draft, self.teacher, self.peaks, self.totals, self.teacher_lse
        if factors is None:
            return loss_overlap(*arguments)[0], None
        below = loss_overlap(*arguments)[1] if overlaps else None
        if overlaps and self.group.size() > 1:
            dist.all_reduce(below, group=self.group)
        gradient, overlap = loss_gradient(*arguments, factors.contiguous(), below, dtype)
        return overlap, gradient


FUSED = LossKernel("fused", FusedSoftmaxes, lambda rows, columns: wide_product(rows, columns.t()), overwrites=False)
