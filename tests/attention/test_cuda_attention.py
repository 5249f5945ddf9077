"""The calls of CUDA kernels, without a GPU: checked by torch's schemas and shape functions, and by definitions on
CPU."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from cuda_operators import (
    EFFICIENT,
    EFFICIENT_BACKWARD,
    FLASH,
    FLASH4,
    FLASH4_BACKWARD,
    FLASH_BACKWARD,
    ByDefinition,
    aten,
    by_name,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3.attention import block as blocks
from eagle3.attention import cuda
from eagle3.attention.block import head_groups, usual_kernels
from eagle3.attention.plain import Scoring, plain_attention, plain_attention_backward
from eagle3.attention.ring import RingAttention
from eagle3.attention.schedule import schedule_prefix
from eagle3.attention.shared import SharedGradient

SCALE = 0.21

# visibility, queries, keys
SHAPES = [("full", 7, 40), ("full", 1, 33), ("causal", 37, 37), ("masked", 33, 47), ("masked", 64, 1)]
every_shape = pytest.mark.parametrize(("visibility", "queries", "keys"), SHAPES)
# heads, kv heads, head dim
every_grouping = pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 8), (6, 2, 16), (4, 1, 8)])


class _WithoutCUDA(TorchFunctionMode):
    """Replaces methods that a torch without CUDA refuses to run on fake CUDA tensors: indexing by slices, integers and
    None becomes strided views; contiguous and ~ become the operators that they stand for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.__invert__:
            return torch.logical_not(*args)
        if func is Tensor.contiguous:
            return args[0] if args[0].is_contiguous() else torch.clone(args[0], memory_format=torch.contiguous_format)
        if func not in (Tensor.__getitem__, Tensor.__setitem__):
            return func(*args, **(kwargs or {}))
        x, index, *value = args
        view = torch.empty_strided(x.shape, x.stride(), device="meta")[index]
        view = x.as_strided(view.shape, view.stride(), x.storage_offset() + view.storage_offset())
        return aten.copy_(view, *value) if value else view


@contextmanager
def _cuda_without_gpu() -> Iterator[None]:
    """Inside the block, CUDA tensors have only a shape, strides and a number format. What needs a number from them
    raises."""
    with FakeTensorMode(), _WithoutCUDA():
        yield


