"""Rotary position embedding for explicit positions. Angles are in fp32 or wider, whatever the model's dtype."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3.draft.config import DraftConfig
from eagle3.tensors import send


class Rotation(NamedTuple):
    """cos and sin of each token's angles, [tokens, 1, head_dim / 2], in the dtype of the tensors to rotate."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor, back: bool = False) -> Tensor:
        """Rotates x [tokens, heads, head_dim] by halves: pair i is (x[i], x[i + head_dim / 2]). back: the other way, as
        gradients go."""
        out, sign = torch.empty_like(x, memory_format=torch.contiguous_format), -1 if back else 1
        (low, high), (to_low, to_high) = x.chunk(2, -1), out.chunk(2, -1)
        torch.mul(low, self.cos, out=to_low).addcmul_(high, self.sin, value=-sign)
        torch.mul(high, self.cos, out=to_high).addcmul_(low, self.sin, value=sign)
        return out

    def at(self, rows: slice) -> "Rotation":
        return Rotation(self.cos[rows], self.sin[rows])


class RotaryEmbedding:
    """Computes rotations for a draft config. They equal those of transformers' Llama with the same config.

    This is not a module and has no buffers, so that `.to(bfloat16)` on the draft does not round the frequencies. There
    is no table that a long sequence could outgrow.
    """

    def __init__(self, config: DraftConfig) -> None:
        # Only serving engines read attn_factor.
        rope = {name: value for name, value in config.rope_parameters.items() if name != "attn_factor"}
        embedding = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_attention_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=rope,
            )
        )
        self.scaling = float(embedding.attention_scaling)
        self.frequencies = {torch.float32: embedding.inv_freq, torch.float64: embedding.inv_freq.double()}
        if rope["rope_type"] == "default":  # fp64 follows the definition, not transformers' fp32 rounding of it
            exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
            self.frequencies[torch.float64] = rope["rope_theta"] ** -exponents
        self.placed: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation for `positions` [tokens] (int64, any value). Only the final cos and sin are rounded to
        `dtype`."""
        exact = torch.promote_types(dtype, torch.float32)
        place = exact, positions.device
        if place not in self.placed:
            self.placed[place] = send(self.frequencies[exact], positions.device)
        angles = positions.to(exact)[:, None, None] * self.placed[place]
        return Rotation((angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype))
