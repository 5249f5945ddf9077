"""Copies from the host to a device that do not make the host wait for the device."""

import torch
from torch import Tensor


def pinned(tensor: Tensor) -> Tensor:
    """A tensor on the host in memory from which a GPU copies without holding up the host, if there is a GPU."""
    return tensor.pin_memory() if tensor.device.type == "cpu" and torch.cuda.is_available() else tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`. From the host to a GPU it goes through pinned memory, because a copy from other memory may
    wait for all that was launched before it."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # does nothing if it is pinned already
    return tensor.to(device, non_blocking=True)
