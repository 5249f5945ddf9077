"""Mistakes that a user can fix. Each is reported in one line: where it is, which value is wrong, and how to fix it."""

import errno
import json
import os
import reprlib
import select
import signal
import sys
from collections.abc import Callable
from typing import Any, TextIO

from eagle3.console import printable, tell_error, without_passwords

LONGEST_LINE = 1200  # most characters in an error message
# What to do about a file that the system refuses, by its error number. A missing file is not one of these: what to do
# about that depends on who looks for it.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
FILE_REMEDIES = {
    **dict.fromkeys(NO_SPACE, "free space and continue with --resume"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give this user access to it, or use another place"),
    errno.EROFS: "use a place that can be written to",
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.EEXIST), "move away what is there, or use another place"),
    **dict.fromkeys((errno.ELOOP, errno.ENAMETOOLONG), "fix the path"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files (ulimit -n)"),
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.EFBIG, errno.ENODEV), "check its file system"),
    **dict.fromkeys(
        (errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EREMOTEIO),
        "check the network and its file system",
    ),
}


class UserError(ValueError):
    """A mistake that the user can fix. The message is one line: `where: what, with the value; remedy`. If there are
    many mistakes of one kind, the message summarises them, and the `further` lines name them and end with the remedy.

    Text in a line may come from a hostile file. Long lines therefore lose their middle, and characters that are not
    text, or could control a terminal, are escaped.
    """

    def __init__(self, message: str, *further: str) -> None:
        super().__init__(*map(_one_line, (message, *further)))

    def __str__(self) -> str:
        return "\n  ".join(self.args)


class SharedUserError(UserError):
    """A mistake that every process of a job raises, so that it is enough for one of them to report it."""


def mistake_of(error: UserError | OSError) -> UserError:
    """The error itself or, if the system refused a file, a UserError with its path, the reason and a remedy. Raises any
    other OSError again."""
    if isinstance(error, UserError):
        return error
    remedy, path = FILE_REMEDIES.get(error.errno), error.filename
    if remedy is None or (path is None and error.errno not in NO_SPACE):
        raise error
    where = "" if path is None else f"{os.fsdecode(path)}: "
    return UserError(f"{where}{error.strerror.lower()}; {remedy}")


def extra_command(extra: str) -> str:
    """The command that installs an optional extra of setup.cfg."""
    return f'pip install -e ".[{extra}]" -c constraints/cuda.txt (without GPUs cpu.txt)'


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    if len(line) > LONGEST_LINE:
        line = f"{line[: LONGEST_LINE * 2 // 3]} ... {line[-LONGEST_LINE // 3 :]}"
    return printable(line)


class _Short(reprlib.Repr):
    def repr_str(self, text: str, level: int) -> str:
        return super().repr_str(without_passwords(text), level)  # mask passwords before the text is cut


def shown(value: Any, most: int = 60) -> str:
    """A value for an error message: its repr in at most `most` characters, however large or nested the value is, with
    passwords in URLs masked. null, true and false are written as in JSON and YAML."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    short = _Short()
    short.maxstring = short.maxother = short.maxlong = most
    text = short.repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def first_sentence(error: Exception) -> str:
    """The first sentence of an error, such as PyTorch's long report that memory ran out."""
    return str(error).partition(". ")[0]


def refuse(where: str, *mistakes: tuple[Any, str]) -> None:
    """Raises UserError for the first mistake that was made. Each is given as (whether it was made, message)."""
    for wrong, message in mistakes:
        if wrong:
            raise UserError(f"{where}: {message}")


def in_one_line(error: Exception) -> str:
    """The message of the operating system or a library, without a stack trace."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def run_command(main: Callable[[], int | None], notice: str = "") -> None:
    """Runs a launcher's `main`. A UserError becomes its line (or lines) on stderr and exit code 2, never a traceback.

    In a job, the first process on each node reports every UserError; the others report only errors that may be theirs
    alone. If the reader of the output is gone (`| head`), the command ends as usual, with SIGPIPE's exit code. notice:
    a line to print in that case.
    """
    try:
        code = _exit_code(main)
        sys.stdout.flush()
    except BrokenPipeError:
        closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed(stream)]
        if not closed:
            raise  # from a different pipe
        for stream in closed:  # discard the buffered rest, or the interpreter would write it on exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if notice:
            tell_error(notice)
        code = 128 + signal.SIGPIPE
    sys.exit(code)


def _exit_code(main: Callable[[], int | None]) -> int | str | None:
    rank, local_rank = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0")
    try:
        return main() or 0
    except SystemExit as ended:  # from argparse, after --help
        return ended.code
    except (UserError, OSError) as error:
        mistake = mistake_of(error)
        if rank == "0":
            tell_error(str(mistake))
        elif local_rank == "0" or not isinstance(mistake, SharedUserError):
            tell_error(str(mistake), lead=f"rank {rank}:")
        return 2
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's; torch may not be loaded
            raise
        tell_error(f"{first_sentence(error)}; end what else uses the device, or take a larger one")
        return 2
    except KeyboardInterrupt:
        tell_error("interrupted")
        return 130


def _is_closed(stream: TextIO) -> bool:
    """Whether the stream is a pipe whose other end is closed."""
    poll = select.poll()
    poll.register(stream, 0)  # poll reports errors even if no events are requested
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
