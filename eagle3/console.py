"""What a person reads at a terminal or in a log: lines that fit, progress with rate and time left, colours where they show."""

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TextIO

Say = Callable[[str], None]
WARNING = "warning: "
RED, GREEN, YELLOW, PLAIN = "\033[31m", "\033[32m", "\033[33m", "\033[0m"
QUIET_SECONDS = 2.0  # a step that ends sooner says nothing of its progress
# Between two lines of a step: 5 s at first, more as it lasts, so that 10 minutes take 60 lines and a day takes 3,000.
FIRST_GAP, LAST_GAP, GAPS = 5.0, 30.0, 20
USERINFO = re.compile(r"(?<=://)[^\s/?#'\"]+@")  # of a URL: a name and password, or a token
WORD = re.compile(r"\S+")
QUERY, LINK_QUERY = re.compile("[?#]"), re.compile(r"\?[^?#&=]+=")
PARAMETER = re.compile(r"(?P<lead>[?#&;](?:[\w.\-\[\]]+=(?==*[^=&#;]))?)[^&#;]+")
CLOSING = ".,:;!?)]}>'\"`"  # ends a sentence or a quotation, as a rule, and no query
BETWEEN_FIELDS = re.compile(r"((?<=[,;]) |  +)")


class Warned(str):
    """A line that warns, for what is given no more than something to call; printed as it is, it says so in front."""

    def __str__(self) -> str:
        return WARNING + self


class Console:
    """Prints on the first rank only. Information and progress by a call, what the command was started for by `result`.

    quiet: no information; results stay, without the time in front, and so do warnings (calls with `Warned`) and errors.
    """

    def __init__(self, speaks: bool, quiet: bool = False) -> None:
        self.speaks, self.quiet, self.began = speaks, quiet, time.monotonic()

    def __call__(self, line: str) -> None:
        if isinstance(line, Warned):
            self.warn(line)
        elif not self.quiet:
            self.result(line)

    def result(self, line: str) -> None:
        if self.speaks:
            tell(line, lead="" if self.quiet else f"[{duration(time.monotonic() - self.began):>7s}] ")

    def warn(self, line: str) -> None:
        if self.speaks:
            tell(line, lead=WARNING, colour=YELLOW, stream=sys.stderr)


