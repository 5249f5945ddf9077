"""The EAGLE3 draft: a decoder layer built from Megatron-core's modules. Its methods fuse the target's states, compute
K_0 and V_0, and compute the parts of a TTT step before and after attention."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from eagle3.attention.ttt import KeyValue
from eagle3.draft.config import DraftConfig
from eagle3.draft.rope import RotaryEmbedding, Rotation

AUX_LAYERS = 3
INITIAL_SCALE = 0.02


class EmbeddedTokens(NamedTuple):
    """What the embeddings of tokens add to the projections of attention, each [tokens, local heads * d]."""

    query: Tensor
    key: Tensor
    value: Tensor


class Eagle3Attention(MegatronModule):
    """The projections of attention from x = [RMS(embedding), RMS(hidden)]. The embedding's half depends on the token
    alone, so it is a call of its own, which all steps that meet the token can share. Queries are projected separately,
    so that rows that are not unrolled cost only k and v."""

    def __init__(self, config: TransformerConfig, tensor: ProcessGroup) -> None:
        super().__init__(config=config)
        self.head_dim, self.tensor = config.kv_channels, tensor
        linear = {"config": config, "bias": False, "tp_group": tensor}
        self.linear_q, self.linear_k, self.linear_v = (
            ColumnParallelLinear(
                2 * config.hidden_size,
                heads * self.head_dim,
                init_method=config.init_method,
                gather_output=False,
                **linear,
            )
            for heads in (config.num_attention_heads, config.num_query_groups, config.num_query_groups)
        )
        self.linear_proj = RowParallelLinear(
            config.num_attention_heads * self.head_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )

    def embedded(self, x: Tensor, queries: int, keys: int) -> EmbeddedTokens:
        """Maps normed embeddings x [tokens, H] to their half of the first `queries` queries, and of the first `keys`
        keys and values."""
        x = copy_to_tensor_model_parallel_region(x, self.tensor)
        weights = (linear.weight.chunk(2, 1)[0] for linear in (self.linear_q, self.linear_k, self.linear_v))
        rows = (x[:count] for count in (queries, keys, keys))
        return EmbeddedTokens(*map(F.linear, rows, weights))

    def query(self, x: Tensor, embedded: EmbeddedTokens, rotation: Rotation) -> Tensor:
        """Maps normed hidden states x [Q, H], and the same rows of `embedded`, to rotated q [Q, local heads, d]."""
        return rotation(self._heads(self.linear_q, x, embedded.query))

    def key_value(self, x: Tensor, embedded: EmbeddedTokens, rotation: Rotation) -> KeyValue:
        key, value = self._heads(self.linear_k, x, embedded.key), self._heads(self.linear_v, x, embedded.value)
        return KeyValue(rotation(key), value)

    def output(self, out: Tensor) -> Tensor:
        """Maps out [Q, local heads, d] to [Q, H], summed over the tensor-parallel group."""
        return self.linear_proj(out.flatten(1))[0]

    def _heads(self, linear: nn.Module, x: Tensor, embedded: Tensor) -> Tensor:
        weight = linear.weight.chunk(2, 1)[1]
        return torch.addmm(embedded, x, weight.t()).unflatten(-1, (-1, self.head_dim))


class Eagle3Layer(MegatronModule):
    """The decoder layer: x = [RMS(embedding), RMS(hidden)]; h = hidden + attention(x); h + MLP(RMS(h)).

    norm_before_residual: h = RMS(hidden) + attention(x) instead
    """

    def __init__(self, config: TransformerConfig, tensor: ProcessGroup, norm_before_residual: bool) -> None:
        super().__init__(config=config)
        self.norm_before_residual = norm_before_residual
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.input_layernorm, self.hidden_norm = WrappedTorchNorm(**norm), WrappedTorchNorm(**norm)
        self.self_attention = Eagle3Attention(config, tensor)
        self.pre_mlp_layernorm = WrappedTorchNorm(**norm)
        parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        self.mlp = MLP(config, parts, ffn_hidden_size=config.ffn_hidden_size, tp_group=tensor)

    def embedded(self, embedding: Tensor, queries: int, keys: int) -> EmbeddedTokens:
        """Embeddings' part of attention's projections (see Eagle3Attention). embedding: [tokens, H]."""
        return self.self_attention.embedded(self.input_layernorm(embedding), queries, keys)

    def attention_input(self, hidden: Tensor) -> Tensor:
        """The normed hidden states [tokens, H] from which this rank's heads are projected."""
        return copy_to_tensor_model_parallel_region(self.hidden_norm(hidden), self.self_attention.tensor)

    def forward(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The part after attention: maps hidden [Q, H] and attended [Q, local heads, d] to the layer's un-normed output
        [Q, H]."""
        residual = self.hidden_norm(hidden) if self.norm_before_residual else hidden
        hidden = residual + self.self_attention.output(attended)
        return hidden + self.mlp(self.pre_mlp_layernorm(hidden))[0]


class Eagle3Draft(MegatronModule):
    """The one-layer draft that `draft_config` describes. Of `groups`, it uses only tp. Hidden states are replicated
    over tp's ranks.

    Weights are drawn from torch's global generator and do not depend on the tensor-parallel size. The embedding, which
    is the target's, is frozen. Its vocabulary is padded to a multiple of the tensor-parallel size.

    Shapes: N keys, Q queries, H draft hidden, Ht target hidden, d head dimension, Vd draft vocabulary.
    """

    def __init__(self, draft_config: DraftConfig, groups: ProcessGroupCollection, dtype: torch.dtype) -> None:
        draft_config.check_parallel(groups.tp.size(), ulysses=1)
        config = transformer_config(draft_config, groups.tp.size(), dtype)
        super().__init__(config=config)
        self.draft_config, self.pg_collection = draft_config, groups
        self.rope = RotaryEmbedding(draft_config)
        hidden, wide = draft_config.hidden_size, draft_config.target_hidden_size
        padded = -(-draft_config.vocab_size // groups.tp.size()) * groups.tp.size()
        self.embedding = VocabParallelEmbedding(
            padded, hidden, init_method=config.init_method, config=config, tp_group=groups.tp
        )
        self.embedding.weight.requires_grad_(False)
        norm = {"config": config, "eps": config.layernorm_epsilon}
        norms = (WrappedTorchNorm(hidden_size=wide, **norm) for _ in range(AUX_LAYERS))
        self.fc_norm = nn.ModuleList(norms) if draft_config.fc_norm else None
        self.input_norm = (
            WrappedTorchNorm(hidden_size=AUX_LAYERS * wide, **norm) if draft_config.norm_before_fc else None
        )
        self.fc = nn.Linear(AUX_LAYERS * wide, hidden, bias=False, dtype=dtype)
        config.init_method(self.fc.weight)
        self.layer = Eagle3Layer(config, groups.tp, draft_config.norm_before_residual)
        self.norm = WrappedTorchNorm(hidden_size=hidden, **norm)
        self.lm_head = ColumnParallelLinear(
            hidden,
            draft_config.draft_vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            tp_group=groups.tp,
        )
        self.to(dtype)  # since torch creates norms in fp32

    @property
    def scale(self) -> float:
        """Factor on the attention scores."""
        return self.draft_config.head_dim**-0.5

    def fuse(self, aux: Tensor) -> Tensor:
        """Maps aux [N, 3Ht], the three target layers from low to high, to fused states h [N, H]."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            aux = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, aux.chunk(AUX_LAYERS, -1), strict=True)], -1
            )
        return self.fc(aux)

    def embedded(self, tokens: Tensor, queries: int, keys: int) -> EmbeddedTokens:
        """What next tokens [tokens] add: the first `queries` of them to the queries of `project`, the first `keys` to
        its keys and values and to those of `prefix`."""
        return self.layer.embedded(self.embedding(tokens), queries, keys)

    def prefix(self, hidden: Tensor, next_tokens: EmbeddedTokens, positions: Tensor) -> KeyValue:
        """K_0, V_0 [N, kv heads, d] for rows with fused states `hidden` [N, H].

        next_tokens: of N tokens, the one after each row (token 0 at the end of a document).
        positions: [N], positions in the document.
        """
        x = self.layer.attention_input(hidden)
        return self.layer.self_attention.key_value(x, next_tokens, self.rope.at(positions, x.dtype))

    def project(
        self, hidden: Tensor, next_tokens: EmbeddedTokens, positions: Tensor, first: bool
    ) -> tuple[Tensor, ...]:
        """The part of TTT step k before attention. Returns q [Q, local heads, d] and, except at step 0, K_k and V_k of
        the same rows. (At step 0 these are already in K_0 and V_0.)

        hidden: [Q, H], output of step k-1, or the fused states if k = 0.
        next_tokens: of Q tokens, the one k+1 positions after each query.
        positions: [Q], already advanced by k.
        first: whether k = 0.
        """
        x = self.layer.attention_input(hidden)
        rotation, attention = self.rope.at(positions, x.dtype), self.layer.self_attention
        own = () if first else attention.key_value(x, next_tokens, rotation)
        return attention.query(x, next_tokens, rotation), *own

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The part of a TTT step after attention. Maps hidden [Q, H], as passed to `project`, and attended [Q, local
        heads, d] to the step's output [Q, H], which feeds the next step and, through `output_norm`, lm_head."""
        hidden = self.layer(hidden, attended)
        return self.norm(hidden) if self.draft_config.norm_output else hidden

    @property
    def output_norm(self) -> nn.Module | None:
        """The norm between a step's output and lm_head; None if steps hand on normed outputs (norm_output)."""
        return None if self.draft_config.norm_output else self.norm

    def logits(self, output: Tensor) -> Tensor:
        """Maps a step's output [Q, H] to draft logits [Q, Vd / tp]."""
        return self.lm_head(output if self.output_norm is None else self.output_norm(output))[0]

    def state_dict(self, *args, **kwargs):
        """The weights, without Megatron's empty `_extra_state` entries, which DeepSpeed's universal checkpoints cannot
        hold."""
        state = super().state_dict(*args, **kwargs)
        for name in [name for name in state if name.endswith("_extra_state")]:
            del state[name]
        return state


def transformer_config(draft: DraftConfig, tensor_parallel: int, dtype: torch.dtype) -> TransformerConfig:
    """Megatron-core's config for the layer. Weights are initialised on the CPU from torch's generator, so that they
    depend on the seed alone. Fusions that need CUDA extensions are off."""
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
