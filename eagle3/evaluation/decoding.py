"""One conversation decoded by a target, one token at a time or by verified drafts."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from eagle3.errors import UserError
from eagle3.evaluation.acceptance import AcceptanceRule, Greedy, Verification
from eagle3.evaluation.drafter import Drafter
from eagle3.targets.transformers import TransformersTarget

CANDIDATES = 8  # best logits that plain decoding keeps of each position, to tell a tie from a mistake


class SpeculativeOutput(NamedTuple):
    """tokens: the new tokens. verifications: all that were made; the last one may reach beyond `tokens`."""

    tokens: list[int]
    verifications: list[Verification]


class PlainOutput(NamedTuple):
    """tokens: N new tokens, the best of each position. candidates [N, C] int64, logits [N, C] fp32: the best, best first.
    resolution [N] fp32: logits closer than this are a tie (see `tie_resolution`)."""

    tokens: list[int]
    candidates: Tensor
    logits: Tensor
    resolution: Tensor


class TargetSession:
    """A target decoding one conversation, batch 1, with its KV cache. Raises UserError for a target that keeps a
    recurrent state: what a rejected draft did to it cannot be undone."""

    def __init__(self, target: TransformersTarget, *, can_forget: bool) -> None:
        self.target = target
        self.cache = DynamicCache(config=target.model.config)
        if any(self.cache.is_linear):
            raise UserError(
                f"target {target.model.config.name_or_path!r}: has linear-attention layers, whose state cannot be "
                "rolled back after a rejected draft; set evaluation.conversations=0"
            )
        if can_forget:  # else a sliding-window layer drops what a rollback has to bring back
            self.cache.activate_past_recording()

    def forward(self, tokens: Tensor, rows: int) -> Tensor:
        """Append tokens [T] and return the logits [rows, V] after the last `rows` of them, as the model itself makes them."""
        output = self.target.decoder(input_ids=tokens[None], past_key_values=self.cache, use_cache=True)
        return self.target.own_logits(output, output.last_hidden_state[0, -rows:])

    def forget(self, tokens: int) -> None:
        """Take the last `tokens` back."""
        self.cache.crop(-tokens)


@torch.no_grad()
def speculative(
    target: TransformersTarget,
    drafter: Drafter,
    prompt: Tensor,
    rule: AcceptanceRule,
    *,
    draft_tokens: int,
    new_tokens: int,
) -> SpeculativeOutput:
    """Decode `new_tokens` after prompt [P], or up to and with the target's EOS, by drafts that `rule` verifies. The drafter
    is new, and has room for P + new_tokens rows on the target's device.

    The first token is the prefill's and belongs to no verification. Every verification gets `draft_tokens` drafts, also
    where fewer tokens are left, and counts in full, so that `new_tokens` does not bias the acceptance length. What
    follows an EOS counts nowhere: a verification that accepts an EOS among its drafts ends there, without a token of
    the target's own.
    """
    ends, session = end_tokens(target), TargetSession(target, can_forget=True)
    prompt = prompt.to(target.device)
    verifications = []
    with target.captured_layers() as captured:
        chosen = rule.draw(session.forward(prompt, rows=1)).tokens
        aux, following = _aux(captured, target), torch.cat((prompt[1:], chosen))
        tokens = chosen.tolist()
        while len(tokens) < new_tokens and tokens[-1] not in ends:
            drafter.extend(aux, following)
            proposal = drafter.propose(draft_tokens, rule)
            logits = session.forward(torch.cat((following[-1:], proposal.tokens)), rows=draft_tokens + 1)
            verified = rule.verify(proposal, logits)
            session.forget(draft_tokens - verified.accepted)
            aux, following = _aux(captured, target)[: verified.accepted + 1], following.new_tensor(verified.tokens)
            verified = _cut_at_end(verified, ends)
            verifications.append(verified)
            tokens += verified.tokens
    return SpeculativeOutput(tokens[:new_tokens], verifications)


@torch.no_grad()
def plain_greedy(target: TransformersTarget, prompt: Tensor, *, new_tokens: int) -> PlainOutput:
    """Decode `new_tokens` after prompt [P], or up to and with the target's EOS, one token a forward."""
    tokens, kept = [], []
    for token, logits in _one_by_one(target, prompt, Greedy(), new_tokens):
        best = logits.float().topk(min(CANDIDATES, len(logits)))
        # A model that widens its logits does not know them any better.
        rounded = logits.to(target.head.embedding.dtype)
        kept.append((best.indices, best.values, tie_resolution(rounded, len(target.layers))))
        tokens.append(token)
    return PlainOutput(tokens, *(torch.stack(column).cpu() for column in zip(*kept, strict=True)))


@torch.no_grad()
def plain_sampled(target: TransformersTarget, prompt: Tensor, rule: AcceptanceRule, *, new_tokens: int) -> list[int]:
    """As `plain_greedy`, but each token is drawn by `rule`; the tokens alone."""
    return [token for token, _ in _one_by_one(target, prompt, rule, new_tokens)]


def _one_by_one(
    target: TransformersTarget, prompt: Tensor, rule: AcceptanceRule, new_tokens: int
) -> Iterator[tuple[int, Tensor]]:
    """Each new token, and the logits [V] that it was drawn from."""
    ends, session = end_tokens(target), TargetSession(target, can_forget=False)
    row = prompt.to(target.device)
    for _ in range(new_tokens):
        logits = session.forward(row, rows=1)
        row = rule.draw(logits).tokens
        (token,) = row.tolist()
        yield token, logits[0]
        if token in ends:
            return


def _cut_at_end(verified: Verification, ends: frozenset[int]) -> Verification:
    end = next((i + 1 for i, token in enumerate(verified.tokens) if token in ends), len(verified.tokens))
    return Verification(verified.drafts, min(verified.accepted, end), verified.tokens[:end])


def tie_resolution(logits: Tensor, layers: int) -> Tensor:
    """How far rounding alone may move two logits against each other, between forwards over one token and over many.

    logits [V] of one position; the result is a scalar, fp32. Rounding a stream to a precision of `eps` at each of
    2 x layers additions moves a logit by about 0.4 eps sqrt(2 layers) of the logits' standard deviation (0.28 if
    additions were all; independent roundings add in quadrature, and a random error of the hidden state reaches the
    logits as the state itself does). fp32 sums of thousands of products lose more than their last bit: 64 eps at most
    is taken for them. Three times sqrt(2 layers) leaves five standard deviations for a pair. Half an eps for rounding
    either logit itself, in both forwards, is added.
    """
    precision = torch.finfo(logits.dtype).eps
    state = max(precision, 64 * torch.finfo(torch.float32).eps)
    logits = logits.float()
    return 2 * precision * logits.max().abs() + 3 * (2 * layers) ** 0.5 * state * logits.std()


def end_tokens(target: TransformersTarget) -> frozenset[int]:
    """The target's EOS ids: those of its generation config, which may name more than the model's own config."""
    config, generation = target.model.config.get_text_config(decoder=True), target.model.generation_config
    ids = generation.eos_token_id if generation and generation.eos_token_id is not None else config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _aux(captured: dict[int, Tensor], target: TransformersTarget) -> Tensor:
    """[T, 3Ht] of the last forward (batch 1)."""
    return torch.cat([captured[layer][0] for layer in target.aux_layers], dim=-1)
