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
from eagle3.parallel.topology import Topology

STEPS = 4


def lucky_draft(target, topology: Topology, **changes) -> tuple[Eagle3Draft, torch.Tensor]:
    """A draft with random weights that predicts few tokens, so that some of its drafts are right by chance."""
    config = derive_draft(target.model.config, draft_vocab_size=4, aux_layers=target.aux_layers, vocab_size=256)
    torch.manual_seed(3)
    draft = Eagle3Draft(replace(config, **changes), topology.modules_alone, torch.float32).eval().requires_grad_(False)
    for parameter in draft.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    return draft, torch.zeros(4, dtype=torch.int64)


def written_text(target, prompt: torch.Tensor, new_tokens: int, layers: Sequence[int] | None = None) -> WrittenText:
    answer = plain_decoding(target, prompt, new_tokens=new_tokens).tokens
    return read_text(target, torch.cat((prompt, torch.tensor(answer))), len(prompt), layers or target.aux_layers)


def accepted_drafts(draft: Eagle3Draft, d2t: torch.Tensor, text: WrittenText, steps: int) -> torch.Tensor:
    aux = torch.cat([text.states[layer] for layer in draft.draft_config.aux_layers], -1)
    return forced_drafts(draft, d2t, [text], [aux], steps)[0].accepted


@pytest.mark.parametrize("changes", [{}, {"window": 5}, {"norm_output": True}], ids=str)
def test_every_verification_of_decoding_accepts_what_the_pass_over_the_text_says(topology, changes):
    model = tiny_llama()
    with torch.no_grad():  # the target writes the four tokens that the draft knows alone
        model.lm_head.weight[4:] = 0
        model.lm_head.weight[:4] *= 4
    target = as_target(model)
    draft, d2t = lucky_draft(target, topology, **changes)
    compared, longest = 0, 0
    for prompt in random_prompts(6):
        forced = accepted_drafts(draft, d2t, written_text(target, prompt, NEW_TOKENS), STEPS)
        assert len(forced) == NEW_TOKENS - STEPS
        output = speculative_greedy(target, draft, d2t, prompt, draft_tokens=STEPS, new_tokens=NEW_TOKENS)
        place = 0
        for verification in output.verifications:
            if place < len(forced):
                assert verification.accepted == int(forced[place]), (len(prompt), place)
                compared, longest = compared + 1, max(longest, verification.accepted)
            place += len(verification.tokens)
    assert compared > 20 and longest > 1


def test_a_text_too_short_for_a_chain_has_no_place(topology):
    target = as_target(tiny_llama())
    draft, d2t = lucky_draft(target, topology)
    text = written_text(target, random_prompts(1)[0], STEPS)
    assert len(accepted_drafts(draft, d2t, text, STEPS)) == 0
    assert len(accepted_drafts(draft, d2t, text, STEPS - 1)) == 1
