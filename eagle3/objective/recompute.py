"""Work that saves only its inputs and runs again in the backward pass: position-wise work in chunks of tokens, and
whole TTT steps.

torch.utils.checkpoint does not do. With a checkpoint around the step, the work after attention would run three times
(forward, again to rebuild the step, again chunk by chunk), and every chunk would round its share of the weights'
gradients to the weights' dtype. Here that work runs twice, and chunks are summed in fp32. Weights are inputs of the
autograd functions, so that each has a single gradient that becomes ready once, as ZeRO requires.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from eagle3.attention.ring import Exchange
from eagle3.attention.shared import SharedTensor
from eagle3.attention.ttt import KeyValue
from eagle3.draft.config import DraftConfig
from eagle3.objective.distill import BLOCK_BYTES

Recompute = Literal["none", "attention_kept", "full"]


@dataclass(frozen=True)
class MemoryPlan:
    """What a step saves, and how much it works on at once."""

    recompute: Recompute = "none"  # see Step
    block_bytes: int = BLOCK_BYTES  # size of the loss's blocks, and of the chunks of position-wise work


def chunk_token_bytes(config: DraftConfig, tensor: int, dtype: torch.dtype) -> int:
    """Bytes that a chunk holds per token while it is recomputed and differentiated, in its widest part, which follows
    attention: the MLP's gate and up, their activation and product, each with its gradient; six hidden states, two of
    them in fp32."""
    wide = 6 * config.intermediate_size // tensor + 4 * config.hidden_size
    return dtype.itemsize * wide + 2 * max(4, dtype.itemsize) * config.hidden_size


class Cut(NamedTuple):
    """One chunk of position-wise work."""

    rows: slice  # rows that the function reads of every input
    outputs: tuple[slice, ...]  # rows that it writes, for each output


def cut_rows(rows: int, chunk: int, outputs: int) -> tuple[Cut, ...]:
    """Cuts rows 0..rows into chunks for a function with `outputs` outputs that writes one row for each row it reads."""
    slices = (slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk))
    return tuple(Cut(each, (each,) * outputs) for each in slices)


@dataclass(frozen=True)
class ChunkedWork:
    """Position-wise work: function(cut, *inputs[cut.rows]) -> tuple of outputs[cut.outputs].

    A call is differentiable; its backward pass runs the function again, chunk by chunk. `plainly` leaves everything to
    autograd instead.
    """

    function: Callable[..., tuple[Tensor, ...]]
    cuts: tuple[Cut, ...]
    weights: tuple[Tensor, ...]  # all that the function uses

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return _ChunkedWork.apply(self, len(inputs), *inputs, *self.weights)

    def plainly(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        (whole,) = self.cuts
        return self.function(whole, *inputs)

    @torch.no_grad()
    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if len(self.cuts) == 1:
            return self.plainly(*inputs)
        outputs: list[Tensor] = []
        for cut in self.cuts:
            parts = self.function(cut, *(tensor[cut.rows] for tensor in inputs))
            if not outputs:
                rows = (last.stop for last in self.cuts[-1].outputs)
                outputs = [part.new_empty(count, *part.shape[1:]) for count, part in zip(rows, parts, strict=True)]
            for whole, rows, part in zip(outputs, cut.outputs, parts, strict=True):
                whole[rows] = part
        return tuple(outputs)

    def backward(
        self, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Gradients of the inputs, and of the weights (None for a weight that the function does not use). gradients:
        those of the outputs, None for an output that was not used."""
        d_inputs = [torch.empty_like(tensor) for tensor in inputs]
        d_weights: list[Tensor | None] = [None] * len(self.weights)
        for cut in self.cuts:
            leaves = [tensor[cut.rows].detach().requires_grad_() for tensor in inputs]
            with torch.enable_grad():
                outputs = self.function(cut, *leaves)
            used = [
                (output, gradient[rows])
                for output, gradient, rows in zip(outputs, gradients, cut.outputs, strict=True)
                if gradient is not None
            ]
            roots, upstream = zip(*used, strict=True)
            d_leaves = torch.autograd.grad(roots, (*leaves, *self.weights), upstream, allow_unused=True)
            del outputs, used, roots, upstream
            for whole, part in zip(d_inputs, d_leaves, strict=False):
                whole[cut.rows] = part
            for index, part in enumerate(d_leaves[len(inputs) :]):
                if part is not None and d_weights[index] is None and len(self.cuts) > 1:
                    part = part.to(torch.promote_types(part.dtype, torch.float32))  # chunks are summed in this dtype
                d_weights[index] = _added(d_weights[index], part)
            del d_leaves, part
        return d_inputs, [
            None if total is None else total.to(weight.dtype)
            for total, weight in zip(d_weights, self.weights, strict=True)
        ]


