"""The list of a checkpoint's files, with the run that wrote it. Stored with the files, and checked before any of them
is loaded."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, StringConstraints, ValidationError

from eagle3.durable import file_digest, write_text

MANIFEST = "manifest.json"


class CheckpointManifest(BaseModel, strict=True):
    """The list of a checkpoint's files and their digests."""

    run: Annotated[str, StringConstraints(pattern="^[0-9a-f]{32}$")]  # identity of the run that wrote the checkpoint
    files: dict[str, Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]]  # name -> SHA-256

    def write(self, checkpoint: Path) -> None:
        write_text(checkpoint / MANIFEST, self.model_dump_json(indent=1))

    @classmethod
    def read(cls, checkpoint: Path) -> "CheckpointManifest | None":
        """Reads a checkpoint's manifest. None if it is missing or damaged. Raises OSError."""
        with suppress(FileNotFoundError, NotADirectoryError, ValidationError):
            return cls.model_validate_json((checkpoint / MANIFEST).read_bytes())
        return None

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
        except OSError as error:
            return f"cannot be read ({error})"
        unknown = {path.relative_to(checkpoint).as_posix() for path in present} - {*self.files, MANIFEST}
        return f"{min(unknown)} is not in {MANIFEST}" if unknown else None


def finished(checkpoints: Path) -> list[Path]:
    """The published checkpoints in this folder, oldest first."""
    return sorted(checkpoints.glob("step-*[0-9]"))
