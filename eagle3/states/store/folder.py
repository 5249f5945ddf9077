"""A store's folder: the indexes of its shards, and `store.json`, which says what it was captured from."""

import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from eagle3.errors import UserError, in_one_line, shown
from eagle3.parallel.sequence import Reach
from eagle3.parsing import parse_json
from eagle3.states.store.files import DamagedStore, StoreFiles
from eagle3.states.store.shard import SHARD_NAME, ShardIndex, json_digest, read_index

FORMAT = 4
# Threads that read indexes, because a remote file system answers many requests in the time of one.
THREADS = 32
MANIFEST = "store.json"
RESTORE = "restore what was replaced, or run capture.py --repair, which deletes them and captures their samples again"
# Everything that hidden states (or a teacher's logits) depend on, as JSON values. Stores that differ in a field are not
# interchangeable.
Provenance = Mapping[str, str | int | float | list | None]


class StoreManifest(NamedTuple):
    """The contents of `store.json`."""

    provenance: Provenance  # must match, including codec and dtype
    record: Provenance  # for information: versions, names, draft vocabulary; does not affect hidden states

    @property
    def digest(self) -> str:
        """Digest of the provenance. Shards carry it to say which store they belong to. As in `read_own_manifest`, a
        field that is None counts as absent."""
        return json_digest({field: value for field, value in self.provenance.items() if value is not None})

    def dump(self) -> str:
        return json.dumps({"format": FORMAT, **self._asdict()}, indent=2) + "\n"


def read_manifest(files: StoreFiles) -> StoreManifest:
    """Read `store.json`. Raises UserError if there is no store, or one in a format that this version cannot read."""
    if MANIFEST not in files.names():
        if has_shards(files):
            raise UserError(
                f"{files.where}: has shards but no {MANIFEST}, which says what they are; restore it, or name another "
                "folder in hidden_states.path"
            )
        raise UserError(
            f"{files.where}: no hidden-state store here; run capture.py, fix hidden_states.path, or run the target "
            "while training: hidden_states.mode=live"
        )
    try:
        body = parse_json(files.read(MANIFEST))
        if body["format"] == FORMAT:
            return StoreManifest(dict(body["provenance"]), dict(body["record"]))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{files.where}/{MANIFEST}: not a store's description ({in_one_line(error)}); restore it, or name another "
            "folder in hidden_states.path"
        ) from error
    raise UserError(
        f"{files.where}/{MANIFEST}: store format {body['format']}, this version reads {FORMAT}; capture again into "
        "another folder"
    )


def read_own_manifest(files: StoreFiles, provenance: Provenance) -> StoreManifest:
    """Read the manifest of a store that serves this provenance. Raises UserError that names the first differing field
    with both values, if the store does not. If the shards show that `store.json` was changed, the message says so."""
    manifest = read_manifest(files)
    actual = manifest.provenance
    required = json.loads(json.dumps(dict(provenance)))  # as read back from a file, where tuples are lists
    needs, has = Reach.of(required), Reach.of(actual)
    if any((need or math.inf) > (there or math.inf) for need, there in zip(needs, has, strict=True)):  # None: all
        raise UserError(
            f"{files.where}: the store has the rows of {has}, this run needs those of {needs}; set "
            f"model.draft.window={has.window} and training.ttt_steps={has.ttt_steps}, or less, and "
            "parallelism.query_selection=supervised, or name another folder in hidden_states.path and capture again"
        )
    required |= has._asdict()
    for field in sorted(field for field in {*actual, *required} if actual.get(field) != required.get(field)):
        values = f"{field}={actual.get(field)!r}, this run has {required.get(field)!r}"
        if field == "target" and isinstance(name := manifest.record.get("target"), str):
            values = (
                f"{shown(name)} as target (fingerprint {actual.get(field)}), this run's model.target has "
                f"{required[field]}"
            )
        shards, errors = find_indexes(files, StoreManifest(required, {}).digest)
        if shards and not any(error.kind == "foreign" for error in errors.values()):
            raise UserError(
                f"{files.where}/{MANIFEST}: says {values}, and so had all shards beside it when they were captured; "
                f"restore the {MANIFEST} that belongs to them"
            )
        key = f"set hidden_states.{field} to that, or " if field in ("codec", "dtype") else ""
        raise UserError(
            f"{files.where}: the store was captured with {values}; {key}name another folder in hidden_states.path and "
            "capture again"
        )
    return manifest


def has_shards(files: StoreFiles) -> bool:
    """Whether anything has been captured. A manifest alone was left by a writer that was refused, or gave up."""
    return any(map(SHARD_NAME.fullmatch, files.names()))


def find_indexes(files: StoreFiles, digest: str | None) -> tuple[list[ShardIndex], dict[str, DamagedStore]]:
    """Read the indexes of all shards. Returns those of the store with this digest, sorted by name, and what is wrong
    with the other shards."""

    def read(shard: str) -> ShardIndex | DamagedStore:
        try:
            index = read_index(files, shard)
        except DamagedStore as error:
            return error
        if index.provenance_digest == digest:
            return index
        flaw = (
            f"was captured under another provenance (digest {index.provenance_digest}) than {MANIFEST} describes "
            f"(digest {digest})"
        )
        return DamagedStore(f"{files.where}/{shard}", flaw, "foreign", RESTORE)

    names = sorted(filter(SHARD_NAME.fullmatch, files.names()))
    with ThreadPoolExecutor(THREADS) as threads:
        found = dict(zip(names, threads.map(read, names), strict=True))
    errors = {shard: error for shard, error in found.items() if isinstance(error, DamagedStore)}
    return [index for shard, index in found.items() if shard not in errors], errors


def read_indexes(files: StoreFiles, manifest: StoreManifest) -> list[ShardIndex]:
    """Read the indexes of all shards. Raises DamagedStore if a shard is damaged or belongs to another store; its
    message says how many do, and so whether they or `store.json` must have been replaced."""
    indexes, errors = find_indexes(files, manifest.digest)
    for error in errors.values():
        if error.kind == "foreign":
            foreign = [each for each in errors.values() if each.kind == "foreign"]
            share = f"{len(foreign):,} of {len(indexes) + len(errors):,} shards are foreign"
            raise DamagedStore(error.where, f"{error.flaw}; {share}", "foreign", RESTORE)
        raise error
    return indexes
