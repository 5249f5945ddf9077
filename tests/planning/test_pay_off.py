"""Whether a draft pays: speed-ups by hand, costs fitted to measured times, and costs by data sheet. And what
engines are to be told of it, which their own code reads so. (vLLM's: test_vllm.py.)"""

import json
from dataclasses import replace

import numpy as np
import pytest
from places import FAMILIES

from eagle3.draft.config import DraftConfig
from eagle3.planning.costs import (
    ITEMSIZE,
    MeasuredCosts,
    SheetCosts,
    Timing,
    key_layers,
    non_negative,
    token_flops,
    weight_bytes,
)
from eagle3.planning.gpus import GPUS
from eagle3.planning.payoff import Cell, PayOff, schedule, serving_lines, sglang_flags, surface, vllm_flags
from eagle3.targets.facts import read_facts
from eagle3.targets.sglang.version import speculative_flags

SHARES = {1000: [0.8, 0.5, 0.1], 4000: [0.6, 0.3, 0.1]}


class ByHand:
    """The target's forward takes 9 s and 1 s more for each token, a draft 1 s for each 1,000 tokens."""

    def verifying(self, batch: int, tokens: int, context: int) -> float:
        return 9.0 + tokens

    def drafting(self, batch: int, drafts: int, context: int) -> float:
        return drafts * batch * context / 1000


def test_a_cell_is_its_tokens_over_what_they_cost_relative_to_plain_decoding():
    cells = surface(ByHand(), SHARES, (1, 4))
    places = [(cell.context, cell.batch, cell.drafts) for cell in cells[:4]]
    assert places == [(1000, 1, 1), (1000, 1, 2), (1000, 1, 3), (1000, 4, 1)]
    assert [cell.length for cell in cells[:3]] == pytest.approx([1.8, 2.3, 2.4])
    assert [cell.break_even for cell in cells[:4]] == pytest.approx([1.2, 1.4, 1.6, 1.5])
    assert [cell.speed_up for cell in cells[:4]] == pytest.approx([1.8 / 1.2, 2.3 / 1.4, 2.4 / 1.6, 1.8 / 1.5])


def test_the_best_number_of_draft_tokens_and_where_drafting_pays():
    pay_off = PayOff("by hand", surface(ByHand(), SHARES, (1, 2, 16)))
    best = {(cell.context, cell.batch): (cell.drafts, cell.speed_up) for cell in pay_off.best}
    assert best[1000, 1] == (2, pytest.approx(2.3 / 1.4)) and best[4000, 1] == (1, pytest.approx(1.6 / 1.5))
    always, until, never = pay_off.paying.values()
    assert (always, never) == ([(None, None)], [])
    # Two conversations gain 1.5 - 2.3/1.6 at 1,000 tokens, and lose 1 - 1.6/1.9 at 4,000, two doublings later.
    high, low = max(1.8 / 1.3, 2.3 / 1.6), 1.6 / 1.9
    ((start, end),) = until
    assert start is None and end == pytest.approx(1000 * 2 ** (2 * (high - 1) / (high - low)))
    lines = pay_off.lines()
    until_about = f"up to about {end:,.0f} tokens (batch 2)"
    assert lines[-1] == f"drafting pays at all judged contexts (batch 1), {until_about}, nowhere (batch 16)"
    assert lines[3].split()[:3] == ["4,000", "1.07", "(1)"]


def test_drafting_may_pay_from_a_context_on_and_again():
    """Speed-ups that cross 1 half-way between two contexts: at the square root of 2 times the first."""
    gains = {1000: 0.5, 2000: 1.5, 4000: 0.5, 8000: 1.5}
    pay_off = PayOff("by hand", [Cell(context, 1, 1, gain, 1.0) for context, gain in gains.items()])
    first, second = pay_off.paying[1]
    assert first == pytest.approx((2**0.5 * 1000, 2**0.5 * 2000))
    assert second == (pytest.approx(2**0.5 * 4000), None)
    pays = "from about 1,414 tokens to about 2,828 and from about 5,657 tokens"
    assert pay_off.verdict() == f"drafting pays {pays} (batch 1)"


