"""Why a draft accepts so little: tries one change at a time on the same texts, and names those that raise acceptance.

Acceptance is teacher-forced (`teacher_forced`), over all places of texts that the target wrote. A change counts if it
raises the mean number of accepted drafts by LEAST_GAIN, and beyond a 95% interval of the difference over the texts. The
best such change is made, and all others are tried again on top of it, so that several faults are named in turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import NamedTuple

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from pydantic import computed_field
from pydantic.dataclasses import dataclass
from torch import Tensor

from eagle3.console import Say, counted
from eagle3.draft.interchange import ExportedDraft
from eagle3.draft.rope import RotaryEmbedding, Rotation
from eagle3.errors import UserError
from eagle3.evaluation.drafter import draft_of
from eagle3.evaluation.intervals import gain_interval
from eagle3.evaluation.known_faults import HEAD, DraftReading, Surroundings, changes
from eagle3.evaluation.teacher_forced import HEAD_SCALES, ForcedDrafts, WrittenText, forced_drafts
from eagle3.objective.chains import contexts_up_to
from eagle3.targets.checkpoint import without_warnings
from eagle3.targets.logits import TargetHead

LEAST_GAIN = 0.05  # accepted drafts
MOST_FAULTS, MOST_RIVALS = 4, 3
CLEARLY_SCALED = 4.0  # a factor on the logits, or its inverse, from which on a better one is told
SOUND, SOUND_LATER = 0.5, 0.4  # shares from which on a draft without a known fault is called sound


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


@dataclass(frozen=True)
class ChangeEffect:
    """What a change did to the mean number of accepted drafts."""

    name: str
    remedy: str
    before: float
    accepted: float
    interval: tuple[float, float] | None  # of the gain; None if fewer than two texts have a place with and without it
    least_gain: float  # a smaller gain is no explanation, however certain
    rivals: tuple[str, ...] = ()  # other changes that explain as much, for one that was made

    @computed_field
    @property
    def gain(self) -> float:
        return self.accepted - self.before

    @computed_field
    @property
    def explains(self) -> bool:
        return self.gain >= self.least_gain and self.interval is not None and self.interval[0] > 0

    def line(self, draft_tokens: int) -> str:
        """The finding in words, for one that explains something."""
        low, high = self.interval or (self.gain, self.gain)
        rivals = f"; nearly as good: {', '.join(self.rivals[:MOST_RIVALS])}" if self.rivals else ""
        return (
            f"with {self.name}, {self.accepted:.2f} of {draft_tokens} drafts are accepted, not {self.before:.2f} (gain "
            f"{low:.2f} to {high:.2f}); {self.remedy}{rivals}"
        )


@dataclass(frozen=True)
class AcceptedShare:
    """First drafts in one group of places."""

    group: str
    places: int
    accepted: float  # share of the places


@dataclass(frozen=True)
class Evidence:
    by_position: list[float]  # share of the chains that reach draft i + 1 and have it accepted
    coverage: float  # share of the target's tokens that the draft vocabulary has: no draft accepts more
    by_context: list[AcceptedShare]
    by_token: list[AcceptedShare]
    by_entropy: list[AcceptedShare]  # of the target's distribution, in quarters of the places

    @property
    def sound(self) -> bool:
        """Whether at least half of the first drafts are accepted, and of the later ones not much fewer."""
        return self.by_position[0] >= SOUND and min(self.by_position) >= SOUND_LATER

    def lines(self) -> list[str]:
        """The evidence in words."""
        chances = " ".join(f"{share:.2f}" for share in self.by_position)
        return [
            f"accepted at draft position 1..{len(self.by_position)}, of those that get there: {chances}",
            f"the draft vocabulary has {self.coverage:.1%} of the target's tokens there",
            *(
                f"first drafts accepted by {name}: "
                + ", ".join(f"{share.group} {share.accepted:.2f} ({share.places:,})" for share in shares)
                for name, shares in (
                    ("context", self.by_context),
                    ("token", self.by_token),
                    ("entropy of the target", self.by_entropy),
                )
            ),
        ]


@dataclass(frozen=True)
class Diagnosis:
    draft_tokens: int
    accepted_drafts: float  # per place, as the draft is
    faults: list[ChangeEffect]  # in the order in which they were found, each on top of those before
    tried: list[ChangeEffect]  # the changes to the draft as it is, the largest gain first
    evidence: Evidence  # of the draft as it is
    notes: list[str] = field(default_factory=list)  # about what greedy acceptance on these texts does not show

    def lines(self) -> list[str]:
        """The diagnosis in words."""
        found = [f"fault {place}: {fault.line(self.draft_tokens)}" for place, fault in enumerate(self.faults, 1)]
        if not found:
            best = self.tried[0]
            verdict = "the draft is sound" if self.evidence.sound else "no known fault explains it"
            found = [
                f"{verdict}: {self.accepted_drafts:.2f} of {self.draft_tokens} drafts accepted, and none of "
                f"{len(self.tried)} changes raises that clearly (the best, {best.name}: {best.gain:+.2f})"
            ]
        return [*found, *self.notes, *(["as the draft is:"] if self.faults else []), *self.evidence.lines()]


def diagnose(
    reading: DraftReading,
    around: Surroundings,
    vocabulary: Callable[[int], str],
    measure: Callable[[DraftReading], Measured],
    draft_tokens: int,
    report: Say,
) -> Diagnosis:
    """Measure the draft as it is, and with each change. measure: see `measuring`. Raises UserError if fewer than two
    texts have a place where a chain fits."""
    seen, own = reading, measure(reading)
    now, places = own, own.counts[:, 1]
    if (places > 0).sum() < 2:
        raise UserError(
            f"--prompts: {int((places > 0).sum())} of {len(places)} answers hold a chain of {draft_tokens} tokens, and "
            "two are needed to see how much they differ; give more prompts, or raise evaluation.new_tokens"
        )
    report(f"as it is: {own.accepted:.2f} of {draft_tokens} drafts accepted at {counted(int(places.sum()), 'place')}")
    faults: list[ChangeEffect] = []
    tried: list[ChangeEffect] = []
    while len(faults) < MOST_FAULTS:
        trials: dict[ChangeEffect, tuple[DraftReading, Measured]] = {}
        for change in changes(seen, around, draft_tokens):
            changed = seen._replace(**change.fields)
            measured = measure(changed)
            finding = ChangeEffect(
                change.name,
                change.remedy,
                now.accepted,
                measured.accepted,
                gain_interval(now.counts, measured.counts, seed=0),
                max(LEAST_GAIN, change.least_share * now.accepted),
            )
            report(f"{change.name}: {measured.accepted:.2f}")
            trials[finding] = changed, measured
        tried = tried or sorted(trials, key=lambda finding: -finding.gain)
        explaining = [finding for finding in trials if finding.explains]
        if not explaining:
            break
        most = max(finding.gain for finding in explaining)
        # Those that do about as much as the best. The first is the likeliest of its kind.
        chosen, *rivals = (finding for finding in explaining if finding.gain > most - LEAST_GAIN)
        report(f"made: {chosen.name}; the others again")
        faults.append(replace(chosen, rivals=tuple(rival.name for rival in rivals)))
        made, now = trials[chosen]
        if made.texts is not seen.texts:
            around = replace(around, others=())  # one of them was chosen, and another would undo that
        seen = made
    return Diagnosis(
        draft_tokens,
        own.accepted,
        faults,
        tried,
        evidence_of(reading.texts, own.texts, reading.exported, vocabulary, draft_tokens),
        _notes(now, bool(faults)),
    )


def _notes(measured: Measured, changed: bool) -> list[str]:
    """changed: whether a change was made to the draft that was measured."""
    notes, first = [], float(torch.cat([each.accepted for each in measured.texts]).gt(0).double().mean())
    if changed and first < SOUND:
        notes.append(
            f"even so, only {first:.2f} of first drafts are accepted: if the draft has seen few answers, train it "
            "further before you change anything"
        )
    chances = torch.cat([each.sampled for each in measured.texts]).mean(0).tolist()
    own, best = chances[HEAD_SCALES.index(1.0)], max(chances)
    scale = HEAD_SCALES[chances.index(best)]
    if best >= own + LEAST_GAIN and not 1 / CLEARLY_SCALED < scale < CLEARLY_SCALED:
        notes.append(
            f"sampling at temperature 1 accepts {own:.2f} of first drafts, and {best:.2f} with the draft's logits "
            f"multiplied by {scale:g}: scale {HEAD} so (greedy acceptance does not depend on it)"
        )
    return notes


def measuring(
    target_head: TargetHead, groups: ProcessGroupCollection, draft_tokens: int
) -> Callable[[DraftReading], Measured]:
    """A function that measures readings, on the device and in the dtype of the target's head."""

    def measure(reading: DraftReading) -> Measured:
        with without_warnings():  # transformers doubts some of the ropes that are tried
            draft, d2t = draft_of(reading.exported, target_head, groups)
        if reading.clamp is not None:
            draft.rope = _Clamped(draft.rope, reading.clamp)
        return Measured(forced_drafts(draft, d2t, reading.texts, [*map(reading.aux, reading.texts)], draft_tokens))

    return measure


