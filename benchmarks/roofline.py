"""What an operator costs on a GPU according to a roofline model: kernel launches, FLOPs, bytes of device memory, and
the seconds that follow from a device's rates. These are estimates from shapes; nothing here is measured."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle3.objective.fused import traffic

HALF = (torch.bfloat16, torch.float16)


class Device(NamedTuple):
    """Rates that kernels reach on a device, in FLOP/s, bytes/s and seconds."""

    name: str
    peak: float  # of bf16 products, by the data sheet: what MFU is relative to
    products: float
    attention: float  # flash attention, forward
    attention_backward: float
    fp32: float  # products in fp32
    copies: float  # bytes read and written
    launch: float  # the host's time to launch one kernel
    shortest: float  # the least time that a kernel takes


H100 = Device(
    name="H100 SXM",
    peak=989e12,
    products=0.70 * 989e12,  # the shares of the data sheet's rates are assumptions
    attention=0.45 * 989e12,
    attention_backward=0.40 * 989e12,
    fp32=0.70 * 67e12,
    copies=0.80 * 3.35e12,
    launch=5e-6,
    shortest=2e-6,
)
# 788 TFLOP/s in bf16 products and 4.3 TB/s in copies were measured on an H200; the other rates are an H100's.
H200 = H100._replace(name="H200", products=788e12, copies=4.3e12)
DEVICES = {"h100": H100, "h200": H200}


class Cost(NamedTuple):
    """What one call of an operator costs."""

    kind: str  # products, attention, fp32 products, memory, communication
    launches: int
    flops: float
    bytes: float

    def seconds(self, device: Device) -> float:
        rates = {
            "products": device.products,
            "attention": device.attention,
            "attention backward": device.attention_backward,
        }
        compute = self.flops / rates.get(self.kind, device.fp32)
        return max(compute, self.bytes / device.copies, self.launches * device.shortest)


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
    """The cost of a call. Raises LookupError for an operator of our own that declares no cost."""
    if namespace == "eagle3":
        declared = traffic(call.name, call.inputs, call.outputs)
        return Cost("memory", declared.launches, declared.flops, float(declared.read + declared.written))
    if namespace in ("c10d", "_c10d_functional"):
        return Cost("communication", 1, 0.0, 0.0)  # launched, but its time is not counted
    if namespace not in ("aten", "prims"):
        raise LookupError(
            f"{namespace}::{call.name} has no known cost; declare one beside it, as objective/fused.py does"
        )
    touched = sum(map(covered, (*call.inputs, *call.outputs)))
    if call.name in ("mm", "bmm", "addmm", "addmm_", "baddbmm"):
        return _products(call, touched)
    if "flash_attention" in call.name or "efficient_attention" in call.name or "cudnn_attention" in call.name:
        return _attention(call, touched)
    return _memory(call, touched)


def _products(call: Call, touched: int) -> Cost:
    left = "self" if call.name in ("mm", "bmm") else "mat1" if "mat1" in call.arguments else "batch1"
    a, b = call.arguments[left], call.arguments.get("mat2", call.arguments.get("batch2"))
    batch = a.shape[0] if a.dim() == 3 else 1
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    kind = "products" if a.dtype in HALF else "fp32 products"
    return Cost(kind, 1, 2.0 * batch * m * k * n, touched)


def _attention(call: Call, touched: int) -> Cost:
    """Flash attention in torch's layouts. Its backward also clears and converts an fp32 gradient of q, and sums the
    gradients of keys and values over the query heads of a group."""
    arguments, backward = call.arguments, "backward" in call.name
    q, k = arguments["query"], arguments["key"]
    tokens, heads = (1, 2) if call.name.startswith("_flash") else (2, 1)
    (batch, width), queries, keys = (q.shape[0], q.shape[3]), q.shape[tokens], k.shape[tokens]
    pairs = float(queries * keys)
    left = arguments.get("window_size_left")
    if left is not None:
        pairs = float(queries * min(keys, left + 1))
    elif arguments.get("is_causal"):
        pairs -= queries * (queries - 1) / 2  # the last query sees the last key
    flops = 4.0 * pairs * batch * q.shape[heads] * width
    if not backward:
        return Cost("attention", 1, flops, touched)
    numbers = batch * queries * q.shape[heads] * width
    extra, launches = numbers * (2 * 4 + 2 * 2), 3
    if q.shape[heads] != k.shape[heads]:
        launches += 2
        extra += 4 * batch * keys * width * 2 * (q.shape[heads] + k.shape[heads])
    return Cost("attention backward", launches, 2.5 * flops, touched + extra)


def _memory(call: Call, touched: int) -> Cost:
    """The cost of any other operator. It reads its inputs and writes its outputs once."""
    if call.name in ("embedding", "index_select", "gather"):
        touched = sum(map(covered, call.outputs)) * 2 + sum(map(covered, call.inputs[1:]))
    elif call.name == "index_add_":
        touched = 3 * covered(call.inputs[-1])
    elif call.name in OVERWRITES:
        touched -= covered(call.inputs[0])
    passes = SEVERAL.get(call.name, 1)
    return Cost("memory", passes, 0.0, passes * touched)
