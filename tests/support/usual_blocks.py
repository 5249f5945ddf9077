"""One block of attention by its usual kernel."""

from torch import Tensor

from eagle3.attention.block import Kernel, usual_kernels
from eagle3.attention.plain import BlockGradients, BlockOutput, Scoring


def block_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> BlockOutput:
    return _usual_kernel(q, scoring).forward(q, k, v, scoring)


def block_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring
) -> BlockGradients:
    return _usual_kernel(q, scoring).backward(grad, q, k, v, out, lse, scoring)


def _usual_kernel(q: Tensor, scoring: Scoring) -> Kernel:
    kernels = usual_kernels(q.device, q.dtype, q.shape[-1], scoring.softcap)
    kernel = kernels.of(scoring.visibility, scoring.window)
    assert kernel is not None, f"no kernel for {scoring.visibility} blocks"
    return kernel
