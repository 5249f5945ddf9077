"""Work that keeps nothing but its inputs and runs again in the backward pass: position-wise work in chunks of tokens, and
whole TTT steps.

Not torch.utils.checkpoint: under a checkpoint of the step, the work after attention would run three times (forward, again
to rebuild the step, again chunk by chunk), and every chunk would round its share of the weights' gradients to their number
format. Here it runs twice, and chunks add up in fp32. Weights are inputs of the autograd functions, so that each has one
gradient, ready once, as ZeRO wants it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from eagle3.attention.ring import Exchange, SharedKeyValue
from eagle3.attention.ttt import KeyValue
from eagle3.draft.config import DraftConfig

Recompute = Literal["none", "attention_kept", "full"]


def chunk_token_bytes(config: DraftConfig, tensor: int, dtype: torch.dtype) -> int:
    """What a chunk holds for one token while it is recomputed and differentiated, in its widest part: what follows
    attention. The MLP's gate and up, their activation and product, with gradients; six hidden states, two in fp32."""
    wide = 6 * config.intermediate_size // tensor + 4 * config.hidden_size
    return dtype.itemsize * wide + 2 * max(4, dtype.itemsize) * config.hidden_size


def chunk_tokens(config: DraftConfig, tensor: int, dtype: torch.dtype, block_bytes: int) -> int:
    """Tokens of one chunk of position-wise work."""
    return max(1, block_bytes // chunk_token_bytes(config, tensor, dtype))


class Cut(NamedTuple):
    """One chunk: the rows that its function reads of every input, and those that it writes of each output."""

    rows: slice
    outputs: tuple[slice, ...]


def cut_rows(rows: int, chunk: int, outputs: int) -> tuple[Cut, ...]:
    """Rows 0..rows in chunks, for a function with as many outputs, of one row for each row read."""
    slices = (slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk))
    return tuple(Cut(each, (each,) * outputs) for each in slices)


@dataclass(frozen=True)
class ChunkedWork:
    """Position-wise work: function(cut, *inputs[cut.rows]) -> tuple of outputs[cut.outputs]. `weights`: whatever of them
    it uses. A call is differentiable and runs the function again, chunk by chunk, in its backward pass; a call of
    `plainly` keeps what autograd keeps."""

    function: Callable[..., tuple[Tensor, ...]]
    cuts: tuple[Cut, ...]
    weights: tuple[Tensor, ...]

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
            made = self.function(cut, *(tensor[cut.rows] for tensor in inputs))
            if not outputs:
                rows = (last.stop for last in self.cuts[-1].outputs)
                outputs = [part.new_empty(count, *part.shape[1:]) for count, part in zip(rows, made, strict=True)]
            for whole, rows, part in zip(outputs, cut.outputs, made, strict=True):
                whole[rows] = part
        return tuple(outputs)

    def backward(
        self, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Gradients of the inputs, and of the weights (None for one that the function does not use). gradients: of the
        outputs, None where nobody used one."""
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
            made, upstream = zip(*used, strict=True)
            found = torch.autograd.grad(made, (*leaves, *self.weights), upstream, allow_unused=True)
            del outputs, used, made, upstream
            for whole, part in zip(d_inputs, found, strict=False):
                whole[cut.rows] = part
            for index, part in enumerate(found[len(inputs) :]):
                if part is not None and d_weights[index] is None and len(self.cuts) > 1:
                    part = part.to(torch.promote_types(part.dtype, torch.float32))  # in which chunks add up
                d_weights[index] = _added(d_weights[index], part)
            del found, part
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
    """One TTT step. project: hidden -> (q, K_k, V_k), at step 0 (q,). attend(q, shared, own) -> attended, with all own keys
    and values so far. finish: (hidden, attended) -> (output,)."""

    project: ChunkedWork
    attend: Callable[[Tensor, SharedKeyValue, tuple[KeyValue, ...]], Tensor]
    finish: ChunkedWork

    def run(
        self, hidden: Tensor, exchange: Exchange, own: tuple[KeyValue, ...], recompute: Recompute
    ) -> tuple[Tensor, tuple[KeyValue, ...]]:
        """hidden [Q, H] -> the step's output [Q, H], and all own keys and values so far.

        exchange: of K_0, V_0; own: of the steps before. Keeps for the backward pass everything (none), the
        inputs of what is position-wise and what attention needs (attention_kept), or `hidden` alone (full)."""
        if recompute == "full":
            flat, prefix = [tensor for pair in own for tensor in pair], exchange.shared
            output, *made = _Step.apply(
                self, prefix.gradient, hidden, prefix.key_value, len(flat), *flat, *self.project.weights
            )
            return output, own + _pairs(made)
        project, finish = (part.plainly if recompute == "none" else part for part in (self.project, self.finish))
        q, *made = project(hidden)
        own += _pairs(made)
        (output,) = finish(hidden, self.attend(q, exchange.shared, own))
        return output, own


class _Step(torch.autograd.Function):
    """The whole step, of which only the inputs are kept. Both parts have the same weights."""

    @staticmethod
    def forward(ctx, step, gradient, hidden, key_value, own_count, *own_and_weights):
        ctx.step, ctx.gradient = step, gradient
        ctx.set_materialize_grads(False)
        own = own_and_weights[:own_count]
        ctx.save_for_backward(hidden, key_value, *own)
        q, *made = step.project.forward((hidden,))
        attended = step.attend(q, SharedKeyValue(key_value, gradient), _pairs((*own, *made)))
        return *step.finish.forward((hidden, attended)), *made

    @staticmethod
    def backward(ctx, d_output, *d_made):
        hidden, key_value, *own = ctx.saved_tensors
        step = ctx.step
        q, *made = step.project.forward((hidden,))
        with torch.enable_grad():
            q, *own_and_made = (tensor.detach().requires_grad_() for tensor in (q, *own, *made))
            shared = SharedKeyValue(key_value, ctx.gradient).detached()
            attended = step.attend(q, shared, _pairs(own_and_made))
        (d_hidden, d_attended), finishing = step.finish.backward((hidden, attended.detach()), (d_output,))
        d_q, *d_own = torch.autograd.grad(attended, (q, *own_and_made), d_attended)
        del attended, q, made, own_and_made, d_attended
        d_own, from_here = d_own[: len(own)], d_own[len(own) :]
        d_made = map(_added, from_here, d_made)
        (d_projected,), projecting = step.project.backward((hidden,), (d_q, *d_made))
        d_hidden += d_projected
        return None, None, d_hidden, None, None, *d_own, *map(_added, finishing, projecting)


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """In place: what autograd.grad has just made for one tensor is nobody else's."""
    if total is None or part is None:
        return part if total is None else total
    return total.add_(part)


def _pairs(flat: Sequence[Tensor]) -> tuple[KeyValue, ...]:
    return tuple(KeyValue(*pair) for pair in zip(flat[::2], flat[1::2], strict=True))
