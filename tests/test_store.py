"""The hidden-state store: what comes out is what went in, and neither crashes nor damage go unnoticed."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from eagle3.data.store import HiddenStateStore, StoreWriter
from eagle3.errors import UserError
from eagle3.target.interface import HiddenStates

HIDDEN = 16
PROVENANCE = {"target": "a1b2", "aux_layers": [1, 3, 6], "tokenizer": "c3d4", "max_length": 512}


def sample(number: int, tokens: int | None = None) -> tuple[str, torch.Tensor, torch.Tensor, HiddenStates]:
    """A sample that its number determines, so that any process can say what the store should hold."""
    generator = torch.Generator().manual_seed(number)
    tokens = tokens or int(torch.randint(1, 40, (), generator=generator))
    ids = torch.randint(150_000, (tokens,), generator=generator)
    loss_mask = torch.rand(tokens, generator=generator) < 0.4
    states = HiddenStates(
        aux=torch.randn(tokens, 3 * HIDDEN, generator=generator),
        last=torch.randn(tokens, HIDDEN, generator=generator),
        argmax=torch.randint(150_000, (tokens,), generator=generator),
        logsumexp=torch.randn(tokens, generator=generator) * 20,
    )
    return f"sample-{number}", ids, loss_mask, states


def write(path: Path, numbers, dtype="float32", shard_tokens=100, **changes) -> list[str]:
    """Write samples and return what the writer reported."""
    lines = []
    with StoreWriter(path, PROVENANCE | changes, dtype=dtype, shard_tokens=shard_tokens, report=lines.append) as writer:
        for number in numbers:
            writer.add(*sample(number))
    return lines


def assert_holds(path: Path, numbers, dtype: torch.dtype = torch.float32) -> None:
    store = HiddenStateStore.open(path, PROVENANCE)
    assert sorted(store) == sorted(f"sample-{number}" for number in numbers)
    for number in numbers:
        sample_id, ids, loss_mask, states = sample(number)
        rows = torch.arange(len(ids))
        stored = store.read(sample_id, rows, rows)
        assert stored.aux.dtype == stored.last.dtype == dtype
        assert torch.equal(stored.aux, states.aux.to(dtype)) and torch.equal(stored.last, states.last.to(dtype))
        assert torch.equal(stored.argmax, states.argmax) and torch.equal(stored.logsumexp, states.logsumexp)
        tokens = store.tokens(sample_id)
        assert torch.equal(tokens.ids, ids) and torch.equal(tokens.loss_mask, loss_mask)
    # No gaps and no duplicates on disk either: the shards hold the samples' tokens and nothing else.
    stored_tokens = 0
    for shard in path.glob("*.safetensors"):
        with safe_open(shard, "pt") as tensors:
            stored_tokens += tensors.get_slice("ids").get_shape()[0]
    assert stored_tokens == sum(len(sample(number)[1]) for number in numbers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard_tokens", [1, 100, 10_000])
def test_whole_samples_come_back_exactly_or_rounded_to_bf16(tmp_path, dtype, shard_tokens):
    write(tmp_path, range(12), dtype=dtype, shard_tokens=shard_tokens)
    assert_holds(tmp_path, range(12), getattr(torch, dtype))


def test_shards_stay_within_their_tokens(tmp_path):
    write(tmp_path, range(30), shard_tokens=100)
    indexes = [file.read_text().splitlines() for file in sorted(tmp_path.glob("*.jsonl"))]
    sizes = [sum(json.loads(line)["tokens"] for line in lines) for lines in indexes]
    assert len(sizes) > 3 and max(sizes) <= 100
    assert all(size + following > 100 - 40 for size, following in itertools.pairwise(sizes))


@pytest.mark.parametrize(
    ("aux_rows", "last_rows"),
    [
        ([0], [49]),
        ([], [3, 4, 5]),
        (list(range(10, 20)), []),
        ([0, 1, 2, 7, 8, 30, 32, 49], [48, 49]),
        ([5, 4, 3, 3, 20, 21], [49, 0, 1]),
    ],
)
def test_ranged_rows_equal_those_of_the_whole_sample(tmp_path, aux_rows, last_rows):
    states = sample(7, tokens=50)[3]
    with StoreWriter(tmp_path, PROVENANCE, dtype="float32") as writer:
        for number in (6, 7, 8):
            writer.add(*sample(number, tokens=50))
    aux_rows, last_rows = torch.tensor(aux_rows, dtype=torch.int64), torch.tensor(last_rows, dtype=torch.int64)
    stored = HiddenStateStore.open(tmp_path, PROVENANCE).read("sample-7", aux_rows, last_rows)
    assert torch.equal(stored.aux, states.aux[aux_rows]) and torch.equal(stored.last, states.last[last_rows])
    assert torch.equal(stored.argmax, states.argmax) and torch.equal(stored.logsumexp, states.logsumexp)


@pytest.mark.parametrize("row", [50, -1])
def test_rows_of_the_neighbouring_sample_are_out_of_reach(tmp_path, row):
    with StoreWriter(tmp_path, PROVENANCE) as writer:
        for number in (6, 7, 8):
            writer.add(*sample(number, tokens=50))
    with pytest.raises(AssertionError, match="outside a sample of 50 tokens"):
        HiddenStateStore.open(tmp_path, PROVENANCE).read("sample-7", torch.tensor([row]), torch.tensor([0]))


def test_reading_a_few_rows_does_not_load_the_sample(tmp_path):
    tokens, width = 4096, 4096
    aux, last = torch.zeros(tokens, 3 * width, dtype=torch.bfloat16), torch.zeros(tokens, width, dtype=torch.bfloat16)
    states = HiddenStates(aux, last, torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens))
    with StoreWriter(tmp_path, PROVENANCE) as writer:
        writer.add("long", torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens), states)
    del aux, last, states
    store = HiddenStateStore.open(tmp_path, PROVENANCE)
    rows = torch.arange(1000, 1010)
    store.read("long", rows, rows)  # whatever the first read allocates for good
    before = bytes_read()
    store.read("long", rows + 2000, rows + 2000)
    few = bytes_read() - before
    before = bytes_read()
    store.read("long", torch.arange(tokens), rows)
    whole = bytes_read() - before
    assert whole > 90e6  # 4096 rows of 24 KB, so the measurement sees what it should
    assert few < 2e6


def bytes_read() -> int:
    """Bytes that this process has read by system calls so far, from the disk or its cache."""
    counters = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in counters if line.startswith("rchar"))


def test_membership_and_missing_name_what_is_not_there(tmp_path):
    write(tmp_path, [1, 2, 3])
    store = HiddenStateStore.open(tmp_path, PROVENANCE)
    assert len(store) == 3 and "sample-2" in store and "sample-4" not in store
    assert store.missing(["sample-9", "sample-1", "sample-4"]) == ["sample-9", "sample-4"]
    with pytest.raises(UserError, match=r"'sample-4' is not in the store; run capture.py"):
        store.read("sample-4", torch.tensor([0]), torch.tensor([0]))


def test_a_known_sample_is_ignored_and_add_says_so(tmp_path):
    with StoreWriter(tmp_path, PROVENANCE, dtype="float32") as writer:
        assert writer.add(*sample(1)) and not writer.add(*sample(1))
    with StoreWriter(tmp_path, PROVENANCE, dtype="float32") as writer:
        assert writer.known == {"sample-1"}
        assert not writer.add(*sample(1)) and writer.add(*sample(2))
    assert_holds(tmp_path, [1, 2])


@pytest.mark.parametrize(
    ("field", "value"), [("target", "ffff"), ("aux_layers", [1, 3, 7]), ("seed", 4), ("tokenizer", None)]
)
def test_different_provenance_is_refused_with_field_and_both_values(tmp_path, field, value):
    write(tmp_path, [1])
    message = rf"{field}={PROVENANCE.get(field)!r}, this run has {value!r}; .*hidden_states.path"
    message = message.replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(UserError, match=message):
        HiddenStateStore.open(tmp_path, PROVENANCE | {field: value})
    with pytest.raises(UserError, match=message):
        write(tmp_path, [2], **{field: value})
    with pytest.raises(UserError, match="dtype='float32', this run has 'bfloat16'"):
        write(tmp_path, [2], dtype="bfloat16")
    assert_holds(tmp_path, [1])


def test_tuples_in_provenance_equal_the_lists_they_become(tmp_path):
    write(tmp_path, [1], aux_layers=(1, 3, 6))
    assert_holds(tmp_path, [1])


def cut(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 1)


def cut_inside_the_header(shard: Path) -> None:
    os.truncate(shard, 20)


def empty(shard: Path) -> None:
    os.truncate(shard, 0)


def garble(shard: Path) -> None:
    shard.write_bytes(b"\xff" * shard.stat().st_size)


@pytest.mark.parametrize("damage", [cut, cut_inside_the_header, empty, garble, Path.unlink])
def test_a_damaged_shard_is_named_and_its_samples_alone_are_captured_again(tmp_path, damage):
    write(tmp_path, range(20))
    shard = tmp_path / "shard-00001.safetensors"
    lost = {json.loads(line)["id"] for line in shard.with_suffix(".jsonl").read_text().splitlines()}
    damage(shard)
    kind = "missing; run capture.py" if damage is Path.unlink else "broken .*; delete it and run capture.py again"
    with pytest.raises(UserError, match=f"shard-00001.safetensors: {kind}"):
        HiddenStateStore.open(tmp_path, PROVENANCE)
    if damage is not Path.unlink:
        with pytest.raises(UserError, match="shard-00001.safetensors: broken .*; delete it"):
            write(tmp_path, [])
        shard.unlink()
    reported = []
    with StoreWriter(tmp_path, PROVENANCE, dtype="float32", shard_tokens=100, report=reported.append) as writer:
        assert writer.known == {f"sample-{number}" for number in range(20)} - lost and lost
        written = {f"sample-{number}" for number in range(20) if writer.add(*sample(number))}
    assert written == lost
    assert len(reported) == 1 and "shard-00001" in reported[0] and f"{len(lost)} samples" in reported[0]
    assert_holds(tmp_path, range(20))


def test_a_shard_cut_after_the_store_was_opened_is_named(tmp_path):
    write(tmp_path, [1])
    store, rows = HiddenStateStore.open(tmp_path, PROVENANCE), torch.arange(len(sample(1)[1]))
    os.truncate(tmp_path / "shard-00000.safetensors", 1500)
    with pytest.raises(UserError, match="shard-00000.safetensors: ends too early; delete it"):
        store.read("sample-1", rows, rows)


def test_a_shard_that_is_not_its_indexs_is_refused(tmp_path):
    write(tmp_path, range(20))
    (tmp_path / "shard-00002.safetensors").replace(tmp_path / "shard-00001.safetensors")
    with pytest.raises(UserError, match="shard-00001.safetensors: does not hold the samples of its index"):
        HiddenStateStore.open(tmp_path, PROVENANCE)


@pytest.mark.parametrize("name", ["store.json", "shard-00000.jsonl"])
def test_a_broken_description_or_index_is_named(tmp_path, name):
    write(tmp_path, range(5))
    (tmp_path / name).write_text("{")
    with pytest.raises(UserError, match=f"{name}: .*delete"):
        HiddenStateStore.open(tmp_path, PROVENANCE)


def test_samples_of_a_deleted_index_are_captured_again_and_their_old_shard_goes(tmp_path):
    write(tmp_path, range(20))
    (tmp_path / "shard-00001.jsonl").unlink()
    write(tmp_path, range(20))
    assert_holds(tmp_path, range(20))


def test_a_shard_that_cannot_be_written_leaves_no_index(tmp_path):
    writer = StoreWriter(tmp_path, PROVENANCE)
    writer.add(*sample(1))
    (tmp_path / "shard-00000.safetensors").mkdir()  # the rename onto it fails
    with pytest.raises(UserError, match=r"shard-00000.safetensors: cannot be written .*; free disk space"):
        writer.close()
    assert not list(tmp_path.glob("*.jsonl"))


def test_what_is_not_a_store_is_refused(tmp_path):
    with pytest.raises(UserError, match="no hidden-state store here; run capture.py"):
        HiddenStateStore.open(tmp_path / "nowhere", PROVENANCE)
    write(tmp_path, range(5))
    (tmp_path / "store.json").unlink()
    with pytest.raises(UserError, match="has shards but no store.json"):
        write(tmp_path, range(5))
    assert (tmp_path / "shard-00000.safetensors").exists()


def test_an_exception_leaves_whole_shards_only(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        StoreWriter(tmp_path, PROVENANCE, dtype="float32", shard_tokens=100) as writer,
    ):
        for number in range(20):
            writer.add(*sample(number))
            if number == 15:
                raise ZeroDivisionError
    known = StoreWriter(tmp_path, PROVENANCE, dtype="float32").known
    assert 0 < len(known) < 16
    write(tmp_path, range(20))
    assert_holds(tmp_path, range(20))


def test_every_moment_of_a_writers_death_leaves_a_store_that_continues(tmp_path):
    write(tmp_path, range(20))
    shard = tmp_path / "shard-00002.safetensors"
    whole, index = shard.read_bytes(), shard.with_suffix(".jsonl")
    shard.unlink(), index.unlink()
    partial = shard.with_name(shard.name + ".partial")
    for moment in ("writing the shard", "before the index", "writing the index"):
        partial.write_bytes(whole[: len(whole) // 2]) if moment == "writing the shard" else shard.write_bytes(whole)
        if moment == "writing the index":
            index.with_name(index.name + ".partial").write_text('{"id": "sam')
        write(tmp_path, range(20))
        assert_holds(tmp_path, range(20))
        assert not list(tmp_path.glob("*.partial"))
        last = max(tmp_path.glob("shard-*.safetensors"))
        whole, shard, index = last.read_bytes(), last, last.with_suffix(".jsonl")
        index.unlink(), shard.unlink()


CAPTURE = """
import sys
from pathlib import Path
from tests.test_store import PROVENANCE, StoreWriter, sample
with StoreWriter(Path(sys.argv[1]), PROVENANCE, dtype="float32", shard_tokens=50) as writer:
    for number in range(2000):
        writer.add(*sample(number))
        print(number, flush=True)
"""


def test_a_killed_capture_continues_without_gaps_or_duplicates(tmp_path):
    root = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-c", CAPTURE, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, env=environment) as capture:
        for line in capture.stdout:
            if int(line) == 120:
                capture.send_signal(signal.SIGKILL)
                break
    assert capture.returncode == -signal.SIGKILL
    survived = StoreWriter(tmp_path, PROVENANCE, dtype="float32").known
    assert 100 < len(survived) < 2000
    end = len(survived) + 40
    write(tmp_path, range(end))
    assert_holds(tmp_path, range(end))
