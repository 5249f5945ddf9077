"""How the rows of a stream are dealt to the ranks that share it: keys by their layout, queries by their work."""

from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

Layout = Literal["contiguous", "zigzag"]
QuerySelection = Literal["supervised", "all"]

# Rows that zigzag deals at once: so few that every block of queries sees the same number of keys in each share, also of
# short documents whose length beats in time with the dealing (tests/parallel/test_dealing.py), and still a read of 100 KB.
ZIGZAG_ROWS = 4
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
    query_selection: QuerySelection = "supervised"
    query_block: int | None = None

    @property
    def ranks(self) -> int:
        return self.ulysses * self.ring


def deal_keys(rows: Tensor, sharding: SequenceSharding) -> Tensor:
    """Ascending key rows [N] -> those of each ring rank [ring, n], ascending, -1 pads at the end; n is a multiple of
    the Ulysses degree, whose ranks take equal runs of them."""
    ring = sharding.ring
    match sharding.layout:
        case "contiguous":
            run = _ceil(len(rows), sharding.ranks) * sharding.ulysses
            dealt = torch.arange(len(rows)) // max(run, 1)
        case "zigzag":
            turns = _ceil(len(rows), 2 * ring * ZIGZAG_ROWS)
            run = _ceil(len(rows), 2 * ring * turns) if turns else 1
            dealt = _there_and_back(torch.arange(len(rows)) // run, ring)
        case unknown:
            assert_never(unknown)
    return _stacked([rows[dealt == rank] for rank in range(ring)], sharding.ulysses)


def deal_queries(rows: Tensor, work: Tensor, sharding: SequenceSharding) -> Tensor:
    """Ascending query rows [Q] with the keys that each sees, work [Q] -> those of each ring rank [ring, q], as keys.

    As many blocks as give each rank the same number go by falling work there and back over the ring: the differences
    of turns telescope to less than the heaviest block's work. What is left is cut into one short block a rank, the
    heaviest to the rank with the least so far. So two ranks differ by at most one query, and by at most the heaviest
    block's work.
    """
    ring, block = sharding.ring, sharding.query_block
    if block is None:
        block = min(MOST_QUERIES, max(FEWEST_QUERIES, _ceil(len(rows), BLOCKS_A_RANK * ring)))
    whole = len(rows) // (ring * block) * ring
    short, longer = divmod(len(rows) - whole * block, ring)
    sizes = torch.tensor([block] * whole + [short + 1] * longer + [short] * (ring - longer))
    block_of = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    totals = torch.zeros(len(sizes), dtype=torch.long).index_add_(0, block_of, work)
    rank_of = torch.empty_like(totals)
    rank_of[totals[:whole].argsort(descending=True, stable=True)] = _there_and_back(torch.arange(whole), ring)
    loads = torch.zeros(ring, dtype=torch.long).index_add_(0, rank_of[:whole], totals[:whole])
    rank_of[whole + totals[whole:].argsort(descending=True, stable=True)] = loads.argsort(stable=True)
    return _stacked([rows[rank_of[block_of] == rank] for rank in range(ring)], sharding.ulysses)


def _there_and_back(turn: Tensor, ring: int) -> Tensor:
    place = turn % (2 * ring)
    return torch.minimum(place, 2 * ring - 1 - place)


def _stacked(parts: list[Tensor], ulysses: int) -> Tensor:
    length = max(1, _ceil(max(len(part) for part in parts), ulysses)) * ulysses
    return torch.stack([torch.nn.functional.pad(part, (0, length - len(part)), value=-1) for part in parts])


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
