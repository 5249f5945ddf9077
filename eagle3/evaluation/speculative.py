"""Judge a trained draft by real speculative decoding with its target; greedy output is compared with plain decoding.

Each conversation is decoded twice: one token at a time, and from drafts that the target verifies. Results are counts
over many conversations.
"""

import os.path
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from eagle3.console import Progress, Say, Warned, counted
from eagle3.draft.interchange import read_exported
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import UserError, first_sentence
from eagle3.evaluation.acceptance import AcceptanceRule, Decoding, Greedy, Verification
from eagle3.evaluation.context_results import ContextJudgement
from eagle3.evaluation.drafter import ChainDrafter, draft_of, untrained_draft
from eagle3.evaluation.results import (
    Conditions,
    CountedConversation,
    Judgement,
    SpeculativeResult,
    Verdict,
    over_sets,
)
from eagle3.planning.costs import Timing
from eagle3.targets.facts import require_no_state
from eagle3.targets.transformers import TransformersTarget

UNTRAINED_CONVERSATIONS = 8  # enough to show that none of its drafts is accepted; each token then takes a verification
EXAMPLES = 4
WARM_UP_TOKENS = 8
PROMPT_CHARACTERS = 300  # from the end of an example's prompt


class SpeculativeOutput(NamedTuple):
    """Speculative output for one conversation."""

    tokens: list[int]  # the new tokens
    verifications: list[Verification]  # all of them; the last one may reach beyond `tokens`
    # Seconds by `_now`, prefill left out: of the draft reading what was verified, of its chains, and of
    # verifying them. Empty if nothing was verified.
    seconds: tuple[float, ...] = ()


class PlainOutput(NamedTuple):
    """Output of plain decoding for one conversation."""

    tokens: list[int]  # N new tokens
    ties: list[set[int]]  # for each position, the tokens whose logits are the best within rounding
    seconds: float  # of N - 1 steps by `_now`, without the prefill


def _now(device: torch.device) -> float:
    """Processor seconds on a CPU, which other jobs change less; seconds on a GPU, whose work is waited for."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


class TargetSession:
    """A target that decodes one conversation (batch 1) with its KV cache. can_forget: whether `forget` will be used.
    Raises UserError for a target with a recurrent state, because what a rejected draft did to that state cannot be
    undone."""

    def __init__(self, target: TransformersTarget, *, can_forget: bool) -> None:
        self.target = target
        require_no_state(target.name, target.model.config.get_text_config(decoder=True), type(target.model))
        self.cache = DynamicCache(config=target.model.config)
        if can_forget:  # otherwise sliding-window layers drop what a rollback has to restore
            self.cache.activate_past_recording()

    def forward(self, tokens: Tensor, rows: int) -> Tensor:
        """Append tokens [T]. Returns the model's own logits [rows, V] after the last `rows` of them."""
        output = self.target.decoder(input_ids=tokens[None], past_key_values=self.cache, use_cache=True)
        return self.target.own_logits(output, output.last_hidden_state[0, -rows:])

    def forget(self, tokens: int) -> None:
        """Rolls back the last `tokens`."""
        self.cache.crop(-tokens)


@torch.no_grad()
def speculative(
    target: TransformersTarget,
    drafter: ChainDrafter,
    prompt: Tensor,
    rule: AcceptanceRule,
    *,
    draft_tokens: int,
    new_tokens: int,
) -> SpeculativeOutput:
    """Decode up to `new_tokens` tokens after prompt [P], stopping after an EOS, with drafts that `rule` verifies.

    drafter: a new one, with room for P + new_tokens rows on the target's device

    The first token comes from the prefill and belongs to no verification. Every verification gets `draft_tokens`
    drafts, even if fewer tokens are left, and counts in full, so that `new_tokens` does not bias the acceptance length.
    Nothing after an EOS counts: a verification that accepts an EOS among its drafts ends there, without a token of the
    target's own.
    """
    ends, session = end_tokens(target), TargetSession(target, can_forget=True)
    prompt = prompt.to(target.device)
    verifications, laps = [], []
    with target.captured_layers() as captured:
        first = rule.draw(session.forward(prompt, rows=1)).tokens
        aux, next_tokens = _aux(captured, target), torch.cat((prompt[1:], first))
        tokens, began = first.tolist(), _now(target.device)
        while len(tokens) < new_tokens and tokens[-1] not in ends:
            drafter.extend(aux, next_tokens)
            extended = _now(target.device)
            proposal = drafter.propose(draft_tokens, rule)
            proposed = _now(target.device)
            logits = session.forward(torch.cat((next_tokens[-1:], proposal.tokens)), rows=draft_tokens + 1)
            drafts, accepted, added = rule.verify(proposal, logits)
            session.forget(draft_tokens - accepted)
            aux, next_tokens = _aux(captured, target)[: accepted + 1], next_tokens.new_tensor(added)
            end = next((place for place, token in enumerate(added, 1) if token in ends), len(added))
            verifications.append(Verification(drafts, min(accepted, end), added[:end]))
            tokens += added[:end]
            verified = _now(target.device)
            laps.append((extended - began, proposed - extended, verified - proposed))
            began = verified
    return SpeculativeOutput(tokens[:new_tokens], verifications, tuple(map(sum, zip(*laps, strict=True))))


