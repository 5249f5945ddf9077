"""The baseline of step_time.py: the definition written out densely, batch 1, as one would in plain PyTorch with autograd.

Every TTT step works on all tokens, with scores of every token against every token and logits [T, Vd] of the whole
draft vocabulary; nothing is skipped, cut into blocks or recomputed. It has what is cheap to have: the teacher's softmax is
made once for all steps, rotary tables once, and rows are cut before lm_head, not after.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.draft.config import DraftConfig
from eagle3.objective.model import MicroBatch
from eagle3.parallel.sequence import SequencePlan, Stream


class DenseInputs(NamedTuple):
    """One document of T tokens. ids [T]; aux [T, 3Ht]. Of the row after each token: last [T, Ht], best [T] (the draft id of
    the teacher's token, -1 where there is none), logsumexp [T]. supervised [T] bool: of each token; head [Vd, Ht]."""

    ids: Tensor
    aux: Tensor
    last: Tensor
    best: Tensor
    logsumexp: Tensor
    supervised: Tensor
    head: Tensor


class DenseResult(NamedTuple):
    """loss: differentiable scalar. cross_entropy, overlap, correct: [K] sums over positions, as StepSums has them."""

    loss: Tensor
    cross_entropy: Tensor
    overlap: Tensor
    correct: Tensor


def dense_inputs(stream: Stream, plan: SequencePlan, batch: MicroBatch) -> DenseInputs:
    """The whole document, from what one process has of it. Rows that the plan skips are zeros: they change no result."""
    assert len(stream.starts) == 1, "the dense baseline takes one document"
    teacher = batch.teacher

    def whole(part: Tensor, rows: Tensor, fill: float = 0) -> Tensor:
        return part.new_full((stream.tokens, *part.shape[1:]), fill).index_copy_(0, rows, part)

    before = plan.teacher - 1
    return DenseInputs(
        ids=stream.ids,
        aux=whole(batch.inputs.aux, plan.rows),
        last=whole(teacher.last, before),
        best=whole(teacher.best, before, -1),
        logsumexp=whole(teacher.logsumexp, before, torch.tensor(float(len(teacher.head))).log()),
        supervised=stream.supervised,
        head=teacher.head,
    )


def dense_bytes(config: DraftConfig, steps: int, tokens: int, itemsize: int) -> int:
    """About what a step holds at its peak: of [T, Vd] the log-probabilities of every step, both softmaxes of the teacher and
    three gradients under way; of [heads, T, T] the attention of every step and three more."""
    logits = (steps + 5) * config.draft_vocab_size
    scores = (steps + 3) * config.num_attention_heads * tokens
    return itemsize * tokens * (logits + scores)


def dense_loss(
    weights: dict[str, Tensor], config: DraftConfig, inputs: DenseInputs, steps: int, step_decay: float = 0.8
) -> DenseResult:
    """weights: of the draft, under exported names. Each step's cross-entropy is divided by its counted positions."""
    tokens = len(inputs.ids)
    with torch.no_grad():
        z = inputs.last @ inputs.head.t()
        q = z.softmax(-1)
        q_full = z.sub_(inputs.logsumexp[:, None]).exp_()
        counted = inputs.supervised & (inputs.best >= 0)
        unseen = torch.ones(tokens, tokens, dtype=torch.bool).triu_(1)
    cos, sin = _rotary_table(config, tokens + steps, inputs.aux.dtype)
    u, h = _left(inputs.ids, 1), inputs.aux @ weights["fc.weight"].t()
    keys, values, loss, sums = [], [], 0, []
    for k in range(steps):
        rotation = cos[k : k + tokens], sin[k : k + tokens]
        h = _layer(weights, config, F.embedding(u, weights["embed_tokens.weight"]), h, rotation, unseen, keys, values)
        rows = max(0, tokens - k)  # whose teacher row is in the document
        logits = F.linear(_rms(h[:rows], weights["norm.weight"], config), weights["lm_head.weight"])
        log_p = logits.log_softmax(-1)
        cross_entropy = -(q[k:] * log_p).sum(-1)[counted[k:]].sum()
        loss = loss + step_decay**k * cross_entropy / counted[k:].sum().clamp(min=1)
        with torch.no_grad():
            overlap = torch.minimum(q_full[k:], log_p.exp()).sum(-1)[counted[k:]].sum()
            correct = (inputs.supervised[k:] & (log_p.argmax(-1) == inputs.best[k:])).sum()
        sums.append((cross_entropy.detach(), overlap, correct))
        u = _left(u, 1)
    return DenseResult(loss, *(torch.stack(column).double() for column in zip(*sums, strict=True)))


def _layer(
    w: dict[str, Tensor],
    config: DraftConfig,
    embedded: Tensor,
    h: Tensor,
    rotation: tuple[Tensor, Tensor],
    unseen: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
) -> Tensor:
    """One TTT step: h [T, H] -> h [T, H]; its keys and values [heads, T, d] are appended to `keys` and `values`."""
    x = torch.cat(
        (
            _rms(embedded, w["midlayer.input_layernorm.weight"], config),
            _rms(h, w["midlayer.hidden_norm.weight"], config),
        ),
        -1,
    )
    group = config.num_attention_heads // config.num_key_value_heads
    query, key, value = (
        (x @ w[f"midlayer.self_attn.{name}_proj.weight"].t()).unflatten(-1, (-1, config.head_dim)).transpose(0, 1)
        for name in "qkv"
    )
    query = _rotate(query, *rotation) * config.head_dim**-0.5
    keys.append(_rotate(key, *rotation).repeat_interleave(group, 0))
    values.append(value.repeat_interleave(group, 0))
    prefix = (query @ keys[0].transpose(1, 2)).masked_fill(unseen, float("-inf"))
    own = [(query * own_key).sum(-1, keepdim=True) for own_key in keys[1:]]
    p = torch.cat((prefix, *own), -1).softmax(-1)
    tokens = len(h)
    attended = p[..., :tokens] @ values[0]
    for i, own_value in enumerate(values[1:], tokens):
        attended = attended + p[..., i : i + 1] * own_value
    h = h + attended.transpose(0, 1).flatten(1) @ w["midlayer.self_attn.o_proj.weight"].t()
    normed = _rms(h, w["midlayer.post_attention_layernorm.weight"], config)
    gate, up = (normed @ w[f"midlayer.mlp.{name}_proj.weight"].t() for name in ("gate", "up"))
    return h + (F.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].t()


def _rms(x: Tensor, weight: Tensor, config: DraftConfig) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, config.rms_norm_eps)


def _left(x: Tensor, by: int) -> Tensor:
    return F.pad(x[by:], (0, by))


def _rotary_table(config: DraftConfig, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head_dim] of positions 0..length."""
    exact = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, config.head_dim, 2, dtype=exact) / config.head_dim
    angles = torch.arange(length, dtype=exact)[:, None] / config.rope_parameters["rope_theta"] ** exponents
    return angles.cos().tile(2).to(dtype), angles.sin().tile(2).to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin
