"""In a job of three ranks, a rank that dies, hangs or leaves is named, and all ranks end soon."""

import re
from typing import NamedTuple

import pytest
from tiny_run import run_script

FORMING = ("never comes", "dies while the job forms", "dies before the watchdog")
CASES = (
    *("sound", "works for long", "first works", "shared mistake", "own mistake", "hangs"),
    *("killed unread", "killed", "killed elsewhere", "stopped", "asleep"),
    *("first killed", "first killed elsewhere", "first stopped", "first works and dies"),
    *FORMING,
)


class Ended(NamedTuple):
    """The watchdogs' verdicts, the exit codes, the ranks that should have ended long before, and the ranks' own
    errors."""

    verdicts: list[str]
    codes: list[int]
    late: str
    errors: list[str]

    @property
    def verdict(self) -> str:
        """The only verdict."""
        assert len(self.verdicts) == 1, self
        return self.verdicts[0]


@pytest.fixture(scope="module")
def endings():
    """How each case ended, by case."""
    output = run_script("tests/support/watchdog_worker.py", *CASES)
    by_case = {}
    for case in CASES:
        lines = [line.removeprefix(f"{case}: ") for line in output.splitlines() if line.startswith(f"{case}: ")]
        *verdicts, ended = lines
        codes, late = re.fullmatch(r"ended with \[(.*)\], late (\[.*\])", ended).groups()
        errors = [line for line in output.splitlines() if f" of {case}: " in line]
        by_case[case] = Ended(verdicts, [int(code) for code in codes.split(",")], late, errors)
    return by_case


def test_a_sound_job_ends_well_however_long_it_takes(endings):
    verdicts, codes, _, _ = endings["sound"]
    assert not verdicts and codes == [0, 0, 0]


@pytest.mark.parametrize("case", ["killed", "killed elsewhere", "own mistake"])
def test_a_rank_that_died_is_named_with_the_step_it_was_at(endings, case):
    verdict, (_, codes, late, _) = endings[case].verdict, endings[case]
    node = "n1@.+" if case == "killed elsewhere" else ".+"
    assert re.fullmatch(rf"rank 1 \(process \d+ on {node}\) has ended, at step 0, stream 1 of 2", verdict)
    assert late == "[]" and codes[0] == codes[2] == 1


def test_a_rank_ends_although_its_output_is_a_full_pipe_that_nobody_reads(endings):
    verdicts, codes, late, _ = endings["killed unread"]
    assert not verdicts and late == "[]" and codes[0] == codes[2] == 1


@pytest.mark.parametrize("case", ["first works", "works for long"])
def test_the_others_wait_for_a_rank_longer_than_a_collective_would(endings, case):
    verdicts, codes, _, _ = endings[case]
    assert not verdicts and codes == [0, 0, 0]


@pytest.mark.parametrize("case", FORMING)
def test_a_rank_that_dies_before_there_is_a_watchdog_leaves_nobody_waiting(endings, case):
    mistakes, codes, late, _ = endings[case]
    assert mistakes and all(mistake.startswith("launcher: this process cannot meet") for mistake in mistakes)
    assert late == "[]" and codes[0] == codes[2] == 1


@pytest.mark.parametrize(
    ("case", "reports"), [("first killed", 1), ("first killed elsewhere", 2), ("first works and dies", 1)]
)
def test_the_first_ranks_death_is_reported_by_others_with_the_step_that_it_was_at(endings, case, reports):
    verdicts, codes, late, _ = endings[case]
    node = "n0@.+" if case == "first killed elsewhere" else ".+"
    named = rf"rank 0 \(process \d+ on {node}\) has ended, at step 0, stream 1 of 2"
    assert len(verdicts) == reports and all(re.fullmatch(named, verdict) for verdict in verdicts)
    assert late == "[]" and codes[1] == codes[2] == 1


@pytest.mark.parametrize(
    ("case", "place", "still"),
    [
        ("stopped", "step 0, stream 1 of 2", 1),
        ("asleep", "starting", 1),
        ("first stopped", "step 0, stream 1 of 2", 0),
    ],
)
def test_a_rank_that_falls_silent_is_named(endings, case, place, still):
    verdict, (_, codes, late, _) = endings[case].verdict, endings[case]
    assert re.fullmatch(rf"rank {still} \(process \d+ on .+\) was not heard from for \d+ s, last at {place}", verdict)
    assert late == f"[{still}]" and codes[1 - still] == codes[2] == 1


def test_a_rank_that_hangs_is_named_with_its_place_and_the_collective_that_others_wait_in(endings):
    verdict, (_, codes, late, _) = endings["hangs"].verdict, endings["hangs"]
    assert re.match(
        r"no progress for \d+ s: rank 1 \(process \d+ on .+\) did not arrive: outside of this package, at", verdict
    )
    assert verdict.endswith("rank 0 waits in all_reduce, outside of this package, at step 0, stream 1 of 2")
    assert late == "[]" and codes == [1, 1, 1]


def test_a_mistake_that_all_ranks_make_is_nobodys_death(endings):
    verdicts, codes, _, _ = endings["shared mistake"]
    assert not verdicts and codes == [1, 1, 1]
