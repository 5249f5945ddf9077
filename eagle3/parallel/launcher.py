"""The launcher of this rank: deepspeed, torchrun or Slurm. When it is killed, its ranks live on, and nobody else would
end them."""

import os
import re
from contextlib import suppress

import psutil

# Deepspeed has two processes above a rank: its command, and one that starts the node's ranks.
LAUNCHER = re.compile(r"(.*/)?(deepspeed|torchrun)|(deepspeed\.launcher|torch\.distributed)\.\w+|slurmstepd:.*")
# What torchrun and deepspeed set in the environment of ranks alone.
SET_FOR_RANKS = ("TORCHELASTIC_RUN_ID", "CROSS_RANK")


class Launcher:
    """The processes above this one that belong to a launcher, as seen when this is created. A shell is no launcher, so
    that it may end before a run that it started in the background."""

    def __init__(self) -> None:
        self.processes = [process.pid for process in psutil.Process().parents() if _is_launcher(process)]

    def is_gone(self) -> bool:
        """Whether one of its processes has ended, or all had before this was created."""
        if not self.processes:
            return any(name in os.environ for name in SET_FOR_RANKS)
        return not all(map(lives, self.processes))


def _is_launcher(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # it has just ended, or may not be looked at
        return any(map(LAUNCHER.fullmatch, process.cmdline()[:4]))
    return False


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
