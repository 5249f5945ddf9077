"""The EAGLE3 draft: a decoder layer of Megatron-core's modules, which hold its weights, and a pass with these weights,
which computes K_0 and V_0, and the parts of a TTT step before and after attention."""

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from eagle3.attention.shared import SharedTensor
from eagle3.attention.ttt import KeyValue
from eagle3.draft.config import DraftConfig
from eagle3.draft.pointwise import Pointwise, Rotate, SwiGLU, pointwise_candidates
from eagle3.draft.rope import RotaryEmbedding, Rotation
from eagle3.parallel.sequence import Reach

INITIAL_SCALE = 0.02


class Eagle3Attention(MegatronModule):
    """The weights of attention's projections, from x = [RMS(embedding), RMS(hidden)] and back to the hidden size, and
    of the norms of queries and keys."""

    def __init__(self, config: TransformerConfig, draft: DraftConfig, tensor: ProcessGroup) -> None:
        super().__init__(config=config)
        self.head_dim = config.kv_channels
        linear = {"config": config, "bias": draft.attention_bias, "tp_group": tensor}
        norm = {"config": config, "hidden_size": self.head_dim, "eps": config.layernorm_epsilon}
        self.q_norm, self.k_norm = (WrappedTorchNorm(**norm) if draft.qk_norm else None for _ in "qk")
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


class Eagle3Layer(MegatronModule):
    """The weights of the decoder layer: x = [RMS(embedding), RMS(hidden)]; h = hidden + attention(x);
    h + MLP(RMS(h)). DraftPass computes it."""

    def __init__(self, config: TransformerConfig, draft: DraftConfig, tensor: ProcessGroup) -> None:
        super().__init__(config=config)
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.input_layernorm, self.hidden_norm = WrappedTorchNorm(**norm), WrappedTorchNorm(**norm)
        self.self_attention = Eagle3Attention(config, draft, tensor)
        self.pre_mlp_layernorm = WrappedTorchNorm(**norm)
        parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        self.mlp = MLP(config, parts, ffn_hidden_size=config.ffn_hidden_size, tp_group=tensor)


