"""The judge of a trained draft: real speculative decoding with its target, greedy output checked against plain decoding."""

import itertools
import os.path
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor

from eagle3.console import Progress, Say, Warned
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import UserError
from eagle3.evaluation.acceptance import Decoding, Verification
from eagle3.evaluation.decoding import PlainOutput, SpeculativeOutput, plain_greedy, plain_sampled, speculative
from eagle3.evaluation.drafter import ChainDrafter, NewDrafter
from eagle3.targets.transformers import TransformersTarget

Verdict = Literal["identical", "tie", "mismatch"]


@dataclass(frozen=True)
class DecodedConversation:
    """One conversation decoded speculatively and plainly. verdict: how the two compare (see `compare`), None where both are
    sampled. plain_tokens: new tokens of plain decoding. seconds: of decoding, prefill included."""

    output: SpeculativeOutput
    verdict: Verdict | None
    plain_tokens: int
    seconds_speculative: float
    seconds_plain: float

    @property
    def verifications(self) -> list[Verification]:
        return self.output.verifications

    @property
    def yielded(self) -> int:
        """Tokens that the verifications added, before the output was cut to its length."""
        return sum(len(each.tokens) for each in self.verifications)

    def accepted(self, draft_tokens: int) -> list[int]:
        """[draft_tokens]: verifications that accepted drafts 0..i, all of them."""
        return [sum(each.accepted > i for each in self.verifications) for i in range(draft_tokens)]


@dataclass(frozen=True)
class SpeculativeResult:
    """Counts over all conversations.

    draft_tokens: drafts of one verification. new_tokens: tokens put out. yielded: tokens that the verifications added,
    before the output was cut to its length. accepted[i]: verifications that accepted drafts 0..i, all of them.
    identical, ties, mismatches: conversations by how their output compares with plain decoding (see `compare`).
    seconds: of decoding, prefill included. compared: whether the output was compared at all; two samples of one
    distribution cannot be, token by token. plain_tokens: new tokens of plain decoding, None where as many as new_tokens.
    """

    conversations: int
    draft_tokens: int
    new_tokens: int
    verifications: int
    yielded: int
    accepted: list[int]
    identical: int
    ties: int
    mismatches: int
    seconds_speculative: float
    seconds_plain: float
    compared: bool = True
    plain_tokens: int | None = None

    @classmethod
    def over(cls, decoded: Sequence[DecodedConversation], draft_tokens: int) -> "SpeculativeResult":
        """Raises UserError where the target ends every conversation at its first token."""
        verifications = sum(len(each.verifications) for each in decoded)
        if not verifications:
            raise UserError(
                f"evaluation: the target ends all {len(decoded)} conversations with their first token, so nothing can be "
                "measured; use other conversations, or set evaluation.conversations=0"
            )
        verdicts = [each.verdict for each in decoded]
        return cls(
            conversations=len(decoded),
            draft_tokens=draft_tokens,
            new_tokens=sum(len(each.output.tokens) for each in decoded),
            verifications=verifications,
            yielded=sum(each.yielded for each in decoded),
            accepted=[sum(column) for column in zip(*(each.accepted(draft_tokens) for each in decoded), strict=True)],
            identical=verdicts.count("identical"),
            ties=verdicts.count("tie"),
            mismatches=verdicts.count("mismatch"),
            seconds_speculative=sum(each.seconds_speculative for each in decoded),
            seconds_plain=sum(each.seconds_plain for each in decoded),
            compared=None not in verdicts,
            plain_tokens=sum(each.plain_tokens for each in decoded),
        )

    @property
    def acceptance_length(self) -> float:
        """Tokens a verification yields: the accepted drafts and the target's own next token (1 = no draft accepted)."""
        return self.yielded / self.verifications

    @property
    def position_acceptance(self) -> list[float]:
        """Share of the verifications in which drafts 0..i were all accepted."""
        return [count / self.verifications for count in self.accepted]

    @property
    def conditional_acceptance(self) -> list[float]:
        """Share of the verifications accepting drafts 0..i-1 that accepted draft i too; 0 where there are none."""
        return [now / max(1, before) for before, now in itertools.pairwise([self.verifications, *self.accepted])]

    @property
    def lossless(self) -> bool | None:
        """No output differs from plain decoding but by a tie; None where they were not compared."""
        return self.mismatches == 0 if self.compared else None

    def as_dict(self) -> dict[str, Any]:
        derived = ("acceptance_length", "position_acceptance", "conditional_acceptance", "lossless")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def chain_drafter(target: TransformersTarget, draft: Eagle3Draft, d2t: Tensor) -> NewDrafter:
    """What makes a drafter for each conversation. d2t [Vd] and the draft lie on the target's device. Raises UserError for a
    draft that reads other layers than `target` gives."""
    layers = draft.draft_config.aux_layers
    if layers is not None and layers != target.aux_layers:
        raise UserError(
            f"evaluation: the draft reads the target's layers {list(layers)}, but {list(target.aux_layers)} are "
            "captured; set model.aux_layers to the draft's"
        )
    return partial(ChainDrafter, draft, d2t)


