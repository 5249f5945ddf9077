"""Judge an exported draft with transformers: on prompts, compared with an untrained draft, or by context length."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eagle3.console import Say, counted
from eagle3.draft.interchange import read_exported
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import first_sentence
from eagle3.evaluation.acceptance import Decoding
from eagle3.evaluation.context_results import ContextJudgement
from eagle3.evaluation.drafter import draft_of, untrained_draft
from eagle3.evaluation.results import Conditions, Judgement, SpeculativeResult, over_sets
from eagle3.evaluation.speculative import DecodedConversation, chain_drafter, decode_conversations
from eagle3.targets.transformers import TransformersTarget

UNTRAINED_CONVERSATIONS = 8  # enough to show that none of its drafts is accepted; each token then takes a verification
EXAMPLES = 4
WARM_UP_TOKENS = 8
PROMPT_CHARACTERS = 300  # from the end of an example's prompt


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
    decoded = decode_conversations(target, chain_drafter(target, draft, d2t), prompts, decoding, report=report)
    report("the same with an untrained draft, on the first few conversations")
    drafter = chain_drafter(target, untrained_draft(draft.draft_config, target.head, groups, seed=seed), d2t)
    untrained = decode_conversations(target, drafter, prompts[:UNTRAINED_CONVERSATIONS], decoding, report=report)
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
    decode = partial(decode_conversations, target, chain_drafter(target, draft, d2t), report=report)
    filled = {context: prompts for context, prompts in buckets.items() if prompts}
    first, *_ = filled.values()  # decoded before, so that no conversation's times hold what a process does once
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
