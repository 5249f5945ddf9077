"""Looks a whole store through, byte by byte, and takes out what is damaged, so that it can be captured anew."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from eagle3.console import Progress
from eagle3.data.store.files import DamagedStore, StoreFiles, open_files
from eagle3.data.store.folder import Provenance, read_manifest, require_provenance, shard_flaw
from eagle3.data.store.reader import HiddenStateStore, Location, RowRequest
from eagle3.data.store.shard import Entry, ShardIndex, is_index, shard_of, taught_rows
from eagle3.durable import flush

# Samples read together: a remote file system answers many requests in the time of one.
SAMPLES_AT_ONCE = 32
# Of each of them: a sample may be longer than memory.
ROWS_AT_ONCE = 65536
Kind = Literal["damaged", "not finite", "duplicate", "missing"]


class Problem(NamedTuple):
    """index: the file that lists the sample, None for a missing one. sample_id: None where the whole shard is meant."""

    kind: Kind
    index: str | None
    sample_id: str | None
    detail: str

    def __str__(self) -> str:
        where = self.index if self.sample_id is None else f"sample {self.sample_id}"
        return f"{self.kind}: {where}: {self.detail}"


@dataclass
class Findings:
    """samples, tokens: what is whole and counts."""

    problems: list[Problem] = field(default_factory=list)
    samples: int = 0
    tokens: int = 0


def check_store(path: str, provenance: Provenance, wanted: Iterable[str], report: Callable[[str], None]) -> Findings:
    """Read every sample of the store and compare it with its checksums.

    wanted: ids that should be there. report: gets progress lines. Raises UserError where there is no
    store, one of another provenance, or one that this machine cannot read, which is no damage.
    """
    files = open_files(path)
    manifest = read_manifest(files)
    require_provenance(files.where, manifest.provenance, provenance)
    reader, findings, seen = HiddenStateStore(files, {}, manifest.record), Findings(), set()
    indexes = sorted(filter(is_index, files.sizes()))
    sizes = files.sizes()  # looked at after the indexes, before which their shards were there
    progress = Progress(report, "checking the store", len(indexes), "shards")
    for name in indexes:
        for found in _examine(reader, files, name, sizes):
            if isinstance(found, Entry) and found.id in seen:
                found = Problem("duplicate", name, found.id, "an earlier shard has it too")
            if isinstance(found, Problem):
                findings.problems.append(found)
                continue
            seen.add(found.id)
            findings.samples += 1
            findings.tokens += found.tokens
        progress.advance()
    reported = seen | {problem.sample_id for problem in findings.problems}
    missing = (sample_id for sample_id in wanted if sample_id not in reported)
    findings.problems += [Problem("missing", None, sample_id, "no shard has it whole") for sample_id in missing]
    return findings


def _examine(
    reader: HiddenStateStore, files: StoreFiles, name: str, sizes: Mapping[str, int | None]
) -> Iterator[Entry | Problem]:
    """The samples of one index that are whole, and what is wrong with the others."""
    try:
        index = ShardIndex.parse(files.read([name])[0], name, files.where)
    except DamagedStore as error:
        yield Problem("damaged", name, None, error.flaw)
        return
    flaw = shard_flaw(index, sizes)
    if flaw:
        yield Problem("damaged", name, None, f"{index.shard}: {flaw}")
        return
    try:
        reader.read_headers([index.shard])
    except DamagedStore as error:
        yield Problem("damaged", name, None, f"{index.shard}: {error.flaw}")
        return
    reader.prepare(index.encoding)
    for start in range(0, len(index.samples), SAMPLES_AT_ONCE):
        members = [Location(index, entry) for entry in index.samples[start : start + SAMPLES_AT_ONCE]]
        try:
            flaws = _infinite(reader, members)
        except DamagedStore:  # which of them?
            for member in members:
                try:
                    yield _judged(name, member.entry, *_infinite(reader, [member]))
                except DamagedStore as error:
                    yield Problem("damaged", name, member.entry.id, f"{index.shard}: {error.flaw}")
        else:
            for member, infinite in zip(members, flaws, strict=True):
                yield _judged(name, member.entry, infinite)


def _infinite(reader: HiddenStateStore, locations: list[Location]) -> list[str | None]:
    """What is not finite in each of these samples, of which every byte is read, some rows at a time."""
    teachers = [taught_rows(tokens.loss_mask).nonzero().flatten() for tokens in reader.tokens_at(locations)]
    found: list[str | None] = [None] * len(locations)
    for start in range(0, max(location.entry.tokens for location in locations), ROWS_AT_ONCE):
        stop = start + ROWS_AT_ONCE
        requests = [
            RowRequest(
                location.entry.id,
                torch.arange(min(start, location.entry.tokens), min(stop, location.entry.tokens)),
                teacher[(teacher >= start) & (teacher < stop)],
            )
            for location, teacher in zip(locations, teachers, strict=True)
        ]
        for place, rows in enumerate(reader.read_at(locations, requests)):
            kinds = (kind for kind in ("aux", "last", "logsumexp") if not getattr(rows, kind).isfinite().all())
            found[place] = found[place] or next(kinds, None)
    return found


def _judged(index: str, entry: Entry, infinite: str | None) -> Entry | Problem:
    return Problem("not finite", index, entry.id, f"its {infinite}") if infinite else entry


def remove_flawed(folder: Path, problems: Iterable[Problem]) -> None:
    """Take what `check_store` found out of the store: whole shards that cannot be read, and of the others the samples in
    question, by a new index. A kill leaves each index as it was or as it shall be."""
    by_index: dict[str, list[Problem]] = {}
    for problem in problems:
        if problem.index is not None:
            by_index.setdefault(problem.index, []).append(problem)
    for name, found in by_index.items():
        ids = {problem.sample_id for problem in found}
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
