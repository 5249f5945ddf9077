"""All that this project changes in objects of other libraries, or calls of theirs though it is not public: each with its reason,
and looked for before a job relies on it. Where an argument, a subclass or a public registration will do, these serve instead."""

import copyreg
import datetime
import inspect
import math
import os
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NamedTuple

import deepspeed.ops
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import is_invalid_grad_norm
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from eagle3.errors import SharedUserError

FORCE, FORBID = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"  # torch takes one of them at most


# What is changed or called here, as module:attribute -> the first parameters of a function, or the class of an object.
RELIED = {
    "torch.distributed.distributed_c10d:_set_pg_timeout": ("timeout", "group"),
    "torch.distributed.distributed_c10d:_get_default_store": (),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.scaled_global_norm": ("self", "norm_type"),
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine:TorchCheckpointEngine.save": (
        "self",
        "state_dict",
        "path",
    ),
}
# By itself: DeepSpeed makes it when it is first asked for, by a look at the compilers of the machine.
OPERATIONS = {"deepspeed.ops:__compatible_ops__": dict}


def require_relied(relied: Mapping[str, Any] = RELIED) -> None:
    """Raises UserError where an installed library has another thing at one of these places, or nothing."""
    for place, shape in relied.items():
        try:
            found = pkgutil.resolve_name(place)
            seen = tuple(inspect.signature(found).parameters)[: len(shape)] if callable(found) else type(found)
        except (ImportError, AttributeError):
            seen = None
        if seen != shape:
            is_now = "is not there" if seen is None else f"has another shape ({seen}, not {shape})"
            attribute = place.replace(":", ".")
            library = attribute.partition(".")[0]
            raise SharedUserError(
                f"{library} {version(library)}: {attribute} {is_now}, which this project relies on; install the version that "
                "constraints/ names"
            )


# By its value on every Python: 3.11.0 to 3.11.4 pickle members as getattr(class, name), and getattr is nothing to let a checkpoint
# call that is read by safe_loading.
copyreg.pickle(ZeroStageEnum, lambda member: (ZeroStageEnum, (member.value,)))


def without_compiled_collective() -> None:
    """On CPUs DeepSpeed would compile a collective over shared memory, for which a machine may lack the compiler, and no argument
    stops it."""
    require_relied(OPERATIONS)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def set_timeout(groups: Iterable[ProcessGroup], timeout: datetime.timedelta) -> None:
    """Of collectives, and of NCCL's first ones, which meet through the job's store. Nothing public in torch does this."""
    for group in groups:
        distributed_c10d._set_pg_timeout(timeout, group)
    distributed_c10d._get_default_store().set_timeout(timeout)


class Taken(NamedTuple):
    """How an optimiser step went. norm: of the gradients before clipping, nan where it is not finite. skipped: nothing was
    changed."""

    norm: float
    skipped: bool


class NormLimit:
    """Makes an engine skip a step whose gradient norm is above `limit`, as DeepSpeed does where it is not finite: it has no
    setting for that, and chooses its optimizer's class by itself."""

    def __init__(self, engine: DeepSpeedEngine, limit: float) -> None:
        self.optimizer, self.limit, self.found = engine.optimizer, limit, math.nan
        self._norm = engine.optimizer.scaled_global_norm
        engine.optimizer.scaled_global_norm = self._limited  # which its `step` asks for

    def taken(self) -> Taken:
        """Of the step that the engine has just made."""
        norm, self.found = self.found, math.nan
        return Taken(norm, self.optimizer.overflow)

    def _limited(self, norm_type: int = 2) -> Tensor | float:
        norm = self._norm(norm_type)
        self.found = math.nan if is_invalid_grad_norm(norm) else float(norm)
        return norm if self.found <= self.limit else math.inf


@contextmanager
def noted_failures(engine: DeepSpeedEngine) -> Iterator[list[str]]:
    """Inside, what an engine's checkpoint cannot write is noted and not raised: no rank leaves the others in the barriers that
    DeepSpeed has between its writes. (A subclass of its writer would replace the one that the DeepSpeed file chooses.)"""
    failures: list[str] = []
    writer = engine.checkpoint_engine
    write = writer.save

    def noted(state_dict: dict[str, Any], path: str) -> None:
        try:
            write(state_dict, path)
        except (OSError, RuntimeError) as error:  # the second is how torch's own writer says that a disk is full
            failures.append(f"{path}: {error}")

    writer.save = noted
    try:
        yield failures
    finally:
        del writer.save


@contextmanager
def loads_restricted_to(readable: list[Any]) -> Iterator[None]:
    """Inside, every torch.load of this process, and of those it starts, takes plain data and what is `readable`, whatever its caller
    asks for: DeepSpeed asks for all that a file names. (safe_loading says why, and asks torch whether it obeys.)"""
    environment = {name: os.environ.pop(name, None) for name in (FORCE, FORBID)}
    others = torch.serialization.get_safe_globals()
    _allow(readable)
    os.environ[FORCE] = "1"
    try:
        yield
    finally:
        del os.environ[FORCE]
        os.environ.update({name: value for name, value in environment.items() if value is not None})
        _allow(others)


def _allow(names: list[Any]) -> None:
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(names)
