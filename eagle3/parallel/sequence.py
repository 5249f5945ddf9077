"""The packed token stream, and the plan that says which of its rows each rank computes. Keys are dealt by layout,
queries by work. Stream and plan follow from token ids and loss masks alone.

Row t of a draft has the target's states at t and reads the token after it; in TTT step k it proposes the token t+k+2,
and the target's prediction at row r = t+k+1 teaches it. A rule says, of each row r, whether it teaches, and in which
row the first chain begins that it may teach (docs/exactness.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self, assert_never, get_args

import torch
from torch import Tensor

# served: the rows that an engine uses. A chain begins at a row whose next token is an answer's, and proposes that
# answer's tokens. reference: the original code's, which count if row t+k is in an answer.
Rule = Literal["served", "reference"]
RULES: tuple[Rule, ...] = get_args(Rule)
Layout = Literal["contiguous", "zigzag"]
QuerySelection = Literal["supervised", "all"]

# Rows that zigzag deals at a time. Few enough that every block of queries sees the same number of keys in each share,
# even with short documents whose length resonates with the dealing (tests/parallel/test_dealing.py); enough for reads
# of 100 KB.
ZIGZAG_ROWS = 4
# Queries dealt at a time: enough for dense kernels, few enough that each rank gets many blocks.
MOST_QUERIES, FEWEST_QUERIES, BLOCKS_A_RANK = 512, 32, 32


def taught(mask: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """The rows of a document that teach, ascending, [M] int64; and for each, the first row of a chain that it teaches,
    which is an earlier one. mask: [T] bool, the tokens of its answers."""
    rows = torch.arange(len(mask))
    match rule:
        case "reference":
            teacher = rows[:-1][mask[:-1]] + 1
            return teacher, torch.zeros_like(teacher)
        case "served":
            begins = mask & ~torch.nn.functional.pad(mask[:-1], (1, 0))
            before = torch.where(begins, rows - 1, -1).cummax(0).values.clamp(min=0)  # the row before this answer
            teacher = (mask[:-1] & mask[1:] & (rows > before)[:-1]).nonzero().flatten()
            return teacher, before[teacher]
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


@dataclass(frozen=True)
class SequenceSharding:
    """Settings for spreading a stream over ulysses x ring ranks."""

    ulysses: int = 1
    ring: int = 1
    # Layout of the keys along the ring. `contiguous` gives each ring rank one run of rows. `zigzag` deals short runs
    # back and forth (0..R-1, R-1..0, ...), so that each ring rank holds the same share of whatever a query sees.
    layout: Layout = "zigzag"
    # `supervised` unrolls the rows that are taught in some step, `all` unrolls every row.
    query_selection: QuerySelection = "supervised"
    # Number of queries dealt at a time; None: derived from the number of queries.
    query_block: int | None = None

    @property
    def ranks(self) -> int:
        return self.ulysses * self.ring


@dataclass(frozen=True)
class Stream:
    """Documents back to back, without a batch dimension or padding. All tensors are int64 and the same on every rank;
    [T] unless something else is said."""

    ids: Tensor  # tokens
    document: Tensor  # index of each row's document, from 0
    position: Tensor  # from 0 in each document
    end: Tensor  # last row of each row's document
    teacher: Tensor  # [M]: rows that teach, ascending
    first: Tensor  # [M]: for each of them, the row of the first chain that it teaches

    @classmethod
    def pack(cls, ids: Sequence[Tensor], loss_masks: Sequence[Tensor], rule: Rule) -> "Stream":
        """Packs one or more documents, none of them empty. ids, loss_masks: for each document a tensor [T_i], int64 or
        bool. rule: says which rows teach."""
        lengths = torch.tensor([len(document) for document in ids])
        document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        stops = lengths.cumsum(0)
        rows = torch.arange(int(stops[-1]))
        starts = stops - lengths
        within = [taught(mask.bool(), rule) for mask in loss_masks]
        teacher, first = (
            torch.cat([of_one + start for of_one, start in zip(of_each, starts, strict=True)])
            for of_each in zip(*within, strict=True)
        )
        return cls(torch.cat(list(ids)).long(), document, rows - starts[document], stops[document] - 1, teacher, first)

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @cached_property
    def starts(self) -> list[int]:
        """The first row of each document."""
        return (self.position == 0).nonzero().flatten().tolist()

    def positions(self, steps: int) -> Tensor:
        """[K, documents]: how many positions of each document count in each of `steps` steps."""
        counts = self.teacher - 1 - torch.arange(steps)[:, None] >= self.first
        nothing = torch.zeros(steps, len(self.starts), dtype=torch.long)
        return nothing.index_add_(1, self.document[self.teacher], counts.long())

    def tokens_after(self, rows: Tensor, distance: int) -> Tensor:
        """The token ids at rows + distance; 0 beyond the end of a row's document."""
        ahead = rows + distance
        inside = ahead <= self.end[rows]
        return torch.where(inside, self.ids[ahead.clamp(max=self.tokens - 1)], 0)


