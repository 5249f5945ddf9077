"""Whether a draft pays: from its acceptance and from what forwards cost, the speed-up by context, batch and number of
draft tokens; and what to serve it with.

With K draft tokens, a verification and the K forwards of the draft before it give L tokens; without a draft, each token
takes one forward of the target. So the speed-up is L / B, where B = (drafting + verifying) / plain is the break-even
acceptance length: the L below which drafting loses.

No engine chooses the number of draft tokens by context. vLLM 0.33.0 reads ranges of batches, each with its number
(vllm/v1/spec_decode/dynamic/utils.py); SGLang 0.5.23 a file with candidates from a batch on, which is one here
(srt/speculative/adaptive_spec_params.py). In both, a number of 0 decodes without the draft.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple, Protocol

from pydantic import computed_field
from pydantic.dataclasses import dataclass

from eagle3.console import aligned, counted
from eagle3.targets.sglang.version import speculative_flags

ADAPTIVE = "adaptive.json"  # the file that SGLang reads the numbers of draft tokens from
ESTIMATED = "estimated"  # how the source of costs begins that were not measured


class Costs(Protocol):
    """Seconds that a batch of conversations takes, all after the same number of tokens (`context`)."""

    def verifying(self, batch: int, tokens: int, context: int) -> float:
        """One forward of the target over so many tokens of each conversation; over 1, as without a draft."""

    def drafting(self, batch: int, drafts: int, context: int) -> float:
        """A chain of `drafts` tokens of each conversation."""


@dataclass(frozen=True)
class Cell:
    """What a number of draft tokens is worth at one context and batch."""

    context: int
    batch: int
    drafts: int  # K
    length: float  # acceptance length L: accepted drafts and the target's own token, per verification
    break_even: float  # B

    @computed_field
    @property
    def speed_up(self) -> float:
        """Tokens per second with the draft, relative to without it."""
        return self.length / self.break_even


def surface(
    costs: Costs,
    shares: Mapping[int, Sequence[float]],
    batches: Sequence[int],
    fits: Callable[[int, int], bool] = lambda batch, context: True,
) -> list[Cell]:
    """A cell for each context, batch and number of draft tokens, in this order.

    shares: for each context and each i, the share of verifications that accept all of the drafts 0..i; they set the
        numbers of draft tokens
    fits: whether memory holds such a batch after such a context; others have no cell
    """
    return [
        Cell(
            context,
            batch,
            drafts,
            1 + sum(shares[context][:drafts]),
            (costs.drafting(batch, drafts, context) + costs.verifying(batch, drafts + 1, context))
            / costs.verifying(batch, 1, context),
        )
        for context in sorted(shares)
        for batch in batches
        if fits(batch, context)
        for drafts in range(1, len(shares[context]) + 1)
    ]


class ContextRange(NamedTuple):
    """A range of contexts in tokens; None for an end that is beyond the contexts judged."""

    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None:
            return "at all judged contexts" if self.high is None else f"up to about {self.high:,.0f} tokens"
        return f"from about {self.low:,.0f} tokens" + ("" if self.high is None else f" to about {self.high:,.0f}")


def paying_ranges(cells: Sequence[Cell]) -> list[ContextRange]:
    """The contexts with a speed-up above 1, of cells with ascending contexts."""
    ranges, low = [], None
    for before, cell in pairwise(cells):
        if (before.speed_up > 1) == (cell.speed_up > 1):
            continue
        part = (before.speed_up - 1) / (before.speed_up - cell.speed_up)
        crossing = before.context * (cell.context / before.context) ** part
        if cell.speed_up > 1:
            low = crossing
        else:
            ranges.append(ContextRange(low, crossing))
    return [*ranges, ContextRange(low, None)] if cells[-1].speed_up > 1 else ranges


def _in_words(ranges: Sequence[ContextRange]) -> str:
    return " and ".join(map(str, ranges)) or "nowhere"


class Tier(NamedTuple):
    """What to draft with in batches of `batch` conversations and more, up to the next tier's."""

    batch: int
    drafts: int  # the number of draft tokens with the highest mean speed-up over all contexts
    speed_up: float  # that mean
    paying: list[ContextRange]  # the contexts at which this number pays
    longest: int  # the longest context after which memory holds such a batch

    @property
    def pays(self) -> bool:
        return self.speed_up > 1


