"""Linear attention of Qwen3-Next and Qwen3.5: a causal convolution, and the gated delta rule (arXiv:2412.06464), whose
state S [V, K] of a head changes with each token:

    S = exp(g) S;  S = S + beta (v - S k) k^T;  output = S q / sqrt(K)

Follows the definition, one request and one token at a time, in fp32. Pools of states have a slot for each request.
Decoding is not covered: SGLang looks its operator up, but it takes no arguments.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import infer_schema


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_options,
) -> Tensor:
    """Convolve each channel of x [channels, tokens], in which requests follow each other, with its weight [width].

    A request begins with its slot of `conv_states` [slots, channels, width - 1], its last inputs, or with zeros; the
    slot then holds its last inputs.
    """
    output, starts = torch.empty_like(x), query_start_loc.tolist()
    for request, slot in enumerate(cache_indices.tolist()):
        tokens = slice(starts[request], starts[request + 1])
        known = conv_states[slot] if has_initial_state[request] else torch.zeros_like(conv_states[slot])
        whole = torch.cat([known.to(x.dtype), x[:, tokens]], -1)
        convolved = F.conv1d(whole[None], weight[:, None], bias, groups=len(weight))[0]
        output[:, tokens] = F.silu(convolved) if activation in ("silu", "swish") else convolved
        conv_states[slot] = whole[:, -known.shape[-1] :].to(conv_states.dtype)
    return output


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: Tensor,
) -> tuple[Tensor, None, None]:
    """The delta rule over requests that follow each other. q, k [1, tokens, heads of keys, K]; v [1, tokens, heads, V];
    g, beta [1, tokens, heads]; initial_state [slots, heads, V, K], changed in place. Returns [1, tokens, heads, V], and
    None for states on the way."""
    assert not head_first and use_qk_l2norm_in_kernel
    output, starts = torch.empty_like(v), cu_seqlens.tolist()
    for request, slot in enumerate(initial_state_indices.tolist()):
        tokens = slice(starts[request], starts[request + 1])
        rows = (q[0, tokens], k[0, tokens], v[0, tokens], g[0, tokens], beta[0, tokens])
        output[0, tokens], state = _delta_rule(*rows, initial_state[slot])
        initial_state[slot] = state.to(initial_state.dtype)
    return output, None, None


def fused_gdn_gating_cpu(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g and beta [1, tokens, heads], from a and b [tokens, heads]."""
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g[None], b.float().sigmoid()[None]


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and last state of one request. Several heads of values share a head of keys."""
    shared, state = v.shape[1] // q.shape[1], state.float()
    q, k = (_unit(each.float()).repeat_interleave(shared, 1) for each in (q, k))
    q, v, decay, output = q * q.shape[-1] ** -0.5, v.float(), g.float().exp(), torch.empty_like(v)
    for token in range(len(q)):
        state = state * decay[token, :, None, None]
        wrong = v[token] - torch.einsum("hvk,hk->hv", state, k[token])
        state = state + torch.einsum("hv,hk->hvk", wrong * beta[token, :, None].float(), k[token])
        output[token] = torch.einsum("hvk,hk->hv", state, q[token])
    return output, state


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """x * sigmoid(gate), in place."""
    x.mul_(gate.reshape(x.shape).sigmoid())


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Norms of each head's queries and keys: [tokens * heads, head_dim]."""
    return _gemma_norm(q, q_weight, eps, head_dim), _gemma_norm(k, k_weight, eps, head_dim)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, where each head's queries are followed by its gates; these come third."""
    q, gate = q_gate.reshape(-1, num_heads, 2 * head_dim).chunk(2, -1)
    return *fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim), gate.reshape(-1, head_dim).clone()


def _gemma_norm(x: Tensor, weight: Tensor, eps: float, head_dim: int) -> Tensor:
    rows = x.reshape(-1, head_dim).float()
    return (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * (1 + weight.float())).to(x.dtype)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split [q | k | v | z] and [b | a] into [q | k | v], z [tokens, heads, head_v], b and a [tokens, heads]."""
    values = num_heads_v * head_v
    qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + values, values], -1)
    b, a = mixed_ba.chunk(2, -1)
    return qkv.clone(), z.reshape(-1, num_heads_v, head_v).clone(), b.clone(), a.clone()


def fused_rmsnorm_gated_cpu(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """RMS norm, then silu(gate) as a factor."""
    rows = x.float()
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (normed * F.silu(gate.reshape(x.shape).float())).to(x.dtype)


# Those that SGLang calls through torch.ops. One changes its first argument.
for function in (
    *(fused_gdn_gating_cpu, fused_sigmoid_mul_cpu, fused_qk_gemma_rmsnorm_cpu, fused_qk_gemma_rmsnorm_with_gate_cpu),
    *(fused_rmsnorm_gated_cpu, fused_qkvzba_split_reshape_cat_contiguous_cpu),
):
    changed = ("x",) if function is fused_sigmoid_mul_cpu else ()
    torch.library.define(f"sgl_kernel::{function.__name__}", infer_schema(function, mutates_args=changed))
    torch.library.impl(f"sgl_kernel::{function.__name__}", "CPU", function)
torch.library.define("sgl_kernel::fused_sigmoid_gating_delta_rule_update_cpu", "() -> ()")
