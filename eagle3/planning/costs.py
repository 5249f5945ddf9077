"""What forwards cost, fitted to measured times.

The seconds of a target's forward over N tokens after a context of C tokens are taken to be a sum of four non-negative
parts: a constant (weights that are read, kernels that are launched), and what grows with N (products), C (keys that
are read) and N x C (query-key pairs). A draft's chain is N forwards of one token each, so all of it grows with N.
"""

import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

LAST_DIGITS = 1e-12  # of a fit, below which a part does not count as negative


def fit(table: np.ndarray, seconds: Sequence[float]) -> np.ndarray:
    """The x >= 0 for which table @ x has the least squares of relative errors."""
    values = np.array(seconds)
    return non_negative(table / values[:, None], np.ones(len(values)))


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
        forwards = [_forward(each.drafts + 1, each.context) for each in timings]
        forwards += [_forward(1, each.context) for each in timings]
        self.target = fit(
            np.array(forwards), [*(each.verifying for each in timings), *(each.plain for each in timings)]
        )
        chains = np.array([self._chain(each.drafts, each.context) for each in timings])
        self.chain = fit(chains, [each.proposing for each in timings])
        self.extending = sum(each.extending for each in timings) / len(timings)

    def verifying(self, batch: int, tokens: int, context: int) -> float:
        assert batch == 1
        return float(self.target @ _forward(tokens, context))

    def drafting(self, batch: int, drafts: int, context: int) -> float:
        assert batch == 1
        return self.extending + float(self.chain @ self._chain(drafts, context))

    def _chain(self, drafts: float, context: float) -> list[float]:
        """How often each part of a chain is paid."""
        return [drafts, drafts * seen(context, self.window)]


def _forward(tokens: float, context: float) -> list[float]:
    """How often each part of a target's forward is paid."""
    return [1.0, tokens, context, tokens * context]


def seen(context: float, window: int | None) -> float:
    """Tokens that a query sees after `context` of them; window: the most, None for all."""
    return context if window is None else min(context, window)
