"""A store's folder: `store.json`, which says what the hidden states were captured from, and the indexes of its shards."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from eagle3.console import Warned, counted
from eagle3.errors import UserError, shown
from eagle3.parsing import parse_json
from eagle3.states.store.files import DamagedStore, ForeignShards, Range, StoreFiles, first_words, no_store
from eagle3.states.store.shard import DATA_START, ShardIndex, is_index, json_digest, parse_header

FORMAT = 2
MANIFEST = "store.json"
# What hidden states (or the logits of a teacher) depend on, by field; JSON values. Two stores that differ in one are not the same.
Provenance = Mapping[str, str | int | float | list | None]
# Fields that say which rows there are: a store for larger ones, or for any (None), serves as well.
WINDOW = ("window", "ttt_steps")


class Manifest(NamedTuple):
    """provenance: what must fit, codec and dtype included. record: what is good to know (versions, names, draft vocabulary)
    and changes no hidden state."""

    provenance: Provenance
    record: Provenance

    @property
    def digest(self) -> str:
        """Of the provenance: what indexes and shards carry to say whose they are. As in `read_own_manifest`, a field that is
        None might as well be absent."""
        return json_digest({field: value for field, value in self.provenance.items() if value is not None})

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
        raise no_store(files.where)
    try:
        body = parse_json(files.read([MANIFEST])[0])
        version = body["format"]
        manifest = Manifest(dict(body["provenance"]), dict(body["record"])) if version == FORMAT else None
    except (ValueError, KeyError, TypeError) as error:
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


def read_own_manifest(files: StoreFiles, provenance: Provenance) -> Manifest:
    """The manifest of a store that serves this provenance. Raises UserError naming the first field that differs, with both
    values, and saying so where it is `store.json` that was changed."""
    manifest = read_manifest(files)
    found = manifest.provenance
    wanted = json.loads(json.dumps(dict(provenance)))  # as it would come back from the file: tuples are lists there
    if not _has_rows(found, wanted):
        most = f"model.draft.window={found['window']} and training.ttt_steps={found['ttt_steps']}"
        remedy = f"set at most {most}"
        if wanted.get("window") is None:
            remedy = f"set {most}, or less, and parallelism.query_selection=supervised"
        raise UserError(
            f"{files.where}: the store has the rows of {_window_in_words(found)}, this run needs those of "
            f"{_window_in_words(wanted)}; {remedy}, or name another folder in hidden_states.path and capture again"
        )
    wanted |= {field: found.get(field) for field in WINDOW}
    for field in sorted({*found, *wanted}):
        if found.get(field) == wanted.get(field):
            continue
        values = f"{field}={found.get(field)!r}, this run has {wanted.get(field)!r}"
        if field == "target" and isinstance(name := manifest.record.get("target"), str):
            values = (
                f"{shown(name)} as target (fingerprint {found.get(field)}), this run's model.target has {wanted[field]}"
            )
        shards, _ = find_indexes(files)
        if {index.provenance_digest for index in shards} == {Manifest(wanted, {}).digest}:
            raise UserError(
                f"{files.where}/{MANIFEST}: says {values}, and so had all shards beside it when they were captured; restore "
                f"the {MANIFEST} that belongs to them"
            )
        key = f"set hidden_states.{field} to that, or " if field in ("codec", "dtype") else ""
        raise UserError(
            f"{files.where}: the store was captured with {values}; {key}name another folder in hidden_states.path and "
            "capture again"
        )
    return manifest


def _has_rows(found: Provenance, wanted: Provenance) -> bool:
    """Whether a store of provenance `found` has every row that a run which wants `wanted` reads."""
    if found.get("window") is None:
        return True
    return wanted.get("window") is not None and all(wanted[field] <= found[field] for field in WINDOW)


def _window_in_words(provenance: Provenance) -> str:
    if provenance.get("window") is None:
        return "full attention, or of parallelism.query_selection=all"
    return f"a window of {provenance['window']:,} keys and {provenance['ttt_steps']} TTT steps"


def find_indexes(files: StoreFiles) -> tuple[list[ShardIndex], dict[str, DamagedStore]]:
    """All indexes of a folder, in the order of their names; and by name what is said of those that cannot be parsed."""
    readable: list[ShardIndex] = []
    broken: dict[str, DamagedStore] = {}
    names = sorted(filter(is_index, files.sizes()))
    for name, text in zip(names, files.read(names), strict=True):
        try:
            readable.append(ShardIndex.parse(text, name, files.where))
        except DamagedStore as error:
            broken[name] = error
    return readable, broken


def read_indexes(files: StoreFiles, manifest: Manifest, report: Callable[[str], None]) -> list[ShardIndex]:
    """The indexes of all shards, each of which is this store's, there, and as long as its index says; else ForeignShards or
    DamagedStore. What the shards say themselves is another matter (`read_headers`). report: receives `unbound_notice`."""
    indexes, broken = find_indexes(files)
    for error in broken.values():
        raise error
    _require_digest(files.where, indexes, manifest.digest)
    sizes = files.sizes()  # looked at after the indexes, before which their shards were there
    for index in indexes:
        if flaw := shard_flaw(index, sizes):
            raise DamagedStore(f"{files.where}/{index.shard}", flaw)
    if notice := unbound_notice(files.where, indexes):
        report(Warned(notice))
    return indexes


def _require_digest(where: str, indexes: list[ShardIndex], digest: str) -> None:
    """Raises ForeignShards, which says whether it is the shards or `store.json` that must have been replaced."""
    foreign = [index for index in indexes if foreign_flaw(index.provenance_digest, digest)]
    if not foreign:
        return
    other = foreign[0].provenance_digest
    if {index.provenance_digest for index in indexes} == {other}:
        raise ForeignShards(
            f"{where}/{MANIFEST}",
            f"describes another provenance (digest {digest}) than its {counted(len(foreign), 'shard')} (digest {other})",
        )
    count = f"{len(foreign):,} of {len(indexes):,} shards are foreign"
    raise ForeignShards(f"{where}/{foreign[0].shard}", f"{foreign_flaw(other, digest)}; {count}")


def shard_flaw(index: ShardIndex, sizes: Mapping[str, int | None]) -> str | None:
    """What a look at the folder says against a shard."""
    if index.shard not in sizes:
        return "is missing"
    size = sizes[index.shard]
    return None if size in (None, index.bytes) else f"has {size} bytes, its index says {index.bytes}"


def foreign_flaw(found: str | None, provenance_digest: str | None) -> str | None:
    """What the digest that an index or a shard carries says against it. None on either side says nothing."""
    if None in (found, provenance_digest) or found == provenance_digest:
        return None
    return (
        f"was captured under another provenance (digest {found}) than {MANIFEST} describes (digest {provenance_digest})"
    )


def read_headers(files: StoreFiles, shards: Sequence[str], provenance_digest: str | None) -> dict[str, dict[str, int]]:
    """By shard, where each of its tensors begins. Raises DamagedStore; ForeignShards where one carries another digest."""
    starts: dict[str, dict[str, int]] = {}
    for shard, text in zip(shards, files.fetch([Range(shard, 0, DATA_START) for shard in shards]), strict=True):
        starts[shard], digest = parse_header(text, f"{files.where}/{shard}")
        if flaw := foreign_flaw(digest, provenance_digest):
            raise ForeignShards(f"{files.where}/{shard}", flaw)
    return starts


def unbound_notice(where: str, indexes: Iterable[ShardIndex]) -> str | None:
    """What could not be checked of a store, where an older version captured some of it."""
    digests = [index.provenance_digest for index in indexes]
    if None not in digests:
        return None
    return (
        f"{where}: {digests.count(None):,} of {len(digests):,} shards do not say under which provenance they were "
        "captured (an older version wrote them), so a shard of another store would not be noticed; run capture.py --verify "
        "--bind, which checks them and adds it"
    )
