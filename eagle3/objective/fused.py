"""The loss's kernel for GPUs: matrix products that keep their fp32 sums, and softmaxes in Triton.

The softmaxes read the logits twice (three times if the loss weighs the acceptance rate), where torch's operators pass
over them about thirty times. A Triton kernel's program takes one teacher row and all K steps at once, so that the
teacher's logits are read once for all of them, and goes through the columns in blocks. Each kernel is an operator of
torch, with a fake implementation for tracing and a declared cost.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from eagle3.attention.shared import add_product, wide_product
from eagle3.objective.softmaxes import Logits, LossKernel, share_peaks
from eagle3.transfer import send

# Columns of one block: 8 steps of 512 in fp32 take 32 registers of each of 128 threads. On an H100 that leaves room for
# three programs or more on a multiprocessor, so that some load while others compute. Not timed on a GPU.
COLUMNS, WARPS = 512, 4


class Traffic(NamedTuple):
    """What one call of an operator costs on a GPU."""

    launches: int
    flops: float
    read: int  # bytes of device memory
    written: int


@triton.jit
def _tile(draft, teacher, steps, rows, columns, row, start, STEPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Logits of all steps [STEPS, COLUMNS] and of the teacher [COLUMNS] in one block of a row; -inf beyond the end."""
    k, at = tl.arange(0, STEPS), start + tl.arange(0, COLUMNS)
    inside = at < columns
    place = (k[:, None].to(tl.int64) * rows + row) * columns + at[None, :]
    x = tl.load(draft + place, mask=(k < steps)[:, None] & inside[None, :], other=-float("inf"))
    z = tl.load(teacher + row.to(tl.int64) * columns + at, mask=inside, other=-float("inf"))
    return x, z, at, place