@torch.no_grad()
def plain_decoding(
    target: TransformersTarget, prompt: Tensor, rule: AcceptanceRule | None = None, *, new_tokens: int
) -> PlainOutput:
    """Decode up to `new_tokens` tokens after prompt [P], stopping after an EOS, one token per forward. `rule` draws
    each token; default: greedily."""
    ends, session = end_tokens(target), TargetSession(target, can_forget=False)
    row, tokens, ties, seconds = prompt.to(target.device), [], [], []
    while len(tokens) < new_tokens and ends.isdisjoint(tokens[-1:]):
        began = _now(target.device)
        logits = session.forward(row, rows=1)
        row = (rule or Greedy()).draw(logits).tokens
        tokens += row.tolist()
        seconds.append(_now(target.device) - began)
        # A model that converts its logits to a wider dtype does not make them more exact.
        resolution = tie_resolution(logits[0].to(target.head.embedding.dtype), len(target.layers))
        near = logits[0].float() >= logits[0].float().max() - resolution
        ties.append({*near.nonzero()[:, 0].tolist()})
    return PlainOutput(tokens, ties, sum(seconds[1:]))


def tie_resolution(logits: Tensor, layers: int) -> Tensor:
    """How far rounding alone may move two logits relative to each other, between a forward over one token and a forward
    over many.

    logits: [V], of one position

    Returns an fp32 scalar. Rounding the residual stream to precision `eps` at each of its 2 x layers additions moves a
    logit by about 0.4 eps sqrt(2 layers) standard deviations of the logits. (The additions alone would give 0.28:
    independent roundings add in quadrature, and a random error of the hidden state reaches the logits as the state
    itself does.) fp32 sums of thousands of products lose more than their last bit, so eps is taken as at least 64 eps
    of fp32. The bound of 3 eps sqrt(2 layers) is five standard deviations of the difference of two logits. Half an eps
    is added for rounding each of the two logits in each of the two forwards.
    """
    precision = torch.finfo(logits.dtype).eps
    state = max(precision, 64 * torch.finfo(torch.float32).eps)
    logits = logits.float()
    return 2 * precision * logits.max().abs() + 3 * (2 * layers) ** 0.5 * state * logits.std()


def end_tokens(target: TransformersTarget) -> frozenset[int]:
    """The target's EOS ids, from its generation config, which may name more than the model's config does."""
    config, generation = target.model.config.get_text_config(decoder=True), target.model.generation_config
    ids = generation.eos_token_id if generation and generation.eos_token_id is not None else config.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or ())


def _aux(captured: dict[int, Tensor], target: TransformersTarget) -> Tensor:
    """Aux states [T, 3Ht] of the last forward (batch 1)."""
    return torch.cat([captured[layer][0] for layer in target.aux_layers], dim=-1)


# Many conversations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DecodedConversation(CountedConversation):
    """One that transformers decoded, with what it put out."""

    output: SpeculativeOutput


def timing_of(prompt: int, draft_tokens: int, output: SpeculativeOutput, plain: PlainOutput) -> Timing | None:
    """Mean times of a conversation after a prompt of so many tokens; None without a round, or a plain step."""
    rounds, steps = len(output.verifications), len(plain.tokens) - 1
    if not rounds or not steps:
        return None
    context = prompt + len(output.tokens) / 2
    return Timing(context, draft_tokens, *(phase / rounds for phase in output.seconds), plain.seconds / steps)