class Progress:
    """Says how far a step is: nothing in its first seconds, then now and then, and its end if anything was said before.

    total: None where it is not known. unit: a plural, of what is counted.
    """

    def __init__(
        self, say: Say, what: str, total: int | None, unit: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.say, self.what, self.total, self.unit, self.clock = say, what, total, unit, clock
        self.done, self.free, self.began, self.spoke = 0, 0, clock(), False
        self.next = self.began + QUIET_SECONDS

    def advance(self, count: int = 1, extra: str = "") -> None:
        """So many more are done. extra: more numbers, for the line."""
        self.at(self.done + count, free=self.free, extra=extra)

    def at(self, done: int, *, free: int = 0, extra: str = "") -> None:
        """So many are done by now. free: of these, such as took no time (an earlier run did them), and so have no rate."""
        self.done, self.free, now = done, free, self.clock()
        if done == self.total:
            self.end(extra)
        elif now >= self.next:
            self._tell(now, extra)

    def also_between(self) -> AbstractContextManager[None]:
        """In the block the state is said, too, where a single thing takes long and no call comes."""

        def speak() -> None:
            if (now := self.clock()) >= self.next and self.done != self.total:
                self._tell(now, f"{duration(now - self.began)} so far")

        return _now_and_then(speak, lambda: max(self.next - self.clock(), FIRST_GAP))

    def end(self, extra: str = "") -> None:
        """Nothing more comes; to be called where no total was known."""
        if self.spoke:
            self.spoke, seconds = False, self.clock() - self.began
            self._say(extra, *self._pace(seconds)[:1], f"{duration(seconds)} in all")

    def _tell(self, now: float, extra: str) -> None:
        self.spoke, self.next = True, now + _gap(now - self.began)
        self._say(extra, *self._pace(now - self.began))

    def _say(self, *numbers: str) -> None:
        total = "" if self.total is None else f"/{self.total:,}"
        self.say(", ".join(filter(None, [f"{self.what}: {self.done:,}{total} {self.unit}", *numbers])))

    def _pace(self, seconds: float) -> list[str]:
        rate = (self.done - self.free) / seconds if seconds else 0.0
        if not rate:
            return []
        left = [] if self.total is None else [f"{duration((self.total - self.done) / rate)} left"]
        return [f"{rate:{',.0f' if rate >= 10 else '.2g'}} {self.unit}/s", *left]


@contextmanager
def waiting(say: Say, what: str) -> Iterator[None]:
    """Around a step whose length nobody knows: where it takes more than two seconds, `what` is said, now and then how long
    it has taken, and that it is over."""
    began, spoke = time.monotonic(), threading.Event()

    def speak() -> None:
        say(f"{what}: {duration(time.monotonic() - began)} so far" if spoke.is_set() else what)
        spoke.set()

    with _now_and_then(speak, lambda: _gap(time.monotonic() - began) if spoke.is_set() else QUIET_SECONDS):
        yield
    if spoke.is_set():
        say(f"{what}: took {duration(time.monotonic() - began)}")


@contextmanager
def _now_and_then(speak: Callable[[], None], gap: Callable[[], float]) -> Iterator[None]:
    """In the block `speak` is called in a thread, each time when `gap` seconds are over."""
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
    """With *** for what URLs in it tell of their user, and for each value of their queries and fragments: tokens and
    signatures have many names. A path with a query counts, too: so libraries quote what they could not fetch."""
    return WORD.sub(_without_values, USERINFO.sub("***@", text))


def _without_values(found: re.Match[str]) -> str:
    word = found[0]
    host, slash = word.find("://"), word.find("/")
    begin = QUERY.search(word, host + 3) if host >= 0 else LINK_QUERY.search(word, slash) if slash >= 0 else None
    if begin is None:
        return word
    query = word[begin.start() :].rstrip(CLOSING)
    closing = word[begin.start() + len(query) :]
    return word[: begin.start()] + PARAMETER.sub(lambda part: f"{part['lead']}***", query) + closing


def all_without_passwords(value: Any) -> Any:
    """The same for every text in what JSON or YAML hold."""
    if isinstance(value, dict):
        return {name: all_without_passwords(each) for name, each in value.items()}
    if isinstance(value, list):
        return [all_without_passwords(each) for each in value]
    return without_passwords(value) if isinstance(value, str) else value


def is_first_rank() -> bool:
    """Of the processes that a launcher has started; True also without one."""
    return os.environ.get("RANK", "0") == "0"


def tell(line: str, *, lead: str = "", colour: str | None = None, stream: TextIO | None = None) -> None:
    """Print `lead`, in this colour, and the line: wrapped on a terminal, as it is elsewhere. stream: default stdout."""
    stream = stream or sys.stdout
    text = fitted(lead + without_passwords(line), columns_of(stream), indent=len(lead))
    if colour and lead:
        text = painted(lead.rstrip(), colour, stream) + text.removeprefix(lead.rstrip())
    try:
        stream.write(text + "\n")  # in one piece, for several threads speak
        stream.flush()
    except BrokenPipeError:  # nobody reads it any more: the main thread ends the command when it speaks next
        if threading.current_thread() is threading.main_thread():
            raise


def tell_error(line: str, lead: str = "") -> None:
    """On stderr, `lead` or `error:` in front; in one line on a terminal, too, for what it names is there to be copied."""
    # in one piece: the other ranks may speak, too
    sys.stderr.write(f"{lead or painted('error:', RED, sys.stderr)} {without_passwords(line)}\n")
    sys.stderr.flush()


def fitted(text: str, columns: int | None, indent: int = 0) -> str:
    """Lines of at most `columns`, None for any number. They are broken between fields, which two spaces, a comma or a
    semicolon part, and a field that is longer between words; what follows a break is indented. A word that is longer stays
    whole, to be copied."""
    return "\n".join(_wrapped(line, columns, indent) for line in text.split("\n"))


def _wrapped(line: str, columns: int | None, indent: int) -> str:
    if columns is None or len(line) <= columns:
        return line
    lead = line[: indent or len(line) - len(line.lstrip())]
    hang = " " * min(indent or len(lead) + 2, columns // 4)
    first, *others = BETWEEN_FIELDS.split(line.removeprefix(lead))
    lines = []
    for gap, field in [("", first), *zip(others[::2], others[1::2], strict=True)]:
        words = [field] if len(hang + field) <= columns else field.split(" ")
        for space, word in zip([gap] + [" "] * len(words), words, strict=False):
            if lines and len(lines[-1] + space + word) <= columns:
                lines[-1] += space + word
            else:
                lines.append((hang if lines else lead) + word)
    return "\n".join(lines)


def columns_of(stream: TextIO) -> int | None:
    """The width of the terminal; None where there is none, or where it does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def painted(text: str, colour: str, stream: TextIO | None = None) -> str:
    """The text in this colour where the stream (default: stdout) shows colours."""
    return f"{colour}{text}{PLAIN}" if shows_colours(stream or sys.stdout) else text


def shows_colours(stream: TextIO) -> bool:
    """Whether it is a terminal that has them, of a user who has not refused them (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def silence_libraries() -> None:
    """Under --quiet, before they are imported: of what other libraries log only errors, and no bars of their downloads."""
    logging.disable(logging.WARNING)
    from huggingface_hub.utils import disable_progress_bars  # here, for most commands run without it

    disable_progress_bars()


def counted(count: int, thing: str) -> str:
    """1 sample, 2 samples."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def data_size(count: float) -> str:
    """512 bytes, 3.3 MB, 12.4 GB: in powers of 1000, of disks and of what is sent."""
    return _size(count, 1000, ("kB", "MB", "GB", "TB"))


def memory_size(count: float) -> str:
    """512 bytes, 3.1 MiB, 11.5 GiB: in powers of 1024."""
    return _size(count, 1024, ("KiB", "MiB", "GiB", "TiB"))


def _size(count: float, base: int, units: tuple[str, ...]) -> str:
    for power in range(len(units), 0, -1):
        if count >= base**power:
            return f"{count / base**power:,.1f} {units[power - 1]}"
    return f"{count:.0f} bytes"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


def _gap(seconds: float) -> float:
    """To the next line of a step that has taken so many."""
    return min(LAST_GAP, max(FIRST_GAP, seconds / GAPS))
