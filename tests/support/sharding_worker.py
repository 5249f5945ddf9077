"""Summarises and redistributes logits that are sharded over several ranks by vocabulary, all cases in one launch, for
tests/targets/test_target_sharding.py.

python tests/support/sharding_worker.py FOLDER
"""

import datetime
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from live_bytes import LiveBytes
from processes import fork_ranks, rank_file
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle3.parallel.topology import start_distributed, stop_distributed
from eagle3.states.rows import deal_streams
from eagle3.targets.logits import DraftColumns, summarize_sharded

TIMEOUT = datetime.timedelta(seconds=20)
WORLDS = (2, 4)
PADDING = 1e30  # fills the columns that are not tokens
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def document_rows(lengths: Sequence[int], ranks: int) -> list[Tensor]:
    """Without sequence parallelism: the rows of each rank. Ranks get whole documents of a batch, whose rows follow one
    another: longest first, each to the rank with the fewest rows. With more ranks than documents, some get none."""
    rows, nothing = torch.arange(sum(lengths)).split(list(lengths)), torch.arange(0)
    dealt = deal_streams(lengths, ranks)
    return [torch.cat([nothing, *(rows[document] for document in documents)]) for documents in dealt]


def sequence_rows(shares: Sequence[int], ranks: int, divided: bool = False) -> list[Tensor]:
    """With sequence parallelism: the rows of each of the target's ranks. The sequence is cut into consecutive `shares`
    (numbers of rows, equal or not), one for each sequence rank. The target has a multiple of as many ranks: the ranks
    of one share all have its rows or, if `divided`, each has a part, of about equal size and in order."""
    assert ranks % len(shares) == 0, f"{ranks} ranks of the target for {len(shares)} shares"
    each = ranks // len(shares)
    of_shares = torch.arange(sum(shares)).split(list(shares))
    if divided:
        return [part for share in of_shares for part in share.tensor_split(each)]
    return [share for share in of_shares for _ in range(each)]


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
    """A redistribution of the columns of the `drafted` tokens of `rows`, `block_rows` rows at a time. `dealing` and
    `parts` (lengths of documents, or sizes of shares) say which rank gets which rows."""

    name: str
    rows: Rows
    drafted: tuple[int, ...]
    dealing: str
    parts: tuple[int, ...]
    block_rows: int = 4
    worlds: tuple[int, ...] = WORLDS

    def rows_of(self, world: int) -> list[Tensor]:
        if self.dealing == "documents":
            return document_rows(self.parts, world)
        return sequence_rows(self.parts, world, divided=self.dealing == "divided shares")


EVERY_THIRD = tuple(range(0, 37, 3))
FIRST_SHARD = (0, 2, 3, 7)  # in every world: the other ranks have no draft token
LAST_SHARD = (0, 30, 31, 33, 35, 36)
PADDED = Rows("padded", 40, 37)
REDISTRIBUTIONS = [
    Dealt("documents", PADDED, EVERY_THIRD, "documents", (7, 1, 20, 9, 3)),
    Dealt("more ranks than documents", PADDED, EVERY_THIRD, "documents", (40,)),
    Dealt("one row at a time", PADDED, LAST_SHARD, "documents", (11, 29), block_rows=1),
    Dealt("all rows at once", PADDED, LAST_SHARD, "documents", (11, 29), block_rows=100),
    Dealt("draft tokens of one shard", PADDED, FIRST_SHARD, "documents", (11, 29)),
    Dealt("one share", PADDED, EVERY_THIRD, "shares", (40,)),
    Dealt("two equal shares", PADDED, EVERY_THIRD, "shares", (20, 20)),
    Dealt("two unequal shares", PADDED, LAST_SHARD, "shares", (33, 7)),
    Dealt("a share of no rows", PADDED, LAST_SHARD, "shares", (40, 0)),
    Dealt("two shares in parts", PADDED, EVERY_THIRD, "divided shares", (21, 19)),
    Dealt("four shares", PADDED, EVERY_THIRD, "shares", (9, 0, 15, 16), worlds=(4,)),
    Dealt("in bfloat16", Rows("bf16", 40, 37, dtype=torch.bfloat16), EVERY_THIRD, "shares", (25, 15)),
    Dealt("no rows at all", Rows("none", 0, 37), EVERY_THIRD, "shares", (0, 0)),
]


