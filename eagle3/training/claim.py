"""A run's claim on its folder, from the run's start to its end, so that no two runs write to one folder.

The claim is a lock (flock) on a file inside the folder. The file is inside the folder, not beside it, so that every
spelling of the path (relative, through a symbolic link, through a different mount) leads to the same lock, and so that
a folder that is a mount point needs no writable parent. The folder itself never moves: a fresh run holds the lock while
it moves an earlier run's files out of the folder (RunFolder.begin). If the folder itself were renamed, a third run
could create its own in the meantime.

When a run ends, it removes the file, and the folder too if it wrote nothing. A process that opened the file just before
that can then lock a file that no longer exists. So after taking the lock, a process checks again: it has claimed the
folder only if the path still leads to the locked file. This stays true, because only the holder removes the file.

The kernel releases the lock when the holder dies. The file stays until the next run. Its text names the holder, for
messages. The text is also a second line of defence on file systems without locks, or whose locks other nodes do not see
(docs/running-on-slurm.md): before each checkpoint and export, a run checks that the file still holds what it wrote.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from eagle3.durable import lock, writing
from eagle3.errors import UserError

CLAIM = "run.lock"
PATIENCE = 0.5  # seconds; `holder_of` takes the lock for an instant, which must not make a run fail


class Claim:
    """This process's claim on `folder`, which is created if needed. Raises UserError if another process holds the
    folder, or if the folder cannot be written. `locked` is False if the file system has no locks.

    node: this machine's name, for messages.
    """

    def __init__(self, folder: Path, node: str) -> None:
        self.folder, self.path = folder, folder / CLAIM
        self.text = (
            f"process {os.getpid()} on {node}, since {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n{token_hex(16)}\n"
        ).encode()
        self.new_folders = [place for place in (folder, *folder.absolute().parents) if not place.exists()]
        until = time.monotonic() + PATIENCE
        with writing(folder, "free space, or set output.dir to another place"):
            while not self._take():
                if time.monotonic() > until:
                    raise UserError(
                        f"{folder}: another run writes this folder ({_holder(self.path)}); stop it or wait for its "
                        f"end, or set output.dir to another place (if that process is certainly dead, remove {CLAIM})"
                    )
                time.sleep(0.02)
            try:
                self.file.write(self.text)  # over an earlier run's text, so that the first line is always a holder's
                self.file.truncate(len(self.text))
            except OSError:
                self.path.unlink(missing_ok=True)
                self.release()
                raise

    def _take(self) -> bool:
        """Tries once to claim the folder. Returns whether that succeeded; only then does the file stay open."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # the folder, or the file, was moved or removed just now
            self.file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "rb+", buffering=0)
            state = lock(self.file)
            self.locked = state == "held"
            with suppress(FileNotFoundError):
                if state != "taken" and os.path.samestat(os.fstat(self.file.fileno()), self.path.stat()):
                    return True
            self.file.close()
        return False

    def require(self) -> None:
        """Raises UserError if this process no longer holds the folder."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            content = None
        except OSError:
            return  # a disk problem, which the next write will report
        if content != self.text:
            cause = (
                "the folder was moved, or its run.lock removed" if content is None else f"taken by {_holder(self.path)}"
            )
            raise UserError(
                f"{self.folder}: no longer this run's ({cause}), so it ends and writes nothing more there; set "
                "output.dir to where its checkpoints are now and continue with --resume"
            )

    def release(self) -> None:
        """Releases the folder, and removes it if nothing was written."""
        with suppress(OSError):
            if self.path.read_bytes() == self.text:
                self.path.unlink()
        self.file.close()
        with suppress(OSError):  # not empty
            for place in self.new_folders:
                place.rmdir()


def holder_of(folder: Path) -> str | None:
    """A description of the process that holds the folder; None if none does or the file system cannot tell. Changes
    nothing."""
    path = folder / CLAIM
    with suppress(OSError), path.open("rb+") as file:
        return _holder(path) if lock(file) == "taken" else None
    return None


def _holder(path: Path) -> str:
    """The first line of a claim. Anybody may have written it."""
    with suppress(OSError), path.open("rb") as file:
        line = file.read(200).decode("utf-8", "replace").partition("\n")[0]
        return line or "a process that is starting"
    return "a process that is starting"
