"""A rank's share of a stream as its sequence plan assigns it, to compare with what the planner expects."""

import torch

from eagle3.parallel.sequence import SequencePlan, Stream
from eagle3.planning.step import RankShare


def share_of(plan: SequencePlan, stream: Stream) -> RankShare:
    """The share that a sequence plan assigns."""
    sees = stream.position[plan.queries[plan.queries >= 0]] + 1
    sees = sees if plan.reach.window is None else sees.clamp(max=plan.reach.window)
    longest = int(stream.position.max()) + 1
    keys, queries = plan.keys.clamp(min=0), plan.queries.clamp(min=0)
    after = [stream.tokens_after(keys, 1), *(stream.tokens_after(queries, k + 1) for k in range(len(plan.query_of)))]
    rows = (len(each) for each in (plan.keys, plan.queries, plan.teacher, plan.rows))
    return RankShare(*rows, longest, int(sees.sum()), len(torch.cat(after).unique()))
