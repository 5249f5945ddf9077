"""The acceptance length that decoding would measure on texts that the target wrote, from one pass of the unroll.

A chain of drafts follows such a text as long as it is accepted. So one pass, which runs the chains of all rows on the
text itself, knows what a verification would accept wherever one may begin; and a verification that begins at row t and
accepts n drafts is followed by one at row t + n + 1. The first begins at the row before the answer, after the prefill,
whose token belongs to no verification, as in eagle3/evaluation/speculative.py.

For texts written greedily and drafts that are right or wrong, this is what greedy decoding counts. For texts sampled at
temperature 1, and the chances that their own tokens were accepted drafts, it is what sampling gives on average over all
texts that the target may write. Of other texts neither number is a promise.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3.parallel.sequence import SequencePlan, Stream

SHORTEST = 512  # tokens; the first entry of every list of contexts


class ChainCounts(NamedTuple):
    """Verifications by context, and the tokens that they add to the output: [B] fp64 each."""

    tokens: Tensor
    verifications: Tensor

    @property
    def length(self) -> float:
        """The acceptance length of all contexts together; 1, as without a draft, if nothing was verified."""
        return float(self.tokens.sum() / self.verifications.sum()) if self.verifications.any() else 1.0

    def lengths(self) -> list[float | None]:
        """The acceptance length of each context; None if nothing was verified there."""
        pairs = zip(self.tokens.tolist(), self.verifications.tolist(), strict=True)
        return [tokens / verifications if verifications else None for tokens, verifications in pairs]


def contexts_up_to(longest: int) -> list[int]:
    """Contexts of 512, 1024, 2048, ... tokens, up to the first that is at least `longest`."""
    doublings = ((longest - 1) // SHORTEST).bit_length() if longest > SHORTEST else 0
    return [SHORTEST * 2**doubling for doubling in range(doublings + 1)]


def walk(reach: Tensor) -> tuple[list[float], list[float]]:
    """Walk through an answer from verification to verification. reach: [K, n], the chances that a verification which
    begins at each of the n places accepts at least 1, ..., K drafts; place i has n - i tokens left to write.

    Returns for each place how often a verification begins there (at most once), and the tokens that it then adds.
    """
    places = reach.shape[1]
    visits, added = [1.0] + [0.0] * places, [0.0] * places
    for place, chances in enumerate(reach.T.tolist()):
        at_least = 1.0
        for accepted, chance in enumerate((*chances, 0.0)):
            tokens = min(accepted + 1, places - place)  # none of the target's own follows a draft that ends the answer
            visits[place + tokens] += visits[place] * (at_least - chance)
            added[place] += tokens * (at_least - chance)
            at_least = chance
    return visits[:places], added


def count_chains(
    stream: Stream, plan: SequencePlan, accepted: Tensor, contexts: Sequence[int], group: dist.ProcessGroup
) -> ChainCounts:
    """Counts of one stream, on the first rank of its sequence `group`; zeros on the others. Collective over the group.

    stream: packed by the rule `served`
    accepted: [K, M], of Distilled: whether, or with which chance, each proposal of this rank is accepted where all
        before it in its chain were
    contexts: [B], ascending. A verification belongs to the first that holds all tokens before it; none may be longer
        than the last.
    """
    chances = torch.zeros(len(accepted), stream.tokens, device=accepted.device)
    steps, columns = plan.supervised[: len(accepted)].nonzero(as_tuple=True)
    chances[steps, plan.teacher[columns] - 1 - steps] = accepted[steps, columns].float()
    if group.size() > 1:
        dist.all_reduce(chances, group=group)
    counts = torch.zeros(2, len(contexts), dtype=torch.float64)
    if group.rank():
        return ChainCounts(*counts)
    reach = chances.cpu().double().cumprod(0)
    starts, answers = stream.first.unique_consecutive(return_counts=True)
    stops = stream.teacher[answers.cumsum(0) - 1]
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        visits, added = (torch.tensor(each, dtype=torch.float64) for each in walk(reach[:, start:stop]))
        context = torch.bucketize(stream.position[start:stop] + 2, torch.tensor(contexts))
        counts.index_add_(1, context, torch.stack((visits * added, visits)))
    return ChainCounts(*counts)