class _Calls(TorchDispatchMode):
    """Records the operators that do more than view their arguments differently, each with its arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.operators, self.arguments = [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if (
            not func.is_view
            and func.namespace in ("aten", "eagle3")
            and getattr(result, "device", None) != torch.device("meta")
        ):
            self.operators.append(func)
            self.arguments[func] = by_name(func, args, kwargs)
        return result


def _inputs(visibility, queries, keys, heads, kv_heads, dim, dtype, device):
    """q, upstream gradient, k and v as the ring has them (rows of longer tensors, keys beside values), and visible or
    None."""
    q, grad = (torch.randn(queries + 3, heads, dim, dtype=dtype, device=device)[2:-1] for _ in range(2))
    k, v = torch.randn(2, keys + 5, kv_heads, dim, dtype=dtype, device=device)[:, 4:-1]
    visible = None
    if visibility == "masked":
        visible = (torch.rand(queries, keys, device=device) < 0.4) | (torch.arange(keys, device=device) == keys // 2)
    return q, grad, k, v, visible


# Shapes, number formats and no wait, on CUDA as far as torch knows it without a GPU
# -------------------------------------


@every_shape
@every_grouping
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_block_on_cuda_has_the_shapes_and_number_formats_of_its_inputs_and_never_waits(
    dtype, heads, kv_heads, dim, visibility, queries, keys
):
    exact = torch.promote_types(dtype, torch.float32)
    with _cuda_without_gpu():
        q, grad, k, v, visible = _inputs(visibility, queries, keys, heads, kv_heads, dim, dtype, "cuda")
        kernel, block = usual_kernels(q.device, dtype, dim).of(visibility, None), Scoring(SCALE, visibility, visible)
        out, lse = kernel.forward(q, k, v, block)
        gradients = kernel.backward(grad, q, k, v, out, lse, block)
    for actual, like in ((out, q), *zip(gradients, (q, k, v), strict=True)):
        assert actual.shape == like.shape and actual.dtype == dtype and actual.device.type == "cuda"
    assert lse.shape == (queries, heads) and lse.dtype == exact and lse.device.type == "cuda"


@pytest.mark.parametrize(
    ("device", "dtype", "dim", "visibility", "softcap", "kernel"),
    [
        ("cuda", torch.bfloat16, 128, "full", None, "flash"),
        ("cuda", torch.float16, 256, "causal", None, "flash"),
        ("cuda", torch.bfloat16, 64, "banded", None, "flash"),
        ("cuda", torch.bfloat16, 128, "masked", None, "efficient"),
        ("cuda", torch.float32, 64, "causal", None, "efficient"),
        ("cuda", torch.bfloat16, 128, "full", 30.0, "plain"),
        ("cuda", torch.bfloat16, 100, "full", None, "plain"),
        ("cuda", torch.bfloat16, 264, "full", None, "plain"),
        ("cuda", torch.float64, 128, "full", None, "plain"),
        ("cpu", torch.bfloat16, 5, "masked", None, "cpu"),
        ("cpu", torch.float32, 128, "full", 30.0, "plain"),
        ("meta", torch.float32, 128, "full", None, "plain"),
    ],
)
def test_the_named_kernel_is_the_one_that_runs(device, dtype, dim, visibility, softcap, kernel):
    usual = usual_kernels(torch.device(device), dtype, dim, softcap).of(visibility, 5)
    assert usual.name == kernel
    operators = {"flash": (FLASH, FLASH_BACKWARD), "efficient": (EFFICIENT, EFFICIENT_BACKWARD)}
    with _cuda_without_gpu():
        q, grad, k, v, visible = _inputs(visibility, 16, 16, 4, 2, dim, dtype, device)
        with _Calls() as calls:
            out, lse = usual.forward(q, k, v, Scoring(SCALE, visibility, visible, softcap, 5))
            if softcap is None:  # else there is no backward
                usual.backward(grad, q, k, v, out, lse, Scoring(SCALE, visibility, visible, window=5))
    fused = [func for func in calls.operators if "_attention" in str(func) and "cpu" not in str(func)]
    assert tuple(fused) == operators.get(kernel, ())


def _recorded(kernel: blocks.Kernel, visibility: str):
    """q, k and v of a square block in bf16, its output and gradients, and the calls of forward and backward."""
    with _cuda_without_gpu():
        q, grad, k, v, _ = _inputs(visibility, 64, 64, 6, 2, 16, torch.bfloat16, "cuda")
        with _Calls() as forward:
            output = kernel.forward(q, k, v, Scoring(SCALE, visibility))
        with _Calls() as backward:
            gradients = kernel.backward(grad, q, k, v, *output, Scoring(SCALE, visibility))
    return (q, k, v), output, gradients, forward, backward


@pytest.mark.parametrize("visibility", ["full", "causal"])
def test_flash_reads_rows_of_longer_tensors_in_place(visibility):
    *_, forward, calls = _recorded(blocks.FLASH, visibility)
    assert forward.operators == [FLASH]
    assert set(calls.operators) == {FLASH_BACKWARD, aten.empty.memory_format}  # empty: the seed, which nothing reads
    arguments = calls.arguments[FLASH_BACKWARD]
    assert arguments["logsumexp"].is_contiguous() and arguments["logsumexp"].shape == (1, 6, 64)
    assert arguments["rng_state"].numel() == arguments["unused"].numel() == arguments["dropout_p"] == 0


@pytest.mark.parametrize("visibility", ["full", "causal"])
def test_flash_4_has_one_operator_each_way_and_the_shapes_of_its_inputs(visibility):
    (q, k, v), (out, lse), gradients, forward, calls = _recorded(blocks.FLASH4, visibility)
    assert forward.operators == [FLASH4] and out.shape == q.shape and lse.shape == (64, 6)
    assert FLASH4_BACKWARD in calls.operators and [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    arguments = calls.arguments[FLASH4_BACKWARD]
    assert arguments["lse"].shape == (6, 64) and arguments["lse"].is_contiguous()
    assert arguments["causal"] == (visibility == "causal")


@every_shape
def test_the_efficient_kernel_gets_the_layouts_that_it_takes_for_granted(visibility, queries, keys):
    """The layouts are those of check_supported in torch's kernel_forward.h and kernel_backward.h, for elements of 2
    bytes."""
    with _cuda_without_gpu():
        q, grad, k, v, visible = _inputs(visibility, queries, keys, 6, 2, 16, torch.bfloat16, "cuda")
        with _Calls() as calls:
            out, lse = cuda.efficient_attention(q, k, v, Scoring(SCALE, visibility, visible))
            cuda.efficient_attention_backward(grad, q, k, v, out, lse, Scoring(SCALE, visibility, visible))
    forward, backward = (calls.arguments[operator] for operator in (EFFICIENT, EFFICIENT_BACKWARD))
    for arguments in (forward, backward):
        for x in (arguments["query"], arguments["key"], arguments["value"]):
            assert x.stride(-1) == 1 and not any(place % 8 for place in (*x.stride()[:-1], x.storage_offset()))
        mask = arguments["attn_bias"]
        assert (mask is None) == (visibility != "masked")
        if mask is not None:
            assert mask.shape == (2, 3, queries, keys) and mask.dtype == q.dtype
            assert mask.stride(-1) == 1 and mask.stride(-2) % 8 == 0 and mask.stride(0) == mask.stride(1) == 0
    lse, out = backward["logsumexp"], backward["out"]
    assert lse.is_contiguous() and lse.shape[-1] == math.ceil(queries / 32) * 32
    assert out.transpose(1, 2).is_contiguous()


# The numbers, where the operators are what their definitions say
# ---------------------------------------------------------


def _errors(kernel: blocks.Kernel, inputs, block: Scoring, plain: Scoring) -> list[float]:
    """The largest errors of out, lse, dq, dk and dv, relative to each one's largest entry, of a kernel's calls for a
    block, by what plain products compute for `plain`. out and lse cover more keys than the block's, as they do in the
    backward pass."""
    q, grad, k, v, _ = inputs
    expected = plain_attention(q, k, v, plain)
    merged = expected.out * 0.8 + 0.1, expected.lse + 0.3
    expected_gradients = plain_attention_backward(grad, q, k, v, *merged, plain)
    with ByDefinition():
        actual = kernel.forward(q, k, v, block)
        gradients = kernel.backward(grad, q, k, v, *merged, block)
    pairs = [*zip((*actual, *gradients), (*expected, *expected_gradients), strict=True)]
    assert all(part.shape == exact.shape for part, exact in pairs)
    return [float((part - exact).abs().max() / exact.abs().max()) for part, exact in pairs]


OF_FLASH = [shape for shape in SHAPES if shape[0] != "masked"]
CALLED = [(blocks.EFFICIENT, SHAPES), (blocks.FLASH, OF_FLASH), (blocks.FLASH4, OF_FLASH)]


@pytest.mark.parametrize(
    ("kernel", "visibility", "queries", "keys"),
    [pytest.param(kernel, *shape, id=f"{kernel.name} {shape}") for kernel, shapes in CALLED for shape in shapes],
)
@every_grouping
def test_the_kernels_calls_mean_the_block_that_plain_products_compute(
    kernel, heads, kv_heads, dim, visibility, queries, keys
):
    torch.manual_seed(queries + keys)
    inputs = _inputs(visibility, queries, keys, heads, kv_heads, dim, torch.float64, "cpu")
    block = Scoring(SCALE, visibility, inputs[-1])
    assert max(_errors(kernel, inputs, block, block)) < 1e-5  # grouped keys are summed in fp32


@every_grouping
@pytest.mark.parametrize("flash", [blocks.FLASH, blocks.FLASH4], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(("queries", "keys", "window"), [(7, 20, 14), (7, 7, 3), (9, 12, 30)])
def test_flashs_call_for_a_band_means_the_mask_of_its_window(heads, kv_heads, dim, queries, keys, window, flash):
    """Query i of n has key i + (S - n) as its own key."""
    torch.manual_seed(queries + keys)
    inputs = _inputs("full", queries, keys, heads, kv_heads, dim, torch.float64, "cpu")
    back = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    masked = Scoring(SCALE, "masked", (back >= 0) & (back < window))
    assert max(_errors(flash, inputs, Scoring(SCALE, "banded", window=window), masked)) < 1e-12


@pytest.mark.parametrize(("window", "causal", "left"), [(None, True, None), (5, False, 4)])
def test_a_band_is_one_call_of_flash_whose_last_query_is_at_the_last_key(window, causal, left):
    with _cuda_without_gpu():
        q, _, k, v, _ = _inputs("full", 40, 64, 6, 2, 16, torch.bfloat16, "cuda")
        with _Calls() as calls:
            blocks.FLASH.forward(q, k, v, Scoring(SCALE, "banded", window=window))
    arguments = calls.arguments[FLASH]
    assert (arguments["max_q"], arguments["max_k"], arguments["is_causal"]) == (40, 64, causal)
    assert (arguments["window_size_left"], arguments["window_size_right"]) == (left, None if left is None else 0)


@pytest.mark.parametrize(("budget", "groups"), [(1, [1, 1, 1]), (2 * 4 * 2 * 16 * 104, [2, 1]), (2**20, [3])])
def test_flashs_backward_takes_heads_in_groups_that_its_memory_bounds(monkeypatch, budget, groups):
    monkeypatch.setattr("eagle3.attention.cuda.BACKWARD_BYTES", budget)
    with _cuda_without_gpu():
        q, _, k, _, _ = _inputs("full", 40, 64, 6, 3, 16, torch.bfloat16, "cuda")
        parts = [*head_groups(q, k, blocks.FLASH)]
    assert [kv_heads.stop - kv_heads.start for kv_heads, _ in parts] == groups
    assert all(heads == slice(2 * kv_heads.start, 2 * kv_heads.stop) for kv_heads, heads in parts)
    assert parts[0][0].start == 0 and parts[-1][0].stop == 3


@pytest.mark.parametrize("window", [None, 64])
def test_a_document_whose_keys_are_all_here_takes_one_call_of_flash_forward_and_one_backward(topology, window):
    """Beside it: the outputs are allocated and written; backward, the gradients of keys and values are added up."""
    ring, rows = RingAttention(topology.alone, "gather", SCALE), torch.arange(300)
    schedules = (schedule_prefix(rows, rows, rows, window=window),)
    with _cuda_without_gpu():
        q, grad, k, v, _ = _inputs("full", 300, 300, 6, 2, 16, torch.bfloat16, "cuda")
        key_value = torch.stack((k, v))[None]
        with _Calls() as forward:
            output = ring(q, key_value, schedules)
        with _Calls() as backward:
            ring.backward(grad, q, key_value, output, schedules, SharedGradient())
    assert forward.operators.count(FLASH) == 1 and len(forward.operators) <= 6, forward.operators
    assert backward.operators.count(FLASH_BACKWARD) == 1 and len(backward.operators) <= 11, backward.operators