def decode_conversations(
    target: TransformersTarget,
    new_drafter: NewDrafter,
    prompts: Sequence[Tensor],
    decoding: Decoding,
    *,
    timed: bool = True,
    report: Say = lambda _: None,
    what: str = "speculative decoding",
) -> list[DecodedConversation]:
    """Decode every prompt (int64 [P]) speculatively and plainly. timed: plainly, too, where that is of use for its seconds
    alone, that is where tokens are sampled. report hears of progress with `what`.

    Raises UserError for a prompt that is empty or has no room for its answer in the target's context.
    """
    draft_tokens, new_tokens, sampling = decoding.draft_tokens, decoding.new_tokens, decoding.sampling
    _check(target, prompts, draft_tokens, new_tokens)
    rule = sampling.rule(target.device)
    progress = Progress(report, what, len(prompts), "conversations")
    decoded: list[DecodedConversation] = []
    for number, prompt in enumerate(prompts, start=1):
        start = time.perf_counter()
        drafter = new_drafter(len(prompt) + new_tokens)
        output = speculative(target, drafter, prompt, rule, draft_tokens=draft_tokens, new_tokens=new_tokens)
        middle = time.perf_counter()
        progress.at(number - 1)  # for a long prompt's sake
        verdict, plain_tokens, began = None, 0, time.perf_counter()
        if sampling.greedy:
            plain = plain_greedy(target, prompt, new_tokens=new_tokens)
            verdict, plain_tokens = compare(output.tokens, plain), len(plain.tokens)
        elif timed:
            plain_tokens = len(plain_sampled(target, prompt, rule, new_tokens=new_tokens))
        decoded.append(DecodedConversation(output, verdict, plain_tokens, middle - start, time.perf_counter() - began))
        if verdict == "mismatch":
            _, place = first_difference(output.tokens, plain.tokens)
            report(Warned(f"{what}: conversation {number} differs from plain decoding at new token {place}"))
        length = sum(each.yielded for each in decoded) / max(1, sum(len(each.verifications) for each in decoded))
        progress.at(number, extra=f"acceptance length {length:.2f}")
    return decoded


def compare(tokens: Sequence[int], plain: PlainOutput) -> Verdict:
    """How speculative output compares with plain output.

    A first difference is a tie where plain decoding rated the other token within its resolution of the best; what
    follows a tie are two equally right texts, and is not compared. All else is a mismatch, a different length included.
    """
    verdict, first = first_difference(tokens, plain.tokens)
    if verdict:
        return verdict
    near = plain.logits[first] >= plain.logits[first, 0] - plain.resolution[first]
    return "tie" if tokens[first] in plain.candidates[first][near].tolist() else "mismatch"


def _check(target: TransformersTarget, prompts: Sequence[Tensor], draft_tokens: int, new_tokens: int) -> None:
    assert draft_tokens >= 1 and new_tokens >= 1
    if new_tokens < 2:
        raise UserError(f"evaluation.new_tokens: {new_tokens} leaves nothing to verify; set it to 2 or more")
    if not prompts:
        raise UserError("evaluation: there are no conversations to decode; name some in data.held_out")
    context = getattr(target.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(f"evaluation: prompt {number} has no tokens; leave it out")
        if context and len(prompt) + new_tokens - 1 + draft_tokens > context:  # of the last possible chain
            raise UserError(
                f"evaluation: prompt {number} has {len(prompt)} tokens, which with {new_tokens} new and {draft_tokens} "
                f"drafted exceed the target's context of {context}; use shorter prompts or lower evaluation.new_tokens"
            )


def first_difference(tokens: Sequence[int], plain: Sequence[int]) -> tuple[Verdict | None, int]:
    """How many tokens, from the first, two outputs share; and the verdict, None where it depends on the logits there."""
    first = len(os.path.commonprefix([list(tokens), list(plain)]))
    if first == len(tokens) == len(plain):
        return "identical", first
    return ("mismatch" if first == min(len(tokens), len(plain)) else None), first