class _Clamped:
    """A rope whose positions end."""

    def __init__(self, rope: RotaryEmbedding, positions: int) -> None:
        self.rope, self.last = rope, positions - 1

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        return self.rope.at(positions.clamp(max=self.last), dtype)


# What acceptance depends on ------------------------------------------------------------------------------------------


def evidence_of(
    texts: Sequence[WrittenText],
    forced: Sequence[ForcedDrafts],
    exported: ExportedDraft,
    vocabulary: Callable[[int], str],
    draft_tokens: int,
) -> Evidence:
    """Group the first drafts at all places, of which there are some. vocabulary: the text of each target token"""
    accepted = torch.cat([each.accepted for each in forced])
    places = [len(each.accepted) for each in forced]
    first = accepted > 0

    def at_places(of: Callable[[WrittenText], Tensor], offset: int) -> Tensor:
        """One value for each place: that of token P + i + offset."""
        return torch.cat([of(text)[text.prompt + offset :][:count] for text, count in zip(texts, places, strict=True)])

    tokens = at_places(lambda text: text.ids, 1)  # those that the first drafts had to guess
    contexts = at_places(lambda text: torch.arange(len(text.ids)), 1)
    entropy = at_places(lambda text: text.entropy, 0)
    reached = [int((accepted >= step).sum()) for step in range(draft_tokens + 1)]
    kinds = [kind_of(vocabulary(token)) for token in tokens.tolist()]
    return Evidence(
        by_position=[now / max(1, before) for before, now in zip(reached, reached[1:], strict=False)],
        coverage=float(exported.t2d[tokens].double().mean()),
        by_context=_between(first, contexts, contexts_up_to(int(contexts.max())), "{:,}"),
        by_token=_shares(
            first, [(kind, torch.tensor([each == kind for each in kinds])) for kind in sorted(set(kinds))]
        ),
        by_entropy=_between(first, entropy, entropy.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist(), "{:.2g}"),
    )


def kind_of(text: str) -> str:
    """A coarse class of a token."""
    bare = text.strip()
    if not bare:
        return "blank"
    if bare.isdigit():
        return "number"
    if not any(letter.isalnum() for letter in bare):
        return "sign"
    return "word" if text[0].isspace() else "part of a word"


def _between(first: Tensor, values: Tensor, edges: Sequence[float], form: str) -> list[AcceptedShare]:
    """One group for the values up to each edge, and one for those above the last. Edges may print alike."""
    group = torch.bucketize(values, torch.tensor(edges))
    names = [*(f"to {form.format(edge)}" for edge in edges), *(f"above {form.format(edge)}" for edge in edges[-1:])]
    return _shares(first, [(name, group == place) for place, name in enumerate(names)])


def _shares(first: Tensor, groups: Sequence[tuple[str, Tensor]]) -> list[AcceptedShare]:
    """The groups that have places, which together are all places."""
    return [
        AcceptedShare(name, int(mask.sum()), float(first[mask].double().mean())) for name, mask in groups if mask.any()
    ]
