"""Fused kernels for one block of attention on CUDA, on strided views, without ever waiting for the device.

- flash4: FlashAttention 4, the package flash-attn-4, on Hopper and Blackwell GPUs; fp16 and bf16; `full`, `causal` and
  `banded`; grouped key/value heads as they are.
- flash: torch's own FlashAttention 2; likewise, on any GPU.
- efficient: torch's; also fp32, and any mask. In fp32 its products are split TF32 on tensor cores, close to fp32 in
  accuracy.

Layouts, padding and the arguments that are unused without dropout follow torch's C++ sources.
"""

from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from eagle3.attention.plain import BlockGradients, BlockOutput, Scoring
from eagle3.operators import operator

# The efficient kernel's backward reads lse in whole blocks; it reads a mask in whole vectors of at least 16 bytes.
LSE_MULTIPLE, MASK_MULTIPLE = 32, 16
FLASH4_CAPABILITY = 9, 0  # Hopper
# What one call of a backward may take for itself: q's gradient in fp32, and those of keys and values for every query
# head.
BACKWARD_BYTES = 2**29

_like = partial(torch.empty_like, memory_format=torch.contiguous_format)


def has_flash4(device: torch.device) -> bool:
    """Whether FlashAttention 4 is installed and computes both passes on this GPU."""
    if device.type != "cuda" or not any(metadata.distributions(name="flash-attn-4")):
        return False
    return torch.cuda.get_device_capability(device) >= FLASH4_CAPABILITY


@partial(operator, fake=lambda q, *_: (_like(q), q.new_empty(q.shape[1::-1], dtype=torch.float32)))
def flash4(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int | None, right: int | None
) -> tuple[Tensor, Tensor]:
    """out [Q, heads, d] and lse [heads, Q]. left, right: keys beside a query's own that it sees; None: all of them."""
    from flash_attn.cute.interface import _flash_attn_fwd  # takes seconds, and is not everywhere

    with torch.no_grad():
        out, lse, *_ = _flash_attn_fwd(
            q[None], k[None], v[None], softmax_scale=scale, causal=causal,
            window_size_left=left, window_size_right=right, return_lse=True,
        )  # fmt: skip
    return out[0], lse[0]


@partial(operator, fake=lambda grad, q, k, v, *_: tuple(map(_like, (q, k, v))))
def flash4_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool,
    left: int | None, right: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v; out and lse as from `flash4`, or merged over several blocks."""
    from flash_attn.cute.interface import _flash_attn_bwd

    dq, dk, dv, *_ = _flash_attn_bwd(
        q[None], k[None], v[None], out[None], grad[None], lse[None], softmax_scale=scale, causal=causal,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return dq[0], dk[0], dv[0]


def flash4_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> BlockOutput:
    """A kernel's `forward`, like `flash_attention`."""
    out, lse = flash4(q, k, v, scoring.scale, *_visible_beside(scoring))
    return BlockOutput(out, lse.t())


def flash4_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring
) -> BlockGradients:
    """A kernel's `backward` for blocks whose forward was `flash4_attention`."""
    lse = lse.t().contiguous()
    return flash4_backward(grad, q, k, v, out.to(q.dtype), lse, scoring.scale, *_visible_beside(scoring))


def _visible_beside(scoring: Scoring) -> tuple[bool, int | None, int | None]:
    """Whether a block is causal, and how many keys a query sees to the left and to the right of its own; None: all. The
    kernels put the last query at the last key."""
    windowed = scoring.visibility == "banded" and scoring.window is not None
    return scoring.visibility != "full" and not windowed, *((scoring.window - 1, 0) if windowed else (None, None))


