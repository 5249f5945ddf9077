"""Read a store: only the chunks with the requested rows are read from disk, and every byte is checked."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise, product
from typing import NamedTuple, Self

import numpy as np
import torch
import xxhash
from torch import Tensor

from eagle3.errors import UserError
from eagle3.states.rows import Rows
from eagle3.states.store.codecs import Codec
from eagle3.states.store.files import ByteRange, DamagedStore, StoreFiles, open_files
from eagle3.states.store.folder import Provenance, read_indexes, read_own_manifest
from eagle3.states.store.shard import HIDDEN, NUMPY_TYPES, SampleEntry, ShardIndex, sample_digest, taught_rows
from eagle3.text.samples import Sample

# Threads that check and decode chunks in parallel.
THREADS = 4
# Approximate number of encoded bytes that one thread checks and decodes at a time.
RUN_BYTES = 1 << 20
ANY_TOKEN = 1 << 31  # the vocabulary's size where it is not known
# Which rows of a sample to read: those of `aux`, then those of `last`, argmax and logsumexp. Each is int64, from 0 to
# T-1, in any order; there may be none. Only rows that the store has (`Location.kept`).
RowNumbers = tuple[Tensor, Tensor]


class Location(NamedTuple):
    index: ShardIndex
    entry: SampleEntry

    def kept(self, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Masks [T] of the sample's rows in `aux` and in `last`. The first row never teaches, so T taught rows mean
        that every row is in `last`."""
        every = self.entry.taught == self.entry.tokens
        return self.index.encoding.reach.rows(loss_mask), taught_rows(loss_mask) | every


class Run(NamedTuple):
    """Consecutive chunks of one tensor of one sample, which are read together."""

    location: Location
    name: str  # `aux` or `last`
    codec: Codec
    edges: np.ndarray  # [chunks + 1]: the chunks' edges in the tensor, in bytes
    sums: np.ndarray  # [chunks]: checksums
    out: Tensor  # what they are decoded into

    @property
    def range(self) -> ByteRange:
        start = self.location.index.starts[self.name]
        return ByteRange(self.location.index.shard, start + int(self.edges[0]), start + int(self.edges[-1]))

    def decode(self, data: memoryview) -> None:
        """Raises ValueError if these are not the bytes that were written."""
        edges = (self.edges - self.edges[0]).tolist()
        for (start, stop), checksum in zip(pairwise(edges), self.sums.tolist(), strict=True):
            if xxhash.xxh3_64_intdigest(data[start:stop]) != checksum:
                raise ValueError("a checksum does not fit")
        self.codec.decode(data, np.diff(edges).tolist(), self.out)


class PlannedRows(NamedTuple):
    """Some rows of one tensor of one sample, which are there once all runs are decoded."""

    runs: list[Run]
    buffer: Tensor  # all rows of the runs' chunks
    places: Tensor | slice  # where the rows are in the buffer


