"""The stream and its plan, compared with loops over documents, positions and steps, as in the definition."""

import random
from collections.abc import Iterator

import pytest
import torch
from definition import reference, served

from eagle3.parallel.sequence import RULES, Reach, Rule, SequencePlan, SequenceSharding, Stream, plan_sequence


def _random_masks(source: random.Random) -> list[list[bool]]:
    """One loss mask per document: empty, full, tails, sparse or alternating spans. Lengths start from 1."""
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


def _pack(masks, source, rule):
    ids = [torch.tensor([source.randint(1, 99) for _ in mask]) for mask in masks]
    return ids, Stream.pack(ids, [torch.tensor(mask) for mask in masks], rule)


def _cases():
    """Every other case by the other rule."""
    for seed in range(50):
        source, rule = random.Random(seed), RULES[seed % 2]
        masks = _random_masks(source)
        yield masks, *_pack(masks, source, rule), rule


def _counted(masks, steps, rule):
    """Every (step k, row t of the stream, row t + k) that the definition counts."""
    triples, first = [], 0
    for mask in masks:
        for step in range(steps):
            counts = {"served": served, "reference": reference}[rule](torch.tensor(mask), step)
            triples += [(step, first + t, first + t + step) for t in counts.nonzero().flatten().tolist()]
        first += len(mask)
    return triples


def test_a_stream_holds_documents_back_to_back_with_positions_of_their_own():
    for masks, ids, stream, rule in _cases():
        rows = [(number, t) for number, mask in enumerate(masks) for t in range(len(mask))]
        assert stream.tokens == len(rows)
        assert list(zip(stream.document.tolist(), stream.position.tolist(), strict=True)) == rows
        assert stream.ids.tolist() == [int(ids[number][t]) for number, t in rows]
        assert stream.starts == [row for row, (_, t) in enumerate(rows) if t == 0]
        assert stream.end.tolist() == [stream.starts[number] + len(masks[number]) - 1 for number, _ in rows]
        taught = {(k, ahead + 1) for k, _, ahead in _counted(masks, 40, rule)}
        assert stream.teacher.tolist() == sorted({row for _, row in taught})


def test_tokens_after_a_row_are_zero_beyond_its_document():
    for masks, ids, stream, rule in _cases():
        for distance in (0, 1, 2, 7, 40):
            expected = []
            for document in ids:
                shifted = [*document.tolist(), *[0] * distance]
                expected += shifted[distance:]
            assert stream.tokens_after(torch.arange(stream.tokens), distance).tolist() == expected


def _real(rows: torch.Tensor) -> list[int]:
    return rows[rows >= 0].tolist()


def _visible(stream: Stream, queries: list[int], window: int | None = None) -> list[int]:
    """Rows s whose K_0 is visible: s <= t and t - s < window, in the document of some query t."""
    reach = stream.tokens if window is None else window
    rows = {(t, row) for t in queries for row in range(max(0, t - reach + 1), t + 1)}
    return sorted({row for t, row in rows if stream.document[row] == stream.document[t]})


def _tensors(plan: SequencePlan) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(plan).items() if name != "reach"}


def _pairs(plan: SequencePlan) -> list[tuple[int, int, int]]:
    """(step k, row t, row t + k) for every place that this rank supervises according to the plan."""
    return [
        (step, int(plan.queries[plan.query_of[step, column]]), int(plan.teacher[column]) - 1)
        for step, column in plan.supervised.nonzero().tolist()
    ]


# The plan of one rank, and those of several ---------------------------------------------------------------------------

SIZES = [(ulysses, ring) for ulysses in (1, 2, 4) for ring in (1, 2, 4)]


def _sharded(count: int = 15) -> Iterator[tuple[list, int, Rule, Stream, SequenceSharding, list[SequencePlan]]]:
    """Masks, steps, rule, stream, sharding and all ranks' plans, for `count` streams with every size. One stream is
    empty."""
    for seed, (ulysses, ring) in enumerate(SIZES * count):
        source, rule = random.Random(1000 + seed), RULES[seed % 2]
        masks = _random_masks(source) if seed >= len(SIZES) else [[False] * 3, [True]]
        steps, layout = source.choice([1, 2, 3, 7]), source.choice(["zigzag", "contiguous"])
        selection, block = source.choice(["supervised", "supervised", "all"]), source.choice([None, 1, 3, 8])
        stream, sharding = _pack(masks, source, rule)[1], SequenceSharding(ulysses, ring, layout, selection, block)
        window = source.choice([None, steps, steps + 1, 12])
        plans = [plan_sequence(stream, Reach(steps, window), sharding, rank) for rank in range(sharding.ranks)]
        yield masks, steps, rule, stream, sharding, plans


def test_the_queries_of_all_ranks_are_the_wanted_rows_once():
    for masks, steps, rule, stream, sharding, plans in _sharded():
        expected = sorted({t for _, t, _ in _counted(masks, steps, rule)})
        if sharding.query_selection == "all":
            expected = list(range(stream.tokens))
        assert sorted(row for plan in plans for row in _real(plan.queries)) == expected


