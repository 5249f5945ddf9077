"""Distillation in one call after the unroll: blocks of target rows, the teacher once, all K steps together.

Under tensor parallelism a rank has its columns of the draft vocabulary, and the softmaxes run over all ranks' columns.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Bytes that one block's draft logits may take; the block's other tensors are a few times that.
LOGIT_BYTES = 16 * 2**20
# Above every draft id, so that it loses when ranks look for the lowest id of the largest logit.
_ELSEWHERE = torch.iinfo(torch.int64).max


class StepSums(NamedTuple):
    """Sums over positions, [K] fp64. cross_entropy: -sum_v q log p. overlap: acceptance rate sum_v min(q_full, p).
    correct: the draft's best token is the teacher's. The first two over counted positions, the last over supervised."""

    cross_entropy: Tensor
    overlap: Tensor
    correct: Tensor

    def __add__(self, other: "StepSums") -> "StepSums":
        return StepSums(*(a + b for a, b in zip(self, other, strict=True)))


class Distilled(NamedTuple):
    """surrogate: scalar whose gradient is this stream's share of the loss's. sums: what losses and metrics need."""

    surrogate: Tensor
    sums: StepSums


@dataclass(frozen=True)
class Teacher:
    """The target at M rows of the stream.

    last [M, Ht]: hidden states after the final norm. head [Vd/tp, Ht]: this rank's part of the target's lm_head rows of
    the draft vocabulary. best [M] int64: draft id of the target's most likely token, -1 where that is outside the draft
    vocabulary, whichever rank has its row. logsumexp [M]: over the target's full vocabulary.
    """

    last: Tensor
    head: Tensor
    best: Tensor
    logsumexp: Tensor


def distill(
    outputs: Tensor,
    head: Tensor,
    teacher: Teacher,
    query_of: Tensor,
    supervised: Tensor,
    cross_entropy_weights: Tensor,
    overlap_weights: Tensor,
    group: ProcessGroup,
) -> Distilled:
    """Compare K steps of draft outputs with the teacher.

    outputs [K, Q, H] normed hidden states; head [Vd/tp, H] this rank's rows of the draft's lm_head, rank r's the r-th
    part; query_of, supervised [K, M] of the SequencePlan; weights [K] fp64 of StepWeights. Gradients of `outputs` and
    `head` are made block by block on the way, when autograd wants them; no tensor of [tokens, vocabulary] exists.

    group: the tensor-parallel group. All its ranks call this with the same arguments, the heads apart, and get the same
    surrogate, sums and gradient of `outputs`, all of them whole; the gradient of `head` is that of the rank's rows.
    """
    surrogate, cross_entropy, overlap, correct = _Distill.apply(
        outputs, head, teacher, query_of, supervised, cross_entropy_weights, overlap_weights, group
    )
    return Distilled(surrogate, StepSums(cross_entropy, overlap, correct))


def block_rows(steps: int, columns: int, itemsize: int) -> int:
    """Target rows of one block: as many as keep a rank's K draft logits, `columns` wide, within LOGIT_BYTES."""
    return max(16, LOGIT_BYTES // (steps * columns * itemsize))


class _Columns(NamedTuple):
    """This rank's columns of a block: log_p [K, m, v] and q [m, v] of softmaxes over all ranks' columns. best [K, m]
    int64: the lowest draft id of the largest logit, _ELSEWHERE where only other ranks have one as large."""

    log_p: Tensor
    q: Tensor
    best: Tensor


def _softmaxes(logits: Tensor, z: Tensor, group: ProcessGroup) -> _Columns:
    """Of this rank's draft logits [K, m, v] and teacher logits [m, v]; both share a MAX and a SUM all-reduce."""
    top, best = logits.max(-1)
    if group.size() == 1:
        return _Columns(torch.log_softmax(logits, -1), torch.softmax(z, -1), best)
    peaks = torch.cat((top, z.amax(-1)[None]))
    dist.all_reduce(peaks, dist.ReduceOp.MAX, group)
    best = torch.where(top == peaks[:-1], best + group.rank() * logits.shape[-1], _ELSEWHERE)
    logits, q = logits - peaks[:-1, :, None], (z - peaks[-1, :, None]).exp()
    totals = torch.cat((logits.exp().sum(-1), q.sum(-1)[None]))
    dist.all_reduce(totals, group=group)
    return _Columns(logits - totals[:-1, :, None].log(), q / totals[-1, :, None], best)


class _Distill(torch.autograd.Function):
    """With p = softmax(logits), q = softmax(teacher), f = q_full, a = sum_v min(f, p), row by row:
    d(-sum q log p)/dlogits = p - q ;  da/dlogits_v = p_v * ([p_v < f_v] - sum_u p_u [p_u < f_u]).

    A rank's columns give its rows of d_head, and terms of d_outputs and of the sums, which are added up at the end."""

    @staticmethod
    def forward(ctx, outputs, head, teacher, query_of, supervised, cross_entropy_weights, overlap_weights, group):
        exact = torch.promote_types(outputs.dtype, torch.float32)
        steps, device, parallel = outputs.shape[0], outputs.device, group.size() > 1
        best = query_of.new_empty(query_of.shape)  # draft id of the largest logit
        sums = torch.zeros(3, steps, dtype=torch.float64, device=device)
        want = any(ctx.needs_input_grad[:2])
        d_outputs = outputs.new_zeros(outputs.shape) if want else None
        d_head = torch.zeros(head.shape, dtype=exact, device=device) if want else None
        weigh_overlap = bool((overlap_weights != 0).any())
        counted = supervised & (teacher.best >= 0)
        rows = block_rows(steps, head.shape[0], exact.itemsize)
        for start in range(0, len(teacher.best), rows):
            block = slice(start, start + rows)
            slots = query_of[:, block].clamp(min=0)
            hidden = outputs.gather(1, slots[..., None].expand(-1, -1, outputs.shape[-1]))
            z = (teacher.last[block] @ teacher.head.t()).to(exact)
            q_full = torch.exp(z - teacher.logsumexp[block, None].to(exact))
            log_p, q, best[:, block] = _softmaxes((hidden @ head.t()).to(exact), z, group)
            p = log_p.exp()
            weight = counted[:, block]
            sums[0] -= torch.where(weight, torch.einsum("kmv,mv->km", log_p, q), 0).sum(1, dtype=torch.float64)
            sums[1] += torch.where(weight, torch.minimum(p, q_full).sum(-1), 0).sum(1, dtype=torch.float64)
            if not want:
                continue
            ce_weight = torch.where(weight, cross_entropy_weights[:, None], 0)[..., None].to(exact)
            gradient = (p - q) * ce_weight
            if weigh_overlap:
                below = torch.where(p < q_full, p, 0)
                all_below = below.sum(-1, keepdim=True)
                if parallel:
                    dist.all_reduce(all_below, group=group)
                overlap_weight = torch.where(weight, overlap_weights[:, None], 0)[..., None].to(exact)
                gradient += (below - p * all_below) * overlap_weight
            gradient = gradient.to(outputs.dtype)
            d_head += gradient.flatten(0, 1).t() @ hidden.flatten(0, 1)
            d_hidden = gradient @ head
            for step in range(steps):  # slots without a query point at 0 and carry a zero gradient
                d_outputs[step].index_add_(0, slots[step], d_hidden[step])
        if parallel and len(teacher.best):
            dist.all_reduce(best, dist.ReduceOp.MIN, group)
            dist.all_reduce(sums, group=group)
            if want:
                dist.all_reduce(d_outputs, group=group)
        sums[2] = (supervised & (best == teacher.best)).sum(1)
        cross_entropy, overlap, correct = sums
        surrogate = (cross_entropy_weights * cross_entropy + overlap_weights * overlap).sum()
        ctx.save_for_backward(d_outputs, None if d_head is None else d_head.to(head.dtype))
        ctx.mark_non_differentiable(cross_entropy, overlap, correct)
        return surrogate.to(exact), cross_entropy, overlap, correct

    @staticmethod
    def backward(ctx, grad, *_):
        d_outputs, d_head = ctx.saved_tensors
        return d_outputs * grad.to(d_outputs.dtype), d_head * grad.to(d_head.dtype), *(None,) * 6
