"""Spans of supervised tokens, compared with their definition."""

import itertools

import numpy as np
import pytest
import torch

from eagle3.text.samples import Sample, SampleSet, Spans


def sample(*turns, tokens=200, name="ab"):
    """A sample whose turns, (start, stop), are supervised."""
    mask = torch.zeros(tokens, dtype=torch.bool)
    for start, stop in turns:
        mask[start:stop] = True
    return Sample(name * 16, torch.arange(tokens), mask)


def runs(mask, drawn):
    """Lengths of the runs of drawn tokens among the supervised ones, and where they begin."""
    ordinals = torch.arange(int(mask.sum()))[drawn[mask]].tolist()
    grouped = itertools.groupby(enumerate(ordinals), lambda pair: pair[1] - pair[0])
    return [[ordinal for _, ordinal in group] for _, group in grouped]


@pytest.mark.parametrize("turns", [((20, 190),), ((3, 40), (60, 61), (70, 200)), ((0, 200),)])
def test_spans_are_whole_runs_of_supervised_tokens_on_one_grid(turns):
    whole, spans = sample(*turns), Spans(7, 3, seed=0)
    for epoch in range(50):
        drawn = spans.draw(whole, epoch)
        assert not (drawn & ~whole.loss_mask).any()
        for run in runs(whole.loss_mask, drawn):
            last = run[-1] + 1 == int(whole.loss_mask.sum())
            assert len(run) % 7 == 0 or run[0] == 0 or last, "a run is cut short by the document's ends alone"
        assert 7 <= int(drawn.sum()) <= 3 * 7
        assert torch.equal(drawn, spans.draw(whole, epoch))


def test_every_supervised_token_is_drawn_equally_often():
    whole, spans, epochs = sample((20, 140)), Spans(16, 2, seed=3), 20_000
    counts = sum(spans.draw(whole, epoch).int() for epoch in range(epochs))[whole.loss_mask]
    # A grid over 120 tokens has 8 runs for offsets 0 to 8 (of 16) and 9 for greater ones. Two runs are drawn.
    totals = [-(-(120 + offset) // 16) for offset in range(16)]
    share = np.mean([2 / total for total in totals])
    deviation = (share * (1 - share) / epochs) ** 0.5
    assert (counts / epochs - share).abs().max() < 5 * deviation


def test_documents_with_no_more_than_their_spans_hold_are_supervised_whole():
    for turns in ((), ((0, 1),), ((10, 24),), ((10, 17), (30, 37))):
        whole = sample(*turns)
        assert torch.equal(Spans(7, 2, seed=0).draw(whole, 5), whole.loss_mask)
    assert int(Spans(7, 2, seed=0).draw(sample((10, 25)), 5).sum()) <= 14


def test_what_spans_take_is_said_and_where_they_change_nothing():
    samples = SampleSet.pack([(np.arange(length), np.arange(length) >= 10) for length in (20, 30, 40)])
    text = Spans(5, 3, seed=0).describe(samples, anew=True)
    assert "up to 40 of 60 supervised tokens an epoch, drawn anew in each epoch; 2 of 3 samples have more" in text
    assert "the same in each epoch, as the store has them" in Spans(5, 3, seed=0).describe(samples, anew=False)
    text = Spans(10, 3, seed=0).describe(samples, anew=True)
    assert "changes nothing here, because no sample has more supervised tokens than the 30 that 3 spans of 10" in text


def test_sample_epoch_and_seed_change_what_is_drawn():
    drawn = {
        tuple(Spans(4, 1, seed).draw(sample((0, 200), name=name), epoch).nonzero().flatten().tolist())
        for seed in (0, 1)
        for name in ("ab", "cd")
        for epoch in (0, 1)
    }
    assert len(drawn) == 8


def test_a_set_under_other_masks_has_the_tokens_and_ids_of_samples_with_these():
    generator = np.random.default_rng(0)
    encoded = [(np.arange(n, dtype=np.int32), generator.random(n) < 0.7) for n in (5, 90, 1, 40)]
    spans = Spans(3, 2, seed=1)
    chosen = SampleSet.pack(encoded).subset([3, 1])
    masked = chosen.masked(lambda one: spans.draw(one, 0))
    expected = SampleSet.pack([(one.ids.numpy(), spans.draw(one, 0).numpy()) for one in chosen])
    assert masked.sample_ids == expected.sample_ids != chosen.sample_ids
    for ours, theirs in zip(masked, expected, strict=True):
        assert torch.equal(ours.ids, theirs.ids) and torch.equal(ours.loss_mask, theirs.loss_mask)
