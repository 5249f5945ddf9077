"""Samples ready for training (token ids and loss mask), packed in files so that any number fits, and checked when read."""

import hashlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy

from eagle3.errors import UserError

DIGEST_BYTES = 16


class DamagedSamples(UserError):
    """Samples that are incomplete or not what was written. where: file or folder; flaw: what is wrong."""

    def __init__(self, where: Path | str, flaw: str) -> None:
        super().__init__(
            f"{where}: {flaw}; start again (train.py: with --resume), and the tokenised data is checked and built anew"
        )
        self.where, self.flaw = where, flaw


@dataclass(frozen=True)
class Sample:
    """id: hex digest of the contents; ids: LongTensor [T]; loss_mask: BoolTensor [T], True where the target generates."""

    id: str
    ids: torch.Tensor
    loss_mask: torch.Tensor


class Split(NamedTuple):
    train: "SampleSet"
    held_out: "SampleSet"


def sample_digest(ids: np.ndarray, loss_mask: np.ndarray) -> bytes:
    """The first 16 bytes of the sha256 over ids (int32, little endian) and mask (a byte each)."""
    digest = hashlib.sha256(np.ascontiguousarray(ids, "<i4"))
    digest.update(np.ascontiguousarray(loss_mask, bool))
    return digest.digest()[:DIGEST_BYTES]


class TokenFile:
    """One number for each token, in a .npy file of which slices are read. Not by a memory map: where a file loses bytes or
    a disk fails, touching a mapped page kills the process. Threads may share it. Raises DamagedSamples."""

    def __init__(self, path: Path, dtype: np.typing.DTypeLike) -> None:
        self.path, self.dtype = path, np.dtype(dtype)
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)
        with open(self.descriptor, "rb", closefd=False) as file:
            npy.read_magic(file)
            (self.length,), _, found = npy.read_array_header_1_0(file)
            self.start = file.tell()
        size = self.start + self.length * self.dtype.itemsize
        if found != self.dtype or os.fstat(self.descriptor).st_size != size:
            raise DamagedSamples(path, f"is not {self.length} numbers of type {self.dtype}")

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, tokens: slice) -> np.ndarray:
        found = np.empty(tokens.stop - tokens.start, self.dtype)
        rest, place = found.view(np.uint8), self.start + tokens.start * self.dtype.itemsize
        while len(rest):
            try:
                count = os.preadv(self.descriptor, [rest], place)
            except OSError as error:
                raise DamagedSamples(self.path, f"cannot be read ({error.strerror})") from error
            if not count:
                raise DamagedSamples(self.path, "has lost its end")
            rest, place = rest[count:], place + count
        return found


