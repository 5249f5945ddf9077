"""A shard: a safetensors file with many samples, and an index at its end that says where each one is.

    aux, last              hidden states, encoded chunk by chunk, sample after sample. With codec none: [rows, width] as
                           they are; with others: uint8 [bytes]
    aux_edges, last_edges  [chunks + 1] uint64: where each chunk begins in its tensor, and where the last one ends
    aux_sums, last_sums    [chunks] uint64: xxh3_64 of each chunk's bytes
    ids, argmax            [rows] int32     logsumexp [rows] float32     loss_mask [rows] bool
                           argmax and logsumexp mean something in rows of `last` alone
    index                  [bytes] uint8: JSON; with the digest of the store's provenance, and one of its own

In a store of logits, `last` holds the teacher's logits over the draft vocabulary instead of last hidden states.

Each chunk belongs to one sample. A sample has these rows:
- `aux`: those in the reach of the drafts that the store serves (`Reach.rows`); by default all
- `last`: those that teach (`taught_rows`); or all, if its entry's `taught` equals `tokens`
- `ids` to `loss_mask`: all

A shard gets its name when it is complete.
"""

import json
import math
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from eagle3.durable import lock, publish
from eagle3.errors import UserError, in_one_line
from eagle3.parallel.sequence import RULES, Reach, taught
from eagle3.parsing import parse_json
from eagle3.states.rows import DraftLogits, LastHidden, TeacherRows
from eagle3.states.store.codecs import CHUNK_BYTES, Codec, CodecName, Fp8, Lossless, Raw, StoreDtype
from eagle3.states.store.files import ByteRange, DamagedStore, StoreFiles

# The writer's random number, and a serial number. Other files in the folder are ignored.
SHARD_NAME = re.compile(r"shard-[0-9a-f]{8}-\d{5,}\.safetensors")
PARTIAL = ".partial"  # after the name of a shard that is being written
# Where the tensors begin. The header before them is written last, when their sizes are known.
DATA_START = 4096
HIDDEN, INDEX = ("aux", "last"), "index"
COLUMNS = {"ids": "<i4", "argmax": "<i4", "logsumexp": "<f4", "loss_mask": "?"}
NUMPY_TYPES = {**COLUMNS, **{f"{name}_{kind}": "<u8" for name in HIDDEN for kind in ("edges", "sums")}}
SAFETENSORS_NAMES = {"<i4": "I32", "<f4": "F32", "?": "BOOL", "<u8": "U64", "bfloat16": "BF16", "float32": "F32"}


