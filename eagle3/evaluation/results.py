"""What judging a draft gives: figures over conversations, the lines that people read, and the fields of the JSON files
that reports read. (It imports nothing that decodes, so reports need not.)"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import field
from importlib.metadata import version
from typing import Any, Literal, Self

import numpy as np
from pydantic import TypeAdapter, computed_field
from pydantic.dataclasses import dataclass

from eagle3.console import Say, Warned, aligned, counted
from eagle3.errors import UserError
from eagle3.evaluation.acceptance import Decoding
from eagle3.evaluation.intervals import ratio_intervals
from eagle3.planning.costs import Timing

Verdict = Literal["identical", "tie", "mismatch"]


def as_json(result: Any) -> dict[str, Any]:
    """An object of a class below as a JSON object, with all that follows from its fields."""
    return TypeAdapter(type(result)).dump_python(result, mode="json")


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What is counted of conversations that an engine decoded speculatively and plainly."""

    new_tokens: int  # tokens in the outputs
    verifications: int
    yielded: int  # tokens that the verifications added, before the outputs were cut to length
    accepted: list[int]  # accepted[i]: verifications that accepted all of the drafts 0..i, for each draft position
    plain_tokens: int  # new tokens of plain decoding
    # Seconds of decoding, prefill included:
    seconds_speculative: float = field(compare=False)
    seconds_plain: float = field(compare=False)
    timing: Timing | None = field(default=None, compare=False)  # None if nothing was timed


@dataclass(frozen=True, kw_only=True)
class CountedConversation(Counts):
    """One conversation."""

    verdict: Verdict | None  # how the two outputs compare (see `compare`); None if both are sampled


@dataclass(frozen=True)
class Speed:
    """Output tokens per second of decoding, prefill included, with the draft and without."""

    speculative: float
    plain: float

    @property
    def gain(self) -> float:
        return self.speculative / self.plain


@dataclass(frozen=True, kw_only=True)
class SpeculativeResult(Counts):
    """Sums over conversations."""

    conversations: int
    # Conversations by how their output compares with plain decoding (see `compare`):
    identical: int
    ties: int
    mismatches: int
    compared: bool  # False if sampled: two samples of a distribution cannot be compared token by token
    # Each conversation's share of `yielded`, and of `verifications`, to compare drafts prompt by prompt.
    of_each: list[tuple[int, int]]
    # 95% confidence interval of the acceptance length, (low, high). Intervals are None if only one conversation was
    # verified, because a single one does not show how much they differ.
    interval: tuple[float, float] | None = None
    position_intervals: list[tuple[float, float]] | None = None  # for each position's share

    @classmethod
    def over(cls, decoded: Sequence[CountedConversation], draws: int = 0, **others: Any) -> Self:
        """Sum up the conversations. draws: seed of the bootstrap. others: a subclass's own fields. Raises UserError if
        every conversation ends with its first token, because then nothing was verified."""
        verifications = sum(each.verifications for each in decoded)
        if not verifications:
            raise UserError(
                f"evaluation: the target ends all {len(decoded)} conversations with their first token, so nothing can "
                "be measured; use other conversations, or set evaluation.conversations=0"
            )
        verdicts = [each.verdict for each in decoded]
        counts = np.array([[each.yielded, *each.accepted] for each in decoded])
        intervals = ratio_intervals(counts, np.array([each.verifications for each in decoded]), draws)
        yielded, *accepted = counts.sum(0).tolist()
        return cls(
            conversations=len(decoded),
            new_tokens=sum(each.new_tokens for each in decoded),
            verifications=verifications,
            yielded=yielded,
            accepted=accepted,
            identical=verdicts.count("identical"),
            ties=verdicts.count("tie"),
            mismatches=verdicts.count("mismatch"),
            seconds_speculative=sum(each.seconds_speculative for each in decoded),
            seconds_plain=sum(each.seconds_plain for each in decoded),
            compared=None not in verdicts,
            plain_tokens=sum(each.plain_tokens for each in decoded),
            of_each=[(each.yielded, each.verifications) for each in decoded],
            interval=None if intervals is None else intervals[0].tolist(),
            position_intervals=None if intervals is None else intervals[1:].tolist(),
            timing=Timing.median([each.timing for each in decoded if each.timing]),
            **others,
        )

    @classmethod
    def over_groups(
        cls, groups: Mapping[Any, Sequence[CountedConversation]], key: str, title: str, draws: int, report: Say
    ) -> list[Self]:
        """The figures of each group, with its name in the field `key`. A group in which nothing was verified is left
        out, with a warning to `report` if it has conversations. title: a format for a name in that warning."""
        measured = {name: its for name, its in groups.items() if any(each.verifications for each in its)}
        for name, its in groups.items():
            if its and name not in measured:
                what = f"{title.format(name)}: left out, the target ends all its conversations with their first token"
                report(Warned(f"{what}; use other prompts"))
        return [cls.over(its, draws, **{key: name}) for name, its in measured.items()]

    @computed_field
    @property
    def acceptance_length(self) -> float:
        """Tokens produced per verification: accepted drafts plus the target's own next token (1 = none accepted)."""
        return self.yielded / self.verifications

    @computed_field
    @property
    def mean_acceptance_length(self) -> float:
        """The mean of the conversations' own acceptance lengths, as papers average. Engines count every verification
        once, as `acceptance_length` does, so that a long answer weighs more."""
        lengths = [yielded / verifications for yielded, verifications in self.of_each if verifications]
        return sum(lengths) / len(lengths)

    @computed_field
    @property
    def position_acceptance(self) -> list[float]:
        """Share of verifications that accepted all of the drafts 0..i, for each i."""
        return [count / self.verifications for count in self.accepted]

    @computed_field
    @property
    def conditional_acceptance(self) -> list[float]:
        """Share of verifications accepting drafts 0..i-1 that also accepted draft i, for each i; 0 if none did."""
        return [now / max(1, before) for before, now in itertools.pairwise([self.verifications, *self.accepted])]

    @computed_field
    @property
    def lossless(self) -> bool | None:
        """Whether every output equals plain decoding, ties aside; None if they were not compared."""
        return self.mismatches == 0 if self.compared else None

    @computed_field
    @property
    def speed(self) -> Speed:
        return Speed(self.new_tokens / self.seconds_speculative, self.plain_tokens / self.seconds_plain)

    @property
    def rate(self) -> float:
        """Tokens per second of drafting and verifying, by the times measured, which must be known."""
        return self.acceptance_length / (self.timing.extending + self.timing.proposing + self.timing.verifying)

    @property
    def output_in_a_word(self) -> str:
        """How the output compares with plain decoding, for a table's cell."""
        if not self.compared:
            return "sampled"
        if self.mismatches:
            return f"{self.mismatches} DIFFER"
        return f"{self.ties} tied" if self.ties else "equal"


