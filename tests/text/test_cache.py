"""What the tokenised cache survives: damage, full and read-only disks, killed and simultaneous writers."""

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from limits import HANG_SECONDS
from prepare_cases import OPTIONS, byte_tokenizer, packed, prepare, prepared, write_set

from eagle3.console import Warned
from eagle3.errors import UserError
from eagle3.states.store.shard import taught_rows
from eagle3.text.cache import LOCK, RECORD, replacing_folder
from eagle3.text.datasets import dataset_named, downloaded_rows
from eagle3.text.samples import SampleSet

FORK = multiprocessing.get_context("fork")
FILES = ["ids", "loss_mask", "ends", "digests", "summary.json", "record.json"]
ANSWERS = ("one", "two three", "four")


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


def contents(samples: SampleSet) -> list[tuple]:
    return [(sample.id, sample.ids.tolist(), sample.loss_mask.tolist()) for sample in samples]


def cached(tmp_path: Path, name: str = "") -> Path:
    """The one cached set, or a file of it."""
    [folder] = (tmp_path / "cache" / "tokenized").iterdir()
    return folder / name


def flip(path: Path, place: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    with path.open("r+b") as file:  # keeps the file, for processes that have it open
        file.write(content)


def download(cache: Path) -> None:
    list(downloaded_rows(dataset_named("owner/name"), None, cache / "downloads", print, lambda origin, row: row))


def run(work: Callable[..., None], *arguments: object) -> int:
    """Runs the work in a separate process, which may be killed. Returns the exit code."""
    process = FORK.Process(target=work, args=arguments)
    process.start()
    process.join(HANG_SECONDS)
    return process.exitcode


def exchange(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


# Each damages a set, the first folder; the second is another set's.
DAMAGES = {
    "renamed": lambda own, other: (own.rename(own.with_name("away")), other.rename(own)),
    "exchanged": exchange,
    "a link": lambda own, other: (own.rename(own.with_name("away")), own.symlink_to(other)),
    "a link to nothing": lambda own, other: (own.rename(own.with_name("away")), own.symlink_to("nothing")),
    "another's record": lambda own, other: shutil.copy(other / RECORD, own / RECORD),
}
for file in FILES:
    DAMAGES |= {
        f"no {file}": lambda own, other, file=file: (own / file).unlink(),
        f"empty {file}": lambda own, other, file=file: (own / file).write_bytes(b""),
        f"short {file}": lambda own, other, file=file: os.truncate(own / file, (own / file).stat().st_size - 3),
        **{
            f"a bit of {file} at {place}": lambda own, other, file=file, place=place: flip(own / file, place, 2)
            for place in (0, 7, -1)
        },
    }


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_set_that_is_damaged_or_anothers_is_built_anew_with_a_line(tmp_path, tokenizer, damage):
    expected = contents(prepared(tmp_path, tokenizer, *ANSWERS).samples)
    own = cached(tmp_path)
    prepared(tmp_path, tokenizer, "five", "six", "seven")
    [other] = {*own.parent.iterdir()} - {own}
    DAMAGES[damage](own, other)
    lines: list[str] = []
    samples, summary = prepared(tmp_path, tokenizer, *ANSWERS, report=lines.append)
    assert contents(samples) == expected and not summary.cached
    [warning] = [line for line in lines if isinstance(line, Warned)]
    assert "damaged" in warning and warning.endswith("making it again")
    assert own.is_dir() and not own.is_symlink() and prepared(tmp_path, tokenizer, *ANSWERS).summary.cached
    assert {path.name for path in own.parent.iterdir()} <= {own.name, other.name, "away"}  # nothing temporary is left


def test_a_written_set_opens_as_it_was_and_a_damaged_one_is_refused(tmp_path):
    samples = packed(20).subset([3, 4, 5, 19, 0, 0])
    for folder, some in (("set", samples), ("set", samples), ("none", samples.subset([]))):  # a set replaces the first
        with replacing_folder(tmp_path / folder) as unfinished:
            write_set(some, unfinished)
    opened = SampleSet.open(tmp_path / "set")
    assert (opened.checksum, contents(opened)) == (samples.checksum, contents(samples))
    assert opened.count(taught_rows).tolist() == samples.count(taught_rows).tolist()
    ids = np.concatenate([chunk for chunk, _ in samples.token_chunks()])
    assert ids.tolist() == torch.cat([samples[index].ids for index in range(6)]).tolist()
    none = SampleSet.open(tmp_path / "none")
    assert len(none) == len(none.count(taught_rows)) == len(list(none.token_chunks())) == 0
    (tmp_path / "set" / "ids").write_bytes(bytes(12))
    with pytest.raises(UserError, match="its files do not fit together"):
        SampleSet.open(tmp_path / "set")


@pytest.mark.parametrize("whole", [True, False])
def test_a_folder_that_another_process_put_there_meanwhile_stays_if_it_is_whole(tmp_path, whole):
    """Another process may be reading it: nodes that share a cache make the same set at the same time."""
    folder = tmp_path / "set"
    with replacing_folder(folder) as mine:
        (mine / "mine").touch()
        with replacing_folder(folder) as theirs:
            (theirs / "theirs").touch()
        if not whole:
            (folder / RECORD).unlink()
    assert {path.name for path in folder.iterdir()} == {RECORD, "theirs" if whole else "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_damage_after_the_opening_is_refused_by_whoever_reads_it(tmp_path, tokenizer):
    samples = prepared(tmp_path, tokenizer, *ANSWERS).samples
    expected, lengths, ids = contents(samples), samples.lengths.tolist(), samples.sample_ids
    for name in ("ends", "digests"):  # which an open set has read
        cached(tmp_path, name).write_bytes(b"")
    flip(cached(tmp_path, "loss_mask"), lengths[0] + 3, 0)
    assert contents(samples.subset([0, 2])) == [expected[0], expected[2]]
    assert (samples.lengths.tolist(), samples.sample_ids) == (lengths, ids)
    refusal = r"tokenized/\w+: sample 2 of 3 does not fit its digest; start again \(train.py: with --resume\), and"
    for read in (lambda: samples[1], lambda: samples.count(taught_rows), lambda: list(samples.token_chunks())):
        with pytest.raises(UserError, match=refusal):
            read()
    with cached(tmp_path, "ids").open("r+b") as file:
        file.truncate(72)
    with pytest.raises(UserError, match="ids: has lost its end; start again"):
        samples[2]
    built, summary = prepared(tmp_path, tokenizer, *ANSWERS)
    assert contents(built) == expected and not summary.cached


def test_a_set_that_is_open_stays_readable_while_another_takes_its_place(tmp_path, tokenizer):
    reader = prepared(tmp_path, tokenizer, *ANSWERS).samples
    expected = contents(reader)
    cached(tmp_path, "summary.json").write_text("")
    assert not prepared(tmp_path, tokenizer, *ANSWERS).summary.cached
    assert contents(reader) == expected


def test_processes_that_find_the_same_damage_at_the_same_time_all_get_the_right_samples(tmp_path, tokenizer):
    expected = contents(prepared(tmp_path, tokenizer, *ANSWERS).samples)
    flip(cached(tmp_path, "ids"), 12, 0)

    def again() -> None:
        sources = [str(tmp_path / "data.jsonl")]
        assert contents(prepare(sources, tokenizer, cache_dir=tmp_path / "cache", **OPTIONS).samples) == expected

    ranks = [FORK.Process(target=again) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(HANG_SECONDS)
    assert [rank.exitcode for rank in ranks] == 4 * [0]
    assert prepared(tmp_path, tokenizer, *ANSWERS).summary.cached


def test_a_folder_that_is_being_removed_is_not_taken_for_an_unfinished_one(tmp_path, monkeypatch):
    folder = tmp_path / "set"
    remove, written = shutil.rmtree, []

    def remove_slowly(going: Path, **options) -> None:
        monkeypatch.setattr(shutil, "rmtree", remove)
        (going / LOCK).unlink()  # from here on, nothing says that its owner lives
        with pytest.raises(KeyboardInterrupt), replacing_folder(folder, resumable=True) as theirs:
            written.append(theirs / "theirs")
            written[0].touch()
            raise KeyboardInterrupt
        remove(going, **options)

    monkeypatch.setattr(shutil, "rmtree", remove_slowly)
    with replacing_folder(folder, resumable=True):
        pass
    assert written[0].exists()


@pytest.mark.parametrize("kilobytes", [4, 8, 12, 60, 96, 108])
def test_a_full_disk_is_one_line_that_leaves_nothing_and_with_room_the_set_is_made(
    tmp_path, tokenizer, small_disk, kilobytes
):
    """The disks are real, and become full before or after each of the files."""
    answers = [f"{number:03d} " * 250 for number in range(20)]  # 80 KB of ids, 20 of masks
    remount(small_disk, f"size={kilobytes}k")
    (tmp_path / "cache").symlink_to(small_disk)

    def fill() -> None:
        with pytest.raises(UserError) as caught:
            prepared(tmp_path, tokenizer, *answers, max_length=2000)
        reason = r"\(No space left on device; \d\S* \w+ are free\); free space, or set data.cache_dir"
        assert re.match(rf"{tmp_path}/cache.*{reason}", str(caught.value))
        assert not [path for path in small_disk.rglob("*") if path.is_file()]

    def succeed() -> None:
        assert len(prepared(tmp_path, tokenizer, *answers, max_length=2000).samples) == 20

    assert run(fill) == 0
    remount(small_disk, "size=10m")
    assert run(succeed) == 0


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, tokenizer):
    (tmp_path / "cache").write_text("a file is in the way")
    message = rf"^{tmp_path}/cache/\w+: cannot be written \(.+\); make it writable for this user, or set data.cache"
    with pytest.raises(UserError, match=message):
        prepared(tmp_path, tokenizer, *ANSWERS)
    with pytest.raises(UserError, match=message):
        download(tmp_path / "cache")


def test_a_read_only_cache_serves_what_it_holds_and_for_the_rest_is_one_line(tmp_path, tokenizer, small_disk):
    (tmp_path / "cache").symlink_to(small_disk)
    prepared(tmp_path, tokenizer, *ANSWERS)
    remount(small_disk, "ro")
    message = r"^\S+/tokenized: cannot be written \(Read-only file system\); make it writable for this user, or set "
    assert prepared(tmp_path, tokenizer, *ANSWERS).summary.cached
    with pytest.raises(UserError, match=message):
        prepared(tmp_path, tokenizer, "other")
    with pytest.raises(UserError, match=message.replace("tokenized", "cache/downloads")):
        download(tmp_path / "cache")


def die_in(folder: Path) -> None:
    with replacing_folder(folder) as unfinished:
        (unfinished / "ids").write_bytes(b"half")
        kill()


def test_what_killed_writers_left_is_removed_after_a_day_and_what_is_being_written_is_not(tmp_path):
    names = [f"{number:032x}" for number in range(3)]
    leftovers = [tmp_path / f".{name}.another_host.unfinished" for name in (names[0], "owner-name-0123456789abcdef")]
    theirs = tmp_path / ".config.another_host.unfinished"
    for folder in (*leftovers, theirs):
        (folder / "new").mkdir(parents=True)
    assert run(die_in, tmp_path / names[0]) == -signal.SIGKILL
    (killed,) = {*tmp_path.iterdir()} - {*leftovers, theirs}
    with replacing_folder(tmp_path / names[1]) as alive:
        for hours, remaining in ((23, {killed, *leftovers, theirs}), (25, {theirs})):
            for path in tmp_path.rglob("*"):
                os.utime(path, 2 * (time.time() - 3600 * hours,))
            with replacing_folder(tmp_path / names[2]):
                assert alive.exists() and {path for path in (killed, *leftovers, theirs) if path.exists()} == remaining
    assert sorted(path.name for path in tmp_path.iterdir()) == [theirs.name, *names[1:]]


MANY = [f"answer {number}" for number in range(300)]  # more chunks than one


def tokenised_until(done: int, tmp_path: Path, tokenizer, end: Callable[[], None]) -> None:
    """Prepares MANY, and calls `end` once so many conversations are tokenised and on disk."""

    def report(line: str) -> None:
        if line.startswith(f"tokenising: {done}/"):
            end()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle3.console.QUIET_SECONDS", 0.0)
        patch.setattr("eagle3.console._gap", lambda seconds: 0.0)
        patch.setattr("eagle3.text.prepare.SAVE_SECONDS", 0.0)
        prepared(tmp_path, tokenizer, *MANY, report=report)


def interrupt() -> None:
    raise KeyboardInterrupt


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_a_worker() -> None:
    raise UserError("data.workers=2: a tokenising process died")


@pytest.mark.parametrize("end", [interrupt, lose_a_worker, kill])
def test_what_an_ended_process_has_tokenised_is_not_tokenised_again_and_the_set_is_the_same(tmp_path, tokenizer, end):
    expected = contents(prepared(tmp_path / "..", tokenizer, *MANY).samples)
    if end is kill:
        assert run(tokenised_until, 192, tmp_path, tokenizer, kill) == -signal.SIGKILL
    else:
        with pytest.raises((KeyboardInterrupt, UserError)):
            tokenised_until(192, tmp_path, tokenizer, end)
    lines: list[str] = []
    samples, summary = prepared(tmp_path, tokenizer, *MANY, report=lines.append)
    assert contents(samples) == expected and (summary.rows, summary.kept, summary.cached) == (300, 300, False)
    assert lines == ["going on after 192 conversations that an earlier run has tokenised"]
    assert [path.name for path in cached(tmp_path).parent.iterdir()] == [cached(tmp_path).name]
    for name in FILES:
        whole = next((tmp_path / ".." / "cache" / "tokenized").glob(f"*/{name}"))
        assert cached(tmp_path, name).read_bytes() == whole.read_bytes()


def test_an_unfinished_set_of_a_living_process_is_left_to_it(tmp_path, tokenizer):
    lines: list[str] = []

    def meanwhile() -> None:
        assert run(lambda: prepared(tmp_path, tokenizer, *MANY)) == 0

    tokenised_until(192, tmp_path, tokenizer, meanwhile)
    summary = prepared(tmp_path, tokenizer, *MANY, report=lines.append).summary
    assert (summary.kept, summary.cached, lines) == (300, True, [])


def test_a_finished_set_leaves_nothing_unfinished_and_another_hosts_is_let_alone(tmp_path, tokenizer, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        tokenised_until(192, tmp_path, tokenizer, interrupt)
    (unfinished,) = (tmp_path / "cache" / "tokenized").iterdir()
    monkeypatch.setattr("socket.gethostname", lambda: "another.host")
    lines: list[str] = []
    assert len(prepared(tmp_path, tokenizer, *MANY, report=lines.append).samples) == 300
    assert lines == [] and unfinished.exists()
    monkeypatch.undo()
    assert prepared(tmp_path, tokenizer, *MANY).summary.cached and not unfinished.exists()


@pytest.mark.parametrize("file", ["progress.json", "ids"])
def test_what_an_ended_process_has_left_damaged_is_made_again(tmp_path, tokenizer, file):
    with pytest.raises(KeyboardInterrupt):
        tokenised_until(192, tmp_path, tokenizer, interrupt)
    (left,) = (tmp_path / "cache" / "tokenized").glob(f"*.unfinished/**/{file}")
    flip(left, left.stat().st_size // 2, 0)
    lines: list[str] = []
    assert len(prepared(tmp_path, tokenizer, *MANY, report=lines.append).samples) == 300
    assert [line for line in lines if "going on" in line] == []
    assert "an earlier run has tokenised is damaged" in "".join(lines)
