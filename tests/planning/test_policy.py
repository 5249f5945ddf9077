"""Of a pay-off follows what engines are to be told, and the engines' own code reads it so. (vLLM's: test_vllm.py.)"""

import json
from dataclasses import replace

import pytest

from eagle3.planning.payoff import Cell, PayOff
from eagle3.planning.policy import schedule, serving_lines, sglang_flags, vllm_flags
from eagle3.targets.sglang.version import speculative_flags

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
