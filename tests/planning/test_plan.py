"""launchers/plan.py and its searches: whether a recipe fits, how to make it fit, and mistakes in one line."""

import dataclasses
import json
from functools import partial

import pytest
import torch
from layouts import draft_config
from shares import share_of
from tiny_run import write_recipe

from eagle3.jobs.plan import overrides
from eagle3.objective.recompute import MemoryPlan
from eagle3.parallel.sequence import Reach, SequenceSharding, Stream, plan_sequence
from eagle3.planning.fitting import PlannedStream, best_layout, layouts, longest_context
from eagle3.planning.memory import engine_bytes, rank_bytes
from eagle3.planning.step import Planned, RankShare, Sizes, Weights, sent_bytes, step_flops

DRAFT = draft_config(heads=8, kv_heads=4, head_dim=16)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, target):
    return write_recipe(tmp_path_factory.mktemp("plan"), target, training={"global_batch_size": 8})


@pytest.fixture
def plan(launcher):
    return partial(launcher, "plan.py")


def test_what_fits_is_said_with_every_part_and_exit_code_0(plan, recipe):
    code, out, _ = plan("--recipe", recipe, "--gpus", 1, "--json")
    report = json.loads(out)
    assert code == 0 and report["fits"]
    parts = {name: size for name, size in report["memory"].items() if name not in ("all", "usable")}
    assert sum(parts.values()) == report["memory"]["all"] <= report["memory"]["usable"]
    assert {"weights", "optimiser", "hidden states", "keys", "queries", "gradients"} <= parts.keys()
    written = plan("--recipe", recipe, "--gpus", 1)[1]
    assert "\nfits\n" in written and "assumption" in written
    assert f"(beyond the draft's positions, {report['positions']:,})" in written
    assert plan("--recipe", recipe, "--gpus", 1, "--gpu-memory", "80GB")[1] == written


def test_what_does_not_fit_has_exit_code_1_and_the_layout_that_does(plan, recipe):
    words = ["--recipe", recipe, "--gpus", 8, "--context", 100_000, "--json"]
    needed = json.loads(plan(*words)[1])["memory"]["all"]
    code, out, _ = plan(*words, "--gpu-memory", needed / 2 / 1e9)
    report = json.loads(out)
    assert code == 1 and not report["fits"] and report["best_layout"]
    assert plan(*words, "--gpu-memory", needed / 2 / 1e9, *overrides(report["best_layout"]).split())[0] == 0


def test_the_best_layout_of_packed_streams_fits_when_it_is_applied(plan, recipe):
    """Fewer data ranks pack more samples into a stream."""
    size = ["training.global_batch_size=16", "data.max_length=100000", "parallelism.ulysses=2"]
    words = ["--recipe", recipe, "--gpus", 8, "--json", *size]
    words += ["--gpu-memory", 1.05 * json.loads(plan(*words)[1])["memory"]["all"] / 1e9 / 0.92]
    best = json.loads(plan(*words)[1])["best_layout"]
    code, out, _ = plan(*words, *overrides(best).split())
    assert code == 0 and json.loads(out)["stream"]["tokens"] == best["tokens"]


@pytest.mark.parametrize(
    ("chosen", "logit_bytes"),
    [("hidden_states.mode=stored", 2), ("target.backend=sglang", 2), ("hidden_states.mode=live", 4)],
)
def test_a_teacher_of_logits_is_planned_for(chosen, logit_bytes, plan, recipe, tmp_path):
    chosen = ["hidden_states.mode=live", chosen, f"hidden_states.path={tmp_path}", f"target.spool={tmp_path}"]
    chosen += ["hidden_states.codec=none", "hidden_states.dtype=bfloat16", "training.dtype=float32"]
    arguments = ["--recipe", recipe, "--gpus", 1, "--context", 1000, "--supervised", 0.5, "--json", *chosen]
    hidden, logits = (json.loads(plan(*arguments, f"target.teacher={kind}")[1]) for kind in ("hidden", "logits"))
    draft = hidden["draft"]
    width, columns = draft["target_hidden_size"], draft["draft_vocab_size"]
    assert "teacher head" in hidden["memory"] and "teacher head" not in logits["memory"]
    more = logits["memory"]["hidden states"] - hidden["memory"]["hidden states"]
    assert more == 500 * (columns * logit_bytes - width * 4)
    written = [each["hidden_states_per_token"]["supervised"] for each in (hidden, logits)]
    assert written[1] - written[0] == (columns - width) * 2


