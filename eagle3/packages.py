"""The versions of what is installed."""

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("torch", "deepspeed", "megatron-core", "transformers", "safetensors")  # whatever computes
ABSENT = "absent"


def versions(packages: Sequence[str]) -> dict[str, str]:
    """The versions of Python, of these packages as installed here and, on a machine with GPUs, of NCCL."""
    traits = {"python": platform.python_version()}
    for package in packages:
        try:
            traits[package] = version(package)
        except PackageNotFoundError:
            traits[package] = ABSENT
    if torch.cuda.is_available():
        traits["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return traits