@dataclass(frozen=True)
class Measured:
    """A redistribution over four ranks whose bytes are counted: `shares` equal shares of 1024 rows, in 8 blocks."""

    shares: int
    divided: bool

    rows = Rows("measured", 1024, 256, dtype=torch.float32)
    drafted = tuple(range(0, 192, 2))

    @property
    def name(self) -> str:
        return f"{self.shares} {'divided ' if self.divided else ''}shares"

    def rows_of(self, world: int) -> list[Tensor]:
        return sequence_rows([self.rows.rows // self.shares] * self.shares, world, self.divided)

    def block_rows(self, world: int) -> int:
        return len(self.rows_of(world)[0]) // 8


MEASURED_WORLD = 4
MEASURED = [Measured(shares, divided) for divided in (False, True) for shares in (1, 2, 4)]


class Widths(TorchDispatchMode):
    """Records the most columns of any tensor [rows, columns] that an operation inside the context returns."""

    widest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        widths = (leaf.shape[1] for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.dim() == 2)
        self.widest = max(self.widest, *widths, 0)
        return result


def shard_of(rows: Rows, group: ProcessGroup) -> tuple[Tensor, int, int]:
    """This rank's columns with padding, its first token, and how many of the columns are tokens."""
    width = rows.width(group.size())
    first = group.rank() * width
    mine = rows.logits()[:, first : first + width]
    padding = mine.new_full((rows.rows, width - mine.shape[1]), PADDING)
    return torch.cat((mine, padding), 1), first, mine.shape[1]


def summarize(rows: Rows, group: ProcessGroup) -> dict[str, Tensor]:
    logits, first, valid = shard_of(rows, group)
    with CommDebugMode() as collectives:
        summary = summarize_sharded(logits, first, valid, group)
    return {**summary._asdict(), "collectives": torch.tensor(collectives.get_total_counts())}


def redistribute(
    rows: Rows, drafted: Sequence[int], rows_of: Sequence[Tensor], block_rows: int, group: ProcessGroup
) -> dict[str, Tensor]:
    logits, first, valid = shard_of(rows, group)
    columns = DraftColumns.of(torch.tensor(drafted), first, valid, group)
    with Widths() as widths:
        result = columns.redistribute(logits.__getitem__, rows_of, rows.dtype, block_rows)
    return {"columns": result, "widest": torch.tensor(widths.widest)}


def measure(case: Measured, group: ProcessGroup) -> dict[str, Tensor]:
    """The most bytes alive apart from the input, and the bytes that were predicted."""
    logits, first, valid = shard_of(case.rows, group)
    columns = DraftColumns.of(torch.tensor(case.drafted), first, valid, group)
    rows, block_rows = case.rows_of(group.size()), case.block_rows(group.size())

    def logits_after(rows: Tensor) -> Tensor:
        time.sleep(0.02)  # gloo's thread frees the last block's tensors a moment after their exchange
        return logits[rows]

    with LiveBytes(tensors=rows) as bytes_alive:
        columns.redistribute(logits_after, rows, case.rows.dtype, block_rows)
    sizes = [len(each) for each in rows]
    predicted = columns.peak_bytes(sizes, logits.shape[1], case.rows.dtype.itemsize, block_rows)
    return {"measured": torch.tensor([bytes_alive.peak - bytes_alive.existing, predicted])}


def work(world: int, folder: Path) -> None:
    group = start_distributed(tensor=world, timeout=TIMEOUT).tensor
    results = {f"summary {rows.name}": summarize(rows, group) for rows in SUMMARIES}
    for case in REDISTRIBUTIONS:
        if world in case.worlds:
            parts = case.rows_of(world)
            results[f"columns {case.name}"] = redistribute(case.rows, case.drafted, parts, case.block_rows, group)
    if world == MEASURED_WORLD:
        results |= {f"bytes {case.name}": measure(case, group) for case in MEASURED}
    flat = {f"{case} {name}": tensor for case, tensors in results.items() for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in flat.items()}, folder / rank_file(world, group.rank()))
    stop_distributed()


if __name__ == "__main__":
    for world in WORLDS:
        fork_ranks(world, partial(work, world, Path(sys.argv[1])))
