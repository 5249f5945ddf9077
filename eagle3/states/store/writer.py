"""Write a store, alone or alongside other writers. A writer continues where the previous writer of its part stopped."""

import errno
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import accumulate, count, pairwise
from pathlib import Path
from secrets import token_hex
from threading import RLock
from typing import BinaryIO

import numpy as np
import torch
import xxhash
from torch import Tensor

from eagle3.durable import create_text, lock, publish, write_text, writing
from eagle3.errors import UserError
from eagle3.parallel.sequence import Reach
from eagle3.states.rows import CapturePart, KeptRows, Rows
from eagle3.states.store.files import LocalFiles
from eagle3.states.store.folder import (
    MANIFEST,
    Provenance,
    StoreManifest,
    has_shards,
    read_indexes,
    read_own_manifest,
)
from eagle3.states.store.shard import (
    COLUMNS,
    DATA_START,
    HIDDEN,
    NUMPY_TYPES,
    PARTIAL,
    SAFETENSORS_NAMES,
    Encoding,
    SampleEntry,
    remove_abandoned,
    sample_digest,
    taught_rows,
    write_index,
)

# Number of chunks that a thread encodes at a time, and most raw bytes per tensor that may wait to be encoded.
JOB_CHUNKS = 8
MOST_IN_WORK = 32 << 20
REMOVING_SECONDS = 0.001
FULL = "free space and run capture.py again, which continues here"


# Locked by the process that captures a part. Never removed, because the lock on a replaced file would exclude nobody.
LOCK = ".part-{}-of-{}.lock"


class StoreWriter(AbstractContextManager):
    """Writes captured samples to a store.

    provenance: what the hidden states depend on (target, aux layers, tokenizer, ...), without the fields of `encoding`
    record: further information; a store keeps the first writer's
    part: each part has at most one writer at a time; writers of different parts know nothing of each other
    shard_tokens: most tokens in a shard; a longer sample gets a shard of its own

    Leaving the `with` block publishes the last shard. After an exception, even one that a signal raises, it does so as
    far as it can: without the sample in progress, and without an error of its own. Raises UserError if another writer
    has the part, if the existing store has a different provenance, or if a shard is damaged or belongs to a different
    store.
    """

    def __init__(
        self,
        path: str | Path,
        provenance: Provenance,
        encoding: Encoding,
        *,
        record: Provenance | None = None,
        part: CapturePart = CapturePart(),
        shard_tokens: int = 65536,
        threads: int = 4,
    ) -> None:
        encoding.make_codec("aux")  # report a missing package before leaving anything in the folder
        self.folder, self.shard_tokens = Path(path), shard_tokens
        full_provenance = {**provenance, "codec": encoding.codec, "dtype": encoding.dtype, **encoding.reach._asdict()}
        with writing(self.folder, "free space, or name another folder in hidden_states.path"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / LOCK.format(part.index, part.count)).open("ab")
        if lock(self._lock) == "taken":
            self._lock.close()
            raise UserError(
                f"{path}: part {part.index}/{part.count} is being captured by another process; wait for it or stop "
                "it, or split the work with --part"
            )
        files = LocalFiles(self.folder)
        try:
            manifest = self._begin(files, StoreManifest(full_provenance, record or {}))
            remove_abandoned(self.folder)
            self.known = {entry.id for index in read_indexes(files, manifest) for entry in index.samples}
        except (UserError, OSError):
            self._lock.close()
            raise
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        # If the store was begun with more rows than this run needs, new samples must have them, too.
        self.encoding = replace(encoding, reach=Reach.of(manifest.provenance))
        self._token, self._numbers, self._provenance_digest = token_hex(4), count(), manifest.digest
        self._shard: ShardWriter | None = None
        self._adding = RLock()  # a signal may leave it held by the thread that leaves the `with` block

    def _begin(self, files: LocalFiles, manifest: StoreManifest) -> StoreManifest:
        """Write the manifest, or read the existing one, and return it. Raises UserError if it differs."""
        if not has_shards(files):
            create_text(self.folder / MANIFEST, manifest.dump())
        try:
            return read_own_manifest(files, manifest.provenance)
        except UserError:
            # In this order: a writer publishes its shards before it releases its lock.
            if any(map(self._is_of_another, self.folder.glob(LOCK.format("*", "*")))) or has_shards(files):
                raise
        write_text(self.folder / MANIFEST, manifest.dump())
        return manifest

    def _is_of_another(self, path: Path) -> bool:
        """Whether a different writer, still alive, holds this lock."""
        with path.open("ab") as file:
            return not os.path.sameopenfile(file.fileno(), self._lock.fileno()) and lock(file) == "taken"

    def add(self, sample_id: str, ids: Tensor, loss_mask: Tensor, rows: Rows | Iterable[Rows | KeptRows]) -> bool:
        """Write one sample. Returns False, and writes nothing, if its id is known.

        ids: [T] int
        loss_mask: [T] bool
        rows: the rows of those T tokens, on any device; or consecutive parts of them, which are written as they arrive,
            and of which those are enough that are kept

        If the id is known, `rows` is not touched. Raises UserError if the disk is full or a hidden state is not finite.
        After any exception, the writer can only be closed by leaving its `with` block.
        """
        if sample_id in self.known:
            return False
        with self._adding:
            if self._shard and self._shard.tokens + len(ids) > self.shard_tokens:
                self._publish()
            with writing(self.folder, FULL):
                if self._shard is None:
                    shard = f"shard-{self._token}-{next(self._numbers):05d}.safetensors"
                    self._shard = ShardWriter(self.folder, shard, self.encoding, self._threads, self._provenance_digest)
                self._shard.add(sample_id, ids, loss_mask, [rows] if isinstance(rows, Rows) else rows)
        self.known.add(sample_id)
        return True

    def _publish(self) -> None:
        with writing(self.folder, FULL):
            self._shard.publish()
        self._shard = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                # Nothing that fails here may hide the exception that ended the block. A second signal may have left a
                # thread behind that is still adding a sample.
                with suppress(Exception), self._adding:
                    if self._shard and self._shard.cut():
                        self._publish()
            elif self._shard:
                self._publish()
        finally:
            if self._shard:
                self._shard.discard()
            self._threads.shutdown()
            self._lock.close()


