"""The definition of EAGLE3 draft training in the plainest torch: dense, one document at a time, autograd.

Nothing here is packed, skipped, blocked or shared with the code under test, so that agreement means something. Tests
use it in fp64. benchmarks/step_time.py times it in fp32, as the step that one would write first, so whatever is cheap
to keep is computed only once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3.draft.config import DraftConfig


@dataclass(frozen=True)
class Document:
    """ids [T] int64; loss_mask [T] bool; aux [T, A Ht] and last [T, Ht], the target's hidden states."""

    ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    last: Tensor


@dataclass(frozen=True)
class Case:
    """A draft, its target's head [V, Ht] and a global batch. weights: under exported names, in fp32. scale, cap: what
    the target does to its logits after the head. rows: the rule that says which rows count, served or reference."""

    config: DraftConfig
    weights: dict[str, Tensor]
    t2d: Tensor
    target_head: Tensor
    documents: tuple[Document, ...]
    scale: float = 1.0
    cap: float | None = None
    rows: str = "reference"

    def teacher_logits(self, last: Tensor) -> Tensor:
        """Logits [N, V] from last hidden states [N, Ht], in the states' number format."""
        logits = self.scale * (last @ self.target_head.to(last.dtype).T)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    @property
    def d2t(self) -> Tensor:
        """[Vd] int64: what is added to a draft id to get the target's."""
        return self.t2d.nonzero().flatten() - torch.arange(int(self.t2d.sum()))


@dataclass(frozen=True)
class Loss:
    """name: kl, lk_alpha or lk_lambda. divide_by: what each step's sum is divided by; None for its counted
    positions. by_sample: each step is the mean over the documents that it supervises of the means over their supervised
    positions."""

    name: str = "kl"
    divide_by: int | None = None
    step_decay: float = 0.8
    kl_scale: float = 1.0
    kl_decay: float = 3.0
    by_sample: bool = False


class Sums(NamedTuple):
    """Sums over positions, [K] each: cross_entropy; overlap (the acceptance rate), with a gradient if the loss depends
    on it; int64 correct, counted, supervised, and samples that are supervised."""

    cross_entropy: Tensor
    overlap: Tensor
    correct: Tensor
    counted: Tensor
    supervised: Tensor
    samples: Tensor

    def positions(self, loss: Loss) -> Tensor:
        """What the first two are divided by for their means."""
        return self.samples if loss.by_sample else self.counted


@dataclass(frozen=True)
class Defined:
    """The batch's loss; [K] fp64 step_losses, correct, acceptance (0 where nothing counts), int64 counted, supervised,
    samples; and, by exported name, the gradients of everything but the embedding."""

    loss: Tensor
    step_losses: Tensor
    correct: Tensor
    acceptance: Tensor
    counted: Tensor
    supervised: Tensor
    samples: Tensor
    gradients: dict[str, Tensor]

    @property
    def accuracy(self) -> Tensor:
        return self.correct / self.supervised.clamp(min=1)


