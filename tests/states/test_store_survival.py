"""What a store survives: killed writers, full disks, damage, two writers. Nothing goes unnoticed, and nothing is
lost."""

import errno
import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from limits import HANG_SECONDS, wait_until
from store_cases import (
    FORK,
    HIDDEN,
    PLAIN,
    PROVENANCE,
    assert_continues,
    assert_holds,
    at_once,
    check,
    killed_at_call,
    open_store,
    read_whole,
    run,
    same_rows,
    sample,
    sample_id,
    stored_ids,
    write,
)

from eagle3.errors import UserError, mistake_of
from eagle3.parallel.sequence import Reach
from eagle3.states.rows import CapturePart, Rows
from eagle3.states.store.check import remove_flawed
from eagle3.states.store.files import DamagedStore, LocalFiles
from eagle3.states.store.shard import DATA_START, Encoding, read_index
from eagle3.states.store.writer import StoreWriter


def killed_at_byte(number: int, path: Path) -> None:
    """Write samples, until the kernel kills this process in the middle of the write that would make a file longer than
    `number` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))
    write(path, range(8))


def test_a_writer_killed_at_any_call_leaves_a_store_that_continues(tmp_path):
    """A published shard stays; an unpublished one leaves nothing behind."""
    number, stored_before = 0, 0
    while True:
        number += 1
        path = tmp_path / f"call-{number}"
        code = run(killed_at_call, number, write, path, range(8), PLAIN, 60)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        stored = stored_ids(path)
        assert len(stored) >= stored_before  # later deaths lose no more
        stored_before = len(stored)
        contents = {shard.name: shard.read_bytes() for shard in path.glob("*.safetensors")}
        assert_continues(path, range(9))
        assert all((path / name).read_bytes() == text for name, text in contents.items())
        assert not [*path.glob("*.partial"), *path.glob(".shard-*")]
        shutil.rmtree(path)
    assert number > 60 and stored_before > 4  # several shards, each with its calls


def test_a_writer_killed_in_the_middle_of_a_write_leaves_a_store_that_continues(tmp_path):
    whole = tmp_path / "whole"
    write(whole, range(8))
    largest = max(path.stat().st_size for path in whole.iterdir())
    for number in [1, 100, 4095, 4096, *range(4500, largest, 2500), largest - 1]:
        path = tmp_path / f"byte-{number}"
        assert run(killed_at_byte, number, path) == -signal.SIGXFSZ
        assert_continues(path, range(8))
        assert not [*path.glob("*.partial"), *path.glob(".shard-*")]
    assert run(killed_at_byte, largest, tmp_path / "enough") == 0


def test_a_full_disk_loses_the_shard_in_flight_and_no_more(small_disk):
    def resize(size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(small_disk)], check=True)

    resize("100k")
    full = "cannot be written .*No space left on device.* are free.*; free space and run capture.py"
    with pytest.raises(UserError, match=full):
        write(small_disk, range(60))
    size = sum(-(-file.stat().st_size // 4096) * 4096 for file in small_disk.iterdir())
    assert not list(small_disk.glob("*.partial"))
    assert shutil.disk_usage(small_disk).used <= size + 8192  # what was unfinished is gone
    before = stored_ids(small_disk)
    assert 5 < len(before) < 60
    resize("10m")
    assert_continues(small_disk, range(60))
    assert before < stored_ids(small_disk)


def test_a_file_size_limit_is_told_like_a_full_disk(tmp_path):
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))  # Python ignores the signal and sees EFBIG
        with pytest.raises(UserError, match=f"cannot be written .*{os.strerror(errno.EFBIG)}"):
            write(tmp_path, range(8))
        assert not list(tmp_path.glob("shard-*.partial"))

    assert run(limited) == 0
    assert_continues(tmp_path, range(8))


def flip(path: Path, place: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize(
    "encoding", [PLAIN, Encoding("lossless", "bfloat16", HIDDEN), Encoding("fp8", "bfloat16", HIDDEN)]
)
def test_a_flipped_byte_anywhere_is_found_by_whoever_reads_it_and_by_the_check(tmp_path, encoding):
    """Tried all over a shard's data and index. (In the header, some bytes say nothing that a reader needs.)"""
    write(tmp_path, range(5), encoding, shard_tokens=1000)
    shard = next(tmp_path.glob("*.safetensors"))
    original, expected = shard.read_bytes(), {n: read_whole(open_store(tmp_path, encoding), n) for n in range(5)}
    for place in [3, 40, *range(4096, len(original), max(1, len(original) // 150))]:
        flip(shard, place, place % 8)
        refused = 0
        for number in range(5):
            try:
                stored = read_whole(open_store(tmp_path, encoding), number)
            except UserError as error:
                refused += "run capture.py --repair" in str(error)
            else:
                assert same_rows(stored, expected[number])
        assert bool(refused) == bool(check(tmp_path, range(5), encoding).problems)
        assert refused or place < 4096
        shard.write_bytes(original)


DAMAGES = {
    "cut": lambda content: content[:-1],
    "cut inside the header": lambda content: content[:20],
    "empty": lambda content: b"",
    "garbled": lambda content: b"\xff" * len(content),
    "a deep header": lambda content: content[:8] + b"[" * (DATA_START - 8) + content[DATA_START:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_shard_is_named_and_repaired_with_its_samples_alone(tmp_path, damage):
    write(tmp_path, range(20))
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    lost, contents = samples_of(shard), {path: path.read_bytes() for path in tmp_path.glob("shard-*") if path != shard}
    shard.write_bytes(damage(shard.read_bytes()))
    with pytest.raises(UserError, match=f"{shard.stem}.*run capture.py --repair"):
        store = open_store(tmp_path)
        for number in range(20):
            read_whole(store, number)
    findings = check(tmp_path, range(21))
    assert {problem.sample_id for problem in findings.problems if problem.kind == "missing"} == lost | {sample_id(20)}
    assert any(shard.stem in str(problem) for problem in findings.problems) and findings.samples == 20 - len(lost)
    remove_flawed(tmp_path, findings.problems)
    with StoreWriter(tmp_path, PROVENANCE, PLAIN, shard_tokens=100) as writer:
        assert writer.known == set(map(sample_id, range(20))) - lost and lost
        assert {sample_id(number) for number in range(20) if writer.add(*sample(number))} == lost
    assert_holds(tmp_path, range(20))
    assert all(path.read_bytes() == content for path, content in contents.items())


def samples_of(shard: Path) -> set[str]:
    return {entry.id for entry in read_index(LocalFiles(shard.parent), shard.name).samples}


@pytest.mark.parametrize("replaced", [False, True])
def test_samples_of_a_shard_that_is_gone_or_replaced_by_a_copy_of_another_are_captured_again(tmp_path, replaced):
    write(tmp_path, range(20))
    shard, other, *_ = sorted(tmp_path.glob("*.safetensors"))
    lost, copied = samples_of(shard), samples_of(other)
    shard.unlink()
    if replaced:
        shutil.copyfile(other, shard)
    found = {(problem.kind, problem.sample_id) for problem in check(tmp_path, range(20)).problems}
    assert found == {("missing", one) for one in lost} | {("duplicate", one) for one in copied if replaced}
    write(tmp_path, range(20))
    remove_flawed(tmp_path, check(tmp_path, range(20)).problems)
    assert_holds(tmp_path, range(20))


@pytest.mark.parametrize("name", ["shard", "store.json"])
def test_a_folder_in_the_place_of_a_stores_file_is_named_and_nothing_is_removed(tmp_path, name):
    write(tmp_path, range(20))
    file = tmp_path / name if "." in name else sorted(tmp_path.glob("*.safetensors"))[1]
    file.unlink(), file.mkdir()
    before = {*tmp_path.iterdir()}
    for read in (open_store, lambda path: check(path, range(20)), lambda path: StoreWriter(path, PROVENANCE, PLAIN)):
        with pytest.raises(IsADirectoryError) as refused:
            read(tmp_path)
        assert str(mistake_of(refused.value)).startswith(f"{file}: is a directory; move away what is there")
    assert before == {*tmp_path.iterdir()}


def test_a_long_sample_is_checked_some_rows_at_a_time(tmp_path, monkeypatch):
    write(tmp_path, range(10), shard_tokens=10_000)
    whole, shard = check(tmp_path, range(11)), next(tmp_path.glob("*.safetensors"))
    monkeypatch.setattr("eagle3.states.store.check.ROWS_AT_ONCE", 7)
    assert check(tmp_path, range(11)) == whole and whole.samples == 10
    flip(shard, 4096 + 200)
    assert [problem.kind for problem in check(tmp_path, range(10)).problems] == ["damaged"]


def test_repairing_a_damaged_sample_leaves_its_neighbours_where_they_are(tmp_path):
    write(tmp_path, range(10), shard_tokens=10_000)
    shard = next(tmp_path.glob("*.safetensors"))
    flip(shard, 4096 + 200)
    findings = check(tmp_path, range(10))
    (damaged,) = findings.problems
    assert damaged.kind == "damaged" and damaged.sample_id in map(sample_id, range(10))
    remove_flawed(tmp_path, findings.problems)
    assert len(open_store(tmp_path).locations) == 9 and shard.exists()
    assert_continues(tmp_path, range(10))
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_a_shard_cut_while_the_store_is_open_is_named(tmp_path):
    write(tmp_path, [1])
    store, shard = open_store(tmp_path), next(tmp_path.glob("*.safetensors"))
    read_whole(store, 1)
    os.truncate(shard, 4200)
    with pytest.raises(UserError, match=f"{shard.name}: is shorter than its index says; run capture.py --repair"):
        read_whole(store, 1)


def test_numbers_that_are_not_finite_in_a_store_are_reported(tmp_path, monkeypatch):
    """An older version or a different writer may have left such numbers, so here a writer without that check writes
    them."""
    monkeypatch.setattr(torch.Tensor, "isfinite", lambda tensor: torch.ones((), dtype=torch.bool))
    name, ids, mask, states = sample(3)
    states.teacher.values[1:] = float("nan")
    with StoreWriter(tmp_path, PROVENANCE, PLAIN) as writer:
        writer.add(name, ids, mask, states)
        writer.add(*sample(4))
    monkeypatch.undo()
    findings = check(tmp_path, [3, 4])
    assert [(problem.kind, problem.sample_id) for problem in findings.problems] == [("out of range", name)]
    assert findings.samples == 1


def test_a_second_writer_of_the_same_part_is_turned_away_while_the_first_lives(tmp_path):
    with StoreWriter(tmp_path, PROVENANCE, PLAIN) as writer:
        writer.add(*sample(1))
        refused(tmp_path)
        assert run(refused, tmp_path) == 0
    assert_continues(tmp_path, [1, 2])


def refused(path: Path) -> None:
    with pytest.raises(UserError, match="part 0/1 is being captured by another process"):
        StoreWriter(path, PROVENANCE, PLAIN)


def test_two_writers_of_one_sample_leave_it_whole_and_a_repair_leaves_it_once(tmp_path):
    """Jobs that were split differently do not know about each other. Here they write every sample at the same time."""
    ready = FORK.Barrier(3)

    def write_beside(count: int) -> None:
        with StoreWriter(tmp_path, PROVENANCE, PLAIN, shard_tokens=50, part=CapturePart(0, count)) as writer:
            ready.wait(HANG_SECONDS)
            for number in range(30):
                writer.add(*sample(number))

    assert at_once(*(partial(write_beside, count) for count in (1, 2, 3))) == [0] * 3
    store = open_store(tmp_path)
    for number in range(30):
        assert torch.equal(read_whole(store, number).aux, sample(number)[3].aux)
    findings = check(tmp_path, range(30))
    assert findings.samples == 30 and len(findings.problems) == 60
    assert {problem.kind for problem in findings.problems} == {"duplicate"}
    remove_flawed(tmp_path, findings.problems)
    assert_holds(tmp_path, range(30))


def test_a_writer_does_not_clear_away_what_a_living_one_is_writing(tmp_path):
    with StoreWriter(tmp_path, PROVENANCE, PLAIN, part=CapturePart(0, 2)) as living:
        living.add(*sample(1))
        assert len(list(tmp_path.glob("*.partial"))) == 1
        assert run(partial(write, tmp_path, [2], part=CapturePart(1, 2))) == 0
        assert len(list(tmp_path.glob("*.partial"))) == 1
    assert_holds(tmp_path, [1, 2])


def test_a_store_opens_at_any_moment_while_others_write_into_it(tmp_path):
    """Readers, and writers that recover what others may have left, open the store between any two steps of publishing
    writers, which at every tenth sample wait for one of them, however seldom these get a core."""
    opened = FORK.Value("i", 0)

    def write_many(part: CapturePart) -> None:
        with StoreWriter(tmp_path, PROVENANCE, PLAIN, shard_tokens=1, part=part) as writer:
            for number in filter(lambda number: number % 2 == part.index, range(120)):
                writer.add(*sample(number))
                if number % 20 == part.index:
                    next_whole = opened.value + 2  # one that begins after now
                    wait_until(lambda wanted=next_whole: opened.value >= wanted)

    write(tmp_path, [0], shard_tokens=1, part=CapturePart(2, 3))
    writers = [FORK.Process(target=write_many, args=(CapturePart(index, 2),), daemon=True) for index in range(2)]
    for writer in writers:
        writer.start()
    seen = [1]
    while any(writer.is_alive() for writer in writers):
        write(tmp_path, [], part=CapturePart(2, 3))
        seen.append(len(open_store(tmp_path).locations))
        opened.value += 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen == sorted(seen) and len(set(seen)) > 5
    assert_holds(tmp_path, range(120))


def test_writers_that_begin_a_store_at_the_same_time_agree_on_what_it_is(tmp_path):
    def begin(count: int, target: str) -> None:
        try:
            with StoreWriter(tmp_path, {**PROVENANCE, "target": target}, PLAIN, part=CapturePart(0, count)) as writer:
                writer.add(*sample(count))
        except UserError as error:
            sys.exit(3 if "captured with target=" in str(error) else 4)

    codes = at_once(*(partial(begin, count, "a1b2" if count % 2 else "other") for count in range(1, 9)))
    assert sorted(codes) == [0] * 4 + [3] * 4 and codes[::2] in ([0] * 4, [3] * 4)


def test_a_shard_that_cannot_get_its_name_is_no_part_of_the_store(tmp_path):
    refused = pytest.raises(UserError, match="cannot be written .*; .* and run capture.py")
    with refused, StoreWriter(tmp_path, PROVENANCE, PLAIN) as writer:
        writer.add(*sample(1))
        shard = tmp_path / next(tmp_path.glob("*.partial")).stem
        shard.mkdir()
    shard.rmdir()
    assert_continues(tmp_path, [1, 2])
    assert len(list(tmp_path.glob("shard-*.safetensors"))) == 1


def test_what_is_not_a_store_is_refused(tmp_path):
    with pytest.raises(UserError, match="no hidden-state store here; run capture.py"):
        open_store(tmp_path / "nowhere")
    write(tmp_path, range(5))
    (tmp_path / "store.json").unlink()
    for attempt in (open_store, partial(write, numbers=range(5))):
        with pytest.raises(UserError, match="has shards but no store.json"):
            attempt(tmp_path)
    assert list(tmp_path.glob("*.safetensors"))
    (tmp_path / "store.json").write_text('{"format": 1}')
    with pytest.raises(UserError, match="store format 1, this version reads 4"):
        open_store(tmp_path)


def test_what_cannot_be_read_here_is_not_taken_for_damage(tmp_path, monkeypatch):
    """A machine without the codec's package must neither delete sound shards as a repair, nor leave a store that it
    cannot write."""
    encoding = Encoding("lossless", "bfloat16", HIDDEN)
    write(tmp_path / "store", range(10), encoding)
    monkeypatch.setitem(sys.modules, "blosc2", None)
    for attempt in (check, lambda path, *rest: open_store(path, encoding)):
        with pytest.raises(UserError, match="'lossless' needs the package blosc2") as caught:
            attempt(tmp_path / "store", range(10), encoding)
        assert not isinstance(caught.value, DamagedStore)
    with pytest.raises(UserError, match="needs the package blosc2"):
        write(tmp_path / "new", range(10), encoding)
    assert not (tmp_path / "new").exists()
    monkeypatch.undo()
    assert_holds(tmp_path / "store", range(10), encoding)


def test_a_store_without_shards_may_become_another_one_unless_its_writer_lives(tmp_path):
    """After `the disk cannot hold it; set hidden_states.codec to fp8`, the same folder can be used."""
    fp8 = Encoding("fp8", "float32", HIDDEN)
    refusal = pytest.raises(UserError, match="captured with codec='none', this run has 'fp8'")
    with StoreWriter(tmp_path, PROVENANCE, PLAIN, part=CapturePart(0, 2)), refusal:
        StoreWriter(tmp_path, PROVENANCE, fp8, part=CapturePart(1, 2))
    write(tmp_path, [1], fp8)
    with pytest.raises(UserError, match="captured with codec='fp8', this run has 'none'"):
        write(tmp_path, [1])
    assert list(open_store(tmp_path, fp8).locations) == [sample_id(1)]


def test_renamed_shards_are_read_and_files_of_others_left_alone(tmp_path):
    write(tmp_path, range(20))
    for path in sorted(tmp_path.glob("shard-*"))[:2]:
        path.rename(tmp_path / f"shard-00000000-{path.stem[-5:]}{path.suffix}")
    foreign = ("shard-notes.safetensors", "shard-notes.json", "shard-notes.safetensors.partial", "notes.txt")
    for name in foreign:
        (tmp_path / name).write_text("mine")
    write(tmp_path, range(20))
    findings = check(tmp_path, range(20))
    assert findings.problems == [] and findings.samples == 20
    assert all((tmp_path / name).read_text() == "mine" for name in foreign)


def in_parts(rows: Rows, size: int = 4) -> Iterator[Rows]:
    for part in range(0, len(rows.aux), size):
        yield rows[part : part + size]


def write_in_parts(path: Path, numbers, encoding: Encoding = PLAIN) -> None:
    with StoreWriter(path, PROVENANCE, encoding, shard_tokens=100) as writer:
        for number in numbers:
            *tokens, rows = sample(number)
            writer.add(*tokens, in_parts(rows))


@pytest.mark.parametrize("encoding", [PLAIN, Encoding("none", "float32", HIDDEN, reach=Reach(2, 4))])
def test_an_error_keeps_every_whole_sample_and_drops_the_one_that_was_half_there(tmp_path, encoding):
    def broken() -> Iterator[Rows]:
        yield from itertools.islice(in_parts(sample(15, 30)[3]), 3)
        raise UserError("no server is left")

    with (
        pytest.raises(UserError, match="no server is left"),
        StoreWriter(tmp_path, PROVENANCE, encoding, shard_tokens=1000) as writer,
    ):
        for number in range(15):
            writer.add(*sample(number))
        writer.add(*sample(15, 30)[:3], broken())
    assert not list(tmp_path.glob("*.partial")) and len(list(tmp_path.glob("*.safetensors"))) == 1
    for numbers in (range(15), range(20)):
        findings = check(tmp_path, numbers, encoding)
        assert findings.problems == [] and findings.samples == len(numbers)
        write(tmp_path, range(20), encoding)


def test_if_the_whole_samples_cannot_be_kept_the_first_error_is_still_the_one_that_is_reported(tmp_path):
    def limited() -> None:
        with (
            pytest.raises(UserError, match="no server is left"),
            StoreWriter(tmp_path, PROVENANCE, PLAIN, shard_tokens=1000) as writer,
        ):
            for number in range(8):
                writer.add(*sample(number))
            resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))  # as if the disk were full
            raise UserError("no server is left")
        assert not list(tmp_path.glob("shard-*"))

    assert run(limited) == 0
    assert_continues(tmp_path, range(8))


class Signalled(BaseException):
    """What a handler raises when a signal arrives."""


def signalled_at(instruction: int, functions: str) -> None:
    """Raise Signalled before the `instruction`-th instruction that this thread executes in these functions of
    writer.py."""
    seen = 0

    def watch(frame, event, _):
        nonlocal seen
        code = frame.f_code
        if not (code.co_filename.endswith("store/writer.py") and code.co_qualname.startswith(functions)):
            return None
        frame.f_trace_opcodes = True
        seen += event == "opcode"
        if seen == instruction:
            raise Signalled
        return watch

    sys.settrace(watch)


@pytest.mark.parametrize(("functions", "stride"), [("", 509), ("Blob.write", 17), ("Blob._encode", 41)])
def test_a_signal_at_any_instruction_leaves_a_store_of_whole_samples_that_continues(
    tmp_path, monkeypatch, functions, stride
):
    """At most 6,000 bytes wait to be written, so that signals also arrive while chunks of whole samples are written."""
    monkeypatch.setattr("eagle3.states.store.writer.MOST_IN_WORK", 6000)
    stored, instruction = [], 1
    while True:
        path = tmp_path / str(instruction)
        try:
            signalled_at(instruction, functions)
            write_in_parts(path, range(8))
            break
        except Signalled:
            instruction += stride
        finally:
            sys.settrace(None)
        if not list(path.glob("*.safetensors")):
            continue
        stored.append(len(open_store(path).locations))
        assert_holds(path, range(stored[-1]))
        if len(stored) % 5 == 0:
            assert_continues(path, range(8))
    assert len(stored) > 20 and set(stored) >= set(range(1, 5)), stored
