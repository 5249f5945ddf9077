"""From the rows asked for to the chunks that hold them, and back from their bytes to the rows."""

from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from eagle3.states.store.codecs import Codec
from eagle3.states.store.shard import Encoding

# Encoded bytes that one thread checks and decodes at a time, about.
RUN_BYTES = 1 << 20


class ChunkTable(NamedTuple):
    """The chunks of one tensor of one sample. bounds [chunks + 1]: where they lie in the tensor, in bytes. sums [chunks]:
    their checksums. rows: of the sample in this tensor, chunk_rows of them in every chunk but the last."""

    bounds: np.ndarray
    sums: np.ndarray
    rows: int
    chunk_rows: int


class Run(NamedTuple):
    """Chunks [first, stop) of a table, whose rows are `rows` of the buffer."""

    first: int
    stop: int
    rows: slice


class ChunkReads(NamedTuple):
    """What it takes to read some rows of one tensor of one sample: the chunks are decoded into `buffer`, whose rows are
    then `decoded` of the sample, ascending."""

    codec: Codec
    table: ChunkTable
    runs: list[Run]
    buffer: Tensor
    decoded: Tensor
    wanted: Tensor

    def bytes_of(self, run: Run) -> tuple[int, int]:
        """[start, stop) of a run in the tensor."""
        return int(self.table.bounds[run.first]), int(self.table.bounds[run.stop])

    def decode(self, run: Run, data: memoryview) -> str | None:
        """Check the bytes of a run and decode them into their place; what is wrong with them, if anything is."""
        sizes = np.diff(self.table.bounds[run.first : run.stop + 1]).tolist()
        start = 0
        for size, checksum in zip(sizes, self.table.sums[run.first : run.stop].tolist(), strict=True):
            if xxhash.xxh3_64_intdigest(data[start : start + size]) != checksum:
                return "a checksum does not fit"
            start += size
        try:
            self.codec.decode(data, sizes, self.buffer[run.rows])
        except ValueError as error:  # written so: the checksum fits
            return str(error)
        return None

    def rows(self) -> Tensor:
        """The rows asked for, once all runs are decoded."""
        if torch.equal(self.decoded, self.wanted):
            return self.buffer
        return self.buffer[torch.searchsorted(self.decoded, self.wanted)]


def plan_reads(rows: Tensor, table: ChunkTable, encoding: Encoding, name: str) -> ChunkReads:
    """rows [n] int64: of the sample in this tensor, `aux` or `last` by its name, any order, all inside it."""
    wanted, size = rows.numpy(), table.chunk_rows
    chunks = np.unique(wanted // size)
    counts = np.minimum(size, table.rows - chunks * size)
    edges = np.concatenate(([0], counts.cumsum()))
    most = max(1, RUN_BYTES * len(table.sums) // max(1, int(table.bounds[-1] - table.bounds[0])))
    runs = []
    for consecutive in np.split(np.arange(len(chunks)), np.flatnonzero(np.diff(chunks) != 1) + 1):
        for begin in range(0, len(consecutive), most):
            places = consecutive[begin : begin + most]
            first, stop = int(chunks[places[0]]), int(chunks[places[-1]]) + 1
            runs.append(Run(first, stop, slice(int(edges[places[0]]), int(edges[places[-1] + 1]))))
    decoded = (np.repeat(chunks * size - edges[:-1], counts) + np.arange(edges[-1])).astype(np.int64)
    buffer = torch.empty(int(edges[-1]), encoding.width(name), dtype=encoding.number_format)
    return ChunkReads(encoding.make_codec(name), table, runs, buffer, torch.from_numpy(decoded), rows)