class _ChunkedWork(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, count, *inputs_and_weights):
        ctx.part = part
        ctx.set_materialize_grads(False)
        inputs = inputs_and_weights[:count]
        ctx.save_for_backward(*inputs)
        return part.forward(inputs)

    @staticmethod
    def backward(ctx, *gradients):
        d_inputs, d_weights = ctx.part.backward(ctx.saved_tensors, gradients)
        return None, None, *d_inputs, *d_weights


@dataclass(frozen=True)
class Step:
    """One TTT step in three parts."""

    project: ChunkedWork  # hidden -> (q, K_k, V_k); at step 0, (q,)
    # (q, shared, own) -> attended, where own holds all own keys and values so far
    attend: Callable[[Tensor, SharedTensor, tuple[KeyValue, ...]], Tensor]
    finish: ChunkedWork  # (hidden, attended) -> (output,)

    def run(
        self, hidden: Tensor, exchange: Exchange, own: tuple[KeyValue, ...], recompute: Recompute
    ) -> tuple[Tensor, tuple[KeyValue, ...]]:
        """Maps hidden [Q, H] to the step's output [Q, H], and returns it with all own keys and values so far.

        exchange: of K_0, V_0.
        own: keys and values of the steps before.
        recompute: what is saved for the backward pass: everything (none), the inputs of position-wise work and whatever
            attention needs (attention_kept), or only `hidden` (full).
        """
        if recompute == "full":
            flat, prefix = [tensor for pair in own for tensor in pair], exchange.shared
            output, *new = _Step.apply(
                self, prefix.gradient, hidden, prefix.tensor, len(flat), *flat, *self.project.weights
            )
            return output, own + _pairs(new)
        project, finish = (part.plainly if recompute == "none" else part for part in (self.project, self.finish))
        q, *new = project(hidden)
        own += _pairs(new)
        (output,) = finish(hidden, self.attend(q, exchange.shared, own))
        return output, own


class _Step(torch.autograd.Function):
    """The whole step, saving only its inputs. `project` and `finish` have the same weights."""

    @staticmethod
    def forward(ctx, step, gradient, hidden, key_value, own_count, *own_and_weights):
        ctx.step, ctx.gradient = step, gradient
        ctx.set_materialize_grads(False)
        own = own_and_weights[:own_count]
        ctx.save_for_backward(hidden, key_value, *own)
        q, *new = step.project.forward((hidden,))
        attended = step.attend(q, SharedTensor(key_value, gradient), _pairs((*own, *new)))
        return *step.finish.forward((hidden, attended)), *new

    @staticmethod
    def backward(ctx, d_output, *d_new):
        hidden, key_value, *own = ctx.saved_tensors
        step = ctx.step
        q, *new = step.project.forward((hidden,))
        with torch.enable_grad():
            q, *own_and_new = (tensor.detach().requires_grad_() for tensor in (q, *own, *new))
            shared = SharedTensor(key_value.detach().requires_grad_(), ctx.gradient)
            attended = step.attend(q, shared, _pairs(own_and_new))
        (d_hidden, d_attended), finishing = step.finish.backward((hidden, attended.detach()), (d_output,))
        d_q, *d_own = torch.autograd.grad(attended, (q, *own_and_new), d_attended)
        del attended, q, new, own_and_new, d_attended
        d_own, from_here = d_own[: len(own)], d_own[len(own) :]
        d_new = map(_added, from_here, d_new)
        (d_projected,), projecting = step.project.backward((hidden,), (d_q, *d_new))
        d_hidden += d_projected
        return None, None, d_hidden, None, None, *d_own, *map(_added, finishing, projecting)


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Adds in place: nobody else holds what autograd.grad has just created for a tensor."""
    if total is None or part is None:
        return part if total is None else total
    return total.add_(part)


def _pairs(flat: Sequence[Tensor]) -> tuple[KeyValue, ...]:
    return tuple(KeyValue(*pair) for pair in zip(flat[::2], flat[1::2], strict=True))
