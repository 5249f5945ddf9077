"""The dense pieces of a schedule, compared pair by pair with the definition of visibility."""

import itertools
import random

import pytest
import torch

from eagle3.attention.schedule import PrefixSchedule, overlap, schedule_prefix
from eagle3.parallel.sequence import SequenceSharding, deal_keys

Pair = tuple[int, int]


def _documents(lengths: list[int]) -> tuple[list[int], list[int]]:
    """For each row of a stream, the number of its document and its position there."""
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    return document, [position for length in lengths for position in range(length)]


def _schedule(
    lengths: list[int], queries: list[int], keys: list[int], block: int, window: int | None, pads: Pair = (0, 0)
) -> PrefixSchedule:
    _, position = _documents(lengths)
    return schedule_prefix(
        torch.tensor([*queries, *[-1] * pads[0]], dtype=torch.long),
        torch.tensor([*(position[row] for row in queries), *[0] * pads[0]], dtype=torch.long),
        torch.tensor([*keys, *[-1] * pads[1]], dtype=torch.long),
        block=block,
        window=window,
    )


def _visible(lengths: list[int], queries: list[int], keys: list[int], window: int | None) -> list[Pair]:
    """Visible (query row, key row) pairs: in one document, the key not after the query and less than a window before
    it."""
    document, _ = _documents(lengths)
    pairs = itertools.product(queries, keys)
    return [(q, k) for q, k in pairs if document[q] == document[k] and k <= q and (window is None or q - k < window)]


def _shown(schedule: PrefixSchedule, bands: bool = True) -> list[Pair]:
    """The (query row, key row) pairs of all pieces, with -1 for a pad. Asserts that no piece is empty, and that each of
    its query rows sees some key."""
    pairs = []
    for piece in schedule.dense_pieces(bands):
        queries, keys = schedule.query_rows[piece.queries], schedule.key_rows[piece.keys]
        seen = torch.ones(len(queries), len(keys), dtype=torch.bool)
        if piece.visibility == "causal":
            assert len(queries) == len(keys)
            seen = seen.tril()
        if piece.visibility == "banded":
            beyond = len(keys) - len(queries)
            assert beyond >= 0
            seen = seen.tril(beyond)
            if schedule.window is not None:
                seen = seen.triu(beyond - schedule.window + 1)
        if piece.visibility == "masked":
            seen = schedule.visible(piece)
            assert seen.shape == (len(queries), len(keys))
        else:
            assert schedule.visible(piece) is None
        assert seen.numel() and bool(seen.any(1).all())
        rows, columns = seen.nonzero(as_tuple=True)
        pairs += zip(queries[rows].tolist(), keys[columns].tolist(), strict=True)
    return pairs


