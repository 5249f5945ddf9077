"""Checkpoints that are either whole or absent: DeepSpeed's files, published by a single rename and verified before
use."""

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from pydantic import BaseModel, StringConstraints, ValidationError

from eagle3.console import waiting
from eagle3.durable import file_digest, flush, publish, write_text
from eagle3.errors import SharedUserError, UserError, shown
from eagle3.parallel.topology import agreed
from eagle3.patches import collect_failures, plain_loads
from eagle3.tensors import is_finite
from eagle3.training import safe_loading
from eagle3.training.run_folder import finished
from eagle3.training.safe_loading import require_plain

# How long the first rank waits to see the other nodes' files, since network file systems cache listings.
SEEN_SECONDS = 30.0
MANIFEST = "manifest.json"

# What a loaded checkpoint holds beside the engine's state: the number of optimiser steps done, and the trainer's own
# record.
Resumed = tuple[int, dict[str, Any]]
# What DeepSpeed's files depend on, and can only be read with: the numbers of processes and of tensor-parallel ranks.
Sizes = tuple[int, int]


class CheckpointManifest(BaseModel, strict=True):
    """The list of a checkpoint's files. Stored with them, and checked before any of them is loaded."""

    run: Annotated[str, StringConstraints(pattern="^[0-9a-f]{32}$")]  # identity of the run that wrote the checkpoint
    files: dict[str, Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]]  # name -> SHA-256