def flash_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> BlockOutput:
    """A kernel's `forward` in fp16 or bf16 for blocks that are not masked; head_dim is a multiple of 8, at most 256."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q[None], k[None], v[None], **_flash_arguments(q, k, scoring), return_debug_mask=False
    )
    return BlockOutput(out[0], lse[0].transpose(0, 1))


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring
) -> BlockGradients:
    """A kernel's `backward` for blocks whose forward was `flash_attention`."""
    rng_state = torch.empty(0, dtype=torch.uint64, device=q.device)  # dropout's seed and offset, not read
    gradients = torch.ops.aten._flash_attention_backward(
        *(x[None] for x in (grad, q, k, v, out.to(q.dtype))),
        lse.transpose(0, 1)[None].contiguous(),
        **_flash_arguments(q, k, scoring),
        rng_state=rng_state,
        unused=rng_state,
    )
    return tuple(gradient[0] for gradient in gradients)


def heads_at_once(queries: int, keys: int, group: int, head_dim: int) -> int:
    """Key/value heads, each with `group` query heads, that one call of a backward should take."""
    return max(1, BACKWARD_BYTES // (4 * group * head_dim * (queries + keys)))


def _flash_arguments(q: Tensor, k: Tensor, scoring: Scoring) -> dict[str, Any]:
    """Arguments without packed sequences or dropout."""
    causal, left, right = _visible_beside(scoring)
    return {
        **{"cum_seq_q": None, "cum_seq_k": None, "max_q": len(q), "max_k": len(k)},
        **{"dropout_p": 0.0, "is_causal": causal, "scale": scoring.scale},
        **{"window_size_left": left, "window_size_right": right},
    }


def efficient_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> BlockOutput:
    """A kernel's `forward` in fp16, bf16 or fp32; head_dim a multiple of 8."""
    q, k, v, mask = _groups_as_batch(q, k, v, scoring)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, mask, compute_log_sumexp=True, is_causal=scoring.visibility == "causal", scale=scoring.scale
    )
    lse = lse[..., : q.shape[2]].flatten(0, 1)
    return BlockOutput(out.permute(2, 0, 1, 3).flatten(1, 2), lse.transpose(0, 1))


def efficient_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring
) -> BlockGradients:
    """A kernel's `backward` for blocks whose forward was `efficient_attention`."""
    kv_heads = k.shape[1]
    grad, out = (x.to(q.dtype).unflatten(1, (kv_heads, -1)).transpose(0, 1) for x in (grad, out))
    lse = lse.transpose(0, 1).unflatten(0, (kv_heads, -1))
    lse = torch.nn.functional.pad(lse, (0, -len(q) % LSE_MULTIPLE), value=float("inf"))
    q, k, v, mask = _groups_as_batch(q, k, v, scoring)
    rng_state = torch.empty(0, dtype=torch.int64, device=q.device)  # dropout's seed and offset, not read
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad.transpose(1, 2),
        q,
        k,
        v,
        mask,
        out.contiguous().transpose(1, 2),  # the kernel assumes it is contiguous as [batch, queries, heads, d]
        lse.contiguous(),
        rng_state,
        rng_state,
        dropout_p=0.0,
        grad_input_mask=[True, True, True, False],
        is_causal=scoring.visibility == "causal",
        scale=scoring.scale,
    )
    dk, dv = (x.sum(1, dtype=torch.float32).transpose(0, 1).to(x.dtype) for x in (dk, dv))
    return dq.permute(2, 0, 1, 3).flatten(1, 2), dk, dv


def _groups_as_batch(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v as views [kv_heads, group, tokens, d], and what to add to the scores [kv_heads, group, queries, keys],
    one mask for all heads. The efficient kernel has no notion of groups, but can read one key/value head for all query
    heads of a batch entry (stride 0)."""
    q, k, v = (x.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3) for x in (q, k, v))
    bias = scoring.bias(q.dtype, MASK_MULTIPLE)
    mask = None if bias is None else bias.expand(*q.shape[:2], -1, -1)
    return q, k.expand(-1, q.shape[1], -1, -1), v.expand(-1, q.shape[1], -1, -1), mask
