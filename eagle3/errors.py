"""What a user did wrong, said in one line: where, what value, and how to mend it."""

import errno
import os
import reprlib
import sys
from collections.abc import Callable
from typing import Any

from eagle3.console import tell_error, without_passwords

LONGEST_LINE = 1200  # characters of an error


class UserError(ValueError):
    """A mistake the user can fix. The message is one line: `where: what, with the value; remedy`. What stands in it may come
    from a hostile file: a long one loses its middle, and what would steer a terminal, or is no text, is escaped."""

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        if len(line) > LONGEST_LINE:
            line = f"{line[: LONGEST_LINE * 2 // 3]} ... {line[-LONGEST_LINE // 3 :]}"
        super().__init__("".join(char if char.isprintable() else ascii(char)[1:-1] for char in line))


class SharedUserError(UserError):
    """A mistake that every process of a job raises, so that one of them is enough to say it."""


def shown(value: Any, most: int = 60) -> str:
    """A value as error lines show it: its repr, of at most so many characters, however large or nested it is."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = most
    text = short.repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def first_sentence(error: Exception) -> str:
    """Of what PyTorch says at length where memory does not suffice."""
    return str(error).partition(". ")[0]


def run_command(main: Callable[[], int | None]) -> None:
    """Run a launcher's `main`: a UserError becomes one line on stderr and exit code 2, never a traceback.

    Of a job's processes the first one on each node says it; another speaks only of what it alone may have met.
    """
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    try:
        sys.exit(main() or 0)
    except UserError as mistake:
        if rank == 0:
            tell_error(str(mistake))
        elif local_rank == 0 or not isinstance(mistake, SharedUserError):
            text = without_passwords(f"rank {rank}: {mistake}\n")
            sys.stderr.write(text)  # in one piece: the other ranks may speak, too
            sys.stderr.flush()
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        name = f"{error.filename}: " if error.filename else ""
        tell_error(f"{name}{error.strerror}; free space and continue with --resume")
        sys.exit(2)
    except KeyboardInterrupt:
        tell_error("interrupted")
        sys.exit(130)
