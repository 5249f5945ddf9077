"""A draft's acceptance at every position of texts that its target wrote, in one pass over each text.

A greedy verification accepts a draft if it is the target's choice, so its chain follows the target's text as long as it
is accepted. Running all chains on the tokens of that text, as training does, therefore gives, for every row, the number
of drafts that decoding would accept there. Decoding itself visits only some rows: those where its verifications begin.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.draft.model import Eagle3Draft
from eagle3.draft.pointwise import PLAIN_POINTWISE
from eagle3.evaluation.drafter import judging_attention
from eagle3.objective.unroll import unroll, unroll_inputs
from eagle3.parallel.sequence import Stream, plan_sequence
from eagle3.states.rows import length_buckets
from eagle3.targets.transformers import TransformersTarget

PACKED_TOKENS = 8192  # in one pass; a longer text has one of its own
LIKELIEST = 64  # tokens of the target's distribution that are kept at each place
HEAD_SCALES = tuple(2.0**power for power in range(-5, 6))  # factors on the draft's logits


class WrittenText(NamedTuple):
    """A prompt and what the target wrote after it, greedily. All tensors are on the CPU."""

    ids: Tensor  # [T] int64: the prompt's tokens and the target's
    prompt: int  # number of the prompt's tokens
    states: dict[int, Tensor]  # outputs [T, Ht] of some of the target's layers, by layer
    entropy: Tensor  # [T] fp32, in nats: of the target's distribution of the token after each
    likeliest: Tensor  # [T, L] int64: that distribution's most likely tokens
    probabilities: Tensor  # [T, L] fp32: their probabilities


class ForcedDrafts(NamedTuple):
    """What a draft proposes at each of n places of a text where a whole chain fits. Place i is after token P + i, the
    first that the target wrote being token P."""

    accepted: Tensor  # [n] int64: number of drafts that the target would accept
    # [n, S] fp32: the chance that the first draft is accepted in sampling at temperature 1 (the sum of min(p, q) over
    # the target's likeliest tokens), with the draft's logits multiplied by each of HEAD_SCALES
    sampled: Tensor


@torch.no_grad()
def read_text(target: TransformersTarget, ids: Tensor, prompt: int, layers: Sequence[int]) -> WrittenText:
    """Let the target read a text [T] that it wrote after the first `prompt` tokens. layers: those whose outputs to
    keep."""
    with target.captured_layers(layers) as outputs:
        output = target.decoder(input_ids=ids[None].to(target.device), attention_mask=None, use_cache=False)
    parts = []
    for last in output.last_hidden_state[0].split(1024):
        logs = target.own_logits(output, last).float().log_softmax(-1)
        best = logs.topk(min(LIKELIEST, logs.shape[-1]))
        parts.append((-(logs.exp() * logs).nansum(-1).cpu(), best.indices.cpu(), best.values.exp().cpu()))
    states = {layer: outputs[layer][0].cpu() for layer in layers}
    return WrittenText(ids.cpu(), prompt, states, *map(torch.cat, zip(*parts, strict=True)))


@torch.no_grad()
def forced_drafts(
    draft: Eagle3Draft, d2t: Tensor, texts: Sequence[WrittenText], aux: Sequence[Tensor], draft_tokens: int
) -> list[ForcedDrafts]:
    """What the draft proposes at every place of each text. aux: for each text the auxiliary states [T, 3Ht] that the
    draft reads. d2t [Vd] is on the draft's device."""
    attention, device = judging_attention(draft), d2t.device
    results: dict[int, ForcedDrafts] = {}
    for batch in length_buckets([len(text.ids) for text in texts], PACKED_TOKENS):
        # A chain after token s + 1 begins at row s, and ends with token s + 1 + draft_tokens.
        chains = [range(texts[i].prompt - 1, len(texts[i].ids) - 1 - draft_tokens) for i in batch]
        answers = [torch.arange(len(texts[i].ids)) >= texts[i].prompt for i in batch]
        stream = Stream.pack([texts[i].ids for i in batch], answers, "served")
        plan = plan_sequence(stream, draft.reach(draft_tokens))
        states = torch.cat([aux[i] for i in batch])[plan.rows]
        inputs = unroll_inputs(stream, plan, states.to(draft.fc.weight.dtype))
        inputs = inputs.map(lambda tensor: tensor.to(device), lambda rows: rows)
        rows = torch.cat(
            [start + torch.tensor(chain) for start, chain in zip(stream.starts, chains, strict=True)]
        ).long()
        slots, right, first = torch.searchsorted(plan.queries, rows).to(device), [], None
        for step, output in enumerate(unroll(draft, attention, inputs, pointwise=PLAIN_POINTWISE)):
            logits, wrote = draft.logits(output[slots]), stream.ids[rows + 2 + step].to(device)
            first = logits if first is None else first
            best = logits.argmax(-1)
            right.append(best + d2t[best] == wrote)
        # The first draft guesses what the target would write after the chain's token.
        after = [(texts[i], slice(chain.start + 1, chain.stop + 1)) for i, chain in zip(batch, chains, strict=True)]
        likeliest = torch.cat([text.likeliest[part] for text, part in after]).to(device)
        probabilities = torch.cat([text.probabilities[part] for text, part in after]).to(device)
        sampled = _sampled(first, d2t, likeliest, probabilities)
        accepted = torch.stack(right).int().cumprod(0).sum(0).cpu()
        lengths = [len(chain) for chain in chains]
        split = zip(batch, accepted.split(lengths), sampled.split(lengths), strict=True)
        results |= {i: ForcedDrafts(counts, each) for i, counts, each in split}
    return [results[i] for i in range(len(texts))]


def _sampled(logits: Tensor, d2t: Tensor, likeliest: Tensor, probabilities: Tensor) -> Tensor:
    """The chances [n, S] of ForcedDrafts. logits: [n, Vd]. likeliest, probabilities: [n, L], the target's."""
    ids = d2t + torch.arange(len(d2t), device=d2t.device)
    place = torch.searchsorted(ids, likeliest).clamp(max=len(ids) - 1)
    known = ids[place] == likeliest
    chances = []
    for scale in HEAD_SCALES:
        q = (logits.float() * scale).softmax(-1).gather(1, place).where(known, 0.0)
        chances.append(torch.minimum(q, probabilities).sum(-1))
    return torch.stack(chances, -1).cpu()
