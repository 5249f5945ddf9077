"""Distillation in one call after the unroll: blocks of target rows, the teacher once, all K steps together."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Bytes that one block's draft logits may take; the block's other tensors are a few times that.
LOGIT_BYTES = 16 * 2**20


class StepSums(NamedTuple):
    """Sums over positions, [K] fp64. cross_entropy: -sum_v q log p. overlap: acceptance rate sum_v min(q_full, p).
    correct: the draft's best token is the teacher's. The first two over counted positions, the last over supervised."""

    cross_entropy: Tensor
    overlap: Tensor
    correct: Tensor

    def __add__(self, other: "StepSums") -> "StepSums":
        return StepSums(*(a + b for a, b in zip(self, other, strict=True)))


class Distilled(NamedTuple):
    """surrogate: scalar whose gradient is this stream's share of the loss's. sums: what the loss and metrics are made of."""

    surrogate: Tensor
    sums: StepSums


@dataclass(frozen=True)
class Teacher:
    """The target at M rows of the stream.

    last [M, Ht]: hidden states after the final norm. head [Vd, Ht]: the target's lm_head rows of the draft vocabulary.
    best [M] int64: draft id of the target's most likely token, -1 where that is outside the draft vocabulary.
    logsumexp [M]: over the target's full vocabulary.
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
) -> Distilled:
    """Compare K steps of draft outputs with the teacher.

    outputs [K, Q, H] normed hidden states; head [Vd, H] the draft's lm_head; query_of, supervised [K, M] of the
    SequencePlan; weights [K] fp64 of StepWeights. Gradients of `outputs` and `head` are made block by block on the way,
    when autograd wants them; no tensor of [tokens, vocabulary] exists.
    """
    surrogate, cross_entropy, overlap, correct = _Distill.apply(
        outputs, head, teacher, query_of, supervised, cross_entropy_weights, overlap_weights
    )
    return Distilled(surrogate, StepSums(cross_entropy, overlap, correct))


def block_rows(steps: int, draft_vocabulary: int, itemsize: int) -> int:
    """Target rows of one block: as many as keep its K draft logits within LOGIT_BYTES."""
    return max(16, LOGIT_BYTES // (steps * draft_vocabulary * itemsize))


class _Distill(torch.autograd.Function):
    """With p = softmax(logits), q = softmax(teacher), f = q_full, a = sum_v min(f, p), row by row:
    d(-sum q log p)/dlogits = p - q ;  da/dlogits_v = p_v * ([p_v < f_v] - sum_u p_u [p_u < f_u])."""

    @staticmethod
    def forward(ctx, outputs, head, teacher, query_of, supervised, cross_entropy_weights, overlap_weights):
        exact = torch.promote_types(outputs.dtype, torch.float32)
        steps, device = outputs.shape[0], outputs.device
        sums = torch.zeros(3, steps, dtype=torch.float64, device=device)
        want = any(ctx.needs_input_grad[:2])
        d_outputs = torch.zeros_like(outputs) if want else None
        d_head = torch.zeros(head.shape, dtype=exact, device=device) if want else None
        weigh_overlap = bool((overlap_weights != 0).any())
        counted = supervised & (teacher.best >= 0)
        rows = block_rows(steps, head.shape[0], exact.itemsize)
        for start in range(0, len(teacher.best), rows):
            block = slice(start, start + rows)
            slots = query_of[:, block].clamp(min=0)
            hidden = outputs.gather(1, slots[..., None].expand(-1, -1, outputs.shape[-1]))
            log_p = torch.log_softmax((hidden @ head.t()).to(exact), -1)
            z = (teacher.last[block] @ teacher.head.t()).to(exact)
            q_full = torch.exp(z - teacher.logsumexp[block, None].to(exact))
            q = torch.softmax(z, -1)
            p = log_p.exp()
            weight = counted[:, block]
            best = log_p.argmax(-1)
            sums[0] -= torch.where(weight, torch.einsum("kmv,mv->km", log_p, q), 0).sum(1, dtype=torch.float64)
            sums[1] += torch.where(weight, torch.minimum(p, q_full).sum(-1), 0).sum(1, dtype=torch.float64)
            sums[2] += (supervised[:, block] & (best == teacher.best[block])).sum(1)
            if not want:
                continue
            ce_weight = torch.where(weight, cross_entropy_weights[:, None], 0)[..., None].to(exact)
            gradient = (p - q) * ce_weight
            if weigh_overlap:
                below = torch.where(p < q_full, p, 0)
                overlap_weight = torch.where(weight, overlap_weights[:, None], 0)[..., None].to(exact)
                gradient += (below - p * below.sum(-1, keepdim=True)) * overlap_weight
            gradient = gradient.to(outputs.dtype)
            d_head += gradient.flatten(0, 1).t() @ hidden.flatten(0, 1)
            d_hidden = gradient @ head
            for step in range(steps):  # slots without a query point at 0 and carry a zero gradient
                d_outputs[step].index_add_(0, slots[step], d_hidden[step])
        cross_entropy, overlap, correct = sums
        surrogate = (cross_entropy_weights * cross_entropy + overlap_weights * overlap).sum()
        ctx.save_for_backward(d_outputs, None if d_head is None else d_head.to(head.dtype))
        ctx.mark_non_differentiable(cross_entropy, overlap, correct)
        return surrogate.to(exact), cross_entropy, overlap, correct

    @staticmethod
    def backward(ctx, grad, *_):
        d_outputs, d_head = ctx.saved_tensors
        return d_outputs * grad.to(d_outputs.dtype), d_head * grad.to(d_head.dtype), None, None, None, None, None
