"""Operators that SGLang looks up when it imports a model with linear attention (Qwen3.5). They have no implementation
here: the class can be imported, to see whether it takes a draft, and fails when it runs."""

import torch

for name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    torch.library.define(f"sgl_kernel::{name}", "(Tensor[] arguments) -> Tensor[]")
