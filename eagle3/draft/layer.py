"""The draft's one decoder layer, assembled from Megatron-core parts through a ModuleSpec."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

from eagle3.attention.ttt import KeyValue
from eagle3.draft.config import DraftConfig
from eagle3.draft.rope import Rotation

INITIAL_SCALE = 0.02


@dataclass
class AttentionSubmodules:
    linear_q: type
    linear_k: type
    linear_v: type
    linear_proj: type


@dataclass
class LayerSubmodules:
    input_layernorm: type
    hidden_norm: type
    self_attention: ModuleSpec
    pre_mlp_layernorm: type
    mlp: ModuleSpec


class Eagle3Attention(MegatronModule):
    """Projections only. Keys apart from queries, so that skipped positions pay for k and v alone."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: AttentionSubmodules,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self.head_dim = config.kv_channels
        wide, linear = 2 * config.hidden_size, {"config": config, "bias": False, "tp_group": pg_collection.tp}
        heads, kv_heads = config.num_attention_heads, config.num_query_groups

        def column(module: type, count: int) -> torch.nn.Module:
            return build_module(
                module, wide, count * self.head_dim, init_method=config.init_method, gather_output=False, **linear
            )

        self.linear_q = column(submodules.linear_q, heads)
        self.linear_k = column(submodules.linear_k, kv_heads)
        self.linear_v = column(submodules.linear_v, kv_heads)
        self.linear_proj = build_module(
            submodules.linear_proj,
            heads * self.head_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )

    def query(self, x: Tensor, rotation: Rotation) -> Tensor:
        """x [Q, 2H] -> rotated q [Q, local heads, d]."""
        return rotation(self._heads(self.linear_q, x))

    def key_value(self, x: Tensor, rotation: Rotation) -> KeyValue:
        return KeyValue(rotation(self._heads(self.linear_k, x)), self._heads(self.linear_v, x))

    def output(self, out: Tensor) -> Tensor:
        """out [Q, local heads, d] -> [Q, H], summed over the tensor-parallel group."""
        return self.linear_proj(out.flatten(1))[0]

    def _heads(self, linear: torch.nn.Module, x: Tensor) -> Tensor:
        return linear(x)[0].unflatten(-1, (-1, self.head_dim))


class Eagle3Layer(MegatronModule):
    """x = [RMS(embedding), RMS(hidden)]; h = hidden + attention(x); h + MLP(RMS(h))."""

    def __init__(
        self, config: TransformerConfig, submodules: LayerSubmodules, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config=config)
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.input_layernorm = build_module(submodules.input_layernorm, **norm)
        self.hidden_norm = build_module(submodules.hidden_norm, **norm)
        self.self_attention = build_module(submodules.self_attention, config=config, pg_collection=pg_collection)
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, **norm)
        self.mlp = build_module(
            submodules.mlp, config=config, ffn_hidden_size=config.ffn_hidden_size, tp_group=pg_collection.tp
        )

    def attention_input(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """embedding, hidden [tokens, H] -> [tokens, 2H], the embedding first."""
        return torch.cat((self.input_layernorm(embedding), self.hidden_norm(hidden)), dim=-1)

    def forward(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """What follows attention: hidden [Q, H], attended [Q, local heads, d] -> the layer's un-normed output [Q, H]."""
        hidden = hidden + self.self_attention.output(attended)
        return hidden + self.mlp(self.pre_mlp_layernorm(hidden))[0]


def eagle3_layer_spec() -> ModuleSpec:
    attention = ModuleSpec(
        module=Eagle3Attention,
        submodules=AttentionSubmodules(
            linear_q=ColumnParallelLinear,
            linear_k=ColumnParallelLinear,
            linear_v=ColumnParallelLinear,
            linear_proj=RowParallelLinear,
        ),
    )
    mlp = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    return ModuleSpec(
        module=Eagle3Layer,
        submodules=LayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            hidden_norm=WrappedTorchNorm,
            self_attention=attention,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=mlp,
        ),
    )


def transformer_config(draft: DraftConfig, tensor_parallel: int, dtype: torch.dtype) -> TransformerConfig:
    """Megatron-core's config for the layer. Weights are made on the CPU from torch's generator, so that they depend on
    the seed alone; fusions that need CUDA extensions are off."""
    return TransformerConfig(
        num_layers=1,
        hidden_size=draft.hidden_size,
        num_attention_heads=draft.num_attention_heads,
        num_query_groups=draft.num_key_value_heads,
        kv_channels=draft.head_dim,
        ffn_hidden_size=draft.intermediate_size,
        tensor_model_parallel_size=tensor_parallel,
        use_cpu_initialization=True,
        init_method_std=INITIAL_SCALE,
        normalization="RMSNorm",
        layernorm_epsilon=draft.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cuda_graph_scope=[],
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
    )
