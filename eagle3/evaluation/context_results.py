"""What judging a draft by context gives: figures for each context, what the draft is worth there, and the fields of
by_context.json."""

from collections.abc import Mapping, Sequence
from dataclasses import field

from pydantic import computed_field
from pydantic.dataclasses import dataclass

from eagle3.console import Say, aligned
from eagle3.errors import UserError
from eagle3.evaluation.results import Conditions, CountedConversation, SpeculativeResult, tables
from eagle3.planning.payoff import PayOff, schedule, serving_lines


@dataclass(frozen=True, kw_only=True)
class ContextAcceptance(SpeculativeResult):
    """The figures for prompts with more than context / 2 and at most `context` tokens."""

    context: int


@dataclass(frozen=True)
class BestRate:
    """Tokens per second at one context, by the times measured."""

    context: int
    drafts: int  # the number of draft tokens that promised most; 0 if it is best to decode without a draft
    best: float  # with that number
    fixed: float  # with the number of draft tokens of the whole judgement
    plain: float  # without a draft


@dataclass(frozen=True, kw_only=True)
class ContextJudgement(Conditions):
    """Acceptance of one draft by context length (tokens before an answer): the fields of by_context.json."""

    new_tokens: int  # per answer
    contexts: list[ContextAcceptance]
    left_out: list[int]  # contexts for which nothing was measured
    pay_off: list[PayOff] = field(default_factory=list, compare=False)  # by measured costs and by estimated ones
    best: list[BestRate] = field(default_factory=list, compare=False)  # if it was decoded so, too
    # The same draft and prompts, with other windows.
    other_windows: list["ContextJudgement"] = field(default_factory=list)
    refusal: str = ""  # why SGLang does not serve the draft; empty if it does

    @classmethod
    def over(
        cls, decoded: Mapping[int, Sequence[CountedConversation]], conditions: Conditions, new_tokens: int, report: Say
    ) -> "ContextJudgement":
        """Sum up the conversations of each context, as `over_groups` does. Raises UserError if no context is left."""
        measured = ContextAcceptance.over_groups(decoded, "context", "context {:,}", conditions.seed, report)
        if not measured:
            raise UserError(
                "--by-context: nothing could be measured, see above; use other conversations, or shorter --contexts"
            )
        left_out = sorted(decoded.keys() - {each.context for each in measured})
        return cls(**vars(conditions), new_tokens=new_tokens, contexts=measured, left_out=left_out)

    @property
    def shares(self) -> dict[int, list[float]]:
        """For each context, the share of verifications that accepted all of the drafts 0..i, for each i."""
        return {each.context: each.position_acceptance for each in self.contexts}

    @property
    def estimate(self) -> PayOff | None:
        """The pay-off by a data sheet, which knows batches."""
        return next((each for each in self.pay_off if each.is_estimated), None)

    @computed_field
    @property
    def draft_tokens_from_batch(self) -> dict[int, int] | None:
        """What engines are to be told (see `schedule`); None without an estimate."""
        return self.estimate and schedule(self.estimate.tiers)

    @property
    def windows(self) -> list["ContextJudgement"]:
        """This judgement, and those with other windows."""
        return [self, *self.other_windows]

    @property
    def lossless(self) -> bool | None:
        """Whether every output equals plain decoding, ties aside; None if they were not compared."""
        judged = [each for judgement in self.windows for each in judgement.contexts]
        return not any(each.mismatches for each in judged) if all(each.compared for each in judged) else None

    def lines(self) -> list[str]:
        """Tables, line by line: acceptance lengths, and shares by position (at most 60 columns each, up to 10 draft
        positions); what the draft is worth; and all of it again for other windows."""
        return [
            f"acceptance length by context ({self.rule}, {self.new_tokens} new tokens)",
            *([self.tree] if self.tree else []),
            *self.window_lines(),
            *tables("context", {f"{each.context:,}": each for each in self.contexts}, averages=False),
            *(line for each in self.pay_off for line in each.lines()),
            *(serving_lines(self.estimate, self.window, self.refusal) if self.estimate else []),
            *(self._best_lines() if self.best else []),
            *(line for each in self.other_windows for line in each.lines()),
        ]

    def _best_lines(self) -> list[str]:
        head = ["context", "draft tokens", "best", f"with {self.draft_tokens}", "without a draft"]
        rows = [
            [f"{each.context:,}", f"{each.drafts or 'none'}"]
            + [f"{rate:.1f}" for rate in (each.best, each.fixed, each.plain)]
            for each in self.best
        ]
        return [f"tokens/s with the best number of draft tokens, {self.pay_off[0].source}", *aligned([head, *rows])]