class Checkpoints:
    """The checkpoints of one run: the last `keep`, and the best one. Every rank calls every method.

    With an engine that was started with `load_universal`, checkpoints from any number of processes and tensor-parallel
    ranks can be loaded; they are converted first. With any other engine, loading raises UserError unless the
    checkpoint's numbers are the engine's own.

    run: identity of the run. A checkpoint of a different run is never loaded.
    say: called with a line if something takes long.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        run: str,
        warn: Callable[[str], None],
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.folder, self.keep, self.run, self.warn, self.say = folder, keep, run, warn, say

    def path(self, step: int) -> Path:
        """Path of the checkpoint of `step`, whether it exists or not."""
        return self.folder / _name(step)

    def save(self, engine: DeepSpeedEngine, step: int, progress: dict[str, Any], best_step: int | None) -> None:
        """Writes the state after `step` optimiser steps: weights, optimiser, schedule, random generators and
        `progress`.

        If that fails, raises UserError on every rank and leaves older checkpoints as they are.
        """
        with waiting(self.say, f"writing the checkpoint of step {step}"):
            partial, first = self.folder / f"{_name(step)}.partial", dist.get_rank() == 0
            _remove(partial if first else None)
            dist.barrier()
            state = {"step": step, "progress": progress, **_random_state()}
            with collect_failures(engine) as failures:
                try:
                    engine.save_checkpoint(
                        str(self.folder),
                        partial.name,
                        client_state=state,
                        save_latest=False,
                        exclude_frozen_parameters=True,
                    )
                except OSError as error:  # from the first rank's last write, for which the other ranks are waiting
                    failures.append(str(error))
                    dist.barrier()

            def require_written() -> None:
                if failures:
                    raise UserError(failures[0])

            try:
                agreed(require_written)  # publish only once every rank has written its part
                agreed(lambda: self._finish(partial, _sizes_of(engine), step, best_step), first)
            except UserError as error:
                free = shutil.disk_usage(self.folder).free / 2**30
                dist.barrier()
                _remove(partial if first else None)
                raise SharedUserError(
                    f"{self.folder}: the checkpoint of step {step} cannot be written ({error}; {free:.3g} GiB are "
                    "free); the ones before it are whole: free space, or lower training.keep_checkpoints, and continue "
                    "with --resume"
                ) from error

    def _finish(self, partial: Path, sizes: Sizes, step: int, best_step: int | None) -> None:
        """Publishes the files of all ranks under their final name, then removes checkpoints that are no longer kept."""
        _await_files(partial, sizes)
        try:
            files = sorted(path for path in partial.rglob("*") if path.is_file())
            for path in files:
                flush(path)
            digests = {path.relative_to(partial).as_posix(): file_digest(path) for path in files}
            manifest = CheckpointManifest(run=self.run, files=digests)
            write_text(partial / MANIFEST, manifest.model_dump_json(indent=1))
            _remove(self.path(step))  # left by a run that was resumed from an earlier step
            publish(partial, self.path(step))
        except OSError as error:
            raise UserError(str(error)) from error
        for path in finished(self.folder)[: -self.keep]:
            if best_step is None or path != self.path(best_step):
                try:
                    shutil.rmtree(path)
                except OSError as error:
                    self.warn(f"{path}: cannot be removed ({error}); remove it by hand")

    def load_newest(self, engine: DeepSpeedEngine) -> Resumed | None:
        """Loads this run's newest intact checkpoint; returns None if there are no checkpoints. Newer ones that are
        damaged or belong to a different run are renamed, with a warning, so that they do not count towards `keep`.
        Raises UserError if there are checkpoints but none can be loaded."""
        problems: dict[Path, str] = {}
        for path in reversed(finished(self.folder)):
            if (problem := self._problem(path)) is None:
                self._set_aside(problems)
                return self._load(engine, path)
            problems[path] = problem
        if problems:
            reasons = "; ".join(f"{path.name}: {problem}" for path, problem in problems.items())
            raise SharedUserError(
                f"{self.folder}: no intact checkpoint of this run ({reasons}); put one back, or start afresh without "
                "--resume"
            )
        return None

    def _set_aside(self, problems: dict[Path, str]) -> None:
        dist.barrier()  # wait until every rank has looked
        for path, problem in problems.items():
            aside = path.with_name(f"unusable-{path.name}")
            self.warn(f"{path}: {problem}; renamed to {aside.name}; the checkpoint before it is used")
            if dist.get_rank() == 0:
                _remove(aside)
                path.rename(aside)
        dist.barrier()

    def load_whole(self, engine: DeepSpeedEngine, step: int) -> Resumed | None:
        """Loads the checkpoint of one step. If it is damaged or a different run's, warns and returns None."""
        path = self.path(step)
        if problem := self._problem(path):
            self.warn(f"{path}: {problem}; the last weights are used instead")
            return None
        return self._load(engine, path)

    def _problem(self, path: Path) -> str | None:
        """Why this checkpoint cannot be loaded, or None if it can."""
        with waiting(self.say, f"checking {path}"):
            try:
                manifest = CheckpointManifest.model_validate_json((path / MANIFEST).read_bytes())
            except (FileNotFoundError, NotADirectoryError, ValidationError):
                return f"{MANIFEST} is missing or damaged"
            if manifest.run != self.run:
                return f"written by run {manifest.run}, this is run {self.run}"
            try:
                for name, expected in manifest.files.items():
                    if not (path / name).is_file():
                        return f"{name} is missing"
                    if file_digest(path / name) != expected:
                        return f"{name} is damaged"
                # File systems and desktops leave hidden files (.nfs..., .DS_Store), which DeepSpeed ignores.
                present = {file for file in path.rglob("*") if file.is_file() and not file.name.startswith(".")}
            except OSError as error:
                return f"cannot be read ({error})"
            unknown = {file.relative_to(path).as_posix() for file in present} - {*manifest.files, MANIFEST}
            return f"{min(unknown)} is not in {MANIFEST}" if unknown else None

    def _load(self, engine: DeepSpeedEngine, path: Path) -> Resumed:
        agreed(lambda: require_plain(path), dist.get_rank() == 0)
        if engine.load_universal_checkpoint():
            with (
                waiting(self.say, f"loading {path}, written by another number of processes"),
                _converted(path) as universal,
            ):
                return _read(engine, universal, path)
        if (written := _sizes_in(path)) != (here := _sizes_of(engine)):
            raise SharedUserError(
                f"{path}: written by {written[0]} processes (parallelism.tensor {written[1]}), this job has {here[0]} "
                f"(parallelism.tensor {here[1]}); start as many as before, in the same way"
            )
        with waiting(self.say, f"loading {path}"):
            return _read(engine, path, path)


def written_otherwise(folder: Path, processes: int, tensor: int) -> bool:
    """Whether `folder` has a checkpoint written by a different number of processes or tensor-parallel ranks."""
    return any(_sizes_in(path) != (processes, tensor) for path in finished(folder))


