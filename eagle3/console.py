"""Terminal and log output: lines, progress with rate and time left, colours if they are supported."""

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TextIO

Say = Callable[[str], None]
WARNING = "warning: "
RED, GREEN, YELLOW, PLAIN = "\033[31m", "\033[32m", "\033[33m", "\033[0m"
MARKS = "⟦⟧"  # around marked text if there are no colours
QUIET_SECONDS = 2.0  # a step that takes less time reports no progress
# Seconds between progress lines of a step: 5 at first, then more. 10 minutes give 60 lines, a day gives 3,000.
FIRST_GAP, LAST_GAP, GAPS = 5.0, 30.0, 20
USERINFO = re.compile(r"(?<=://)[^\s/?#'\"]+@")  # user name and password, or a token, in a URL
WORD = re.compile(r"\S+")
QUERY, LINK_QUERY = re.compile("[?#]"), re.compile(r"\?[^?#&=]+=")
PARAMETER = re.compile(r"(?P<lead>[?#&;](?:[\w.\-\[\]]+=(?==*[^=&#;]))?)[^&#;]+")
CLOSING = ".,:;!?)]}>'\"`"  # these usually end a sentence or a quotation, not a query


class Warned(str):
    """A line that is a warning, for code whose only output is a function that takes lines. str() puts `warning: ` in
    front."""

    def __str__(self) -> str:
        return WARNING + self


class Console:
    """Prints on the first rank only. Call it with information and progress, and call `result` with what the user asked
    for.

    quiet: print no information. Warnings (`Warned` lines) and errors still appear, and so do results, without the
        leading time.
    """

    def __init__(self, speaks: bool, quiet: bool = False) -> None:
        self.speaks, self.quiet, self.start = speaks, quiet, time.monotonic()

    def __call__(self, line: str) -> None:
        if isinstance(line, Warned):
            self.warn(line)
        elif not self.quiet:
            self.result(line)

    def result(self, line: str) -> None:
        if self.speaks:
            tell(line, lead="" if self.quiet else f"[{duration(time.monotonic() - self.start):>7s}] ")

    def warn(self, line: str) -> None:
        if self.speaks:
            tell(line, lead=WARNING, colour=YELLOW, stream=sys.stderr)


