"""Faulty kernels for tests/kernels to find. As a program, runs a job of two processes, the second with a faulty
kernel."""

import sys
import time
from pathlib import Path

import torch
from processes import compute
from triton.compiler.errors import CompilationError

from eagle3.attention.block import CPU, PLAIN, PLAIN_OWN, Kernel
from eagle3.attention.plain import BlockOutput
from eagle3.draft.pointwise import PLAIN_POINTWISE
from eagle3.kernels.choice import LOSS, OWN, POINTWISE, agreement, pick, prove
from eagle3.kernels.proof import KernelDemand
from eagle3.objective import softmaxes
from eagle3.parallel.topology import Topology, gathered

DEMAND = KernelDemand(
    heads=6, kv_heads=2, head_dim=16, dtype=torch.float32, window=20, steps=3, hidden=24, columns=2050
)  # fmt: skip


def _spoiled(name: str, output=lambda part: part, gradients=lambda part: part) -> Kernel:
    """The CPU's kernel with changed results."""

    def forward(q, k, v, scoring):
        return output(CPU.forward(q, k, v, scoring))

    def backward(*arguments):
        return gradients(CPU.backward(*arguments))

    return Kernel(name, forward, backward)


def _without_a_key(q, k, v, scoring):
    """Attention in which the second key takes the place of the first."""
    k, v = (torch.cat((x[1:2], x[1:])) if len(x) > 1 else x for x in (k, v))
    return CPU.forward(q, k, v, scoring)


def _nan_in_a_row(part: BlockOutput) -> BlockOutput:
    part.out[-1] = float("nan")
    return part


def _raises(*_):
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCompile with ...")


def _does_not_compile(*_):
    raise CompilationError("def kernel(): ...", None, "unsupported target")


# (kernel, what the verdict says)
ATTENTION_FAULTS = [
    (_spoiled("scaled", lambda part: part._replace(out=part.out * 1.02)), "out is off by"),
    (Kernel("off-by-one", _without_a_key, CPU.backward), "out is off by"),
    (_spoiled("wrong-lse", lambda part: part._replace(lse=part.lse + 0.01)), "lse is off by"),
    (_spoiled("nan-in-a-row", _nan_in_a_row), "out is off by inf"),
    (_spoiled("scaled-dq", gradients=lambda parts: (0.98 * parts[0], *parts[1:])), "dq is off by"),
    (_spoiled("swapped", gradients=lambda parts: (parts[0], parts[2], parts[1])), "dk is off by"),
    (Kernel("raises", CPU.forward, _raises), "raised RuntimeError: CUDA error: no kernel image is available"),
]


def _planted(plain, reason: str, name: str, **changes) -> tuple:
    """A plain kernel with other functions, and what the verdict says."""
    return plain._replace(name=name, **changes), reason


def _swapped_backward(grad, output, q, own, scale):
    dq, *rest = PLAIN_OWN.backward(grad, output, q, own, scale)
    return dq, *reversed(rest)


def _scaled_backward(grad, output, q, own, scale):
    return PLAIN_OWN.backward(grad, output, q, own, 1.02 * scale)


OWN_FAULTS = [
    _planted(PLAIN_OWN, "out is off by", "forgets", forward=lambda prefix, q, own, scale: prefix),
    _planted(PLAIN_OWN, "dq is off by", "scaled", backward=_scaled_backward),
    _planted(PLAIN_OWN, "d_own is off by", "swapped", backward=_swapped_backward),
    _planted(PLAIN_OWN, "raised CompilationError", "raises", forward=_does_not_compile),
]


def _swapped_halves(x):
    return PLAIN_POINTWISE.swiglu(x.roll(len(x[0]) // 2, 1))


def _without_steep_slopes(grad, x):
    return PLAIN_POINTWISE.swiglu_backward(grad, x).mul_(x.abs() < 3)


def _turned_values(x, rotation, heads, dtype):
    rotate = PLAIN_POINTWISE.rotate
    return [*rotate(x, rotation, heads, dtype)[:2], rotate(x, rotation, [sum(heads)], dtype)[0][:, -heads[-1] :]]


def _larger_if_alone(x, rotation, heads, dtype):
    return [(1 if len(heads) > 1 else 1.5) * part for part in PLAIN_POINTWISE.rotate(x, rotation, heads, dtype)]


def _turned_on(grads, rotation):
    return PLAIN_POINTWISE.rotate_backward(grads, rotation._replace(sin=-rotation.sin))


POINTWISE_FAULTS = [
    _planted(PLAIN_POINTWISE, "SwiGLU is off by", "swapped", swiglu=_swapped_halves),
    _planted(
        PLAIN_POINTWISE, "SwiGLU's gradient is off by", "forgets the slope", swiglu_backward=_without_steep_slopes
    ),
    _planted(PLAIN_POINTWISE, "rotation is off by", "turns the values", rotate=_turned_values),
    _planted(PLAIN_POINTWISE, "rotation is off by", "cannot turn one part", rotate=_larger_if_alone),
    _planted(PLAIN_POINTWISE, "rotation's gradient is off by", "turns on", rotate_backward=_turned_on),
    _planted(PLAIN_POINTWISE, "raised CompilationError", "raises", swiglu_backward=_does_not_compile),
]


class _Steep(softmaxes.PlainSoftmaxes):
    def finish(self, factors, overlaps, dtype):
        return super().finish(1.03 * factors, overlaps, dtype)


def _scaled_product(rows, columns):
    return 1.03 * softmaxes.PLAIN.product(rows, columns)


LOSS_FAULTS = [
    _planted(softmaxes.PLAIN, "raised CompilationError", "raises", softmaxes=_does_not_compile),
    _planted(softmaxes.PLAIN, "cross-entropy is off by", "scaled", product=_scaled_product),
    _planted(softmaxes.PLAIN, "cross-entropy's gradient of outputs is off by", "steep", softmaxes=_Steep),
]


def slow(kernel: Kernel) -> Kernel:
    def forward(*arguments):
        time.sleep(0.1)
        return kernel.forward(*arguments)

    return Kernel("slow", forward, kernel.backward)


def job(topology: Topology) -> tuple[dict, list[str]]:
    """The names of the kernels that a rank chooses, and its warnings."""
    first = CPU if topology.is_first else ATTENTION_FAULTS[0][0]._replace(name="cpu")
    candidates = dict.fromkeys(("full", "causal", "masked"), [first, PLAIN])
    candidates |= {"banded": [], "windowed": [], OWN: [PLAIN_OWN], POINTWISE: [PLAIN_POINTWISE]}
    candidates[LOSS] = [softmaxes.PLAIN]
    table = prove(candidates, DEMAND, topology, timed=False)
    choice = pick(candidates, agreement(gathered(table)))
    return dict(choice.names), [*choice.warnings]


if __name__ == "__main__":
    compute(Path(sys.argv[1]), "job", 2, (), job)
