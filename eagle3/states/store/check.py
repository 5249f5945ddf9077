"""Check a whole store byte by byte, and remove what is damaged, so that it can be captured again."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from eagle3.console import Progress
from eagle3.states.store.files import DamagedStore, Flaw, LocalFiles, open_files
from eagle3.states.store.folder import Provenance, find_indexes, read_own_manifest
from eagle3.states.store.reader import ANY_TOKEN, HiddenStateStore, Location
from eagle3.states.store.shard import read_index, replace_index
from eagle3.text.samples import sample_digest

# Threads that read samples, because a remote file system answers several requests in the time of one.
THREADS = 8
# Rows read of each sample at a time, because a sample may be larger than memory.
ROWS_AT_ONCE = 65536


class StoreProblem(NamedTuple):
    """Something wrong with a store."""

    kind: Flaw
    shard: str | None  # file that has the sample; None if the sample is missing
    sample_id: str | None  # None for a whole shard
    detail: str

    def __str__(self) -> str:
        where = self.shard if self.sample_id is None else f"sample {self.sample_id}"
        return f"{self.kind}: {where}: {self.detail}"


class Findings(NamedTuple):
    """The result of checking a store."""

    problems: list[StoreProblem]
    shards: int  # that belong to the store and can be read
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
    own, errors = find_indexes(files, manifest.digest)
    problems = [StoreProblem(error.kind, shard, None, error.flaw) for shard, error in errors.items()]
    token_counts: dict[str, int] = {}  # by sample
    progress = Progress(report, "checking the store", len(own), "shards")
    with ThreadPoolExecutor(THREADS) as threads:
        for index in own:
            found = threads.map(partial(_problem, reader), [Location(index, entry) for entry in index.samples])
            for entry, problem in zip(index.samples, found, strict=True):
                if problem is None and entry.id in token_counts:
                    problem = StoreProblem("duplicate", index.shard, entry.id, "an earlier shard has it too")
                if problem:
                    problems.append(problem)
                else:
                    token_counts[entry.id] = entry.tokens
            progress.advance()
    reported_ids = token_counts.keys() | {problem.sample_id for problem in problems}
    missing_ids = (sample_id for sample_id in expected_ids if sample_id not in reported_ids)
    problems += [StoreProblem("missing", None, sample_id, "no shard has it whole") for sample_id in missing_ids]
    return Findings(problems, len(own), len(token_counts), sum(token_counts.values()))


def _problem(reader: HiddenStateStore, location: Location) -> StoreProblem | None:
    """Read every byte of a sample, some rows at a time. Returns what is wrong with it, or None."""
    index, entry = location
    try:
        (tokens,) = reader.tokens_at([location])
        masks = location.kept(tokens.loss_mask)
        for some in torch.arange(entry.tokens).split(ROWS_AT_ONCE):
            (rows,) = reader.read_at([location], [tuple(some[mask[some]] for mask in masks)])
            if not (rows.aux.isfinite().all() and rows.teacher.values.isfinite().all()):
                raise DamagedStore(entry.id, "has hidden states that are not finite", "out of range")
    except DamagedStore as error:
        return StoreProblem(error.kind, index.shard, entry.id, f"{index.shard}: {error.flaw}")
    digest = sample_digest(tokens.ids.numpy(), tokens.loss_mask.numpy()).hex()
    if digest == entry.id:
        return None
    return StoreProblem("mislabelled", index.shard, entry.id, f"its tokens and loss mask are those of sample {digest}")


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