@dataclass(frozen=True)
class SequencePlan:
    """One rank's part of a stream, for K steps.

    Rows are in ascending order. Keys and queries are padded with -1 to the same number on every rank. All tensors are
    int64 on the CPU.
    """

    keys: Tensor  # [N]: rows whose K_0, V_0 this rank computes
    queries: Tensor  # [Q]: rows that this rank unrolls
    teacher: Tensor  # [M]: rows that teach this rank's queries; not padded
    rows: Tensor  # keys and queries together (at least one row): the rows whose auxiliary states this rank reads
    key_slots: Tensor  # [N]: indices of `keys` in `rows`, ascending; padding points at the last row
    query_slots: Tensor  # [Q]: the same for `queries`
    # [K, M]: at [k, m], the index in `queries` of the query t = teacher[m] - 1 - k; -1 if that does not count in step
    # k, or is not on this rank
    query_of: Tensor
    ring_keys: Tensor  # [ring, ulysses * N]: the keys on every ring rank
    ring_queries: Tensor  # [ulysses * Q]: the queries of this rank's Ulysses group, in the group's order
    reach: Reach

    @property
    def supervised(self) -> Tensor:
        """[K, M] bool: whether the teacher row teaches one of this rank's queries in step k."""
        return self.query_of >= 0


def plan_sequence(
    stream: Stream, reach: Reach, sharding: SequenceSharding = SequenceSharding(), rank: int = 0
) -> SequencePlan:
    """Plan the part of sequence rank `rank` (Ulysses varies fastest), from the stream alone and without communication.

    Step k at row t counts if row t+k+1 teaches chains that begin at t, so the queries are the rows that one of the K
    rows after them teaches. A query sees its document's keys up to its own row, but only the last ones that are within
    its reach. Keys that no query sees are not assigned to any rank. (At step k, a query sees k fewer of them, to make
    room for its own K_1..K_k.)
    """
    query_rows = torch.arange(stream.tokens)
    if sharding.query_selection == "supervised":
        starts = torch.maximum(stream.first, stream.teacher - reach.ttt_steps)
        query_rows = covered(starts, stream.teacher, stream.tokens).nonzero().flatten()
    visible = (stream.position[query_rows] + 1).clamp(max=reach.window or stream.tokens)
    seen = covered(query_rows + 1 - visible, query_rows + 1, stream.tokens)
    ring_keys = deal_keys(seen.nonzero().flatten(), sharding)
    dealt_queries = deal_queries(query_rows, visible, sharding)
    ring, ulysses = divmod(rank, sharding.ulysses)
    keys = ring_keys[ring].chunk(sharding.ulysses)[ulysses]
    queries = dealt_queries[ring].chunk(sharding.ulysses)[ulysses]
    both = torch.cat((keys, queries))
    rows = torch.unique(both[both >= 0]) if bool((both >= 0).any()) else torch.zeros(1, dtype=torch.long)

    real = queries[queries >= 0]
    place = torch.full((stream.tokens,), -1).index_put((real,), torch.arange(len(real)))
    sources = stream.teacher - 1 - torch.arange(reach.ttt_steps)[:, None]
    query_of = torch.where(sources >= stream.first, place[sources.clamp(min=0)], -1)
    mine = (query_of >= 0).any(0)
    query_of = query_of[:, mine]
    return SequencePlan(
        keys=keys,
        queries=queries,
        teacher=stream.teacher[mine],
        rows=rows,
        key_slots=_slots(rows, keys),
        query_slots=_slots(rows, queries),
        query_of=query_of,
        ring_keys=ring_keys,
        ring_queries=dealt_queries[ring],
        reach=reach,
    )


def _slots(rows: Tensor, positions: Tensor) -> Tensor:
    return torch.where(positions >= 0, torch.searchsorted(rows, positions), len(rows) - 1)


def deal_keys(rows: Tensor, sharding: SequenceSharding) -> Tensor:
    """Deals ascending key rows [N] to ring ranks: [ring, n], ascending, padded with -1 at the end. n is a multiple of
    the Ulysses degree, so that Ulysses ranks can take equal runs."""
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
    """Deals ascending query rows [Q] to ring ranks, in the same form as keys. work [Q]: number of keys that each query
    sees.

    As many whole blocks as divide evenly among the ranks are sorted by decreasing work and dealt back and forth over
    the ring. The differences between turns telescope to less than the heaviest block's work. The rest is cut into one
    short block per rank: the heaviest goes to the rank with the least work so far, and so on. So two ranks differ by
    at most one query, and by at most the work of the heaviest block.
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
