"""Sampled speculative decoding draws from the target's own distribution, according to chi-square tests that wrong rules
fail."""

from typing import NamedTuple

import pytest
import torch
from tiny_draft import as_target, tiny_llama
from torch import Tensor

from eagle3.draft.derivation import derive_draft
from eagle3.draft.model import Eagle3Draft
from eagle3.evaluation.acceptance import AcceptanceRule, Decoding, DrawnTokens, Sampled, Verification
from eagle3.evaluation.drafter import ChainDrafter, untrained_draft
from eagle3.evaluation.speculative import decode_conversations, plain_decoding, speculative
from eagle3.targets.transformers import TransformersTarget

VOCABULARY, NEW_TOKENS, DRAFT_TOKENS = 16, 3, 2
PROMPT = torch.tensor([1, 2, 3])
SPOKEN = torch.tensor([0, 1, 3, 4, 6, 8, 9, 11, 14, 15])  # by the draft
RUNS = 1500
LIKELY, UNLIKELY = 1e-3, 1e-6


class KeepsAll(Sampled):
    """Wrong: every draft is kept."""

    def verify(self, proposal: DrawnTokens, logits: Tensor) -> Verification:
        drafts = proposal.tokens.tolist()
        return Verification(drafts, len(drafts), drafts + self.draw(logits[-1:]).tokens.tolist())


class WithoutResidual(Sampled):
    """Wrong: a rejected draft is replaced by a draw from p, instead of from what q left of p."""

    def verify(self, proposal: DrawnTokens, logits: Tensor) -> Verification:
        drafts, accepted, tokens = super().verify(proposal, logits)
        own = self.draw(logits[accepted : accepted + 1]).tokens.tolist()
        return Verification(drafts, accepted, tokens[:accepted] + own)


class Pair(NamedTuple):
    """A random target, and a draft that knows nothing about it and can say 10 of its 16 tokens."""

    target: TransformersTarget
    draft: Eagle3Draft
    d2t: Tensor

    def speculate(self, rule: AcceptanceRule, runs: int) -> Tensor:
        """[runs]: the number of each sequence of new tokens (see `number`)."""
        numbers = []
        for _ in range(runs):
            drafter = ChainDrafter(self.draft, self.d2t, len(PROMPT) + NEW_TOKENS)
            output = speculative(self.target, drafter, PROMPT, rule, draft_tokens=DRAFT_TOKENS, new_tokens=NEW_TOKENS)
            numbers.append(number(output.tokens))
        return torch.tensor(numbers)

    def sample(self, rule: AcceptanceRule, runs: int) -> Tensor:
        return torch.tensor(
            [number(plain_decoding(self.target, PROMPT, rule, new_tokens=NEW_TOKENS).tokens) for _ in range(runs)]
        )

    @torch.no_grad()
    def distribution(self, temperature: float) -> Tensor:
        """[16^3]: the probability of every sequence of new tokens, from the model without a cache."""
        every = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * (NEW_TOKENS - 1))
        logits = self.target.model(torch.cat((PROMPT.expand(len(every), -1), every), 1), use_cache=False).logits
        chances = (logits[:, len(PROMPT) - 1 :].double() / temperature).softmax(-1)
        first = chances[:, 0].gather(1, every[:, :1])
        second = chances[:, 1].gather(1, every[:, 1:])
        return (first * second * chances[:, 2]).flatten()


def number(tokens: list[int]) -> int:
    first, second, third = tokens
    return (first * VOCABULARY + second) * VOCABULARY + third


def rule(kind: type[Sampled], temperature: float, seed: int) -> Sampled:
    return kind(temperature, torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def pair(topology) -> Pair:
    torch.set_num_threads(1)  # as in every test; `topology` has just set the machine's number
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3}
    target = as_target(tiny_llama(**sizes, num_attention_heads=2, initializer_range=0.4))
    shape = derive_draft(target.model.config, draft_vocab_size=len(SPOKEN), aux_layers=target.aux_layers)
    draft = untrained_draft(shape, target.head, topology.modules, seed=1)
    draft.lm_head.weight.mul_(20)  # so that it has opinions, if no knowledge
    return Pair(target, draft, SPOKEN - torch.arange(len(SPOKEN)))


def cells(chances: Tensor, draws: int) -> Tensor:
    """The cell of each outcome. An outcome with at least 5 expected draws has a cell of its own; less likely ones share
    cells, likeliest first."""
    order = chances.argsort(descending=True)
    cell, full, expected = torch.empty_like(order), 0, 0.0
    for outcome, chance in zip(order.tolist(), (chances[order] * draws).tolist(), strict=True):
        cell[outcome] = full
        expected += chance
        if expected >= 5:
            full, expected = full + 1, 0.0
    return cell.clamp(max=full - 1)  # what is left at the end is too little for a cell


