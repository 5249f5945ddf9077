"""The hidden-state store: what a capture wrote once, so that training reads rows instead of running the target.

A folder with `store.json` (format version, number format, provenance) and numbered shards. `shard-00000.safetensors` holds
many samples end to end, as `ids`, `loss_mask`, `aux`, `last`, `argmax` and `logsumexp` of the same number of rows;
`shard-00000.jsonl` is its index, one line a sample: id, offset and tokens. Every file is written under a temporary name,
flushed to disk and renamed, the index after its shard: what the indexes list is there, whole, whenever the writer dies.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3.durable import publish, write_text
from eagle3.errors import UserError
from eagle3.target.interface import HiddenStates

FORMAT = 1
StoreDtype = Literal["float32", "bfloat16"]
Provenance = Mapping[str, str | int | float | list | None]


class Location(NamedTuple):
    """Where a sample lies: `tokens` rows from row `offset` of the shard."""

    shard: str
    offset: int
    tokens: int


class StoredTokens(NamedTuple):
    """ids [T] int64 and loss_mask [T] bool of one sample."""

    ids: Tensor
    loss_mask: Tensor


class StoredRows(NamedTuple):
    """aux [n, 3*Ht] and last [m, Ht] at the rows asked for; argmax [T] int64 and logsumexp [T] fp32 of every row."""

    aux: Tensor
    last: Tensor
    argmax: Tensor
    logsumexp: Tensor


class StoreWriter:
    """Writes captured samples; opened on an existing store, it goes on where the last writer stopped.

    provenance: what the hidden states depend on (target, aux layers, tokenizer, ...); JSON values.
    dtype: number format of aux and last in the store.
    shard_tokens: tokens of one shard; a longer sample gets a shard of its own. That much is held in memory.
    report: receives one line about samples that must be captured again because their shard is gone.

    One writer at a time. Leaving the `with` block normally writes the last shard; an exception discards the samples that
    are not yet in a shard. Raises UserError when the existing store differs in provenance or has a broken shard.
    """

    def __init__(
        self,
        path: str | Path,
        provenance: Provenance,
        *,
        dtype: StoreDtype = "bfloat16",
        shard_tokens: int = 65536,
        report: Callable[[str], None] = print,
    ) -> None:
        self.path, self.dtype, self.shard_tokens = Path(path), dtype, shard_tokens
        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / "store.json").exists():
            manifest = _read_manifest(self.path)
            _check_provenance(self.path, manifest, {**provenance, "dtype": dtype})
        elif any(self.path.glob("shard-*")):
            raise UserError(f"{self.path}: has shards but no store.json; name an empty folder in hidden_states.path")
        else:
            manifest = {"format": FORMAT, "dtype": dtype, "provenance": dict(provenance)}
            write_text(self.path / "store.json", json.dumps(manifest, indent=2) + "\n")
        self.known: set[str] = self._recover(report)
        self._next_shard = 1 + max(
            (int(file.stem.split("-")[1]) for file in self.path.glob("shard-*.jsonl")), default=-1
        )
        self._pending: list[tuple[str, dict[str, Tensor]]] = []
        self._pending_tokens = 0

    def _recover(self, report: Callable[[str], None]) -> set[str]:
        """Forget samples whose shard is gone, remove what a dying writer left behind, return the ids that are stored."""
        known: set[str] = set()
        for index in sorted(self.path.glob("shard-*.jsonl")):
            shard = index.with_suffix(".safetensors")
            entries = _read_index(index)
            if shard.exists():
                _check_shard(shard, entries)
                known.update(entries)
            else:
                index.unlink()
                report(f"{shard}: gone; its {len(entries)} samples will be captured again")
        for shard in self.path.glob("shard-*.safetensors"):
            if not shard.with_suffix(".jsonl").exists():  # the writer died between the shard and its index
                shard.unlink()
        for temporary in self.path.glob("*.partial"):
            temporary.unlink()
        return known

    def add(self, sample_id: str, ids: Tensor, loss_mask: Tensor, states: HiddenStates) -> bool:
        """Take one sample: ids [T] int, loss_mask [T] bool or 0/1, states of the same T tokens, on any device.

        A known id is ignored: nothing is written, and False is returned.
        """
        if sample_id in self.known:
            return False
        tokens = len(ids)
        assert tokens > 0 and all(len(rows) == tokens for rows in (loss_mask, *vars(states).values())), sample_id
        if self._pending and self._pending_tokens + tokens > self.shard_tokens:
            self._write_shard()
        rows = {"ids": ids, "loss_mask": loss_mask, **vars(states)}
        # Copies: the caller may reuse its buffers before the shard is written.
        dtypes = _dtypes(getattr(torch, self.dtype))
        copies = {name: rows[name].to("cpu", dtype, copy=True) for name, dtype in dtypes.items()}
        self._pending.append((sample_id, copies))
        self._pending_tokens += tokens
        self.known.add(sample_id)
        return True

    def _write_shard(self) -> None:
        lines, offset = [], 0
        for sample_id, rows in self._pending:
            tokens = len(rows["ids"])
            lines.append(json.dumps({"id": sample_id, "offset": offset, "tokens": tokens}))
            offset += tokens
        # One name at a time, dropping the samples' copies on the way: at no point is everything held twice.
        names = list(self._pending[0][1])
        tensors = {name: torch.cat([rows.pop(name) for _, rows in self._pending]) for name in names}
        shard = self.path / f"shard-{self._next_shard:05d}.safetensors"
        partial = shard.with_name(shard.name + ".partial")
        try:
            save_file(tensors, partial)
            publish(partial, shard)
            write_text(shard.with_suffix(".jsonl"), "\n".join(lines) + "\n")
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{shard}: cannot be written ({error}); free disk space and run capture.py again, which continues here"
            ) from error
        self._next_shard += 1
        self._pending, self._pending_tokens = [], 0

    def close(self) -> None:
        """Write the samples that are not yet in a shard."""
        if self._pending:
            self._write_shard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()


class HiddenStateStore:
    """Reads a store. Only the rows asked for leave the disk. Nothing stays open or in memory between reads."""

    def __init__(self, path: Path, dtype: torch.dtype, locations: dict[str, Location]) -> None:
        self.path, self.dtype, self.locations = path, dtype, locations

    @classmethod
    def open(cls, path: str | Path, provenance: Provenance) -> Self:
        """Open a store and check that it is what this run needs and that every shard is whole.

        Raises UserError naming the field when provenance differs, and the file when a shard is missing or broken.
        """
        path = Path(path)
        if not (path / "store.json").exists():
            raise UserError(f"{path}: no hidden-state store here; run capture.py or mend hidden_states.path")
        manifest = _read_manifest(path)
        _check_provenance(path, manifest, {**provenance, "dtype": manifest["dtype"]})
        locations: dict[str, Location] = {}
        for index in sorted(path.glob("shard-*.jsonl")):
            entries = _read_index(index)
            _check_shard(index.with_suffix(".safetensors"), entries)
            locations.update(entries)
        return cls(path, getattr(torch, manifest["dtype"]), locations)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self.locations

    def __len__(self) -> int:
        return len(self.locations)

    def __iter__(self) -> Iterator[str]:
        return iter(self.locations)

    def missing(self, sample_ids: Iterable[str]) -> list[str]:
        """Those of `sample_ids` that the store lacks, in their order."""
        return [sample_id for sample_id in sample_ids if sample_id not in self.locations]

    def tokens(self, sample_id: str) -> StoredTokens:
        """What the sample was captured from."""
        at = self._locate(sample_id)
        with (self.path / at.shard).open("rb") as file:
            shard, everything = _Shard(file, self.dtype), torch.arange(at.tokens)
            return StoredTokens(
                ids=shard.read("ids", at, everything).long(), loss_mask=shard.read("loss_mask", at, everything)
            )

    def read(self, sample_id: str, aux_rows: Tensor, last_rows: Tensor) -> StoredRows:
        """Read aux at `aux_rows` [n] and last at `last_rows` [m] (int64 rows 0..T-1 of the sample, any order).

        Runs of consecutive rows are read as one range. aux and last come in the store's number format.
        """
        at = self._locate(sample_id)
        with (self.path / at.shard).open("rb") as file:
            shard, everything = _Shard(file, self.dtype), torch.arange(at.tokens)
            return StoredRows(
                aux=shard.read("aux", at, aux_rows),
                last=shard.read("last", at, last_rows),
                argmax=shard.read("argmax", at, everything).long(),
                logsumexp=shard.read("logsumexp", at, everything),
            )

    def _locate(self, sample_id: str) -> Location:
        if sample_id not in self.locations:
            raise UserError(f"{self.path}: sample {sample_id!r} is not in the store; run capture.py, which adds it")
        return self.locations[sample_id]


class _Shard:
    """Ranged reads from an open shard, straight into the tensors returned.

    Positions come from the safetensors header (its length in 8 bytes, little-endian, then JSON, then the data). Plain reads
    rather than safetensors' memory map: they cost a tenth a range, and suit network and object storage.
    """

    def __init__(self, file: BinaryIO, dtype: torch.dtype) -> None:
        self.file, self.dtypes = file, _dtypes(dtype)
        header_bytes = int.from_bytes(file.read(8), "little")
        self.header, self.data_start = json.loads(file.read(header_bytes)), 8 + header_bytes

    def read(self, name: str, at: Location, rows: Tensor) -> Tensor:
        """Rows [n] of the sample at `at`, as [n, ...]."""
        tensor = self.header[name]
        out = torch.empty(len(rows), *tensor["shape"][1:], dtype=self.dtypes[name])
        if len(rows) == 0:
            return out
        assert int(rows.min()) >= 0 and int(rows.max()) < at.tokens, f"rows outside a sample of {at.tokens} tokens"
        row_bytes = out.nbytes // len(rows)
        start = self.data_start + tensor["data_offsets"][0] + at.offset * row_bytes
        buffer = memoryview(out.view(torch.uint8).numpy()).cast("B")
        breaks = (rows.diff() != 1).nonzero().flatten().add(1).tolist()
        for first, end in zip([0, *breaks], [*breaks, len(rows)], strict=True):
            self.file.seek(start + int(rows[first]) * row_bytes)
            if self.file.readinto(buffer[first * row_bytes : end * row_bytes]) != (end - first) * row_bytes:
                raise UserError(f"{self.file.name}: ends too early; delete it and run capture.py again")
        return out


def _dtypes(number_format: torch.dtype) -> dict[str, torch.dtype]:
    """The tensors of a shard."""
    return {
        "ids": torch.int32,
        "loss_mask": torch.bool,
        "aux": number_format,
        "last": number_format,
        "argmax": torch.int32,
        "logsumexp": torch.float32,
    }


def _read_manifest(path: Path) -> dict:
    file = path / "store.json"
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        version, _, _ = manifest["format"], manifest["dtype"], manifest["provenance"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: not a store's description ({error!r}); delete {path} and capture again") from error
    if version != FORMAT:
        raise UserError(
            f"{file}: store format {version}, this version reads {FORMAT}; capture again into another folder"
        )
    return manifest


def _check_provenance(path: Path, manifest: dict, wanted: Provenance) -> None:
    stored = {**manifest["provenance"], "dtype": manifest["dtype"]}
    wanted = json.loads(json.dumps(dict(wanted)))  # as it would come back from the file: tuples are lists there
    for field in sorted({*stored, *wanted}):
        if stored.get(field) != wanted.get(field):
            raise UserError(
                f"{path}: the store was captured with {field}={stored.get(field)!r}, this run has "
                f"{wanted.get(field)!r}; name another folder in hidden_states.path, or delete this one and capture again"
            )


def _read_index(index: Path) -> dict[str, Location]:
    shard = index.with_suffix(".safetensors").name
    try:
        rows = [json.loads(line) for line in index.read_text(encoding="utf-8").splitlines()]
        return {row["id"]: Location(shard, row["offset"], row["tokens"]) for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{index}: broken index ({error!r}); delete it and run capture.py again") from error


def _check_shard(shard: Path, entries: dict[str, Location]) -> None:
    """Opening compares the header's layout with the file's size, so a cut or garbled shard does not open."""
    try:
        with safe_open(shard, "pt") as tensors:
            rows = {tensors.get_slice(name).get_shape()[0] for name in _dtypes(torch.float32)}
    except FileNotFoundError as error:
        raise UserError(f"{shard}: missing; run capture.py again, which captures its samples anew") from error
    except (OSError, SafetensorError) as error:
        raise UserError(f"{shard}: broken ({error}); delete it and run capture.py again") from error
    if rows != {sum(entry.tokens for entry in entries.values())}:
        raise UserError(f"{shard}: does not hold the samples of its index; delete it and run capture.py again")
