"""Weights that hold NaN or infinity are refused wherever they are read; copies to a device do not hold up the host."""

from collections.abc import Mapping

import torch
from torch import Tensor

from eagle3.errors import UserError


def is_finite(tensor: Tensor) -> bool:
    """Whether every number of a tensor of any dtype is finite. Reads the tensor once, and copies nothing."""
    return not tensor.numel() or not tensor.is_floating_point() or bool(torch.stack(tensor.aminmax()).isfinite().all())


def require_finite(tensors: Mapping[str, Tensor], origin: str, remedy: str) -> None:
    """Raises UserError, naming the first tensor that is not finite. origin: where the tensors were read."""
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise UserError(f"{origin}: {name} holds numbers that are not finite (NaN or infinity); {remedy}")


def pinned(tensor: Tensor) -> Tensor:
    """A tensor on the host in memory from which a GPU copies without holding up the host, if there is a GPU."""
    return tensor.pin_memory() if tensor.device.type == "cpu" and torch.cuda.is_available() else tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`. From the host to a GPU it goes through pinned memory, because a copy from other memory may
    wait for all that was launched before it."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # does nothing if it is pinned already
    return tensor.to(device, non_blocking=True)
