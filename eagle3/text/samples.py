"""Samples ready for training (token ids and loss mask), packed into files and checked whenever they are read.

If a recipe does not train on all of a sample's supervised tokens, `Spans` chooses those that a step learns from.
"""

import hashlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from eagle3.console import counted
from eagle3.errors import UserError

DIGEST_BYTES = 16


def _damaged(where: Path | str, flaw: str) -> UserError:
    """The error for samples that are incomplete or differ from what was written."""
    return UserError(
        f"{where}: {flaw}; start again (train.py: with --resume), and the tokenised data is checked and built anew"
    )


@dataclass(frozen=True)
class Sample:
    id: str  # hex digest of the contents
    ids: torch.Tensor  # LongTensor [T]
    loss_mask: torch.Tensor  # BoolTensor [T], True for tokens that the target generates


class Split(NamedTuple):
    train: "SampleSet"
    held_out: "SampleSet"


def sample_digest(ids: np.ndarray, loss_mask: np.ndarray) -> bytes:
    """The first 16 bytes of the sha256 over ids (int32, little endian) and loss mask (one byte per token)."""
    digest = hashlib.sha256(np.ascontiguousarray(ids, "<i4"))
    digest.update(np.ascontiguousarray(loss_mask, bool))
    return digest.digest()[:DIGEST_BYTES]


# The files of a set, with the type and shape of a row, which is that of a sample or a token.
COLUMNS = {
    "ends": np.dtype("<i8"),  # of the samples: tokens up to and including each
    "digests": np.dtype(("|u1", (DIGEST_BYTES,))),
    "ids": np.dtype("<i4"),
    "loss_mask": np.dtype("|b1"),
}


class TokenFile:
    """A column of a set in `folder` with one number per token, read in slices. Threads may share it. Raises
    UserError.

    It is not memory-mapped, because touching a mapped page kills the process if the file has shrunk or the disk fails.
    """

    def __init__(self, folder: Path, column: str) -> None:
        self.path, self.dtype = folder / column, COLUMNS[column]
        self.descriptor = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)
        self.length = os.fstat(self.descriptor).st_size // self.dtype.itemsize

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, tokens: slice) -> np.ndarray:
        values = np.empty(tokens.stop - tokens.start, self.dtype)
        try:
            count = os.preadv(self.descriptor, [values.view(np.uint8)], tokens.start * self.dtype.itemsize)
        except OSError as error:
            raise _damaged(self.path, f"cannot be read ({error.strerror})") from error
        if count < values.nbytes:
            raise _damaged(self.path, "has lost its end")
        return values


