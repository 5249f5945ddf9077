"""How the rows of a stream are dealt to the ranks that share it: keys by their layout, queries by their work."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["contiguous", "zigzag"]

# Rows that zigzag deals at once: short, so that every ring rank's keys are a fair sample of every document.
ZIGZAG_ROWS = 64
# Queries dealt at once: long enough for dense kernels, short enough for many blocks a rank.
MOST_QUERIES, FEWEST_QUERIES, BLOCKS_A_RANK = 512, 32, 32


@dataclass(frozen=True)
class SequenceSharding:
    """How one stream is spread over ulysses x ring ranks.

    layout: of the keys along the ring. `contiguous`: one run of rows a ring rank. `zigzag`: short runs dealt there and
    back (0..R-1, R-1..0, ...), so that each ring rank holds the same share of whatever a query sees. query_selection:
    `supervised` unrolls the rows that some step supervises, `all` every row. query_block: queries dealt at once;
    default by their number.
    """

    ulysses: int = 1
    ring: int = 1
    layout: Layout = "zigzag"
    query_selection: Literal["supervised", "all"] = "supervised"
    query_block: int | None = None

    @property
    def ranks(self) -> int:
        return self.ulysses * self.ring


def deal_keys(rows: Tensor, sharding: SequenceSharding) -> Tensor:
    """Ascending key rows [N] -> those of each ring rank [ring, n], ascending, -1 pads at the end; n is a multiple of
    the Ulysses degree, whose ranks take equal runs of them."""
    ring = sharding.ring
    if sharding.layout == "contiguous":
        run = _ceil(len(rows), sharding.ranks) * sharding.ulysses
        dealt = torch.arange(len(rows)) // max(run, 1)
    else:
        turns = _ceil(len(rows), 2 * ring * ZIGZAG_ROWS)
        run = _ceil(len(rows), 2 * ring * turns) if turns else 1
        dealt = _there_and_back(torch.arange(len(rows)) // run, ring)
    return _stacked([rows[dealt == rank] for rank in range(ring)], sharding.ulysses)


def deal_queries(rows: Tensor, work: Tensor, sharding: SequenceSharding) -> Tensor:
    """Ascending query rows [Q] with the keys that each sees, work [Q] -> those of each ring rank [ring, q], as keys.

    Blocks of consecutive queries go by falling work there and back over the ring, so that two ranks differ by at most
    one block in number and, since the differences of the turns telescope, by at most the heaviest block's work.
    """
    ring, block = sharding.ring, sharding.query_block
    if block is None:
        block = min(MOST_QUERIES, max(FEWEST_QUERIES, _ceil(len(rows), BLOCKS_A_RANK * ring)))
    block_of = torch.arange(len(rows)) // block
    totals = torch.zeros(_ceil(len(rows), block), dtype=torch.long).index_add_(0, block_of, work)
    rank_of = torch.empty_like(totals)
    rank_of[totals.argsort(descending=True, stable=True)] = _there_and_back(torch.arange(len(totals)), ring)
    return _stacked([rows[rank_of[block_of] == rank] for rank in range(ring)], sharding.ulysses)


def _there_and_back(turn: Tensor, ring: int) -> Tensor:
    place = turn % (2 * ring)
    return torch.minimum(place, 2 * ring - 1 - place)


def _stacked(parts: list[Tensor], ulysses: int) -> Tensor:
    length = max(1, _ceil(max(len(part) for part in parts), ulysses)) * ulysses
    stacked = torch.full((len(parts), length), -1)
    for place, part in zip(stacked, parts, strict=True):
        place[: len(part)] = part
    return stacked


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
