"""What forwards cost, fitted to measured times, or estimated from shapes and a GPU's data sheet.

Measured, the seconds of a target's forward over N tokens after a context of C tokens are taken to be a sum of four
non-negative parts: a constant (weights that are read, kernels that are launched), and what grows with N (products), C
(keys that are read) and N x C (query-key pairs). A draft's chain is N forwards of one token each, so all of it grows
with N.

By data sheet, a forward takes the longer of two times, that of reading weights and keys and that of its products, and a
constant for each layer. What an engine adds (scheduling, sampling, building a tree) is left out.
"""

import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np
from transformers import PretrainedConfig

from eagle3.draft.config import DraftConfig
from eagle3.planning.gpus import Gpu
from eagle3.planning.step import Weights
from eagle3.targets.facts import TargetFacts

LAST_DIGITS = 1e-12  # of a fit, below which a part does not count as negative
ITEMSIZE = 2  # bytes of a key's number, and of a draft's weight: served in bf16


def fit(table: np.ndarray, seconds: Sequence[float]) -> np.ndarray:
    """The x >= 0 for which table @ x has the least squares of relative errors."""
    values = np.array(seconds)
    return non_negative(table / values[:, None], np.ones(len(values)))


def non_negative(table: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least |table @ x - values|^2. table: [N, M], with a small M, as all 2^M choices of columns
    are tried."""
    scale = np.abs(table).max(0)
    scale[scale == 0] = 1.0
    best, least = np.zeros(table.shape[1]), float(values @ values)
    for count in range(1, table.shape[1] + 1):
        for columns in map(list, itertools.combinations(range(table.shape[1]), count)):
            solution, *_ = np.linalg.lstsq(table[:, columns] / scale[columns], values, rcond=None)
            rest = values - table[:, columns] / scale[columns] @ solution
            if (solution > -LAST_DIGITS).all() and rest @ rest < least - LAST_DIGITS:
                best, least = np.zeros(table.shape[1]), float(rest @ rest)
                best[columns] = solution.clip(min=0) / scale[columns]
    return best


@dataclass(frozen=True)
class Timing:
    """Mean seconds of conversations decoded one at a time, with and without a draft."""

    context: float  # mean number of tokens before a round
    drafts: float  # in a round
    # Of a round: the draft reads what was verified, proposes a chain, and the target verifies it.
    extending: float
    proposing: float
    verifying: float
    plain: float  # of a token without the draft

    @classmethod
    def median(cls, timings: Sequence["Timing"]) -> "Timing | None":
        """The median of each number over conversations with equally long chains, since the first one may have paid for
        a start; None if there are none."""
        if not timings:
            return None
        return cls(*np.median([astuple(each) for each in timings], axis=0).tolist())


class MeasuredCosts:
    """Costs of one conversation at a time, fitted to measured times (see `Costs` in payoff.py). What a larger batch
    costs is not known, and asking for it fails an assertion.

    window: the draft's, which bounds the keys that it reads; None for all
    """

    def __init__(self, timings: Sequence[Timing], window: int | None) -> None:
        self.window = window
        forwards = [_forward(each.drafts + 1, each.context) for each in timings]
        forwards += [_forward(1, each.context) for each in timings]
        self.target = fit(
            np.array(forwards), [*(each.verifying for each in timings), *(each.plain for each in timings)]
        )
        chains = np.array([self._chain(each.drafts, each.context) for each in timings])
        self.chain = fit(chains, [each.proposing for each in timings])
        self.extending = sum(each.extending for each in timings) / len(timings)

    def verifying(self, batch: int, tokens: int, context: int) -> float:
        assert batch == 1
        return float(self.target @ _forward(tokens, context))

    def drafting(self, batch: int, drafts: int, context: int) -> float:
        assert batch == 1
        return self.extending + float(self.chain @ self._chain(drafts, context))

    def _chain(self, drafts: float, context: float) -> list[float]:
        """How often each part of a chain is paid."""
        return [drafts, drafts * seen(context, self.window)]


def _forward(tokens: float, context: float) -> list[float]:
    """How often each part of a target's forward is paid."""
    return [1.0, tokens, context, tokens * context]


def seen(context: float, window: int | None) -> float:
    """Tokens that a query sees after `context` of them; window: the most, None for all."""
    return context if window is None else min(context, window)


class KeyLayers(NamedTuple):
    """Layers of a target that keep keys and values alike."""

    layers: int
    bytes: int  # per token and layer
    heads: int  # GPUs that can share these bytes; more of them hold copies
    flops: int  # per query-key pair and layer
    window: int | None  # the most tokens that a query sees


def weight_bytes(target: TargetFacts, tokens: int) -> float:
    """Bytes of the target's weights that a forward over so many tokens reads. Tokens are taken to choose experts
    independently."""
    routed = target.bytes * target.expert_parameters / target.parameters
    return target.bytes - routed * (1 - target.chosen_experts) ** tokens


def token_flops(target: TargetFacts) -> float:
    """The target's products of one token, without attention."""
    config = target.config
    lookup = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return 2 * (target.parameters - target.expert_parameters * (1 - target.chosen_experts) - lookup)


def key_layers(config: PretrainedConfig) -> tuple[KeyLayers, ...]:
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

    target: TargetFacts
    draft: DraftConfig
    gpu: Gpu
    gpus: int

    def verifying(self, batch: int, tokens: int, context: int) -> float:
        target, total = self.target, batch * tokens
        keys, pairs = self._attention(key_layers(target.config), batch, total, context)
        flops = total * token_flops(target) + pairs
        return self._seconds(target.config.num_hidden_layers, weight_bytes(target, total), keys, flops)

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
        weights = self.target.bytes + ITEMSIZE * Weights.of(self.draft, 1).trained
        keys, _ = self._attention([*key_layers(self.target.config), self._draft_layer], batch, 0, context)
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
