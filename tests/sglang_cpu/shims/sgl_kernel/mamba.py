"""What SGLang imports when it starts linear attention. Its norm with a gate takes an operator for CPUs only if they
have AMX, and Triton otherwise; from here on it takes the operator."""

from sglang.kernels.ops.attention.fla import layernorm_gated

from sgl_kernel import not_covered as causal_conv1d_update_cpu  # noqa: F401
from sgl_kernel.linear_attention import causal_conv1d_fn_cpu, chunk_gated_delta_rule_cpu  # noqa: F401

layernorm_gated._use_cpu = True
