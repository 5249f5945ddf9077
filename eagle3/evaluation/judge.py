"""Judge an exported draft by transformers: on prompts, with an untrained draft beside it, or by context."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eagle3.console import Say, counted
from eagle3.draft.config import read_draft_config
from eagle3.errors import UserError, first_sentence
from eagle3.evaluation.acceptance import GREEDY, Decoding, Sampling
from eagle3.evaluation.by_context import ContextAcceptance, ContextJudgement
from eagle3.evaluation.context_prompts import ContextPrompts
from eagle3.evaluation.drafter import FULL, LoadedDraft, Window, load_draft, untrained_draft
from eagle3.evaluation.speculative import DecodedConversation, SpeculativeResult, chain_drafter, decode_conversations
from eagle3.targets.transformers import TransformersTarget
from eagle3.text.samples import SampleSet

Engine = Literal["transformers", "sglang"]
UNTRAINED_CONVERSATIONS = 8  # enough to see that it accepts nothing; it needs a verification for every token
EXAMPLES = 4
PROMPT_CHARACTERS = 300  # of an example, from its end
LONGEST_CHARACTER = 4  # tokens that one character may take: the bytes of UTF-8


@dataclass(frozen=True)
class Judgement:
    """trained: the exported draft. untrained: a fresh draft of the same shape, on the first few conversations; None where
    the engine is not asked for one. window: of the draft. engine, version: who decoded. topk, tree_tokens: as in DraftTree. examples: see
    `example_texts`; none where the engine does not tell which drafts it accepted."""

    trained: SpeculativeResult
    untrained: SpeculativeResult | None
    engine: Engine
    version: str
    topk: int
    tree_tokens: int
    sampling: Sampling = GREEDY
    examples: Sequence[dict[str, Any]] = ()
    window: Window = FULL

    def as_dict(self) -> dict[str, Any]:
        return self.trained.as_dict() | {
            "engine": self.engine,
            "engine_version": self.version,
            "topk": self.topk,
            "tree_tokens": self.tree_tokens,
            **asdict(self.sampling),
            **self.window.as_dict(),
            "speed": self.speed._asdict(),
            "untrained": self.untrained and self.untrained.as_dict(),
            "examples": list(self.examples),
        }

    @property
    def speed(self) -> "Speed":
        trained = self.trained
        plain_tokens = trained.new_tokens if trained.plain_tokens is None else trained.plain_tokens
        return Speed(trained.new_tokens / trained.seconds_speculative, plain_tokens / trained.seconds_plain)

    def lines(self) -> list[str]:
        """What people read."""
        trained, speed = self.trained, self.speed
        positions = " ".join(f"{share:.2f}" for share in trained.position_acceptance)
        untrained = self.untrained
        return [
            f"acceptance length {trained.acceptance_length:.2f} (tokens a verification: accepted drafts and the target's own)",
            *self.window.lines(),
            *([f"untrained draft: acceptance length {untrained.acceptance_length:.2f}"] if untrained else []),
            f"accepted by draft position 1..{trained.draft_tokens}: {positions}",
            self._comparison(),
            self._counts(),
            f"{speed.speculative:.1f} tokens/s, {speed.plain:.1f} without the draft: {speed.gain:.2f} times as fast (by "
            f"{self.engine} {self.version}, one conversation at a time)",
        ]

    def _counts(self) -> str:
        """How verifications and what was put out go together."""
        trained = self.trained
        beyond = trained.yielded + trained.conversations - trained.new_tokens  # each prefill gives one token
        cut = f", less {beyond:,} beyond the answers' length" if beyond else ""
        return (
            f"{trained.yielded:,} tokens from {counted(trained.verifications, 'verification')}, and {trained.conversations:,} from "
            f"the prefills{cut}: {trained.new_tokens:,} put out"
        )

    def _comparison(self) -> str:
        trained = self.trained
        if not trained.compared:
            return (
                f"sampled at temperature {self.sampling.temperature:g}, seed {self.sampling.seed}: not compared with plain "
                "sampling, which is equal in distribution only"
            )
        ties = f", {trained.ties} differ where the target's best logits tie within rounding" if trained.ties else ""
        return (
            f"output equal to plain greedy decoding in {trained.identical} of {trained.conversations} conversations"
            f"{ties}{'' if trained.lossless else f', {trained.mismatches} DIFFER'}"
        )


class Speed(NamedTuple):
    """Tokens put out in a second of decoding, prefill included, with the draft and without."""

    speculative: float
    plain: float

    @property
    def gain(self) -> float:
        return self.speculative / self.plain


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
) -> Judgement:
    """Decode prompts (int64 [P]) by transformers with the draft in folder `exported`, loaded afresh. tokenizer: for the
    examples' texts. seed: of the untrained draft.

    Raises UserError when the draft does not belong to the target, or a prompt does not fit the target's context.
    """
    (draft, d2t, _), window = _load(exported, target, groups, decoding.window)
    decoded = decode_conversations(target, chain_drafter(target, draft, d2t), prompts, decoding, report=report)
    trained = SpeculativeResult.over(decoded, decoding.draft_tokens)
    weights = target.weights()
    dtype, device = weights.embedding.dtype, weights.embedding.device
    fresh = untrained_draft(draft.draft_config, weights, groups, seed=seed, dtype=dtype, device=device)
    report("the same with an untrained draft, on the first few conversations")
    few = prompts[:UNTRAINED_CONVERSATIONS]
    untrained = decode_conversations(target, chain_drafter(target, fresh, d2t), few, decoding, report=report)
    told = any(each.verifications for each in untrained)  # else the target ends these few with their first tokens
    return Judgement(
        trained,
        SpeculativeResult.over(untrained, decoding.draft_tokens) if told else None,
        "transformers",
        version("transformers"),
        topk=1,
        tree_tokens=decoding.draft_tokens + 1,
        sampling=decoding.sampling,
        examples=example_texts(decoded, prompts, tokenizer),
        window=window,
    )


def example_texts(
    decoded: Sequence[DecodedConversation], prompts: Sequence[Tensor], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """The first few conversations: the end of the prompt (its last 300 characters), the prefill's token `first`, and of each
    verification the accepted drafts, the rejected ones, and the target's own token after them (null where an accepted EOS
    ended the text). Each token's text is what it alone decodes to."""
    return [
        {
            "prompt": tokenizer.decode(prompt[-PROMPT_CHARACTERS * LONGEST_CHARACTER :].tolist())[-PROMPT_CHARACTERS:],
            "first": tokenizer.decode([each.output.tokens[0]]),
            "verifications": [
                {
                    "accepted": [tokenizer.decode([token]) for token in verified.drafts[: verified.accepted]],
                    # Drafts behind an accepted EOS were not rejected: nobody asked for them.
                    "rejected": []
                    if verified.own is None
                    else [tokenizer.decode([token]) for token in verified.drafts[verified.accepted :]],
                    "own": None if verified.own is None else tokenizer.decode([verified.own]),
                }
                for verified in each.verifications
            ],
        }
        for each, prompt in zip(decoded[:EXAMPLES], prompts[:EXAMPLES], strict=True)
    ]


