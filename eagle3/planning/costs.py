"""What forwards cost, fitted to measured times.

The seconds of a forward are taken to be a sum of non-negative parts. With N tokens in all (batch times tokens of each
conversation) after a context of C tokens, these are: a constant (weights that every forward reads, kernels that it
launches), one that grows with log2(1 + N) (experts that some token chooses), N (products), batch x C (keys that are
read), and N x C (query-key pairs).
"""

import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np

PARTS = ("fixed", "experts", "token", "key", "pair")
LAST_DIGITS = 1e-12  # of a fit, below which a part does not count as negative


class Forward(NamedTuple):
    """The shape of one forward."""

    batch: int
    tokens: int  # of each conversation
    context: float  # tokens before them; under a window, those that are seen

    def parts(self) -> list[float]:
        """How often each of PARTS is paid."""
        total = self.batch * self.tokens
        return [1.0, float(np.log2(1 + total)), total, self.batch * self.context, total * self.context]


class ForwardCost(NamedTuple):
    """Seconds of each part of a forward."""

    fixed: float = 0.0
    experts: float = 0.0
    token: float = 0.0
    key: float = 0.0
    pair: float = 0.0

    def seconds(self, forward: Forward) -> float:
        return float(np.dot(self, forward.parts()))


def fit_cost(forwards: Sequence[Forward], seconds: Sequence[float], parts: Sequence[str] = PARTS) -> ForwardCost:
    """The cost that fits measured seconds with the least squares of relative errors. parts: those that may differ from
    zero."""
    chosen = [PARTS.index(part) for part in parts]
    table, values = np.array([forward.parts() for forward in forwards])[:, chosen], np.array(seconds)
    fitted = non_negative(table / values[:, None], np.ones(len(values)))
    return ForwardCost(**dict(zip(parts, fitted.tolist(), strict=True)))


def non_negative(table: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least |table @ x - values|^2. table: [N, M], with a small M, as all 2^M choices of columns
    are tried."""
    scale = np.abs(table).max(0)
    scale[scale == 0] = 1.0
    best, least = np.zeros(table.shape[1]), float(values @ values)
    for count in range(1, table.shape[1] + 1):
        for columns in map(list, itertools.combinations(range(table.shape[1]), count)):
            solution, *_ = np.linalg.lstsq(table[:, columns] / scale[columns], values, rcond=None)
            rest = values - table[:, columns] / scale[columns] @ solution
            if (solution > -LAST_DIGITS).all() and rest @ rest < least - LAST_DIGITS:
                best, least = np.zeros(table.shape[1]), float(rest @ rest)
                best[columns] = solution.clip(min=0) / scale[columns]
    return best


@dataclass(frozen=True)
class Timing:
    """Mean seconds of conversations decoded one at a time, with and without a draft."""

    context: float  # mean number of tokens before a round
    drafts: float  # in a round
    # Of a round: the draft reads what was verified, proposes a chain, and the target verifies it.
    extending: float
    proposing: float
    verifying: float
    plain: float  # of a token without the draft

    @classmethod
    def median(cls, timings: Sequence["Timing"]) -> "Timing | None":
        """The median of each number over conversations with equally long chains, since the first one may have paid for
        a start; None if there are none."""
        if not timings:
            return None
        return cls(*np.median([astuple(each) for each in timings], axis=0).tolist())


class MeasuredCosts:
    """Costs of one conversation at a time, fitted to measured times (see `Costs` in payoff.py). What a larger batch
    costs is not known, and asking for it fails an assertion.

    window: the draft's, which bounds the keys that it reads; None for all
    """

    def __init__(self, timings: Sequence[Timing], window: int | None) -> None:
        self.window = window
        verified = [Forward(1, each.drafts + 1, each.context) for each in timings]
        single = [Forward(1, 1, each.context) for each in timings]
        self.target = fit_cost(
            [*verified, *single],
            [*(each.verifying for each in timings), *(each.plain for each in timings)],
            ("fixed", "token", "key", "pair"),
        )
        chains = [self._chain(each.drafts, each.context) for each in timings]
        self.chain = fit_cost(chains, [each.proposing for each in timings], ("token", "pair"))
        self.extending = sum(each.extending for each in timings) / len(timings)

    def verifying(self, batch: int, tokens: int, context: int) -> float:
        assert batch == 1
        return self.target.seconds(Forward(batch, tokens, context))

    def drafting(self, batch: int, drafts: int, context: int) -> float:
        assert batch == 1
        return self.extending + self.chain.seconds(self._chain(drafts, context))

    def _chain(self, drafts: int, context: float) -> Forward:
        """A chain is as many forwards of one token, each of which reads the keys."""
        return Forward(1, drafts, seen(context, self.window))


def seen(context: float, window: int | None) -> float:
    """Tokens that a query sees after `context` of them; window: the most, None for all."""
    return context if window is None else min(context, window)
