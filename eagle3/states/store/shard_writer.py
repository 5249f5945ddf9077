"""Writes one shard front to back, as its samples come; encoding goes on beside it."""

import json
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
import xxhash
from torch import Tensor

from eagle3.durable import publish
from eagle3.errors import UserError
from eagle3.states.rows import Rows
from eagle3.states.store.codecs import Codec
from eagle3.states.store.shard import (
    DATA_START,
    HIDDEN,
    NUMPY_TYPES,
    SAFETENSORS_NAMES,
    Encoding,
    Entry,
    ShardIndex,
    hold,
    index_name,
    remove_abandoned,
    sample_digest,
    taught_rows,
)

# Chunks that a thread encodes at a time, and raw bytes of a tensor that may be under way.
JOB_CHUNKS = 8
MOST_IN_WORK = 32 << 20


class ShardWriter:
    """Writes one shard front to back, under a temporary name that `publish` replaces. In memory are the rows that are
    being encoded, and 13 bytes a token.

    provenance_digest: of the store that it is for, None in a spool. The temporary file is locked while its writer lives,
    and so is the shard until its index is there, so that others can tell what a dead writer left behind
    (`remove_abandoned`).
    """

    def __init__(
        self, folder: Path, shard: str, encoding: Encoding, threads: Executor, provenance_digest: str | None
    ) -> None:
        self.folder, self.shard, self.encoding = folder, shard, encoding
        self.provenance_digest = provenance_digest
        self.partial = folder / f"{shard}.partial"
        self.file = self.partial.open("xb+")
        while not (hold(self.file) and self.partial.exists()):  # one who clears up took it for abandoned, this moment
            self.file.close()
            self.partial.unlink(missing_ok=True)
            self.file = self.partial.open("xb+")
        self.file.seek(DATA_START)
        # `last` grows beside `aux` and follows it in the end; a file without a name, gone with this process.
        self.aside = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self.blobs = {
            "aux": Blob(self.file, encoding, "aux", threads),
            "last": Blob(self.aside, encoding, "last", threads),
        }
        self.columns: dict[str, list[np.ndarray]] = {
            name: [] for name in NUMPY_TYPES
        }  # of the rows so far, some at a time
        self.samples: list[Entry] = []
        self.sample: Entry | None = None  # under way
        self.tokens = 0  # of the samples that have ended

    def add(self, sample_id: str, ids: Tensor, loss_mask: Tensor, parts: Iterable[Rows]) -> None:
        """ids [T], loss_mask [T]; parts: consecutive rows, together T, on any device.

        Raises UserError where a hidden state is not finite. After an exception the writer can only be discarded.
        """
        seen, taught = self.encoding.seen_rows(loss_mask), taught_rows(loss_mask)
        self.begin(sample_id)
        for part in parts:
            rows = slice(self.sample.tokens, self.sample.tokens + len(part.aux))
            self.append(ids[rows], loss_mask[rows], seen[rows], taught[rows], part)
        tokens = self.sample.tokens
        assert tokens == len(ids) == len(loss_mask) > 0, f"{sample_id}: {tokens} rows of {len(ids)} tokens"
        self.end()

    def begin(self, sample_id: str) -> None:
        """The next sample, whose rows are handed over as they come; `end` it before another one begins."""
        firsts = [self.blobs[name].chunks for name in HIDDEN]
        self.sample = Entry(sample_id, self.tokens, 0, 0, *firsts, digest="", seen=0)

    def append(self, ids: Tensor, loss_mask: Tensor, seen: Tensor, taught: Tensor, rows: Rows) -> None:
        """The next n rows: ids [n] int, loss_mask [n], seen [n] and taught [n] bool on the CPU, and what the target says of them, on any
        device. seen: rows whose auxiliary states are kept (`Encoding.seen_rows`). taught: rows whose last hidden state is kept; those that
        follow supervised rows, or all of a sample's."""
        sample, teacher = self.sample, rows.teacher
        for name, wide, kept in (("aux", rows.aux, seen), ("last", teacher.values, taught)):
            self.blobs[name].append(wide if kept.all() else wide[kept.to(wide.device)], sample.id)
        small = {"ids": ids, "loss_mask": loss_mask.bool(), "argmax": teacher.argmax, "logsumexp": teacher.logsumexp}
        for name, column in small.items():
            self.columns[name].append(column.cpu().numpy().astype(NUMPY_TYPES[name]))
        counts = {"tokens": len(ids), "taught": int(taught.sum()), "seen": int(seen.sum())}
        self.sample = sample._replace(**{name: getattr(sample, name) + count for name, count in counts.items()})

    def end(self) -> None:
        for blob in self.blobs.values():
            blob.end_sample()
        self.samples.append(self.sample._replace(seen=None) if self.encoding.window is None else self.sample)
        self.tokens += self.sample.tokens

    def _with_digest(self, entry: Entry, arrays: Mapping[str, np.ndarray]) -> Entry:
        """arrays: all that is small of the shard, by name."""
        parts = [arrays[name][entry.row : entry.row + entry.tokens] for name in NUMPY_TYPES]
        for name, blob in self.blobs.items():
            first = entry.first_chunk(name)
            chunks = slice(first, first - (-entry.rows(name) // blob.chunk_rows))
            parts += [arrays[f"{name}_ends"][chunks], arrays[f"{name}_sums"][chunks]]
        return entry._replace(digest=sample_digest(parts))

    def publish(self) -> None:
        """Give the shard its name, then write its index. Raises OSError."""
        for blob in self.blobs.values():
            blob.write()
        self.aside.seek(0)
        shutil.copyfileobj(self.aside, self.file, 1 << 20)
        number_format = SAFETENSORS_NAMES[self.encoding.dtype]
        said = {"codec": self.encoding.codec, "dtype": self.encoding.dtype, "provenance_digest": self.provenance_digest}
        header, start = {"__metadata__": {key: value for key, value in said.items() if value is not None}}, 0
        for name, blob in self.blobs.items():
            flat = self.encoding.codec_of(name) != "none"
            shape = [blob.bytes] if flat else [blob.rows, self.encoding.width(name)]
            header[name] = _described("U8" if flat else number_format, shape, start, blob.bytes)
            start += blob.bytes
        arrays = {f"{name}_ends": np.array(blob.ends, "<u8") for name, blob in self.blobs.items()}
        arrays |= {f"{name}_sums": np.array(blob.sums, "<u8") for name, blob in self.blobs.items()}
        arrays |= {name: np.concatenate(columns) for name, columns in self.columns.items()}
        for name, array in arrays.items():
            kind = SAFETENSORS_NAMES[NUMPY_TYPES.get(name, "<u8")]
            header[name] = _described(kind, [len(array)], start, array.nbytes)
            start += array.nbytes
            self.file.write(array.tobytes())
        size = self.file.tell()
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= DATA_START - 8, "the header outgrew its place"
        self.file.seek(0)
        self.file.write((DATA_START - 8).to_bytes(8, "little") + text.ljust(DATA_START - 8))
        self.file.flush()
        publish(self.partial, self.folder / self.shard)
        samples = tuple(self._with_digest(entry, arrays) for entry in self.samples)
        ShardIndex(index_name(self.shard), size, self.encoding, self.provenance_digest, samples).write(self.folder)
        self.file.close()
        self.aside.close()

    def discard(self) -> None:
        """Leave nothing behind, unless it was published."""
        for file in (self.file, self.aside):
            with suppress(OSError):  # what is still in a buffer may not fit, which is why we are here
                file.close()
        remove_abandoned(self.folder, self.shard)


class Blob:
    """One tensor of a shard while it grows: rows are cut into chunks, encoded by `threads`, and written in order."""

    def __init__(self, file: BinaryIO, encoding: Encoding, name: str, threads: Executor) -> None:
        self.file, self.name, self.threads, self.dtype = file, name, threads, encoding.number_format
        self.codec, self.chunk_rows = encoding.make_codec(name), encoding.chunk_rows(name)
        self.waiting: list[Tensor] = []  # rows of a chunk that is not yet full
        self.jobs: deque[tuple[Future[list[memoryview | bytes]], int]] = deque()  # chunks under way, their bytes before
        self.in_work = self.rows = self.chunks = self.bytes = 0
        self.ends: list[int] = []
        self.sums: list[int] = []

    def append(self, rows: Tensor, sample_id: str) -> None:
        rows = rows.to(self.dtype)
        if rows.numel() and not all(edge.isfinite() for edge in torch.aminmax(rows)):  # one pass; isfinite takes many
            raise UserError(
                f"sample {sample_id}: its {self.name} hidden states are not finite in {str(self.dtype)[6:]}; set "
                "model.target_dtype and hidden_states.dtype to bfloat16 or float32"
            )
        rows = rows.cpu()
        if self.waiting:
            rows = torch.cat([*self.waiting, rows])
        full = len(rows) - len(rows) % self.chunk_rows
        self._encode(rows[:full])
        self.waiting = [rows[full:].clone()] if full < len(rows) else []

    def end_sample(self) -> None:
        """The next sample begins a chunk of its own."""
        if self.waiting:
            self._encode(torch.cat(self.waiting))
        self.waiting = []

    def _encode(self, rows: Tensor) -> None:
        chunks = -(-len(rows) // self.chunk_rows)
        self.rows, self.chunks = self.rows + len(rows), self.chunks + chunks
        for piece in rows.split(JOB_CHUNKS * self.chunk_rows) if chunks else ():
            self.jobs.append((self.threads.submit(encode_chunks, self.codec, piece, self.chunk_rows), piece.nbytes))
            self.in_work += piece.nbytes
        self.write(MOST_IN_WORK)

    def write(self, in_work: int = 0) -> None:
        """Write encoded chunks until no more raw bytes than this are in work. Raises OSError."""
        while self.in_work > in_work:
            encoded, raw_bytes = self.jobs.popleft()
            self.in_work -= raw_bytes
            for chunk in encoded.result():
                self.file.write(chunk)
                self.bytes += len(chunk)
                self.ends.append(self.bytes)
                self.sums.append(xxhash.xxh3_64_intdigest(chunk))


def encode_chunks(codec: Codec, rows: Tensor, chunk_rows: int) -> list[memoryview | bytes]:
    if not codec.by_row:
        return [codec.encode(chunk) for chunk in rows.split(chunk_rows)]
    data = memoryview(codec.encode(rows))
    size = len(data) // len(rows) * chunk_rows
    return [data[start : start + size] for start in range(0, len(data), size)]


def _described(dtype: str, shape: list[int], start: int, size: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
