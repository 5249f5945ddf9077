"""Reads checkpoints without running code from them, no matter who wrote them.

DeepSpeed stores checkpoints as pickles. It reads and converts them with `torch.load(..., weights_only=False)`, which
lets a file run any code that it names. The manifest's digests do not help: an attacker who plants a file can write its
digest too. So every load is restricted to plain data (patches.plain_loads), by two means:
- TORCH_FORCE_WEIGHTS_ONLY_LOAD, which torch reads at each load and which overrides what the caller passed;
- a list of the few classes that DeepSpeed's files need. While a checkpoint is read, nothing else is on that list, not
  even the classes that Megatron-core adds for the whole process. One of these is numpy's array; an array of objects
  whose bytes come from a file is a pointer that the file chooses.

This runs DeepSpeed's conversion to a universal checkpoint under the same guard:

    python -m eagle3.training.safe_loading --input_folder ... --output_folder ...
"""

from contextlib import suppress
from pathlib import Path

import torch

from eagle3.errors import UserError
from eagle3.patches import plain_loads


def require_plain(folder: Path) -> None:
    """Raises UserError if a file of a checkpoint holds more than plain data. Reads descriptions of the tensors, not
    their values. One rank calls this before all ranks load: each rank loads only a part, and if one rank refused its
    part, the others would be stuck in DeepSpeed's collectives."""
    with plain_loads():
        for file in sorted(folder.rglob("*.pt")):
            try:
                torch.load(file, map_location="cpu", mmap=True)
            except Exception as error:  # the exception depends on the file's contents
                raise UserError(
                    f"{file}: is not loaded, since it holds more than plain data ({_unreadable(file, error)}) and "
                    "could run code; resume from a checkpoint that training wrote, or start afresh without --resume"
                ) from error


def _unreadable(file: Path, error: Exception) -> str:
    with suppress(Exception):  # torch's function reads the file anew, and may fail too
        if names := torch.serialization.get_unsafe_globals_in_checkpoint(file):
            return ", ".join(sorted(names))
    return type(error).__name__


def convert() -> None:
    """Runs DeepSpeed's own command, with its own options."""
    from deepspeed.checkpoint import ds_to_universal  # imported here, because only the converting process needs it

    with plain_loads():
        ds_to_universal.main(ds_to_universal.parse_arguments())


if __name__ == "__main__":
    convert()
