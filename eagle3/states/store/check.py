"""Check a whole store byte by byte, and remove what is damaged, so that it can be captured again."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from eagle3.console import Progress
from eagle3.states.store.files import DamagedStore, LocalFiles, OutOfRange, open_files
from eagle3.states.store.folder import Provenance, find_indexes, foreign_flaw, read_own_manifest
from eagle3.states.store.reader import ANY_TOKEN, HiddenStateStore, Location, RowRequest
from eagle3.states.store.shard import SampleEntry, ShardIndex, read_index, replace_index, taught_rows
from eagle3.text.samples import Sample, sample_digest

# Samples read together, because a remote file system answers many requests in the time of one.
SAMPLES_AT_ONCE = 32
# Rows read of each sample at a time, because a sample may be larger than memory.
ROWS_AT_ONCE = 65536
Kind = Literal["damaged", "out of range", "foreign", "mislabelled", "duplicate", "missing"]


class StoreProblem(NamedTuple):
    """Something wrong with a store."""

    kind: Kind
    shard: str | None  # file that has the sample; None if the sample is missing
    sample_id: str | None  # None for a whole shard
    detail: str

    def __str__(self) -> str:
        where = self.shard if self.sample_id is None else f"sample {self.sample_id}"
        return f"{self.kind}: {where}: {self.detail}"


class Findings(NamedTuple):
    """The result of checking a store."""

    problems: list[StoreProblem]
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
    reader = HiddenStateStore(files, {}, manifest.record, vocab_size)
    indexes, errors = find_indexes(files)
    problems = [StoreProblem("damaged", shard, None, error.flaw) for shard, error in errors.items()]
    token_counts: dict[str, int] = {}  # token count by sample
    progress = Progress(report, "checking the store", len(indexes), "shards")
    for index in indexes:
        findings = _examine(reader, index)
        if index.provenance_digest != manifest.digest:
            flaw = foreign_flaw(index.provenance_digest, manifest.digest)
            findings = [StoreProblem("foreign", index.shard, None, flaw)]
        for finding in findings:
            if isinstance(finding, SampleEntry) and finding.id in token_counts:
                finding = StoreProblem("duplicate", index.shard, finding.id, "an earlier shard has it too")
            if isinstance(finding, StoreProblem):
                problems.append(finding)
            else:
                token_counts[finding.id] = finding.tokens
        progress.advance()
    reported_ids = token_counts.keys() | {problem.sample_id for problem in problems}
    missing_ids = (sample_id for sample_id in expected_ids if sample_id not in reported_ids)
    problems += [StoreProblem("missing", None, sample_id, "no shard has it whole") for sample_id in missing_ids]
    return Findings(problems, indexes, len(token_counts), sum(token_counts.values()))


def _examine(reader: HiddenStateStore, index: ShardIndex) -> Iterator[SampleEntry | StoreProblem]:
    """Yield the entries of a shard's intact samples, and a Problem for every other one."""
    for start in range(0, len(index.samples), SAMPLES_AT_ONCE):
        members = [Location(index, entry) for entry in index.samples[start : start + SAMPLES_AT_ONCE]]
        try:
            yield from _look_through(reader, members)
        except DamagedStore:  # read them one by one to find out which of them
            for member in members:
                try:
                    yield from _look_through(reader, [member])
                except DamagedStore as error:
                    yield StoreProblem(error.kind, index.shard, member.entry.id, f"{index.shard}: {error.flaw}")


def _look_through(reader: HiddenStateStore, locations: list[Location]) -> list[SampleEntry | StoreProblem]:
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


def _judged(location: Location, tokens: Sample) -> SampleEntry | StoreProblem:
    """The sample's entry if its tokens are its own, else its Problem."""
    index, entry = location
    digest = sample_digest(tokens.ids.numpy(), tokens.loss_mask.numpy()).hex()
    if digest != entry.id:
        return StoreProblem(
            "mislabelled", index.shard, entry.id, f"its tokens and loss mask are those of sample {digest}"
        )
    return entry


def remove_flawed(folder: Path, problems: Iterable[StoreProblem]) -> None:
    """Remove everything that `check_store` found. Shards that cannot be read or have no intact sample are deleted; the
    others lose the affected samples. If the process is killed, each shard is either the old one or the new one."""
    ids_by_shard: defaultdict[str, set[str | None]] = defaultdict(set)  # samples by shard
    for problem in problems:
        if problem.shard:
            ids_by_shard[problem.shard].add(problem.sample_id)
    for shard, ids in ids_by_shard.items():
        index = None if None in ids else read_index(LocalFiles(folder), shard)
        samples = tuple(entry for entry in index.samples if entry.id not in ids) if index else ()
        if samples:
            replace_index(folder, index._replace(samples=samples))
        else:
            (folder / shard).unlink()