class SampleWriter(AbstractContextManager):
    """Writes a set into an existing folder, sample by sample. After `flush`, and at the end, the files are a whole set.
    Raises OSError.

    samples, tokens: how much of a set that is there already to keep and to continue
    """

    def __init__(self, folder: Path, samples: int = 0, tokens: int = 0) -> None:
        self.tokens = tokens
        # Ordinary writes: a full disk gives an OSError, whereas a memory map would kill the process.
        self.files = {name: (folder / name).open("r+b" if samples else "wb") for name in COLUMNS}
        for (name, file), rows in zip(self.files.items(), (samples, samples, tokens, tokens), strict=True):
            file.truncate(rows * COLUMNS[name].itemsize)
            file.seek(0, os.SEEK_END)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            for file in self.files.values():
                file.close()

    def add(self, samples: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        """Write more samples, as (ids, loss_mask) pairs."""
        for ids, loss_mask in samples:
            self.tokens += len(ids)
            row = (self.tokens, np.frombuffer(sample_digest(ids, loss_mask), np.uint8), ids, loss_mask)
            for (name, file), values in zip(self.files.items(), row, strict=True):
                file.write(np.ascontiguousarray(values, COLUMNS[name].base))

    def flush(self) -> None:
        """Bring what was added to disk."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())  # some file systems report errors only here


class JoinedTokens:
    """The tokens of several files, one after another, read in slices."""

    def __init__(self, parts: Sequence[np.ndarray | TokenFile]) -> None:
        self.parts, self.starts = parts, np.cumsum([0, *map(len, parts)]).tolist()

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, tokens: slice) -> np.ndarray:
        pieces = []
        for part, start in zip(self.parts, self.starts, strict=False):
            first, last = max(tokens.start - start, 0), min(tokens.stop - start, len(part))
            if first < last:
                pieces.append(part[first:last])
        return np.concatenate([*pieces, self.parts[0][0:0]])


@dataclass(frozen=True)
class SampleSet:
    """Samples packed one after another. Reading tokens checks each sample's digest, and may raise UserError."""

    ids: np.ndarray | TokenFile | JoinedTokens  # int32 [tokens]
    loss_mask: np.ndarray | TokenFile | JoinedTokens  # bool [tokens]
    offsets: np.ndarray  # int64 [stored + 1]: where each stored sample begins, and where the last one ends
    digests: np.ndarray  # uint8 [stored, 16]
    indices: np.ndarray  # int64 [samples]: which stored samples this set has, in order
    origin: str = "samples in memory"  # the folder, for messages

    @staticmethod
    def pack(encoded: Sequence[tuple[np.ndarray, np.ndarray]]) -> "SampleSet":
        """A set in memory, from (ids, loss_mask) pairs."""
        digests = [np.frombuffer(sample_digest(*pair), np.uint8) for pair in encoded]
        return SampleSet(
            np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in encoded)], dtype=np.int32),
            np.concatenate([np.zeros(0, bool), *(mask for _, mask in encoded)], dtype=bool),
            np.cumsum([0, *(len(ids) for ids, _ in encoded)], dtype=np.int64),
            np.array(digests, np.uint8).reshape(-1, DIGEST_BYTES),
            np.arange(len(encoded)),
        )

    @staticmethod
    def open(folder: Path) -> "SampleSet":
        """The set stored in `folder`. Raises UserError.

        Offsets and digests are read immediately, so that `checksum` can be compared; tokens are read on demand.
        """
        try:
            ids, loss_mask = TokenFile(folder, "ids"), TokenFile(folder, "loss_mask")
            ends, digests = (np.fromfile(folder / name, COLUMNS[name]) for name in ("ends", "digests"))
        except OSError as error:
            raise _damaged(folder, f"cannot be read ({error.strerror})") from error
        offsets = np.append(0, ends)
        if len(digests) != len(ends) or (np.diff(offsets) < 0).any() or not offsets[-1] == len(ids) == len(loss_mask):
            raise _damaged(folder, "its files do not fit together")
        return SampleSet(ids, loss_mask, offsets, digests, np.arange(len(digests)), str(folder))

    @staticmethod
    def joined(sets: Sequence["SampleSet"]) -> "SampleSet":
        """The stored samples of all sets, one set after another. Nothing is copied."""
        if len(sets) == 1:
            return sets[0]
        starts = np.cumsum([0, *(len(each.ids) for each in sets)])
        edges = [each.offsets[1:] + start for each, start in zip(sets, starts, strict=False)]
        digests = np.concatenate([each.digests for each in sets])
        return SampleSet(
            JoinedTokens([each.ids for each in sets]),
            JoinedTokens([each.loss_mask for each in sets]),
            np.concatenate([[0], *edges]),
            digests,
            np.arange(len(digests)),
            ", ".join(each.origin for each in sets),
        )

    @property
    def checksum(self) -> str:
        """32 hex digits that identify the set: a hash of the samples' lengths and digests, which cover the tokens."""
        contents = self.lengths.astype("<i8").tobytes() + self.digests[self.indices].tobytes()
        return hashlib.sha256(contents).hexdigest()[:32]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        stored_index = int(self.indices[index])
        ids, loss_mask = self._read(range(stored_index, stored_index + 1))
        return Sample(
            self.digests[stored_index].tobytes().hex(),
            torch.from_numpy(ids.astype(np.int64)),
            torch.from_numpy(loss_mask.copy()),
        )

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, int64 [samples]."""
        return np.diff(self.offsets)[self.indices]

    def count(self, *choices: Callable[[torch.Tensor], torch.Tensor]) -> np.ndarray:
        """Count the tokens that each of `choices` selects in each sample: int64 [samples, choices].

        choices: functions that turn a loss mask [T] into a selection, bool [T]
        """
        counts: list[list[int]] = []
        for run in self._runs():
            masks = torch.from_numpy(self._read(run)[1])
            counts += [[int(choice(masks[a:b]).sum()) for choice in choices] for a, b in pairwise(self._edges(run))]
        return np.array(counts, np.int64).reshape(-1, len(choices))

    @property
    def sample_ids(self) -> list[str]:
        """The id of each sample."""
        return [row.tobytes().hex() for row in self.digests[self.indices]]

    def subset(self, indices: Sequence[int] | np.ndarray) -> "SampleSet":
        """The samples at these positions of this set, in this order. Nothing is copied."""
        return replace(self, indices=self.indices[np.asarray(indices, np.int64)])

    def masked(self, mask: Callable[[Sample], torch.Tensor]) -> "SampleSet":
        """The same samples with the loss masks that `mask` returns, and therefore with new sample ids.

        The masks are in memory, but the operating system allocates no pages for long unsupervised stretches.
        """
        loss_mask, digests = np.zeros(len(self.loss_mask), bool), self.digests.copy()
        for index, stored_index in enumerate(self.indices.tolist()):
            sample = self[index]
            sample_mask = mask(sample).numpy()
            loss_mask[int(self.offsets[stored_index]) + np.flatnonzero(sample_mask)] = True
            digests[stored_index] = np.frombuffer(sample_digest(sample.ids.numpy(), sample_mask), np.uint8)
        return replace(self, loss_mask=loss_mask, digests=digests)

    def sorted_by_id(self) -> "SampleSet":
        """The samples in an order that does not depend on how they were read."""
        return self.subset(np.lexsort(self.digests[self.indices].T[::-1]))

    def split_held_out(self, fraction: float, seed: int) -> Split:
        """Hold out about `fraction` of the samples. A hash of sample and seed decides, not their order.

        Identical samples stay together. If fraction > 0 and there are at least two samples, at least one is held out
        and at least one is left to train on. Raises UserError if that is impossible because all samples are identical.
        """
        if not fraction or len(self) < 2:
            return Split(self, self.subset([]))
        draws = self.draws(seed)
        if (draws == draws[0]).all():
            raise UserError(f"data: all {len(self)} samples are identical, so none can be held out; add other data")
        held_out = ((draws < fraction * 2.0**64) | (draws == draws.min())) & (draws != draws.max())
        return Split(self.subset(np.flatnonzero(~held_out)), self.subset(np.flatnonzero(held_out)))

    def draws(self, seed: int, purpose: bytes = b"") -> np.ndarray:
        """A random number for each sample, from a hash of sample, seed and purpose: uint64 [samples]."""
        salt = purpose + seed.to_bytes(8, "little", signed=True)
        hashes = (hashlib.sha256(salt + row.tobytes()).digest() for row in self.digests[self.indices])
        return np.array([int.from_bytes(digest[:8], "little") for digest in hashes], np.uint64)

    def by_repetition(self) -> Iterator[tuple[int, "SampleSet"]]:
        """The different samples of this set, in parts: those that it has once, twice and so on."""
        stored, times = np.unique(self.indices, return_counts=True)
        for number in np.unique(times).tolist():
            yield number, replace(self, indices=stored[times == number])

    def token_chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (ids, loss_mask) of all tokens in order: a few million at a time, or a single longer sample."""
        return map(self._read, self._runs())

    def _runs(self, max_tokens: int = 1 << 22) -> Iterator[range]:
        """Group all samples, in order, into runs that are stored contiguously and have at most `max_tokens` tokens (or
        are a single longer sample)."""
        run = range(0)
        for stored_index in self.indices.tolist():
            if stored_index != run.stop or self.offsets[stored_index + 1] - self.offsets[run.start] > max_tokens:
                if run:
                    yield run
                run = range(stored_index, stored_index)
            run = range(run.start, stored_index + 1)
        if run:
            yield run

    def _edges(self, run: range) -> list[int]:
        """Offsets at which the run's samples begin and the last one ends, relative to the run's first token."""
        edges = self.offsets[run.start : run.stop + 1]
        return (edges - edges[0]).tolist()

    def _read(self, run: range) -> tuple[np.ndarray, np.ndarray]:
        """Read ids and loss_mask of some stored samples, and check them against their digests."""
        tokens = slice(int(self.offsets[run.start]), int(self.offsets[run.stop]))
        ids, loss_mask = self.ids[tokens], self.loss_mask[tokens]
        for stored_index, (a, b) in zip(run, pairwise(self._edges(run)), strict=True):
            if sample_digest(ids[a:b], loss_mask[a:b]) != self.digests[stored_index].tobytes():
                raise _damaged(self.origin, f"sample {stored_index + 1} of {len(self.digests)} does not fit its digest")
        return ids, loss_mask