def tail(statistic: Tensor, freedom: int) -> float:
    """p-value of a chi-square statistic."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic.double() / 2))


def fit(draws: Tensor, chances: Tensor) -> float:
    """p-value of draws [N] of outcomes against their exact chances."""
    cell = cells(chances, len(draws))
    expected = torch.zeros(int(cell.max()) + 1, dtype=torch.float64).index_add(0, cell, chances) * len(draws)
    counts = cell[draws].bincount(minlength=len(expected))
    return tail(((counts - expected) ** 2 / expected).sum(), len(expected) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_decoding_draws_from_the_targets_own_distribution(pair, temperature):
    chances = pair.distribution(temperature)
    assert float(chances.sum()) == pytest.approx(1)
    assert fit(pair.speculate(rule(Sampled, temperature, seed=11), RUNS), chances) > LIKELY
    assert fit(pair.sample(rule(Sampled, temperature, seed=12), RUNS), chances) > LIKELY


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "runs"), [(KeepsAll, 500), (WithoutResidual, RUNS)])
def test_the_distribution_tells_a_wrong_rule(pair, kind, runs):
    assert fit(pair.speculate(rule(kind, 1.0, seed=13), runs), pair.distribution(1.0)) < UNLIKELY


def verified(kind: type[Sampled], draws: int) -> tuple[list[Verification], Tensor, Tensor]:
    """Verifications of chains of 2, which come from a q [2, 8] unrelated to p [3, 8]; and both distributions."""
    generator = torch.Generator().manual_seed(21)
    logits, proposed = torch.randn(3, 8, generator=generator).double(), torch.randn(2, 8, generator=generator).double()
    proposed[:, 5:] = -torch.inf  # what the draft cannot say
    judge = rule(kind, 0.8, seed=22)
    verifications = []
    for _ in range(draws):
        drawn = judge.draw(proposed)
        verifications.append(judge.verify(drawn, logits))
    return verifications, judge.probabilities(logits), judge.probabilities(proposed)


def test_one_verification_keeps_drafts_and_draws_tokens_as_often_as_it_should():
    """The chain's tokens do not depend on one another here, so everything is known: place 0 is drawn from p[0]; place
    1, if the first draft was kept, from p[1], whatever that draft was; and place 2 from p[2]."""
    draws = 30_000
    verifications, p, q = verified(Sampled, draws)
    overlap = torch.minimum(p[:2], q).sum(-1)
    for place, chance in enumerate([overlap[0], overlap.prod()]):
        share = sum(each.accepted > place for each in verifications) / draws
        assert abs(share - float(chance)) < 4 * (float(chance) * (1 - float(chance)) / draws) ** 0.5
    for place in range(3):
        tokens = torch.tensor([each.tokens[place] for each in verifications if len(each.tokens) > place])
        assert fit(tokens, p[place]) > LIKELY
    assert all(each.tokens[: each.accepted] == each.drafts[: each.accepted] for each in verifications)


@pytest.mark.parametrize("kind", [KeepsAll, WithoutResidual])
def test_one_verification_tells_a_wrong_rule(kind):
    verifications, p, _ = verified(kind, 5000)
    assert fit(torch.tensor([each.tokens[0] for each in verifications]), p[0]) < UNLIKELY


def test_nothing_after_a_sampled_eos_counts(pair, monkeypatch):
    monkeypatch.setattr(pair.target.model.generation_config, "eos_token_id", [4, 9])
    decoding = Decoding(3, 20, temperature=1.0, seed=31)
    decoded = decode_conversations(*pair, [PROMPT] * 60, decoding)
    ended = {"drafted": 0, "own": 0, "not": 0}
    for each in decoded:
        tokens, verifications = each.output.tokens, each.output.verifications
        place = next((i for i, token in enumerate(tokens) if token in (4, 9)), None)
        if place is None:
            assert len(tokens) == 20 <= 1 + each.yielded
            ended["not"] += 1
            continue
        assert len(tokens) == place + 1 == 1 + each.yielded
        if verifications:
            ended["drafted" if verifications[-1].own is None else "own"] += 1
            assert verifications[-1].accepted == len(verifications[-1].tokens) - (verifications[-1].own is not None)
    assert ended["drafted"] and ended["own"], ended
    assert {each.verdict for each in decoded} == {None}


def test_a_seed_makes_the_sample(pair):
    first, again, other = (
        pair.speculate(Decoding(2, 3, 1.0, seed).rule(torch.device("cpu")), 10) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_temperature_near_0_is_greedy_and_overflows_nowhere():
    logits = torch.tensor([[3.0, 5.0, -1e4], [7.0, 7.5, 7.4]])
    for temperature in (1e-3, 5e-324):
        drawn = rule(Sampled, temperature, seed=0).draw(logits)
        assert drawn.tokens.tolist() == [1, 1] and drawn.probabilities[:, 1].tolist() == [1, 1]