def plan_rows(location: Location, name: str, facts: dict[str, np.ndarray], rows: Tensor) -> PlannedRows:
    """Plan the reading of some rows.

    name: `aux` or `last`
    facts: of the sample, see `HiddenStateStore._facts`
    rows: int64 [n], in any order: indices among the rows that the sample has in this tensor
    """
    encoding, edges, sums = location.index.encoding, facts[f"{name}_edges"], facts[f"{name}_sums"]
    size = encoding.chunk_rows(name)
    chunks = np.unique(rows.numpy() // size)
    counts = np.minimum(size, location.entry.rows(name) - chunks * size)
    ends = np.concatenate(([0], counts.cumsum()))  # of the chunks in the buffer
    buffer = torch.empty(int(ends[-1]), encoding.width(name), dtype=encoding.number_format)
    most_chunks = max(1, RUN_BYTES * len(sums) // max(1, int(edges[-1] - edges[0])))
    places, codec, runs = np.arange(len(chunks)), encoding.make_codec(name), []
    breaks = (np.diff(chunks) != 1) | (places[1:] % most_chunks == 0)
    for run in filter(len, np.split(places, np.flatnonzero(breaks) + 1)):
        first, stop = chunks[run[0]], chunks[run[-1]] + 1
        out = buffer[ends[run[0]] : ends[run[-1] + 1]]
        runs.append(Run(location, name, codec, edges[first : stop + 1], sums[first:stop], out))
    decoded = torch.from_numpy((np.repeat(chunks * size - ends[:-1], counts) + np.arange(ends[-1])).astype(np.int64))
    return PlannedRows(runs, buffer, slice(None) if torch.equal(decoded, rows) else torch.searchsorted(decoded, rows))


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
        return [_tokens(*each) for each in zip(locations, self._facts(locations), strict=True)]

    def read(self, samples: Sequence[Sample], rows: Sequence[RowNumbers]) -> list[Rows]:
        """Read rows of these samples, with hidden states and logits in the store's dtype. However many samples there
        are, this takes two rounds of reads. Raises UserError if one does not begin with the tokens that it has here."""
        for sample_id in self.missing(sample.id for sample in samples):
            raise UserError(f"{self.where}: sample {sample_id!r} is not in the store; run capture.py, which adds it")
        return self.read_at([self.locations[sample.id] for sample in samples], rows, samples)

    def read_at(
        self, locations: Sequence[Location], rows: Sequence[RowNumbers], samples: Sequence[Sample] | None = None
    ) -> list[Rows]:
        """Like `read`, for samples at known locations, whose tokens are only compared if they are given."""
        all_facts, plans = self._facts(locations), []
        required = samples or [None] * len(locations)
        for location, wanted, facts, sample in zip(locations, rows, all_facts, required, strict=True):
            tokens = _tokens(location, facts)
            if sample is not None:
                self._require_tokens(location, tokens, sample)
            for name, mask, indices in zip(HIDDEN, location.kept(tokens.loss_mask), wanted, strict=True):
                assert bool((indices >= 0).all() and mask[indices].all()), f"rows of {name} that are not stored"
                plans.append(plan_rows(location, name, facts, (mask.cumsum(0) - 1)[indices]))
        runs = [run for plan in plans for run in plan.runs]
        data = self.files.fetch([run.range for run in runs])
        decoding = [self._threads.submit(self._decode, *each) for each in zip(runs, data, strict=True)]
        wait(decoding)  # even if one fails: what is mapped must not be touched once the caller goes on
        for each in decoding:
            each.result()
        hidden = iter(plan.buffer[plan.places] for plan in plans)
        results = []
        for location, (_, teacher), facts in zip(locations, rows, all_facts, strict=True):
            aux, values, places = next(hidden), next(hidden), teacher.numpy()
            columns = facts["argmax"][places].astype(np.int64), facts["logsumexp"][places]
            predictions = location.index.encoding.teacher(values, *map(torch.from_numpy, columns))
            if flaw := predictions.flaw(self.vocab_size):
                raise DamagedStore(self._where(location), f"has {flaw}", "out of range")
            results.append(Rows(aux, predictions))
        return results

    def _decode(self, run: Run, data: memoryview) -> None:
        try:
            run.decode(data)
        except ValueError as error:
            raise self._damaged(run.location, f"{run.name} hidden states", str(error)) from error

    def _facts(self, locations: Sequence[Location]) -> list[dict[str, np.ndarray]]:
        """For some samples, read everything but the hidden states, by name (see NUMPY_TYPES), and check it against the
        digests in the index."""
        ranges = [index.range(name, rows) for index, entry in locations for name, rows in entry.parts(index.encoding)]
        parts = iter(self.files.fetch(ranges))
        all_facts = [{name: np.frombuffer(next(parts), kind) for name, kind in NUMPY_TYPES.items()} for _ in locations]
        for location, facts in zip(locations, all_facts, strict=True):
            if sample_digest(facts.values()) != location.entry.digest:
                raise self._damaged(location, "tokens or checksums", "their digest does not fit")
        return all_facts

    def _require_tokens(self, location: Location, stored: Sample, required: Sample) -> None:
        """Raises UserError unless the sample begins with these tokens."""
        columns = ("ids", stored.ids, required.ids), ("loss mask", stored.loss_mask, required.loss_mask)
        for kind, actual, expected in columns:
            if not torch.equal(actual[: len(expected)], expected):
                raise UserError(
                    f"{self._where(location)}: its hidden states were captured from other tokens ({kind}); delete "
                    f"{location.index.shard}, and run capture.py, which captures its samples again"
                )

    def _damaged(self, location: Location, part: str, flaw: str) -> DamagedStore:
        return DamagedStore(self._where(location), f"its {part} are not what was written ({flaw})")

    def _where(self, location: Location) -> str:
        return f"{self.where}/{location.index.shard}: sample {location.entry.id}"


def _tokens(location: Location, facts: dict[str, np.ndarray]) -> Sample:
    columns = facts["ids"].astype(np.int64), facts["loss_mask"].copy()
    return Sample(location.entry.id, *map(torch.from_numpy, columns))