def decode_conversations(
    target: TransformersTarget,
    draft: Eagle3Draft,
    d2t: Tensor,
    prompts: Sequence[Tensor],
    decoding: Decoding,
    *,
    report: Say = lambda _: None,
    task: str = "speculative decoding",
) -> list[DecodedConversation]:
    """Decode every prompt (int64 [P]) speculatively and plainly. Raises UserError if the draft reads layers that
    `target` does not capture.

    draft, d2t: on the target's device
    prompts: each with room for its answer in the target's context (see `prompts.longest_prompt`)
    report: gets progress lines that begin with `task`
    """
    layers = draft.draft_config.aux_layers
    if layers is not None and layers != target.aux_layers:
        raise UserError(
            f"evaluation: the draft reads the target's layers {list(layers)}, but {list(target.aux_layers)} are "
            "captured; set model.aux_layers to the draft's"
        )
    draft_tokens, new_tokens = decoding.draft_tokens, decoding.new_tokens
    rule, plain_rule = (decoding.rule(target.device) for _ in range(2))
    progress = Progress(report, task, len(prompts), "conversations")
    decoded: list[DecodedConversation] = []
    for number, prompt in enumerate(prompts, start=1):
        start = time.perf_counter()
        drafter = ChainDrafter(draft, d2t, len(prompt) + new_tokens)
        output = speculative(target, drafter, prompt, rule, draft_tokens=draft_tokens, new_tokens=new_tokens)
        middle = time.perf_counter()
        progress.at(number - 1)  # shows that a long prompt is making progress
        plain = plain_decoding(target, prompt, plain_rule, new_tokens=new_tokens)
        verdict = compare(output.tokens, plain) if decoding.greedy else None
        decoded.append(
            DecodedConversation(
                new_tokens=len(output.tokens),
                verifications=len(output.verifications),
                yielded=sum(len(each.tokens) for each in output.verifications),
                accepted=[sum(each.accepted > i for each in output.verifications) for i in range(draft_tokens)],
                verdict=verdict,
                plain_tokens=len(plain.tokens),
                seconds_speculative=middle - start,
                seconds_plain=time.perf_counter() - middle,
                timing=timing_of(len(prompt), draft_tokens, output, plain),
                output=output,
            )
        )
        if verdict == "mismatch":
            _, place = first_difference(output.tokens, plain.tokens)
            report(Warned(f"{task}: conversation {number} differs from plain decoding at new token {place}"))
        length = sum(each.yielded for each in decoded) / max(1, sum(each.verifications for each in decoded))
        progress.at(number, extra=f"acceptance length {length:.2f}")
    return decoded


def compare(tokens: Sequence[int], plain: PlainOutput) -> Verdict:
    """Compare speculative output with plain output.

    The first difference is a tie if plain decoding gave the speculative token a logit within rounding of the best.
    After a tie both texts are equally right, so the rest is not compared. Anything else is a mismatch, including a
    different length.
    """
    verdict, first = first_difference(tokens, plain.tokens)
    if verdict:
        return verdict
    return "tie" if tokens[first] in plain.ties[first] else "mismatch"


def first_difference(tokens: Sequence[int], plain: Sequence[int]) -> tuple[Verdict | None, int]:
    """The verdict on two outputs (None if it depends on the logits), and the length of their common beginning."""
    first = len(os.path.commonprefix([list(tokens), list(plain)]))
    if first == len(tokens) == len(plain):
        return "identical", first
    return ("mismatch" if first == min(len(tokens), len(plain)) else None), first


# An export -----------------------------------------------------------------------------------------------------------


