"""Judge an exported draft with transformers: on prompts, compared with an untrained draft, or by context length."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eagle3.console import Say, counted
from eagle3.draft.config import read_draft_config
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import first_sentence
from eagle3.evaluation.acceptance import GREEDY, Decoding, Sampling
from eagle3.evaluation.by_context import ContextJudgement, DecodedContext
from eagle3.evaluation.by_set import over_sets, set_lines, set_records
from eagle3.evaluation.drafter import FULL, Window, load_draft, untrained_draft
from eagle3.evaluation.prompts import ContextPrompts
from eagle3.evaluation.speculative import DecodedConversation, SpeculativeResult, chain_drafter, decode_conversations
from eagle3.targets.transformers import TransformersTarget

Engine = Literal["transformers", "sglang"]
UNTRAINED_CONVERSATIONS = 8  # enough to show that none of its drafts is accepted; each token then takes a verification
EXAMPLES = 4
WARM_UP_TOKENS = 8
PROMPT_CHARACTERS = 300  # from the end of an example's prompt
LONGEST_CHARACTER = 4  # most tokens that a character can have: its UTF-8 bytes


@dataclass(frozen=True)
class Judgement:
    """The result of judging an exported draft."""

    trained: SpeculativeResult  # the exported draft
    # A fresh draft of the same shape, on the first few conversations; None if the engine does not judge one.
    untrained: SpeculativeResult | None
    engine: Engine  # the engine that decoded, and its version
    version: str
    # As in DraftTree:
    topk: int
    tree_tokens: int
    sampling: Sampling = GREEDY
    # See `example_texts`; empty if the engine does not say which drafts it accepted.
    examples: Sequence[dict[str, Any]] = ()
    window: Window = FULL  # the draft's
    # Whether decoding with and without the draft took turns, so that their speeds can be compared on a busy machine.
    same_load: bool = True
    # The exported draft on each prompt set, by the set's name; empty for held-out conversations.
    sets: Mapping[str, SpeculativeResult] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return self.trained.as_dict() | {
            "engine": self.engine,
            "engine_version": self.version,
            "topk": self.topk,
            "tree_tokens": self.tree_tokens,
            **asdict(self.sampling),
            **self.window._asdict(),
            "speed": self.trained.speed._asdict(),
            "same_load": self.same_load,
            "untrained": self.untrained and self.untrained.as_dict(),
            "examples": list(self.examples),
            "sets": set_records(self.sets, self.sampling.seed),
        }

    def lines(self) -> list[str]:
        """The result in words, line by line."""
        trained, speed = self.trained, self.trained.speed
        positions = " ".join(f"{share:.2f}" for share in trained.position_acceptance)
        excess = trained.yielded + trained.conversations - trained.new_tokens  # each prefill gives one token
        correction = f", less {excess:,} beyond the answers' length" if excess else ""
        return [
            f"acceptance length {trained.acceptance_length:.2f} (tokens per verification: accepted drafts and the "
            "target's own)",
            f"mean over conversations {trained.mean_acceptance_length:.2f} (as papers average)",
            *self.window.lines(),
            *([f"untrained draft: acceptance length {self.untrained.acceptance_length:.2f}"] if self.untrained else []),
            f"accepted by draft position 1..{trained.draft_tokens}: {positions}",
            self._comparison(),
            f"{trained.yielded:,} tokens from {counted(trained.verifications, 'verification')}, and "
            f"{trained.conversations:,} from the prefills{correction}: {trained.new_tokens:,} put out",
            f"{speed.speculative:.1f} tokens/s, {speed.plain:.1f} without the draft: {speed.gain:.2f} times as fast "
            f"(by {self.engine} {self.version}, one conversation at a time"
            f"{'' if self.same_load else '; not measured under the same load'})",
        ]

    def table(self) -> list[str]:
        """The figures of each prompt set, line by line; empty if there are no two sets."""
        return set_lines(self.sets, self.sampling.seed) if len(self.sets) > 1 else []

    def _comparison(self) -> str:
        trained = self.trained
        if not trained.compared:
            return (
                f"sampled at temperature {self.sampling.temperature:g}, seed {self.sampling.seed}: not compared with "
                "plain sampling, which is equal in distribution only"
            )
        ties = f", {trained.ties} differ where the target's best logits tie within rounding" if trained.ties else ""
        return (
            f"output equal to plain greedy decoding in {trained.identical} of {trained.conversations} conversations"
            f"{ties}{'' if trained.lossless else f', {trained.mismatches} DIFFER'}"
        )


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
    draft, d2t, window = _load(exported, target, groups, decoding.window)
    decoded = decode_conversations(target, chain_drafter(target, draft, d2t), prompts, decoding, report=report)
    trained = SpeculativeResult.over(decoded)
    dtype = target.head.embedding.dtype
    fresh = untrained_draft(draft.draft_config, target.head, groups, seed=seed, dtype=dtype, device=target.device)
    report("the same with an untrained draft, on the first few conversations")
    untrained = decode_conversations(
        target, chain_drafter(target, fresh, d2t), prompts[:UNTRAINED_CONVERSATIONS], decoding, report=report
    )
    return Judgement(
        trained,
        # None if the target ends all of these few conversations with their first token.
        SpeculativeResult.over(untrained) if any(one.verifications for one in untrained) else None,
        "transformers",
        version("transformers"),
        topk=1,
        tree_tokens=decoding.draft_tokens + 1,
        sampling=decoding.sampling,
        examples=example_texts(decoded, prompts, tokenizer),
        window=window,
        sets=over_sets(sets or {}, decoded, report),
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
            "prompt": tokenizer.decode(prompt[-PROMPT_CHARACTERS * LONGEST_CHARACTER :].tolist())[-PROMPT_CHARACTERS:],
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
    buckets: Sequence[ContextPrompts],
    groups: ProcessGroupCollection,
    decoding: Decoding,
    report: Say,
) -> ContextJudgement:
    """Judge the draft in folder `exported`, loaded afresh, by decoding each bucket's prompts with transformers.

    A bucket is left out, with a line to `report`, if it has no prompts, if memory runs out, or if the target ends all
    its conversations with their first token. Raises UserError like `judge_export`, and if no bucket is left.
    """
    draft, d2t, window = _load(exported, target, groups, decoding.window)
    decode = partial(decode_conversations, target, chain_drafter(target, draft, d2t), report=report)
    first = next((prompts[:1] for _, prompts in buckets if prompts), [])
    if first:  # so that no conversation's times hold what a process does once
        decode(first, decoding=replace(decoding, new_tokens=WARM_UP_TOKENS), report=lambda _: None)

    def decoded() -> Iterator[DecodedContext]:
        for context, prompts in buckets:
            label, bucket = f"context {context:,}", DecodedContext(context, [])
            if prompts:
                report(f"{label}: {counted(len(prompts), 'prompt')}")
                try:
                    bucket = DecodedContext(context, decode(prompts, decoding=decoding, task=label))
                except torch.OutOfMemoryError as error:  # keep what has been measured so far
                    bucket = DecodedContext(context, [], f"out of memory ({first_sentence(error)})")
            yield bucket

    chain = {"topk": 1, "tree_tokens": decoding.draft_tokens + 1}
    return ContextJudgement.over(decoded(), "transformers", decoding, report, **chain, window=window)


def _load(
    exported: Path, target: TransformersTarget, groups: ProcessGroupCollection, window: int | None
) -> tuple[Eagle3Draft, Tensor, Window]:
    dtype = target.head.embedding.dtype
    draft, d2t = load_draft(exported, target.head, groups, dtype, target.device, window)
    return draft, d2t, Window(draft.draft_config.window, read_draft_config(exported / "config.json").window)
