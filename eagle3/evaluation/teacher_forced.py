"""A draft's acceptance at every position of texts that its target wrote, in one pass over each text.

A greedy verification accepts a draft if it is the target's choice, so its chain follows the target's text as long as it
is accepted. Running all chains on the tokens of that text, as training does, therefore gives, for every row, the number
of drafts that decoding would accept there. Decoding itself visits only some rows: those where its verifications begin.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.attention.block import PLAIN_BLOCKS
from eagle3.attention.ttt import TTTAttention
from eagle3.draft.model import Eagle3Draft
from eagle3.objective.unroll import unroll, unroll_inputs
from eagle3.parallel.sequence import SequenceSharding, Stream, plan_sequence
from eagle3.targets.transformers import TransformersTarget

HEAD_SCALES = tuple(2.0**power for power in range(-5, 6))  # factors on the draft's logits


class WrittenText(NamedTuple):
    """A prompt and what the target wrote after it, greedily. All tensors are on the CPU."""

    ids: Tensor  # [T] int64: the prompt's tokens and the target's
    prompt: int  # number of the prompt's tokens
    states: dict[int, Tensor]  # outputs [T, Ht] of some of the target's layers, by layer
    entropy: Tensor  # [T] fp32, in nats: of the target's choice of the token after each


class ForcedDrafts(NamedTuple):
    """What a draft proposes at each of n places of a text where a whole chain fits. Place i is after token P + i, the
    first that the target wrote being token P."""

    accepted: Tensor  # [n] int64: number of drafts that the target would accept
    # [S] fp64: minus the log probability of the target's token under the first draft's distribution, summed over the
    # places where the draft knows that token, with the logits multiplied by each of HEAD_SCALES
    losses: Tensor


@torch.no_grad()
def read_text(target: TransformersTarget, ids: Tensor, prompt: int, layers: Sequence[int]) -> WrittenText:
    """Let the target read a text [T] that it wrote after the first `prompt` tokens. layers: those whose outputs to
    keep."""
    with target.captured_layers(layers) as outputs:
        output = target.decoder(input_ids=ids[None].to(target.device), attention_mask=None, use_cache=False)
    entropy = []
    for last in output.last_hidden_state[0].split(1024):
        logs = target.own_logits(output, last).float().log_softmax(-1)
        entropy.append(-(logs.exp() * logs).nansum(-1).cpu())
    states = {layer: outputs[layer][0].cpu() for layer in layers}
    return WrittenText(ids.cpu(), prompt, states, torch.cat(entropy))


@torch.no_grad()
def forced_drafts(draft: Eagle3Draft, d2t: Tensor, text: WrittenText, aux: Tensor, draft_tokens: int) -> ForcedDrafts:
    """What the draft proposes at every place of a text. aux: [T, 3Ht], the auxiliary states that it reads. d2t [Vd] is
    on the draft's device."""
    draft.draft_config.check_chain(draft_tokens, "drafted tokens", "draft")
    first, stop = text.prompt - 1, len(text.ids) - 1 - draft_tokens  # a chain after token s + 1 begins at row s
    losses = torch.zeros(len(HEAD_SCALES), dtype=torch.float64)
    if stop <= first:
        return ForcedDrafts(torch.zeros(0, dtype=torch.int64), losses)
    stream = Stream.pack([text.ids], [torch.ones(len(text.ids), dtype=torch.bool)])
    plan = plan_sequence(
        stream, draft_tokens, SequenceSharding(query_selection="all"), 0, window=draft.draft_config.window
    )
    alone, device = draft.pg_collection.tp, d2t.device
    kernels = None if device.type == "cpu" else PLAIN_BLOCKS
    attention = TTTAttention.over(alone, alone, draft.scale, kernels=kernels)
    inputs = unroll_inputs(stream, plan, draft_tokens, aux[plan.rows].to(draft.fc.weight.dtype))
    inputs = inputs.map(lambda tensor: tensor.to(device), lambda rows: rows)
    at = plan.queries.tolist()
    chains = slice(at.index(first), at.index(first) + stop - first)
    right = []
    for step, output in enumerate(unroll(draft, attention, inputs)):
        logits = draft.logits(output[chains])
        best = logits.argmax(-1)
        wrote = text.ids[first + 2 + step : stop + 2 + step].to(device)
        right.append(best + d2t[best] == wrote)
        if step == 0:
            losses = _losses(logits, d2t, wrote)
    return ForcedDrafts(torch.stack(right).int().cumprod(0).sum(0).cpu(), losses)


def _losses(logits: Tensor, d2t: Tensor, wrote: Tensor) -> Tensor:
    ids = d2t + torch.arange(len(d2t), device=d2t.device)
    place = torch.searchsorted(ids, wrote).clamp(max=len(ids) - 1)
    known = ids[place] == wrote
    logits, place = logits[known].double(), place[known]
    return torch.stack([F.cross_entropy(logits * scale, place, reduction="sum") for scale in HEAD_SCALES]).cpu()
