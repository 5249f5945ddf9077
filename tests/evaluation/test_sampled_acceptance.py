"""Acceptance in cases where it is known beforehand: a draft that equals the target, one that is always wrong, and one
that guesses."""

from dataclasses import replace

import pytest
import torch
from tiny_draft import as_target, random_prompts, tiny_llama
from torch import Tensor

from eagle3.draft.derivation import derive_draft
from eagle3.draft.model import Eagle3Draft
from eagle3.evaluation.acceptance import Decoding
from eagle3.evaluation.drafter import untrained_draft
from eagle3.evaluation.results import SpeculativeResult
from eagle3.evaluation.speculative import decode_conversations, plain_decoding
from eagle3.targets.transformers import TransformersTarget

TOKENS, WIDTH, DRAFT_TOKENS, NEW_TOKENS = 12, 16, 3, 30
CONSTANT = TOKENS  # the entry of a hidden state that is the same for all tokens
IMPOSSIBLE = TOKENS - 1
GREEDY = Decoding(DRAFT_TOKENS, NEW_TOKENS)
RULES = [GREEDY, replace(GREEDY, temperature=1.0, seed=1), replace(GREEDY, temperature=0.7, seed=2)]


def last_token_target() -> TransformersTarget:
    """A target whose next token depends only on the last one: no layer adds anything to the embedding, which has one
    entry for each token and a constant one. The next token is random, but never IMPOSSIBLE."""
    sizes = {"vocab_size": TOKENS, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 3}
    model = tiny_llama(**sizes, num_attention_heads=1, num_key_value_heads=1, rms_norm_eps=1e-12)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.model.embed_tokens.weight.data = torch.eye(TOKENS, WIDTH)
    model.model.embed_tokens.weight.data[:, CONSTANT] = 1
    head = torch.zeros(TOKENS, WIDTH)
    head[:, :TOKENS] = 0.5 * torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(3))
    head[IMPOSSIBLE, CONSTANT] = -1e4
    model.lm_head.weight.data = head
    return as_target(model, torch.float64)


def draft_for(target: TransformersTarget, vocabulary: int, topology) -> Eagle3Draft:
    config = derive_draft(target.model.config, draft_vocab_size=vocabulary, aux_layers=target.aux_layers)
    return untrained_draft(config, target.head, topology.modules, seed=0)


def equal_draft(target: TransformersTarget, topology) -> Eagle3Draft:
    """An EAGLE3 draft, set by hand, that predicts what `last_token_target` does, at every step of its chain.

    Its hidden state is sqrt(8) at the entry of the last token, 0 elsewhere. Queries and keys are one constant vector,
    so that rotation alone makes each row see itself: another row's score is lower by 50 or more. The value is the
    embedding's part of the input minus the hidden part, which removes the previous step's token from the residual
    stream.
    """
    draft, root = draft_for(target, TOKENS, topology), 8**0.5  # an embedding's entries after its norm: 1 / sqrt(2 / 16)
    attention = draft.layer.self_attention
    for weight in (draft.fc.weight, draft.layer.mlp.linear_fc2.weight, attention.linear_v.weight):
        weight.zero_()
    for linear in (attention.linear_q, attention.linear_k):
        linear.weight.zero_()
        linear.weight[:, CONSTANT] = 5
    tokens = torch.arange(TOKENS)
    attention.linear_v.weight[tokens, tokens] = 1
    attention.linear_v.weight[tokens, WIDTH + tokens] = -root / 4  # a single entry is sqrt(16) after its norm
    attention.linear_proj.weight.copy_(torch.eye(WIDTH))
    head = target.head.head
    draft.lm_head.weight.zero_()
    draft.lm_head.weight[:, :TOKENS] = (head[:, :TOKENS] + head[:, CONSTANT, None]) * root / 4
    return draft


def decode(target: TransformersTarget, draft: Eagle3Draft, d2t: Tensor, prompts: list[Tensor], decoding: Decoding):
    decoded = decode_conversations(target, draft, d2t, prompts, decoding)
    return decoded, SpeculativeResult.over(decoded)


def short_prompts() -> list[Tensor]:
    return [prompt % IMPOSSIBLE for prompt in random_prompts(3)]


@pytest.mark.parametrize("decoding", RULES)
def test_a_real_draft_that_equals_its_target_has_every_token_accepted(topology, decoding):
    target = last_token_target()
    draft, d2t = equal_draft(target, topology), torch.zeros(TOKENS, dtype=torch.long)
    decoded, result = decode(target, draft, d2t, short_prompts(), decoding)
    assert result.acceptance_length == DRAFT_TOKENS + 1 and result.position_acceptance == [1.0] * DRAFT_TOKENS
    assert result.verifications == 3 * 8, "ceil(29 / 4), after the prefill's token, of each conversation"
    assert result.lossless is (True if decoding.greedy else None)
    greedy = [plain_decoding(target, prompt, new_tokens=NEW_TOKENS).tokens for prompt in short_prompts()]
    assert ([each.output.tokens for each in decoded] == greedy) == decoding.greedy, "other rules must be random"


@pytest.mark.parametrize("decoding", RULES)
def test_a_draft_that_is_always_wrong_accepts_nothing(topology, decoding):
    """The draft can only say what the target never says."""
    target = last_token_target()
    draft, d2t = draft_for(target, 1, topology), torch.tensor([IMPOSSIBLE])
    decoded, result = decode(target, draft, d2t, short_prompts(), decoding)
    assert result.acceptance_length == 1.0 and result.position_acceptance == [0.0] * DRAFT_TOKENS
    assert result.verifications == 3 * (NEW_TOKENS - 1)
    assert all(IMPOSSIBLE not in each.output.tokens for each in decoded)
    assert result.mismatches == 0 and result.compared is decoding.greedy


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_draft_that_guesses_is_accepted_as_often_as_the_theory_says(topology, temperature):
    """With a uniform q, the first draft is kept with probability sum_x min(p(x), q(x)) (Leviathan et al. 2023, theorem
    3.5). Here this depends only on the last token, and the same holds for later drafts."""
    target = last_token_target()
    draft = draft_for(target, TOKENS, topology)
    draft.lm_head.weight.zero_()
    d2t, decoding = torch.zeros(TOKENS, dtype=torch.long), replace(GREEDY, temperature=temperature, seed=4)
    decoded, _ = decode(target, draft, d2t, short_prompts() * 10, decoding)
    head = target.head.head
    logits = (head[:, :TOKENS] + head[:, CONSTANT, None]).T * 8**0.5
    chance = (logits / temperature).softmax(-1).clamp(max=1 / TOKENS).sum(-1)  # [TOKENS], after each
    expected, actual = [], []
    for each in decoded:
        last = each.output.tokens[0]
        for verified in each.output.verifications:
            before = [last, *verified.drafts][: verified.accepted + 1][:DRAFT_TOKENS]
            expected += [float(chance[token]) for token in before]
            actual += [place < verified.accepted for place in range(len(before))]
            last = verified.tokens[-1]
    spread = sum(share * (1 - share) for share in expected) ** 0.5
    assert abs(sum(actual) - sum(expected)) < 4 * spread
    assert 5 * spread < min(sum(actual), len(actual) - sum(actual)), "neither nothing nor everything"
