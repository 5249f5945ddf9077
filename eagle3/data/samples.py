"""Samples ready for training (token ids and loss mask), packed in memory-mapped files so that any number fits."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from eagle3.errors import UserError

ARRAYS = ("ids", "loss_mask", "offsets", "digests")
DIGEST_BYTES = 16


class DamagedSamples(ValueError):
    """A folder of samples that is incomplete or whose files do not fit together."""


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
    return hashlib.sha256(ids.astype("<i4").tobytes() + loss_mask.astype(np.uint8).tobytes()).digest()[:DIGEST_BYTES]


@dataclass(frozen=True)
class SampleSet:
    """Samples packed one after another.

    ids: int32 [tokens]; loss_mask: bool [tokens]; offsets: int64 [stored + 1], where each stored sample begins and the
    last one ends; digests: uint8 [stored, 16]; indices: int64 [samples], which stored samples this set has, in order.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    digests: np.ndarray
    indices: np.ndarray

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
        """The set saved in `folder`, memory-mapped. Raises DamagedSamples."""
        try:
            ids, loss_mask, offsets, digests = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS)
        except (OSError, ValueError, EOFError) as error:
            raise DamagedSamples(f"{folder}: {error}") from error
        fits = (
            ids.dtype == np.int32
            and loss_mask.dtype == bool
            and len(ids) == len(loss_mask) == offsets[-1]
            and digests.shape == (len(offsets) - 1, DIGEST_BYTES)
        )
        if not fits:
            raise DamagedSamples(f"{folder}: its arrays do not fit together")
        return SampleSet(ids, loss_mask, offsets, digests, np.arange(len(digests)))

    def save(self, folder: Path) -> None:
        """Write the set as .npy files; `folder` is there complete or not at all, and replaces one of that name."""
        with replacing_folder(folder) as temporary:
            self.write_arrays(temporary)

    def write_arrays(self, folder: Path) -> None:
        """Write the .npy files into an existing folder."""
        lengths = self.lengths
        np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        np.save(folder / "digests.npy", self.digests[self.indices])
        for name, dtype in (("ids", np.int32), ("loss_mask", bool)):
            if not lengths.sum():  # an empty file cannot be mapped
                np.save(folder / f"{name}.npy", np.zeros(0, dtype))
                continue
            array = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, (int(lengths.sum()),))
            position = 0
            for chunk in self._runs():
                array[position : position + chunk.stop - chunk.start] = getattr(self, name)[chunk]
                position += chunk.stop - chunk.start
            array.flush()

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        stored = self.indices[index]
        tokens = slice(self.offsets[stored], self.offsets[stored + 1])
        ids = torch.from_numpy(self.ids[tokens].astype(np.int64))
        return Sample(self.digests[stored].tobytes().hex(), ids, torch.from_numpy(np.array(self.loss_mask[tokens])))

    @property
    def lengths(self) -> np.ndarray:
        """int64 [samples]: tokens of each sample."""
        return np.diff(self.offsets)[self.indices]

    @property
    def taught(self) -> np.ndarray:
        """int64 [samples]: rows of each that follow a supervised row, which is where a teacher speaks."""
        if not len(self):
            return np.zeros(0, np.int64)
        starts, ends = self.offsets[self.indices], self.offsets[self.indices + 1]
        return np.array(
            [np.count_nonzero(self.loss_mask[a : b - 1]) for a, b in zip(starts, ends, strict=True)], np.int64
        )

    @property
    def sample_ids(self) -> list[str]:
        """The id of each sample."""
        return [row.tobytes().hex() for row in self.digests[self.indices]]

    def subset(self, indices: Sequence[int] | np.ndarray) -> "SampleSet":
        """The samples at these positions of this set, in the order given; nothing is copied."""
        chosen = self.indices[np.asarray(indices, np.int64)]
        return SampleSet(self.ids, self.loss_mask, self.offsets, self.digests, chosen)

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
        held_out = draws < fraction * 2.0**64
        if not held_out.any():
            held_out = draws == draws.min()
        elif held_out.all():
            held_out = draws != draws.max()
        return Split(self.subset(np.flatnonzero(~held_out)), self.subset(np.flatnonzero(held_out)))

    def token_chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids, loss_mask) of all tokens in order, some millions at a time; chunks cut through samples."""
        for chunk in self._runs():
            yield self.ids[chunk], self.loss_mask[chunk]

    def _runs(self, most: int = 1 << 22) -> Iterator[slice]:
        """Slices of the packed arrays, consecutive samples in one, at most `most` tokens each."""
        edges = np.flatnonzero(np.diff(self.indices) != 1) + 1
        for run in np.split(self.indices, edges):
            start, stop = (self.offsets[run[0]], self.offsets[run[-1] + 1]) if len(run) else (0, 0)
            for begin in range(int(start), int(stop), most):
                yield slice(begin, min(begin + most, int(stop)))


@contextmanager
def replacing_folder(folder: Path, keep: Callable[[Path], bool] = lambda _: False) -> Iterator[Path]:
    """A temporary neighbour to write into, which then takes the place of `folder`, unless that is one to `keep`: another
    process may have been quicker, and be reading it.

    A reader sees the old folder, for a moment none, or the whole new one; after an exception, the old.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        written = temporary / "new"
        written.mkdir()
        yield written
        while True:
            try:
                os.rename(written, folder)
                break
            except OSError:  # an older one is there, or one that another process put there meanwhile
                if not folder.exists():
                    raise
                if keep(folder):
                    break
            with suppress(FileNotFoundError):  # the other process was quicker
                os.rename(folder, Path(tempfile.mkdtemp(dir=temporary)))
    finally:
        shutil.rmtree(temporary)
