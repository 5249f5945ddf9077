"""Tensors that many calls read, and the sum of their gradients."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class SharedGradient:
    """The gradient of a shared tensor. Every call's backward adds its part, by default in fp32 or wider; whoever made
    the tensor takes the sum. (Autograd would round each part to the tensor's dtype, and hold two parts at a time.)"""

    total: Tensor | None = None
    exact: bool = True  # otherwise sums are in the tensor's dtype

    def like(self, tensor: Tensor) -> Tensor:
        if self.total is None:
            dtype = torch.promote_types(tensor.dtype, torch.float32) if self.exact else tensor.dtype
            self.total = torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
        return self.total

    def take(self, tensor: Tensor) -> Tensor:
        total, self.total = self.like(tensor), None
        return total


class _CollectGradient(torch.autograd.Function):
    """Backward runs when the backward passes of all calls are done, and returns the sum of their gradients."""

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


@dataclass(frozen=True)
class SharedTensor:
    """A tensor that many calls read, and the sum of their gradients: a table of rows, a weight [out, in], or a ring
    rank's keys and values (see Exchange)."""

    tensor: Tensor
    gradient: SharedGradient = field(default_factory=SharedGradient)

    @classmethod
    def of(cls, tensor: Tensor, exact: bool = True) -> "SharedTensor":
        """Shares a tensor, so that autograd gets the sum. exact: see SharedGradient."""
        gradient = SharedGradient(exact=exact)
        return cls(_CollectGradient.apply(tensor, gradient), gradient)

    def at(self, index: Tensor, columns: slice) -> Tensor:
        """These columns of these rows, each any number of times."""
        return _Rows.apply(self.tensor, index, columns, self.gradient)

    def product(self, x: Tensor) -> Tensor:
        """x [tokens, in] times the weight: [tokens, out]."""
        return _Product.apply(x, self.tensor, None, slice(None), self.gradient, False)

    def wide_product(self, x: Tensor, rows: slice, added: Tensor | None = None) -> Tensor:
        """x [tokens, in] times these rows of the weight, [tokens, rows] in fp32 or wider. added: of that shape and
        dtype; the product is added to it in place, not rounded before."""
        return _Product.apply(x, self.tensor, added, rows, self.gradient, True)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, index, columns, gradient):
        ctx.columns, ctx.gradient = columns, gradient
        ctx.save_for_backward(table, index)
        return table[:, columns].index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        table, index = ctx.saved_tensors
        total = ctx.gradient.like(table)
        total[:, ctx.columns].index_add_(0, index, grad.to(total.dtype))
        return None, None, None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, added, rows, gradient, wide):
        ctx.rows, ctx.gradient, ctx.adds = rows, gradient, added is not None
        ctx.save_for_backward(x, weight)
        if ctx.adds:
            ctx.mark_dirty(added)
        return wide_product(x, weight[rows].t(), added) if wide else F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        (x, weight), d_added = ctx.saved_tensors, grad if ctx.adds else None
        grad = grad.to(x.dtype)
        if ctx.needs_input_grad[1]:
            add_product(ctx.gradient.like(weight)[ctx.rows], grad, x)
        d_x = grad @ weight[ctx.rows] if ctx.needs_input_grad[0] else None
        return d_x, None, d_added, None, None, None


def wide_product(x: Tensor, columns: Tensor, added: Tensor | None = None) -> Tensor:
    """x [n, h] times columns [h, v] in fp32 or wider. added: see SharedTensor.wide_product."""
    exact = torch.promote_types(x.dtype, torch.float32)
    wide = {"out_dtype": exact} if x.device.type == "cuda" and x.dtype != exact else {}
    if not wide:
        x, columns = x.to(exact), columns.to(exact)
    return torch.mm(x, columns, **wide) if added is None else torch.addmm(added, x, columns, out=added, **wide)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the product of [n, v] and [n, h] to the total [v, h], which may be wider than these. On CUDA the product is
    not rounded in between."""
    if total.dtype == left.dtype:
        total.addmm_(left.t(), right)
    elif total.device.type == "cuda":
        torch.addmm(total, left.t(), right, out_dtype=total.dtype, out=total)
    else:
        total += left.t() @ right
