"""Computes the distillation loss and its gradients in one call after the unroll, block by block over teacher rows; the
teacher's logits are computed once for all K steps.

Under tensor parallelism each rank holds its columns of the draft vocabulary; the softmaxes run over all ranks' columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eagle3.attention.shared import add_product
from eagle3.objective.softmaxes import PLAIN, LossKernel
from eagle3.objective.streaming import StreamedRows
from eagle3.targets.logits import LogitTransform
from eagle3.tensors import send

# Default size of one block of the loss, and of one chunk of position-wise work.
BLOCK_BYTES = 2**30


class StepSums(NamedTuple):
    """Sums over positions, each [K] fp64; the first two are weighted by `shares`. Counted positions are the supervised
    ones whose teacher token is in the draft vocabulary."""

    cross_entropy: Tensor  # -sum_v q log p (see _Distill), over counted positions
    overlap: Tensor  # the acceptance rate sum_v min(f, p), over counted positions
    correct: Tensor  # how often the draft's best token is the teacher's, over supervised positions


class StepWeights(NamedTuple):
    """What each step's summed cross-entropy and acceptance rate are multiplied by in the surrogate loss, [K] fp64 each,
    on the CPU."""

    cross_entropy: Tensor
    overlap: Tensor


class Distilled(NamedTuple):
    """The result of `distill`."""

    surrogate: Tensor  # scalar; its gradient is this stream's share of the loss's gradient
    sums: StepSums  # what losses and metrics need
    correct: Tensor  # [K, M] bool: supervised positions where the draft's best token is the teacher's
    # [K, M]: where supervised, the chance that the text's token was a draft that sampling at temperature 1 accepted, if
    # the text was sampled so; only without gradients, and if the teacher knows the text
    sampled: Tensor | None


def loss_row_bytes(steps: int, columns: int, hidden: int, dtype: torch.dtype, overwrites: bool = True) -> int:
    """Bytes that `distill` holds per teacher row: K rows of draft logits in fp32 or wider, and as many of their
    gradient in `dtype`, unless it takes their place; one row of the teacher's logits in fp32 or wider, or five if the
    kernel `overwrites`; and for each step six rows of hidden size (states, normed states, gradients), of which two are
    in fp32 or wider."""
    exact = max(dtype.itemsize, 4)
    gradient = 0 if overwrites and dtype.itemsize == exact else dtype.itemsize
    logits = steps * (exact + gradient) + (5 if overwrites else 1) * exact
    return columns * logits + steps * hidden * (4 * dtype.itemsize + 2 * exact)


def rows_at_once(block_bytes: int, row_bytes: int) -> int:
    """Rows in one block of `distill`, or in one chunk of position-wise work."""
    return max(1, block_bytes // row_bytes)


@dataclass(frozen=True)
class Teacher:
    """The target's predictions at M rows of the stream.

    With a head, logits are computed from hidden states; without one, `last` holds the target's own logits.
    """

    last: Tensor | StreamedRows  # [M, Ht] after the final norm, possibly on the host; without head: logits [M, Vd/tp]
    head: Tensor | None  # [Vd/tp, Ht]: the rows of the target's lm_head for this rank's part of the draft vocabulary
    # [M] int64: draft id of the target's most likely token, whichever rank has it; -1 if the draft vocabulary lacks it
    best: Tensor
    logsumexp: Tensor  # [M]: over the target's full vocabulary
    transform: LogitTransform = LogitTransform()  # applied to what head yields
    written: Tensor | None = None  # [M] int64: draft id of the text's token there; -1 as in `best`

    def map(
        self, change: Callable[[Tensor], Tensor], change_rows: Callable[[Tensor], Tensor | StreamedRows]
    ) -> "Teacher":
        """Applies `change_rows` to `last`, and `change` to what else belongs to the rows."""
        return replace(
            self,
            last=change_rows(self.last),
            best=change(self.best),
            logsumexp=change(self.logsumexp),
            written=None if self.written is None else change(self.written),
        )

    def logits(self, block: slice, dtype: torch.dtype, kernel: LossKernel = PLAIN) -> Tensor:
        """Logits [m, Vd/tp] in `dtype` (fp32 or wider) that the caller may overwrite."""
        rows = self.last[block]
        if self.head is None:
            return rows.to(dtype, copy=True)
        return self.transform.apply(kernel.product(rows, self.head)).to(dtype)


def distill(
    outputs: Sequence[Tensor],
    head: Tensor,
    teacher: Teacher,
    query_of: Tensor,
    weights: StepWeights,
    group: dist.ProcessGroup,
    norm: nn.Module | None = None,
    shares: Tensor | None = None,
    block_bytes: int = BLOCK_BYTES,
    kernel: LossKernel | None = None,
) -> Distilled:
    """Compares K steps of draft outputs with the teacher.

    Gradients of `outputs`, `head` and `norm` are computed along the way, block by block, if autograd wants them, and
    can be asked for only once. A block takes about `block_bytes`; no tensor of [tokens, vocabulary] ever exists.

    All ranks of the tensor-parallel group call this with the same arguments, except that each passes its own part of
    `head`, and of the teacher's head or logits. They all get the same surrogate and sums, and the same complete
    gradients of `outputs` and `norm`; the gradient of `head` covers this rank's rows.

    outputs: K hidden states [Q, H], which `norm` turns into lm_head's input.
    head: [Vd/tp, H], this rank's rows of the draft's lm_head; rank r holds the r-th part.
    query_of: [K, M], from the SequencePlan: the row of `outputs` for each teacher row, -1 where nothing is supervised.
        No row stands twice in a step.
    group: the tensor-parallel group.
    shares: [K, M], what each position counts in the sums; None: 1.
    kernel: None: the usual one.
    """
    kernel = kernel or loss_candidates(head.device, head.dtype)[0]
    rows = rows_at_once(block_bytes, loss_row_bytes(len(outputs), *head.shape, head.dtype, kernel.overwrites))
    norm_weights = () if norm is None else norm.parameters()
    surrogate, cross_entropy, overlap, correct, sampled = _Distill.apply(
        weights,
        group,
        norm,
        (rows, kernel, torch.is_grad_enabled()),
        head,
        teacher,
        query_of,
        shares,
        *outputs,
        *norm_weights,
    )
    return Distilled(surrogate, StepSums(cross_entropy, overlap, correct.sum(1).double()), correct, sampled)


class _Gradients:
    """Accumulates gradients over blocks: head and norm in fp32 or wider, outputs in their own dtype."""

    def __init__(self, outputs: Sequence[Tensor], head: Tensor, norm: nn.Module | None) -> None:
        exact = torch.promote_types(head.dtype, torch.float32)
        self.norm_weights = [] if norm is None else list(norm.parameters())
        # one more row each, for slots without a query
        self.outputs = [output.new_zeros(len(output) + 1, *output.shape[1:]) for output in outputs]
        self.head = torch.zeros_like(head, dtype=exact)
        self.norm = [torch.zeros_like(weight, dtype=exact) for weight in self.norm_weights]

    def add(self, logits: Tensor, hidden: Tensor, normed: Tensor, head: Tensor, query_of: Tensor) -> None:
        """Adds one block.

        logits: [K, m, v], the gradient of the logits, in head's dtype.
        hidden, normed: [K, m, H], lm_head's input before and after the norm.
        query_of: [K, m].
        """
        logits, flat = logits.flatten(0, 1), normed.detach().flatten(0, 1)
        add_product(self.head, logits, flat)
        gradient = (logits @ head).view_as(normed)
        if self.norm_weights:
            gradient, *norm = torch.autograd.grad(normed, (hidden, *self.norm_weights), gradient)
            for whole, part in zip(self.norm, norm, strict=True):
                whole += part
        slots = query_of % len(self.outputs[0])  # -1 is the last row
        for whole, at, part in zip(self.outputs, slots, gradient, strict=True):
            whole.index_copy_(0, at, part)


class _Distill(torch.autograd.Function):
    """The loss and its gradient, row by row. p is the softmax of the draft's logits, q that of the teacher's over the
    draft vocabulary, f the same over the target's full vocabulary, and a = sum_v min(f, p):

    d(-sum q log p)/dlogits = p - q
    da/dlogits_v = p_v * ([p_v < f_v] - sum_u p_u [p_u < f_u])

    From its columns of the logits a rank computes its own rows of d_head, and partial sums of everything else, which
    are reduced at the end.

    Sampling accepts a draft x with the chance min(1, f_x / p_x), so both happen with min(p_x, f_x). In a text that has
    x there, as it does with f_x, the chance that it was a draft is min(1, p_x / f_x).

    `weights` holds each step's factors of cross-entropy and overlap, `blocks` the number of rows per block, the kernel,
    and whether autograd records (which the tensors do not say, and forward cannot ask).
    """

    @staticmethod
    def forward(ctx, weights, group, norm, blocks, head, teacher, query_of, shares, *outputs_and_norm):
        rows, kernel, recorded = blocks
        outputs = outputs_and_norm[: len(query_of)]
        exact = torch.promote_types(head.dtype, torch.float32)
        best = query_of.new_empty(query_of.shape)  # draft id of the largest logit
        gradients = _Gradients(outputs, head, norm) if recorded and any(ctx.needs_input_grad) else None
        follows = gradients is None and teacher.written is not None
        terms = torch.empty(2, *query_of.shape, dtype=exact, device=head.device)  # cross-entropies, acceptance rates
        ratios = torch.zeros_like(terms[0]) if follows else None  # log(p / f) of the text's token, on its rank
        columns = teacher.written - group.rank() * len(head) if follows else None
        supervised = query_of >= 0
        counted, slots = supervised & (teacher.best >= 0), query_of.clamp(min=0)
        weights_of_steps = send(torch.stack(weights), head.device)  # [2, K]
        parts = counted if shares is None else counted * shares.to(exact)  # of each position in the sums
        factors = weights_of_steps.to(exact)[..., None] * parts
        overlaps = bool(weights.overlap.any())
        for start in range(0, len(teacher.best), rows):
            block = slice(start, start + rows)
            hidden = head.new_empty(*slots[:, block].shape, head.shape[1])
            for output, at, selected in zip(outputs, slots[:, block], hidden, strict=True):
                torch.index_select(output, 0, at, out=selected)
            with torch.set_grad_enabled(gradients is not None):
                normed = hidden if norm is None else norm(hidden.requires_grad_(gradients is not None))
            logits = kernel.product(normed.detach().flatten(0, 1), head).unflatten(0, hidden.shape[:2])
            lse = teacher.logsumexp[block].to(exact)
            taught = teacher.logits(block, exact, kernel)
            if follows:
                column = columns[block].clamp(0, len(head) - 1)
                here = column == columns[block]
                ratios[:, block] = torch.where(here, _at(logits, column) - _at(taught, column) + lse, 0)
            softmaxes = kernel.softmaxes(logits, taught, lse, group)
            del logits, taught
            best[:, block], terms[0, :, block] = softmaxes.best, softmaxes.cross_entropy
            if follows:
                ratios[:, block] -= torch.where(here, softmaxes.logsumexp, 0)
            of_block = None if gradients is None else factors[..., block]
            terms[1, :, block], d_logits = softmaxes.finish(of_block, overlaps, head.dtype)
            if gradients is not None:
                gradients.add(d_logits, hidden, normed, head, query_of[:, block])
            del softmaxes, d_logits, hidden, selected, normed  # free them before the next block allocates its own
        if group.size() > 1 and len(teacher.best):
            dist.all_reduce(best, dist.ReduceOp.MIN, group)
            of_gradients = [] if gradients is None else [*gradients.outputs, *gradients.norm]
            for partial in (terms, *of_gradients, *([ratios] if follows else [])):
                dist.all_reduce(partial, group=group)
        sums = torch.where(counted, terms if shares is None else terms * shares, 0).sum(-1, dtype=torch.float64)
        correct = supervised & (best == teacher.best)
        cross_entropy, overlap = sums
        surrogate = (sums * weights_of_steps).sum()
        if gradients is not None:
            norm_gradients = [g.to(w.dtype) for g, w in zip(gradients.norm, gradients.norm_weights, strict=True)]
            of_outputs = (whole[:-1] for whole in gradients.outputs)
            ctx.save_for_backward(gradients.head.to(head.dtype), *of_outputs, *norm_gradients)
        sampled = torch.where(teacher.written >= 0, ratios.clamp(max=0).exp(), 0) if follows else None
        ctx.mark_non_differentiable(cross_entropy, overlap, correct)
        return surrogate.to(exact), cross_entropy, overlap, correct, sampled

    @staticmethod
    def backward(ctx, grad, *_):
        # In place, to avoid a second copy. A second backward finds the tensors modified, which autograd refuses.
        head, *others = gradients = ctx.saved_tensors
        torch._foreach_mul_(gradients, grad.to(head.dtype))
        return None, None, None, None, head, None, None, None, *others


def _at(logits: Tensor, columns: Tensor) -> Tensor:
    """One column of each row: logits [..., m, v], columns [m]. Returns [..., m]."""
    return logits.gather(-1, columns.expand(logits.shape[:-1])[..., None])[..., 0]


def loss_candidates(device: torch.device, dtype: torch.dtype) -> list[LossKernel]:
    """The kernels that can compute the loss, the usual one first."""
    if device.type != "cuda" or dtype == torch.float64:
        return [PLAIN]
    from eagle3.objective.fused import FUSED  # Triton comes with torch's CUDA build

    return [FUSED, PLAIN]
