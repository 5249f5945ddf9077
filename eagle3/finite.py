"""Refuses weights that hold NaN or infinity, wherever weights are read."""

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