def small_config(**changes: Any) -> DraftConfig:
    sizes = {"hidden_size": 16, "target_hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    return DraftConfig(**{**sizes, "vocab_size": 40, "draft_vocab_size": 24, **changes})


def random_case(loss_masks: Sequence[Sequence[int]], seed: int = 0, rows: str = "reference", **changes: Any) -> Case:
    """A case with one document per loss mask, of the mask's length, and a draft whose weights are far from their
    initial values. changes: to `small_config`. All numbers are fp32 values, so that they are the same in
    fp32 and every wider dtype."""
    config = small_config(**changes)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def matrix(rows: int, columns: int) -> Tensor:
        return normal(rows, columns, scale=columns**-0.5)

    hidden, wide, mlp = config.hidden_size, config.target_hidden_size, config.intermediate_size
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    weights = {
        "embed_tokens.weight": normal(config.vocab_size, hidden),
        "fc.weight": matrix(hidden, config.aux_width),
        "midlayer.self_attn.q_proj.weight": 2 * matrix(query, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": 2 * matrix(key, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": matrix(key, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": matrix(hidden, query),
        "midlayer.mlp.gate_proj.weight": matrix(mlp, hidden),
        "midlayer.mlp.up_proj.weight": matrix(mlp, hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, mlp),
        "lm_head.weight": 2 * matrix(config.draft_vocab_size, hidden),
    }
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        weights[f"{name}.weight"] = 1 + normal(hidden, scale=0.3)
    if config.attention_bias:
        for name, width in (("q", query), ("k", key), ("v", key), ("o", hidden)):
            weights[f"midlayer.self_attn.{name}_proj.bias"] = normal(width)
    if config.qk_norm:
        for name in "qk":
            weights[f"midlayer.self_attn.{name}_norm.weight"] = 1 + normal(config.head_dim, scale=0.3)
    if config.norm_before_fc:
        weights["input_norm.weight"] = 1 + normal(config.aux_width, scale=0.3)
    if config.fc_norm:
        weights |= {f"fc_norm.{i}.weight": 1 + normal(wide, scale=0.3) for i in range(config.num_aux_hidden_states)}
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]] = True
    documents = tuple(
        Document(
            ids=torch.randint(config.vocab_size, (len(mask),), generator=generator),
            loss_mask=torch.tensor(mask, dtype=torch.bool),
            aux=normal(len(mask), config.aux_width, scale=2.0),
            last=normal(len(mask), wide),
        )
        for mask in loss_masks
    )
    return Case(config, weights, t2d, 2 * matrix(config.vocab_size, wide), documents, rows=rows)


def define(case: Case, steps: int, loss: Loss) -> Defined:
    """Loss and gradients of the global batch."""
    leaves = {name: weight.double().clone() for name, weight in case.weights.items()}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name != "embed_tokens.weight")
    total, step_losses, sums = dense_loss(case, leaves, steps, loss)
    trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(total, trained.values())
    return Defined(
        loss=total.detach(),
        step_losses=step_losses.detach(),
        correct=sums.correct.double(),
        acceptance=(sums.overlap / sums.positions(loss).clamp(min=1)).detach(),
        counted=sums.counted,
        supervised=sums.supervised,
        samples=sums.samples,
        gradients=dict(zip(trained, gradients, strict=True)),
    )


def dense_loss(case: Case, weights: dict[str, Tensor], steps: int, loss: Loss) -> tuple[Tensor, Tensor, Sums]:
    """The global batch's loss, for autograd; its step losses [K]; and the sums that they are made of. All are in the
    number format of `weights`, which have exported names."""
    results = [_document(case, weights, document, steps, loss) for document in case.documents]
    sums = Sums(*(torch.stack(parts).sum(0) for parts in zip(*results, strict=True)))
    steps_of_batch = zip(*sums[:2], sums.positions(loss), strict=True)
    step_losses = torch.stack([_step_loss(loss, *of_step) for of_step in steps_of_batch])
    total = sum(loss.step_decay**step * step_loss for step, step_loss in enumerate(step_losses))
    return total, step_losses, sums


def _step_loss(loss: Loss, cross_entropy: Tensor, overlap: Tensor, counted: Tensor) -> Tensor:
    if not counted:
        return 0 * cross_entropy
    kl, a = cross_entropy / (loss.divide_by or counted), overlap / counted
    if loss.name == "lk_alpha":
        return -a.log()
    if loss.name == "lk_lambda":
        w = loss.kl_scale * torch.exp(-loss.kl_decay * a.detach())
        return w * kl + (1 - w) * (1 - a)
    assert loss.name == "kl"
    return kl


