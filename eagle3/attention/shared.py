"""Tensors that many calls read, and the sum of their gradients."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class SharedGradient:
    """The gradient of a shared tensor. Every call's backward adds its part, in fp32 or wider; whoever made the tensor
    takes the sum. (Autograd would round each part to the tensor's dtype, and hold two parts at a time.)"""

    total: Tensor | None = None

    def like(self, tensor: Tensor) -> Tensor:
        if self.total is None:
            exact = torch.promote_types(tensor.dtype, torch.float32)
            self.total = torch.zeros(tensor.shape, dtype=exact, device=tensor.device)
        return self.total

    def take(self, tensor: Tensor) -> Tensor:
        total, self.total = self.like(tensor), None
        return total


class CollectGradient(torch.autograd.Function):
    """Makes a tensor shared. Backward runs when the backward passes of all calls are done, and returns the sum of their
    gradients."""

    @staticmethod
    def forward(ctx, tensor, gradient):
        ctx.gradient = gradient
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, _):
        (tensor,) = ctx.saved_tensors
        return ctx.gradient.take(tensor).to(tensor.dtype), None


class SharedRows:
    """A table of which many calls read rows, each of them any number of times."""

    def __init__(self, table: Tensor) -> None:
        self.gradient = SharedGradient()
        self.table = CollectGradient.apply(table, self.gradient)

    def __getitem__(self, index: Tensor) -> Tensor:
        return _Rows.apply(self.table, index, self.gradient)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, index, gradient):
        ctx.gradient = gradient
        ctx.save_for_backward(table, index)
        return table.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        table, index = ctx.saved_tensors
        total = ctx.gradient.like(table)
        total.index_add_(0, index, grad.to(total.dtype))
        return None, None, None
