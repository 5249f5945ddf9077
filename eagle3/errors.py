"""What a user did wrong, said in one line a mistake: where, what value, and how to mend it."""

import errno
import json
import os
import reprlib
import select
import signal
import sys
from collections.abc import Callable
from typing import Any, TextIO

from eagle3.console import tell_error, without_passwords

LONGEST_LINE = 1200  # characters of an error


class UserError(ValueError):
    """A mistake the user can fix. The message is one line: `where: what, with the value; remedy`. Of many mistakes of one kind it
    is their account, and `further` lines name them, the last one the remedy. What stands in a line may come from a hostile file: a
    long one loses its middle, and what would steer a terminal, or is no text, is escaped."""

    def __init__(self, message: str, *further: str) -> None:
        super().__init__(*map(_one_line, (message, *further)))

    def __str__(self) -> str:
        return "\n  ".join(self.args)


class SharedUserError(UserError):
    """A mistake that every process of a job raises, so that one of them is enough to say it."""


def extra_command(extra: str) -> str:
    """What installs packages that not everybody needs, an extra of setup.cfg."""
    return f'pip install -e ".[{extra}]" -c constraints/cuda.txt (without GPUs cpu.txt)'


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    if len(line) > LONGEST_LINE:
        line = f"{line[: LONGEST_LINE * 2 // 3]} ... {line[-LONGEST_LINE // 3 :]}"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


class _Short(reprlib.Repr):
    def repr_str(self, text: str, level: int) -> str:
        return super().repr_str(without_passwords(text), level)  # before it is cut, and a password with it


def shown(value: Any, most: int = 60) -> str:
    """A value as error lines show it: its repr, of at most so many characters, however large or nested it is, and without
    the passwords in its URLs; null, true and false as JSON and YAML write them."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    short = _Short()
    short.maxstring = short.maxother = short.maxlong = most
    text = short.repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def first_sentence(error: Exception) -> str:
    """Of what PyTorch says at length where memory does not suffice."""
    return str(error).partition(". ")[0]


def run_command(main: Callable[[], int | None], unread: str = "") -> None:
    """Run a launcher's `main`: a UserError becomes its line (or lines) on stderr and exit code 2, never a traceback.

    Of a job's processes the first one on each node says it; another speaks only of what it alone may have met. Where whoever
    read the output has gone (`| head`) the command ends, as others do, with the exit code of SIGPIPE. unread: the line that is
    said then.
    """
    try:
        code = _exit_code(main)
        sys.stdout.flush()
    except BrokenPipeError:
        closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed(stream)]
        if not closed:
            raise  # of some other pipe
        for stream in closed:  # what still waits for it goes nowhere, else the interpreter would try again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if unread:
            tell_error(unread)
        code = 128 + signal.SIGPIPE
    sys.exit(code)


def _exit_code(main: Callable[[], int | None]) -> int | str | None:
    rank, local_rank = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0")
    try:
        return main() or 0
    except SystemExit as ended:  # of argparse, after --help
        return ended.code
    except UserError as mistake:
        if rank == "0":
            tell_error(str(mistake))
        elif local_rank == "0" or not isinstance(mistake, SharedUserError):
            tell_error(str(mistake), lead=f"rank {rank}:")
        return 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        name = f"{error.filename}: " if error.filename else ""
        tell_error(f"{name}{error.strerror}; free space and continue with --resume")
        return 2
    except KeyboardInterrupt:
        tell_error("interrupted")
        return 130


def _is_closed(stream: TextIO) -> bool:
    """Whether it is a pipe whose other end has been closed."""
    poll = select.poll()
    poll.register(stream, 0)  # errors are reported unasked
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