def test_where_nothing_fits_it_says_so(plan, recipe):
    code, out, _ = plan("--recipe", recipe, "--gpus", 2, "--context", 100_000, "--gpu-memory", "0.001")
    assert code == 1 and "DOES NOT FIT" in out and "no layout of these GPUs fits" in out


def test_the_quickstart_is_planned_without_its_target(plan):
    code, out, _ = plan("--gpus", 1, "training.ttt_steps=2")
    assert code == 0 and "hidden 192" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--gpus", "0"], "--gpus: 0 "),
        (["--gpus", "3", "parallelism.ulysses=2"], "--gpus 3"),
        (["--gpu-memory", "-1"], "--gpu-memory: -1 "),
        (["--gpu-memory", "nan"], "--gpu-memory: NAN "),
        (["--context", "1"], "--context: 1 "),
        (["--supervised", "0"], "--supervised: 0 "),
        (["--supervised", "1.5"], "--supervised: 1.5 "),
        (["--gpus", "8", "parallelism.ulysses=3"], "ulysses"),
        (["memory.recompute=some"], "memory.recompute"),
        (["memory.block_mib=0"], "memory.block_mib"),
        (["memory.block_mib=999999999"], "memory.block_mib"),
        (["memory.inputs=host", "memory.recompute=none"], "inputs is 'host'"),
        (["--context", "2", "--supervised", "0.01"], "--supervised 0.01"),
        (["--context", "9" * 20], "--context: 9999"),
        (["--gpu-memory", "1e300"], "--gpu-memory: 1E300 "),
        (["model.target=/nowhere/at/all"], "/nowhere/at/all"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_that_names_it(plan, recipe, arguments, named):
    code, out, err = plan("--recipe", recipe, *arguments)
    assert code == 2 and not out
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert named in line and len(line) < 400


@pytest.mark.parametrize("supervised", [1.0, 0.25])
def test_the_longest_context_fits_and_a_little_more_does_not(supervised):
    planned, usable = Planned(DRAFT, 4, torch.bfloat16, memory=MemoryPlan("full", 2**20)), 5e8
    tokens = longest_context(planned, lambda tokens: PlannedStream(tokens, 1, supervised), usable)
    assert tokens > 1024
    needs = [PlannedStream(count, 1, supervised).needs(planned) for count in (tokens, tokens + 1024)]
    assert needs[0] <= usable < needs[1]


def test_the_best_layout_fits_and_takes_no_more_gpus_a_stream_than_it_must():
    planned, stream = Planned(DRAFT, 4, torch.bfloat16, memory=MemoryPlan("full", 2**20)), PlannedStream(2**17, 1, 1.0)
    rooms = (1e12, stream.needs(planned) / 3)
    sizes = [best_layout(planned, 8, lambda sizes: stream, usable).planned.sizes for usable in rooms]
    assert sizes[0].sequence == 1 and sizes[1].sequence > 1
    assert all(each.ranks == 8 for each in sizes)
    assert {each.sizes.ranks for each in layouts(planned, 8)} == {8}


def shares_of(stream: Stream, sharding: SequenceSharding, window: int | None) -> list[RankShare]:
    """Every rank's share, as its sequence plan assigns it."""
    ranks = range(sharding.ulysses * sharding.ring)
    return [share_of(plan_sequence(stream, Reach(7, window), sharding, rank), stream) for rank in ranks]


@pytest.mark.parametrize("ulysses,ring", [(1, 1), (2, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("supervised", [1.0, 0.25])
@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("selection", ["supervised", "all"])
def test_an_expected_share_is_about_what_the_plan_of_such_a_stream_says(ulysses, ring, supervised, window, selection):
    tokens = 4096
    mask = torch.arange(tokens) >= tokens * (1 - supervised)
    stream = Stream.pack([torch.zeros(tokens, dtype=torch.long)], [mask], "reference")
    draft = dataclasses.replace(DRAFT, window=window)
    planned = Planned(draft, 7, torch.float32, Sizes(1, ulysses, ring), query_selection=selection)
    expected = PlannedStream(tokens, 1, supervised).share(planned)
    shares = shares_of(stream, SequenceSharding(ulysses, ring, query_selection=selection), window)
    for name in ("keys", "queries", "rows"):
        assert abs(max(getattr(share, name) for share in shares) / getattr(expected, name) - 1) < 0.05, name
    assert abs(sum(share.pairs for share in shares) / expected.pairs - 1) < 0.02
    if len(shares) == 1:  # otherwise, each block of a rank's queries has a few more
        assert abs(shares[0].teacher / expected.teacher - 1) < 0.01


@pytest.mark.parametrize("ulysses,ring", [(1, 1), (2, 1), (2, 2)])
def test_each_span_of_a_document_costs_a_window_of_keys(ulysses, ring):
    tokens, spans, window = 8192, 4, 256
    mask = torch.arange(tokens) % (tokens // spans) >= tokens // spans * 3 // 4
    stream = Stream.pack([torch.zeros(tokens, dtype=torch.long)], [mask], "reference")
    planned = Planned(dataclasses.replace(DRAFT, window=window), 7, torch.float32, Sizes(1, ulysses, ring))
    expected = PlannedStream(tokens, 1, 0.25, spans).share(planned)
    shares = shares_of(stream, SequenceSharding(ulysses, ring), window)
    for name in ("keys", "queries"):
        assert abs(max(getattr(share, name) for share in shares) / getattr(expected, name) - 1) < 0.05, name
    # expected as if a rank's keys and queries were different rows, which is so if the supervised rows come last
    assert 0.7 * expected.rows < max(share.rows for share in shares) < 1.05 * expected.rows


def test_the_planner_knows_spans(plan, recipe):
    """With ten spans of 100 tokens and a window of 50, a document of a million tokens costs 1,500 rows, however much of
    it is supervised."""
    chosen, reports = ["data.spans={length: 100, per_document: 10}", "model.draft.window=50"], []
    for context, words in (("1000000", chosen), ("2000000", chosen), ("1000000", chosen[1:])):
        reports.append(json.loads(plan("--recipe", recipe, "--json", "--gpus", "1", "--context", context, *words)[1]))
    spanned, longer, whole = reports
    assert spanned["stream"] == {"tokens": 1_000_000, "documents": 1, "supervised": 1e-3, "spans": 10}
    assert longer["memory"]["all"] < 1.05 * spanned["memory"]["all"] < 0.2 * whole["memory"]["all"]


def test_weights_are_counted_as_the_module_has_them(topology):
    from eagle3.draft.model import Eagle3Draft

    draft = Eagle3Draft(DRAFT, topology.modules, torch.float32)
    weights = Weights.of(DRAFT, 1)
    trained = sum(weight.numel() for weight in draft.parameters() if weight.requires_grad)
    assert (weights.trained, weights.embedding) == (trained, draft.embedding.weight.numel())


def test_recomputing_costs_flops_and_saves_bytes_and_more_ranks_divide_both():
    stream = PlannedStream(8192, 1, 1.0)
    modes = ("none", "attention_kept", "full")
    by_mode = [Planned(DRAFT, 7, torch.bfloat16, memory=MemoryPlan(mode)) for mode in modes]
    share = stream.share(by_mode[0])
    flops = [step_flops(each, share) for each in by_mode]
    assert flops[0].model == flops[1].model == flops[2].model == flops[0].executed
    assert flops[0].executed < flops[1].executed < flops[2].executed
    totals = [rank_bytes(each, share).total() for each in by_mode]
    assert totals[0] > totals[1] > totals[2]
    assert not sent_bytes(by_mode[2], share).total()
    four = Planned(DRAFT, 7, torch.bfloat16, Sizes(1, 2, 2), memory=MemoryPlan("full"))
    quarter = stream.share(four)
    assert step_flops(four, quarter).model == pytest.approx(flops[0].model / 4, rel=0.02)
    assert engine_bytes(four)["optimiser"] == pytest.approx(engine_bytes(by_mode[0])["optimiser"] / 4, rel=0.01)
    assert sent_bytes(four, quarter).total() > 0
