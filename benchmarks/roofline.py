"""What an operator costs on a GPU according to a roofline model: kernel launches, FLOPs, bytes of device memory, and
the seconds that follow from rates that were measured on a device. These are estimates from shapes."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


class Rate(NamedTuple):
    """How fast a kind of kernel runs."""

    flops: float  # per second
    bytes: float  # read and written, per second
    start: float = 0.0  # seconds that each call takes beyond that


class Device(NamedTuple):
    """Rates that kernels reach on a device."""

    name: str
    peak: float  # FLOP/s of bf16 products, by the data sheet: what MFU is relative to
    rates: dict[str, Rate]  # by kind of cost
    launch: float  # seconds of the host for each kernel, Python's own time included
    shortest: float  # the least seconds that a kernel takes


COPIES = 4.08e12
# Measured on an H200, all in results/h200: copies, FlashAttention 2 and FlashAttention 4 alone (rates.json and
# flash-attention-4.json); the rest within steps (profile-8k.json, profile-32k.json, profiles.json). Products run at 740
# to 760 TFLOP/s there; 720 is what makes whole steps right, in which the card is hotter. Kernels that go through memory
# reach 60% of the rate of copies, and those of the loss 78%. The backward of attention counts 2.5 times the FLOPs of
# its forward. With 5% of 8k tokens supervised, the host took 66 microseconds for each launch, on slow cores and with
# Python.
H200 = Device(
    name="H200",
    peak=989e12,
    rates={
        "products": Rate(720e12, COPIES, 15e-6),
        "fp32 products": Rate(20e12, 0.87e12),
        "flash forward": Rate(350e12, COPIES, 165e-6),
        "flash backward": Rate(321e12, COPIES, 450e-6),
        "flash forward, window": Rate(185e12, COPIES, 34e-6),
        "flash backward, window": Rate(188e12, COPIES, 180e-6),
        "flash4 forward": Rate(727e12, COPIES, 110e-6),
        "flash4 backward": Rate(597e12, COPIES, 270e-6),
        "flash4 forward, window": Rate(384e12, COPIES, 160e-6),
        "flash4 backward, window": Rate(280e12, COPIES, 140e-6),
        "loss": Rate(math.inf, 3.2e12),
        "memory": Rate(math.inf, 2.55e12),
        "communication": Rate(math.inf, math.inf),  # launched, but its time is not counted
    },
    launch=66e-6,
    shortest=2e-6,
)


def _estimated(measured: Rate) -> Rate:
    """An H100's rate. It computes like an H200, and its memory has 3.35 of 4.8 TB/s."""
    return measured._replace(bytes=measured.bytes * 3.35 / 4.8)


H100 = H200._replace(name="H100 SXM", rates={kind: _estimated(rate) for kind, rate in H200.rates.items()})
DEVICES = {"h100": H100, "h200": H200}


class Cost(NamedTuple):
    """What one call of an operator costs."""

    kind: str  # a key of Device.rates
    launches: int
    flops: float
    bytes: float

    def seconds(self, device: Device) -> float:
        rate = device.rates[self.kind]
        return max(rate.start + max(self.flops / rate.flops, self.bytes / rate.bytes), self.launches * device.shortest)


class Call(NamedTuple):
    """A call of an operator: its arguments by name, and the device tensors that go in and come out."""

    name: str
    arguments: dict[str, Any]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