@dataclass(frozen=True)
class Spans:
    """Up to `per_document` runs of `length` supervised tokens per document, drawn anew in each epoch, and the same on
    all ranks.

    A document's supervised tokens are cut into runs of `length`; the first run is shorter by a random number of tokens.
    Then `per_document` of these runs are drawn, so that all tokens are chosen equally often. With a window of W keys, a
    document costs at most about per_document x (W + length) rows, plus unsupervised tokens inside its runs, such as a
    user's turn.
    """

    length: int
    per_document: int
    seed: int

    def draw(self, sample: Sample, epoch: int) -> torch.Tensor:
        """Mask of the supervised tokens in this epoch's spans: bool [T]; the whole loss mask if all tokens fit."""
        positions = sample.loss_mask.nonzero().flatten()
        if len(positions) <= self.most:
            return sample.loss_mask
        # Random numbers from a hash: a library's generator may change, while stores keep what was drawn.
        words = (f"{self.seed} {epoch} {index} {sample.id}".encode() for index in count())
        numbers = (int.from_bytes(hashlib.sha256(word).digest()[:8], "little") for word in words)
        runs = (torch.arange(len(positions)) + next(numbers) % self.length) // self.length
        total, chosen_runs = int(runs[-1]) + 1, set[int]()
        while len(chosen_runs) < self.per_document:
            chosen_runs.add(next(numbers) % total)
        mask = torch.zeros_like(sample.loss_mask)
        mask[positions[torch.isin(runs, torch.tensor([*chosen_runs]))]] = True
        return mask

    def fixed(self, samples: SampleSet) -> SampleSet:
        """The samples with the first epoch's spans as loss masks, as a store has them."""
        return samples.masked(lambda sample: self.draw(sample, 0))

    def __str__(self) -> str:
        return f"data.spans={{length: {self.length}, per_document: {self.per_document}}} and data.seed={self.seed}"

    @property
    def most(self) -> int:
        """Largest number of supervised tokens that a document's spans hold."""
        return self.length * self.per_document

    def describe(self, samples: SampleSet, anew: bool) -> str:
        """Describe in words how many of the samples' supervised tokens are in spans. anew: whether each epoch draws new
        spans."""
        supervised = samples.count(lambda loss_mask: loss_mask)[:, 0]
        long_samples, span_tokens = int((supervised > self.most).sum()), int(np.minimum(supervised, self.most).sum())
        if not long_samples:
            return (
                "data.spans: changes nothing here, because no sample has more supervised tokens than the "
                f"{self.most:,} that {self.per_document} spans of {self.length:,} hold"
            )
        frequency = "drawn anew in each epoch" if anew else "the same in each epoch, as the store has them"
        return (
            f"data.spans: up to {span_tokens:,} of {supervised.sum():,} supervised tokens an epoch, {frequency}; "
            f"{long_samples:,} of {counted(len(samples), 'sample')} have more than {self.per_document} spans of "
            f"{self.length:,} hold"
        )
