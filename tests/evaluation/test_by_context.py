"""Acceptance by context: which prompts a bucket takes, intervals that contain the truth as often as promised, and the
launcher from end to end."""

import json
import re
from dataclasses import astuple, replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from jobs import inputs_of
from tiny_draft import counted, export_as_it_is
from tiny_run import make_target, run_script, write_recipe

from eagle3.console import Console
from eagle3.draft.derivation import derive_draft
from eagle3.errors import UserError
from eagle3.evaluation.acceptance import Decoding
from eagle3.evaluation.context_results import ContextJudgement
from eagle3.evaluation.drafter import untrained_draft
from eagle3.evaluation.intervals import ratio_intervals
from eagle3.evaluation.prompts import prompts_by_context
from eagle3.evaluation.results import Conditions, as_json
from eagle3.jobs.evaluate import best_rates, decoding_of, judge_contexts, prompts_to_judge
from eagle3.planning.costs import Timing
from eagle3.planning.payoff import Cell, PayOff
from eagle3.preflight.inputs import require_result_place
from eagle3.recipe.loading import load_recipe
from eagle3.targets.checkpoint import fingerprint
from eagle3.targets.transformers import load_target


def samples(*answers: list[tuple[int, int]], tokens: int = 100) -> list[tuple[torch.Tensor, np.ndarray]]:
    """A text of the tokens 0, 1, 2, ... for each list of answers (begin, end), to be cut where these continue."""
    return [
        (torch.arange(tokens), np.array([place for ends in ranges for place in range(*ends)], int))
        for ranges in answers
    ]


def whole(*lengths: int) -> list[tuple[torch.Tensor, np.ndarray]]:
    return [(torch.arange(length), np.array([length])) for length in lengths]


def lengths(buckets) -> dict[int, list[int]]:
    return {context: [len(prompt) for prompt in prompts] for context, prompts in buckets.items()}


def test_a_prompt_is_as_long_as_its_bucket_allows_and_an_answer_goes_on_after_it():
    held_out = samples([(20, 30), (60, 70)], [(5, 9)], [(40, 41)], [])
    buckets = prompts_by_context(held_out, [8, 16, 32, 64, 128], per_context=8, longest=99)
    assert lengths(buckets) == {8: [8], 16: [], 32: [29], 64: [64, 40], 128: [69]}
    assert all(torch.equal(prompt, torch.arange(len(prompt))) for prompts in buckets.values() for prompt in prompts)
    assert lengths(prompts_by_context(held_out, [64, 128], 8, longest=62)) == {64: [62, 40], 128: []}


def test_buckets_take_the_same_samples_where_these_are_long_enough():
    """Of ten samples, every second one is long. Two long ones are chosen, and the short bucket reuses them."""
    held_out = samples(*([(10, 90)] if number % 2 else [(10, 30)] for number in range(10)))
    short, long = prompts_by_context(held_out, [32, 64], per_context=2, longest=99).values()
    assert [len(prompt) for prompt in short] == [32, 32] and [len(prompt) for prompt in long] == [64, 64]
    more, _ = prompts_by_context(held_out, [32, 64], per_context=7, longest=99).values()
    assert sorted(len(prompt) for prompt in more) == [29, 29, 32, 32, 32, 32, 32]


def test_buckets_double_as_far_as_texts_and_target_go():
    held_out = samples([(300, 2000)], [(100, 700)], tokens=3000)
    doubled = {512: [512, 512], 1024: [1024, 699], 2048: [1999]}
    assert lengths(prompts_by_context(held_out, None, 8, longest=10_000)) == doubled
    assert lengths(prompts_by_context(held_out, None, 8, longest=900)) == {512: [512, 512], 1024: [900, 699]}


def test_a_prompt_of_a_file_belongs_to_the_bucket_of_its_length():
    prompts = whole(300, 512, 600, 257, 256)
    assert lengths(prompts_by_context(prompts, None, 8, longest=4000)) == {512: [300, 512, 257], 1024: [600]}
    assert lengths(prompts_by_context(prompts, None, 2, longest=4000))[512] == [300, 257], "spread evenly"


def test_texts_that_are_all_short_are_judged_at_the_contexts_that_they_have_with_a_line():
    lines = []
    held_out = samples([(40, 90)], [(50, 60)])
    assert lengths(prompts_by_context(held_out, None, 8, 4000, lines.append)) == {64: [64, 59], 128: [89]}
    assert lengths(prompts_by_context(whole(90), None, 8, 4000, lines.append)) == {128: [90]}
    assert len(lines) == 2
    with pytest.raises(UserError, match="none of 1 texts .* longest has 6 tokens, and .* room for 4000"):
        prompts_by_context(samples([(3, 7)]), None, 8, longest=4000)
    with pytest.raises(UserError, match="none of 1 texts .* longest has 90 tokens"):
        prompts_by_context(whole(90), [512], 8, longest=4000)