@triton.jit
def _statistics_kernel(
    draft, teacher, top_out, best_out, total_out, product_out, z_top_out, z_total_out,
    steps, rows, columns, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of each row: the largest logit x and its first column, sum exp(x - top), sum exp(z - z_top) (x - top), and the
    teacher's largest logit z_top and sum exp(z - z_top); in one pass, rescaled whenever a maximum rises."""
    row = tl.program_id(0)
    k = tl.arange(0, STEPS)
    top, total = tl.full((STEPS,), -float("inf"), tl.float32), tl.zeros((STEPS,), tl.float32)
    product, best = tl.zeros((STEPS,), tl.float32), tl.zeros((STEPS,), tl.int64)
    z_top, z_total = -float("inf"), 0.0
    for start in range(0, columns, COLUMNS):
        x, z, at, _ = _tile(draft, teacher, steps, rows, columns, row, start, STEPS, COLUMNS)
        x = tl.where((k < steps)[:, None], x, 0.0)
        block_top = tl.max(x, 1)
        block_best = tl.min(tl.where(x == block_top[:, None], at[None, :], columns), 1)
        best = tl.where(block_top > top, block_best.to(tl.int64), best)
        higher, z_higher = tl.maximum(top, block_top), tl.maximum(z_top, tl.max(z, 0))
        inside = at < columns
        shifted = tl.where(inside[None, :], x - higher[:, None], 0.0)
        q = tl.where(inside, tl.exp(z - z_higher), 0.0)
        z_scale = tl.exp(z_top - z_higher)
        rise = tl.where(top == -float("inf"), 0.0, top - higher)
        product = z_scale * (product + rise * z_total) + tl.sum(q[None, :] * shifted, 1)
        total = total * tl.exp(top - higher) + tl.sum(tl.where(inside[None, :], tl.exp(shifted), 0.0), 1)
        z_total = z_total * z_scale + tl.sum(q, 0)
        top, z_top = higher, z_higher
    place, real = k.to(tl.int64) * rows + row, k < steps
    tl.store(top_out + place, top, mask=real)
    tl.store(best_out + place, best, mask=real)
    tl.store(total_out + place, total, mask=real)
    tl.store(product_out + place, product, mask=real)
    tl.store(z_top_out + row, z_top)
    tl.store(z_total_out + row, z_total)


@triton.jit
def _normalisers(peaks, totals, teacher_lse, steps, rows, row, STEPS: tl.constexpr):
    """A row's places in [K, m] and which are real; maxima and sums of its draft logits and the teacher's, and z_lse."""
    k = tl.arange(0, STEPS)
    place, real = k.to(tl.int64) * rows + row, k < steps
    last = tl.cast(steps, tl.int64) * rows + row  # a 1 comes as a constant, which has no methods
    peak, total = tl.load(peaks + place, mask=real, other=0.0), tl.load(totals + place, mask=real, other=1.0)
    return place, real, peak, total, tl.load(peaks + last), tl.load(totals + last), tl.load(teacher_lse + row)


@triton.jit
def _shares(x, z, peak, total, z_peak, z_total, z_lse):
    """p, q and f of one block."""
    p = tl.exp(x - peak[:, None]) / total[:, None]
    return p, tl.exp(z - z_peak) / z_total, tl.exp(z - z_lse)


@triton.jit
def _overlap_kernel(
    draft, teacher, peaks, totals, teacher_lse, overlap_out, below_out,
    steps, rows, columns, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of each row: sum min(f, p), and sum p where p < f."""
    row = tl.program_id(0)
    place, real, peak, total, z_peak, z_total, z_lse = _normalisers(peaks, totals, teacher_lse, steps, rows, row, STEPS)
    overlap, below = tl.zeros((STEPS,), tl.float32), tl.zeros((STEPS,), tl.float32)
    for start in range(0, columns, COLUMNS):
        x, z, _, _ = _tile(draft, teacher, steps, rows, columns, row, start, STEPS, COLUMNS)
        p, _, f = _shares(x, z, peak, total, z_peak, z_total, z_lse)
        overlap += tl.sum(tl.minimum(p, f[None, :]), 1)
        below += tl.sum(tl.where(p < f[None, :], p, 0.0), 1)
    tl.store(overlap_out + place, overlap, mask=real)
    tl.store(below_out + place, below, mask=real)


@triton.jit
def _gradient_kernel(
    draft, teacher, peaks, totals, teacher_lse, factors, below, gradient_out, overlap_out,
    steps, rows, columns, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient of each row's logits, a (p - q) + b p ([p < f] - below), and sum min(f, p) once more.

    factors: [2, K, m], a and b of each row; both 0 where it is not counted.
    """
    row = tl.program_id(0)
    place, real, peak, total, z_peak, z_total, z_lse = _normalisers(peaks, totals, teacher_lse, steps, rows, row, STEPS)
    a = tl.load(factors + place, mask=real, other=0.0)
    b = tl.load(factors + tl.cast(steps, tl.int64) * rows + place, mask=real, other=0.0)
    threshold = tl.load(below + place, mask=real, other=0.0)
    overlap = tl.zeros((STEPS,), tl.float32)
    for start in range(0, columns, COLUMNS):
        x, z, at, target = _tile(draft, teacher, steps, rows, columns, row, start, STEPS, COLUMNS)
        p, q, f = _shares(x, z, peak, total, z_peak, z_total, z_lse)
        overlap += tl.sum(tl.minimum(p, f[None, :]), 1)
        grad = a[:, None] * (p - q[None, :]) + b[:, None] * p * (
            tl.where(p < f[None, :], 1.0, 0.0) - threshold[:, None]
        )
        grad = tl.where((a == 0.0)[:, None] & (b == 0.0)[:, None], 0.0, grad)
        tl.store(
            gradient_out + target, grad.to(gradient_out.dtype.element_ty), mask=real[:, None] & (at < columns)[None, :]
        )
    tl.store(overlap_out + place, overlap, mask=real)


def _launch(kernel: Callable, draft: Tensor, *arguments: Tensor) -> None:
    steps, rows, columns = draft.shape
    if rows:
        kernel[(rows,)](
            draft, *arguments, steps, rows, columns,
            STEPS=triton.next_power_of_2(steps), COLUMNS=min(COLUMNS, triton.next_power_of_2(columns)), num_warps=WARPS,
        )  # fmt: skip


@torch.library.custom_op("eagle3::loss_statistics", mutates_args=())
def loss_statistics(draft: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """top, best, total, product [K, m], z_top, z_total [m] (see the kernel) of fp32 logits [K, m, v] and [m, v]."""
    results = _empty_statistics(draft, teacher)
    _launch(_statistics_kernel, draft, teacher, *results)
    return results


@loss_statistics.register_fake
def _empty_statistics(draft: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = draft.shape[:2]
    top, total, product = (draft.new_empty(shape) for _ in range(3))
    best = draft.new_empty(shape, dtype=torch.int64)
    return top, best, total, product, *(teacher.new_empty(teacher.shape[:1]) for _ in range(2))


@torch.library.custom_op("eagle3::loss_overlap", mutates_args=())
def loss_overlap(
    draft: Tensor, teacher: Tensor, peaks: Tensor, totals: Tensor, teacher_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """sum min(f, p) and sum p where p < f, each [K, m]. peaks, totals: [K + 1, m], the teacher's last."""
    results = _empty_overlap(draft, teacher, peaks, totals, teacher_lse)
    _launch(_overlap_kernel, draft, teacher, peaks, totals, teacher_lse, *results)
    return results


@loss_overlap.register_fake
def _empty_overlap(draft: Tensor, teacher: Tensor, peaks, totals, teacher_lse) -> tuple[Tensor, Tensor]:
    return draft.new_empty(draft.shape[:2]), draft.new_empty(draft.shape[:2])


@torch.library.custom_op("eagle3::loss_gradient", mutates_args=())
def loss_gradient(
    draft: Tensor,
    teacher: Tensor,
    peaks: Tensor,
    totals: Tensor,
    teacher_lse: Tensor,
    factors: Tensor,
    below: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The gradient of the logits [K, m, v] in `dtype`, and sum min(f, p) [K, m] (`_gradient_kernel`)."""
    results = _empty_gradient(draft, teacher, peaks, totals, teacher_lse, factors, below, dtype)
    _launch(_gradient_kernel, draft, teacher, peaks, totals, teacher_lse, factors, below, *results)
    return results


@loss_gradient.register_fake
def _empty_gradient(draft, teacher, peaks, totals, teacher_lse, factors, below, dtype) -> tuple[Tensor, Tensor]:
    return torch.empty_like(draft, dtype=dtype), draft.new_empty(draft.shape[:2])


def traffic(operator: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Traffic:
    """What a call of one of these operators costs: it reads its inputs and writes its outputs once. An exponential
    counts as one FLOP. Raises KeyError for any other operator."""
    each = {"loss_statistics": 9, "loss_overlap": 8, "loss_gradient": 14}[operator]
    sizes = (sum(tensor.numel() * tensor.element_size() for tensor in tensors) for tensors in (inputs, outputs))
    return Traffic(1, float(each * inputs[0].numel()), *sizes)


class FusedSoftmaxes:
    """BlockSoftmaxes for fp32 logits on CUDA."""

    def __init__(self, logits: Logits, group: dist.ProcessGroup) -> None:
        """Ranks share one MAX and one SUM all-reduce, as in PlainSoftmaxes."""
        self.logits, self.group = logits, group
        top, best, total, product, z_top, z_total = loss_statistics(logits.draft, logits.teacher)
        self.peaks, self.best = share_peaks(top, best, z_top, logits.draft.shape[-1], group)
        shift = top - self.peaks[:-1]
        z_scale = (z_top - self.peaks[-1]).exp()
        # This rank's sums, relative to the maxima of all ranks.
        z_part = z_total * z_scale
        product = z_scale * (product + shift * z_total)
        self.totals = torch.cat((total * shift.exp(), z_part[None]))
        if group.size() > 1:
            dist.all_reduce(self.totals, group=group)
        q_total = self.totals[-1]
        self.cross_entropy = self.totals[:-1].log() * (z_part / q_total) - product / q_total

    def finish(
        self, counted: Tensor, weights: Sequence[tuple[float, float]] | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        arguments = *self.logits[:2], self.peaks, self.totals, self.logits.teacher_lse
        if weights is None:
            return loss_overlap(*arguments)[0], None
        below = torch.zeros_like(self.cross_entropy)
        if any(overlap for _, overlap in weights):
            below = loss_overlap(*arguments)[1]
            if self.group.size() > 1:
                dist.all_reduce(below, group=self.group)
        factors = send(torch.tensor(weights, dtype=below.dtype), below.device).t()[..., None]
        gradient, overlap = loss_gradient(*arguments, (factors * counted).contiguous(), below, dtype)
        return overlap, gradient


def _product(rows: Tensor, columns: Tensor) -> Tensor:
    return wide_product(rows, columns.t())


FUSED = LossKernel("fused", FusedSoftmaxes, _product, add_product)
