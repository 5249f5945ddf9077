"""Prompts by the length of their context: texts cut where an answer goes on, for buckets that double."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from eagle3.errors import UserError
from eagle3.objective.losses import SHORTEST, contexts_up_to
from eagle3.text.samples import SampleSet


class ContextPrompts(NamedTuple):
    """prompts: int64 [P] each, with context / 2 < P <= context."""

    context: int
    prompts: list[Tensor]


def sample_contexts(
    samples: SampleSet, contexts: Sequence[int] | None, per_context: int, longest: int
) -> list[ContextPrompts]:
    """For each context up to `per_context` prompts of at most `longest` tokens: the beginnings of samples, each as long as
    the bucket allows and followed by a supervised token. Buckets take the same samples where these are long enough, and
    spread evenly over the set what they take beside.

    contexts: ascending; None for 512, 1024, ... as far as there are prompts. Raises UserError where no bucket has one.
    """
    texts = [(sample.ids, np.flatnonzero(sample.loss_mask)) for sample in samples]
    if found := _bucketed(texts, contexts, per_context, longest):
        return found
    raise UserError(
        f"--by-context: no answer in {len(samples)} held-out samples goes on after more than "
        f"{(contexts or [SHORTEST])[0] // 2} tokens (and at most {longest}, for the target's context); name longer samples in "
        "data.held_out, raise data.max_length, or name shorter contexts in --contexts"
    )


def prompt_contexts(
    prompts: Sequence[Tensor], contexts: Sequence[int] | None, per_context: int, longest: int
) -> list[ContextPrompts]:
    """As `sample_contexts`, of whole prompts: each belongs to the bucket of its length."""
    texts = [(prompt, np.array([len(prompt)])) for prompt in prompts]
    if found := _bucketed(texts, contexts, per_context, longest):
        return found
    raise UserError(
        f"--by-context: none of {len(prompts)} prompts belongs to a context, which takes those of more than half its length (the "
        f"longest has {max(map(len, prompts))} tokens); use longer prompts, or name shorter contexts in --contexts"
    )


def _bucketed(
    texts: Sequence[tuple[Tensor, np.ndarray]], contexts: Sequence[int] | None, per_context: int, longest: int
) -> list[ContextPrompts]:
    """Of texts, each with the places where it may be cut, ascending. Empty where no bucket has a prompt; without contexts no
    empty bucket comes last."""
    buckets = contexts_up_to(longest) if contexts is None else contexts
    cuts = np.array([_cuts(places, buckets, longest) for _, places in texts], np.int64).reshape(-1, len(buckets))
    if not cuts.any():
        return []
    found = [
        ContextPrompts(bucket, [texts[index][0][: lengths[index]] for index in chosen])
        for bucket, lengths, chosen in zip(buckets, cuts.T, _chosen(cuts, per_context), strict=True)
    ]
    return found if contexts is not None else found[: 1 + int(cuts.any(0).nonzero()[0][-1])]


def _cuts(rows: np.ndarray, buckets: Sequence[int], longest: int) -> list[int]:
    """For each bucket the last of `rows` (ascending) that it allows, 0 where there is none."""
    cuts = []
    for bucket in buckets:
        before = rows[: np.searchsorted(rows, min(bucket, longest), side="right")]
        cuts.append(int(before[-1]) if len(before) and 2 * before[-1] > bucket else 0)
    return cuts


def _chosen(cuts: np.ndarray, count: int) -> list[list[int]]:
    """Up to `count` texts for each bucket, cuts [texts, buckets]. Longer buckets choose first, for they have fewer."""
    chosen, earlier = [], []
    for lengths in cuts.T[::-1]:
        kept = [index for index in earlier if lengths[index]][:count]
        others = np.setdiff1d(np.flatnonzero(lengths), kept)
        wanted = min(count - len(kept), len(others))
        spread = np.linspace(0, len(others) - 1, wanted).round().astype(int) if wanted else []
        chosen.append(sorted([*kept, *(int(others[place]) for place in spread)]))
        earlier += [index for index in chosen[-1] if index not in earlier]
    return chosen[::-1]
