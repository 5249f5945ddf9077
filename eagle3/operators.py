"""This project's own operators of torch, each of which a trace sees as one call, and the start of Triton kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensor


def operator(function: Callable, fake: Callable | None = None) -> torch._ops.OpOverload:
    """Makes a function torch's operator `eagle3::NAME`. It may not change its arguments or return one of them, and is
    called where autograd is off: a backward pass through it only warns. fake: what it does with tensors without data,
    if that is something else.

    torch.library.custom_op checks all this in each call, which costs the host more time than most of these functions.
    """
    name = f"eagle3::{function.__name__}"
    torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(name, "default", function)
    torch.library.register_fake(name, fake or function)
    return getattr(torch.ops.eagle3, function.__name__).default


def launch(kernel: Any, grid: Sequence[int], first: torch.Tensor, *arguments: Any, **constants: int) -> None:
    """Starts a Triton kernel, whose first argument is a tensor, unless there is nothing to do or no data."""
    if all(grid) and not isinstance(first, FakeTensor):
        kernel[grid](first, *arguments, **constants)
