"""A store's folder: `store.json`, which says what the hidden states were captured from, and the indexes of its shards."""

import json
from collections.abc import Mapping
from typing import NamedTuple

from eagle3.data.store.files import DamagedStore, StoreFiles, first_words
from eagle3.data.store.shard import ShardIndex, is_index
from eagle3.errors import UserError

FORMAT = 2
MANIFEST = "store.json"
# What hidden states (or the logits of a teacher) depend on, by field; JSON values. Two stores that differ in one are not the same.
Provenance = Mapping[str, str | int | float | list | None]


class Manifest(NamedTuple):
    """provenance: what must fit, codec and dtype included. record: what is good to know (versions, names, draft vocabulary)
    and changes no hidden state."""

    provenance: Provenance
    record: Provenance

    def dump(self) -> str:
        return json.dumps({"format": FORMAT, **self._asdict()}, indent=2) + "\n"


def read_manifest(files: StoreFiles) -> Manifest:
    """Raises UserError where there is no store, or not one that this version reads."""
    sizes = files.sizes()
    if MANIFEST not in sizes:
        if any(map(is_index, sizes)):
            raise UserError(
                f"{files.where}: has shards but no {MANIFEST}, which says what they are; restore it, or name another folder "
                "in hidden_states.path"
            )
        raise UserError(f"{files.where}: no hidden-state store here; run capture.py or mend hidden_states.path")
    try:
        body = json.loads(files.read([MANIFEST])[0])
        version = body["format"]
        manifest = Manifest(dict(body["provenance"]), dict(body["record"])) if version == FORMAT else None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{files.where}/{MANIFEST}: not a store's description ({first_words(error)}); restore it, or name another folder "
            "in hidden_states.path"
        ) from error
    if manifest is None:
        raise UserError(
            f"{files.where}/{MANIFEST}: store format {version}, this version reads {FORMAT}; capture again into another "
            "folder"
        )
    return manifest


def require_provenance(where: str, found: Provenance, wanted: Provenance) -> None:
    """Raises UserError naming the first field that differs, with both values."""
    wanted = json.loads(json.dumps(dict(wanted)))  # as it would come back from the file: tuples are lists there
    for field in sorted({*found, *wanted}):
        if found.get(field) != wanted.get(field):
            key = f"set hidden_states.{field} to that, or " if field in ("codec", "dtype") else ""
            raise UserError(
                f"{where}: the store was captured with {field}={found.get(field)!r}, this run has "
                f"{wanted.get(field)!r}; {key}name another folder in hidden_states.path and capture again"
            )


def read_indexes(files: StoreFiles) -> list[ShardIndex]:
    """The indexes of all shards, each of which is there and as long as its index says; else DamagedStore."""
    names = sorted(filter(is_index, files.sizes()))
    indexes = [ShardIndex.parse(text, name, files.where) for name, text in zip(names, files.read(names), strict=True)]
    sizes = files.sizes()  # looked at after the indexes, before which their shards were there
    for index in indexes:
        flaw = shard_flaw(index, sizes)
        if flaw:
            raise DamagedStore(f"{files.where}/{index.shard}", flaw)
    return indexes


def shard_flaw(index: ShardIndex, sizes: Mapping[str, int | None]) -> str | None:
    """What a look at the folder says against a shard."""
    if index.shard not in sizes:
        return "is missing"
    size = sizes[index.shard]
    return None if size in (None, index.bytes) else f"has {size} bytes, its index says {index.bytes}"