def tables(kind: str, groups: Mapping[str, SpeculativeResult], *, averages: bool) -> list[str]:
    """Two tables with a row for each group of conversations: acceptance lengths, and shares by position. Beside the
    group's name, a row takes at most 65 columns. averages: whether to show the mean over conversations and the speed"""
    head = [kind, "conv.", "verified", "length", "95% interval", *(["mean", "speed"] if averages else []), "output"]
    lengths = [
        [
            name,
            f"{figures.conversations}",
            f"{figures.verifications}",
            f"{figures.acceptance_length:.2f}",
            " to ".join(f"{end:.2f}" for end in figures.interval or ()) or "-",
            *([f"{figures.mean_acceptance_length:.2f}", f"{figures.speed.gain:.2f}x"] if averages else []),
            figures.output_in_a_word,
        ]
        for name, figures in groups.items()
    ]
    shares = [[name, *(f"{share:.2f}" for share in figures.position_acceptance)] for name, figures in groups.items()]
    positions = [f"{place}" for place in range(1, len(shares[0]))]
    return [*aligned([head, *lengths]), "accepted by draft position", *aligned([[kind, *positions], *shares])]


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How, and of what, a result was obtained."""

    engine: str  # that decoded, and its version
    engine_version: str
    temperature: float  # 0 is greedy
    seed: int
    draft_tokens: int  # per verification
    # As in DraftTree:
    topk: int
    tree_tokens: int
    # Number of keys that the draft's queries see, when judged and in training; None for all.
    window: int | None
    trained_window: int | None
    # What was judged (see `judgement_record`); empty until it is written down.
    draft: str = ""
    draft_digest: str = ""
    target: str = ""
    target_digest: str = ""
    texts: str = ""

    @classmethod
    def of(
        cls, engine: str, decoding: Decoding, trained_window: int | None, topk: int = 1, tree_tokens: int | None = None
    ) -> "Conditions":
        """engine: also the name of its package. tree_tokens: default: those of a chain."""
        return cls(
            engine=engine,
            engine_version=version(engine),
            temperature=decoding.temperature,
            seed=decoding.seed,
            draft_tokens=decoding.draft_tokens,
            topk=topk,
            tree_tokens=tree_tokens or decoding.draft_tokens + 1,
            window=decoding.window or trained_window,
            trained_window=trained_window,
        )

    @property
    def rule(self) -> str:
        """How tokens were chosen, in words."""
        return f"at temperature {self.temperature:g}" if self.temperature else "greedy"

    @property
    def tree(self) -> str | None:
        """The trees that were drafted, in words; None for chains."""
        return f"trees of {self.tree_tokens} tokens, {self.topk} branches a node" if self.topk > 1 else None

    @property
    def other_window(self) -> str:
        """The window in words, if it is not the one that the draft was trained with."""
        if self.window == self.trained_window:
            return ""
        return f"with a window of {self.window:,} keys" if self.window else "with full attention"

    @property
    def in_words(self) -> str:
        drafted = self.tree or f"{self.draft_tokens} drafted tokens"
        return ", ".join(filter(None, (f"{self.engine} {self.engine_version}", drafted, self.rule, self.other_window)))

    def window_lines(self) -> list[str]:
        """The windows in words; no line if both are full attention."""
        if self.window is self.trained_window is None:
            return []
        judged, trained = (
            "full attention" if keys is None else f"a window of {keys:,} keys"
            for keys in (self.window, self.trained_window)
        )
        return [f"judged with {judged}" + (", as trained" if judged == trained else f"; trained with {trained}")]


@dataclass(frozen=True, kw_only=True)
class SetAcceptance(SpeculativeResult):
    """The figures of one prompt set."""

    name: str


def over_sets(
    sizes: Mapping[str, int], decoded: Sequence[CountedConversation], seed: int, report: Say
) -> list[SetAcceptance]:
    """The figures of each prompt set. sizes: number of conversations of each, by its name, in the order of `decoded`"""
    rest = iter(decoded)
    groups = {name: [*itertools.islice(rest, size)] for name, size in sizes.items()}
    return SetAcceptance.over_groups(groups, "name", "prompt set {}", seed, report)


@dataclass(frozen=True, kw_only=True)
class Judgement(Conditions, SpeculativeResult):
    """The result of judging an exported draft: its figures, and what evaluation.json has beside them."""

    # A fresh draft of the same shape, on the first few conversations; None if the engine does not judge one.
    untrained: SpeculativeResult | None = None
    # See `example_texts`; empty if the engine does not say which drafts it accepted.
    examples: list[dict[str, Any]] = field(default_factory=list)
    # Whether decoding with and without the draft took turns, so that their speeds can be compared on a busy machine.
    same_load: bool = True
    sets: list[SetAcceptance] = field(default_factory=list)  # empty for held-out conversations

    def lines(self) -> list[str]:
        """The result in words, line by line."""
        speed = self.speed
        positions = " ".join(f"{share:.2f}" for share in self.position_acceptance)
        excess = self.yielded + self.conversations - self.new_tokens  # each prefill gives one token
        correction = f", less {excess:,} beyond the answers' length" if excess else ""
        return [
            f"acceptance length {self.acceptance_length:.2f} (tokens per verification: accepted drafts and the "
            "target's own)",
            f"mean over conversations {self.mean_acceptance_length:.2f} (as papers average)",
            *self.window_lines(),
            *([f"untrained draft: acceptance length {self.untrained.acceptance_length:.2f}"] if self.untrained else []),
            f"accepted by draft position 1..{self.draft_tokens}: {positions}",
            self._comparison(),
            f"{self.yielded:,} tokens from {counted(self.verifications, 'verification')}, and "
            f"{self.conversations:,} from the prefills{correction}: {self.new_tokens:,} put out",
            f"{speed.speculative:.1f} tokens/s, {speed.plain:.1f} without the draft: {speed.gain:.2f} times as fast "
            f"(by {self.engine} {self.engine_version}, one conversation at a time"
            f"{'' if self.same_load else '; not measured under the same load'})",
        ]

    def table(self) -> list[str]:
        """The figures of each prompt set, line by line; empty if there are no two sets."""
        if len(self.sets) < 2:
            return []
        return [
            "acceptance length by prompt set (mean: over conversations)",
            *tables("set", {each.name: each for each in self.sets}, averages=True),
        ]

    def _comparison(self) -> str:
        if not self.compared:
            return (
                f"sampled {self.rule}, seed {self.seed}: not compared with plain sampling, which is equal in "
                "distribution only"
            )
        ties = f", {self.ties} differ where the target's best logits tie within rounding" if self.ties else ""
        return (
            f"output equal to plain greedy decoding in {self.identical} of {self.conversations} conversations"
            f"{ties}{'' if self.lossless else f', {self.mismatches} DIFFER'}"
        )
