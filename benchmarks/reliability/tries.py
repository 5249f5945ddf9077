"""One try of an attack, and the rule that gives it exactly one outcome.

The outcome follows from exit codes, from whether the output is a traceback or a heap of errors, and from a comparison
with what an undisturbed run gives, never from the wording of a message. Messages are kept to be read by people.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from launching import Ended

GOOD = ("right", "rebuilt", "continued", "refused")
BAD = ("silently wrong", "traceback", "hang", "lost", "broken promise")
MEANING = {
    "right": "exit code 0, and the result is that of the undisturbed run, bit for bit",
    "rebuilt": "the same, and a warning said that something was found and made anew",
    "continued": "the same, after a stop, by repeating the command (train.py with --resume auto)",
    "refused": "exit code not 0 after a few lines at most; nothing that was whole before is changed or gone",
    "silently wrong": "exit code 0, and another result",
    "traceback": "a Python traceback, a heap of error lines, or death by a signal such as SIGBUS",
    "hang": "not over within the time limit of the try",
    "lost": "something that was whole before is gone, or repeating the command does not come to the right result",
    "broken promise": "planted code ran, a secret was shown, more memory than stated, or a message without its step",
}
CRASH = re.compile(
    r"Traceback \(most recent call last\)|^Fatal Python error|terminate called after|^Exception in thread|core dumped",
    re.MULTILINE,
)
# On stderr, of each process that does not end well: the line, and what libraries warn of.
MOST_LINES = 8
# PyTorch's own log, in C++, of a connection whose other end was killed: no launcher can keep it quiet.
TORCH_LOG = re.compile(r"\[rank\d+\]:\[[WE]|frame #|Exception raised from|<omitting python frames>")


class NotHere(Exception):
    """What an attack needs is not to be had on this machine."""


class Verdict(NamedTuple):
    outcome: str
    detail: str = ""


class Case(NamedTuple):
    """name: unique within its attack, and the same for the same seed."""

    name: str
    run: Callable[[], Verdict]


Finding = Callable[[], str | None]


def nothing() -> None:
    """A finding: nothing to report."""
    return None


def judge(ended: Ended, difference: Finding = nothing, loss: Finding = nothing, *, good: str = "right") -> Verdict:
    """difference: how the result differs from the undisturbed one, None where it does not; asked where all went well.
    loss: what is no longer as it was, None for nothing; asked where the command was refused. good: the outcome where
    nothing differs."""
    crash = crashed(ended)
    if crash:
        return crash
    if ended.well:
        fault = difference()
        return Verdict("silently wrong", f"{fault}; {last_words(ended)}") if fault else Verdict(good, last_words(ended))
    gone = loss()
    return Verdict("lost", f"{gone}; {last_words(ended)}") if gone else Verdict("refused", last_words(ended))


def crashed(ended: Ended, killed: bool = False) -> Verdict | None:
    """Hang or traceback, if it is one. killed: SIGKILL was the try's own."""
    if ended.late:
        return Verdict("hang", f"still running after {ended.seconds:.0f} s; {last_words(ended)}")
    signals = [-code for code in ended.codes if code < 0 and not (killed and code == -9)]
    if signals:
        return Verdict("traceback", f"ended by signal {signals[0]}; {last_words(ended)}")
    if CRASH.search(ended.output):
        return Verdict("traceback", last_words(ended))
    lines = [line for line in ended.err.splitlines() if line.strip() and not TORCH_LOG.match(line)]
    if not ended.well and len(lines) > MOST_LINES * len(ended.codes):
        return Verdict("traceback", f"{len(lines)} lines of errors; {last_words(ended)}")
    return None


def warned(ended: Ended) -> int:
    """Lines on stderr, where warnings go."""
    return sum(bool(line.strip()) for line in ended.err.splitlines())


def last_words(ended: Ended) -> str:
    """For people."""
    lines = [line.strip() for line in (ended.err if ended.err.strip() else ended.out).splitlines() if line.strip()]
    return (lines or ["(nothing said)"])[-1][:300]
