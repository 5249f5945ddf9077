"""Reads a store: the chunks that hold the rows asked for leave the disk, nothing else does, and every byte is checked."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Self

import numpy as np
import torch
import xxhash
from torch import Tensor

from eagle3.data.store.codecs import Codec
from eagle3.data.store.files import Range, StoreFiles, open_files
from eagle3.data.store.folder import Provenance, read_indexes, read_manifest, require_provenance
from eagle3.data.store.shard import (
    DATA_START,
    HIDDEN,
    NUMPY_TYPES,
    Encoding,
    Entry,
    ShardHeader,
    ShardIndex,
    sample_digest,
    taught_rows,
)
from eagle3.errors import UserError

# Threads that check and decode chunks beside each other.
THREADS = 4


class RowRequest(NamedTuple):
    """Rows 0..T-1 of a sample, int64, any order, maybe none: of `aux`, and of what the teacher needs (`last`, argmax,
    logsumexp), which must follow supervised rows."""

    sample_id: str
    aux: Tensor
    teacher: Tensor


class StoredRows(NamedTuple):
    """aux [n, 3*Ht] and last [m, Ht] in the store's number format; argmax [m] int64 and logsumexp [m] fp32."""

    aux: Tensor
    last: Tensor
    argmax: Tensor
    logsumexp: Tensor


class StoredTokens(NamedTuple):
    """ids [T] int64 and loss_mask [T] bool of one sample."""

    ids: Tensor
    loss_mask: Tensor


class Location(NamedTuple):
    index: ShardIndex
    entry: Entry


