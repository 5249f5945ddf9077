"""Which shards belong to a store: another store's shards are refused however they got there."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from store_cases import (
    PLAIN,
    PROVENANCE,
    assert_holds,
    check,
    indexes,
    open_store,
    provenance_of,
    read_whole,
    sample,
    write,
)

from eagle3.errors import UserError
from eagle3.states.rows import CapturePart
from eagle3.states.store.check import check_store, remove_flawed
from eagle3.states.store.files import LocalFiles
from eagle3.states.store.reader import HiddenStateStore
from eagle3.states.store.shard import ShardIndex, read_index, replace_index
from eagle3.states.store.writer import StoreWriter

Attempt = Callable[[Path, Path], None]
NUMBERS = range(12)
# Two shards of the first job, one of the second.
SHARES = {CapturePart(0, 2): NUMBERS[:8], CapturePart(1, 2): NUMBERS[8:]}
DIFFERENCES = {
    "target": "ffff",
    "aux_layers": [1, 3, 7],
    "tokenizer": "e5f6",
    "teacher_vocabulary": "0123",  # as in a store of logits for a different draft vocabulary
}


def write_foreign(folder: Path, **changes) -> None:
    """Write the same samples in shards of the same sizes, but with different hidden states, by two jobs as in
    `ours`."""
    for part, share in SHARES.items():
        with StoreWriter(folder, {**PROVENANCE, **changes}, PLAIN, shard_tokens=100, part=part) as writer:
            for number in share:
                name, ids, mask, states = sample(number)
                writer.add(name, ids, mask, states.map(lambda kind: kind + 1))


def write_own(folder: Path) -> None:
    for part, share in SHARES.items():
        write(folder, share, part=part)


@pytest.fixture(scope="module")
def templates(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("templates")
    write_own(folder / "ours")
    for field, value in DIFFERENCES.items():
        write_foreign(folder / field, **{field: value})
    return folder


def shards(folder: Path) -> list[Path]:
    """The shards, ordered by their samples, so that both stores' shards are in the same order."""
    return [folder / index.shard for index in sorted(indexes(folder), key=lambda index: index.samples[0].id)]


def index_of(shard: Path) -> ShardIndex:
    return read_index(LocalFiles(shard.parent), shard.name)


def add_one(ours: Path, theirs: Path) -> None:
    shutil.copy(shards(theirs)[1], ours)


def add_one_renamed(ours: Path, theirs: Path) -> None:
    """The shard's name decides which of two shards with a sample counts."""
    shutil.copy(shards(theirs)[0], ours / "shard-00000000-00000.safetensors")


def add_one_that_was_repaired(ours: Path, theirs: Path) -> None:
    add_one(ours, theirs)
    index = index_of(ours / shards(theirs)[1].name)
    replace_index(ours, index._replace(samples=index.samples[:1]))


def replace_one(ours: Path, theirs: Path) -> None:
    shutil.copy(shards(theirs)[1], shards(ours)[1])


def replace_all(ours: Path, theirs: Path) -> None:
    for own, foreign in zip(shards(ours), shards(theirs), strict=True):
        shutil.copy(foreign, own)


def exchange_one(ours: Path, theirs: Path) -> None:
    """Our shard is gone, and theirs is there under its own name."""
    shards(ours)[1].unlink()
    add_one(ours, theirs)


ADDED = [add_one, add_one_renamed, add_one_that_was_repaired]
REFUSED = [*ADDED, replace_one, replace_all, exchange_one]


def read_all(path) -> None:
    """Read everything, as training does. Raises AssertionError if a row is not what was captured for this store."""
    store = open_store(path)
    for number in NUMBERS:
        assert torch.equal(read_whole(store, number).aux, sample(number)[3].aux)


@pytest.fixture
def ours(tmp_path, templates) -> Path:
    return Path(shutil.copytree(templates / "ours", tmp_path / "ours"))


