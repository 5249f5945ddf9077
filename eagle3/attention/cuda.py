"""Fused kernels for one block of attention on CUDA: torch's operators on strided views, without ever waiting for the
device.

- flash: fp16 and bf16; `full`, `causal` and `banded`; grouped key/value heads as they are. This is torch's own
  FlashAttention 2, or the flash-attn package's FlashAttention 3 if `take_installed_flash` finds it.
- cudnn: cuDNN's kernels in fp16 and bf16; `full` and `causal`; used only if a recipe names it.
- efficient: also fp32, and any mask. In fp32 its products are split TF32 on tensor cores, close to fp32 in accuracy.

Layouts, padding and the arguments that are unused without dropout follow torch's C++ sources. So far this was checked
without a GPU (tests/attention/test_cuda_attention.py): schemas, shapes, dtypes, and the layouts against the operators'
definitions. What the kernels themselves compute for these calls, and how fast, has not been measured yet.
"""

import contextlib
import importlib.util
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor

from eagle3.attention.plain import BlockGradients, BlockOutput, Scoring

# The efficient kernel's backward reads lse in whole blocks; it reads a mask in whole vectors of at least 16 bytes.
LSE_MULTIPLE, MASK_MULTIPLE = 32, 16
# What one call of a backward may take for itself: q's gradient in fp32, and those of keys and values for every query
# head. (That is what the flash kernel takes; cuDNN is assumed to take no more.)
BACKWARD_BYTES = 2**29

_dropped = False  # whether this process has dropped the installed flash kernels


def take_installed_flash(device: torch.device) -> str:
    """Uses the flash-attn package's FlashAttention 3 (module flash_attn_interface) for torch's operators, if it is
    installed, loads, was not dropped, and the GPU is a Hopper. Affects the whole process. Returns which flash kernels
    are then in use."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    if hopper and not _dropped and importlib.util.find_spec("flash_attn_interface"):
        with contextlib.suppress(Exception):  # a broken package on one node must not leave the others waiting
            torch.nn.attention.activate_flash_attention_impl("FA3")
    return flash_in_use()


def drop_installed_flash() -> None:
    """Returns to torch's own flash kernels, for good."""
    global _dropped
    _dropped = True
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)


def flash_in_use() -> str:
    return torch.nn.attention.current_flash_attention_impl() or "FA2"


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
    return BlockGradients(*(gradient[0] for gradient in gradients))


def heads_at_once(queries: int, keys: int, group: int, head_dim: int) -> int:
    """Key/value heads, each with `group` query heads, that one call of a backward should take."""
    return max(1, BACKWARD_BYTES // (4 * group * head_dim * (queries + keys)))


def _flash_arguments(q: Tensor, k: Tensor, scoring: Scoring) -> dict[str, Any]:
    """Arguments without packed sequences or dropout. The kernels put the last query at the last key, under `is_causal`
    as well, and count a window as the keys beside a query's own."""
    windowed = scoring.visibility == "banded" and scoring.window is not None
    causal = scoring.visibility != "full" and not windowed
    return {
        **{"cum_seq_q": None, "cum_seq_k": None, "max_q": len(q), "max_k": len(k)},
        **{"dropout_p": 0.0, "is_causal": causal, "scale": scoring.scale},
        **({"window_size_left": scoring.window - 1, "window_size_right": 0} if windowed else {}),
    }


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> BlockOutput:
    """A kernel's `forward` in fp16 or bf16 for `full` and `causal` blocks; head_dim a multiple of 8."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(_heads_first(x) for x in (q, k, v)),
        None,
        compute_log_sumexp=True,
        is_causal=scoring.visibility == "causal",
        scale=scoring.scale,
    )
    return BlockOutput(out[0].transpose(0, 1), lse[0, :, :, 0].transpose(0, 1))


def cudnn_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring
) -> BlockGradients:
    """A kernel's `backward` for blocks whose forward was `cudnn_attention`."""
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's seed and offset, not read
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        # contiguous: torch may look up cuDNN's plan by the strides of q, k and v alone
        *(_heads_first(x) for x in (grad.contiguous(), q, k, v, out.to(q.dtype).contiguous())),
        lse.transpose(0, 1)[None, ..., None].contiguous(),
        unused,
        unused,
        *(None, None, None),  # no bias, and no packed sequences
        len(q),
        len(k),
        dropout_p=0.0,
        is_causal=scoring.visibility == "causal",
        scale=scoring.scale,
    )
    return BlockGradients(*(gradient[0].transpose(0, 1) for gradient in gradients))


def _heads_first(x: Tensor) -> Tensor:
    """A view of [tokens, heads, d] as [1, heads, tokens, d]."""
    return x.transpose(0, 1)[None]


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
    return BlockGradients(dq.permute(2, 0, 1, 3).flatten(1, 2), dk, dv)


def _groups_as_batch(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v as views [kv_heads, group, tokens, d], and what to add to the scores [kv_heads, group, queries, keys],
    one mask for all heads. The efficient kernel has no notion of groups, but can read one key/value head for all query
    heads of a batch entry (stride 0)."""
    q, k, v = (x.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3) for x in (q, k, v))
    bias = scoring.bias(q.dtype, MASK_MULTIPLE)
    mask = None if bias is None else bias.expand(*q.shape[:2], -1, -1)
    return q, k.expand(-1, q.shape[1], -1, -1), v.expand(-1, q.shape[1], -1, -1), mask
