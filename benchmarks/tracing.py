"""A dispatch mode over fake CUDA tensors that records what code launches, computes, moves and holds, place by place.

Fake tensors carry shapes, number formats and devices, but no data: every operator is checked by its meta kernel, and
whatever would wait for the device is noted. torch must be a CUDA build; no GPU is needed (tests/cuda_build).
"""

import sys
import weakref
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from roofline import FREE, Call, Cost, Device, cost_of
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

ALLOCATION = 512  # bytes; the CUDA allocator rounds up to multiples of it
PACKAGES = {"/eagle3/": "", "/megatron/core/": "mcore ", "/deepspeed/": "deepspeed "}


@dataclass
class Row:
    """What one place has cost so far."""

    calls: int = 0
    launches: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0  # of its kernels, by the roofline


@dataclass
class Timeline:
    """The host launches kernels one after another; the GPU runs them in that order and waits where the host is
    late."""

    host: float = 0.0
    gpu: float = 0.0
    waited: float = 0.0  # seconds for which the GPU had nothing to do

    def launch(self, cost: Cost, device: Device) -> None:
        each = cost.seconds(device) / max(1, cost.launches)
        for _ in range(cost.launches):
            self.host += device.launch
            start = max(self.host, self.gpu)
            self.waited += start - self.gpu
            self.gpu = start + each

    def synchronise(self) -> float:
        """Wait until host and GPU are done. Returns the time."""
        self.host = self.gpu = max(self.host, self.gpu)
        return self.gpu


@dataclass
class Trace:
    """What was recorded."""

    rows: dict[tuple[str, str, str, str], Row] = field(
        default_factory=lambda: defaultdict(Row)
    )  # phase, place, op, kind
    seconds: Counter[str] = field(default_factory=Counter)  # of the timeline, by phase
    waits: Counter[str] = field(default_factory=Counter)  # places that wait for the device
    transfers: Counter[tuple[str, str]] = field(
        default_factory=Counter
    )  # (kind, place) -> bytes between host and device
    peak: int = 0  # bytes of device memory
    peak_place: str = ""

    def total(self, phases: tuple[str, ...] = ("forward", "backward", "optimiser")) -> Row:
        whole = Row()
        for (phase, *_), row in self.rows.items():
            if phase in phases:
                for name, value in vars(row).items():
                    setattr(whole, name, getattr(whole, name) + value)
        return whole


class Tracer(TorchDispatchMode):
    """Records what runs under it, as if `device` ran it."""

    def __init__(self, fake: FakeTensorMode, device: Device) -> None:
        super().__init__()
        self.fake, self.device = fake, device
        self.trace, self.timeline = Trace(), Timeline()
        self.phase, self.live = "setup", 0
        self._storages: dict[int, int] = {}

    @contextmanager
    def measure(self, phase: str):
        """Inside the block, what runs counts towards `phase`. The device is idle at the block's start and end."""
        before, began = self.phase, self.timeline.synchronise()
        self.phase = phase
        yield
        self.trace.seconds[phase] += self.timeline.synchronise() - began
        self.phase = before

    def watch(self, tensor: Tensor) -> None:
        """Counts a device tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        if tensor.device.type != "cuda" or storage._cdata in self._storages:
            return
        size = -(-storage.nbytes() // ALLOCATION) * ALLOCATION
        self._storages[storage._cdata] = size
        self.live += size
        if self.live > self.trace.peak:
            self.trace.peak, self.trace.peak_place = self.live, place()
        weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, storage: int) -> None:
        self.live -= self._storages.pop(storage, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fake = any(isinstance(leaf, FakeTensor) for leaf in leaves)
        device = kwargs.get("device")
        if not fake and (device is None or torch.device(device).type != "cuda"):
            return func(*args, **kwargs)  # plans and schedules are computed for real, on the CPU
        name = func.__name__.partition(".")[0]
        if name == "_pin_memory":  # has no meta kernel; pinned memory stays on the CPU
            return args[0].detach()
        if name == "is_pinned":
            return False
        if not fake:
            args, kwargs = tree_map_only(Tensor, self.fake.from_tensor, (args, kwargs))
        try:
            with self.fake:
                result = func(*args, **kwargs)
        except DataDependentOutputException:
            if leaves[0].device.type == "cuda":
                self.trace.waits[place()] += 1
            return torch.tensor(0, dtype=leaves[0].dtype).item()  # to DeepSpeed: no overflow
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for output in outputs:
            self.watch(output)
        if not func.is_view and name not in FREE:
            self._record(func, name, args, kwargs, leaves, outputs)
        return result

    def _record(self, func, name: str, args, kwargs, leaves: list[Tensor], outputs: list[Tensor]) -> None:
        names = [argument.name for argument in func._schema.arguments]
        arguments: dict[str, Any] = {a.name: a.default_value for a in func._schema.arguments}
        arguments |= dict(zip(names, args, strict=False)) | kwargs
        if name in ("_to_copy", "copy_"):
            source = leaves[1] if name == "copy_" and len(leaves) > 1 else leaves[0]
            if source.device.type != outputs[0].device.type:
                self._transfer(source, outputs[0], bool(arguments.get("non_blocking")))
                return
            if name == "copy_" and _is_same(source, args[0]):
                return  # x[rows] += y ends by copying x[rows] onto itself, which torch leaves out
        inputs = [leaf for leaf in leaves if leaf.device.type == "cuda"]
        results = [output for output in outputs if output.device.type == "cuda"]
        if not inputs and not results:
            return
        cost = cost_of(func.namespace, Call(name, arguments, inputs, results))
        self.timeline.launch(cost, self.device)
        row = self.trace.rows[self.phase, place(), name, cost.kind]
        row.calls += 1
        row.launches += cost.launches
        row.flops += cost.flops
        row.bytes += cost.bytes
        row.seconds += cost.seconds(self.device)

    def _transfer(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        if not non_blocking:  # torch waits for the copy, which waits for all that was launched before it
            self.trace.waits[place()] += 1
        kind = f"{source.device.type} to {target.device.type}, {'non-blocking' if non_blocking else 'blocking'}"
        self.trace.transfers[kind, place()] += target.numel() * target.element_size()


def place() -> str:
    """The function of eagle3, Megatron-core or DeepSpeed that runs now: `attention/ring:backward`."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        for mark, prefix in PACKAGES.items():
            _, found, inside = file.rpartition(mark)
            if found:
                return f"{prefix}{inside.removesuffix('.py')}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "autograd"


def _is_same(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and (a.storage_offset(), a.stride()) == (b.storage_offset(), b.stride())
    )