def _read(engine: DeepSpeedEngine, folder: Path, checkpoint: Path) -> Resumed:
    """Loads `folder`, which is the checkpoint itself or its conversion. Raises UserError on every rank if any rank's
    files hold data that training does not write."""

    def read() -> Resumed:
        try:
            with plain_loads():
                loaded, state = engine.load_checkpoint(str(folder.parent), tag=folder.name, load_module_strict=False)
            assert loaded is not None, "DeepSpeed loaded nothing"
            _require_fit(engine)
            _set_random_state(state)
            step = state["step"]
            if not isinstance(step, int) or _name(step) != checkpoint.name:
                raise ValueError(f"step: {shown(step)}")
            return step, state["progress"]
        except (MemoryError, torch.OutOfMemoryError, UserError):
            raise
        except Exception as error:  # the exception depends on the file's contents
            raise other_data(checkpoint, error) from error

    return agreed(read)


def other_data(checkpoint: Path, error: Exception) -> UserError:
    """The error for a checkpoint whose files are intact and safe, but hold data that training does not write."""
    return UserError(
        f"{checkpoint}: holds other data than training writes ({type(error).__name__}: {str(error):.300}); move "
        "this folder away, so that --resume takes the checkpoint before it, or start afresh without --resume"
    )


def _require_fit(engine: DeepSpeedEngine) -> None:
    """Raises ValueError for moments, taken unchecked from a file, with which the next step would fail or go wrong."""
    for weight, state in engine.optimizer.optimizer.state.items():  # empty if every step so far was skipped
        if state.keys() != {"step", "exp_avg", "exp_avg_sq"}:
            raise ValueError(f"optimizer state: {shown([*state])}")
        moments = [state["exp_avg"], state["exp_avg_sq"]]
        if any(moment.shape != weight.shape for moment in moments):
            raise ValueError(f"moments of {[list(each.shape) for each in moments]} for {list(weight.shape)} weights")
        if not all(map(is_finite, (weight, *moments))):
            raise ValueError("weights or optimizer state that are not finite")


@contextmanager
def _converted(path: Path) -> Iterator[Path]:
    """Converts a checkpoint to DeepSpeed's universal format, for the duration of the block. If that fails, raises
    UserError on every rank."""
    folder = path.parent / "universal.partial"
    universal, first = folder / path.name, dist.get_rank() == 0

    def convert() -> None:
        _remove(folder)
        folder.mkdir()
        command = (
            *(sys.executable, "-m", safe_loading.__name__),
            *("--input_folder", str(path), "--output_folder", str(universal)),
            *("--num_extract_workers", "1", "--num_merge_workers", "1"),  # do not start further processes
        )
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            error = (process.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise UserError(
                f"{path}: cannot be converted for this number of processes ({error}); check whether the disk is full, "
                "start as many processes as wrote it, with the same parallelism.tensor, or move this folder away, so "
                "that --resume takes the checkpoint before it"
            )

    try:
        agreed(convert, first)
        yield universal
        dist.barrier()  # wait until every rank has read it
    finally:
        _remove(folder if first else None)


def _remove(folder: Path | None) -> None:
    if folder and folder.exists():
        shutil.rmtree(folder)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _await_files(partial: Path, sizes: Sizes) -> None:
    """Waits until this node sees all nodes' files, which must all be in the manifest. Raises UserError if they do not
    appear."""
    until = time.monotonic() + SEEN_SECONDS
    while (seen := _sizes_in(partial)) != sizes:
        if time.monotonic() > until:
            raise UserError(
                f"{partial}: the first rank sees files of {seen[0]} of {sizes[0]} processes; all nodes "
                "must share this folder"
            )
        time.sleep(0.1)


def _sizes_of(engine: DeepSpeedEngine) -> Sizes:
    return dist.get_world_size(), engine.mpu.get_model_parallel_world_size()


def _sizes_in(checkpoint: Path) -> Sizes:
    return len(list(checkpoint.glob("*_optim_states.pt"))), len(list(checkpoint.glob("mp_rank_*_model_states.pt")))


def _random_state() -> dict[str, Any]:
    name, numbers, *rest = np.random.get_state()
    return {
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python_rng": random.getstate(),
        "numpy_rng": (name, numbers.tolist(), *rest),  # an array is not plain data, and would not be read back
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch_rng"].cpu())
    if state["cuda_rng"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda_rng"].cpu())
    random.setstate(state["python_rng"])
    name, numbers, *rest = state["numpy_rng"]
    np.random.set_state((name, np.array(numbers, np.uint32), *rest))