def _random_rows(source: random.Random, tokens: int) -> list[int]:
    """All rows, a run of rows, every second stretch, or a random sample."""
    kind = source.randrange(4)
    if kind == 0:
        return list(range(tokens))
    if kind == 1:
        start = source.randrange(tokens)
        return list(range(start, source.randint(start + 1, tokens)))
    if kind == 2:
        stretch = source.randint(1, 6)
        return [row for row in range(tokens) if row // stretch % 2]
    share = source.choice([0.1, 0.5, 0.9])
    return [row for row in range(tokens) if source.random() < share]


def _random_cases(count: int):
    for seed in range(count):
        source = random.Random(seed)
        lengths = [source.choice([1, 2, source.randint(3, 30)]) for _ in range(source.randint(1, 4))]
        block, window = source.randint(1, 7), source.choice([None, *range(1, 10)])
        yield source, lengths, _random_rows(source, sum(lengths)), block, window


def test_the_pieces_show_every_visible_pair_once_whatever_queries_keys_block_and_window():
    for source, lengths, queries, block, window in _random_cases(500):
        keys = _random_rows(source, sum(lengths))
        pads = source.randrange(3), source.randrange(3)
        schedule = _schedule(lengths, queries, keys, block, window, pads)
        for bands in (True, False):
            assert sorted(_shown(schedule, bands)) == _visible(lengths, queries, keys, window)
        assert all(piece.queries.stop - piece.queries.start <= block for piece in schedule.pieces)


def test_the_pieces_show_every_visible_pair_once_for_every_choice_of_rows_of_a_tiny_stream():
    rows = [list(itertools.compress(range(4), chosen)) for chosen in itertools.product((0, 1), repeat=4)]
    for lengths, queries, keys in itertools.product(([4], [1, 3]), rows, rows):
        for block, window in ((1, 2), (2, None), (2, 1), (4, 3), (4, 2)):
            schedule = _schedule(lengths, queries, keys, block, window)
            assert sorted(_shown(schedule)) == _visible(lengths, queries, keys, window)


def test_a_query_block_whose_own_rows_are_the_keys_needs_no_mask():
    for _, lengths, queries, block, _ in _random_cases(100):
        every = list(range(sum(lengths)))
        for keys in (every, queries):
            kinds = {
                piece.visibility for piece in _schedule(lengths, keys, keys, block, None).dense_pieces(bands=False)
            }
            assert kinds <= {"full", "causal"}, (lengths, keys, block)


def test_a_window_masks_only_the_side_that_queries_leave_behind():
    """One row is missing among queries and keys, so that their run is not a band."""
    schedule = _schedule([40], [*range(20), *range(21, 40)], [*range(20), *range(21, 40)], 4, 10)
    assert {piece.visibility for piece in schedule.pieces} == {"full", "causal", "masked", "banded"}
    for piece in schedule.pieces:
        if piece.visibility == "masked":  # keys that the block's first query sees and its last one does not
            first, last = (schedule.query_rows[place] for place in (piece.queries.start, piece.queries.stop - 1))
            assert schedule.key_rows[piece.keys.stop - 1] > first - 10 and piece.keys.stop <= piece.queries.start
            assert last - first < 4


@pytest.mark.parametrize("ring", [1, 2, 4])
@pytest.mark.parametrize("window", [128, 512, 2048])
def test_under_a_window_few_pairs_are_computed_that_nobody_sees_however_long_the_prefix_is(window, ring):
    """The queries are two spans of a long document; the keys are those of their windows."""
    for prefix in (3000, 20_000):
        queries = [*range(prefix, prefix + 1500), *range(prefix + 2900, prefix + 4000)]
        keys = sorted({key for query in queries for key in range(query - window + 1, query + 1)})
        computed = 0
        for share in deal_keys(torch.tensor(keys), SequenceSharding(ring=ring)):
            schedule = _schedule([prefix + 5000], queries, share[share >= 0].tolist(), 512, window)
            for piece in schedule.dense_pieces(bands=False):
                pairs = (piece.queries.stop - piece.queries.start) * (piece.keys.stop - piece.keys.start)
                computed += pairs / 2 if piece.visibility == "causal" else pairs
        assert computed <= 1.5 * window * len(queries), computed / window / len(queries)


@pytest.mark.parametrize("window", [None, 10])
def test_consecutive_rows_of_a_document_are_one_band_however_many_they_are(window):
    schedule = _schedule([140, 600], [*range(10, 140), *range(145, 740)], list(range(740)), 128, window)
    assert [piece.visibility for piece in schedule.pieces] == ["banded"] * 2
    assert not overlap(schedule.pieces) and overlap(schedule.dense_pieces(bands=False)) == (window is None)


@pytest.mark.parametrize("window", [None, 10])
def test_a_band_beyond_a_kernels_memory_is_cut_and_shows_the_same_pairs(monkeypatch, window):
    whole = _schedule([300], [*range(40, 300)], list(range(300)), 512, window)
    expected = sorted(_shown(whole))
    assert len(list(whole.dense_pieces(bands=True))) == 1
    monkeypatch.setattr("eagle3.attention.schedule.BAND_ROWS", 64)
    pieces = list(whole.dense_pieces(bands=True))
    assert len(pieces) == (5 if window else 20) and not any(piece.visibility == "masked" for piece in pieces)
    assert sorted(_shown(whole)) == expected


def test_without_bands_a_dense_document_is_one_rectangle_and_one_square_a_block():
    schedule = _schedule([1100], list(range(30, 1100)), list(range(1100)), 512, None)
    assert [piece.visibility for piece in schedule.dense_pieces(bands=False)] == ["full", "causal"] * 3


def test_queries_far_apart_do_not_share_a_block():
    """Otherwise a mask would replace a rectangle that both could have had."""
    schedule = _schedule([100], [10, 11, 60, 61], list(range(100)), 8, None)
    assert {(piece.queries.start, piece.queries.stop) for piece in schedule.pieces} == {(0, 2), (2, 4)}
