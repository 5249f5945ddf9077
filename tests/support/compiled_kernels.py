"""Compiles the Triton kernels for an H100 (sm_90), which needs no GPU. Prints as JSON what ptxas says of each:
registers per thread, spilled bytes, shared memory; and its warps."""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from eagle3.attention import fused_own
from eagle3.draft import fused_pointwise
from eagle3.objective import fused

INTEGERS = ("steps", "rows", "columns", "kv_heads", "width", "turning")
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


def compiled(kernel, tensors: dict[str, object], constants: dict[str, int], warps: int) -> dict[str, int]:
    """tensors: Triton's names of the formats of arguments that are not integers; those left out are in bf16. They, and
    rows of a usual vocabulary, are aligned to 16 bytes."""

    def kind(name: str):
        return "constexpr" if name in constants else "i32" if name in INTEGERS else tensors.get(name, "*bf16")

    kinds = {name: kind(name) for name in kernel.arg_names}
    aligned = [i for i, name in enumerate(kinds) if kinds[name][0] == "*" or name == "columns"]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, kinds, constexprs=constants, attrs=attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(binary.asm["ptx"], encoding="utf-8")
        command = [PTXAS, "-v", "--gpu-name=sm_90a", ptx, "-o", ptx.with_suffix(".cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", said))),
        "shared": binary.metadata.shared,
        "warps": warps,
    }


def of_the_loss() -> Iterator[tuple[str, dict[str, int]]]:
    for kernel in (fused._statistics_kernel, fused._overlap_kernel, fused._gradient_kernel):
        tensors = dict.fromkeys(kernel.arg_names, "*fp32") | {"best_out": "*i64"}
        for below in ("*fp32", "constexpr") if kernel is fused._gradient_kernel else ("*fp32",):
            for steps in (1, 8):  # K, rounded up to a power of 2
                constants = {"STEPS": steps, "COLUMNS": fused.COLUMNS, "TOGETHER": fused.TOGETHER}
                constants |= {"below": None} if below == "constexpr" else {}
                result = compiled(kernel, tensors | {"gradient_out": "*bf16"}, constants, fused.WARPS)
                without = ", no below" if below == "constexpr" else ""
                yield f"{kernel.__name__}{without}, {steps} steps", result


def of_own_keys() -> Iterator[tuple[str, dict[str, int]]]:
    for own, group, width in ((1, 4, 128), (7, 4, 128), (7, 8, 128), (7, 3, 96), (7, 4, 256)):
        padded, wide = triton.next_power_of_2(group), triton.next_power_of_2(width)
        rows = max(1, fused_own.TILE // (padded * wide))
        constants = {"OWN": own, "GROUP": group, "WIDTH": width, "R": rows, "G": padded, "D": wide}
        tensors = dict.fromkeys(("lse", "merged_lse"), "*fp32") | {"scale": "fp32"}
        tensors |= dict.fromkeys(("keys", "values", "d_keys", "d_values"), ("*bf16",) * own)
        for kernel in (fused_own._forward_kernel, fused_own._backward_kernel):
            result = compiled(kernel, tensors, constants, fused_own.WARPS)
            yield f"own keys, {kernel.__name__}, {own} keys, groups of {group}, width {width}", result


def of_pointwise() -> Iterator[tuple[str, dict[str, int]]]:
    constants = {"COLUMNS": fused_pointwise.COLUMNS}
    for kernel in (fused_pointwise._swiglu_kernel, fused_pointwise._swiglu_backward_kernel):
        yield kernel.__name__, compiled(kernel, {}, constants, 4)
    for parts in (1, 2, 3):
        tensors = dict.fromkeys(("x", "d_x", "cos", "sin"), "*fp32")
        tensors |= {"parts": ("*bf16",) * parts, "widths": ("i32",) * parts}
        for kernel in (fused_pointwise._rotate_kernel, fused_pointwise._rotate_backward_kernel):
            yield f"{kernel.__name__}, {parts} parts", compiled(kernel, tensors, constants | {"HALF": 64}, 4)


if __name__ == "__main__":
    print(json.dumps(dict([*of_the_loss(), *of_own_keys(), *of_pointwise()])))
