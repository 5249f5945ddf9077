"""The list of a checkpoint's files, with the run that wrote it. Stored with the files, and checked before any of them
is loaded."""

import json
import re
from collections.abc import Iterable
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, BaseModel, StringConstraints

from eagle3.durable import file_digest, write_text

MANIFEST = "manifest.json"
# DeepSpeed's file names. Their numbers are the tensor-parallel rank, and the data-parallel and tensor-parallel ranks.
MODEL_STATES = re.compile(r"mp_rank_(\d{2,6})_model_states\.pt")
OPTIMIZER_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{2,6})_optim_states\.pt")


def _inside(name: str) -> str:
    """Accepts only paths below the checkpoint."""
    if name.startswith("/") or ".." in PurePosixPath(name).parts:
        raise ValueError("leads out of the checkpoint")
    return name


class CheckpointManifest(BaseModel, strict=True):
    """The list of a checkpoint's files and their digests."""

    run: Annotated[str, StringConstraints(pattern="^[0-9a-f]{32}$")]  # identity of the run that wrote the checkpoint
    # file name -> SHA-256
    files: dict[Annotated[str, AfterValidator(_inside)], Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]]

    def write(self, checkpoint: Path) -> None:
        write_text(checkpoint / MANIFEST, json.dumps(self.model_dump(), indent=1))

    @classmethod
    def read(cls, checkpoint: Path) -> "CheckpointManifest | None":
        """Reads a checkpoint's manifest. None if it is missing or damaged, or does not list every file that a
        checkpoint needs."""
        if not (checkpoint / MANIFEST).is_file():
            return None
        try:
            manifest = cls.model_validate(json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError):
            return None
        return manifest if _complete(manifest.files) else None

    def problem(self, checkpoint: Path, run: str) -> str | None:
        """Why `run` must not load the checkpoint, or None."""
        if self.run != run:
            return f"written by run {self.run}, this is run {run}"
        try:
            for name, expected in self.files.items():
                if not (checkpoint / name).is_file():
                    return f"{name} is missing"
                if file_digest(checkpoint / name) != expected:
                    return f"{name} is damaged"
            # File systems and desktops leave hidden files (.nfs..., .DS_Store), which DeepSpeed ignores.
            present = {path for path in checkpoint.rglob("*") if path.is_file() and not path.name.startswith(".")}
        except (OSError, ValueError) as error:  # ValueError: a name is not a valid file name
            return f"cannot be read ({error})"
        unknown = {path.relative_to(checkpoint).as_posix() for path in present} - {*self.files, MANIFEST}
        return f"{min(unknown)} is not in {MANIFEST}" if unknown else None


def _complete(names: Iterable[str]) -> bool:
    """Whether these are all the files of a job, whatever its number of processes: model states for each tensor-parallel
    rank, and optimizer states for each combination of data-parallel and tensor-parallel rank."""
    tensor = {int(match[1]) for match in map(MODEL_STATES.fullmatch, names) if match}
    ranks = {(int(match[1]), int(match[2])) for match in map(OPTIMIZER_STATES.fullmatch, names) if match}
    data = {rank for rank, _ in ranks}
    return bool(ranks) and tensor == {*range(len(tensor))} and ranks == {*product(range(len(data)), tensor)}


def finished(checkpoints: Path) -> list[Path]:
    """The published checkpoints in this folder, oldest first."""
    return sorted(checkpoints.glob("step-*[0-9]"))
