"""Streams loaded by several ranks, compared with whole documents prefilled one by one in this process."""

import math
from collections import Counter
from dataclasses import fields
from functools import partial

import pytest
import torch
from loader_worker import CASES, LENGTHS, ONE_TOKEN, PROVENANCE, STEPS, encoded_documents, sample_set, store_of
from processes import kept
from store_cases import same_rows
from tiny_run import make_target, run_script

from eagle3.parallel.sequence import Reach, Stream, plan_sequence
from eagle3.states.rows import Rows
from eagle3.states.store.shard import Encoding
from eagle3.states.store.writer import StoreWriter
from eagle3.targets.transformers import load_target

STREAM = fields(Stream)
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loader")
    make_target(folder / "target")
    return folder


@pytest.fixture(scope="module")
def prefill_alone(folder):
    """prefill_alone(dtype, ids): the states of one document with these ids, prefilled by itself."""
    targets = {dtype: load_target(folder / "target", dtype=dtype) for dtype in ("float32", "bfloat16")}
    known = {}

    def prefill(dtype, ids):
        key = dtype, tuple(ids.tolist())
        if key not in known:
            known[key] = targets[dtype].prefill([ids])[0]
        return known[key]

    return prefill


@pytest.fixture(scope="module")
def outcomes(folder, prefill_alone):
    """outcomes(name): what each rank kept of a case, by rank."""
    samples = sample_set(range(len(LENGTHS)))
    for dtype in ("float32", "bfloat16"):
        for codec in ("none", "lossless"):
            encoding = Encoding(codec, dtype, prefill_alone(dtype, samples[0].ids).teacher.values.shape[1])
            with StoreWriter(store_of(folder, dtype, codec), PROVENANCE, encoding, shard_tokens=150) as writer:
                for sample in samples:
                    writer.add(sample.id, sample.ids, sample.loss_mask, prefill_alone(dtype, sample.ids))
    run_script("tests/support/loader_worker.py", folder)
    return partial(kept, folder)


def documents_of(stream):
    return list(stream.ids.split(torch.bincount(stream.document).tolist()))


def expected_rows(loaded, prefill_alone, dtype):
    """What a LoadedStream must hold, computed from the states of its stream's documents."""
    whole = Rows.cat([prefill_alone(dtype, ids) for ids in documents_of(loaded.stream)])
    return Rows(whole.aux[loaded.plan.rows], whole.teacher[loaded.plan.teacher])


@by_case
def test_rows_that_other_ranks_prefilled_arrive_bit_for_bit(outcomes, prefill_alone, case):
    for outcome in outcomes(case.name):
        assert len(outcome["alone"]) == case.accumulation
        for loaded in outcome["alone"]:
            assert same_rows(loaded.batch, expected_rows(loaded, prefill_alone, case.dtype))


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype == "float32"], ids=lambda case: case.name)
def test_rows_of_batches_agree_to_rounding(outcomes, prefill_alone, case):
    """A batch has different matrix shapes than a single document, so sums are taken in a different order."""
    for outcome in outcomes(case.name):
        for loaded in outcome["batched"]:
            for name, rows in expected_rows(loaded, prefill_alone, case.dtype).named().items():
                torch.testing.assert_close(loaded.batch.named()[name], rows, rtol=1e-5, atol=1e-5)


@by_case
def test_stored_rows_are_the_live_ones_and_those_of_a_compressed_store_read_ahead(outcomes, case):
    for outcome in outcomes(case.name):
        for live, stored, compressed in zip(*(outcome[name] for name in ("alone", "stored", "lossless")), strict=True):
            # The one token of a stream without samples is prefilled by itself, but stored with its document.
            spare = live.stream.tokens == 1 and case.documents != (ONE_TOKEN,)
            tolerance = 1e-5 if spare else 0.0
            for name, rows in live.batch.named().items():
                torch.testing.assert_close(rows, stored.batch.named()[name], rtol=tolerance, atol=tolerance)
            assert same_rows(stored.batch, compressed.batch)


def stream_groups(case, outcomes):
    """The outcomes of ranks that share streams, as one list per data-parallel rank. Such ranks are neighbours."""
    ranks = math.prod(case.sizes)
    return [outcomes[first : first + ranks] for first in range(0, case.world, ranks)]


