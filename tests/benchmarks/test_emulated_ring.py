"""The GPU benchmark emulates one rank of a ring: its joined schedule computes what that rank does, forward and
backward."""

import pytest
import torch
from emulated_ring import joined

from eagle3.attention.ring import RingAttention
from eagle3.attention.schedule import schedule_prefix
from eagle3.attention.shared import SharedTensor
from eagle3.attention.ttt import TTTAttention, Ulysses
from eagle3.parallel.sequence import Reach, SequenceSharding, Stream, plan_sequence


@pytest.mark.parametrize("supervised", [1.0, 0.3])
@pytest.mark.parametrize("ring", [3, 4])
def test_one_rank_of_a_ring_emulated_equals_dense_attention_of_its_queries(topology, ring, supervised):
    tokens, heads, dim, scale = 90, 2, 4, 0.5
    mask = torch.arange(tokens) >= tokens * (1 - supervised)
    stream = Stream.pack([torch.zeros(tokens, dtype=torch.long)], [mask], "reference")
    generator = torch.Generator().manual_seed(ring)
    keys, values = (torch.randn(tokens, heads, dim, generator=generator, dtype=torch.float64) for _ in range(2))
    for rank in range(ring):
        plan = plan_sequence(stream, Reach(2), SequenceSharding(ring=ring, query_block=8), rank)
        rows = plan.queries[plan.queries >= 0]
        shares = [
            schedule_prefix(plan.queries, stream.position[plan.queries.clamp(min=0)], share, block=8)
            for share in plan.ring_keys
        ]
        schedule = joined(shares, rank)
        places = schedule.key_rows.clamp(min=0)
        shared = SharedTensor(torch.stack((keys[places], values[places]))[None])
        q = torch.randn(len(plan.queries), heads, dim, generator=generator, dtype=torch.float64, requires_grad=True)
        attention = TTTAttention(Ulysses(topology.alone), RingAttention(topology.alone, "gather", scale))
        out = attention(q, shared, (schedule,))[: len(rows)]
        scores = torch.einsum("qhd,shd->hqs", q[: len(rows)], keys) * scale
        unseen = torch.arange(tokens) > rows[:, None]
        dense = torch.einsum("hqs,shd->qhd", scores.masked_fill(unseen, float("-inf")).softmax(-1), values)
        assert (out - dense).abs().max() < 1e-13
        upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        (gradient,), (expected,) = (torch.autograd.grad(each, q, upstream, retain_graph=True) for each in (out, dense))
        assert (gradient - expected).abs().max() < 1e-12