def _document(case: Case, w: dict[str, Tensor], document: Document, steps: int, loss: Loss) -> Sums:
    config, t2d, dtype = case.config, case.t2d, w["fc.weight"].dtype
    length, target_id = len(document.ids), t2d.nonzero().flatten()
    rule = {"served": served, "reference": reference}[case.rows]
    u = _shift(document.ids)
    # For position t: what the target predicts at the next row. Step k uses that of t + k.
    z = case.teacher_logits(_shift(document.last.to(dtype)))
    y = z.argmax(-1)
    q_full = (z[:, target_id] - z.logsumexp(-1, keepdim=True)).exp()
    q = z[:, target_id].softmax(-1)
    del z

    aux, eps = document.aux.to(dtype), config.rms_norm_eps
    if config.norm_before_fc:
        aux = _rms(aux, w["input_norm.weight"], eps)
    if config.fc_norm:
        states = aux.chunk(config.num_aux_hidden_states, -1)
        aux = torch.cat([_rms(state, w[f"fc_norm.{i}.weight"], eps) for i, state in enumerate(states)], -1)
    h = aux @ w["fc.weight"].T
    group = config.num_attention_heads // config.num_key_value_heads
    distance = torch.arange(length)[:, None] - torch.arange(length)
    cos, sin = _rotation(config, torch.arange(length + steps), dtype)
    keys, values, sums = [], [], []
    for step in range(steps):
        x = torch.cat(
            (
                _rms(w["embed_tokens.weight"][u], w["midlayer.input_layernorm.weight"], eps),
                _rms(h, w["midlayer.hidden_norm.weight"], eps),
            ),
            -1,
        )
        query, key, value = (_heads(_affine(x, w, f"midlayer.self_attn.{name}_proj"), config) for name in "qkv")
        if config.qk_norm:
            query = _rms(query, w["midlayer.self_attn.q_norm.weight"], eps)
            key = _rms(key, w["midlayer.self_attn.k_norm.weight"], eps)
        rotation = cos[step : step + length], sin[step : step + length]
        query = _rotate(query, *rotation) * config.head_dim**-0.5
        keys.append(_rotate(key, *rotation).repeat_interleave(group, 0))
        values.append(value.repeat_interleave(group, 0))
        unseen = distance < 0
        if config.window is not None:
            unseen = unseen | (distance + step >= config.window)
        prefix = (query @ keys[0].transpose(1, 2)).masked_fill(unseen, float("-inf"))
        own = [(query * own_key).sum(-1, keepdim=True) for own_key in keys[1:]]
        p = torch.cat([prefix, *own], -1).softmax(-1)
        o = p[..., :length] @ values[0]
        for i, own_value in enumerate(values[1:]):
            o = o + p[..., length + i : length + i + 1] * own_value
        residual = _rms(h, w["midlayer.hidden_norm.weight"], eps) if config.norm_before_residual else h
        h = residual + _affine(o.transpose(0, 1).flatten(1), w, "midlayer.self_attn.o_proj")
        normed = _rms(h, w["midlayer.post_attention_layernorm.weight"], eps)
        gate, up = (normed @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        h = h + (torch.nn.functional.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
        if config.norm_output:
            h = _rms(h, w["norm.weight"], eps)
        # Positions whose text ends before t + k have no row.
        rows = h[: max(0, length - step)]
        final = rows if config.norm_output else _rms(rows, w["norm.weight"], eps)
        log_p = (final @ w["lm_head.weight"].T).log_softmax(-1)
        taught = rule(document.loss_mask.bool(), step)
        counts = t2d[y[step:]] & taught
        cross_entropy = -(q[step:] * log_p).sum(-1)[counts].sum()
        with torch.set_grad_enabled(torch.is_grad_enabled() and loss.name != "kl"):
            overlap = torch.minimum(q_full[step:], log_p.exp()).sum(-1)[counts].sum()
        correct = (taught & (target_id[log_p.argmax(-1)] == y[step:])).sum()
        if loss.by_sample:
            cross_entropy, overlap = (each / taught.sum().clamp(min=1) for each in (cross_entropy, overlap))
        sums.append((cross_entropy, overlap, correct, counts.sum(), taught.sum(), taught.any().long()))
        u = _shift(u)
    return Sums(*(torch.stack(column) for column in zip(*sums, strict=True)))


def served(mask: Tensor, step: int) -> Tensor:
    """[T - step] bool: rows t whose proposal in this step an engine makes. A chain begins at t when the target has just
    written token t + 1 of an answer, and proposes t + 2, ..., t + 2 + step, which only that answer can have."""
    places = range(max(0, len(mask) - step))
    return torch.tensor([t + step + 2 < len(mask) and bool(mask[t + 1 : t + step + 3].all()) for t in places]).bool()


def reference(mask: Tensor, step: int) -> Tensor:
    """[T - step] bool: rows t that the original code counts in this step, by the mask of row t + step, which has a
    successor."""
    marked = mask.clone()
    marked[-1] = False
    return marked[step:]


def _shift(x: Tensor) -> Tensor:
    """x moved left by one along the tokens, filled with zeros."""
    return torch.cat((x[1:], torch.zeros_like(x[:1])))


def _affine(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _heads(x: Tensor, config: DraftConfig) -> Tensor:
    """[T, heads * d] -> [heads, T, d]."""
    return x.unflatten(-1, (-1, config.head_dim)).transpose(0, 1)


def _rotation(config: DraftConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, d]. Only the frequencies of scaled kinds come from transformers, in fp32."""
    rope, half = config.rope_parameters, config.head_dim // 2
    frequencies = rope["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
    scaling = 1.0
    if rope["rope_type"] != "default":
        llama = LlamaConfig(
            head_dim=config.head_dim, max_position_embeddings=config.max_position_embeddings, rope_parameters=dict(rope)
        )
        reference = LlamaRotaryEmbedding(llama)
        frequencies, scaling = reference.inv_freq.double(), reference.attention_scaling
    angles = positions[:, None].double() * frequencies
    return (angles.cos().tile(2) * scaling).to(dtype), (angles.sin().tile(2) * scaling).to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [heads, T, d]: half-rotation."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin
