"""Which rows of a document teach, whom, and which rows a draft reads.

Row t of a draft has the target's states at t and reads the token after it; in TTT step k it proposes the token t+k+2,
and the target's prediction at row r = t+k+1 teaches it. A rule says, of each row r, whether it teaches, and in which
row the first chain begins that it may teach (docs/exactness.md).
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self, assert_never, get_args

import torch
from torch import Tensor

# served: the rows that an engine uses. A chain begins at a row whose next token is an answer's, and proposes that
# answer's tokens. reference: the original code's, which count if row t+k is in an answer.
Rule = Literal["served", "reference"]
RULES: tuple[Rule, ...] = get_args(Rule)


class Taught(NamedTuple):
    """The rows of a document that teach, ascending, [M] int64."""

    teacher: Tensor
    first: Tensor  # for each, the first row of a chain that it teaches; at most teacher - 1


def taught(mask: Tensor, rule: Rule) -> Taught:
    """The rows that teach in a document. mask: [T] bool, the tokens of its answers."""
    rows = torch.arange(len(mask))
    match rule:
        case "reference":
            teacher = rows[:-1][mask[:-1]] + 1
            return Taught(teacher, torch.zeros_like(teacher))
        case "served":
            begins = mask & ~torch.nn.functional.pad(mask[:-1], (1, 0))
            before = torch.where(begins, rows - 1, -1).cummax(0).values.clamp(min=0)  # the row before this answer
            teacher = (mask[:-1] & mask[1:] & (rows > before)[:-1]).nonzero().flatten()
            return Taught(teacher, before[teacher])
        case unknown:
            assert_never(unknown)


def covered(starts: Tensor, stops: Tensor, rows: int) -> Tensor:
    """[rows] bool: the rows that lie in any of the ranges [start, stop)."""
    edges = torch.zeros(rows + 1, dtype=torch.long)
    edges.index_add_(0, starts, torch.ones_like(starts)).index_add_(0, stops, -torch.ones_like(stops))
    return edges.cumsum(0)[:-1] > 0


class Reach(NamedTuple):
    """How far a draft reads before the rows that teach it. As a store's: the most of the drafts that it serves."""

    ttt_steps: int | None = None  # K of the unroll; None, if every row is kept: any number
    window: int | None = None  # keys that a query sees, its own included; None: all

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """The reach among the fields of a store or shard, which have these names. Absent ones are None."""
        return cls(*map(settings.get, cls._fields))

    def __str__(self) -> str:
        if self.window is None:
            return "full attention, or of parallelism.query_selection=all"
        return f"a window of {self.window:,} keys and {self.ttt_steps} TTT steps"

    def covers(self, other: "Reach") -> bool:
        """Whether a store of this reach has all rows of the other."""
        return all((ours or math.inf) >= (theirs or math.inf) for ours, theirs in zip(self, other, strict=True))

    @property
    def prefixes(self) -> list[int | None]:
        """For each step, the most keys of the prefix that a query sees, None for all: in a window, its own of earlier
        steps take their places."""
        if self.window is None:
            return [None] * self.ttt_steps
        assert self.window >= self.ttt_steps, f"a window of {self.window} hides a query's own keys"
        return [self.window - step for step in range(self.ttt_steps)]

    def rows(self, loss_mask: Tensor) -> Tensor:
        """Mask of the rows of a document whose auxiliary states are read, by one of the rules: bool [T]. Without a
        window, all rows.

        The mask does not depend on rank or layout. As in `plan_sequence` for supervised queries, queries begin up to K
        rows before a row that teaches, and each sees up to window - 1 rows before its own. The first row is included,
        because a rank that has no part of a stream reads it.
        """
        mask = torch.full((len(loss_mask),), self.window is None)
        mask[0] = True
        for rule in RULES if self.window is not None else ():
            teacher, first = taught(loss_mask.bool(), rule)
            starts = torch.maximum(first, teacher - self.ttt_steps) - self.window + 1
            mask |= covered(starts.clamp(min=0), teacher, len(mask))
        return mask
