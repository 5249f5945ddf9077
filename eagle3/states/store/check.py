"""Looks a whole store through, byte by byte, and takes out what is damaged, so that it can be captured anew."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from eagle3.console import Progress
from eagle3.durable import flush
from eagle3.states.store.files import DamagedStore, ForeignShards, open_files
from eagle3.states.store.folder import Provenance, find_indexes, foreign_flaw, read_own_manifest, shard_flaw
from eagle3.states.store.reader import HiddenStateStore, Location, RowRequest, StoredTokens
from eagle3.states.store.shard import Entry, ShardIndex, shard_of, taught_rows
from eagle3.text.samples import sample_digest

# Samples read together: a remote file system answers many requests in the time of one.
SAMPLES_AT_ONCE = 32
# Of each of them: a sample may be longer than memory.
ROWS_AT_ONCE = 65536
Kind = Literal["damaged", "foreign", "mislabelled", "not finite", "duplicate", "missing"]


class Problem(NamedTuple):
    """index: the file that lists the sample, None for a missing one. sample_id: None where the whole shard is meant."""

    kind: Kind
    index: str | None
    sample_id: str | None
    detail: str

    def __str__(self) -> str:
        where = self.index if self.sample_id is None else f"sample {self.sample_id}"
        return f"{self.kind}: {where}: {self.detail}"


class Findings(NamedTuple):
    """samples, tokens: what is whole and counts. indexes: those that can be read."""

    provenance_digest: str
    problems: list[Problem]
    indexes: list[ShardIndex]
    samples: int
    tokens: int


def check_store(path: str, provenance: Provenance, wanted: Iterable[str], report: Callable[[str], None]) -> Findings:
    """Read every sample of the store and compare it with its checksums.

    wanted: ids that should be there. report: gets progress lines. Raises UserError where there is no
    store, one of another provenance, or one that this machine cannot read, which is no damage.
    """
    files = open_files(path)
    manifest = read_own_manifest(files, provenance)
    reader = HiddenStateStore(files, {}, manifest.record, manifest.digest)
    indexes, broken = find_indexes(files)
    problems = [Problem("damaged", name, None, error.flaw) for name, error in broken.items()]
    whole: dict[str, int] = {}  # tokens by sample
    sizes = files.sizes()  # looked at after the indexes, before which their shards were there
    progress = Progress(report, "checking the store", len(indexes), "shards")
    for index in indexes:
        for found in _examine(reader, index, sizes):
            if isinstance(found, Entry) and found.id in whole:
                found = Problem("duplicate", index.name, found.id, "an earlier shard has it too")
            if isinstance(found, Problem):
                problems.append(found)
            else:
                whole[found.id] = found.tokens
        progress.advance()
    reported = whole.keys() | {problem.sample_id for problem in problems}
    missing = (sample_id for sample_id in wanted if sample_id not in reported)
    problems += [Problem("missing", None, sample_id, "no shard has it whole") for sample_id in missing]
    return Findings(manifest.digest, problems, indexes, len(whole), sum(whole.values()))


def _examine(reader: HiddenStateStore, index: ShardIndex, sizes: Mapping[str, int | None]) -> Iterator[Entry | Problem]:
    """The samples of one shard that are whole, and what is wrong with the others."""
    where = f"{reader.where}/{index.shard}"
    try:
        if flaw := foreign_flaw(index.provenance_digest, reader.provenance_digest):
            raise ForeignShards(where, flaw)
        if flaw := shard_flaw(index, sizes):
            raise DamagedStore(where, flaw)
        reader.read_headers([index.shard])
    except DamagedStore as error:  # of none of its samples
        yield Problem(error.kind, index.name, None, f"{index.shard}: {error.flaw}")
        return
    for start in range(0, len(index.samples), SAMPLES_AT_ONCE):
        members = [Location(index, entry) for entry in index.samples[start : start + SAMPLES_AT_ONCE]]
        try:
            yield from _look_through(reader, members)
        except DamagedStore:  # which of them?
            for member in members:
                try:
                    yield from _look_through(reader, [member])
                except DamagedStore as error:
                    yield Problem(error.kind, index.name, member.entry.id, f"{index.shard}: {error.flaw}")


def _look_through(reader: HiddenStateStore, locations: list[Location]) -> list[Entry | Problem]:
    """What there is to say of these samples, of which every byte is read, some rows at a time. Raises DamagedStore."""
    tokens = reader.tokens_at(locations)
    teachers = [taught_rows(each.loss_mask).nonzero().flatten() for each in tokens]
    seen = [
        location.index.encoding.seen_rows(each.loss_mask).nonzero().flatten()
        for location, each in zip(locations, tokens, strict=True)
    ]
    infinite: list[str | None] = [None] * len(locations)
    for start in range(0, max(location.entry.tokens for location in locations), ROWS_AT_ONCE):
        stop = start + ROWS_AT_ONCE
        requests = [
            RowRequest(location.entry.id, *(rows[(rows >= start) & (rows < stop)] for rows in each))
            for location, *each in zip(locations, seen, teachers, strict=True)
        ]
        for place, rows in enumerate(reader.read_at(locations, requests)):
            kinds = (kind for kind, tensor in rows.named().items() if not tensor.isfinite().all())
            infinite[place] = infinite[place] or next(kinds, None)
    return [_judged(*each) for each in zip(locations, tokens, infinite, strict=True)]


def _judged(location: Location, tokens: StoredTokens, infinite: str | None) -> Entry | Problem:
    """infinite: what is not finite in it."""
    index, entry = location
    if infinite:
        return Problem("not finite", index.name, entry.id, f"its {infinite}")
    digest = sample_digest(tokens.ids.numpy(), tokens.loss_mask.numpy()).hex()
    if digest != entry.id:
        return Problem("mislabelled", index.name, entry.id, f"its tokens and loss mask are those of sample {digest}")
    return entry


def remove_flawed(folder: Path, problems: Iterable[Problem]) -> None:
    """Take what `check_store` found out of the store: whole shards that cannot be read, and of the others the samples in
    question, by a new index. A kill leaves each index as it was or as it shall be."""
    flawed: defaultdict[str | None, set[str | None]] = defaultdict(set)  # samples by index
    for problem in problems:
        flawed[problem.index].add(problem.sample_id)
    flawed.pop(None, None)
    for name, ids in flawed.items():
        kept: tuple[Entry, ...] = ()
        if None not in ids:
            index = ShardIndex.parse((folder / name).read_bytes(), name, str(folder))
            kept = tuple(entry for entry in index.samples if entry.id not in ids)
        if kept:
            replace(index, samples=kept).write(folder)
            continue
        (folder / name).unlink()
        flush(folder)
        (folder / shard_of(name)).unlink(missing_ok=True)


def bind_shards(folder: Path, findings: Findings) -> int:
    """Write the digest of the store's provenance into the indexes that lack it; how many did. Each index holds the checksums
    of its shard, which therefore stays as it is. A kill leaves each index as it was or as it shall be."""
    unbound = [index for index in findings.indexes if index.provenance_digest is None]
    for index in unbound:
        replace(index, provenance_digest=findings.provenance_digest).write(folder)
    return len(unbound)