@dataclass(frozen=True)
class PayOff:
    """What a draft is worth by context, batch and number of draft tokens."""

    source: str  # where the costs come from, in words
    cells: list[Cell]  # as `surface` orders them

    @property
    def is_estimated(self) -> bool:
        return self.source.startswith(ESTIMATED)

    @computed_field
    @property
    def best(self) -> list[Cell]:
        """For each context and batch, ascending, the cell with the highest speed-up, which may be below 1."""
        best: dict[tuple[int, int], Cell] = {}
        for cell in sorted(self.cells, key=lambda each: -each.speed_up):
            best.setdefault((cell.context, cell.batch), cell)
        return [best[place] for place in sorted(best)]

    @computed_field
    @property
    def paying(self) -> dict[int, list[ContextRange]]:
        """For each batch, ascending, the contexts at which drafting pays with the best number of draft tokens; none if
        it pays nowhere. Between two of them, the best speed-up is taken to be linear in the logarithm of the
        context."""
        best = self.best
        batches = sorted({cell.batch for cell in best})
        return {batch: paying_ranges([cell for cell in best if cell.batch == batch]) for batch in batches}

    @cached_property
    def tiers(self) -> list[Tier]:
        """What to draft with, for each batch, ascending."""
        tiers: dict[int, Tier] = {}
        for batch, drafts in sorted({(cell.batch, cell.drafts) for cell in self.cells}):
            its = [cell for cell in self.cells if (cell.batch, cell.drafts) == (batch, drafts)]
            tier = Tier(batch, drafts, fmean(cell.speed_up for cell in its), paying_ranges(its), its[-1].context)
            tiers[batch] = max(tiers.get(batch, tier), tier, key=lambda each: each.speed_up)
        return [*tiers.values()]

    def speed_up_table(self) -> list[list[str]]:
        """The best speed-up with its number of draft tokens, by context and batch."""
        return by_context_and_batch(self.best, lambda cell: f"{cell.speed_up:.2f} ({cell.drafts})")

    def verdict(self) -> str:
        """Where drafting pays, in words."""
        batches: dict[str, list[str]] = {}
        for batch, ranges in self.paying.items():
            batches.setdefault(_in_words(ranges), []).append(str(batch))
        return "drafting pays " + ", ".join(f"{where} (batch {', '.join(its)})" for where, its in batches.items())

    def lines(self) -> list[str]:
        most = max(cell.drafts for cell in self.cells)
        longest = [cell for cell in self.cells if cell.drafts == most]
        return [
            f"speed-up with the best number of draft tokens (in brackets), {self.source}",
            *aligned(self.speed_up_table()),
            f"break-even acceptance length of {counted(most, 'draft token')}",
            *aligned(by_context_and_batch(longest, lambda cell: f"{cell.break_even:.2f}")),
            self.verdict(),
        ]


def by_context_and_batch(cells: Sequence[Cell], tell: Callable[[Cell], str]) -> list[list[str]]:
    """A table with a head, a row for each context and a column for each batch; "-" where there is no cell."""
    told = {(cell.context, cell.batch): tell(cell) for cell in cells}
    contexts, batches = (sorted(set(column)) for column in zip(*told, strict=True))
    head = ["context", *(f"batch {batch}" for batch in batches)]
    return [head, *([f"{context:,}", *(told.get((context, batch), "-") for batch in batches)] for context in contexts)]


def schedule(tiers: Sequence[Tier]) -> dict[int, int]:
    """From which batches on there is another number of draft tokens, and which: 0 where drafting does not pay."""
    drafts = [(0, None), *((tier.batch, tier.drafts if tier.pays else 0) for tier in tiers)]
    return {batch: its for (_, before), (batch, its) in pairwise(drafts) if its != before}


def vllm_flags(draft: str, drafts: Mapping[int, int]) -> list[str]:
    """vLLM's flags for a schedule."""
    config = {"method": "eagle3", "model": draft, "num_speculative_tokens": max(drafts.values())}
    if len(drafts) > 1:
        ends = [*(after - 1 for _, after in pairwise(drafts)), max(drafts)]  # the last number holds beyond it, too
        ranges = [[batch, end, its] for (batch, its), end in zip(drafts.items(), ends, strict=True)]
        config["num_speculative_tokens_per_batch_size"] = ranges
    return ["--speculative-config", json.dumps(config)]


def sglang_flags(draft: str, drafts: Mapping[int, int], window: int | None) -> tuple[list[str], str]:
    """SGLang's flags for a schedule, and the content of the file ADAPTIVE that they name; empty if they name none.
    window: as for speculative_flags."""
    most, slots = max(drafts.values()), {str(batch): {"candidate_steps": [its]} for batch, its in drafts.items()}
    adaptive = ["--speculative-adaptive", "--speculative-adaptive-config", ADAPTIVE] if len(slots) > 1 else []
    return [*speculative_flags(draft, most, 1, most + 1, window), *adaptive], json.dumps(slots) if adaptive else ""


def tier_table(tiers: Sequence[Tier]) -> tuple[list[str], list[list[str]]]:
    """The head of a table, and a row for each tier."""
    upper = [f" to {after.batch - 1}" if after.batch > tier.batch + 1 else "" for tier, after in pairwise(tiers)]
    longest = max(tier.longest for tier in tiers)
    return ["batch", "draft tokens", "mean speed-up", "pays"], [
        [
            f"{tier.batch}{end}",
            str(tier.drafts) if tier.pays else "none",
            f"{tier.speed_up:.2f}" + ("" if tier.pays else f" with {tier.drafts}"),
            _in_words(tier.paying)
            + (f" (of up to {tier.longest:,} tokens, which fit)" if tier.longest < longest else ""),
        ]
        for tier, end in zip(tiers, [*upper, " and more"], strict=True)
    ]


def serving_lines(pay_off: PayOff, window: int | None, refusal: str) -> list[str]:
    """What an operator needs: the table, and flags for both engines with DRAFT for the draft's folder. refusal: why
    SGLang does not serve the draft; empty if it does."""
    tiers = pay_off.tiers
    drafts, (head, rows) = schedule(tiers), tier_table(tiers)
    sglang, file = sglang_flags("DRAFT", drafts, window)
    flags = [
        f"vLLM: {shlex.join(vllm_flags('DRAFT', drafts))}",
        f"SGLang: {refusal or shlex.join(sglang)}",
        *([f"{ADAPTIVE}: {file}"] if file and not refusal else []),
    ]
    return [
        f"draft tokens by batch, one number for all these contexts, {pay_off.source}",
        *aligned([head, *rows]),
        *(flags if any(tier.pays for tier in tiers) else ["serve the target without the draft"]),
    ]