@dataclass(frozen=True)
class Encoding:
    """The encoding of a store's hidden states."""

    codec: CodecName
    dtype: StoreDtype
    hidden_size: int  # the target's
    aux_layers: int = 3  # target layers whose states a row of `aux` has
    chunk_bytes: int = CHUNK_BYTES  # before encoding
    # Numbers in a row of `last` if it holds logits over the draft vocabulary; None if it holds last hidden states.
    teacher_width: int | None = None
    reach: Reach = Reach()  # which rows of `aux` are kept; by default all, which serves any draft

    @property
    def number_format(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def teacher(self) -> type[TeacherRows]:
        return LastHidden if self.teacher_width is None else DraftLogits

    def width(self, name: str) -> int:
        """Numbers in a row of `aux` or `last`."""
        return self.aux_layers * self.hidden_size if name == "aux" else self.teacher_width or self.hidden_size

    def codec_of(self, name: str) -> CodecName:
        """The codec of `aux` or `last`. Logits are not rounded to 8 bits: the error averages out over the thousands of
        channels of a hidden state, but in a logit it would multiply a probability."""
        logits = name == "last" and self.teacher_width is not None
        return "none" if logits and self.codec == "fp8" else self.codec

    def chunk_rows(self, name: str) -> int:
        """Rows in a chunk: a power of two, so that chunks align with the runs in which rows are dealt to ranks."""
        return 2 ** int(math.log2(max(1, self.chunk_bytes // (self.width(name) * self.number_format.itemsize))))

    def make_codec(self, name: str) -> Codec:
        """Codec for rows of `aux` or `last`. Raises UserError if its package is not installed."""
        match self.codec_of(name):
            case "none":
                return Raw()
            case "lossless":
                return Lossless(self.number_format.itemsize)
            case "fp8":
                return Fp8(self.width(name), self.number_format, self.hidden_size)

    def expected_bytes(self, name: str) -> float:
        """Bytes of an encoded row of `aux` or `last`, checksums included.

        An estimate for `lossless`: bf16 states of trained models shrink to 67 to 70% (benchmarks/store.py), whereas
        float32 mantissas hardly compress.
        """
        codec, raw_bytes = self.codec_of(name), self.width(name) * self.number_format.itemsize
        share = {"none": 1.0, "lossless": 0.7 if self.dtype == "bfloat16" else 0.9, "fp8": 0.0}[codec]
        return (self.make_codec(name).row_bytes if codec == "fp8" else raw_bytes * share) + 16 / self.chunk_rows(name)


class SampleEntry(NamedTuple):
    """One sample in an index."""

    id: str
    row: int  # index of its first row in the shard
    tokens: int  # number of its rows
    taught: int  # number of rows with last hidden states
    aux_chunk: int  # index of its first chunk of aux
    last_chunk: int  # index of its first chunk of last
    seen: int  # number of rows with auxiliary states
    digest: str  # of all its data (`sample_digest`)

    def rows(self, name: str) -> int:
        """Number of its rows in `aux` or `last`."""
        return {"aux": self.seen, "last": self.taught}[name]

    def parts(self, encoding: Encoding) -> list[tuple[str, slice]]:
        """(tensor, slice) of all its data but the hidden states, in the order in which `sample_digest` covers them."""
        parts = [(name, slice(self.row, self.row + self.tokens)) for name in COLUMNS]
        for name, first in (("aux", self.aux_chunk), ("last", self.last_chunk)):
            stop = first - (-self.rows(name) // encoding.chunk_rows(name))
            parts += [(f"{name}_edges", slice(first, stop + 1)), (f"{name}_sums", slice(first, stop))]
        return parts


class ShardIndex(NamedTuple):
    """The index of a shard, and where its tensors are."""

    shard: str  # name of the shard's file
    starts: dict[str, int]  # the byte at which each tensor begins
    encoding: Encoding
    provenance_digest: str | None  # of its store; None in a spool
    samples: tuple[SampleEntry, ...]  # after a repair, fewer than the shard holds

    def range(self, name: str, rows: slice) -> ByteRange:
        """Where some rows of a tensor are, which is not encoded."""
        start, size = self.starts[name], np.dtype(NUMPY_TYPES[name]).itemsize
        return ByteRange(self.shard, start + rows.start * size, start + rows.stop * size)


def read_index(files: StoreFiles, shard: str) -> ShardIndex:
    """Raises DamagedStore."""
    where = f"{files.where}/{shard}"
    try:
        (head,) = files.fetch([ByteRange(shard, 0, DATA_START)])
        if int.from_bytes(head[:8], "little") != DATA_START - 8:
            raise ValueError("not written by this project")
        header = parse_json(bytes(head[8:]))
        starts = {name: DATA_START + header[name]["data_offsets"][0] for name in (*HIDDEN, *NUMPY_TYPES, INDEX)}
        (text,) = files.fetch([ByteRange(shard, starts[INDEX], DATA_START + header[INDEX]["data_offsets"][1])])
        body = parse_json(bytes(text))
        if body.pop("digest") != json_digest(body):
            raise ValueError("its digest does not fit")
        samples = tuple(SampleEntry(**entry) for entry in body["samples"])
        settings = body["encoding"]
        encoding = Encoding(reach=Reach(*map(settings.pop, Reach._fields)), **settings)
        return ShardIndex(shard, starts, encoding, body["provenance_digest"], samples)
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DamagedStore(where, f"broken index ({in_one_line(error)})") from error


def write_index(
    file: BinaryIO, header: dict[str, Any], encoding: Encoding, digest: str | None, samples: Iterable[SampleEntry]
) -> None:
    """Complete a shard: write its index, which ends it, and its header.

    header: as in safetensors, of all other tensors
    digest: see `ShardIndex.provenance_digest`
    """
    entries = [entry._asdict() for entry in samples]
    settings = {**vars(encoding), **encoding.reach._asdict()}
    del settings["reach"]
    body = {"encoding": settings, "provenance_digest": digest, "samples": entries}
    text = json.dumps({**body, "digest": json_digest(body)}).encode()
    start = max(tensor["data_offsets"][1] for name, tensor in header.items() if name != INDEX)
    header = {**header, INDEX: {"dtype": "U8", "shape": [len(text)], "data_offsets": [start, start + len(text)]}}
    file.seek(DATA_START + start)
    file.write(text)
    file.truncate()
    head = json.dumps(header, separators=(",", ":")).encode()
    assert len(head) <= DATA_START - 8, "the header outgrew its place"
    file.seek(0)
    file.write((DATA_START - 8).to_bytes(8, "little") + head.ljust(DATA_START - 8))
    file.flush()


def replace_index(folder: Path, index: ShardIndex) -> None:
    """Replace a shard by a copy that has this index. A kill leaves either one."""
    path = folder / index.shard
    copy = folder / f"{index.shard}{PARTIAL}"
    shutil.copyfile(path, copy)
    with copy.open("r+b") as file:
        header = parse_json(file.read(DATA_START)[8:])
        write_index(file, header, index.encoding, index.provenance_digest, index.samples)
    publish(copy, path)


def json_digest(body: dict) -> str:
    """Digest of a JSON object: 32 hex digits that do not depend on formatting or the order of keys."""
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def taught_rows(loss_mask: Tensor) -> Tensor:
    """Mask of the rows whose last hidden state teaches by one of the rules (eagle3/parallel/sequence.py): bool [T]."""
    mask = torch.zeros(len(loss_mask), dtype=torch.bool)
    for rule in RULES:
        mask[taught(loss_mask.bool(), rule)[0]] = True
    return mask


def sample_digest(parts: Iterable[np.ndarray]) -> str:
    """xxh3_128 over ids, argmax, logsumexp, loss mask, and the edges and checksums of the chunks of aux and of last."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(np.ascontiguousarray(part).view(np.uint8))
    return digest.hexdigest()


def remove_abandoned(folder: Path) -> None:
    """Remove the unfinished shards in a folder, except those whose writer is alive, or may be: the file system may have
    no locks that could tell. A lock is kept until the file is gone, so that a writer that has just made it waits and
    makes it anew."""
    for partial in folder.glob(f"shard-*{PARTIAL}"):
        if SHARD_NAME.fullmatch(partial.stem):
            with suppress(OSError), partial.open("rb") as file:
                if lock(file) == "held":
                    partial.unlink(missing_ok=True)