# Operators that launch no kernel.
FREE = {
    *("detach", "alias", "view", "expand", "_unsafe_view", "_reshape_alias", "set_", "resize_", "lift_fresh"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh_copy", "record_stream"),
    *("size", "stride", "numel", "dim", "storage_offset", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset"),
    *("is_contiguous", "is_contiguous_memory_format", "is_strides_like_format", "is_non_overlapping_and_dense"),
    *("layout", "device", "prim_device", "is_pinned", "_pin_memory", "_local_scalar_dense"),
}
# Composite operators -> number of kernels on CUDA, each of which reads the whole input.
SEVERAL = {"logsumexp": 6, "topk": 2, "linalg_vecdot": 2}
# Operators that write their first argument without reading it.
OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_")


def covered(tensor: Tensor) -> int:
    """Bytes of memory behind a tensor; a dimension of stride 0 counts once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()


def cost_of(namespace: str, call: Call) -> Cost:
    """The cost of a call. Raises LookupError for an operator that is not known."""
    touched = sum(map(covered, (*call.inputs, *call.outputs)))
    if "attention" in call.name or call.name.startswith("flash4"):
        return _attention(call, touched)
    if namespace == "eagle3" and call.name.startswith(("own_keys", "swiglu", "rotate")):
        return Cost("memory", 1, 0.0, touched)  # reads and writes each tensor once
    if namespace == "eagle3" and call.name.startswith("loss"):
        return Cost("loss", 1, 0.0, touched)  # likewise
    if namespace in ("c10d", "_c10d_functional"):
        return Cost("communication", 1, 0.0, 0.0)
    if namespace not in ("aten", "prims"):
        raise LookupError(f"{namespace}::{call.name} has no known cost; add it to roofline.py")
    if call.name in ("mm", "bmm", "addmm", "addmm_", "baddbmm"):
        return _products(call, touched)
    return _memory(call, touched)


def _products(call: Call, touched: int) -> Cost:
    left = "self" if call.name in ("mm", "bmm") else "mat1" if "mat1" in call.arguments else "batch1"
    a, b = call.arguments[left], call.arguments.get("mat2", call.arguments.get("batch2"))
    batch = a.shape[0] if a.dim() == 3 else 1
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    kind = "products" if a.dtype in HALF else "fp32 products"
    return Cost(kind, 1, 2.0 * batch * m * k * n, touched)


def _attention(call: Call, touched: int) -> Cost:
    """Flash attention in torch's layouts and in FlashAttention 4's. The backward also clears and converts an fp32
    gradient of q, and torch's sums the gradients of keys and values over the query heads of a group."""
    arguments, backward = call.arguments, "backward" in call.name
    if own := call.name.startswith("flash4"):
        q, k = arguments["q"][None], arguments["k"][None]
        left, causal = arguments["left"], arguments["causal"]
    else:
        q, k = arguments["query"], arguments["key"]
        left, causal = arguments.get("window_size_left"), arguments.get("is_causal")
    tokens, heads = (1, 2) if own or call.name.startswith("_flash") else (2, 1)
    (batch, width), queries, keys = (q.shape[0], q.shape[3]), q.shape[tokens], k.shape[tokens]
    pairs = float(queries * keys)
    if left is not None:
        pairs = float(queries * min(keys, left + 1))
    elif causal:
        pairs -= queries * (queries - 1) / 2  # the last query sees the last key
    flops = 4.0 * pairs * batch * q.shape[heads] * width
    kind = f"{'flash4' if own else 'flash'} {'backward' if backward else 'forward'}{'' if left is None else ', window'}"
    if not backward:
        return Cost(kind, 1, flops, touched)
    numbers = batch * queries * q.shape[heads] * width
    extra, launches = numbers * (2 * 4 + 2 * 2), 3
    if q.shape[heads] != k.shape[heads] and not own:
        launches += 2
        extra += 4 * batch * keys * width * 2 * (q.shape[heads] + k.shape[heads])
    return Cost(kind, launches, 2.5 * flops, touched + extra)


def _memory(call: Call, touched: int) -> Cost:
    """The cost of any other operator. It reads its inputs and writes its outputs once."""
    if call.name in ("embedding", "index_select", "gather"):
        touched = sum(map(covered, call.outputs)) * 2 + covered(call.inputs[1])
    elif call.name in ("index_add_", "index_copy_"):
        touched = (3 if call.name == "index_add_" else 2) * covered(call.inputs[-1])
    elif call.name == "_foreach_mul_":  # returns nothing
        touched *= 2
    elif call.name in OVERWRITES:
        touched -= covered(call.inputs[0])
    passes = SEVERAL.get(call.name, 1)
    return Cost("memory", passes, 0.0, passes * touched)
