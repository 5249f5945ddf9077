"""One shard: a safetensors file that many samples share, and the JSON index beside it that says where each one lies.

    aux, last              hidden states, encoded chunk by chunk, sample after sample. Codec none: [rows, width] as they are;
                           else uint8 [bytes]
    aux_ends, last_ends    [chunks] uint64: where each chunk ends in its tensor
    aux_sums, last_sums    [chunks] uint64: xxh3_64 of each chunk's bytes
    ids, argmax            [rows] int32     logsumexp [rows] float32     loss_mask [rows] bool

A chunk belongs to one sample. `aux` has every row of a sample; `last` has those that teach: the successors of supervised
rows. `ids` to `loss_mask` have every row. The index is written after its shard: what is indexed is there, whole.
"""

import fcntl
import json
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from eagle3.data.store.codecs import Codec, CodecName, StoreDtype, chunk_rows, make_codec
from eagle3.durable import publish, write_text
from eagle3.errors import UserError
from eagle3.target.interface import HiddenStates

# Where the tensors begin; the header before them is written last, when their sizes are known.
DATA_START = 4096
HIDDEN = ("aux", "last")
NUMPY_TYPES = {"ids": "<i4", "argmax": "<i4", "logsumexp": "<f4", "loss_mask": "?"}
TABLES = tuple(f"{name}_{kind}" for name in HIDDEN for kind in ("ends", "sums"))
SAFETENSORS_NAMES = {"<i4": "I32", "<f4": "F32", "?": "BOOL", "<u8": "U64", "bfloat16": "BF16", "float32": "F32"}