class Blob:
    """One growing tensor of a shard. Rows are cut into chunks, encoded by `threads`, and written in order."""

    def __init__(self, file: BinaryIO, encoding: Encoding, name: str, threads: Executor) -> None:
        self.file, self.name, self.threads, self.encoding = file, name, threads, encoding
        self.start = file.tell()
        self.codec, self.chunk_rows = encoding.make_codec(name), encoding.chunk_rows(name)
        self.waiting: list[Tensor] = []  # rows of an incomplete chunk
        # Pieces that are being encoded, with the number of their raw bytes.
        self.jobs: deque[tuple[Future[Sequence[memoryview | bytes]], int]] = deque()
        self.rows = self.chunks = 0
        self.edges = [0]  # of the chunks, in bytes
        self.sums: list[int] = []

    @property
    def form(self) -> tuple[str, list[int]]:
        """The tensor's dtype, as safetensors calls it, and its shape."""
        if self.encoding.codec_of(self.name) == "none":
            return SAFETENSORS_NAMES[self.encoding.dtype], [self.rows, self.encoding.width(self.name)]
        return "U8", [self.edges[-1]]

    def append(self, rows: Tensor, sample_id: str) -> None:
        rows = rows.to(self.encoding.number_format)
        if rows.numel() and not all(edge.isfinite() for edge in torch.aminmax(rows)):  # one pass; isfinite needs many
            raise UserError(
                f"sample {sample_id}: its {self.name} hidden states are not finite in {self.encoding.dtype}; set "
                "model.target_dtype and hidden_states.dtype to bfloat16 or float32"
            )
        rows = rows.cpu()
        if self.waiting:
            rows = torch.cat([*self.waiting, rows])
        full = len(rows) - len(rows) % self.chunk_rows
        self._encode(rows[:full])
        self.waiting = [rows[full:].clone()] if full < len(rows) else []

    def end_sample(self) -> None:
        """Complete the last chunk, because the next sample begins with a new one."""
        if self.waiting:
            self._encode(torch.cat(self.waiting))
        self.waiting = []

    def cut(self, counts: Sequence[int]) -> bool:
        """Keep the rows of whole samples, which have `counts` rows each, and drop later ones. Returns False if an
        exception came in the middle of `write` or `_encode`, so that the file and the counts here may differ. Raises
        OSError."""
        self.waiting = []
        self.write()
        if not len(self.edges) - 1 == len(self.sums) == self.chunks:
            return False
        self.rows, self.chunks = sum(counts), sum(-(-rows // self.chunk_rows) for rows in counts)
        del self.edges[self.chunks + 1 :], self.sums[self.chunks :]
        self.file.seek(self.start + self.edges[-1])
        self.file.truncate()
        return True

    def _encode(self, rows: Tensor) -> None:
        chunks = -(-len(rows) // self.chunk_rows)
        self.rows, self.chunks = self.rows + len(rows), self.chunks + chunks
        for piece in rows.split(JOB_CHUNKS * self.chunk_rows) if chunks else ():
            self.jobs.append((self.threads.submit(self.codec.encode, piece, self.chunk_rows), piece.nbytes))
        self.write(MOST_IN_WORK)

    def write(self, max_in_work: int = 0) -> None:
        """Write encoded chunks until at most this many raw bytes are still being encoded. Raises OSError."""
        while sum(raw_bytes for _, raw_bytes in self.jobs) > max_in_work:
            encoded, _ = self.jobs.popleft()
            for chunk in encoded.result():
                self.file.write(chunk)
                self.edges.append(self.edges[-1] + len(chunk))
                self.sums.append(xxhash.xxh3_64_intdigest(chunk))


class ShardWriter:
    """Writes one shard front to back, under a temporary name that `publish` replaces.

    Memory holds the rows that are being encoded, and 13 bytes per token. The file is locked while its writer lives, so
    that others can recognise what a dead writer left behind (`remove_abandoned`).

    provenance_digest: the digest of the store that the shard belongs to; None in a spool
    """

    def __init__(
        self, folder: Path, shard: str, encoding: Encoding, threads: Executor, provenance_digest: str | None
    ) -> None:
        self.folder, self.shard, self.encoding, self.provenance_digest = folder, shard, encoding, provenance_digest
        self.partial = folder / f"{shard}{PARTIAL}"
        self.file = self.partial.open("xb+")
        # While another process is removing it as abandoned.
        while lock(self.file) == "taken" or not self.partial.exists():
            time.sleep(REMOVING_SECONDS)
            if not self.partial.exists():
                self.file.close()
                self.file = self.partial.open("xb+")
        self.file.seek(DATA_START)
        # `last` grows at the same time and is appended at the end. Its file has no name and vanishes with this process.
        self.aside = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self.blobs = {
            name: Blob(file, encoding, name, threads)
            for name, file in zip(HIDDEN, (self.file, self.aside), strict=True)
        }
        self.columns: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}  # of the rows so far, in pieces
        self.samples: list[SampleEntry] = []
        self.sample: SampleEntry | None = None  # the one being written
        self.tokens = 0  # in finished samples
        # Whether `publish` has begun. It is not tried twice, because a failed fsync may lose bytes and then succeed.
        self.publishing = False

    def add(self, sample_id: str, ids: Tensor, loss_mask: Tensor, parts: Iterable[Rows | KeptRows]) -> None:
        """Write one sample. ids [T], loss_mask [T]; parts: consecutive rows of T tokens in total, on any device, all of
        them or those that are kept.

        Raises UserError if a hidden state is not finite. After an exception the writer can only be cut or discarded.
        """
        seen, taught = self.encoding.reach.rows(loss_mask), taught_rows(loss_mask)
        self.begin(sample_id)
        for part in parts:
            rows = slice(self.sample.tokens, self.sample.tokens + part.tokens)
            if isinstance(part, KeptRows):
                same = torch.equal(part.seen, seen[rows]) and torch.equal(part.taught, taught[rows])
                assert same, f"{sample_id}: other rows than this store keeps"
            else:
                part = part.kept(seen[rows], taught[rows])
            self.append(ids[rows], loss_mask[rows], part)
        tokens = self.sample.tokens
        assert tokens == len(ids) == len(loss_mask) > 0, f"{sample_id}: {tokens} rows of {len(ids)} tokens"
        self.end()

    def reserve(self, size: int, beside: int) -> None:
        """Take the space of the whole shard now, `size` bytes, of which `last` takes `beside` twice until it is
        published. Raises OSError if the disk has no room."""
        for file, needed in ((self.file, size), (self.aside, beside)):
            try:
                os.posix_fallocate(file.fileno(), 0, max(1, needed))
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot
                    raise

    def begin(self, sample_id: str) -> None:
        """Begin a sample. Then `append` its rows, and `end` it before beginning the next one."""
        self.sample = SampleEntry(
            sample_id, self.tokens, 0, 0, *(self.blobs[name].chunks for name in HIDDEN), seen=0, digest=""
        )

    def append(self, ids: Tensor, loss_mask: Tensor, kept: KeptRows) -> None:
        """Append the rows of the sample's next n tokens.

        ids: [n] int
        loss_mask: [n] bool on the CPU
        kept: on any device: auxiliary states of the rows in `Reach.rows`, and predictions at `taught_rows`, or
            at all of a sample's
        """
        sample, teacher = self.sample, kept.rows.teacher
        for name, values in (("aux", kept.rows.aux), ("last", teacher.values)):
            self.blobs[name].append(values, sample.id)
        small = {"ids": ids, "loss_mask": loss_mask.bool()}
        for name in ("argmax", "logsumexp"):  # 0 where nothing is taught
            column = getattr(teacher, name).cpu()
            small[name] = column.new_zeros(len(ids)).masked_scatter_(kept.taught, column)
        for name, column in small.items():
            self.columns[name].append(column.cpu().numpy().astype(NUMPY_TYPES[name]))
        self.sample = sample._replace(
            tokens=sample.tokens + len(ids),
            taught=sample.taught + int(kept.taught.sum()),
            seen=sample.seen + int(kept.seen.sum()),
        )

    def end(self) -> None:
        for blob in self.blobs.values():
            blob.end_sample()
        # From here on, `cut` keeps the sample.
        self.samples.append(self.sample)
        self.tokens += self.sample.tokens

    def cut(self) -> bool:
        """Drop the rows of an unfinished sample. Returns whether the shard can then be published: it cannot if it has
        no whole sample, or if an exception came in the middle of writing a chunk or of publishing. Raises OSError."""
        if self.publishing or not self.samples:
            return False
        whole = [blob.cut([entry.rows(name) for entry in self.samples]) for name, blob in self.blobs.items()]
        tokens = sum(entry.tokens for entry in self.samples)
        self.columns = {name: [np.concatenate(pieces)[:tokens]] for name, pieces in self.columns.items()}
        return all(whole)

    def publish(self) -> None:
        """Complete the shard, and give it its final name. Raises OSError."""
        self.publishing = True
        for blob in self.blobs.values():
            blob.write()
        self.aside.truncate()
        self.aside.seek(0)
        shutil.copyfileobj(self.aside, self.file, 1 << 20)
        arrays = {f"{name}_edges": np.array(blob.edges, "<u8") for name, blob in self.blobs.items()}
        arrays |= {f"{name}_sums": np.array(blob.sums, "<u8") for name, blob in self.blobs.items()}
        arrays |= {name: np.concatenate(columns) for name, columns in self.columns.items()}
        tensors = {name: (*blob.form, blob.edges[-1]) for name, blob in self.blobs.items()}
        for name, array in arrays.items():
            tensors[name] = SAFETENSORS_NAMES[NUMPY_TYPES[name]], [len(array)], array.nbytes
            self.file.write(array.tobytes())
        offsets = pairwise(accumulate((size for *_, size in tensors.values()), initial=0))
        header = {
            name: {"dtype": dtype, "shape": shape, "data_offsets": edges}
            for (name, (dtype, shape, _)), edges in zip(tensors.items(), offsets, strict=True)
        }
        samples = [
            entry._replace(digest=sample_digest(arrays[name][part] for name, part in entry.parts(self.encoding)))
            for entry in self.samples
        ]
        write_index(self.file, header, self.encoding, self.provenance_digest, samples)
        publish(self.partial, self.folder / self.shard)
        self.file.close()
        self.aside.close()

    def discard(self) -> None:
        """Remove the shard, unless it was published."""
        for file in (self.file, self.aside):
            with suppress(OSError):  # buffered bytes may not fit on the disk, which may be why the shard is discarded
                file.close()
        with suppress(OSError):  # what is left here is removed by the next writer
            self.partial.unlink(missing_ok=True)
