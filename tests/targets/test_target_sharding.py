"""What a target's tensor-parallel ranks compute from their vocabulary shards, compared with the whole logits in one
process."""

import pytest
import torch
from processes import kept
from sharding_worker import EXCHANGES, SUMMARIES, WORLDS, Dealt, Rows, document_rows
from tiny_run import run_script


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank of each world computed."""
    folder = tmp_path_factory.mktemp("sharding")
    run_script("tests/support/sharding_worker.py", folder)
    return {world: kept(folder, f"tensor {world}") for world in WORLDS}


every_world = pytest.mark.parametrize("world", WORLDS, ids="{} ranks".format)
every_summary = pytest.mark.parametrize("rows", SUMMARIES, ids=lambda rows: rows.name)
every_exchange = pytest.mark.parametrize("case", EXCHANGES, ids=lambda case: case.name)


@every_world
@every_summary
def test_every_rank_knows_argmax_and_logsumexp_of_the_whole_vocabulary_after_three_collectives(
    ranks, world: int, rows: Rows
):
    logits = rows.logits()
    exact = torch.promote_types(rows.dtype, torch.float32)
    expected = logits.to(exact).logsumexp(-1)
    # sums of positive numbers in a different order: a few roundings of each
    tolerance = {"rtol": 8 * torch.finfo(exact).eps, "atol": 8 * torch.finfo(exact).eps}
    for summary in (rank[rows.name] for rank in ranks[world]):
        # the lowest id of the largest logit, found without argmax
        lowest = torch.where(logits == logits.amax(-1, keepdim=True), torch.arange(rows.vocabulary), rows.vocabulary)
        assert torch.equal(summary["argmax"], lowest.amin(-1))
        torch.testing.assert_close(summary["logsumexp"], expected, **tolerance)
        assert summary["collectives"] == 3, "however many rows"


def test_ties_lie_on_both_sides_of_shard_borders():
    """Otherwise the tests of ties would show nothing."""
    for rows in (rows for rows in SUMMARIES if rows.kind == "ties"):
        largest = rows.logits() == rows.logits().amax(-1, keepdim=True)
        for world in WORLDS:
            shards = torch.stack([part.any(-1) for part in largest.split(rows.width(world), 1)])
            assert int((shards.sum(0) > 1).sum()) > rows.rows / 4 and not bool(shards[0].all())


@every_world
@every_exchange
def test_each_rank_gets_its_rows_of_all_draft_columns_bit_for_bit(ranks, world: int, case: Dealt):
    expected = case.rows.logits()[:, list(case.drafted)]
    for rank, rows in zip(ranks[world], document_rows(case.lengths, world), strict=True):
        columns = rank[case.name]
        assert columns.dtype == case.rows.dtype and torch.equal(columns, expected[rows])


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_documents_are_dealt_whole_and_evenly(count: int):
    lengths = [7, 1, 20, 9, 3, 0]
    dealt = document_rows(lengths, count)
    assert sorted(torch.cat(dealt).tolist()) == list(range(sum(lengths)))
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    owners = [set(documents[rows].tolist()) for rows in dealt]
    assert sum(map(len, owners)) == 5 and all(rows.equal(rows.sort().values) for rows in dealt)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= max(lengths)
