"""Prompts by the length of their context: texts cut where an answer goes on, for buckets that double."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from eagle3.errors import UserError
from eagle3.objective.context_counts import contexts_up_to
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
    buckets = contexts_up_to(longest) if contexts is None else contexts
    cuts = np.array(
        [_cuts(np.flatnonzero(sample.loss_mask), buckets, longest) for sample in samples], dtype=np.int64
    ).reshape(-1, len(buckets))
    if not cuts.any():
        raise UserError(
            f"--by-context: no answer in {len(samples)} held-out samples goes on after more than {buckets[0] // 2} tokens (and "
            f"at most {longest}, for the target's context); name longer samples in data.held_out, raise data.max_length, or "
            "name shorter contexts in --contexts"
        )
    found = []
    for bucket, chosen in zip(buckets, _chosen(cuts, per_context), strict=True):
        lengths = cuts[:, len(found)]
        found.append(ContextPrompts(bucket, [samples[index].ids[: lengths[index]] for index in chosen]))
    return found if contexts is not None else _to_the_longest(found)


def prompt_contexts(
    prompts: Sequence[Tensor], contexts: Sequence[int] | None, per_context: int, longest: int
) -> list[ContextPrompts]:
    """As `sample_contexts`, of whole prompts: each belongs to the bucket of its length."""
    buckets = contexts_up_to(longest) if contexts is None else contexts
    cuts = np.array([_cuts(np.array([len(prompt)]), buckets, longest) for prompt in prompts], dtype=np.int64)
    if not cuts.any():
        raise UserError(
            f"--by-context: none of {len(prompts)} prompts belongs to a context, which takes those of more than half its length (the "
            f"longest has {max(map(len, prompts))} tokens); use longer prompts, or name shorter contexts in --contexts"
        )
    chosen = _chosen(cuts, per_context)
    found = [
        ContextPrompts(bucket, [prompts[index] for index in some]) for bucket, some in zip(buckets, chosen, strict=True)
    ]
    return found if contexts is not None else _to_the_longest(found)


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


def _to_the_longest(found: list[ContextPrompts]) -> list[ContextPrompts]:
    """Without the empty buckets behind the last one that has prompts."""
    last = max(place for place, bucket in enumerate(found) if bucket.prompts)
    return found[: last + 1]