def test_a_fit_is_the_best_of_all_without_negative_parts():
    generator = np.random.default_rng(0)
    table, values = generator.normal(size=(12, 3)), generator.normal(size=12)
    best = non_negative(table, values)
    grid = np.stack(np.meshgrid(*[np.linspace(0, 1, 41)] * 3), -1).reshape(-1, 3)
    losses = ((grid @ table.T - values) ** 2).sum(-1)
    assert (best >= 0).all() and ((table @ best - values) ** 2).sum() <= losses.min() + 1e-12


@pytest.mark.parametrize("window", [None, 500])
def test_measured_costs_predict_other_contexts_and_chains(window):
    def timing(context: int, drafts: int) -> Timing:
        seen = context if window is None else min(context, window)
        proposing = drafts * (2e-3 + 1e-6 * seen)
        verifying, plain = (5e-3 + 1e-3 * n + 3e-6 * context + 2e-8 * n * context for n in (drafts + 1, 1))
        return Timing(context, drafts, extending=1e-3, proposing=proposing, verifying=verifying, plain=plain)

    costs = MeasuredCosts([timing(context, 4) for context in (300, 1000, 4000)], window)
    for context, drafts in ((600, 1), (2000, 2), (8000, 3)):
        expected = timing(context, drafts)
        assert costs.verifying(1, 1, context) == pytest.approx(expected.plain)
        assert costs.verifying(1, drafts + 1, context) == pytest.approx(expected.verifying)
        assert costs.drafting(1, drafts, context) == pytest.approx(expected.extending + expected.proposing)


def test_a_median_leaves_out_what_a_first_conversation_pays_for():
    first, second, third = (Timing(100.0 * n, 4, *([seconds] * 4)) for n, seconds in ((1, 50.0), (2, 2.0), (3, 1.0)))
    assert Timing.median([first, second, third]) == Timing(200.0, 4, 2.0, 2.0, 2.0, 2.0)
    assert Timing.median([]) is None


@pytest.mark.parametrize(
    ("family", "active", "key_bytes"),
    [
        # Weights a token goes through in billions, as the models' own cards and papers say, and bytes of keys a token:
        ("llama-3.1-8b", 8.0, 32 * 2 * 8 * 128 * 2),
        ("deepseek-v3", 37.0, 61 * (512 + 64) * 2),
        ("qwen3-30b-a3b", 3.3, 48 * 2 * 4 * 128 * 2),
        ("kimi-k2", 32.0, 61 * (512 + 64) * 2),
        ("gpt-oss-120b", 5.1, 36 * 2 * 8 * 64 * 2),
    ],
)
def test_a_targets_active_weights_and_keys_are_those_of_its_config(family, active, key_bytes):
    target = read_facts(str(FAMILIES / family))
    # Some count the embedding, some do not: 0.6B each for gpt-oss and Kimi.
    assert token_flops(target) / 2e9 == pytest.approx(active, rel=0.12)
    assert sum(kind.layers * kind.bytes for kind in key_layers(target.config)) == key_bytes
    assert weight_bytes(target, 1) <= weight_bytes(target, 64) <= target.bytes