def clusters(conversations: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Tokens yielded by each verification, for conversations that differ in acceptance, and so in the number of
    verifications for 60 tokens."""
    yields = [1 + generator.binomial(3, share, size=60) for share in generator.beta(3, 2, size=conversations)]
    return [each[: np.searchsorted(each.cumsum(), 60) + 1] for each in yields]


def totals(yields: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(yielded [C, 1], verifications [C])"""
    return np.array([[each.sum()] for each in yields]), np.array([len(each) for each in yields])


@pytest.mark.parametrize("conversations", [8, 24])
def test_intervals_hold_the_truth_as_often_as_they_promise(conversations):
    """95% of 400 intervals should, to within four standard deviations (1.1% each), less 2% because the distribution is
    not quite normal. Intervals that treat verifications as independent contain the truth far less often."""
    generator = np.random.default_rng(1)
    counts, verifications = totals(clusters(20_000, generator))
    truth = counts.sum() / verifications.sum()
    clustered, independent = [], []
    for seed in range(400):
        yields = clusters(conversations, generator)
        ((low, high),) = ratio_intervals(*totals(yields), seed)
        clustered.append(low <= truth <= high)
        if seed < 100:
            ((low, high),) = ratio_intervals(*totals(np.concatenate(yields)[:, None]), seed)
            independent.append(low <= truth <= high)
    assert 0.95 - 0.044 - 0.02 < np.mean(clustered) < 0.95 + 0.044
    assert np.mean(independent) < 0.75


def test_intervals_of_many_conversations_are_those_of_the_ratio_estimator():
    """The estimator's variance (Cochran 1977, section 6.3): sum of (y - r x)^2 / (C - 1), over C times the square of
    x's mean. With 2,000 resamples, each end has a standard error of 2%."""
    counts, verifications = totals(clusters(400, np.random.default_rng(2)))
    ratio = counts[:, 0].sum() / verifications.sum()
    error = (((counts[:, 0] - ratio * verifications) ** 2).sum() / 399 / 400) ** 0.5 / verifications.mean()
    ((low, high),) = ratio_intervals(counts, verifications, seed=3)
    assert (low, high) == pytest.approx((ratio - 1.966 * error, ratio + 1.966 * error), abs=0.25 * error)
    assert ratio_intervals(counts, verifications, seed=3).tolist() == [[low, high]], "a seed makes the interval"


def test_one_conversation_has_no_interval_and_two_have_all_that_they_span():
    assert ratio_intervals(np.array([[30]]), np.array([10]), seed=0) is None
    assert ratio_intervals(np.array([[30], [0]]), np.array([10, 0]), seed=0) is None, "one that says nothing"
    assert ratio_intervals(np.array([[30], [20]]), np.array([10, 10]), seed=0).tolist() == [[2, 3]]


def chains_of(draft_tokens: int) -> Conditions:
    return Conditions.of("transformers", Decoding(draft_tokens, 64), None)


def test_the_tables_fit_60_columns_and_say_what_differs_and_empty_contexts_are_left_out():
    verdicts = (["identical"] * 9, ["identical", "tie"], ["mismatch"] * 12)
    contexts = {
        size: [counted(3, 1, verdict=each) for each in some]
        for size, some in zip((512, 131_072, 1_048_576), verdicts, strict=True)
    }
    contexts |= {1024: [], 2048: [counted(), counted()]}
    told = []
    judgement = ContextJudgement.over(contexts, chains_of(3), 64, told.append)
    (warning,) = told
    assert warning.startswith("context 2,048: left out, the target ends all its conversations with their first token;")
    lines = judgement.lines()
    assert max(map(len, lines)) <= 60 and judgement.lossless is False
    assert [line.split()[-1] for line in lines[2:5]] == ["equal", "tied", "DIFFER"]
    assert len({len(line) for line in lines[1:5]}) == 1, "aligned"
    document = json.loads(json.dumps(as_json(judgement)))
    assert (document["left_out"], document["topk"], document["tree_tokens"]) == ([1024, 2048], 1, 4)
    assert replace(judgement, topk=2, tree_tokens=8).lines()[1] == "trees of 8 tokens, 2 branches a node"


@pytest.fixture(scope="module")
def run(topology, tmp_path_factory):
    """The recipe of a run whose draft has learnt nothing."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("run")
    target = load_target(make_target(folder / "target"), dtype="float32")
    shape = derive_draft(target.model.config, draft_vocab_size=200, aux_layers=target.aux_layers)
    draft = untrained_draft(shape, target.head, topology.modules, seed=0)
    export_as_it_is(folder / "run" / "export", draft, torch.zeros(200, dtype=torch.long))
    evaluation = {"conversations": 2, "new_tokens": 12}
    return write_recipe(folder, folder / "target", model={"draft": {"vocab_size": 200}}, evaluation=evaluation)


def test_by_context_writes_and_prints_every_bucket(run):
    words = ["--by-context", "--contexts", "16,32,64,128", "--per-context", "3", "--gpu", "h200"]
    output = run_script("launchers/evaluate.py", str(run), *words)
    folder = run.parent / "run"
    result = json.loads((folder / "by_context.json").read_text())
    assert (result["engine"], result["temperature"], result["seed"]) == ("transformers", 0, 0)
    assert (result["draft_tokens"], result["new_tokens"], result["draft"]) == (4, 12, str(folder / "export"))
    target = fingerprint(run.parent / "target")[:8]
    assert result["target"] == f"target ({target})"
    assert re.fullmatch(r"\d+ held-out samples of [\d,]+ tokens", result["texts"])
    assert ([each["context"] for each in result["contexts"]], result["left_out"]) == ([32, 64], [16, 128])
    assert "context 128: left out, no text is of that length" in output
    tables, pays = output.split("speed-up with", 1)
    rows = {line.split()[0]: line.split() for line in tables.splitlines() if line.startswith("     ")}
    for each in result["contexts"]:
        assert each["conversations"] == 3 and each["mismatches"] == 0 and each["compared"]
        assert each["interval"][0] <= each["acceptance_length"] <= each["interval"][1]
        assert len(each["position_acceptance"]) == len(each["position_intervals"]) == 4
        assert rows[str(each["context"])] == [str(each["context"]), *(f"{x:.2f}" for x in each["position_acceptance"])]
    measured, estimated = result["pay_off"]
    assert measured["source"] == "measured here in processor seconds"
    assert estimated["source"] == "estimated for 1 x H200 by data sheet, not measured"
    assert [(cell["context"], cell["drafts"]) for cell in measured["cells"]] == [*product((32, 64), (1, 2, 3, 4))]
    for each in result["contexts"]:
        (cell,) = (cell for cell in measured["cells"] if (cell["context"], cell["drafts"]) == (each["context"], 4))
        assert cell["length"] == pytest.approx(each["acceptance_length"])
        assert min(cell["break_even"], *(each["timing"][phase] for phase in ("proposing", "verifying", "plain"))) > 0
    assert pays.count("drafting pays nowhere (batch 1") == 2, "the draft has learnt nothing"
    # a second judge must recognise this as an evaluation
    require_result_place(folder / "by_context.json")


QUIET = Console(speaks=False)
QUESTIONS = {"riddles": ["Who sat on the mat?", "And why?", "When did the rain begin to fall?"], "sums": ["2 + 2 = ?"]}


def write_sets(folder) -> dict:
    """A file of questions for each set."""
    files = {name: folder / f"{name}.txt" for name in QUESTIONS}
    for name, file in files.items():
        file.write_text("\n".join(QUESTIONS[name]))
    return files


@pytest.fixture(scope="module")
def inputs(run, topology):
    inputs = inputs_of(load_recipe(run), topology.device, QUIET)
    torch.set_num_threads(1)
    return inputs


def test_contexts_are_judged_on_the_prompts_of_all_sets(run, inputs, topology, tmp_path):
    files = write_sets(tmp_path)
    prompts, sizes = prompts_to_judge(inputs, files, 4)
    assert sizes == {"riddles": 3, "sums": 1}
    asked = {"contexts": [16, 32, 64], "per_context": 8}
    judgement = judge_contexts(inputs, run.parent / "run" / "export", topology, QUIET, files, **asked)
    counts = {each.context: each.conversations for each in judgement.contexts}
    assert sum(counts.values()) == 4
    for context, count in counts.items():
        assert count == sum(context // 2 < len(prompt) <= context for prompt in prompts)


def test_a_judge_of_two_sets_prints_and_writes_a_row_for_each(run, tmp_path):
    files = write_sets(tmp_path)
    command = ["launchers/evaluate.py", str(run), "--quiet", "--out", str(tmp_path / "out.json")]
    output = run_script(*command, "--prompts", f"hard={files['riddles']}", "--prompts", files["sums"])
    result = json.loads((tmp_path / "out.json").read_text())
    assert {each["name"]: each["conversations"] for each in result["sets"]} == {"hard": 3, "sums": 1}
    assert [pair for each in result["sets"] for pair in each["of_each"]] == result["of_each"]
    rows = [line.split()[:4] for line in output.splitlines()]
    for each in result["sets"]:
        counts = [str(each["conversations"]), str(each["verifications"]), f"{each['acceptance_length']:.2f}"]
        assert [each["name"], *counts] in rows


def test_a_quiet_judge_says_the_result_alone_and_leaves_examples(run):
    """The judge samples, so there is nothing to compare with."""
    command = ["launchers/evaluate.py", "--recipe", str(run), "--temperature", "1", "--quiet"]
    output = run_script(*command)
    folder = run.parent / "run"
    assert output.startswith("acceptance length ") and output.endswith(f"written to {folder / 'evaluation.json'}\n")
    assert "sampled at temperature 1, seed 0: not compared with plain sampling" in output
    result = json.loads((folder / "evaluation.json").read_text())
    assert result["lossless"] is None and (result["temperature"], result["compared"]) == (1, False)
    assert len(result["examples"]) == 2 and result["sets"] == []
    for example in result["examples"]:
        assert example["prompt"].endswith("<|im_start|>assistant\n") and len(example["prompt"]) <= 300
        assert example["first"] and all(verified["own"] != "" for verified in example["verifications"])
    verifications = [verified for example in result["examples"] for verified in example["verifications"]]
    assert len(verifications) == result["verifications"]
    assert sum(len(verified["accepted"]) for verified in verifications) == sum(result["accepted"])
    assert all(len(each["accepted"]) + len(each["rejected"]) == 4 for each in verifications if each["own"] is not None)


def test_contexts_are_judged_by_samples_too_and_not_beyond_the_targets(run, inputs, topology):
    decoding = replace(decoding_of(inputs.known.recipe), temperature=0.8, seed=3)

    judged = partial(judge_contexts, inputs, run.parent / "run" / "export", topology, QUIET, decoding=decoding)
    judgement = judged(contexts=[32, 64], per_context=2)
    assert [each.conversations for each in judgement.contexts] == [2, 2] and judgement.lossless is None
    assert judgement.lines()[0] == "acceptance length by context (at temperature 0.8, 12 new tokens)"
    again = judged(contexts=[32, 64], per_context=2, windows=[8], best=True)
    (windowed,) = again.other_windows
    assert replace(again, other_windows=[]) == replace(judgement, other_windows=[])
    assert (windowed.window, windowed.trained_window) == (8, None)
    assert windowed.lines()[1].startswith("judged with a window of 8 keys")
    assert [(each.context, each.drafts, each.best) for each in again.best] == [
        (each.context, 0, 1 / each.timing.plain) for each in again.contexts
    ], "the draft has learnt nothing, so none of it is best"
    with pytest.raises(UserError, match="--contexts: 512 is beyond the target's context of 256; name smaller ones"):
        judged(contexts=[64, 512], per_context=2)


def judged_by_hand(context: int, drafts: int, per_round: int, seconds: float) -> ContextJudgement:
    """Ten rounds with `per_round` tokens in `seconds` each; a token takes a second without a draft."""
    timing = Timing(context, drafts, 0.0, seconds / 2, seconds / 2, plain=1.0)
    conversation = replace(counted(*[per_round - 1] * 10, drafts=drafts), timing=timing)
    return ContextJudgement.over({context: [conversation]}, chains_of(drafts), 64, print)


def test_the_best_number_of_draft_tokens_is_decoded_with_where_it_pays():
    """The first of three drafts is accepted in every round, and the others cost more than they bring."""
    judged, again = judged_by_hand(512, 3, 2, seconds=1.8), judged_by_hand(512, 1, 2, seconds=1.25)
    cells = [Cell(512, 1, 1, 2.0, 1.5), Cell(512, 1, 2, 2.0, 1.7), Cell(512, 1, 3, 2.0, 1.8)]
    asked = []

    def judge_with(decoding, buckets):
        asked.append((decoding.draft_tokens, [*buckets]))
        return again

    judged = replace(judged, pay_off=[PayOff("by hand", cells)])
    (best,) = best_rates(judged, Decoding(3, 64), {512: [], 1024: []}, judge_with)
    assert asked == [(1, [512])]
    assert astuple(best) == (512, 1, pytest.approx(2 / 1.25), pytest.approx(2 / 1.8), 1.0)
    lines = replace(judged, best=[best]).lines()
    assert lines[-1].split() == ["512", "1", "1.6", "1.1", "1.0"]
