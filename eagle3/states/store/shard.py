"""One shard: a safetensors file that many samples share, and the JSON index beside it that says where each one lies.

    aux, last              hidden states, encoded chunk by chunk, sample after sample. Codec none: [rows, width] as they are;
                           else uint8 [bytes]
    aux_ends, last_ends    [chunks] uint64: where each chunk ends in its tensor
    aux_sums, last_sums    [chunks] uint64: xxh3_64 of each chunk's bytes
    ids, argmax            [rows] int32     logsumexp [rows] float32     loss_mask [rows] bool

Of a store of logits, the teacher's logits of the draft vocabulary lie in `last` in place of its last hidden states.
A chunk belongs to one sample. `aux` has every row of a sample, or, in a store for a draft with a window, those that some query
sees (`Encoding.seen_rows`); `last` has those that teach: the successors of supervised rows; or every row, where a sample's entry
has as many. `ids` to `loss_mask` have every row. The index is written after its
shard: what is indexed is there, whole. Both carry the digest of the provenance of the store they were written for.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from eagle3.durable import Lock, lock, write_text
from eagle3.parsing import parse_json
from eagle3.states.rows import DraftLogits, LastHidden, TeacherRows
from eagle3.states.store.codecs import CHUNK_BYTES, Codec, CodecName, Fp8, Lossless, Raw, StoreDtype, chunk_rows
from eagle3.states.store.files import DamagedStore, first_words

# What a writer draws, a number, and what it is. Other files in the folder are nobody's business here.
SHARD_NAME = re.compile(r"(shard-[0-9a-f]{8}-\d{5,})(\.safetensors|\.json)(\.partial)?")
# Where the tensors begin; the header before them is written last, when their sizes are known.
DATA_START = 4096
HIDDEN = ("aux", "last")
NUMPY_TYPES = {"ids": "<i4", "argmax": "<i4", "logsumexp": "<f4", "loss_mask": "?"}
TABLES = tuple(f"{name}_{kind}" for name in HIDDEN for kind in ("ends", "sums"))
SAFETENSORS_NAMES = {"<i4": "I32", "<f4": "F32", "?": "BOOL", "<u8": "U64", "bfloat16": "BF16", "float32": "F32"}


@dataclass(frozen=True)
class Encoding:
    """How a store's hidden states are written: codec, number format, the target's hidden size, raw bytes of a chunk.
    teacher_width: numbers in a row of `last` where that is logits of the draft vocabulary, None where it is last hidden
    states. window, ttt_steps: of the drafts that it is for, None where every row is kept and so any draft is served."""

    codec: CodecName
    dtype: StoreDtype
    hidden_size: int
    chunk_bytes: int = CHUNK_BYTES
    teacher_width: int | None = None
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
        if name == "aux":
            return 3 * self.hidden_size
        return self.hidden_size if self.teacher_width is None else self.teacher_width

    def seen_rows(self, loss_mask: Tensor) -> Tensor:
        """bool [T]: rows of a sample whose auxiliary states are kept."""
        if self.window is None:
            return torch.ones(len(loss_mask), dtype=torch.bool)
        return seen_rows(loss_mask, self.window, self.ttt_steps)

    def codec_of(self, name: str) -> CodecName:
        """Logits are not rounded to 8 bits: where states of thousands of channels average that out, a probability would
        be wrong by a factor."""
        logits = name == "last" and self.teacher_width is not None
        return "none" if logits and self.codec == "fp8" else self.codec

    def chunk_rows(self, name: str) -> int:
        return chunk_rows(self.width(name), self.number_format, self.chunk_bytes)

    def make_codec(self, name: str) -> Codec:
        """Of rows of `aux` or `last`. Raises UserError where its package is not installed."""
        match self.codec_of(name):
            case "none":
                return Raw()
            case "lossless":
                return Lossless(self.number_format.itemsize)
            case "fp8":
                return Fp8(self.width(name), self.number_format, self.hidden_size)

    def expected_bytes(self, name: str) -> float:
        """Of an encoded row of `aux` or `last`, checksums included; for `lossless` what a trained model's bf16 states take
        (measured: 67 to 70%, benchmarks/store.py), and all of it in float32, whose mantissas do not compress."""
        codec, raw = self.codec_of(name), self.width(name) * self.number_format.itemsize
        share = {"none": 1.0, "lossless": 0.7 if self.dtype == "bfloat16" else 0.9, "fp8": 0.0}[codec]
        return (self.make_codec(name).row_bytes if codec == "fp8" else raw * share) + 16 / self.chunk_rows(name)


class Entry(NamedTuple):
    """One sample in an index: `tokens` rows from `row`, of which `taught` have last hidden states; its first chunks; the
    digest of all that it has (`sample_digest`); and how many rows have auxiliary states, None for all."""

    id: str
    row: int
    tokens: int
    taught: int
    aux_chunk: int
    last_chunk: int
    digest: str
    seen: int | None = None

    def rows(self, name: str) -> int:
        """How many there are of `aux` or `last`."""
        if name == "last":
            return self.taught
        return self.tokens if self.seen is None else self.seen

    def first_chunk(self, name: str) -> int:
        """Of `aux` or `last`."""
        return self.aux_chunk if name == "aux" else self.last_chunk


@dataclass(frozen=True)
class ShardIndex:
    """name: of the index's file; bytes: the size of its shard's. After a repair not all that it holds is in `samples`.
    provenance_digest: of the store it was written for; None in an index of an older version, and in a spool."""

    name: str
    bytes: int
    encoding: Encoding
    provenance_digest: str | None
    samples: tuple[Entry, ...]

    @property
    def shard(self) -> str:
        """The name of its shard's file."""
        return shard_of(self.name)

    def write(self, folder: Path) -> None:
        body = {"bytes": self.bytes, "encoding": _without_none(asdict(self.encoding))}
        if self.provenance_digest is not None:
            body["provenance_digest"] = self.provenance_digest
        body["samples"] = [_without_none(entry._asdict()) for entry in self.samples]
        write_text(folder / self.name, json.dumps({**body, "digest": json_digest(body)}) + "\n")

    @staticmethod
    def parse(text: bytes, name: str, where: str) -> "ShardIndex":
        """where: the store. Raises DamagedStore."""
        try:
            body = parse_json(text)
            digest = body.pop("digest")
            if digest != json_digest(body):
                raise ValueError("its digest does not fit")
            samples = tuple(Entry(**entry) for entry in body["samples"])
            return ShardIndex(name, body["bytes"], Encoding(**body["encoding"]), body.get("provenance_digest"), samples)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedStore(f"{where}/{name}", f"broken index ({first_words(error)})") from error


