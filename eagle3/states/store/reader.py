"""Read a store: only the chunks with the requested rows are read from disk, and every byte is checked."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from typing import NamedTuple, Self

import numpy as np
import torch
import xxhash
from torch import Tensor

from eagle3.errors import UserError
from eagle3.states.rows import Rows
from eagle3.states.store.codecs import Codec
from eagle3.states.store.files import ByteRange, DamagedStore, OutOfRange, StoreFiles, open_files
from eagle3.states.store.folder import Provenance, read_indexes, read_own_manifest
from eagle3.states.store.shard import (
    HIDDEN,
    NUMPY_TYPES,
    Encoding,
    SampleEntry,
    ShardIndex,
    kept_rows,
    sample_digest,
)
from eagle3.text.samples import Sample

# Threads that check and decode chunks in parallel.
THREADS = 4
# Approximate number of encoded bytes that one thread checks and decodes at a time.
RUN_BYTES = 1 << 20
ANY_TOKEN = 1 << 31  # the vocabulary's size where it is not known


class RowRequest(NamedTuple):
    """The rows of a sample to read. Row numbers are int64, from 0 to T-1, in any order; there may be none."""

    sample_id: str
    aux: Tensor  # rows of `aux`; in a store for a window, only rows that the store has (`seen_rows`)
    teacher: Tensor  # rows of `last`, argmax and logsumexp; only rows that the store has (`kept_rows`)
    tokens: Sample | None = None  # with whose tokens it must begin; None to skip this check


class Location(NamedTuple):
    index: ShardIndex
    entry: SampleEntry


class ChunkTable(NamedTuple):
    """The chunks of one tensor of one sample."""

    edges: np.ndarray  # [chunks + 1]: the chunks' edges in the tensor, in bytes
    sums: np.ndarray  # [chunks]: checksums
    rows: int  # number of rows that the sample has in this tensor


class Run(NamedTuple):
    """Chunks [first, stop) of a table, decoded into `rows` of the buffer."""

    first: int
    stop: int
    rows: slice


class ChunkReads(NamedTuple):
    """A plan for reading some rows of one tensor of one sample."""

    codec: Codec
    table: ChunkTable
    runs: list[Run]
    buffer: Tensor  # chunks are decoded into this
    decoded: Tensor  # the sample's rows that the buffer then holds, ascending
    wanted: Tensor  # the requested rows

    def decode(self, run: Run, data: memoryview) -> str | None:
        """Check the bytes of a run and decode them into the buffer. Returns what is wrong with the bytes, or None."""
        edges, sums = self.table.edges[run.first : run.stop + 1], self.table.sums[run.first : run.stop]
        edges = (edges - edges[0]).tolist()
        for (start, stop), checksum in zip(pairwise(edges), sums.tolist(), strict=True):
            if xxhash.xxh3_64_intdigest(data[start:stop]) != checksum:
                return "a checksum does not fit"
        try:
            self.codec.decode(data, np.diff(edges).tolist(), self.buffer[run.rows])
        except ValueError as error:  # the checksum matches, so these are the bytes that were written
            return str(error)
        return None

    def rows(self) -> Tensor:
        """The requested rows, once all runs are decoded."""
        if torch.equal(self.decoded, self.wanted):
            return self.buffer
        return self.buffer[torch.searchsorted(self.decoded, self.wanted)]


def plan_reads(rows: Tensor, table: ChunkTable, encoding: Encoding, name: str) -> ChunkReads:
    """Plan the reading of some rows.

    rows: int64 [n], in any order: indices among the rows that the sample has in this tensor
    name: `aux` or `last`
    """
    row_array, size = rows.numpy(), encoding.chunk_rows(name)
    chunks = np.unique(row_array // size)
    counts = np.minimum(size, table.rows - chunks * size)
    edges = np.concatenate(([0], counts.cumsum()))
    max_chunks = max(1, RUN_BYTES * len(table.sums) // max(1, int(table.edges[-1] - table.edges[0])))
    runs = []
    for group in np.split(np.arange(len(chunks)), np.flatnonzero(np.diff(chunks) != 1) + 1):
        for start in range(0, len(group), max_chunks):
            positions = group[start : start + max_chunks]
            first, stop = int(chunks[positions[0]]), int(chunks[positions[-1]]) + 1
            runs.append(Run(first, stop, slice(int(edges[positions[0]]), int(edges[positions[-1] + 1]))))
    decoded_rows = (np.repeat(chunks * size - edges[:-1], counts) + np.arange(edges[-1])).astype(np.int64)
    buffer = torch.empty(int(edges[-1]), encoding.width(name), dtype=encoding.number_format)
    return ChunkReads(encoding.make_codec(name), table, runs, buffer, torch.from_numpy(decoded_rows), rows)


class SampleFacts(NamedTuple):
    """Everything that a store has about a sample of T tokens, apart from hidden states."""

    tokens: Sample
    argmax: np.ndarray  # [T] int32
    logsumexp: np.ndarray  # [T] fp32
    tables: dict[str, ChunkTable]  # for aux and last


class HiddenStateStore:
    """An open store. Threads may share it, and it runs several of its own.

    locations: where its samples are, by id; if two shards have a sample, the first shard counts
    vocab_size: of the target, whose predictions are checked when rows are read

    Raises UserError for data that is missing, damaged, out of range or from a different store.
    """

    def __init__(
        self,
        files: StoreFiles,
        locations: dict[str, Location],
        record: Provenance,
        vocab_size: int = ANY_TOKEN,
        threads: int = THREADS,
    ) -> None:
        self.files, self.locations, self.record, self.vocab_size = files, locations, record, vocab_size
        self.where = files.where
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="store")

    @classmethod
    def open(cls, path: str, provenance: Provenance, vocab_size: int = ANY_TOKEN, threads: int = THREADS) -> Self:
        """Open a store for reading.

        path: a folder or an fsspec URL
        provenance: what this run needs, codec and dtype included
        vocab_size: see above

        Raises UserError if provenances differ, naming the field, and if a shard is missing, has lost bytes or belongs
        to a different store, naming the file.
        """
        files = open_files(path)
        manifest = read_own_manifest(files, provenance)
        indexes = read_indexes(files, manifest)
        all_locations = [Location(index, entry) for index in indexes for entry in index.samples]
        # Reversed, so that the first of several duplicates wins.
        locations = {location.entry.id: location for location in reversed(all_locations)}
        for encoding, name in product({index.encoding for index in indexes}, HIDDEN):
            encoding.make_codec(name)  # raises UserError if this machine cannot decode it
        return cls(files, locations, manifest.record, vocab_size, threads)

    def missing(self, sample_ids: Iterable[str]) -> list[str]:
        """The ids among `sample_ids` that the store lacks, in their order."""
        return [sample_id for sample_id in sample_ids if sample_id not in self.locations]

    def tokens_at(self, locations: Sequence[Location]) -> list[Sample]:
        """The tokens that the samples at these locations were captured from, under the ids that the index has."""
        return [facts.tokens for facts in self._facts(locations)]

    def read(self, requests: Sequence[RowRequest]) -> list[Rows]:
        """Read the rows of all requests, with hidden states and logits in the store's dtype. However many requests
        there are, this takes two rounds of reads."""
        return self.read_at([self._locate(request.sample_id) for request in requests], requests)

    def read_at(self, locations: Sequence[Location], requests: Sequence[RowRequest]) -> list[Rows]:
        """Like `read`, for samples at known locations."""
        sample_facts = self._facts(locations)
        plans: list[ChunkReads] = []
        for location, request, facts in zip(locations, requests, sample_facts, strict=True):
            if request.tokens is not None:
                self._require_tokens(location, facts.tokens, request.tokens)
            encoding, loss_mask = location.index.encoding, facts.tokens.loss_mask
            masks = {"aux": encoding.seen_rows(loss_mask), "last": kept_rows(location.entry, loss_mask)}
            for name, indices in zip(HIDDEN, (request.aux, request.teacher), strict=True):
                in_range = indices.numel() == 0 or 0 <= int(indices.min()) <= int(indices.max()) < len(loss_mask)
                assert in_range, f"rows asked for, outside a sample of {len(loss_mask)} rows"
                assert bool(masks[name][indices].all()), f"{name} hidden states are stored where they teach or are seen"
                rows = (masks[name].cumsum(0) - 1)[indices]
                plans.append(plan_reads(rows, facts.tables[name], encoding, name))
        self._decode([*zip(product(locations, HIDDEN), plans, strict=True)])
        tensors = iter(reads.rows() for reads in plans)
        rows = []
        for location, request, facts in zip(locations, requests, sample_facts, strict=True):
            aux, values, teacher = next(tensors), next(tensors), request.teacher.numpy()
            argmax, logsumexp = facts.argmax[teacher].astype(np.int64), facts.logsumexp[teacher]
            predictions = location.index.encoding.teacher(values, torch.from_numpy(argmax), torch.from_numpy(logsumexp))
            if flaw := predictions.flaw(self.vocab_size):
                raise OutOfRange(self._where(location), f"has {flaw}")
            rows.append(Rows(aux, predictions))
        return rows

    def _decode(self, plans: Sequence[tuple[tuple[Location, str], ChunkReads]]) -> None:
        """Read all chunks of these tensors in one round, and decode them. Raises DamagedStore."""
        jobs = [(key, reads, run) for key, reads in plans for run in reads.runs]
        ranges = []
        for (location, name), reads, run in jobs:
            start, edges = location.index.starts[name], reads.table.edges
            ranges.append(ByteRange(location.index.shard, start + int(edges[run.first]), start + int(edges[run.stop])))
        data = self.files.fetch(ranges)
        flaws = list(self._threads.map(lambda job, block: job[1].decode(job[2], block), jobs, data))
        for ((location, name), _, _), flaw in zip(jobs, flaws, strict=True):  # after all have finished
            if flaw:
                raise self._damaged(location, f"{name} hidden states", flaw)

    def _locate(self, sample_id: str) -> Location:
        if sample_id not in self.locations:
            raise UserError(f"{self.where}: sample {sample_id!r} is not in the store; run capture.py, which adds it")
        return self.locations[sample_id]

    def _facts(self, locations: Sequence[Location]) -> list[SampleFacts]:
        """For some samples, read everything but the hidden states, and check it against the digests in the index."""
        parts = iter(
            self.files.fetch([byte_range for location in locations for byte_range in self._fact_ranges(location)])
        )
        facts = []
        for location in locations:
            small = {name: np.frombuffer(next(parts), kind) for name, kind in NUMPY_TYPES.items()}
            if sample_digest(small.values()) != location.entry.digest:
                raise self._damaged(location, "tokens or checksums", "their digest does not fit")
            ids, loss_mask = small["ids"].astype(np.int64), small["loss_mask"].copy()
            tokens = Sample(location.entry.id, torch.from_numpy(ids), torch.from_numpy(loss_mask))
            tables = {
                name: ChunkTable(small[f"{name}_edges"], small[f"{name}_sums"], location.entry.rows(name))
                for name in HIDDEN
            }
            facts.append(SampleFacts(tokens, small["argmax"], small["logsumexp"], tables))
        return facts

    def _require_tokens(self, location: Location, stored: Sample, required: Sample) -> None:
        """Raises UserError unless the sample begins with these tokens."""
        columns = ("token", stored.ids, required.ids), ("loss mask", stored.loss_mask, required.loss_mask)
        for kind, actual, expected in columns:
            if torch.equal(actual[: len(expected)], expected):
                continue
            difference = "has fewer tokens"
            if len(actual) >= len(expected):
                row = int((actual[: len(expected)] != expected).nonzero()[0])
                difference = f"{kind} {row} is {actual[row].item()} here and {expected[row].item()} in the data"
            shard = location.index.shard
            raise UserError(
                f"{self.where}/{shard}: sample {location.entry.id}: its hidden states were captured from other tokens "
                f"({difference}); delete {shard}, and run capture.py, which captures its samples again"
            )

    def _fact_ranges(self, location: Location) -> list[ByteRange]:
        shard, ranges = location.index.shard, []
        for name, part in location.entry.parts(location.index.encoding):
            start, size = location.index.starts[name], np.dtype(NUMPY_TYPES[name]).itemsize
            ranges.append(ByteRange(shard, start + part.start * size, start + part.stop * size))
        return ranges

    def _damaged(self, location: Location, part: str, flaw: str) -> DamagedStore:
        return DamagedStore(self._where(location), f"its {part} are not what was written ({flaw})")

    def _where(self, location: Location) -> str:
        return f"{self.where}/{location.index.shard}: sample {location.entry.id}"
