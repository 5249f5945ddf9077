"""A store for drafts with a window: which rows it has, and which drafts it serves."""

import itertools
from dataclasses import replace

import pytest
import torch
from store_cases import (
    HIDDEN,
    PLAIN,
    PROVENANCE,
    check,
    open_store,
    provenance_of,
    read_rows,
    same_rows,
    sample,
    write,
    write_one,
)

from eagle3.errors import UserError
from eagle3.parallel.sequence import RULES, Reach, SequenceSharding, Stream, plan_sequence
from eagle3.states.capture import Wanted, disk_need
from eagle3.states.rows import LastHidden, Rows
from eagle3.states.store.reader import HiddenStateStore
from eagle3.states.store.shard import Encoding, taught_rows
from eagle3.states.store.writer import StoreWriter
from eagle3.text.samples import SampleSet

WINDOWED = Encoding("none", "float32", HIDDEN, reach=Reach(3, 4))


def spans(tokens, *bounds):
    mask = torch.zeros(tokens, dtype=torch.bool)
    for start, stop in bounds:
        mask[start:stop] = True
    return mask


MASKS = {
    "one answer": spans(60, (40, 52)),
    "two answers": spans(60, (10, 13), (45, 60)),
    "from the first token": spans(30, (0, 9)),
    "the last token alone, which teaches nothing": spans(30, (29, 30)),
    "nothing": spans(30),
    "one token": spans(1, (0, 1)),
    "scattered": torch.rand(200, generator=torch.Generator().manual_seed(5)) < 0.03,
}


@pytest.mark.parametrize(("window", "steps"), [(1, 1), (4, 3), (7, 7), (16, 2), (500, 7)])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_seen_rows_are_those_that_some_rank_of_some_layout_reads(mask, window, steps):
    reach = Reach(steps, window)
    seen = set(reach.rows(mask).nonzero().flatten().tolist())
    for ulysses, ring in ((1, 1), (1, 2), (2, 1), (2, 3)):
        sharding, read = SequenceSharding(ulysses, ring), {0}
        for rule, rank in itertools.product(RULES, range(ulysses * ring)):
            stream = Stream.pack([torch.arange(len(mask))], [mask], rule)
            read.update(plan_sequence(stream, reach, sharding, rank).rows.tolist())
        assert read == seen


def test_a_store_has_what_a_window_sees_bit_for_bit_and_nothing_else(tmp_path):
    write(tmp_path / "full", range(12))
    write(tmp_path / "windowed", range(12), WINDOWED)
    full, windowed = open_store(tmp_path / "full"), open_store(tmp_path / "windowed", WINDOWED)
    for number in range(12):
        name, _, loss_mask, _ = sample(number)
        seen = WINDOWED.reach.rows(loss_mask).nonzero().flatten()
        rows = name, seen.flip(0), taught_rows(loss_mask).nonzero().flatten()
        assert same_rows(read_rows(windowed, *rows), read_rows(full, *rows))
        index, entry = windowed.locations[name]
        assert entry.seen == len(seen) and index.encoding == WINDOWED
    assert check(tmp_path / "windowed", range(12), WINDOWED).problems == []
    assert check(tmp_path / "full", range(12)).problems == []


def test_rows_that_no_query_sees_are_out_of_reach(tmp_path):
    mask = spans(60, (40, 52))
    _, ids, _, states = sample(3, tokens=60)
    write_one(tmp_path, WINDOWED, "ab" * 16, ids, mask, states)
    store, none = open_store(tmp_path, WINDOWED), torch.zeros(0, dtype=torch.int64)
    actual = read_rows(store, "ab" * 16, torch.tensor([0, 35, 51]), none)
    assert torch.equal(actual.aux, states.aux[[0, 35, 51]])
    for row in (34, 52):
        with pytest.raises(AssertionError, match="rows of aux that are not stored"):
            read_rows(store, "ab" * 16, torch.tensor([row]), none)


@pytest.mark.parametrize("codec", ["none", "lossless"])
def test_a_long_prompt_with_a_short_answer_takes_what_its_window_takes(tmp_path, codec):
    """A prompt of 20,000 tokens in parts, an answer of 200 and a window of 100 keys take 306 rows of 20,200."""
    tokens, hidden, mask = 20_200, 512, spans(20_200, (20_000, 20_200))
    sizes = {}
    for name, reach in (("full", Reach()), ("windowed", Reach(7, 100))):
        encoding = Encoding(codec, "bfloat16", hidden, reach=reach)

        def parts():
            for start in range(0, tokens, 4096):
                rows = min(4096, tokens - start)
                generator = torch.Generator().manual_seed(start)
                aux, last = (torch.randn(rows, width, generator=generator).bfloat16() for width in (3 * hidden, hidden))
                yield Rows(aux, LastHidden(last, torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)))

        write_one(tmp_path / name, encoding, "cd" * 16, torch.zeros(tokens, dtype=torch.int64), mask, parts())
        sizes[name] = sum(path.stat().st_size for path in (tmp_path / name).iterdir())
        if codec == "none":
            samples = SampleSet.pack([(torch.zeros(tokens, dtype=torch.int32).numpy(), mask.numpy())])
            need = disk_need([Wanted(samples, 0, tokens)], encoding)
            assert need <= sizes[name] <= 1.01 * need + 20_000
    assert sizes["windowed"] < 0.03 * sizes["full"]


@pytest.mark.parametrize(
    ("steps", "window", "served"),
    [*((3, 4, True), (3, 3, True), (2, 4, True), (3, 5, False), (4, 4, False), (9, 2, False)), (None, None, False)],
)
def test_a_store_serves_windows_and_steps_up_to_its_own_and_a_full_one_serves_all(tmp_path, steps, window, served):
    needs = replace(PLAIN, reach=Reach(steps, window))
    write(tmp_path / "windowed", range(3), WINDOWED)
    write(tmp_path / "full", range(3))
    HiddenStateStore.open(str(tmp_path / "full"), provenance_of(needs))
    if served:
        HiddenStateStore.open(str(tmp_path / "windowed"), provenance_of(needs))
        return
    with pytest.raises(UserError, match="has the rows of a window of 4 keys and 3 TTT steps, this run needs those of"):
        HiddenStateStore.open(str(tmp_path / "windowed"), provenance_of(needs))
    with pytest.raises(UserError, match="set model.draft.window=4 and training.ttt_steps=3.*, or name another"):
        StoreWriter(tmp_path / "windowed", PROVENANCE, needs)


def test_whoever_adds_to_a_store_writes_the_rows_that_it_has_of_others(tmp_path):
    write(tmp_path, range(3))
    write(tmp_path, range(3, 6), WINDOWED)
    assert check(tmp_path, range(6)).problems == []
    assert all(entry.seen == entry.tokens for _, entry in open_store(tmp_path).locations.values())