def _without_none(fields: dict) -> dict:
    return {field: value for field, value in fields.items() if value is not None}


def index_name(shard: str) -> str:
    return shard.removesuffix(".safetensors") + ".json"


def shard_of(index: str) -> str:
    return index.removesuffix(".json") + ".safetensors"


def is_index(name: str) -> bool:
    return SHARD_NAME.fullmatch(name) is not None and name.endswith(".json")


def json_digest(body: dict) -> str:
    """32 hex digits; neither formatting nor the order of keys changes them."""
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def taught_rows(loss_mask: Tensor) -> Tensor:
    """bool [T]: rows whose last hidden state teaches, the successors of supervised rows."""
    return torch.cat((torch.zeros(1, dtype=torch.bool), loss_mask[:-1].bool()))


def seen_rows(loss_mask: Tensor, window: int, steps: int) -> Tensor:
    """bool [T]: rows whose auxiliary states a draft with such a window reads in an unroll of so many steps, on any rank of any
    layout (`plan_sequence`, of supervised queries): queries begin up to steps - 1 rows before a supervised row that has a
    successor, and see up to window - 1 rows before them. And the first row, which a rank without a part of a stream reads."""
    supervised = torch.cat((loss_mask[:-1].bool(), torch.zeros(1, dtype=torch.bool)))
    before = torch.nn.functional.pad(supervised.cumsum(0), (1, 0))  # supervised rows before each row, and all of them
    stops = (torch.arange(len(loss_mask)) + window + steps - 1).clamp(max=len(loss_mask))
    seen = before[stops] > before[:-1]
    seen[0] = True
    return seen


def kept_rows(entry: Entry, loss_mask: Tensor) -> Tensor:
    """bool [T]: rows whose last hidden state a sample has. The first row never teaches, so a count tells all of them."""
    return torch.ones(entry.tokens, dtype=torch.bool) if entry.taught == entry.tokens else taught_rows(loss_mask)


def sample_digest(parts: Iterable[np.ndarray]) -> str:
    """xxh3_128 over ids, argmax, logsumexp, loss mask, and the ends and checksums of the chunks of aux and of last."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(np.ascontiguousarray(part).view(np.uint8))
    return digest.hexdigest()


def hold(file: BinaryIO) -> bool:
    """Lock a file for as long as it is open and this process lives; False where another holds it. On a file system
    without locks it is True, and nobody will take the file for abandoned."""
    return lock(file) is not Lock.TAKEN


def unfinished(names: Iterable[str]) -> set[str]:
    """Shards of which a folder with these files has something, but no index."""
    names = set(names)
    stems = {found[1] for found in map(SHARD_NAME.fullmatch, names) if found}
    return {f"{stem}.safetensors" for stem in stems if f"{stem}.json" not in names}


def remove_abandoned(folder: Path, shard: str) -> None:
    """Remove an unfinished shard, unless its writer lives (or the file system cannot say)."""
    files = [folder / f"{shard}.partial", folder / shard]  # in the order in which a writer has them
    for path in files:
        try:
            with path.open("rb") as file:
                if lock(file) is not Lock.HELD:
                    return
        except FileNotFoundError:
            continue
        except OSError:
            return
    index = folder / index_name(shard)
    if not index.exists():  # its writer may have ended well meanwhile
        for path in (*files, index.with_name(index.name + ".partial")):
            path.unlink(missing_ok=True)


def parse_header(text: memoryview, where: str) -> tuple[dict[str, int], str | None]:
    """From text, the first DATA_START bytes of a shard: where each tensor begins in it, and its provenance_digest, as in
    `ShardIndex`. Raises DamagedStore."""
    try:
        if int.from_bytes(text[:8], "little") != DATA_START - 8:
            raise ValueError("not written by this project")
        described = parse_json(bytes(text[8:]))
        starts = {name: DATA_START + described[name]["data_offsets"][0] for name in (*HIDDEN, *TABLES, *NUMPY_TYPES)}
        return starts, described["__metadata__"].get("provenance_digest")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DamagedStore(where, f"broken header ({first_words(error)})") from error
