"""Check a whole store byte by byte, and remove what is damaged, so that it can be captured again."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from eagle3.console import Progress
from eagle3.durable import flush
from eagle3.states.store.files import DamagedStore, ForeignShards, OutOfRange, open_files
from eagle3.states.store.folder import Provenance, find_indexes, foreign_flaw, read_own_manifest, shard_flaw
from eagle3.states.store.reader import ANY_TOKEN, HiddenStateStore, Location, RowRequest, StoredTokens
from eagle3.states.store.shard import Entry, ShardIndex, taught_rows
from eagle3.text.samples import sample_digest

# Samples read together, because a remote file system answers many requests in the time of one.
SAMPLES_AT_ONCE = 32
# Rows read of each sample at a time, because a sample may be larger than memory.
ROWS_AT_ONCE = 65536
Kind = Literal["damaged", "out of range", "foreign", "mislabelled", "duplicate", "missing"]


class Problem(NamedTuple):
    """Something wrong with a store."""

    kind: Kind
    index: str | None  # the index file that lists the sample; None if the sample is missing
    sample_id: str | None  # None for a whole shard
    detail: str

    def __str__(self) -> str:
        where = self.index if self.sample_id is None else f"sample {self.sample_id}"
        return f"{self.kind}: {where}: {self.detail}"


class Findings(NamedTuple):
    """The result of checking a store."""

    problems: list[Problem]
    indexes: list[ShardIndex]  # the readable ones
    # Intact samples and their tokens, without duplicates:
    samples: int
    tokens: int


def check_store(
    path: str,
    provenance: Provenance,
    expected_ids: Iterable[str],
    report: Callable[[str], None],
    vocab_size: int = ANY_TOKEN,
) -> Findings:
    """Read every sample of the store, compare it with its checksums, and look whether its values are in range.

    expected_ids: ids that should be there
    vocab_size: of the target
    report: gets progress lines

    Raises UserError if there is no store, if its provenance is a different one, or if this machine cannot read it
    (which does not mean that it is damaged).
    """
    files = open_files(path)
    manifest = read_own_manifest(files, provenance)
    reader = HiddenStateStore(files, {}, manifest.record, manifest.digest, vocab_size)
    indexes, index_errors = find_indexes(files)
    problems = [Problem("damaged", name, None, error.flaw) for name, error in index_errors.items()]
    token_counts: dict[str, int] = {}  # token count by sample
    sizes = files.sizes()  # read after the indexes, which are written after their shards
    progress = Progress(report, "checking the store", len(indexes), "shards")
    for index in indexes:
        for finding in _examine(reader, index, sizes):
            if isinstance(finding, Entry) and finding.id in token_counts:
                finding = Problem("duplicate", index.name, finding.id, "an earlier shard has it too")
            if isinstance(finding, Problem):
                problems.append(finding)
            else:
                token_counts[finding.id] = finding.tokens
        progress.advance()
    reported_ids = token_counts.keys() | {problem.sample_id for problem in problems}
    missing_ids = (sample_id for sample_id in expected_ids if sample_id not in reported_ids)
    problems += [Problem("missing", None, sample_id, "no shard has it whole") for sample_id in missing_ids]
    return Findings(problems, indexes, len(token_counts), sum(token_counts.values()))


def _examine(reader: HiddenStateStore, index: ShardIndex, sizes: Mapping[str, int | None]) -> Iterator[Entry | Problem]:
    """Yield the entries of a shard's intact samples, and a Problem for everything else in it."""
    where = f"{reader.where}/{index.shard}"
    try:
        if flaw := foreign_flaw(index.provenance_digest, reader.provenance_digest):
            raise ForeignShards(where, flaw)
        if flaw := shard_flaw(index, sizes):
            raise DamagedStore(where, flaw)
        reader.read_headers([index.shard])
    except DamagedStore as error:  # affects all samples of the shard
        yield Problem(error.kind, index.name, None, f"{index.shard}: {error.flaw}")
        return
    for start in range(0, len(index.samples), SAMPLES_AT_ONCE):
        members = [Location(index, entry) for entry in index.samples[start : start + SAMPLES_AT_ONCE]]
        try:
            yield from _look_through(reader, members)
        except DamagedStore:  # read them one by one to find out which of them
            for member in members:
                try:
                    yield from _look_through(reader, [member])
                except DamagedStore as error:
                    yield Problem(error.kind, index.name, member.entry.id, f"{index.shard}: {error.flaw}")


def _look_through(reader: HiddenStateStore, locations: list[Location]) -> list[Entry | Problem]:
    """Read every byte of these samples, a few rows at a time, and judge each sample. Raises DamagedStore."""
    tokens = reader.tokens_at(locations)
    kept_rows = [  # rows of aux, and rows that the teacher needs
        [rows_of(each.loss_mask).nonzero().flatten() for rows_of in (location.index.encoding.seen_rows, taught_rows)]
        for location, each in zip(locations, tokens, strict=True)
    ]
    for start in range(0, max(location.entry.tokens for location in locations), ROWS_AT_ONCE):
        stop = start + ROWS_AT_ONCE
        requests = [
            RowRequest(location.entry.id, *(rows[(rows >= start) & (rows < stop)] for rows in each))
            for location, each in zip(locations, kept_rows, strict=True)
        ]
        for location, rows in zip(locations, reader.read_at(locations, requests), strict=True):
            if not (rows.aux.isfinite().all() and rows.teacher.values.isfinite().all()):
                raise OutOfRange(location.entry.id, "has hidden states that are not finite")
    return [_judged(*each) for each in zip(locations, tokens, strict=True)]


def _judged(location: Location, tokens: StoredTokens) -> Entry | Problem:
    """The sample's entry if its tokens are its own, else its Problem."""
    index, entry = location
    digest = sample_digest(tokens.ids.numpy(), tokens.loss_mask.numpy()).hex()
    if digest != entry.id:
        return Problem("mislabelled", index.name, entry.id, f"its tokens and loss mask are those of sample {digest}")
    return entry


def remove_flawed(folder: Path, problems: Iterable[Problem]) -> None:
    """Remove everything that `check_store` found. Shards that cannot be read or have no intact sample are deleted; the
    others get a new index without the affected samples. If the process is killed, each index is either the old one or
    the new one."""
    ids_by_index: defaultdict[str | None, set[str | None]] = defaultdict(set)  # samples by index
    for problem in problems:
        ids_by_index[problem.index].add(problem.sample_id)
    ids_by_index.pop(None, None)
    for name, ids in ids_by_index.items():
        entries: tuple[Entry, ...] = ()
        if None not in ids:
            index = ShardIndex.parse((folder / name).read_bytes(), name, str(folder))
            entries = tuple(entry for entry in index.samples if entry.id not in ids)
        if entries:
            replace(index, samples=entries).write(folder)
            continue
        (folder / name).unlink()
        flush(folder)
        (folder / name).with_suffix(".safetensors").unlink(missing_ok=True)
