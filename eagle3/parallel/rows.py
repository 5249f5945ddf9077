"""Which rows of a document teach, and whom.

Row t of a draft has the target's states at t and reads the token after it; in TTT step k it proposes the token t+k+2,
and the target's prediction at row r = t+k+1 teaches it. A rule says, of each row r, whether it teaches, and in which
row the first chain begins that it may teach (docs/exactness.md).
"""

from typing import Literal, NamedTuple, assert_never, get_args

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