def judge_export(
    exported: Path,
    target: TransformersTarget,
    prompts: Sequence[Tensor],
    groups: ProcessGroupCollection,
    tokenizer: PreTrainedTokenizerBase,
    decoding: Decoding,
    *,
    seed: int,
    report: Say,
    sets: Mapping[str, int] | None = None,
) -> Judgement:
    """Judge the draft in folder `exported`, loaded afresh, by decoding prompts (int64 [P]) with transformers.

    tokenizer: for the text of the examples
    seed: for the weights of the untrained draft
    sets: number of prompts of each prompt set, by name, in the prompts' order

    Raises UserError if the draft does not belong to the target, or a prompt does not fit the target's context.
    """
    draft, d2t, conditions = _load(exported, target, groups, decoding)
    decoded = decode_conversations(target, draft, d2t, prompts, decoding, report=report)
    report("the same with an untrained draft, on the first few conversations")
    unlearnt = untrained_draft(draft.draft_config, target.head, groups, seed=seed)
    untrained = decode_conversations(target, unlearnt, d2t, prompts[:UNTRAINED_CONVERSATIONS], decoding, report=report)
    return Judgement.over(
        decoded,
        conditions.seed,
        **vars(conditions),
        # None if the target ends all of these few conversations with their first token.
        untrained=SpeculativeResult.over(untrained) if any(one.verifications for one in untrained) else None,
        examples=example_texts(decoded, prompts, tokenizer),
        sets=over_sets(sets or {}, decoded, conditions.seed, report),
    )


def example_texts(
    decoded: Sequence[DecodedConversation], prompts: Sequence[Tensor], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """The first few conversations as text, each token decoded on its own.

    Each has the end of the prompt (its last 300 characters), the prefill's token `first` and, for each
    verification, the accepted drafts, the rejected ones, and the target's own token after them (null if an accepted
    EOS ended the text).
    """
    return [
        {
            "prompt": tokenizer.decode(prompt.tolist())[-PROMPT_CHARACTERS:],
            "first": tokenizer.decode([each.output.tokens[0]]),
            "verifications": [
                {
                    "accepted": [tokenizer.decode([token]) for token in verified.drafts[: verified.accepted]],
                    # Drafts after an accepted EOS do not count as rejected, because the text has ended.
                    "rejected": []
                    if verified.own is None
                    else [tokenizer.decode([token]) for token in verified.drafts[verified.accepted :]],
                    "own": None if verified.own is None else tokenizer.decode([verified.own]),
                }
                for verified in each.output.verifications
            ],
        }
        for each, prompt in zip(decoded[:EXAMPLES], prompts[:EXAMPLES], strict=True)
    ]


def judge_by_context(
    exported: Path,
    target: TransformersTarget,
    buckets: Mapping[int, Sequence[Tensor]],
    groups: ProcessGroupCollection,
    decoding: Decoding,
    report: Say,
) -> ContextJudgement:
    """Judge the draft in folder `exported`, loaded afresh, by decoding each bucket's prompts with transformers.

    buckets: as `prompts_by_context` returns them

    A bucket is left out, with a line to `report`, if it has no prompts, if memory runs out, or if the target ends all
    its conversations with their first token. Raises UserError like `judge_export`, and if no bucket is left.
    """
    draft, d2t, conditions = _load(exported, target, groups, decoding)
    decode = partial(decode_conversations, target, draft, d2t, report=report)
    filled = {context: prompts for context, prompts in buckets.items() if prompts}
    first, *_ = filled.values()  # decoded before, so that no conversation's times hold what a process does once
    with suppress(torch.OutOfMemoryError):  # told below
        decode(first[:1], decoding=replace(decoding, new_tokens=WARM_UP_TOKENS), report=lambda _: None)
    decoded: dict[int, list[DecodedConversation]] = {context: [] for context in buckets}
    for context, prompts in filled.items():
        label = f"context {context:,}"
        report(f"{label}: {counted(len(prompts), 'prompt')}")
        try:
            decoded[context] = decode(prompts, decoding=decoding, task=label)
        except torch.OutOfMemoryError as error:  # keep what has been measured so far
            report(f"{label}: left out, out of memory ({first_sentence(error)})")
    return ContextJudgement.over(decoded, conditions, decoding.new_tokens, report)


def _load(
    exported: Path, target: TransformersTarget, groups: ProcessGroupCollection, decoding: Decoding
) -> tuple[Eagle3Draft, Tensor, Conditions]:
    read = read_exported(exported)
    conditions = Conditions.of("transformers", decoding, read.config.window)
    windowed = replace(read, config=replace(read.config, window=conditions.window))
    return *draft_of(windowed, target.head, groups), conditions
