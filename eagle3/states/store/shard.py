"""A shard: a safetensors file with many samples, and the JSON index beside it that says where each one is.

    aux, last              hidden states, encoded chunk by chunk, sample after sample. With codec none: [rows, width] as
                           they are; with others: uint8 [bytes]
    aux_ends, last_ends    [chunks] uint64: where each chunk ends in its tensor
    aux_sums, last_sums    [chunks] uint64: xxh3_64 of each chunk's bytes
    ids, argmax            [rows] int32     logsumexp [rows] float32     loss_mask [rows] bool
                           argmax and logsumexp mean something in rows of `last` alone

In a store of logits, `last` holds the teacher's logits over the draft vocabulary instead of last hidden states.

Each chunk belongs to one sample. A sample has these rows:
- `aux`: all or, in a store for a draft with a window, those that some query sees (`Encoding.seen_rows`)
- `last`: those that teach (`taught_rows`); or all, if its entry's `taught` equals `tokens`
- `ids` to `loss_mask`: all

The index is written after its shard, so an indexed shard is complete. Both carry the digest of their store's
provenance.
"""

import json
import re
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from eagle3.durable import Lock, lock, write_text
from eagle3.parallel.rows import RULES, covered, taught
from eagle3.parsing import parse_json
from eagle3.states.rows import DraftLogits, LastHidden, TeacherRows
from eagle3.states.store.codecs import CHUNK_BYTES, Codec, CodecName, Fp8, Lossless, Raw, StoreDtype, chunk_rows
from eagle3.states.store.files import DamagedStore, first_words