def judge_by_context(
    exported: Path,
    target: TransformersTarget,
    buckets: Sequence[ContextPrompts],
    groups: ProcessGroupCollection,
    decoding: Decoding,
    report: Say,
) -> ContextJudgement:
    """Decode the prompts of each bucket by transformers with the draft in folder `exported`, loaded afresh. A bucket that has
    none, or whose conversations all end at once, is left out, and `report` is told.

    Raises UserError as `judge_export` does, and where nothing is left.
    """
    (draft, d2t, _), window = _load(exported, target, groups, decoding.window)
    drafter = chain_drafter(target, draft, d2t)
    contexts, left_out = [], []
    for context, prompts in buckets:
        what, why, decoded = f"context {context:,}", "no text is of that length", []
        if prompts:
            report(f"{what}: {counted(len(prompts), 'prompt')}")
            why = "the target ends all with their first token"
            try:
                decoded = decode_conversations(
                    target, drafter, prompts, decoding, what=what, timed=False, report=report
                )
            except torch.OutOfMemoryError as error:  # what was measured before is kept
                why = f"out of memory ({first_sentence(error)})"
        if any(each.verifications for each in decoded):
            contexts.append(ContextAcceptance.over(context, decoded, decoding.draft_tokens, decoding.sampling.seed))
            continue
        report(f"{what}: left out, {why}")
        left_out.append(context)
    if not contexts:
        raise UserError(
            "--by-context: nothing could be measured, see above; use other conversations, or shorter --contexts"
        )
    return ContextJudgement(contexts, left_out, "transformers", version("transformers"), decoding, window)


def longest_prompt(context: int, new_tokens: int, room: int) -> int:
    """Tokens of the longest prompt in the target's context that leaves place for an answer of `new_tokens` and for the `room`
    of a verification at its end. Raises UserError where there is none."""
    if (longest := context - new_tokens - room) < 1:
        raise UserError(
            f"evaluation.new_tokens: {new_tokens:,} tokens of an answer, and {room:,} of a verification "
            f"(evaluation.draft_tokens), leave no place for a prompt in the target's context of {context:,}; lower them"
        )
    return longest


def choose_prompts(samples: SampleSet, count: int, longest: int) -> list[Tensor]:
    """Prompts [P] of up to `count` samples spread evenly over the set: all tokens before the first supervised one."""
    starts = [(sample.ids, int(sample.loss_mask.int().argmax())) for sample in samples]
    fitting = [ids[:start] for ids, start in starts if 0 < start <= longest]
    if not fitting:
        found = f"none of {len(samples)} held-out samples has a prompt of 1 to {longest} tokens"
        raise UserError(
            f"evaluation: {found if len(samples) else 'nothing is held out'}; name such samples in data.held_out, raise "
            "data.held_out_fraction, or set evaluation.conversations=0"
        )
    chosen = torch.linspace(0, len(fitting) - 1, min(count, len(fitting))).round().long()
    return [fitting[index] for index in chosen.tolist()]


def _load(
    exported: Path, target: TransformersTarget, groups: ProcessGroupCollection, window: int | None
) -> tuple[LoadedDraft, Window]:
    weights = target.weights()
    loaded = load_draft(exported, weights, groups, weights.embedding.dtype, weights.embedding.device, window)
    return loaded, Window(loaded.draft.draft_config.window, read_draft_config(exported / "config.json").window)
