"""Ranks get equal shares of queries, keys and causal attention work, counted pair by pair on streams like those of
recipes."""

import itertools
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from eagle3.parallel.sequence import Reach, SequenceSharding, Stream, deal_keys, deal_queries, plan_sequence


def _mask(*spans: tuple[int, bool]) -> Tensor:
    """The loss mask of a document from (rows, supervised or not)."""
    return torch.cat([torch.full((rows,), supervised) for rows, supervised in spans])


def _answers_of_any_length(count: int, shortest: int, longest: int, seed: int = 0) -> list[Tensor]:
    """Documents with a prompt of up to half of their rows."""
    source, masks = random.Random(seed), []
    for _ in range(count):
        rows = source.randint(shortest, longest)
        prompt = source.randint(0, rows // 2)
        masks.append(_mask((prompt, False), (rows - prompt, True)))
    return masks


PART_AND_SPANS = (3_000, 200, 13_800, 200, 22_800, 5_000, 16_000, 200, 26_800, 50, 10_950, 200, 800)  # off, on, off ...
STREAMS = {
    "all of one document": [_mask((100_000, True))],
    "an answer at the end": [_mask((100_000, False), (4_000, True))],
    "turns of one document": [_mask(*[(150, False), (150, True)] * 200)],
    "a part and a few spans": [_mask(*zip(PART_AND_SPANS, itertools.cycle((False, True))))],
    "packed documents": _answers_of_any_length(20, 1_000, 8_000),
    "packed short documents": _answers_of_any_length(300, 50, 600),
    "a long document among short ones": [_mask((50_000, False), (10_000, True)), *_answers_of_any_length(100, 50, 600)],
    # here, lengths of documents, blocks and runs of keys could coincide periodically
    "documents of 256": [_mask((256, True))] * 256,
    "documents of 512": [_mask((512, True))] * 100,
    "documents of 1024": [_mask((1_024, True))] * 64,
}


def _sees(stream: Stream, queries: Tensor, keys: Tensor) -> Tensor:
    """How many of `keys` (ascending) each query sees: those in its document, up to its own row."""
    return torch.searchsorted(keys, queries, right=True) - torch.searchsorted(keys, queries - stream.position[queries])


@dataclass(frozen=True)
class Dealt:
    """counts [rank]: numbers of queries. key_counts [ring]: numbers of keys. pairs [ring, ring]: (query, key) pairs
    between a ring rank's queries and a ring share's keys. block: the most queries dealt at once. heaviest,
    heaviest_with_a_share: the most pairs of `block` consecutive queries, with all keys and with one share's."""

    sharding: SequenceSharding
    counts: list[int]
    key_counts: list[int]
    pairs: Tensor
    block: int
    heaviest: int
    heaviest_with_a_share: int


def _heaviest(work: Tensor, block: int) -> int:
    """The largest sum of `block` consecutive entries of work [Q]."""
    sums = torch.cat((torch.zeros(1, dtype=torch.long), work.cumsum(0)))
    return int((sums[block:] - sums[:-block]).max() if len(work) > block else sums[-1])


def _deal(masks: list[Tensor], sharding: SequenceSharding) -> Dealt:
    stream = Stream.pack([torch.zeros(len(mask)) for mask in masks], masks, "reference")
    plans = [plan_sequence(stream, Reach(2), sharding, rank) for rank in range(sharding.ranks)]
    shares = [keys[keys >= 0] for keys in plans[0].ring_keys]
    queries = [plan.ring_queries[plan.ring_queries >= 0] for plan in plans[:: sharding.ulysses]]
    every = torch.cat(queries).sort().values
    block = min(512, max(32, -(-len(every) // (32 * sharding.ring))))
    return Dealt(
        sharding=sharding,
        counts=[int((plan.queries >= 0).sum()) for plan in plans],
        key_counts=[len(share) for share in shares],
        pairs=torch.tensor([[int(_sees(stream, part, share).sum()) for share in shares] for part in queries]).double(),
        block=block,
        heaviest=_heaviest(stream.position[every] + 1, block),
        heaviest_with_a_share=max(_heaviest(_sees(stream, every, share), block) for share in shares),
    )


@pytest.fixture(scope="module", params=[(1, 2), (1, 4), (1, 8), (2, 4)], ids="ulysses {0[0]} ring {0[1]}".format)
def sharding(request) -> SequenceSharding:
    return SequenceSharding(*request.param)


@pytest.fixture(scope="module", params=STREAMS)
def dealt(request, sharding) -> Dealt:
    return _deal(STREAMS[request.param], sharding)


def test_ranks_have_the_same_number_of_queries(dealt):
    """Counted before padding. The Ulysses ranks of a ring rank take equal parts, except that the last takes what is
    left."""
    assert max(dealt.counts) - min(dealt.counts) <= dealt.sharding.ulysses


def test_ring_ranks_have_the_same_number_of_keys_but_for_one_run(dealt):
    assert max(dealt.key_counts) - min(dealt.key_counts) <= 64


def test_ring_ranks_have_the_same_causal_attention_work(dealt):
    work = dealt.pairs.sum(1)
    assert work.max() <= work.mean() * 1.05


def test_ring_ranks_that_pass_keys_round_have_the_same_work_at_every_hop(dealt):
    """At hop h, rank r attends to share r - h. Each hop lasts as long as its slowest rank."""
    ring, ranks = dealt.sharding.ring, torch.arange(dealt.sharding.ring)
    for hop in range(ring):
        work = dealt.pairs[ranks, (ranks - hop) % ring]
        assert work.max() <= work.mean() + max(0.05 * work.mean(), dealt.heaviest_with_a_share), f"hop {hop}"


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_a_block_that_outweighs_all_others_costs_no_more_than_itself(ring):
    """A short answer to a long prompt comes after short documents."""
    masks = [*_answers_of_any_length(100, 50, 600), _mask((60_000, False), (100, True))]
    dealt = _deal(masks, SequenceSharding(ring=ring))
    work = dealt.pairs.sum(1)
    assert dealt.heaviest > work.mean() and work.max() <= work.mean() + dealt.heaviest


def test_ring_ranks_differ_by_a_block_of_queries_and_its_work_at_most_whatever_the_work():
    for seed in range(500):
        source = random.Random(seed)
        count, block, ring = source.randint(1, 60), source.randint(1, 9), source.choice([2, 3, 4, 8])
        rows = torch.tensor(sorted(source.sample(range(100), count)))
        work = torch.tensor([source.choice([1, source.randint(1, 20), source.randint(1, 10_000)]) for _ in rows])
        dealt = deal_queries(rows, work, SequenceSharding(ring=ring, query_block=block))
        real = dealt >= 0
        totals = torch.where(real, work[torch.searchsorted(rows, dealt.clamp(min=0)).clamp(max=count - 1)], 0).sum(1)
        assert int(totals.max() - totals.min()) <= _heaviest(work, block), seed
        assert int(real.sum(1).max() - real.sum(1).min()) <= 1, seed


@pytest.mark.parametrize("ring", [1, 2, 4, 8])
def test_contiguous_keys_are_one_run_of_rows_a_rank_and_zigzag_keys_are_spread(ring):
    rows = torch.arange(10_000) * 3
    contiguous = deal_keys(rows, SequenceSharding(ring=ring, layout="contiguous"))
    assert torch.equal(contiguous.flatten(), rows)
    for share in deal_keys(rows, SequenceSharding(ring=ring)):
        # of any 2048 consecutive rows, each rank has its part, to within one run
        counts = torch.isin(rows, share).float().unfold(0, 2048, 1).sum(1)
        assert bool(((counts - 2048 / ring).abs() <= 64).all())
