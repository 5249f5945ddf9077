"""A rank's share of a stream as its sequence plan assigns it, to compare with what the planner expects."""

from eagle3.parallel.sequence import NextTokens, SequencePlan, Stream
from eagle3.planning.step import RankShare


def share_of(plan: SequencePlan, stream: Stream) -> RankShare:
    """The share that a sequence plan assigns."""
    sees = stream.position[plan.queries[plan.queries >= 0]] + 1
    sees = sees if plan.window is None else sees.clamp(max=plan.window)
    longest = int(stream.position.max()) + 1
    rows = (len(each) for each in (plan.keys, plan.queries, plan.teacher, plan.rows))
    return RankShare(*rows, longest, int(sees.sum()), len(NextTokens.of(plan, stream).tokens))
