"""Why a draft accepts so little: tries one change at a time on the same texts, and names those that raise acceptance.

Acceptance is teacher-forced (`teacher_forced`), over all places of texts that the target wrote. A change counts if it
raises the mean number of accepted drafts by LEAST_GAIN, and beyond a 95% interval of the difference over the texts. The
best such change is made, and all others are tried again on top of it, so that several faults are named in turn. Faults
that hide each other are tried in pairs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from eagle3.console import Say, counted
from eagle3.draft.interchange import EMBEDDING, ExportedDraft, load_weights
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import UserError
from eagle3.evaluation.by_context import gain_interval
from eagle3.evaluation.evidence import Evidence, Vocabulary, evidence_of
from eagle3.evaluation.known_faults import HEAD, Reading, Surroundings, changes
from eagle3.evaluation.teacher_forced import HEAD_SCALES, ForcedDrafts, forced_drafts

LEAST_GAIN = 0.05  # accepted drafts; a smaller gain is no explanation, however certain
MOST_FAULTS = 4
SOUND = 0.5  # share of first drafts accepted above which a draft without a known fault is called sound
CLEARLY_SCALED = 4.0  # the factor on the logits that fits best, or its inverse


class Measured(NamedTuple):
    """What a reading gives on each of C texts."""

    texts: list[ForcedDrafts]

    @property
    def counts(self) -> np.ndarray:
        """For each text: accepted drafts, and places [C, 2]."""
        return np.array([[int(each.accepted.sum()), len(each.accepted)] for each in self.texts])

    @property
    def accepted(self) -> float:
        """Accepted drafts per place."""
        counts, places = self.counts.sum(0)
        return float(counts / max(places, 1))


class Finding(NamedTuple):
    """What a change did to the mean number of accepted drafts."""

    name: str
    remedy: str
    before: float
    accepted: float
    interval: tuple[float, float]  # of the gain

    @property
    def gain(self) -> float:
        return self.accepted - self.before

    @property
    def explains(self) -> bool:
        return self.gain >= LEAST_GAIN and self.interval[0] > 0

    def line(self, draft_tokens: int) -> str:
        low, high = self.interval
        return (
            f"with {self.name}, {self.accepted:.2f} of {draft_tokens} drafts are accepted, not {self.before:.2f} (gain "
            f"{low:.2f} to {high:.2f}); {self.remedy}"
        )


@dataclass(frozen=True)
class Diagnosis:
    draft_tokens: int
    accepted: float  # per place, as the draft is
    faults: list[Finding]  # in the order in which they were found, each on top of those before
    tried: list[Finding]  # the changes to the draft as it is, the largest gain first
    evidence: Evidence  # of the draft as it is
    notes: list[str] = field(default_factory=list)  # about what greedy acceptance on these texts does not show

    def lines(self) -> list[str]:
        """The diagnosis in words."""
        found = [f"fault {place}: {fault.line(self.draft_tokens)}" for place, fault in enumerate(self.faults, 1)]
        if not found:
            best = self.tried[0]
            verdict = "the draft is sound" if self.evidence.first >= SOUND else "no known fault explains it"
            found = [
                f"{verdict}: {self.accepted:.2f} of {self.draft_tokens} drafts accepted, and none of "
                f"{len(self.tried)} changes raises that clearly (the best, {best.name}: {best.gain:+.2f})"
            ]
        return [*found, *self.notes, *self.evidence.lines()]

    def as_dict(self) -> dict[str, Any]:
        return {
            "draft_tokens": self.draft_tokens,
            "accepted_drafts": self.accepted,
            "faults": [fault._asdict() for fault in self.faults],
            "tried": [finding._asdict() for finding in self.tried],
            "notes": self.notes,
            "evidence": self.evidence._asdict(),
        }


def diagnose(
    reading: Reading,
    around: Surroundings,
    vocabulary: Vocabulary,
    measure: Callable[[Reading], Measured],
    draft_tokens: int,
    report: Say,
) -> Diagnosis:
    """Measure the draft as it is, and with each change. measure: see `measuring`."""
    own = now = measure(reading)
    report(f"as it is: {own.accepted:.2f} of {draft_tokens} drafts accepted at {counted(_places(own), 'place')}")
    faults: list[Finding] = []
    tried: list[Finding] = []
    seen = reading
    while len(faults) < MOST_FAULTS:
        found = _try_all(seen, now, around, measure, draft_tokens, report)
        tried = tried or sorted((finding for finding, _, _ in found), key=lambda finding: -finding.gain)
        best, changed, measured = max(found, key=lambda each: each[0].gain)
        if not best.explains:
            break
        report(f"made: {best.name}; the others again")
        faults.append(best)
        seen, now = changed, measured
    evidence = evidence_of(reading.texts, own.texts, reading.exported, vocabulary, draft_tokens)
    return Diagnosis(draft_tokens, own.accepted, faults, tried, evidence, _notes(seen, now))


Tried = tuple[Finding, Reading, Measured]


def _try_all(
    reading: Reading,
    now: Measured,
    around: Surroundings,
    measure: Callable[[Reading], Measured],
    draft_tokens: int,
    report: Say,
) -> list[Tried]:
    found = []
    for change in changes(reading, around, draft_tokens):
        measured = measure(change.reading)
        interval = gain_interval(now.counts, measured.counts, seed=0) or (-math.inf, math.inf)
        finding = Finding(change.name, change.remedy, now.accepted, measured.accepted, interval)
        report(f"{change.name}: {measured.accepted:.2f}")
        found.append((finding, change.reading, measured))
    return found


def _places(measured: Measured) -> int:
    return int(measured.counts[:, 1].sum())


def _notes(reading: Reading, measured: Measured) -> list[str]:
    losses = torch.stack([each.losses for each in measured.texts]).sum(0)
    best = HEAD_SCALES[int(losses.argmin())]
    if not measured.accepted or 1 / CLEARLY_SCALED < best < CLEARLY_SCALED:
        return []
    return [
        f"its logits fit the target's tokens best when multiplied by {best:g}: {HEAD} or norm.weight is scaled. Greedy "
        "acceptance does not depend on that, sampling does"
    ]


def measuring(
    embedding: Tensor, groups: ProcessGroupCollection, dtype: torch.dtype, draft_tokens: int
) -> Callable[[Reading], Measured]:
    """A function that measures readings. embedding: the target's, [V, Ht], for drafts that have none of their own, on
    the device to compute on. dtype: of the draft."""

    def measure(reading: Reading) -> Measured:
        draft = _built(reading.exported, embedding, groups, dtype)
        rope = draft.rope
        if reading.clamp is not None:
            draft.rope = _Clamped(rope, reading.clamp)
        d2t = reading.exported.d2t.to(embedding.device)
        return Measured([forced_drafts(draft, d2t, text, reading.aux(text), draft_tokens) for text in reading.texts])

    return measure


class _Clamped:
    """A rope whose positions end."""

    def __init__(self, rope: Any, positions: int) -> None:
        self.rope, self.last = rope, positions - 1

    def at(self, positions: Tensor, dtype: torch.dtype) -> Any:
        return self.rope.at(positions.clamp(max=self.last), dtype)


def _built(
    exported: ExportedDraft, embedding: Tensor, groups: ProcessGroupCollection, dtype: torch.dtype
) -> Eagle3Draft:
    """The draft's module, with the target's embedding if it has none of its own."""
    draft = Eagle3Draft(exported.config, groups, dtype).eval().requires_grad_(False)
    if EMBEDDING not in exported.weights:
        if embedding.shape != draft.embedding.weight.shape:
            raise UserError(
                f"{exported.origin}: has no {EMBEDDING}, and the target's is {list(embedding.shape)}, not "
                f"{list(draft.embedding.weight.shape)}; name the target that it was trained for"
            )
        draft.embedding.weight.copy_(embedding)
    load_weights(draft, exported, groups.tp)
    return draft.to(embedding.device)
