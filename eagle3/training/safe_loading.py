"""Reads checkpoints without running code from them, whoever wrote them.

DeepSpeed stores checkpoints as pickles and reads them, also when it converts them, by `torch.load(...,
weights_only=False)`, which lets a file run whatever it names. The manifest's digests do not help, since whoever plants
a file can write its digest too. So every load is restricted to plain data by two means:
- TORCH_FORCE_WEIGHTS_ONLY_LOAD, which torch reads at each load and which overrides what the caller passed;
- a list of the few classes that DeepSpeed's files need. Nothing else is on that list while a checkpoint is read.
  Megatron-core adds some classes for the whole process, among them numpy's array, and an array of objects over bytes
  that a file chooses is a pointer that the file chooses.

DeepSpeed's conversion to a universal checkpoint, guarded in the same way, is

    python -m eagle3.training.safe_loading --input_folder ... --output_folder ...
"""

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from eagle3.errors import UserError
from eagle3.patches import FORCE, loads_restricted_to

UINT32 = "u4"
Readable = Callable[..., Any] | tuple[Callable[..., Any], str]


class OldDtype:
    """Stands in for numpy's dtype in the random state of checkpoints that store it as an array."""

    def __init__(self, code: str, *_: Any) -> None:
        if code != UINT32:
            raise pickle.UnpicklingError(f"an array of {code!r}")

    def __setstate__(self, state: object) -> None:
        """Ignores byte order and flags, which numpy itself would believe."""


class OldArray(list[int]):
    """Stands in for numpy's array there, and keeps its numbers."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self[:] = np.frombuffer(state[-1], f"<{UINT32}").tolist()


def _old_array(*_: Any) -> OldArray:
    """Stands in for the function that makes numpy's array before it is filled."""
    return OldArray()


READABLE: list[Readable] = [
    LossScaler,
    ZeroStageEnum,
    fragment_address,
    (OldDtype, "numpy.dtype"),
    (OldArray, "numpy.ndarray"),
    (_old_array, "numpy.core.multiarray._reconstruct"),
    (_old_array, "numpy._core.multiarray._reconstruct"),
]


@contextmanager
def plain_loads() -> Iterator[None]:
    """Inside, every torch.load of this process and its children only accepts plain data and what is READABLE, whatever
    its caller asks for. Raises UserError if this torch does not obey."""
    with loads_restricted_to(READABLE):
        require_obedience()
        yield


def require_plain(folder: Path) -> None:
    """Raises UserError if a checkpoint's file holds more than plain data. Reads what the files say about their tensors,
    not the tensors themselves. One rank calls this before all of them load: each reads only a part, and a rank that
    refused its part would leave the others in DeepSpeed's collectives."""
    with plain_loads():
        for file in sorted(folder.rglob("*.pt")):
            try:
                torch.load(file, map_location="cpu", mmap=True)
            except Exception as error:  # what is in the file decides which exception comes
                raise UserError(
                    f"{file}: is not loaded, since it holds more than plain data ({_unreadable(file, error)}) and "
                    "could run code; resume from a checkpoint that training wrote, or start afresh without --resume"
                ) from error


def _unreadable(file: Path, error: Exception) -> str:
    with suppress(Exception):  # this function reads the file by rules of its own
        if names := torch.serialization.get_unsafe_globals_in_checkpoint(file):
            return ", ".join(sorted(names))
    return type(error).__name__


def require_obedience() -> None:
    """Raises UserError if torch.load still unpickles whatever its caller allows, as it does outside plain_loads."""
    harmless = io.BytesIO()
    torch.save(Fraction(1, 2), harmless)  # a class that is on no list
    harmless.seek(0)
    with suppress(pickle.UnpicklingError):
        torch.load(harmless, weights_only=False)
        raise UserError(
            f"torch {torch.__version__}: does not obey {FORCE}, so a checkpoint could run code; install the version "
            "that constraints/ names"
        )


def convert() -> None:
    """Runs DeepSpeed's own command, with its own options."""
    from deepspeed.checkpoint import ds_to_universal  # imported here, since only the conversion's process needs it

    with plain_loads():
        ds_to_universal.main(ds_to_universal.parse_arguments())


if __name__ == "__main__":
    convert()
