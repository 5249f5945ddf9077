"""A draft's acceptance at every position of texts that its target wrote, in one pass over each text.

A greedy verification accepts a draft if it is the target's choice, so its chain follows the target's text as long as it
is accepted. Running all chains on the tokens of that text, as training does, therefore gives, for every row, the number
of drafts that decoding would accept there. Decoding itself visits only some rows: those where its verifications begin.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.attention.block import PLAIN_BLOCKS
from eagle3.attention.ttt import TTTAttention
from eagle3.draft.model import Eagle3Draft
from eagle3.evaluation.speculative import plain_greedy
from eagle3.objective.unroll import unroll, unroll_inputs
from eagle3.parallel.sequence import SequenceSharding, Stream, plan_sequence
from eagle3.targets.transformers import TransformersTarget


class WrittenText(NamedTuple):
    """A prompt and what the target wrote after it, greedily."""

    ids: Tensor  # [T] int64, on the CPU: the prompt's tokens and the target's
    aux: Tensor  # [T, 3Ht]: the target's auxiliary states
    prompt: int  # number of the prompt's tokens


def written_text(target: TransformersTarget, prompt: Tensor, new_tokens: int) -> WrittenText:
    """What the target writes after a prompt [P], up to `new_tokens` tokens, and its states over the whole."""
    answer = plain_greedy(target, prompt, new_tokens=new_tokens).tokens
    ids = torch.cat((prompt.cpu(), torch.tensor(answer)))
    (rows,) = target.prefill([ids])
    return WrittenText(ids, rows.aux, len(prompt))


@torch.no_grad()
def accepted_drafts(draft: Eagle3Draft, d2t: Tensor, text: WrittenText, draft_tokens: int) -> Tensor:
    """How many of `draft_tokens` drafts are accepted at each place of a text where a whole chain fits: int64 [n].

    Entry i is for the chain after token P + i, the first token that the target wrote being token P; n may be 0. The
    draft is on the device of `text.aux`, and d2t [Vd], too.
    """
    draft.draft_config.check_chain(draft_tokens, "drafted tokens", "draft")
    first, stop = text.prompt - 1, len(text.ids) - 1 - draft_tokens  # a chain after token s + 1 begins at row s
    if stop <= first:
        return torch.zeros(0, dtype=torch.int64)
    stream = Stream.pack([text.ids], [torch.ones(len(text.ids), dtype=torch.bool)])
    plan = plan_sequence(
        stream, draft_tokens, SequenceSharding(query_selection="all"), 0, window=draft.draft_config.window
    )
    alone, device = draft.pg_collection.tp, text.aux.device
    kernels = None if device.type == "cpu" else PLAIN_BLOCKS
    attention = TTTAttention.over(alone, alone, draft.scale, kernels=kernels)
    inputs = unroll_inputs(stream, plan, draft_tokens, text.aux[plan.rows.to(device)].to(draft.fc.weight.dtype))
    inputs = inputs.map(lambda tensor: tensor.to(device), lambda rows: rows)
    at = plan.queries.tolist()
    chains = slice(at.index(first), at.index(first) + stop - first)
    right = []
    for step, output in enumerate(unroll(draft, attention, inputs)):
        best = draft.logits(output[chains]).argmax(-1)
        wrote = text.ids[first + 2 + step : stop + 2 + step].to(device)
        right.append(best + d2t[best] == wrote)
    return torch.stack(right).int().cumprod(0).sum(0).cpu()