class Progress:
    """Reports the progress of a step: nothing in its first seconds, then a line now and then. The end gets a line only
    if there was one before.

    total: number of items; None if unknown.
    unit: name of the items, in the plural.
    """

    def __init__(
        self, say: Say, task: str, total: int | None, unit: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.say, self.task, self.total, self.unit, self.clock = say, task, total, unit, clock
        self.done, self.free, self.start, self.spoke = 0, 0, clock(), False
        self.next = self.start + QUIET_SECONDS

    def advance(self, count: int = 1) -> None:
        """Counts `count` more items as done."""
        self.at(self.done + count, free=self.free)

    def at(self, done: int, *, free: int = 0, extra: str = "") -> None:
        """Sets the number of items done so far. free: how many of them took no time, because an earlier run did them;
        the rate leaves these out. extra: further numbers for the line."""
        self.done, self.free, now = done, free, self.clock()
        if done == self.total:
            self.end(extra)
        elif now >= self.next:
            self._tell(now, extra)

    def also_between(self) -> AbstractContextManager[None]:
        """Inside the block, lines appear even while one item takes so long that nothing calls `advance` or `at`."""

        def speak() -> None:
            if (now := self.clock()) >= self.next and self.done != self.total:
                self._tell(now, f"{duration(now - self.start)} so far")

        return _now_and_then(speak, lambda: max(self.next - self.clock(), FIRST_GAP))

    def end(self, extra: str = "") -> None:
        """Reports the end. Needed only if the total is unknown."""
        if self.spoke:
            self.spoke, seconds = False, self.clock() - self.start
            self._say(extra, *self._pace(seconds)[:1], f"{duration(seconds)} in all")

    def _tell(self, now: float, extra: str) -> None:
        self.spoke, self.next = True, now + _gap(now - self.start)
        self._say(extra, *self._pace(now - self.start))

    def _say(self, *numbers: str) -> None:
        total = "" if self.total is None else f"/{self.total:,}"
        self.say(", ".join(filter(None, [f"{self.task}: {self.done:,}{total} {self.unit}", *numbers])))

    def _pace(self, seconds: float) -> list[str]:
        rate = (self.done - self.free) / seconds if seconds else 0.0
        if not rate:
            return []
        left = [] if self.total is None else [f"{duration((self.total - self.done) / rate)} left"]
        return [f"{rate:{',.0f' if rate >= 10 else '.2g'}} {self.unit}/s", *left]


@contextmanager
def waiting(say: Say, task: str) -> Iterator[None]:
    """Wraps a step of unknown length. If the step takes more than two seconds, prints `task`, then now and then the
    time so far, and finally the total time."""
    start, spoke = time.monotonic(), threading.Event()

    def speak() -> None:
        say(f"{task}: {duration(time.monotonic() - start)} so far" if spoke.is_set() else task)
        spoke.set()

    with _now_and_then(speak, lambda: _gap(time.monotonic() - start) if spoke.is_set() else QUIET_SECONDS):
        yield
    if spoke.is_set():
        say(f"{task}: took {duration(time.monotonic() - start)}")


@contextmanager
def _now_and_then(speak: Callable[[], None], gap: Callable[[], float]) -> Iterator[None]:
    """Inside the block, a thread calls `speak` every `gap()` seconds."""
    over = threading.Event()

    def speaking() -> None:
        while not over.wait(gap()):
            speak()

    speaker = threading.Thread(target=speaking, name="progress", daemon=True)
    speaker.start()
    try:
        yield
    finally:
        over.set()
        speaker.join()


def without_passwords(text: str) -> str:
    """Masks secrets in the text. Replaces the user information of URLs with ***, and also every value in their queries
    and fragments, because tokens and signatures go by many names. A path with a query counts as a URL, because that is
    how libraries quote a URL that they failed to fetch."""
    return WORD.sub(_without_values, USERINFO.sub("***@", text))


def _without_values(match: re.Match[str]) -> str:
    word = match[0]
    host, slash = word.find("://"), word.find("/")
    begin = QUERY.search(word, host + 3) if host >= 0 else LINK_QUERY.search(word, slash) if slash >= 0 else None
    if begin is None:
        return word
    query = word[begin.start() :].rstrip(CLOSING)
    closing = word[begin.start() + len(query) :]
    return word[: begin.start()] + PARAMETER.sub(lambda part: f"{part['lead']}***", query) + closing


def all_without_passwords(value: Any) -> Any:
    """Masks secrets like `without_passwords`, in every string of a JSON or YAML value."""
    if isinstance(value, dict):
        return {name: all_without_passwords(each) for name, each in value.items()}
    if isinstance(value, list):
        return [all_without_passwords(each) for each in value]
    return without_passwords(value) if isinstance(value, str) else value


def is_first_rank() -> bool:
    """Whether this is the first process that a launcher started; True without a launcher."""
    return os.environ.get("RANK", "0") == "0"


def tell(line: str, *, lead: str = "", colour: str | None = None, stream: TextIO | None = None) -> None:
    """Prints `lead`, in colour if it has one, and the line. stream: default stdout."""
    stream = stream or sys.stdout
    if colour and shows_colours(stream):
        lead = f"{colour}{lead.rstrip()}{PLAIN}{lead[len(lead.rstrip()) :]}"
    try:
        # in one write, because other threads and ranks print, too
        stream.write(f"{lead}{printable(without_passwords(line))}\n")
        stream.flush()
    except BrokenPipeError:  # the reader is gone; the main thread will end the command when it next prints
        if threading.current_thread() is threading.main_thread():
            raise


def tell_error(line: str, lead: str = "") -> None:
    """Prints an error on stderr after `lead` or `error:`. Never wraps it, so that the names in it can be copied."""
    tell(line, lead=f"{lead or 'error:'} ", colour=None if lead else RED, stream=sys.stderr)


def printable(text: str, reserved: str = "") -> str:
    """The text with every character escaped that could control a terminal or is not text, and those in `reserved`. Tabs
    and line breaks stay. Whatever may come from data, servers or files passes through here on its way to a terminal."""
    return "".join(
        char if (char.isprintable() and char not in reserved) or char in "\t\n" else ascii(char)[1:-1] for char in text
    )


def with_marks(pieces: Iterable[tuple[str, bool]], colour: bool) -> str:
    """The pieces' text, printable; those that come with True are green or, without colour, between ⟦ and ⟧. (A ⟦ in the
    text is escaped, so that it cannot be taken for a mark.)"""
    begin, end = (GREEN, PLAIN) if colour else MARKS
    texts = ((printable(text, reserved=MARKS), marked) for text, marked in pieces)
    return "".join(f"{begin}{text}{end}" if marked else text for text, marked in texts)


def shows_colours(stream: TextIO) -> bool:
    """Whether the stream is a terminal with colours, and the user has not turned them off (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def silence_libraries() -> None:
    """Make libraries log only errors and show no download bars, for --quiet. Call it before they are imported."""
    logging.disable(logging.WARNING)
    from huggingface_hub.utils import disable_progress_bars  # imported here, because most commands do not need it

    disable_progress_bars()


def counted(count: int, noun: str) -> str:
    """For example `1 sample`, `2 samples`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row of a table, with every column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def data_size(count: float, base: int = 1000, units: Sequence[str] = ("kB", "MB", "GB", "TB")) -> str:
    """For example `512 bytes`, `3.3 MB`, `12.4 GB`: powers of 1000, for disks and transfers."""
    for power in range(len(units), 0, -1):
        if count >= base**power:
            return f"{count / base**power:,.1f} {units[power - 1]}"
    return f"{count:.0f} bytes"


def memory_size(count: float) -> str:
    """For example `512 bytes`, `3.1 MiB`, `11.5 GiB`: powers of 1024."""
    return data_size(count, 1024, ("KiB", "MiB", "GiB", "TiB"))


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


def _gap(seconds: float) -> float:
    """Seconds until the next line, for a step that has taken `seconds` so far."""
    return min(LAST_GAP, max(FIRST_GAP, seconds / GAPS))
