"""The stream and its plan against loops over documents, positions and steps, as the definition words them."""

import random

import pytest
import torch

from eagle3.parallel.sequence import Stream, plan_sequence, supervised_counts


def _random_masks(source: random.Random) -> list[list[bool]]:
    """One loss mask a document: empty, full, tails, sparse or alternating spans; lengths from 1."""
    masks = []
    for _ in range(source.randint(1, 5)):
        length = source.choice([1, 1, 2, 3, source.randint(4, 12), source.randint(4, 30)])
        kind = source.randrange(5)
        if kind == 0:
            mask = [False] * length
        elif kind == 1:
            mask = [True] * length
        elif kind == 2:
            start = source.randint(0, length)
            mask = [row >= start for row in range(length)]
        elif kind == 3:
            mask = [source.random() < 0.15 for _ in range(length)]
        else:
            span = source.randint(1, 9)
            mask = [row // span % 2 == 1 for row in range(length)]
        masks.append(mask)
    return masks


def _pack(masks, source):
    ids = [torch.tensor([source.randint(1, 99) for _ in mask]) for mask in masks]
    return ids, Stream.pack(ids, [torch.tensor(mask) for mask in masks])


def _cases(count=200):
    for seed in range(count):
        source = random.Random(seed)
        masks = _random_masks(source)
        yield masks, source.choice([1, 2, 3, 7]), *_pack(masks, source)


def _counted(masks, steps):
    """Every (step k, row t of the stream, row t + k) that the definition counts: mask[t + k], of a document's rows but
    its last, at row t after k shifts."""
    found, first = [], 0
    for mask in masks:
        mask = [*mask[:-1], False]
        for step in range(steps):
            for t in range(len(mask)):
                if mask[t]:
                    found.append((step, first + t, first + t + step))
            mask = [*mask[1:], False]
        first += len(mask)
    return found


def test_a_stream_holds_documents_back_to_back_with_positions_of_their_own():
    for masks, _, ids, stream in _cases(50):
        rows = [(number, t) for number, mask in enumerate(masks) for t in range(len(mask))]
        assert stream.tokens == len(rows)
        assert list(zip(stream.document.tolist(), stream.position.tolist(), strict=True)) == rows
        assert stream.ids.tolist() == [int(ids[number][t]) for number, t in rows]
        assert stream.starts == [row for row, (_, t) in enumerate(rows) if t == 0]
        assert stream.end.tolist() == [stream.starts[number] + len(masks[number]) - 1 for number, _ in rows]
        assert stream.supervised.tolist() == [masks[n][t] and t < len(masks[n]) - 1 for n, t in rows]


def test_tokens_after_a_row_are_zero_beyond_its_document():
    for masks, _, ids, stream in _cases(50):
        for distance in (0, 1, 2, 7, 40):
            expected = []
            for document in ids:
                shifted = [*document.tolist(), *[0] * distance]
                expected += shifted[distance:]
            assert stream.tokens_after(torch.arange(stream.tokens), distance).tolist() == expected


def test_queries_are_exactly_the_rows_that_some_step_counts():
    for masks, steps, _, stream in _cases():
        expected = sorted({t for _, t, _ in _counted(masks, steps)})
        assert plan_sequence(stream, steps).queries.tolist() == (expected or [0])


def test_keys_are_exactly_the_rows_that_some_query_sees():
    """K_0[s] with s <= t in the query's document; no more, and no fewer."""
    for masks, steps, _, stream in _cases():
        plan = plan_sequence(stream, steps)
        seen = {
            row for t in plan.queries.tolist() for row in range(t + 1) if stream.document[row] == stream.document[t]
        }
        assert plan.keys.tolist() == sorted(seen)


def test_teacher_rows_are_exactly_those_whose_distribution_a_counted_position_compares_with():
    """z[t + k] belongs to the hidden state at t + k + 1."""
    for masks, steps, _, stream in _cases():
        expected = sorted({ahead + 1 for _, _, ahead in _counted(masks, steps)})
        assert plan_sequence(stream, steps).teacher.tolist() == expected


def test_rows_are_keys_and_queries_and_slots_find_them():
    for masks, steps, _, stream in _cases():
        plan = plan_sequence(stream, steps)
        assert plan.rows.tolist() == sorted({*plan.keys.tolist(), *plan.queries.tolist()})
        assert torch.equal(plan.rows[plan.key_slots], plan.keys)
        assert torch.equal(plan.rows[plan.query_slots], plan.queries)


def test_query_of_and_supervised_name_every_counted_pair_and_no_other():
    for masks, steps, _, stream in _cases():
        plan = plan_sequence(stream, steps)
        assert plan.query_of.shape == plan.supervised.shape == (steps, len(plan.teacher))
        pairs = []
        for step, column in plan.supervised.nonzero().tolist():
            pairs.append((step, int(plan.queries[plan.query_of[step, column]]), int(plan.teacher[column]) - 1))
        assert sorted(pairs) == sorted(_counted(masks, steps))
        assert bool((plan.query_of[~plan.supervised] == -1).all())


def test_supervised_counts_are_the_denominators_of_the_accuracies():
    for masks, steps, _, stream in _cases():
        counted = _counted(masks, steps)
        expected = [sum(step == wanted for step, _, _ in counted) for wanted in range(steps)]
        assert supervised_counts(stream, steps).tolist() == expected
        assert plan_sequence(stream, steps).supervised.sum(1).tolist() == expected


def test_a_plan_names_rows_as_int64_and_counts_nothing_where_nothing_is_supervised():
    stream = Stream.pack(
        [torch.arange(4), torch.arange(1)], [torch.zeros(4, dtype=torch.bool), torch.ones(1, dtype=torch.bool)]
    )
    plan = plan_sequence(stream, 7)
    assert plan.queries.tolist() == plan.keys.tolist() == [0] and len(plan.teacher) == 0
    assert plan.query_of.shape == (7, 0)
    indices = (plan.keys, plan.queries, plan.teacher, plan.rows, plan.key_slots, plan.query_slots, plan.query_of)
    assert {tensor.dtype for tensor in indices} == {torch.int64} and plan.supervised.dtype == torch.bool


def test_loss_masks_of_integers_are_read_as_booleans():
    ids, masks = [torch.arange(5)], [[0, 1, 1, 0, 1]]
    streams = [
        Stream.pack(ids, [torch.tensor(mask, dtype=kind) for mask in masks]) for kind in (torch.int64, torch.bool)
    ]
    assert torch.equal(streams[0].supervised, streams[1].supervised)


@pytest.mark.parametrize("ids", [[], [torch.arange(3), torch.arange(0)]], ids=["no document", "an empty document"])
def test_a_stream_of_nothing_is_refused(ids):
    with pytest.raises(AssertionError):
        Stream.pack(ids, [torch.zeros(len(document), dtype=torch.bool) for document in ids])
