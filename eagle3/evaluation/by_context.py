"""Acceptance by context length (tokens before an answer): figures with confidence intervals, and tables of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from eagle3.console import Say, aligned
from eagle3.errors import UserError
from eagle3.evaluation.acceptance import Decoding
from eagle3.evaluation.drafter import FULL, Window
from eagle3.evaluation.speculative import CountedConversation, SpeculativeResult
from eagle3.planning.costs import Timing
from eagle3.planning.payoff import PayOff
from eagle3.planning.policy import policy, schedule, serving_lines

CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class ContextAcceptance(SpeculativeResult):
    """The figures for prompts with more than context / 2 and at most `context` tokens."""

    context: int
    # 95% confidence interval of the acceptance length, [low, high]. Intervals are None if only one conversation was
    # verified, because a single one does not show how much they differ.
    interval: list[float] | None
    position_intervals: list[list[float]] | None  # for each position's share
    timing: Timing | None = field(default=None, compare=False)  # None if nothing was timed

    @property
    def rate(self) -> float | None:
        """Tokens per second of drafting and verifying, by the times measured; None if nothing was timed."""
        if self.timing is None:
            return None
        return self.acceptance_length / (self.timing.extending + self.timing.proposing + self.timing.verifying)

    @classmethod
    def over(cls, context: int, decoded: Sequence[CountedConversation], seed: int) -> "ContextAcceptance":
        """Sum up the conversations of one context. seed: for the bootstrap. Raises UserError like
        SpeculativeResult.over."""
        counts = np.array([[each.yielded, *each.accepted] for each in decoded])
        intervals = ratio_intervals(counts, np.array([each.verifications for each in decoded]), seed)
        return cls(
            **vars(SpeculativeResult.over(decoded)),
            context=context,
            interval=None if intervals is None else intervals[0].tolist(),
            position_intervals=None if intervals is None else intervals[1:].tolist(),
            timing=Timing.median([each.timing for each in decoded if each.timing]),
        )


class DecodedContext(NamedTuple):
    """The conversations of one context."""

    context: int
    decoded: Sequence[CountedConversation]
    missing: str = "no text is of that length"  # why there are none, if there are none


class BestRate(NamedTuple):
    """Tokens per second at one context, by the times measured."""

    context: int
    drafts: int  # the number of draft tokens that promised most; 0 if it is best to decode without a draft
    best: float  # with that number
    fixed: float  # with the number of draft tokens of the whole judgement
    plain: float  # without a draft


@dataclass(frozen=True)
class ContextJudgement:
    """Acceptance of one draft by context length."""

    contexts: list[ContextAcceptance]
    left_out: list[int]  # contexts for which nothing was measured
    engine: str  # the engine that decoded, and its version
    version: str
    decoding: Decoding
    # As in DraftTree:
    topk: int
    tree_tokens: int
    window: Window = FULL  # the draft's
    pay_offs: Sequence[PayOff] = field(default=(), compare=False)  # by measured costs and by estimated ones
    best: Sequence[BestRate] = field(default=(), compare=False)  # if it was decoded so, too
    other_windows: Sequence["ContextJudgement"] = ()  # the same draft and prompts, with other windows
    refusal: str = ""  # why SGLang does not serve the draft; empty if it does

    @property
    def shares(self) -> dict[int, list[float]]:
        """For each context, the share of verifications that accepted all of the drafts 0..i, for each i."""
        return {each.context: each.position_acceptance for each in self.contexts}

    @classmethod
    def over(
        cls, contexts: Iterable[DecodedContext], engine: str, decoding: Decoding, report: Say, **others
    ) -> "ContextJudgement":
        """Sum up each context. One in which nothing was verified is left out, with a line to `report`. engine: also the
        name of its package. others: the fields from topk on. Raises UserError if no context is left."""
        measured, left_out = [], []
        for context, decoded, missing in contexts:
            if any(each.verifications for each in decoded):
                measured.append(ContextAcceptance.over(context, decoded, decoding.sampling.seed))
                continue
            reason = "the target ends all with their first token" if decoded else missing
            report(f"context {context:,}: left out, {reason}")
            left_out.append(context)
        if not measured:
            raise UserError(
                "--by-context: nothing could be measured, see above; use other conversations, or shorter --contexts"
            )
        return cls(measured, left_out, engine, version(engine), decoding, **others)

    @property
    def estimate(self) -> PayOff | None:
        """The pay-off by a data sheet, which knows batches."""
        return next((each for each in self.pay_offs if each.is_estimated), None)

    @property
    def lossless(self) -> bool | None:
        """Whether every output equals plain decoding, ties aside; None if they were not compared."""
        judged = [each for judgement in (self, *self.other_windows) for each in judgement.contexts]
        return not any(each.mismatches for each in judged) if all(each.compared for each in judged) else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "engine_version": self.version,
            **asdict(self.decoding.sampling),
            "draft_tokens": self.decoding.draft_tokens,
            "new_tokens": self.decoding.new_tokens,
            "topk": self.topk,
            "tree_tokens": self.tree_tokens,
            **self.window._asdict(),
            "contexts": [each.as_dict() for each in self.contexts],
            "left_out": self.left_out,
            "pay_off": [each.as_dict() for each in self.pay_offs],
            "draft_tokens_from_batch": self.estimate and schedule(policy(self.estimate.cells)),
            "best": [each._asdict() for each in self.best],
            "other_windows": [each.as_dict() for each in self.other_windows],
        }

    def lines(self) -> list[str]:
        """Tables, line by line: acceptance lengths, and shares by position (at most 60 columns each, up to 10 draft
        positions); what the draft is worth; and all of it again for other windows."""
        lengths = [
            [
                f"{each.context:,}",
                f"{each.conversations}",
                f"{each.verifications}",
                f"{each.acceptance_length:.2f}",
                " to ".join(f"{end:.2f}" for end in each.interval or ()) or "-",
                output_in_a_word(each),
            ]
            for each in self.contexts
        ]
        shares = [
            [f"{each.context:,}", *(f"{share:.2f}" for share in each.position_acceptance)] for each in self.contexts
        ]
        sampling = self.decoding.sampling
        rule = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}"
        return [
            f"acceptance length by context ({rule}, {self.decoding.new_tokens} new tokens)",
            *([f"trees of {self.tree_tokens} tokens, {self.topk} branches a node"] if self.topk > 1 else []),
            *self.window.lines(),
            *aligned([["context", "conv.", "verified", "length", "95% interval", "output"], *lengths]),
            "accepted by draft position",
            *aligned([["context", *(f"{place + 1}" for place in range(self.decoding.draft_tokens))], *shares]),
            *(line for each in self.pay_offs for line in each.lines()),
            *(serving_lines(self.estimate, self.window.window, self.refusal) if self.estimate else []),
            *(self._best_lines() if self.best else []),
            *(line for each in self.other_windows for line in each.lines()),
        ]

    def _best_lines(self) -> list[str]:
        head = ["context", "draft tokens", "best", f"with {self.decoding.draft_tokens}", "without a draft"]
        rows = [
            [f"{context:,}", f"{drafts or 'none'}", *(f"{rate:.1f}" for rate in rates)]
            for context, drafts, *rates in self.best
        ]
        return [f"tokens/s with the best number of draft tokens, {self.pay_offs[0].source}", *aligned([head, *rows])]


def ratio_intervals(counts: np.ndarray, verifications: np.ndarray, seed: int) -> np.ndarray | None:
    """95% confidence intervals [M, 2] of the M ratios sum(counts) / sum(verifications).

    counts: [C, M]
    verifications: [C]

    The bootstrap resamples the C conversations, because the verifications of one conversation are not independent. With
    few conversations, its plain percentiles are too narrow, so they are moved outwards, as Student's t and the factor
    sqrt(C / (C - 1)) require (the expanded percentile interval of Hesterberg 2015, arXiv:1411.5279, section 4.3). In
    tests/evaluation/test_by_context.py, these intervals contain the truth in 94 of 100 cases with 24 conversations, and
    in 91 with 8. With two or three, an interval is only the range that these conversations span, and contains the truth
    less often.

    Conversations without a verification are left out. The result is None if fewer than two remain.
    """
    valid = verifications > 0
    counts, verifications = counts[valid], verifications[valid]
    ends = _interval(lambda times: (times @ counts) / (times @ verifications)[:, None], len(verifications), seed)
    return None if ends is None else ends.T


def gain_interval(before: np.ndarray, after: np.ndarray, seed: int) -> tuple[float, float] | None:
    """The same kind of interval for a difference of two ratios over the same C conversations: before and after are
    [C, 2], of count and number. Conversations that have no number in one of them are left out."""
    valid = (before[:, 1] > 0) & (after[:, 1] > 0)

    def gain(times: np.ndarray) -> np.ndarray:
        first, second = (times @ counts[valid] for counts in (before, after))
        return second[:, 0] / second[:, 1] - first[:, 0] / first[:, 1]

    ends = _interval(gain, int(valid.sum()), seed)
    return None if ends is None else (float(ends[0]), float(ends[1]))


def _interval(of: Callable[[np.ndarray], np.ndarray], conversations: int, seed: int) -> np.ndarray | None:
    """The interval's ends [2, ...] for numbers that depend on how often each conversation is drawn. None if there are
    fewer than two conversations.

    of: computes them [resamples, ...] from how often each resample draws each conversation [resamples, C]
    """
    if conversations < 2:
        return None
    times = np.random.default_rng(seed).multinomial(
        conversations, np.full(conversations, 1 / conversations), size=RESAMPLES
    )
    reach = (conversations / (conversations - 1)) ** 0.5 * _student_quantile(conversations - 1)
    tail = NormalDist().cdf(-reach)
    return np.quantile(of(times), [tail, 1 - tail], axis=0)


def _student_quantile(freedom: int) -> float:
    """Student's t at (1 + CONFIDENCE) / 2, by Abramowitz and Stegun 26.7.5: within 2% from 3 degrees of freedom on.
    With fewer, the value is too small, but large enough for the interval to be the resamples' whole range anyway."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def output_in_a_word(figures: SpeculativeResult) -> str:
    """How the output compares with plain decoding, for a table's cell."""
    if not figures.compared:
        return "sampled"
    if figures.mismatches:
        return f"{figures.mismatches} DIFFER"
    return f"{figures.ties} tied" if figures.ties else "equal"
