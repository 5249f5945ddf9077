"""Compiles the loss's Triton kernels for an H100 (sm_90), which needs no GPU. Prints as JSON what ptxas says of each:
registers per thread, spilled bytes, shared memory.

python tests/support/compiled_kernels.py
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from eagle3.objective import fused

SIZES = {"steps": "i32", "rows": "i32", "columns": "i32", "STEPS": "constexpr", "COLUMNS": "constexpr"}
POINTERS = {"best_out": "*i64"}
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


def compiled(kernel, gradient: str, steps: int) -> dict[str, int]:
    """gradient: Triton's name of the format of the logits' gradient. steps: K, rounded up to a power of 2."""
    pointers = {name: "*fp32" for name in kernel.arg_names if name not in SIZES} | {"gradient_out": f"*{gradient}"}
    signature = {name: (pointers | POINTERS | SIZES)[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs={"STEPS": steps, "COLUMNS": fused.COLUMNS})
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": fused.WARPS})
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(binary.asm["ptx"], encoding="utf-8")
        command = [PTXAS, "-v", "--gpu-name=sm_90a", ptx, "-o", ptx.with_suffix(".cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return {
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled": spilled,
        "shared": binary.metadata.shared,
    }


if __name__ == "__main__":
    kernels = (fused._statistics_kernel, fused._overlap_kernel, fused._gradient_kernel)
    formats = {fused._gradient_kernel: ("bf16", "fp32")}
    report = {
        f"{kernel.__name__.strip('_')} {gradient}, {steps} steps": compiled(kernel, gradient, steps)
        for kernel in kernels
        for gradient in formats.get(kernel, ("fp32",))
        for steps in (1, 8)
    }
    print(json.dumps(report))
