"""Summarises and exchanges logits that are sharded over several ranks by vocabulary, all cases in one launch, for
tests/targets/test_target_sharding.py."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from processes import compute
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor.debug import CommDebugMode

from eagle3.parallel.topology import Topology
from eagle3.states.rows import deal_streams
from eagle3.targets.logits import ShardSummary, draft_widths, exchange_columns, local_columns

WORLDS = (2, 4)
PADDING = 1e30  # fills the columns that are not tokens
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def document_rows(lengths: Sequence[int], ranks: int) -> list[Tensor]:
    """The rows of each rank. Ranks get whole documents of a batch, whose rows follow one another: longest first, each
    to the rank with the fewest rows. With more ranks than documents, some get none."""
    rows, nothing = torch.arange(sum(lengths)).split(list(lengths)), torch.arange(0)
    dealt = deal_streams(lengths, ranks)
    return [torch.cat([nothing, *(rows[document] for document in documents)]) for documents in dealt]


@dataclass(frozen=True)
class Rows:
    """Logits [rows, vocabulary], cut into shards of `width` columns, the last of which may be padding."""

    name: str
    rows: int
    vocabulary: int
    kind: str = "random"
    dtype: torch.dtype = torch.float64

    def width(self, world: int) -> int:
        return -(-self.vocabulary // world)

    def logits(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.rows)
        if self.kind == "ties":  # equal numbers in every shard
            return torch.randint(9, (self.rows, self.vocabulary), generator=generator).to(self.dtype)
        scale = 300.0 if self.kind == "overflow" else 3.0
        return (torch.randn(self.rows, self.vocabulary, generator=generator, dtype=torch.float64) * scale).to(
            self.dtype
        )


SUMMARIES = [
    *(Rows(f"random {dtype}", 37, 64, dtype=dtype) for dtype in DTYPES),
    Rows("ties", 50, 24, "ties"),
    Rows("ties of padded shards", 50, 21, "ties"),
    Rows("padding", 20, 37),
    Rows("a shard of padding", 20, 9),
    Rows("logits that overflow exp", 30, 64, "overflow", torch.float32),
    Rows("several blocks", 1100, 12),
    Rows("no rows", 0, 16),
]


@dataclass(frozen=True)
class Dealt:
    """An exchange of the columns of the `drafted` tokens of `rows`, which belong to documents of these `lengths`."""

    name: str
    rows: Rows
    drafted: tuple[int, ...]
    lengths: tuple[int, ...]


EVERY_THIRD = tuple(range(0, 37, 3))
FIRST_SHARD = (0, 2, 3, 7)  # in every world: the other ranks have no draft token
LAST_SHARD = (0, 30, 31, 33, 35, 36)
PADDED = Rows("padded", 40, 37)
EXCHANGES = [
    Dealt("documents", PADDED, EVERY_THIRD, (7, 1, 20, 9, 3)),
    Dealt("more ranks than documents", PADDED, EVERY_THIRD, (40,)),
    Dealt("draft tokens of one shard", PADDED, FIRST_SHARD, (11, 29)),
    Dealt("hardly any in the first shard", PADDED, LAST_SHARD, (11, 29)),
    Dealt("in bfloat16", Rows("bf16", 40, 37, dtype=torch.bfloat16), EVERY_THIRD, (25, 15)),
    Dealt("no rows at all", Rows("none", 0, 37), EVERY_THIRD, (0, 0)),
]


def shard_of(rows: Rows, group: ProcessGroup) -> tuple[Tensor, int, int]:
    """This rank's columns with padding, its first token, and how many of the columns are tokens."""
    width = rows.width(group.size())
    first = group.rank() * width
    mine = rows.logits()[:, first : first + width]
    padding = mine.new_full((rows.rows, width - mine.shape[1]), PADDING)
    return torch.cat((mine, padding), 1), first, mine.shape[1]


def summarize(rows: Rows, group: ProcessGroup) -> dict[str, Any]:
    logits, first, valid = shard_of(rows, group)
    blocks = [ShardSummary.of(block, first, valid) for block in logits.split(512)]
    with CommDebugMode() as collectives:
        summary = ShardSummary(*map(torch.cat, zip(*blocks, strict=True))).merged(group)
    return {**summary._asdict(), "collectives": collectives.get_total_counts()}


def exchange(case: Dealt, group: ProcessGroup) -> Tensor:
    logits, first, valid = shard_of(case.rows, group)
    shard = torch.tensor(case.drafted), first, valid
    rows = document_rows(case.lengths, group.size())
    drafted = logits[torch.cat(rows)][:, local_columns(*shard)]
    return exchange_columns(drafted, draft_widths(*shard, group), [len(each) for each in rows], group)


def work(topology: Topology) -> dict[str, Any]:
    """Summaries by the names of their rows, and columns by those of their cases."""
    group = topology.tensor
    return {rows.name: summarize(rows, group) for rows in SUMMARIES} | {
        case.name: exchange(case, group) for case in EXCHANGES
    }


if __name__ == "__main__":
    for world in WORLDS:
        compute(Path(sys.argv[1]), f"tensor {world}", world, (world,), work)
