"""Acceptance over whole texts at once is that of real decoding, wherever decoding begins a verification."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tiny_draft import NEW_TOKENS, as_target, random_prompts, speculative_greedy, tiny_llama

from eagle3.draft.derivation import derive_draft
from eagle3.draft.model import Eagle3Draft
from eagle3.evaluation.speculative import plain_decoding
from eagle3.evaluation.teacher_forced import WrittenText, forced_drafts, read_text
from eagle3.objective.chains import count_chains
from eagle3.objective.distill import StepWeights
from eagle3.objective.model import DraftObjective, micro_batch
from eagle3.parallel.sequence import Stream, plan_sequence
from eagle3.parallel.topology import Topology
from eagle3.states.rows import Rows
from eagle3.text.vocabulary import DraftVocabulary

STEPS = 4


def lucky_draft(target, topology: Topology, **changes) -> tuple[Eagle3Draft, torch.Tensor]:
    """A draft with random weights that predicts few tokens, so that some of its drafts are right by chance, and is sure
    of each."""
    config = derive_draft(target.model.config, draft_vocab_size=4, aux_layers=target.aux_layers, vocab_size=256)
    torch.manual_seed(3)
    draft = Eagle3Draft(replace(config, **changes), topology.modules_alone, torch.float32).eval().requires_grad_(False)
    for parameter in draft.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    draft.lm_head.weight.mul_(1000)
    return draft, torch.zeros(4, dtype=torch.int64)


def target_of_four_tokens():
    """A target that writes those tokens alone that the draft knows, and is sure of each."""
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[4:] = 0
        model.lm_head.weight[:4] *= 4000
    return as_target(model)


def written_text(target, prompt: torch.Tensor, new_tokens: int, layers: Sequence[int] | None = None) -> WrittenText:
    answer = plain_decoding(target, prompt, new_tokens=new_tokens).tokens
    return read_text(target, torch.cat((prompt, torch.tensor(answer))), len(prompt), layers or target.aux_layers)


def accepted_drafts(draft: Eagle3Draft, d2t: torch.Tensor, text: WrittenText, steps: int) -> torch.Tensor:
    aux = torch.cat([text.states[layer] for layer in draft.draft_config.aux_layers], -1)
    return forced_drafts(draft, d2t, [text], [aux], steps)[0].accepted


CHANGES = [{}, {"window": 5}, {"norm_output": True}, {"qk_norm": True, "attention_bias": True}]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_every_verification_of_decoding_accepts_what_the_pass_over_the_text_says(topology, changes):
    target = target_of_four_tokens()
    draft, d2t = lucky_draft(target, topology, **changes)
    compared, longest = 0, 0
    for prompt in random_prompts(6):
        forced = accepted_drafts(draft, d2t, written_text(target, prompt, NEW_TOKENS), STEPS)
        assert len(forced) == NEW_TOKENS - STEPS
        output = speculative_greedy(target, draft, d2t, prompt, STEPS)
        place = 0
        for verification in output.verifications:
            if place < len(forced):
                assert verification.accepted == int(forced[place]), (len(prompt), place)
                compared, longest = compared + 1, max(longest, verification.accepted)
            place += len(verification.tokens)
    assert compared > 20 and longest > 1


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_held_out_measurement_counts_the_tokens_and_verifications_of_decoding_the_same_texts(topology, changes):
    target = target_of_four_tokens()
    draft, d2t = lucky_draft(target, topology, **changes)
    vocabulary = DraftVocabulary(d2t, torch.arange(256) < 4)
    zeros, objective = torch.zeros(STEPS, dtype=torch.float64), DraftObjective(draft, topology)
    prompts = random_prompts(6)
    texts = [written_text(target, prompt, NEW_TOKENS).ids for prompt in prompts]
    answers = [torch.arange(len(ids)) >= len(prompt) for ids, prompt in zip(texts, prompts, strict=True)]
    stream = Stream.pack(texts, answers, "served")
    plan, states = plan_sequence(stream, draft.reach(STEPS)), Rows.cat(target.prefill(texts))
    rows = Rows(states.aux[plan.rows], states.teacher[plan.teacher])
    batch = micro_batch(stream, plan, rows, vocabulary.draft_ids, target.head.head[:4], torch.float32)
    with torch.no_grad():
        distilled = objective(batch, StepWeights(zeros, zeros))
    # Where target and draft are sure, sampling accepts what greedy decoding does.
    assert torch.equal(distilled.sampled[plan.supervised].round().bool(), distilled.correct[plan.supervised])
    counts = count_chains(stream, plan, distilled.correct, [512], topology.sequence)
    decoded = [speculative_greedy(target, draft, d2t, prompt, STEPS) for prompt in prompts]
    assert counts.verifications.tolist() == [sum(len(output.verifications) for output in decoded)]
    assert counts.tokens.tolist() == [len(prompts) * (NEW_TOKENS - 1)] and counts.length > 1.1


def test_a_text_too_short_for_a_chain_has_no_place(topology):
    target = as_target(tiny_llama())
    draft, d2t = lucky_draft(target, topology)
    text = written_text(target, random_prompts(1)[0], STEPS)
    assert len(accepted_drafts(draft, d2t, text, STEPS)) == 0
    assert len(accepted_drafts(draft, d2t, text, STEPS - 1)) == 1
