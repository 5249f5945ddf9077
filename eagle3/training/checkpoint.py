"""Checkpoints that are whole or not there: DeepSpeed's files, published by one rename, checked before they are read."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from eagle3.durable import flush, publish, write_text
from eagle3.errors import SharedUserError

MANIFEST = "manifest.json"


class Resumed(NamedTuple):
    """step: optimiser steps done. progress: what the trainer had asked to keep."""

    step: int
    progress: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run: the last `keep` and the best. Every method is called by every rank.

    Loading raises UserError when a checkpoint was written by another number of processes or tensor-parallel ranks.
    """

    def __init__(self, folder: Path, keep: int, warn: Callable[[str], None]) -> None:
        self.folder, self.keep, self.warn = folder, keep, warn

    def save(self, engine: DeepSpeedEngine, step: int, progress: dict[str, Any], best_step: int | None) -> None:
        """Write the state after `step` optimiser steps (weights, optimiser, schedule, random generators, `progress`)."""
        name = _name(step)
        partial = self.folder / f"{name}.partial"
        if dist.get_rank() == 0 and partial.exists():
            shutil.rmtree(partial)
        dist.barrier()
        engine.save_checkpoint(
            str(self.folder),
            tag=partial.name,
            client_state={"step": step, "progress": progress, **_random_state()},
            save_latest=False,
            exclude_frozen_parameters=True,
        )
        dist.barrier()
        if dist.get_rank() == 0:
            files = sorted(path for path in partial.rglob("*") if path.is_file())
            for path in files:
                flush(path)
            manifest = {str(path.relative_to(partial)): _digest(path) for path in files}
            write_text(partial / MANIFEST, json.dumps(manifest, indent=1))
            final = self.folder / name
            if final.exists():  # the same step of a run that was resumed from before it
                shutil.rmtree(final)
            publish(partial, final)
            self._prune(best_step)
        dist.barrier()

    def load_newest(self, engine: DeepSpeedEngine) -> Resumed | None:
        """Load the newest whole checkpoint; broken ones are passed over with a warning. None where there is none."""
        for path in reversed(self._all()):
            loaded = self._load(engine, path, "passed over for the checkpoint before it")
            if loaded:
                return loaded
        return None

    def load_whole(self, engine: DeepSpeedEngine, step: int) -> Resumed | None:
        """Load the checkpoint of one step; None, with a warning, where it is broken."""
        return self._load(engine, self.folder / _name(step), "the last weights serve instead")

    def _load(self, engine: DeepSpeedEngine, path: Path, otherwise: str) -> Resumed | None:
        problem = _problem(path)
        if problem is not None:
            self.warn(f"{path}: {problem}; {otherwise}")
            return None
        written, here = _sizes(path), Sizes(dist.get_world_size(), engine.mpu.get_model_parallel_world_size())
        if written != here:
            raise SharedUserError(
                f"{path}: written by {written.processes} processes (parallelism.tensor {written.tensor}), this job has "
                f"{here.processes} (parallelism.tensor {here.tensor}); start as many as before, in the same way"
            )
        loaded, state = engine.load_checkpoint(str(self.folder), tag=path.name, load_module_strict=False)
        assert loaded is not None, f"{path} was checked and could not be loaded"
        _set_random_state(state)
        return Resumed(state["step"], state["progress"])

    def _all(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*") if path.suffix != ".partial")

    def _prune(self, best_step: int | None) -> None:
        for path in self._all()[: -self.keep]:
            if path.name != (None if best_step is None else _name(best_step)):
                shutil.rmtree(path)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _problem(path: Path) -> str | None:
    """Why the checkpoint is not whole, or None."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{MANIFEST} is missing or damaged"
    for name, digest in manifest.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if _digest(path / name) != digest:
            return f"{name} is damaged"
    return None


class Sizes(NamedTuple):
    """What DeepSpeed's files cannot be read with another number of."""

    processes: int
    tensor: int


def _sizes(path: Path) -> Sizes:
    return Sizes(len(list(path.glob("*_optim_states.pt"))), len(list(path.glob("mp_rank_*_model_states.pt"))))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": cuda,
        "python_rng": random.getstate(),
        "numpy_rng": np.random.get_state(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch_rng"].cpu())
    if state["cuda_rng"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda_rng"].cpu())
    random.setstate(state["python_rng"])
    np.random.set_state(state["numpy_rng"])
