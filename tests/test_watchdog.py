"""Whoever dies, hangs or leaves a job of three ranks is named, and all of them end soon."""

import re
import sys

import pytest
from tiny_run import finish, launch

FIRST_WORKS = ("first works", "first works and dies")
CASES = ("sound", "killed", "first killed", "stopped", "hangs", "own mistake", "shared mistake", *FIRST_WORKS)


@pytest.fixture(scope="module")
def said():
    """By case: the watchdogs' verdicts, the exit codes, and who was still there after a minute."""
    output = finish(launch(sys.executable, "tests/watchdog_worker.py", *CASES))
    found = {}
    for case in CASES:
        lines = [line.removeprefix(f"{case}: ") for line in output.splitlines() if line.startswith(f"{case}: ")]
        *verdicts, ended = lines
        codes, late = re.fullmatch(r"ended with \[(.*)\], late (\[.*\])", ended).groups()
        found[case] = verdicts, [int(code) for code in codes.split(",")], late
    return found


def test_a_sound_job_ends_well_however_long_it_takes(said):
    verdicts, codes, _ = said["sound"]
    assert not verdicts and codes == [0, 0, 0]


@pytest.mark.parametrize(("case", "culprit"), [("killed", 1), ("own mistake", 1)])
def test_a_rank_that_died_is_named_with_the_step_it_was_at(said, case, culprit):
    verdicts, codes, late = said[case]
    (verdict,) = verdicts
    assert re.fullmatch(rf"rank {culprit} \(process \d+ on .+\) has ended, at step 0, stream 1 of 2", verdict)
    assert late == "[]" and codes[0] == codes[2] == 1


def test_the_others_wait_for_the_first_longer_than_a_collective_would(said):
    verdicts, codes, _ = said["first works"]
    assert not verdicts and codes == [0, 0, 0]


@pytest.mark.parametrize("case", ["first killed", "first works and dies"])
def test_the_first_ranks_death_is_told_by_another(said, case):
    verdicts, codes, late = said[case]
    assert verdicts and all(verdict.startswith("rank 0 ") and "has ended" in verdict for verdict in verdicts)
    assert late == "[]" and codes[1] == codes[2] == 1


def test_a_node_that_falls_silent_is_named(said):
    verdicts, codes, late = said["stopped"]
    (verdict,) = verdicts
    assert re.fullmatch(
        r"rank 1 \(process \d+ on .+\) was not heard of for \d+ s, last at step 0, stream 1 of 2", verdict
    )
    assert late == "[1]" and codes[0] == codes[2] == 1


def test_a_rank_that_hangs_is_named_with_its_place_and_the_collective_that_others_wait_in(said):
    verdicts, codes, late = said["hangs"]
    (verdict,) = verdicts
    assert re.match(
        r"no progress for \d+ s: rank 1 \(process \d+ on .+\) did not arrive: outside of this package, at", verdict
    )
    assert verdict.endswith("rank 0 waits in all_reduce, outside of this package, at step 0, stream 1 of 2")
    assert late == "[]" and codes == [1, 1, 1]


def test_a_mistake_that_all_ranks_make_is_nobodys_death(said):
    verdicts, codes, _ = said["shared mistake"]
    assert not verdicts and codes == [1, 1, 1]