def test_costs_by_data_sheet_are_reading_or_computing_whichever_takes_longer():
    target, gpu = read_facts(str(FAMILIES / "llama-3.1-8b")), GPUS["h100"]
    shape = {"hidden_size": 4096, "target_hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    shape |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "draft_vocab_size": 32000}
    draft = DraftConfig(**shape, max_position_embeddings=131072, window=512)
    costs = SheetCosts(target, draft, gpu, gpus=1)
    bandwidth, context = gpu.bandwidth * gpu.reached_bandwidth, 8192
    reading = target.bytes + 4 * context * 131072
    assert costs.verifying(4, 1, context) == pytest.approx(32 * gpu.layer_seconds + reading / bandwidth)
    many = 64 * 5 * (token_flops(target) + context * 32 * 4 * 32 * 128) / (gpu.flops * gpu.reached_flops)
    longer = max(many, (target.bytes + 64 * context * 131072) / bandwidth)
    assert costs.verifying(64, 5, context) == pytest.approx(32 * gpu.layer_seconds + longer)
    keys = 512 * 2 * 8 * 128 * ITEMSIZE
    step = 2 * 4096 * 48 * 128 + 2 * 4096 + 4096 * 4096 + 3 * 4096 * 14336 + 4096 + 4096 * 32000 + 4096
    entry = 3 * 4096 * 4096
    chain = 3 * (gpu.layer_seconds + (ITEMSIZE * step + keys) / bandwidth)
    assert costs.drafting(1, 3, context) == pytest.approx(gpu.layer_seconds + ITEMSIZE * entry / bandwidth + chain)
    weights, of_token = target.bytes + ITEMSIZE * (step + entry), 131072
    room = (0.9 * gpu.memory - weights - 16 * 512 * 2 * 8 * 128 * ITEMSIZE) / 16 / of_token
    assert costs.fits(16, int(room) - 1) and not costs.fits(16, int(room) + 1)
    cells = surface(costs, {int(room) + 1: [0.5]}, (1, 16), costs.fits)
    assert [cell.batch for cell in cells] == [1]


# Speed-ups by context, for batches of 1, 4, 16 and 64 and for one and two draft tokens.
GAINS = {(1, 1): (1.6, 1.4), (1, 2): (2.0, 1.2), (4, 1): (1.6, 1.2), (4, 2): (1.9, 1.1)}
GAINS |= {(16, 1): (1.5, 0.9), (16, 2): (1.4, 0.7), (64, 1): (1.1, 0.8), (64, 2): (1.0, 0.7)}
CELLS = [
    Cell(context, batch, drafts, gains[place], 1.0)
    for place, context in enumerate((1024, 4096))
    for (batch, drafts), gains in GAINS.items()
]
SCHEDULE = {1: 2, 16: 1, 64: 0}


def test_a_batch_gets_the_number_with_the_highest_mean_over_contexts_and_none_where_that_loses():
    tiers = PayOff("by hand", CELLS).tiers
    assert [(tier.batch, tier.drafts) for tier in tiers] == [(1, 2), (4, 2), (16, 1), (64, 1)]
    assert [tier.speed_up for tier in tiers] == pytest.approx([1.6, 1.5, 1.2, 0.95])
    assert schedule(tiers) == SCHEDULE
    (crossing,) = tiers[2].paying  # from 1.5 to 0.9 on the logarithm of the context
    assert crossing.high == pytest.approx(1024 * 4 ** (0.5 / 0.6))


def test_a_draft_that_pays_for_no_batch_is_advised_against():
    lossy = PayOff("by hand", [replace(cell, break_even=9.0) for cell in CELLS])
    *_, last = serving_lines(lossy, None, "")
    assert last == "serve the target without the draft"
    assert schedule(lossy.tiers) == {1: 0}


def test_a_batch_that_fits_only_after_short_contexts_says_so():
    pays = PayOff("by hand", [cell for cell in CELLS if (cell.batch, cell.context) != (16, 4096)])
    lines = serving_lines(pays, None, "")
    assert any("at all judged contexts (of up to 1,024 tokens, which fit)" in line for line in lines)
    assert sum("which fit" in line for line in lines) == 1


def test_a_draft_that_sglang_does_not_serve_gets_no_flags_for_it():
    lines = serving_lines(PayOff("by hand", CELLS), None, "SGLang does not know qk_norm")
    assert lines[-2].startswith("vLLM: ") and lines[-1] == "SGLang: SGLang does not know qk_norm"


def test_one_number_for_all_batches_needs_no_schedule():
    expected = {"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 3}
    assert json.loads(vllm_flags("DRAFT", {1: 3})[1]) == expected
    assert sglang_flags("DRAFT", {1: 3}, 64) == (speculative_flags("DRAFT", 3, 1, 4, 64), "")


@pytest.mark.sglang
def test_sglangs_own_class_reads_the_draft_tokens_by_batch(tmp_path):
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

    (tmp_path / "adaptive.json").write_text(sglang_flags("DRAFT", SCHEDULE, None)[1])
    own = AdaptiveSpeculativeParams(initial_steps=2, cfg_path=str(tmp_path / "adaptive.json"))
    assert own.candidate_steps == [0, 1, 2]
    for batch, drafts in ((1, 2), (15, 2), (16, 1), (63, 1), (64, 0), (500, 0)):
        for _ in range(50):  # however much is accepted
            own.on_verify_complete([2] * batch, batch)
        assert own.get_steps_for_batch(batch) == drafts