def test_the_keys_of_all_ranks_are_the_rows_that_some_query_sees_once():
    for *_, stream, _, plans in _sharded():
        seen = _visible(stream, [row for plan in plans for row in _real(plan.queries)], plans[0].reach.window)
        assert sorted(row for plan in plans for row in _real(plan.keys)) == seen


def test_ranks_have_tensors_of_equal_length_and_pads_only_at_the_end_of_a_ring_share():
    for *_, sharding, plans in _sharded():
        assert len({(len(plan.keys), len(plan.queries)) for plan in plans}) == 1
        for ring in range(sharding.ring):
            group = plans[ring * sharding.ulysses : (ring + 1) * sharding.ulysses]
            keys, queries = (torch.cat([getattr(plan, name) for plan in group]) for name in ("keys", "queries"))
            for share in (keys, queries):
                rows = _real(share)
                assert rows == sorted(rows) and share.tolist() == [*rows, *[-1] * (len(share) - len(rows))]
            assert all(torch.equal(plan.ring_queries, queries) for plan in group)
            assert all(torch.equal(plan.ring_keys[ring], keys) for plan in plans)
        assert all(len(plan.ring_keys) == sharding.ring for plan in plans)


def test_the_ranks_together_supervise_every_counted_pair_once():
    for masks, steps, rule, _, _, plans in _sharded():
        assert all(plan.query_of.shape == plan.supervised.shape == (steps, len(plan.teacher)) for plan in plans)
        assert sorted(pair for plan in plans for pair in _pairs(plan)) == sorted(_counted(masks, steps, rule))


def test_a_rank_needs_the_teacher_of_its_own_pairs_only_and_finds_them_in_its_own_queries():
    """z[t + k] belongs to the hidden state at t + k + 1."""
    for *_, plans in _sharded():
        for plan in plans:
            pairs = _pairs(plan)
            assert plan.teacher.tolist() == sorted({ahead + 1 for _, _, ahead in pairs})
            assert all(t >= 0 for _, t, _ in pairs) and bool((plan.query_of[~plan.supervised] == -1).all())


def test_rows_are_keys_and_queries_and_slots_find_them():
    """Slots ascend, so that a chunk of rows has a run of slots. Pads are at the end, and read the last row."""
    for *_, plans in _sharded():
        for plan in plans:
            both = torch.cat((plan.keys, plan.queries))
            assert plan.rows.tolist() == (sorted(set(both[both >= 0].tolist())) or [0])
            for rows, slots in ((plan.keys, plan.key_slots), (plan.queries, plan.query_slots)):
                assert torch.equal(plan.rows[slots], torch.where(rows >= 0, rows, plan.rows[-1]))
                assert bool((slots.diff() >= 0).all())


def test_a_plan_follows_from_the_loss_mask_alone():
    """Neither ids nor earlier calls affect the plan, so that ranks agree without communication."""
    for masks, steps, rule, _, sharding, plans in _sharded(3):
        other = Stream.pack([torch.zeros(len(mask)) for mask in masks], [torch.tensor(mask) for mask in masks], rule)
        for rank, plan in enumerate(plans):
            again = plan_sequence(other, plan.reach, sharding, rank)
            assert all(torch.equal(tensor, getattr(again, name)) for name, tensor in _tensors(plan).items())


@pytest.mark.parametrize("sharding", [SequenceSharding(), SequenceSharding(2, 2)], ids=["alone", "of four ranks"])
def test_where_nothing_is_supervised_a_plan_holds_one_pad_and_row_0_and_counts_nothing(sharding):
    stream = Stream.pack([torch.arange(4), torch.arange(1)], [torch.zeros(4).bool(), torch.ones(1).bool()], "served")
    for rank in range(sharding.ranks):
        plan = plan_sequence(stream, Reach(7), sharding, rank)
        assert plan.queries.tolist() == plan.keys.tolist() == [-1] and len(plan.teacher) == 0
        assert plan.rows.tolist() == [0] and plan.query_of.shape == (7, 0)
        assert {tensor.dtype for tensor in _tensors(plan).values()} == {torch.int64}


def test_loss_masks_of_integers_are_read_as_booleans():
    ids, masks = [torch.arange(5)], [[0, 1, 1, 0, 1]]
    kinds = torch.int64, torch.bool
    one, other = (Stream.pack(ids, [torch.tensor(mask, dtype=kind) for mask in masks], "served") for kind in kinds)
    assert torch.equal(one.teacher, other.teacher) and torch.equal(one.first, other.first)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2), (4, 2), (1, 8)], ids="ulysses {0[0]} ring {0[1]}".format)
def test_what_a_rank_reads_falls_with_the_number_of_ranks(sizes):
    """A rank reads auxiliary states at its keys and queries, and one teacher row per query, apart from K - 1 rows at
    the ends of its blocks. It never reads the whole sample."""
    stream, steps = Stream.pack([torch.arange(8192)], [torch.ones(8192, dtype=torch.bool)], "served"), 3
    sharding = SequenceSharding(*sizes)
    plans = [plan_sequence(stream, Reach(steps), sharding, rank) for rank in range(sharding.ranks)]
    share = 8192 // sharding.ranks
    assert max(len(plan.rows) for plan in plans) <= 2 * share + 4
    assert max(len(plan.teacher) for plan in plans) <= share * 1.1