@dataclass(frozen=True)
class SampleSet:
    """Samples packed one after another. Whatever reads their tokens compares each sample with its digest, and raises
    DamagedSamples where it does not fit.

    ids: int32 [tokens]; loss_mask: bool [tokens]; offsets: int64 [stored + 1], where each stored sample begins and the
    last one ends; digests: uint8 [stored, 16]; indices: int64 [samples], which stored samples this set has, in order;
    origin: the folder, for messages.
    """

    ids: np.ndarray | TokenFile
    loss_mask: np.ndarray | TokenFile
    offsets: np.ndarray
    digests: np.ndarray
    indices: np.ndarray
    origin: str = "samples in memory"

    @staticmethod
    def pack(encoded: Sequence[tuple[np.ndarray, np.ndarray]]) -> "SampleSet":
        """A set in memory, of (ids, loss_mask) pairs."""
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
        """The set written in `folder`: where samples lie and their digests are read now, for `checksum` to be compared;
        tokens when asked for. Raises DamagedSamples."""
        try:
            ids, loss_mask = TokenFile(folder / "ids.npy", "<i4"), TokenFile(folder / "loss_mask.npy", bool)
            offsets, digests = (np.load(folder / name, allow_pickle=False) for name in ("offsets.npy", "digests.npy"))
        except DamagedSamples:
            raise
        except Exception as error:  # of a damaged header, which NumPy evaluates as Python, it may be anything
            raise DamagedSamples(folder, f"{error!s:.200}") from error
        fits = (
            (offsets.dtype, offsets.ndim, digests.dtype) == (np.int64, 1, np.uint8)
            and digests.shape == (len(offsets) - 1, DIGEST_BYTES)
            and offsets[0] == 0
            and bool((np.diff(offsets) >= 0).all())
            and offsets[-1] == len(ids) == len(loss_mask)
        )
        if not fits:
            raise DamagedSamples(folder, "its arrays do not fit together")
        return SampleSet(ids, loss_mask, offsets, digests, np.arange(len(digests)), str(folder))

    def write(self, folder: Path) -> None:
        """Write the files into an existing folder. Raises OSError."""
        tokens, digests = int(self.lengths.sum()), self.digests[self.indices]
        offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        for name, dtype, shape, parts in (
            ("offsets", "<i8", offsets.shape, [offsets]),
            ("digests", "|u1", digests.shape, [digests]),
            ("ids", "<i4", (tokens,), (ids for ids, _ in self.token_chunks())),
            ("loss_mask", "|b1", (tokens,), (loss_mask for _, loss_mask in self.token_chunks())),
        ):
            _write_array(folder / f"{name}.npy", dtype, shape, parts)

    @property
    def checksum(self) -> str:
        """Of the samples' lengths and digests, 32 hexadecimal digits. With the tokens, which the digests vouch for, that
        is all that a set is."""
        contents = self.lengths.astype("<i8").tobytes() + self.digests[self.indices].tobytes()
        return hashlib.sha256(contents).hexdigest()[:32]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        stored = int(self.indices[index])
        ids, loss_mask = self._read(range(stored, stored + 1))
        digest = self.digests[stored].tobytes()
        return Sample(digest.hex(), torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(loss_mask.copy()))

    @property
    def lengths(self) -> np.ndarray:
        """int64 [samples]: tokens of each sample."""
        return np.diff(self.offsets)[self.indices]

    def count(self, *choices: Callable[[torch.Tensor], torch.Tensor]) -> np.ndarray:
        """int64 [samples, choices]: how many rows of each sample each of them chooses (bool [T]) by its loss mask [T]."""
        counts: list[list[int]] = []
        for run in self._runs():
            _, loss_mask = self._read(run)
            masks = torch.from_numpy(loss_mask)
            counts += [[int(chosen(masks[a:b]).sum()) for chosen in choices] for a, b in pairwise(self._edges(run))]
        return np.array(counts, np.int64).reshape(-1, len(choices))

    @property
    def sample_ids(self) -> list[str]:
        """The id of each sample."""
        return [row.tobytes().hex() for row in self.digests[self.indices]]

    def subset(self, indices: Sequence[int] | np.ndarray) -> "SampleSet":
        """The samples at these positions of this set, in the order given; nothing is copied."""
        return replace(self, indices=self.indices[np.asarray(indices, np.int64)])

    def masked(self, mask: Callable[[Sample], torch.Tensor]) -> "SampleSet":
        """The same samples with the loss masks that `mask` makes of them, and so with other ids. The masks are in memory, but
        of what they leave unsupervised the operating system keeps no pages."""
        loss_mask, digests = np.zeros(len(self.loss_mask), bool), self.digests.copy()
        for index, stored in enumerate(self.indices.tolist()):
            sample = self[index]
            chosen = mask(sample).numpy()
            loss_mask[int(self.offsets[stored]) + np.flatnonzero(chosen)] = True
            digests[stored] = np.frombuffer(sample_digest(sample.ids.numpy(), chosen), np.uint8)
        return replace(self, loss_mask=loss_mask, digests=digests)

    def sorted_by_id(self) -> "SampleSet":
        """An order that does not depend on how the samples were read."""
        return self.subset(np.lexsort(self.digests[self.indices].T[::-1]))

    def split_held_out(self, fraction: float, seed: int) -> Split:
        """Hold out about `fraction` of the samples, whatever their order: a hash of sample and seed decides on each.

        Identical samples stay together. At least one sample is held out if fraction > 0 and there are two, and at least
        one is left to train on; where that cannot be, because all are identical, a UserError says so.
        """
        if not fraction or len(self) < 2:
            return Split(self, self.subset([]))
        salt = seed.to_bytes(8, "little", signed=True)
        rows = self.digests[self.indices]
        hashes = (hashlib.sha256(salt + row.tobytes()).digest() for row in rows)
        draws = np.array([int.from_bytes(digest[:8], "little") for digest in hashes], np.uint64)
        if (draws == draws[0]).all():
            raise UserError(f"data: all {len(self)} samples are identical, so none can be held out; add other data")
        held_out = ((draws < fraction * 2.0**64) | (draws == draws.min())) & (draws != draws.max())
        return Split(self.subset(np.flatnonzero(~held_out)), self.subset(np.flatnonzero(held_out)))

    def token_chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids, loss_mask) of all tokens in order, some millions at a time, or of one sample that is longer."""
        for run in self._runs():
            yield self._read(run)

    def _runs(self, most: int = 1 << 22) -> Iterator[range]:
        """All samples in order, those that are stored one after another together, up to `most` tokens."""
        run = range(0)
        for stored in self.indices.tolist():
            if stored != run.stop or self.offsets[stored + 1] - self.offsets[run.start] > most:
                if run:
                    yield run
                run = range(stored, stored)
            run = range(run.start, stored + 1)
        if run:
            yield run

    def _edges(self, run: range) -> list[int]:
        """Where stored samples begin, and the last one ends, among their tokens."""
        edges = self.offsets[run.start : run.stop + 1]
        return (edges - edges[0]).tolist()

    def _read(self, run: range) -> tuple[np.ndarray, np.ndarray]:
        """ids and loss_mask of some stored samples, which are what they were when they were digested."""
        tokens = slice(int(self.offsets[run.start]), int(self.offsets[run.stop]))
        ids, loss_mask = self.ids[tokens], self.loss_mask[tokens]
        for stored, (a, b) in zip(run, pairwise(self._edges(run)), strict=True):
            if sample_digest(ids[a:b], loss_mask[a:b]) != self.digests[stored].tobytes():
                raise DamagedSamples(self.origin, f"sample {stored + 1} of {len(self.digests)} does not fit its digest")
        return ids, loss_mask


def _write_array(path: Path, dtype: str, shape: tuple[int, ...], parts: Iterable[np.ndarray]) -> None:
    """By ordinary writes, of which a full disk is an OSError; that of a memory map kills the process."""
    with path.open("wb") as file:
        npy.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
        for part in parts:
            file.write(np.ascontiguousarray(part, dtype))
        file.flush()
        os.fsync(file.fileno())  # some file systems tell only now