@dataclass(frozen=True)
class Encoding:
    """How a store's hidden states are written: codec, number format, and the target's hidden size."""

    codec: CodecName
    dtype: StoreDtype
    hidden_size: int

    @property
    def number_format(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def width(self, name: str) -> int:
        """Numbers in a row of `aux` or `last`."""
        return 3 * self.hidden_size if name == "aux" else self.hidden_size

    def chunk_rows(self, name: str) -> int:
        return chunk_rows(self.width(name), self.number_format)

    def make_codec(self, name: str) -> Codec:
        return make_codec(self.codec, self.number_format, self.width(name), self.hidden_size)


class Entry(NamedTuple):
    """One sample in an index: `tokens` rows from `row`, of which `taught` have last hidden states; its first chunks; and
    the digest of all that it has (`sample_digest`)."""

    id: str
    row: int
    tokens: int
    taught: int
    aux_chunk: int
    last_chunk: int
    digest: str


@dataclass(frozen=True)
class ShardIndex:
    """shard: the file's name; bytes: its size. After a repair not all that it holds is in `samples`."""

    shard: str
    bytes: int
    encoding: Encoding
    samples: tuple[Entry, ...]

    def write(self, folder: Path) -> None:
        body = {**asdict(self), "samples": [entry._asdict() for entry in self.samples]}
        write_text(folder / index_name(self.shard), json.dumps({**body, "digest": _body_digest(body)}) + "\n")

    @staticmethod
    def parse(text: bytes, where: str) -> "ShardIndex":
        """Raises UserError naming `where`."""
        try:
            body = json.loads(text)
            digest = body.pop("digest")
            if digest != _body_digest(body):
                raise ValueError("its digest does not fit")
            samples = tuple(Entry(**entry) for entry in body["samples"])
            return ShardIndex(body["shard"], body["bytes"], Encoding(**body["encoding"]), samples)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{where}: broken index ({error}); run capture.py --repair") from error


def index_name(shard: str) -> str:
    return shard.removesuffix(".safetensors") + ".json"


def shard_of(index: str) -> str:
    return index.removesuffix(".json") + ".safetensors"


def _body_digest(body: dict) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def taught_rows(loss_mask: Tensor) -> Tensor:
    """bool [T]: rows whose last hidden state teaches, the successors of supervised rows."""
    return torch.cat((torch.zeros(1, dtype=torch.bool), loss_mask[:-1].bool()))


def sample_digest(parts: Iterable[np.ndarray]) -> str:
    """xxh3_128 over ids, argmax, logsumexp, loss mask, and the ends and checksums of the chunks of aux and of last."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(np.ascontiguousarray(part).view(np.uint8))
    return digest.hexdigest()


class ShardWriter:
    """Writes one shard front to back, under a temporary name that `publish` replaces. A chunk of rows is in memory, and
    17 bytes a token.

    The temporary file is locked while its writer lives, and so is the shard until its index is there, so that others can
    tell what a dead writer left behind (`abandoned`).
    """

    def __init__(self, folder: Path, shard: str, encoding: Encoding, threads: Executor) -> None:
        self.folder, self.shard, self.encoding = folder, shard, encoding
        self.partial = folder / f"{shard}.partial"
        self.file = self.partial.open("xb+")
        hold(self.file)
        self.file.seek(DATA_START)
        # `last` grows beside `aux` and follows it in the end; a file without a name, gone with this process.
        self.aside = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self.blobs = {
            "aux": Blob(self.file, encoding, "aux", threads),
            "last": Blob(self.aside, encoding, "last", threads),
        }
        self.columns: dict[str, list[np.ndarray]] = {name: [] for name in NUMPY_TYPES}
        self.samples: list[Entry] = []
        self.tokens = 0

    def add(self, sample_id: str, ids: Tensor, loss_mask: Tensor, parts: Iterable[HiddenStates]) -> None:
        """ids [T], loss_mask [T]; parts: hidden states of consecutive rows, together T, on any device.

        Raises UserError where a hidden state is not finite. After an exception the writer can only be discarded.
        """
        taught, row, firsts = taught_rows(loss_mask), 0, {name: len(blob.ends) for name, blob in self.blobs.items()}
        columns = {name: [] for name in ("argmax", "logsumexp")}
        for part in parts:
            rows = slice(row, row + len(part.last))
            row = rows.stop
            self.blobs["aux"].append(part.aux, sample_id)
            self.blobs["last"].append(part.last[taught[rows].to(part.last.device)], sample_id)
            for name, pieces in columns.items():
                pieces.append(getattr(part, name).cpu().numpy())
        assert row == len(ids) == len(loss_mask) > 0, f"{sample_id}: {row} rows of {len(ids)} tokens"
        everything = {"ids": [ids.numpy()], "loss_mask": [loss_mask.bool().numpy()], **columns}
        own = {name: np.concatenate(everything[name]).astype(kind) for name, kind in NUMPY_TYPES.items()}
        for name, column in own.items():
            self.columns[name].append(column)
        tables = [table for name in HIDDEN for table in self.blobs[name].end_sample(firsts[name])]
        digest = sample_digest([*own.values(), *tables])
        place = (self.tokens, row, int(taught.sum()), firsts["aux"], firsts["last"])
        self.samples.append(Entry(sample_id, *place, digest))
        self.tokens += row

    def publish(self) -> None:
        """Give the shard its name, then write its index. Raises OSError."""
        self.aside.seek(0)
        shutil.copyfileobj(self.aside, self.file, 1 << 20)
        number_format = SAFETENSORS_NAMES[self.encoding.dtype]
        header, start = {"__metadata__": {"codec": self.encoding.codec, "dtype": self.encoding.dtype}}, 0
        for name, blob in self.blobs.items():
            flat = self.encoding.codec != "none"
            shape = [blob.bytes] if flat else [blob.rows, self.encoding.width(name)]
            header[name] = _described("U8" if flat else number_format, shape, start, blob.bytes)
            start += blob.bytes
        tables = {f"{name}_ends": blob.ends for name, blob in self.blobs.items()}
        tables |= {f"{name}_sums": blob.sums for name, blob in self.blobs.items()}
        arrays = {name: np.array(values, "<u8") for name, values in tables.items()}
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
        ShardIndex(self.shard, size, self.encoding, tuple(self.samples)).write(self.folder)
        self.file.close()
        self.aside.close()

    def discard(self) -> None:
        """Leave nothing behind, unless it was published."""
        with suppress(OSError):  # what is still in a buffer may not fit, which is why we are here
            self.file.close()
        with suppress(OSError):
            self.aside.close()
        remove_abandoned(self.folder, self.shard)


class Blob:
    """One tensor of a shard while it grows."""

    def __init__(self, file: BinaryIO, encoding: Encoding, name: str, threads: Executor) -> None:
        self.file, self.name, self.threads, self.dtype = file, name, threads, encoding.number_format
        self.codec, self.chunk_rows = encoding.make_codec(name), encoding.chunk_rows(name)
        self.waiting: list[Tensor] = []  # rows of a chunk that is not yet full
        self.rows = self.bytes = 0
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
        self.rows += len(rows)
        rows = torch.cat([*self.waiting, rows])
        full = len(rows) - len(rows) % self.chunk_rows
        self._write(rows[:full])
        self.waiting = [rows[full:].clone()]

    def end_sample(self, first_chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """Write the last chunk; ends and checksums of all since `first_chunk`."""
        self._write(torch.cat(self.waiting))
        self.waiting = []
        return np.array(self.ends[first_chunk:], "<u8"), np.array(self.sums[first_chunk:], "<u8")

    def _write(self, rows: Tensor) -> None:
        if not len(rows):
            return
        if self.codec.by_row:
            data = memoryview(self.codec.encode(rows))
            size = len(data) // len(rows) * self.chunk_rows
            pieces = (data[start : start + size] for start in range(0, len(data), size))
        else:
            pieces = self.threads.map(self.codec.encode, rows.split(self.chunk_rows))
        for piece in pieces:
            self.file.write(piece)
            self.bytes += len(piece)
            self.ends.append(self.bytes)
            self.sums.append(xxhash.xxh3_64_intdigest(piece))


def _described(dtype: str, shape: list[int], start: int, size: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}


def hold(file: BinaryIO) -> bool:
    """Lock a file for as long as it is open and this process lives; False where another holds it. On a file system
    without locks it is True, and nobody will take the file for abandoned."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def unfinished(names: Iterable[str]) -> set[str]:
    """Shards of which a folder with these files has something, but no index."""
    names = set(names)
    suffixes = (".safetensors.partial", ".safetensors", ".json.partial")
    found = {name.removesuffix(suffix) for name in names for suffix in suffixes if name.endswith(suffix)}
    return {f"{stem}.safetensors" for stem in found if stem.startswith("shard-") and f"{stem}.json" not in names}


def remove_abandoned(folder: Path, shard: str) -> None:
    """Remove an unfinished shard, unless its writer lives (or the file system cannot say)."""
    files = [folder / f"{shard}.partial", folder / shard]  # in the order in which a writer has them
    for path in files:
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            continue
        except OSError:
            return
    index = folder / index_name(shard)
    if not index.exists():  # its writer may have ended well meanwhile
        for path in (*files, index.with_name(index.name + ".partial")):
            path.unlink(missing_ok=True)


class ShardHeader(NamedTuple):
    """starts: where each tensor begins in the file. shapes: of each."""

    starts: dict[str, int]
    shapes: dict[str, list[int]]

    @staticmethod
    def parse(text: memoryview, where: str) -> "ShardHeader":
        """text: the file's first DATA_START bytes. Raises UserError naming `where`."""
        try:
            length = int.from_bytes(text[:8], "little")
            if length != DATA_START - 8:
                raise ValueError("not written by this project")
            header = json.loads(bytes(text[8:]))
            names = (*HIDDEN, *TABLES, *NUMPY_TYPES)
            starts = {name: DATA_START + header[name]["data_offsets"][0] for name in names}
            return ShardHeader(starts, {name: header[name]["shape"] for name in names})
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{where}: broken header ({error}); run capture.py --repair") from error