def assert_repaired(folder: Path, kinds: set[str]) -> None:
    """Assert that a check finds these kinds of problems, and that a repair removes them."""
    findings = check(folder, NUMBERS)
    assert {problem.kind for problem in findings.problems} == kinds
    remove_flawed(folder, findings.problems)
    write(folder, NUMBERS)
    assert_holds(folder, NUMBERS)


@pytest.mark.parametrize("field", DIFFERENCES)
@pytest.mark.parametrize("attempt", REFUSED, ids=lambda attempt: attempt.__name__)
def test_shards_of_another_store_are_refused_named_and_replaced_by_a_repair(ours, templates, attempt: Attempt, field):
    attempt(ours, templates / field)
    for use in (read_all, partial(write, numbers=NUMBERS), lambda path: read_all(f"file://{path}")):
        with pytest.raises(UserError, match="another provenance .*run capture.py --repair, which deletes"):
            use(ours)
    assert_repaired(ours, {"foreign"} if attempt in ADDED else {"foreign", "missing"})


def test_a_shard_that_names_no_store_is_foreign(ours):
    replace_index(ours, index_of(shards(ours)[1])._replace(provenance_digest=None))
    with pytest.raises(UserError, match="another provenance .*run capture.py --repair, which deletes"):
        read_all(ours)
    assert_repaired(ours, {"foreign", "missing"})


@pytest.mark.parametrize("field", DIFFERENCES)
def test_a_description_that_was_replaced_is_refused_and_named(ours, templates, field):
    """No matter whether the recipe matches the description or the shards. Only the description is wrong, and nothing is
    removed."""
    before = sorted(path.name for path in ours.glob("shard-*"))
    shutil.copyfile(templates / field / "store.json", ours / "store.json")
    changed = provenance_of(PLAIN, **{field: DIFFERENCES[field]})
    with pytest.raises(UserError, match="another provenance .* than store.json describes .* 3 of 3 shards are foreign"):
        HiddenStateStore.open(str(ours), changed)
    findings = check_store(str(ours), changed, [], lambda line: None)
    assert [problem.kind for problem in findings.problems] == 3 * ["foreign"]
    for use in (open_store, partial(write, numbers=NUMBERS), partial(check, numbers=NUMBERS)):
        with pytest.raises(UserError, match=f"store.json: says {field}=.*restore the store.json that belongs to them"):
            use(ours)
    assert sorted(path.name for path in ours.glob("shard-*")) == before
    shutil.copyfile(templates / "ours" / "store.json", ours / "store.json")
    assert_holds(ours, NUMBERS)


def test_a_store_stays_itself_when_it_is_moved_renamed_or_its_description_laid_out_anew(ours, tmp_path):
    moved = ours.rename(tmp_path / "moved")
    for number, shard in enumerate(shards(moved)):
        shard.rename(moved / f"shard-0000000{number}-00000.safetensors")
    described = moved / "store.json"
    manifest = json.loads(described.read_text())
    provenance = {"unknown then": None, **dict(reversed(manifest["provenance"].items()))}
    described.write_text(json.dumps({**manifest, "provenance": provenance, "record": {"draft_vocabulary": "other"}}))
    assert_holds(moved, NUMBERS)
    write(moved, [*NUMBERS, 12])
    assert_holds(moved, [*NUMBERS, 12])
    assert len({index.provenance_digest for index in indexes(moved)}) == 1


def test_an_index_that_lists_one_sample_s_tokens_under_another_s_name_is_found(ours):
    index = index_of(shards(ours)[1])
    first, second, *others = index.samples
    exchanged = first._replace(id=second.id), second._replace(id=first.id)
    replace_index(ours, index._replace(samples=(*exchanged, *others)))
    problems = check(ours, NUMBERS).problems
    assert {problem.sample_id for problem in problems if problem.kind == "mislabelled"} == {first.id, second.id}
    assert f"those of sample {first.id}" in problems[0].detail
    assert_repaired(ours, {"mislabelled"})
