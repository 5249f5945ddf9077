"""Judge an exported draft on held-out conversations, with an untrained draft beside it, and say the result."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from eagle3.data.samples import SampleSet
from eagle3.errors import UserError
from eagle3.evaluation.speculative import (
    SpeculativeResult,
    decode_speculatively,
    load_draft,
    untrained_draft,
)
from eagle3.target.transformers import TransformersTarget

UNTRAINED_CONVERSATIONS = 8  # enough to see that it accepts nothing; it needs a verification for every token


@dataclass(frozen=True)
class Judgement:
    """trained: the exported draft. untrained: a fresh draft of the same shape, on the first few conversations."""

    trained: SpeculativeResult
    untrained: SpeculativeResult

    def as_dict(self) -> dict[str, Any]:
        return self.trained.as_dict() | {"untrained": self.untrained.as_dict()}

    def lines(self) -> list[str]:
        """What people read."""
        trained, plain = self.trained, self.untrained
        positions = " ".join(f"{share:.2f}" for share in trained.position_acceptance)
        ties = f", {trained.ties} differ where the target's best logits tie within rounding" if trained.ties else ""
        return [
            f"acceptance length {trained.acceptance_length:.2f}",
            f"untrained draft: acceptance length {plain.acceptance_length:.2f}",
            f"accepted by draft position 1..{trained.draft_tokens}: {positions}",
            f"output equal to plain greedy decoding in {trained.identical} of {trained.conversations} conversations"
            f"{ties}{'' if trained.lossless else f', {trained.mismatches} DIFFER'}",
            f"{trained.new_tokens} tokens in {trained.verifications} verifications",
        ]


def judge_export(
    exported: Path,
    target: TransformersTarget,
    held_out: SampleSet,
    groups: ProcessGroupCollection,
    *,
    conversations: int,
    draft_tokens: int,
    new_tokens: int,
    seed: int,
    report: Callable[[str], None],
) -> Judgement:
    """Decode held-out prompts with the draft in folder `exported`, loaded afresh.

    Raises UserError when the draft does not belong to the target, or no held-out prompt fits the target's context.
    """
    weights = target.weights()
    dtype, device = weights.head.dtype, weights.head.device
    loaded = load_draft(exported, weights, groups, dtype, device)
    context = target.model.config.get_text_config(decoder=True).max_position_embeddings
    prompts = choose_prompts(held_out, conversations, context - new_tokens - draft_tokens)
    options = {"draft_tokens": draft_tokens, "new_tokens": new_tokens, "report": report}
    trained = decode_speculatively(target, loaded.draft, loaded.d2t, prompts, **options)
    fresh = untrained_draft(loaded.draft.draft_config, weights, groups, seed=seed, dtype=dtype, device=device)
    report("the same with an untrained draft, on the first few conversations")
    untrained = decode_speculatively(target, fresh, loaded.d2t, prompts[:UNTRAINED_CONVERSATIONS], **options)
    return Judgement(trained, untrained)


def choose_prompts(samples: SampleSet, count: int, longest: int) -> list[Tensor]:
    """Prompts [P] of up to `count` samples spread evenly over the set: all tokens before the first supervised one."""
    fitting = []
    for sample in samples:
        start = int(sample.loss_mask.int().argmax())
        if 0 < start <= longest:
            fitting.append(sample.ids[:start])
    if not fitting:
        raise UserError(
            f"evaluation: none of {len(samples)} held-out samples has a prompt of 1 to {longest} tokens; "
            "add such samples to data.held_out, or set evaluation.conversations=0"
        )
    chosen = torch.linspace(0, len(fitting) - 1, min(count, len(fitting))).round().long()
    return [fitting[index] for index in chosen.tolist()]