class HiddenStateStore:
    """An opened store. Threads may share it, and it uses several itself.

    Of samples that two shards have, the first shard's counts. Raises UserError for what is missing or damaged.
    """

    def __init__(self, files: StoreFiles, locations: dict[str, Location], record: Provenance) -> None:
        self.files, self.locations, self.record = files, locations, record
        self.where = files.where
        self._headers: dict[str, ShardHeader] = {}
        self._codecs: dict[tuple[Encoding, str], Codec] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="store")

    @classmethod
    def open(cls, path: str, provenance: Provenance) -> Self:
        """path: a folder or an fsspec URL. provenance: what this run needs, codec and dtype included.

        Raises UserError naming the field where they differ, and the file where a shard is missing or has lost bytes.
        """
        files = open_files(path)
        manifest = read_manifest(files)
        require_provenance(files.where, manifest.provenance, provenance)
        locations: dict[str, Location] = {}
        for index in read_indexes(files):
            for entry in index.samples:
                locations.setdefault(entry.id, Location(index, entry))
        return cls(files, locations, manifest.record)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self.locations

    def __len__(self) -> int:
        return len(self.locations)

    def __iter__(self) -> Iterator[str]:
        return iter(self.locations)

    def missing(self, sample_ids: Iterable[str]) -> list[str]:
        """Those of `sample_ids` that the store lacks, in their order."""
        return [sample_id for sample_id in sample_ids if sample_id not in self.locations]

    def tokens(self, sample_id: str) -> StoredTokens:
        """What the sample was captured from."""
        return self.tokens_at(self._locate(sample_id))

    def tokens_at(self, location: Location) -> StoredTokens:
        """The same of a sample at a given place."""
        (facts,) = self._facts([location])
        return StoredTokens(torch.from_numpy(facts.ids.astype(np.int64)), torch.from_numpy(facts.loss_mask.copy()))

    def read(self, requests: Sequence[RowRequest]) -> list[StoredRows]:
        """The rows of all requests; two rounds of reads, however many there are."""
        return self.read_at([self._locate(request.sample_id) for request in requests], requests)

    def read_at(self, locations: Sequence[Location], requests: Sequence[RowRequest]) -> list[StoredRows]:
        """The same of samples at given places."""
        known = self._facts(locations)
        wanted: list[ChunkReads] = []
        for location, request, facts in zip(locations, requests, known, strict=True):
            taught = taught_rows(torch.from_numpy(facts.loss_mask.copy()))
            assert bool(taught[request.teacher].all()), "last hidden states are stored where they teach"
            rows = {"aux": request.aux, "last": (taught.cumsum(0) - 1)[request.teacher]}
            for name in HIDDEN:
                wanted.append(self._plan(location, name, rows[name], facts))
        ranges = iter(self.files.fetch([chunk.place for reads in wanted for chunk in reads.chunks]))
        jobs = [(reads, chunk, next(ranges)) for reads in wanted for chunk in reads.chunks]
        flaws = list(self._threads.map(_decode, *zip(*jobs, strict=True))) if jobs else []  # all end before one is told
        if any(flaws):
            raise UserError(next(filter(None, flaws)))
        found = iter(reads.rows() for reads in wanted)
        return [
            StoredRows(
                aux=next(found),
                last=next(found),
                argmax=torch.from_numpy(facts.argmax[request.teacher.numpy()].astype(np.int64)),
                logsumexp=torch.from_numpy(facts.logsumexp[request.teacher.numpy()]),
            )
            for request, facts in zip(requests, known, strict=True)
        ]

    def _locate(self, sample_id: str) -> Location:
        if sample_id not in self.locations:
            raise UserError(f"{self.where}: sample {sample_id!r} is not in the store; run capture.py, which adds it")
        return self.locations[sample_id]

    def _facts(self, locations: Sequence[Location]) -> list["SampleFacts"]:
        """All that is small of some samples, checked against the digests in the index."""
        self.read_headers({location.index.shard for location in locations})
        ranges = [self._fact_ranges(location) for location in locations]
        found = iter(self.files.fetch([place for places in ranges for place in places]))
        facts = []
        for location, places in zip(locations, ranges, strict=True):
            columns = [next(found) for _ in places]
            kinds = [*NUMPY_TYPES.values(), *4 * ["<u8"]]
            arrays = [np.frombuffer(column, kind) for column, kind in zip(columns, kinds, strict=True)]
            of_sample = SampleFacts(*arrays)
            if of_sample.digest() != location.entry.digest:
                raise UserError(self._damaged(location, "tokens or checksums"))
            facts.append(of_sample)
        return facts

    def read_headers(self, shards: Iterable[str]) -> None:
        """Know where each tensor of these shards begins; UserError naming one whose header is broken."""
        new = sorted(set(shards) - self._headers.keys())
        for shard, text in zip(new, self.files.fetch([Range(shard, 0, DATA_START) for shard in new]), strict=True):
            self._headers[shard] = ShardHeader.parse(text, f"{self.where}/{shard}")

    def _fact_ranges(self, location: Location) -> list[Range]:
        index, entry = location
        starts = self._headers[index.shard].starts

        def of(name: str, itemsize: int, first: int, count: int) -> Range:
            return Range(index.shard, starts[name] + first * itemsize, starts[name] + (first + count) * itemsize)

        ranges = [of(name, np.dtype(kind).itemsize, entry.row, entry.tokens) for name, kind in NUMPY_TYPES.items()]
        for name, first in (("aux", entry.aux_chunk), ("last", entry.last_chunk)):
            rows = entry.tokens if name == "aux" else entry.taught
            chunks = -(-rows // index.encoding.chunk_rows(name))
            before = min(first, 1)  # the end of the chunk before is where the first one starts
            ranges += [of(f"{name}_ends", 8, first - before, chunks + before), of(f"{name}_sums", 8, first, chunks)]
        return ranges

    def _plan(self, location: Location, name: str, rows: Tensor, facts: "SampleFacts") -> "ChunkReads":
        """Which chunks hold these rows of `name`, where they lie, and where they will be decoded."""
        index, entry = location
        total, ends, sums = (
            (entry.tokens, facts.aux_ends, facts.aux_sums)
            if name == "aux"
            else (entry.taught, facts.last_ends, facts.last_sums)
        )
        assert not len(rows) or 0 <= int(rows.min()) <= int(rows.max()) < total, (
            f"rows outside a sample of {total} rows"
        )
        encoding = index.encoding
        size, start = encoding.chunk_rows(name), self._headers[index.shard].starts[name]
        starts = ends[:-1] if len(ends) > len(sums) else np.concatenate((np.zeros(1, "<u8"), ends[:-1]))
        chunks, decoded = torch.unique(rows // size), 0
        reads, places = [], []
        for chunk in chunks.tolist():
            count = min(size, total - chunk * size)
            begin, end = int(starts[chunk]), int(ends[chunk - len(sums)])
            place = Range(index.shard, start + begin, start + end)
            reads.append(Chunk(place, int(sums[chunk]), slice(decoded, decoded + count)))
            places.append(torch.arange(chunk * size, chunk * size + count))
            decoded += count
        codec = self._codecs.get((encoding, name))
        if codec is None:
            codec = self._codecs[encoding, name] = encoding.make_codec(name)
        buffer = torch.empty(decoded, encoding.width(name), dtype=encoding.number_format)
        decoded_rows = torch.cat(places) if places else rows
        return ChunkReads(codec, reads, buffer, decoded_rows, rows, self._damaged(location, name))

    def _damaged(self, location: Location, what: str) -> str:
        return (
            f"{self.where}/{location.index.shard}: sample {location.entry.id}: its {what} were damaged on disk; "
            "run capture.py --repair"
        )


class SampleFacts(NamedTuple):
    """What is small of one sample, in the order of the ranges read; *_ends begin one chunk earlier where there is one."""

    ids: np.ndarray
    argmax: np.ndarray
    logsumexp: np.ndarray
    loss_mask: np.ndarray
    aux_ends: np.ndarray
    aux_sums: np.ndarray
    last_ends: np.ndarray
    last_sums: np.ndarray

    def digest(self) -> str:
        """As `ShardWriter` made it."""
        own = [ends[len(ends) - len(sums) :] for ends, sums in (self[4:6], self[6:8])]
        return sample_digest((*self[:4], own[0], self.aux_sums, own[1], self.last_sums))


class Chunk(NamedTuple):
    """Where its bytes lie, their checksum, and the rows of the buffer that it fills."""

    place: Range
    checksum: int
    rows: slice


class ChunkReads(NamedTuple):
    """The chunks of one tensor of one sample: decoded into `buffer`, whose rows are `decoded` of the sample."""

    codec: Codec
    chunks: list[Chunk]
    buffer: Tensor
    decoded: Tensor
    wanted: Tensor
    damaged: str

    def rows(self) -> Tensor:
        if torch.equal(self.decoded, self.wanted):
            return self.buffer
        return self.buffer[torch.searchsorted(self.decoded, self.wanted)]


def _decode(reads: ChunkReads, chunk: Chunk, data: memoryview) -> str | None:
    """Check one chunk and decode it into its place; what is wrong with it, if anything is."""
    if xxhash.xxh3_64_intdigest(data) != chunk.checksum:
        return reads.damaged
    try:
        reads.codec.decode(data, reads.buffer[chunk.rows])
    except ValueError as error:  # written so: the checksum fits
        return f"{reads.damaged} ({error})"
    return None
