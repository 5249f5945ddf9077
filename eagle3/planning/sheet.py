"""What the forwards of a served target and its draft cost on GPUs, estimated from shapes and a data sheet.

A forward takes the longer of two times, that of reading weights and keys and that of its products, and a constant for
each layer. What an engine adds (scheduling, sampling, building a tree) is left out, and nothing here was measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from transformers import PretrainedConfig

from eagle3.draft.config import DraftConfig
from eagle3.planning.costs import seen
from eagle3.planning.gpus import Gpu
from eagle3.planning.step import Weights
from eagle3.targets.facts import TargetFacts

ITEMSIZE = 2  # bytes of a key's number, and of a draft's weight: served in bf16


class KeyLayers(NamedTuple):
    """Layers of a target that keep keys and values alike."""

    layers: int
    bytes: int  # per token and layer
    heads: int  # GPUs that can share these bytes; more of them hold copies
    flops: int  # per query-key pair and layer
    window: int | None  # the most tokens that a query sees


@dataclass(frozen=True)
class ServedTarget:
    """A target's shape, as far as its forwards' cost depends on it."""

    layers: int
    common_bytes: float  # of the weights that every forward reads
    expert_bytes: float  # of all routed experts
    chosen_experts: float  # the share of them that a token reads
    token_flops: float  # products of one token, without attention
    keys: tuple[KeyLayers, ...]

    @classmethod
    def of(cls, facts: TargetFacts) -> "ServedTarget":
        """The shape that follows from a target's config."""
        routed = facts.expert_parameters / facts.parameters
        active = facts.parameters * (1 - routed + routed * facts.chosen_experts)
        embedding = facts.config.vocab_size * facts.config.hidden_size  # a lookup, not a product
        tied = facts.config.tie_word_embeddings
        return cls(
            layers=facts.config.num_hidden_layers,
            common_bytes=facts.bytes * (1 - routed),
            expert_bytes=facts.bytes * routed,
            chosen_experts=facts.chosen_experts,
            token_flops=2 * (active - (0 if tied else embedding)),
            keys=_key_layers(facts.config),
        )

    def weight_bytes(self, tokens: int) -> float:
        """Bytes of the weights that a forward over so many tokens reads. Tokens are taken to choose experts
        independently."""
        return self.common_bytes + self.expert_bytes * (1 - (1 - self.chosen_experts) ** tokens)


def _key_layers(config: PretrainedConfig) -> tuple[KeyLayers, ...]:
    """The layers' keys: compressed (MLA), or of each head; windowed, or of all tokens; none in linear attention."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    width = getattr(config, "head_dim", None) or hidden // heads
    latent = getattr(config, "kv_lora_rank", None)
    if latent:
        numbers, key_heads = latent + config.qk_rope_head_dim, 1
        flops = 2 * heads * (numbers + latent)
    else:
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        numbers, flops = 2 * key_heads * width, 4 * heads * width
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    windows = {
        "sliding_attention": getattr(config, "sliding_window", None),
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    return tuple(
        KeyLayers(kinds.count(kind), numbers * ITEMSIZE, key_heads, flops, windows.get(kind))
        for kind in sorted(set(kinds))
        if kind != "linear_attention"
    )


@dataclass(frozen=True)
class SheetCosts:
    """Costs by data sheet (see `Costs` in payoff.py), of a target and its draft on the same `gpus` GPUs, which share
    every layer."""

    target: ServedTarget
    draft: DraftConfig
    gpu: Gpu
    gpus: int

    def verifying(self, batch: int, tokens: int, context: int) -> float:
        target, total = self.target, batch * tokens
        keys, pairs = self._attention(target.keys, batch, total, context)
        return self._seconds(target.layers, target.weight_bytes(total), keys, total * target.token_flops + pairs)

    def drafting(self, batch: int, drafts: int, context: int) -> float:
        """fc reads the verified tokens' states once, and each draft token takes a forward of the draft's one layer and
        head."""
        weights = Weights.of(self.draft, 1)
        keys, pairs = self._attention([self._draft_layer], batch, batch, context)
        of_step = weights.project + weights.finish + weights.head
        first = self._seconds(1, ITEMSIZE * weights.entry, 0, 2 * batch * (drafts + 1) * weights.entry)
        step = self._seconds(1, ITEMSIZE * of_step, keys, 2 * batch * of_step + pairs)
        return first + drafts * step

    def fits(self, batch: int, context: int) -> bool:
        """Whether the GPUs hold the weights of both models, and the keys of such a batch."""
        weights = self.target.common_bytes + self.target.expert_bytes + ITEMSIZE * Weights.of(self.draft, 1).trained
        keys, _ = self._attention([*self.target.keys, self._draft_layer], batch, 0, context)
        return weights / self.gpus + keys <= self.gpu.memory * self.gpu.usable

    @property
    def _draft_layer(self) -> KeyLayers:
        draft = self.draft
        heads, pair = draft.num_key_value_heads, 4 * draft.num_attention_heads * draft.head_dim
        return KeyLayers(1, 2 * heads * draft.head_dim * ITEMSIZE, heads, pair, draft.window)

    def _attention(self, layers: Sequence[KeyLayers], batch: int, tokens: int, context: int) -> tuple[float, float]:
        """Bytes of the layers' keys and values on one GPU, which are divided by heads, and products of so many tokens
        with them."""
        reach = [(kind, seen(context, kind.window) * kind.layers) for kind in layers]
        read = sum(batch * many * kind.bytes / min(self.gpus, kind.heads) for kind, many in reach)
        return read, sum(tokens * many * kind.flops for kind, many in reach)

    def _seconds(self, layers: int, weight_bytes: float, key_bytes: float, flops: float) -> float:
        """weight_bytes, flops: of all GPUs; key_bytes: of one."""
        gpu = self.gpu
        reductions = 0.0 if self.gpus == 1 else 2 * gpu.reduction_seconds
        reading = (weight_bytes / self.gpus + key_bytes) / (gpu.bandwidth * gpu.reached_bandwidth)
        computing = flops / self.gpus / (gpu.flops * gpu.reached_flops)
        return layers * (gpu.layer_seconds + reductions) + max(reading, computing)
