"""Judge an exported draft on prompts by transformers, with an untrained draft beside it, and say any engine's result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

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

Engine = Literal["transformers", "sglang"]
UNTRAINED_CONVERSATIONS = 8  # enough to see that it accepts nothing; it needs a verification for every token


@dataclass(frozen=True)
class Judgement:
    """trained: the exported draft. untrained: a fresh draft of the same shape, on the first few conversations; None where
    the engine is not asked for one. engine, version: who decoded. topk, tree_tokens: as in DraftTree."""

    trained: SpeculativeResult
    untrained: SpeculativeResult | None
    engine: Engine
    version: str
    topk: int
    tree_tokens: int

    def as_dict(self) -> dict[str, Any]:
        made = {
            "engine": self.engine,
            "engine_version": self.version,
            "topk": self.topk,
            "tree_tokens": self.tree_tokens,
        }
        untrained = self.untrained and self.untrained.as_dict()
        return self.trained.as_dict() | made | {"speed": self.speed._asdict(), "untrained": untrained}

    @property
    def speed(self) -> "Speed":
        tokens = self.trained.new_tokens
        return Speed(tokens / self.trained.seconds_speculative, tokens / self.trained.seconds_plain)

    def lines(self) -> list[str]:
        """What people read."""
        trained, speed = self.trained, self.speed
        positions = " ".join(f"{share:.2f}" for share in trained.position_acceptance)
        ties = f", {trained.ties} differ where the target's best logits tie within rounding" if trained.ties else ""
        untrained = self.untrained
        return [
            f"acceptance length {trained.acceptance_length:.2f}",
            *([f"untrained draft: acceptance length {untrained.acceptance_length:.2f}"] if untrained else []),
            f"accepted by draft position 1..{trained.draft_tokens}: {positions}",
            f"output equal to plain greedy decoding in {trained.identical} of {trained.conversations} conversations"
            f"{ties}{'' if trained.lossless else f', {trained.mismatches} DIFFER'}",
            f"{trained.new_tokens} tokens in {trained.verifications} verifications",
            f"{speed.speculative:.1f} tokens/s, {speed.plain:.1f} without the draft: {speed.gain:.2f} times as fast (by "
            f"{self.engine} {self.version}, one conversation at a time)",
        ]


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
    *,
    draft_tokens: int,
    new_tokens: int,
    seed: int,
    report: Callable[[str], None],
) -> Judgement:
    """Decode prompts (int64 [P]) by transformers with the draft in folder `exported`, loaded afresh.

    Raises UserError when the draft does not belong to the target, or a prompt does not fit the target's context.
    """
    weights = target.weights()
    dtype, device = weights.embedding.dtype, weights.embedding.device
    loaded = load_draft(exported, weights, groups, dtype, device)
    options = {"draft_tokens": draft_tokens, "new_tokens": new_tokens, "report": report}
    trained = decode_speculatively(target, loaded.draft, loaded.d2t, prompts, **options)
    fresh = untrained_draft(loaded.draft.draft_config, weights, groups, seed=seed, dtype=dtype, device=device)
    report("the same with an untrained draft, on the first few conversations")
    untrained = decode_speculatively(target, fresh, loaded.d2t, prompts[:UNTRAINED_CONVERSATIONS], **options)
    return Judgement(trained, untrained, "transformers", version("transformers"), topk=1, tree_tokens=draft_tokens + 1)


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