class Eagle3Draft(MegatronModule):
    """The one-layer draft that `draft_config` describes. Of `groups`, it uses only tp. Hidden states are replicated
    over tp's ranks.

    Weights are drawn from torch's global generator and do not depend on the tensor-parallel size. The embedding, which
    is the target's, is frozen. Its vocabulary is padded to a multiple of the tensor-parallel size.

    Shapes: N keys, Q queries, H draft hidden, Ht target hidden, d head dimension, Vd draft vocabulary.
    """

    def __init__(self, draft_config: DraftConfig, groups: ProcessGroupCollection, dtype: torch.dtype) -> None:
        config = transformer_config(draft_config, groups.tp.size(), dtype)
        super().__init__(config=config)
        self.draft_config, self.pg_collection = draft_config, groups
        self.rope = RotaryEmbedding(draft_config)
        hidden, states = draft_config.hidden_size, draft_config.num_aux_hidden_states
        padded = -(-draft_config.vocab_size // groups.tp.size()) * groups.tp.size()
        self.embedding = VocabParallelEmbedding(
            padded, hidden, init_method=config.init_method, config=config, tp_group=groups.tp
        )
        self.embedding.weight.requires_grad_(False)
        norm = {"config": config, "eps": config.layernorm_epsilon}
        norms = (WrappedTorchNorm(hidden_size=draft_config.target_hidden_size, **norm) for _ in range(states))
        self.fc_norm = nn.ModuleList(norms) if draft_config.fc_norm else None
        wide = draft_config.aux_width
        self.input_norm = WrappedTorchNorm(hidden_size=wide, **norm) if draft_config.norm_before_fc else None
        self.fc = nn.Linear(wide, hidden, bias=False, dtype=dtype)
        config.init_method(self.fc.weight)
        self.layer = Eagle3Layer(config, draft_config, groups.tp)
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

    def reach(self, steps: int) -> Reach:
        """What the draft reads in an unroll of so many steps."""
        return Reach(steps, self.draft_config.window)

    @property
    def scale(self) -> float:
        """Factor on the attention scores."""
        return self.draft_config.head_dim**-0.5

    def fuse(self, aux: Tensor) -> Tensor:
        """Maps aux [N, A Ht], the outputs of A target layers from low to high, to fused states h [N, H]."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            parts = aux.chunk(len(self.fc_norm), -1)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(aux)

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


class DraftPass:
    """The draft at work, for example in all steps of one stream: weights are put together for fewer products, and each
    one's gradient is a sum over the products that autograd sees once (see SharedTensor).

    q, k and v are products with rows of one weight, the rows of q first. Its half for the embedding depends on the next
    token alone, so it is a call of its own (`embedded`), whose result steps that meet the token can share.

    exact: whether gradients of weights are summed in fp32 or wider, not in the weights' dtype.
    pointwise: None: the usual kernel.
    """

    def __init__(self, draft: Eagle3Draft, exact: bool = True, pointwise: Pointwise | None = None) -> None:
        attention, mlp = draft.layer.self_attention, draft.layer.mlp
        linears = (attention.linear_q, attention.linear_k, attention.linear_v)
        projections, self.biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
        sizes, self.head_norms = [len(weight) for weight in projections], (attention.q_norm, attention.k_norm, None)
        self.pointwise = pointwise or pointwise_candidates(draft.fc.weight.device, draft.fc.weight.dtype)[0]
        self.draft, self.layer, self.tensor, self.sizes = draft, draft.layer, draft.pg_collection.tp, sizes
        self.all, self.queries, self.keys = slice(None), slice(0, sizes[0]), slice(sizes[0], None)
        halves = torch.cat(projections).chunk(2, 1)
        whole = (attention.linear_proj.weight, mlp.linear_fc1.weight, mlp.linear_fc2.weight)
        products = [SharedTensor.of(weight, exact) for weight in (*halves, *whole)]
        self.of_embedding, self.of_hidden, self.proj, self.fc1, self.fc2 = products
        shared = {id(weight) for weight in (*projections, *whole)}
        others = (weight for weight in draft.parameters() if weight.requires_grad and id(weight) not in shared)
        # All that the methods differentiate.
        self.weights = (*(each.tensor for each in products), *others)

    def embed(self, tokens: Tensor) -> Tensor:
        """Normed embeddings [tokens, H]."""
        return self._to_heads(self.layer.input_layernorm(self.draft.embedding(tokens)))

    def embedded(self, x: Tensor, rows: slice) -> Tensor:
        """What normed embeddings x [tokens, H] and biases add to `all`, to `queries`, or to `keys` and values: [tokens,
        rows], in fp32 or wider, so that the sum is rounded once."""
        product = self.of_embedding.wide_product(x, rows)
        return product if self.biases[0] is None else product.add_(torch.cat(self.biases)[rows])

    def rotation(self, positions: Tensor) -> Rotation:
        """For rows at these positions of their documents, [tokens]. Step k's are k further on."""
        return self.draft.rope.at(positions, torch.promote_types(self.draft.fc.weight.dtype, torch.float32))

    def prefix(self, hidden: Tensor, embedded: Tensor, rotation: Rotation) -> KeyValue:
        """K_0, V_0 [N, kv heads, d] for rows with fused states `hidden` [N, H].

        embedded (overwritten): for `keys`, of the token after each row (token 0 at the end of a document).
        """
        x = self._to_heads(self.layer.hidden_norm(hidden))
        projected = self.of_hidden.wide_product(x, self.keys, embedded)
        return KeyValue(*self._rotated(projected, rotation, slice(1, None)))

    def project(self, hidden: Tensor, embedded: Tensor, rotation: Rotation) -> tuple[Tensor, ...]:
        """The part of TTT step k before attention. Returns q [Q, local heads, d] and, except at step 0, K_k and V_k of
        the same rows. (At step 0 these are already in K_0 and V_0.)

        hidden: [Q, H], output of step k-1, or the fused states if k = 0.
        embedded (overwritten): for `queries` at step 0, else for `all`, of the token k+1 positions after each query.
        """
        x = self._to_heads(self.layer.hidden_norm(hidden))
        rows, parts = (self.all, 3) if embedded.shape[1] > self.sizes[0] else (self.queries, 1)
        return self._rotated(self.of_hidden.wide_product(x, rows, embedded), rotation, slice(parts))

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The part of a TTT step after attention. Maps hidden [Q, H], as passed to `project`, and attended [Q, local
        heads, d] to the step's output [Q, H], which feeds the next step and, through `output_norm`, lm_head."""
        draft, layer = self.draft, self.layer
        residual = layer.hidden_norm(hidden) if draft.draft_config.norm_before_residual else hidden
        hidden = residual + self.output(attended)
        hidden = hidden + self.mlp(layer.pre_mlp_layernorm(hidden))
        return draft.norm(hidden) if draft.draft_config.norm_output else hidden

    def output(self, attended: Tensor) -> Tensor:
        """Maps attended [Q, local heads, d] to [Q, H]."""
        output = reduce_from_tensor_model_parallel_region(self.proj.product(attended.flatten(1)), self.tensor)
        bias = self.layer.self_attention.linear_proj.bias
        return output if bias is None else output + bias

    def mlp(self, x: Tensor) -> Tensor:
        """Maps x [Q, H] to [Q, H]."""
        x = SwiGLU.apply(self.fc1.product(self._to_heads(x)), self.pointwise)
        return reduce_from_tensor_model_parallel_region(self.fc2.product(x), self.tensor)

    def _to_heads(self, x: Tensor) -> Tensor:
        """x, which every tensor-parallel rank has, on its way to this rank's part of a weight."""
        return copy_to_tensor_model_parallel_region(x, self.tensor)

    def _rotated(self, projected: Tensor, rotation: Rotation, parts: slice) -> tuple[Tensor, ...]:
        """The heads of these parts of q, k and v, which `projected` has side by side."""
        width, norms = self.draft.draft_config.head_dim, self.head_norms[parts]
        heads = [size // width for size in self.sizes[parts]]
        if self.head_norms[0] is not None:
            each = projected.unflatten(1, (-1, width)).split(heads, 1)
            normed = (x if norm is None else self._normed(x, norm) for x, norm in zip(each, norms, strict=True))
            projected = torch.cat([*normed], 1).flatten(1)
        return Rotate.apply(projected, *rotation, heads, self.draft.fc.weight.dtype, self.pointwise)

    def _normed(self, heads: Tensor, norm: nn.RMSNorm) -> Tensor:
        """heads [tokens, heads, d], which are this tensor-parallel rank's, normed in their dtype."""
        return F.rms_norm(heads, norm.normalized_shape, self._to_heads(norm.weight.to(heads.dtype)), norm.eps)


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