@by_case
def test_each_document_is_prefilled_by_one_rank_of_its_stream(outcomes, case):
    for group in stream_groups(case, outcomes(case.name)):
        prefills = Counter(tuple(ids) for outcome in group for ids in outcome["prefilled"])
        streams = [loaded.stream for loaded in group[0]["alone"]]
        assert prefills == Counter(tuple(ids.tolist()) for stream in streams for ids in documents_of(stream))
        shares = [len(outcome["prefilled"]) for outcome in group]
        assert min(shares) > 0 or max(shares) == 1, "a rank is idle only where documents are fewer than ranks"


@by_case
def test_ranks_that_read_samples_in_different_orders_load_each_of_the_batch_once(outcomes, case):
    documents, loaded = encoded_documents(), []
    for group in stream_groups(case, outcomes(case.name)):
        for outcome in group:
            for ours, first in zip(outcome["alone"], group[0]["alone"], strict=True):
                assert all(torch.equal(getattr(ours.stream, f.name), getattr(first.stream, f.name)) for f in STREAM)
        loaded += group[0]["alone"]
    actual = []
    for stream in (one.stream for one in loaded):
        marked = torch.zeros(stream.tokens, dtype=torch.bool).index_fill(0, stream.teacher - 1, True)
        masks = marked.split(torch.bincount(stream.document).tolist())
        actual += [(*ids.tolist(), *mask.tolist()) for ids, mask in zip(documents_of(stream), masks, strict=True)]
    expected = []
    for place in case.documents or range(len(LENGTHS)):
        ids, mask = documents[place]
        expected.append((*ids.tolist(), *mask[:-1].tolist(), False))  # a last row is never supervised
    spare = Counter(actual) - Counter(expected)
    assert not Counter(expected) - Counter(actual)
    assert all(len(document) == 2 and not document[1] for document in spare), "one unsupervised token"
    assert spare.total() == max(0, len(loaded) - len(expected))


@by_case
def test_every_rank_plans_its_own_place_in_the_sequence(outcomes, case):
    """Ranks of a tensor group have the same plan. Together, sequence ranks unroll each query of one process once."""
    ranks = outcomes(case.name)
    for rank, outcome in enumerate(ranks):
        for loaded in outcome["alone"]:
            plan = plan_sequence(loaded.stream, Reach(STEPS), case.sharding, case.sequence_rank(rank))
            assert all(
                torch.equal(getattr(plan, f.name), getattr(loaded.plan, f.name))
                for f in fields(plan)
                if f.type is torch.Tensor
            )
    for group in stream_groups(case, ranks):
        for number, loaded in enumerate(group[0]["alone"]):
            dealt = torch.cat([outcome["alone"][number].plan.queries for outcome in group[:: case.tensor]])
            whole = plan_sequence(loaded.stream, Reach(STEPS)).queries
            assert sorted(dealt[dealt >= 0].tolist()) == whole[whole >= 0].tolist()


@pytest.mark.parametrize("name", ["nothing supervised", "one token"])
def test_a_stream_without_supervision_has_a_row_to_run_on_and_no_teacher(outcomes, name):
    for outcome in outcomes(name):
        (loaded,) = outcome["alone"]
        assert loaded.plan.rows.tolist() == [0] and loaded.batch.aux.shape[0] == 1
        assert not len(loaded.plan.teacher)
        assert loaded.batch.teacher.values.shape == (0, loaded.batch.aux.shape[1] // 3)
        assert loaded.batch.teacher.argmax.shape == loaded.batch.teacher.logsumexp.shape == (0,)


@pytest.mark.parametrize(
    ("check", "names"),
    [
        ("same order", None),
        ("another mask on rank 3", "rank 3 differs"),
        ("rank 0 has one sample fewer", "rank 0 differs"),
        ("another batch on ranks 1 and 3", "ranks 1, 3 differ"),
        ("everyone differs", "ranks 1, 2, 3 differ"),
    ],
)
def test_all_ranks_are_told_in_one_line_which_of_them_differ_if_any(outcomes, check, names):
    line = names and f"samples: not the same on all ranks, {names} from the others; prepare again"
    assert {outcome[check] for outcome in outcomes("agreement")} == {line}
