"""Acceptance by context from hidden states: every hit is counted once, in the context of its position, on any ranks."""

import pytest
import torch

from eagle3.objective.losses import ContextCounts, contexts_up_to, count_by_context
from eagle3.parallel.sequence import SequenceSharding, Stream, plan_sequence

STEPS = 3


@pytest.mark.parametrize(
    ("longest", "contexts"), [(1, [512]), (512, [512]), (513, [512, 1024]), (5000, [512, 1024, 2048, 4096, 8192])]
)
def test_contexts_double_until_the_longest_sample_fits(longest, contexts):
    assert contexts_up_to(longest) == contexts


def test_every_hit_is_counted_once_in_its_context_however_the_stream_is_dealt():
    generator = torch.Generator().manual_seed(0)
    lengths = (700, 90, 1500)
    ids = [torch.randint(99, (length,), generator=generator) for length in lengths]
    masks = [torch.rand(length, generator=generator) < 0.3 for length in lengths]
    stream, contexts = Stream.pack(ids, masks, "reference"), contexts_up_to(max(lengths))
    hit = torch.rand(STEPS, stream.tokens, generator=generator) < 0.5  # by step and predicted row

    expected = torch.zeros(2, len(contexts), STEPS, dtype=torch.int64)
    for document, (length, mask) in enumerate(zip(lengths, masks, strict=True)):
        first = sum(lengths[:document])
        for step in range(STEPS):
            for position in range(step + 1, length):  # predicted at step `step` from `step + 1` rows before
                if mask[position - 1]:
                    place = next(i for i, context in enumerate(contexts) if position <= context)
                    expected[1, place, step] += 1
                    expected[0, place, step] += int(hit[step, first + position])

    for sharding in (SequenceSharding(), SequenceSharding(2, 2), SequenceSharding(1, 3, "contiguous", "all")):
        plans = [plan_sequence(stream, STEPS, sharding, rank) for rank in range(sharding.ranks)]
        parts = [count_by_context(stream, plan, plan.supervised & hit[:, plan.teacher], contexts) for plan in plans]
        counts = sum(parts[1:], start=parts[0])
        assert torch.equal(torch.stack(tuple(counts)), expected)


def test_acceptance_of_a_context_is_the_sum_of_its_accuracies_products_and_none_where_nothing_is_supervised():
    counts = ContextCounts(torch.tensor([[8, 3], [0, 0]]), torch.tensor([[10, 6], [0, 0]]))
    assert counts.acceptance() == [pytest.approx(0.8 + 0.8 * 0.5), None]
