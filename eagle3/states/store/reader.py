"""Reads a store: the chunks that hold the rows asked for leave the disk, nothing else does, and every byte is checked."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from eagle3.errors import UserError
from eagle3.states.rows import Rows
from eagle3.states.store.chunks import ChunkReads, ChunkTable, plan_reads
from eagle3.states.store.files import DamagedStore, Range, StoreFiles, open_files
from eagle3.states.store.folder import Provenance, read_headers, read_indexes, read_own_manifest
from eagle3.states.store.shard import (
    HIDDEN,
    NUMPY_TYPES,
    Entry,
    ShardIndex,
    kept_rows,
    sample_digest,
)

# Threads that check and decode chunks beside each other.
THREADS = 4


class StoredTokens(NamedTuple):
    """ids [T] int64 and loss_mask [T] bool of one sample."""

    ids: Tensor
    loss_mask: Tensor


class RowRequest(NamedTuple):
    """Rows 0..T-1 of a sample, int64, any order, maybe none: of `aux`, which a store for a window must have (`seen_rows`), and
    of what the teacher needs (`last`, argmax, logsumexp), which must follow supervised rows. tokens: what the sample, or its beginning, must have been captured from;
    None for anything."""

    sample_id: str
    aux: Tensor
    teacher: Tensor
    tokens: StoredTokens | None = None


class Location(NamedTuple):
    index: ShardIndex
    entry: Entry


class HiddenStateStore:
    """An opened store. Threads may share it, and it uses several itself.

    provenance_digest: what its shards may carry, None where there is nothing to compare (a spool). Of samples that two
    shards have, the first shard's counts. Raises UserError for what is missing, damaged or another store's.
    """

    def __init__(
        self,
        files: StoreFiles,
        locations: dict[str, Location],
        record: Provenance,
        provenance_digest: str | None,
        threads: int = THREADS,
    ) -> None:
        self.files, self.locations, self.record = files, locations, record
        self.where, self.provenance_digest = files.where, provenance_digest
        self._starts: dict[str, dict[str, int]] = {}
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="store")

    @classmethod
    def open(
        cls, path: str, provenance: Provenance, threads: int = THREADS, report: Callable[[str], None] = print
    ) -> Self:
        """path: a folder or an fsspec URL. provenance: what this run needs, codec and dtype included. report: receives a
        line about what could not be checked.

        Raises UserError naming the field where they differ, and the file where a shard is missing, has lost bytes or is
        another store's.
        """
        files = open_files(path)
        manifest = read_own_manifest(files, provenance)
        locations: dict[str, Location] = {}
        indexes = read_indexes(files, manifest, report)
        for index in indexes:
            for entry in index.samples:
                locations.setdefault(entry.id, Location(index, entry))
        for encoding, name in product({index.encoding for index in indexes}, HIDDEN):
            encoding.make_codec(name)  # raises UserError where this machine cannot decode it
        return cls(files, locations, manifest.record, manifest.digest, threads)

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
        return self.tokens_at([self._locate(sample_id)])[0]

    def tokens_at(self, locations: Sequence[Location]) -> list[StoredTokens]:
        """The same of samples at given places."""
        return [facts.tokens for facts in self._facts(locations)]

    def read(self, requests: Sequence[RowRequest]) -> list[Rows]:
        """The rows of all requests, hidden states and logits in the store's number format; two rounds of reads, however many
        there are."""
        return self.read_at([self._locate(request.sample_id) for request in requests], requests)

    def read_at(self, locations: Sequence[Location], requests: Sequence[RowRequest]) -> list[Rows]:
        """The same of samples at given places."""
        known = self._facts(locations)
        wanted: list[ChunkReads] = []
        for location, request, facts in zip(locations, requests, known, strict=True):
            if request.tokens is not None:
                self._require_tokens(location, facts.tokens, request.tokens)
            encoding, loss_mask = location.index.encoding, facts.tokens.loss_mask
            kept = {"aux": encoding.seen_rows(loss_mask), "last": kept_rows(location.entry, loss_mask)}
            for name, asked in zip(HIDDEN, (request.aux, request.teacher), strict=True):
                inside = asked.numel() == 0 or 0 <= int(asked.min()) <= int(asked.max()) < len(loss_mask)
                assert inside, f"rows asked for, outside a sample of {len(loss_mask)} rows"
                assert bool(kept[name][asked].all()), f"{name} hidden states are stored where they teach or are seen"
                rows = (kept[name].cumsum(0) - 1)[asked]
                wanted.append(plan_reads(rows, facts.tables[name], encoding, name))
        self._decode([*zip(product(locations, HIDDEN), wanted, strict=True)])
        found = iter(reads.rows() for reads in wanted)
        rows = []
        for location, request, facts in zip(locations, requests, known, strict=True):
            aux, values, teacher = next(found), next(found), request.teacher.numpy()
            argmax, logsumexp = facts.argmax[teacher].astype(np.int64), facts.logsumexp[teacher]
            kind = location.index.encoding.teacher
            rows.append(Rows(aux, kind(values, torch.from_numpy(argmax), torch.from_numpy(logsumexp))))
        return rows

    def _decode(self, wanted: Sequence[tuple[tuple[Location, str], ChunkReads]]) -> None:
        """Read all chunks of tensors of samples, in one round, and decode them. Raises DamagedStore."""
        jobs = [(place, reads, run) for place, reads in wanted for run in reads.runs]
        ranges = []
        for (location, name), reads, run in jobs:
            start = self._starts[location.index.shard][name]
            ranges.append(Range(location.index.shard, *(start + edge for edge in reads.bytes_of(run))))
        data = self.files.fetch(ranges)
        flaws = list(self._threads.map(lambda job, of_run: job[1].decode(job[2], of_run), jobs, data))
        for ((location, name), _, _), flaw in zip(jobs, flaws, strict=True):  # when all have ended
            if flaw:
                raise self._damaged(location, f"{name} hidden states", flaw)

    def forget(self, shard: str) -> None:
        """Know nothing more of a shard that is about to be deleted."""
        self._starts.pop(shard, None)

    def _locate(self, sample_id: str) -> Location:
        if sample_id not in self.locations:
            raise UserError(f"{self.where}: sample {sample_id!r} is not in the store; run capture.py, which adds it")
        return self.locations[sample_id]

    def _facts(self, locations: Sequence[Location]) -> list["SampleFacts"]:
        """All that is small of some samples, checked against the digests in the index."""
        self.read_headers(location.index.shard for location in locations)
        found = iter(self.files.fetch([each for location in locations for each in self._fact_ranges(location)]))
        facts = []
        for location in locations:
            columns = [np.frombuffer(next(found), kind) for kind in NUMPY_TYPES.values()]
            tables, chunks = {}, []
            for name in HIDDEN:
                ends, sums = np.frombuffer(next(found), "<u8"), np.frombuffer(next(found), "<u8")
                bounds = ends if len(ends) > len(sums) else np.concatenate((np.zeros(1, "<u8"), ends))
                rows = location.entry.rows(name), location.index.encoding.chunk_rows(name)
                tables[name] = ChunkTable(bounds, sums, *rows)
                chunks += [bounds[1:], sums]
            if sample_digest((*columns, *chunks)) != location.entry.digest:
                raise self._damaged(location, "tokens or checksums", "their digest does not fit")
            ids, argmax, logsumexp, loss_mask = columns
            tokens = StoredTokens(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(loss_mask.copy()))
            facts.append(SampleFacts(tokens, argmax, logsumexp, tables))
        return facts

    def read_headers(self, shards: Iterable[str]) -> None:
        """Know where each tensor of these shards begins; UserError naming one whose header is broken or another store's."""
        new = sorted(set(shards) - self._starts.keys())
        self._starts |= read_headers(self.files, new, self.provenance_digest)

    def _require_tokens(self, location: Location, stored: StoredTokens, wanted: StoredTokens) -> None:
        """Raises UserError unless the sample begins with these."""
        for what, found, expected in zip(("token", "loss mask"), stored, wanted, strict=True):
            differing = "has fewer tokens"
            if len(found) >= len(expected):
                others = (found[: len(expected)] != expected).nonzero().flatten().tolist()
                if not others:
                    continue
                row = others[0]
                differing = f"{what} {row} is {found[row].item()} here and {expected[row].item()} in the data"
            shard = location.index.shard
            raise UserError(
                f"{self.where}/{shard}: sample {location.entry.id}: its hidden states were captured from other tokens "
                f"({differing}); delete {shard} and {location.index.name}, and run capture.py, which captures anew what they held"
            )

    def _fact_ranges(self, location: Location) -> list[Range]:
        index, entry = location
        starts = self._starts[index.shard]

        def of(name: str, itemsize: int, first: int, count: int) -> Range:
            return Range(index.shard, starts[name] + first * itemsize, starts[name] + (first + count) * itemsize)

        ranges = [of(name, np.dtype(kind).itemsize, entry.row, entry.tokens) for name, kind in NUMPY_TYPES.items()]
        for name in HIDDEN:
            first, chunks = entry.first_chunk(name), -(-entry.rows(name) // index.encoding.chunk_rows(name))
            before = min(first, 1)  # the end of the chunk before is where the first one starts
            ranges += [of(f"{name}_ends", 8, first - before, chunks + before), of(f"{name}_sums", 8, first, chunks)]
        return ranges

    def _damaged(self, location: Location, what: str, flaw: str) -> DamagedStore:
        where = f"{self.where}/{location.index.shard}: sample {location.entry.id}"
        return DamagedStore(where, f"its {what} are not what was written ({flaw})")


class SampleFacts(NamedTuple):
    """What is small of one sample of T tokens: argmax [T] int32, logsumexp [T] fp32, and where its chunks of aux and last
    lie."""

    tokens: StoredTokens
    argmax: np.ndarray
    logsumexp: np.ndarray
    tables: dict[str, ChunkTable]
