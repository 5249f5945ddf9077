"""Reads checkpoints without running code from them, whoever wrote them.

DeepSpeed keeps checkpoints as pickles and reads them, its conversion included, by `torch.load(...,
weights_only=False)`, with which a file runs whatever it names. The manifest's digests do not help: who plants a file
writes its digest, too. So every load is restricted to plain data: by TORCH_FORCE_WEIGHTS_ONLY_LOAD, which torch reads at
each load and which overrides what its caller passed, and by a list of the few classes that DeepSpeed's files need.
Nothing else is on that list while a checkpoint is read. Megatron-core adds some classes for the whole process, among them
numpy's array, and an array of objects over bytes of a file's choice is a pointer of the file's choice.

    python -m eagle3.training.safe_loading --input_folder ... --output_folder ...

is DeepSpeed's conversion to a universal checkpoint, guarded in the same way.
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
    """Stands for numpy's dtype in the random state of checkpoints that keep it as an array."""

    def __init__(self, code: str, *_: Any) -> None:
        if code != UINT32:
            raise pickle.UnpicklingError(f"an array of {code!r}")

    def __setstate__(self, state: object) -> None:
        """Byte order and flags; numpy itself would believe them."""


class OldArray(list[int]):
    """Stands for numpy's array there: its numbers."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self[:] = np.frombuffer(state[-1], f"<{UINT32}").tolist()


def _old_array(*_: Any) -> OldArray:
    """Stands for the function by which numpy makes the array that is then filled."""
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
    """Inside, every torch.load of this process, and of those it starts, takes plain data and what is READABLE, whatever
    its caller asks for. Raises UserError where this torch does not obey."""
    with loads_restricted_to(READABLE):
        require_obedience()
        yield


def require_plain(folder: Path) -> None:
    """Raises UserError where a checkpoint's file holds more than plain data. Reads what the files say of their tensors,
    not the tensors. One rank asks before all of them load: each reads a part, and one that refused it would leave the
    others in DeepSpeed's collectives."""
    with plain_loads():
        for file in sorted(folder.rglob("*.pt")):
            try:
                torch.load(file, map_location="cpu", mmap=True)
            except Exception as error:  # the file chooses which
                raise UserError(
                    f"{file}: is not loaded, for it holds more than plain data ({_unreadable(file, error)}) and could "
                    "run code; resume from a checkpoint that training wrote, or start afresh without --resume"
                ) from error


def _unreadable(file: Path, error: Exception) -> str:
    with suppress(Exception):  # it reads the file by rules of its own
        if named := torch.serialization.get_unsafe_globals_in_checkpoint(file):
            return ", ".join(sorted(named))
    return type(error).__name__


def require_obedience() -> None:
    """Raises UserError where torch.load unpickles what its caller allows, that is, outside plain_loads."""
    harmless = io.BytesIO()
    torch.save(Fraction(1, 2), harmless)  # of a class that is on no list
    harmless.seek(0)
    with suppress(pickle.UnpicklingError):
        torch.load(harmless, weights_only=False)
        raise UserError(
            f"torch {torch.__version__}: does not obey {FORCE}, so that a checkpoint could run code; install the "
            "version that constraints/ names"
        )


def convert() -> None:
    """DeepSpeed's own command, with its own options."""
    from deepspeed.checkpoint import ds_to_universal  # here, for only the conversion's process needs it

    with plain_loads():
        ds_to_universal.main(ds_to_universal.parse_arguments())


if __name__ == "__main__":
    convert()
