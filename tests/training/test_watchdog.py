"""In a job of three ranks, a rank that dies, hangs or leaves is named, and all ranks end soon."""

import re
from typing import NamedTuple

import pytest
from tiny_run import run_script

DIED = r"rank %d \(process \d+ on %s.+\) has ended, at step 0, stream 1 of 2"
SILENT = r"rank %d \(process \d+ on .+\) was not heard from for \d+ s, last at %s"
HANGS = (
    r"no progress for \d+ s: rank 1 \(process \d+ on .+\) did not arrive: outside of this package, at .+"
    r"rank 0 waits in all_reduce, outside of this package, at step 0, stream 1 of 2"
)
FORMING = "launcher: this process cannot meet .*"
# What the others say of it, how many say it, the rank that is to blame, and whether it is still there at the end; of a
# job without one, the ranks' exit code. "killed unread": nobody reads the ranks' output, a full pipe.
BLAMED = {
    "killed": (DIED % (1, ""), 1, 1, False),
    "killed elsewhere": (DIED % (1, "n1@"), 1, 1, False),
    "killed unread": ("", 0, 1, False),
    "own mistake": (DIED % (1, ""), 1, 1, False),
    "never comes": (FORMING, None, 1, False),
    "dies while the job forms": (FORMING, None, 1, False),
    "dies before the watchdog": (FORMING, None, 1, False),
    "first killed": (DIED % (0, ""), 1, 0, False),
    "first killed elsewhere": (DIED % (0, "n0@"), 2, 0, False),
    "first works and dies": (DIED % (0, ""), 1, 0, False),
    "stopped": (SILENT % (1, "step 0, stream 1 of 2"), 1, 1, True),
    "asleep": (SILENT % (1, "starting"), 1, 1, True),
    "first stopped": (SILENT % (0, "step 0, stream 1 of 2"), 1, 0, True),
    "hangs": (HANGS, 1, 1, False),
}
NOBODY = {"sound": 0, "works for long": 0, "first works": 0, "shared mistake": 1}


class Ended(NamedTuple):
    """The watchdogs' verdicts, the exit codes, and the ranks that should have ended long before."""

    verdicts: list[str]
    codes: list[int]
    late: str


@pytest.fixture(scope="module")
def endings():
    """How each case ended, by case."""
    output = run_script("tests/support/watchdog_worker.py", *BLAMED, *NOBODY)
    by_case = {}
    for case in (*BLAMED, *NOBODY):
        *verdicts, ended = re.findall(rf"^{case}: (.*)", output, re.MULTILINE)
        codes, late = re.fullmatch(r"ended with \[(.*)\], late (\[.*\])", ended).groups()
        by_case[case] = Ended(verdicts, [int(code) for code in codes.split(",")], late)
    return by_case


@pytest.mark.parametrize("case", BLAMED)
def test_a_rank_that_dies_hangs_or_falls_silent_is_named_with_its_place_and_the_others_end(endings, case):
    (verdicts, codes, late), (named, times, rank, still) = endings[case], BLAMED[case]
    assert all(re.fullmatch(named, verdict) for verdict in verdicts), verdicts
    assert len(verdicts) == times if times is not None else verdicts
    assert late == (f"[{rank}]" if still else "[]")
    assert all(code == 1 for other, code in enumerate(codes) if other != rank or case == "hangs"), codes


@pytest.mark.parametrize("case", NOBODY)
def test_a_sound_job_or_a_mistake_that_all_ranks_make_is_nobodys_death_however_long_it_takes(endings, case):
    """Others wait for a rank longer than a collective would."""
    assert not endings[case].verdicts and endings[case].codes == [NOBODY[case]] * 3