# The writer's random number, a serial number, and the kind of file. Other files in the folder are ignored.
SHARD_NAME = re.compile(r"(shard-[0-9a-f]{8}-\d{5,})(\.safetensors|\.json)(\.partial)?")
# Where the tensors begin. The header before them is written last, when their sizes are known.
DATA_START = 4096
HIDDEN = ("aux", "last")
COLUMNS = {"ids": "<i4", "argmax": "<i4", "logsumexp": "<f4", "loss_mask": "?"}
NUMPY_TYPES = {**COLUMNS, **{f"{name}_{kind}": "<u8" for name in HIDDEN for kind in ("ends", "sums")}}
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
    # Window and steps of the drafts that the store serves; None if every row is kept, which serves any draft.
    window: int | None = None
    ttt_steps: int | None = None

    @property
    def number_format(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def teacher(self) -> type[TeacherRows]:
        return LastHidden if self.teacher_width is None else DraftLogits

    def width(self, name: str) -> int:
        """Numbers in a row of `aux` or `last`."""
        return self.aux_layers * self.hidden_size if name == "aux" else self.teacher_width or self.hidden_size

    def seen_rows(self, loss_mask: Tensor) -> Tensor:
        """Mask of a sample's rows whose auxiliary states are kept: bool [T]."""
        return seen_rows(loss_mask, self.window, self.ttt_steps)

    def codec_of(self, name: str) -> CodecName:
        """The codec of `aux` or `last`. Logits are not rounded to 8 bits: the error averages out over the thousands of
        channels of a hidden state, but in a logit it would multiply a probability."""
        logits = name == "last" and self.teacher_width is not None
        return "none" if logits and self.codec == "fp8" else self.codec

    def chunk_rows(self, name: str) -> int:
        return chunk_rows(self.width(name), self.number_format, self.chunk_bytes)

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


class Entry(NamedTuple):
    """One sample in an index."""

    id: str
    row: int  # index of its first row in the shard
    tokens: int  # number of its rows
    taught: int  # number of rows with last hidden states
    aux_chunk: int  # index of its first chunk of aux
    last_chunk: int  # index of its first chunk of last
    digest: str  # of all its data (`sample_digest`)
    seen: int | None = None  # number of rows with auxiliary states; None for all

    def rows(self, name: str) -> int:
        """Number of its rows in `aux` or `last`."""
        return {"aux": self.tokens if self.seen is None else self.seen, "last": self.taught}[name]

    def parts(self, encoding: Encoding) -> list[tuple[str, slice]]:
        """(tensor, slice) of all its data but the hidden states, in the order in which `sample_digest` covers them."""
        parts = [(name, slice(self.row, self.row + self.tokens)) for name in COLUMNS]
        for name, first in (("aux", self.aux_chunk), ("last", self.last_chunk)):
            chunks = slice(first, first - (-self.rows(name) // encoding.chunk_rows(name)))
            parts += [(f"{name}_ends", chunks), (f"{name}_sums", chunks)]
        return parts


@dataclass(frozen=True)
class ShardIndex:
    """The index of a shard."""

    name: str  # of the index file
    bytes: int  # size of the shard's file
    encoding: Encoding
    provenance_digest: str | None  # of its store; None in a spool
    samples: tuple[Entry, ...]  # after a repair, fewer than the shard holds

    @property
    def shard(self) -> str:
        """File name of its shard."""
        return self.name.removesuffix(".json") + ".safetensors"

    def write(self, folder: Path) -> None:
        body = _without_none(
            {
                "bytes": self.bytes,
                "encoding": _without_none(asdict(self.encoding)),
                "provenance_digest": self.provenance_digest,
                "samples": [_without_none(entry._asdict()) for entry in self.samples],
            }
        )
        write_text(folder / self.name, json.dumps({**body, "digest": json_digest(body)}) + "\n")

    @staticmethod
    def parse(text: bytes, name: str, where: str) -> "ShardIndex":
        """Read an index. where: the store, for error messages. Raises DamagedStore."""
        try:
            body = parse_json(text)
            if body.pop("digest") != json_digest(body):
                raise ValueError("its digest does not fit")
            samples = tuple(Entry(**entry) for entry in body["samples"])
            return ShardIndex(name, body["bytes"], Encoding(**body["encoding"]), body.get("provenance_digest"), samples)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedStore(f"{where}/{name}", f"broken index ({first_words(error)})") from error


def _without_none(fields: dict) -> dict:
    return {field: value for field, value in fields.items() if value is not None}


def index_name(shard: str) -> str:
    return shard.removesuffix(".safetensors") + ".json"


def is_index(name: str) -> bool:
    return SHARD_NAME.fullmatch(name) is not None and name.endswith(".json")


def json_digest(body: dict) -> str:
    """Digest of a JSON object: 32 hex digits that do not depend on formatting or the order of keys."""
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def taught_rows(loss_mask: Tensor) -> Tensor:
    """Mask of the rows whose last hidden state teaches by one of the rules (eagle3/parallel/rows.py): bool [T]."""
    mask = torch.zeros(len(loss_mask), dtype=torch.bool)
    for rule in RULES:
        mask[taught(loss_mask.bool(), rule).teacher] = True
    return mask


def seen_rows(loss_mask: Tensor, window: int | None, steps: int | None) -> Tensor:
    """Mask of the rows whose auxiliary states a draft with this window reads in an unroll of this many steps, by one of
    the rules: bool [T]. Without a window, all rows.

    The mask does not depend on rank or layout. As in `plan_sequence` for supervised queries, queries begin up to
    `steps` rows before a row that teaches, and each sees up to window - 1 rows before its own. The first row is
    included, because a rank that has no part of a stream reads it.
    """
    mask = torch.full((len(loss_mask),), window is None)
    mask[0] = True
    for rule in RULES if window is not None else ():
        teacher, first = taught(loss_mask.bool(), rule)
        mask |= covered((torch.maximum(first, teacher - steps) - window + 1).clamp(min=0), teacher, len(mask))
    return mask


def kept_rows(entry: Entry, loss_mask: Tensor) -> Tensor:
    """Mask of the rows whose last hidden state is stored: bool [T]. The first row never teaches, so T taught rows
    mean that every row is stored."""
    return torch.ones(entry.tokens, dtype=torch.bool) if entry.taught == entry.tokens else taught_rows(loss_mask)


def sample_digest(parts: Iterable[np.ndarray]) -> str:
    """xxh3_128 over ids, argmax, logsumexp, loss mask, and the ends and checksums of the chunks of aux and of last."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(np.ascontiguousarray(part).view(np.uint8))
    return digest.hexdigest()


def unfinished(names: Collection[str]) -> set[str]:
    """Names of the shards that have files in a folder, but no index. names: the names of all files in the folder"""
    stems = {match[1] for match in map(SHARD_NAME.fullmatch, names) if match}
    return {f"{stem}.safetensors" for stem in stems if f"{stem}.json" not in names}


def remove_abandoned(folder: Path, shard: str) -> None:
    """Remove an unfinished shard, unless its writer is alive, or the file system has no locks that could tell. The
    locks are kept until the files are gone, so that a writer that has just made one of them waits and makes it anew."""
    index, found = folder / index_name(shard), []
    with ExitStack() as held:
        try:
            for path in (folder / f"{shard}.partial", folder / shard):  # in the order in which a writer creates them
                with suppress(FileNotFoundError):
                    if lock(held.enter_context(path.open("rb"))) is not Lock.HELD:
                        return
                    found.append(path)
        except OSError:
            return
        if not index.exists():  # its writer may have finished in the meantime
            for path in (*found, *folder.glob(f".{index.name}.*")):
                path.unlink(missing_ok=True)


def parse_header(text: memoryview, where: str) -> tuple[dict[str, int], str | None]:
    """Parse a shard's header. Returns the byte at which each tensor begins, and the shard's provenance_digest (see
    `ShardIndex`).

    text: the shard's first DATA_START bytes
    where: the shard, for error messages

    Raises DamagedStore.
    """
    try:
        if int.from_bytes(text[:8], "little") != DATA_START - 8:
            raise ValueError("not written by this project")
        header = parse_json(bytes(text[8:]))
        starts = {name: DATA_START + header[name]["data_offsets"][0] for name in (*HIDDEN, *NUMPY_TYPES)}
        return starts, header["__metadata__"].get("provenance_digest")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DamagedStore(where, f"broken header ({first_words(error)})") from error
