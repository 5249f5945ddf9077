"""Bounds on what a chat template, a program from outside, may take of processor time and memory."""

import resource
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from eagle3.errors import UserError

# A conversation is rendered once or twice for each of its messages: 1,000 messages of 4 MB together took 24 s under
# Llama 3's template, 2 messages of as much 0.1 s.
SECONDS, SECONDS_A_MESSAGE = 30.0, 0.1
MEMORY, MEMORY_A_CHARACTER = 1 << 30, 64  # bytes; Python has up to 4 a character, and filters make copies
# Of a rendering: JSON escapes, and a system prompt of the template's own.
CHARACTERS, CHARACTERS_A_CHARACTER = 1 << 20, 4
GRACE = 20.0  # seconds, after which the system ends a process whose interpreter never came to take notice
PAGE = resource.getpagesize()


class _TimeUp(BaseException):
    """No Exception, of which Jinja swallows some."""


class Limits:
    """What the renderings of one row may take together. where: the row, for error lines. messages, characters: it has.

    Beyond them the run ends, whatever data.unusable says: an endless template would take as long for every row, and if such
    rows were dropped, the samples would depend on the machine. Renderings have to run in the process's main thread.
    """

    def __init__(self, where: str, messages: int, characters: int) -> None:
        assert threading.current_thread() is threading.main_thread(), "signals interrupt the main thread alone"
        self.where = where
        self.seconds = self.left = SECONDS + SECONDS_A_MESSAGE * messages
        self.memory = MEMORY + MEMORY_A_CHARACTER * characters
        self.characters = CHARACTERS + CHARACTERS_A_CHARACTER * characters

    def keep(self, render: Callable[[], str]) -> str:
        """What `render` gives. Raises UserError where that takes more time or memory than is left, or is out of proportion, so
        that no tokenizer could take it."""
        began = time.process_time()
        try:
            if self.left <= 0:
                raise _TimeUp
            text = _bounded(render, self.left, self.memory)
        except _TimeUp:
            raise self.exceeded(f"runs for more than {self.seconds:,.1f} s of processor time") from None
        except MemoryError:
            raise self.exceeded(f"takes more than {self.memory / 2**30:,.1f} GiB of memory") from None
        finally:
            self.left -= time.process_time() - began
        if len(text) > self.characters:
            raise self.exceeded(f"prints {len(text):,} characters, more than {self.characters:,}")
        return text

    def exceeded(self, what: str) -> UserError:
        return UserError(
            f"{self.where}: the chat template {what}, the limit for this row; fix the template (data.chat_template, else the "
            "tokenizer's) or take the row out"
        )


def _bounded(render: Callable[[], str], seconds: float, memory: int) -> str:
    """Raises _TimeUp once this process has computed for so long (time in which it is stopped does not count), MemoryError
    where its address space would grow by more than so many bytes. Where time goes by unnoticed, in a single operation of the
    interpreter that does not end, the system ends the process.

    No context manager: _TimeUp may come at any instruction, also in contextlib's before it would reach one.
    """
    inside = True

    def notice(number: int, frame: FrameType | None) -> None:
        if inside:
            raise _TimeUp

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        limits = (int(file.read().split()[0]) * PAGE + memory, soft, hard)
    before = signal.signal(signal.SIGPROF, notice), signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds + GRACE)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            resource.setrlimit(
                resource.RLIMIT_AS, (min(each for each in limits if each != resource.RLIM_INFINITY), hard)
            )
            return render()
        finally:
            inside = False  # notice may come before this, but only once, so that what follows is done whole
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        for number, handler in zip((signal.SIGPROF, signal.SIGVTALRM), before, strict=True):
            signal.signal(number, handler)
