"""Every change that this project makes to other libraries' objects, and every call to their private functions, with the
reason. Where an argument, a subclass or a public registration is enough, the project uses that instead."""

import copyreg
import datetime
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import deepspeed.ops
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.utils import is_invalid_grad_norm
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

READABLE = [LossScaler, ZeroStageEnum, fragment_address]  # classes that DeepSpeed's files need
FORCE, FORBID = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"  # torch accepts at most one of them


# Pickle members by value on every Python: 3.11.0 to 3.11.4 pickle them as getattr(class, name), and safe_loading must
# not allow a checkpoint to call getattr.
copyreg.pickle(ZeroStageEnum, lambda member: (ZeroStageEnum, (member.value,)))


def without_compiled_collective() -> None:
    """Stops DeepSpeed from compiling a shared-memory collective on CPUs. A machine may lack the compiler, and no
    argument turns the compilation off."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def set_timeout(groups: Iterable[ProcessGroup], timeout: datetime.timedelta) -> None:
    """Sets the timeout for collectives, including NCCL's first ones, which meet through the job's store. torch has no
    public function for this."""
    for group in groups:
        distributed_c10d._set_pg_timeout(timeout, group)
    distributed_c10d._get_default_store().set_timeout(timeout)


class StepOutcome(NamedTuple):
    """The outcome of an optimiser step."""

    norm: float  # gradient norm before clipping; nan if not finite
    skipped: bool  # whether the step was skipped, leaving everything unchanged


class NormLimit:
    """Makes an engine skip steps whose gradient norm is above `limit`, just as DeepSpeed skips steps whose norm is not
    finite. DeepSpeed has no setting for this, and chooses its optimizer's class itself."""

    def __init__(self, engine: DeepSpeedEngine, limit: float) -> None:
        self.optimizer, self.limit, self.last_norm = engine.optimizer, limit, math.nan
        self._norm = engine.optimizer.scaled_global_norm
        engine.optimizer.scaled_global_norm = self._limited  # called by the optimizer's `step`

    def taken(self) -> StepOutcome:
        """The outcome of the engine's latest step."""
        norm, self.last_norm = self.last_norm, math.nan
        return StepOutcome(norm, self.optimizer.overflow)

    def _limited(self, norm_type: int = 2) -> Tensor | float:
        norm = self._norm(norm_type)
        self.last_norm = math.nan if is_invalid_grad_norm(norm) else float(norm)
        return norm if self.last_norm <= self.limit else math.inf


@contextmanager
def collect_failures(engine: DeepSpeedEngine) -> Iterator[list[str]]:
    """Inside the block, failures to write an engine's checkpoint are collected instead of raised, so that no rank
    leaves the others waiting at the barriers between DeepSpeed's writes. (A subclass of the writer would replace the
    writer that the DeepSpeed file chooses.)"""
    failures: list[str] = []
    writer = engine.checkpoint_engine
    write = writer.save

    def save(state_dict: dict[str, Any], path: str) -> None:
        try:
            write(state_dict, path)
        except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as a RuntimeError
            failures.append(f"{path}: {error}")

    writer.save = save
    try:
        yield failures
    finally:
        del writer.save


@contextmanager
def plain_loads() -> Iterator[None]:
    """Inside the block, every torch.load in this process and its children accepts only plain data and the classes in
    READABLE, whatever its caller asks for. (DeepSpeed asks torch to accept anything that a file names. safe_loading
    explains why this matters.)"""
    environment = {name: os.environ.pop(name, None) for name in (FORCE, FORBID)}
    others = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    os.environ[FORCE] = "1"
    try:
        with torch.serialization.safe_globals(READABLE):
            yield
    finally:
        del os.environ[FORCE]
        os.environ.update({name: value for name, value in environment.items() if value is not None})
        torch.serialization.add_safe_globals(others)
