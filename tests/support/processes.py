"""Several ranks of one job for a test: forked after the imports, so that many processes start as fast as one."""

import contextlib
import os
import random
import runpy
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from limits import NOTICED_SECONDS
from places import LAUNCHERS
from torch.multiprocessing import start_processes

_given: set[int] = set()


def fork_ranks(world: int, work: Callable[[], None]) -> None:
    """Run `work` in `world` processes under the environment that a launcher sets. If one fails, the others are ended
    and its traceback is raised here. Call this from a separate script that has imported what `work` needs, and has
    neither started threads nor formed process groups."""
    start_processes(_be, (world, free_port(), work), nprocs=world, start_method="fork")


def run_launcher(script: str, words: Sequence[str]) -> None:
    """Runs a launcher in this process. What it imports meanwhile is better imported before the fork."""
    sys.argv = [str(LAUNCHERS / script), *words]
    runpy.run_path(sys.argv[0], run_name="__main__")


def begin_ranks(world: int, work: Callable[[], None]) -> list:
    """Like `fork_ranks`, but returns the processes at once. The caller has to wait for them."""
    return start_processes(_be, (world, free_port(), work), nprocs=world, start_method="fork", join=False).processes


def ended(processes: list) -> list[int | None]:
    """Exit codes of the processes; None for those that did not notice that their job has ended. Kills these."""
    deadline = time.monotonic() + NOTICED_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def _be(rank: int, world: int, port: int, work: Callable[[], None]) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    work()


def compute(folder: Path, name: str, world: int, sizes: tuple[int, ...], work: Callable[..., object]) -> None:
    """Keeps what `work`, given the groups of these sizes (tensor, Ulysses, ring), returns on each of `world` ranks."""
    from eagle3.parallel.topology import start_distributed, stop_distributed  # which takes seconds

    def compute_and_keep() -> None:
        keep(work(start_distributed(*sizes)), folder, name)
        stop_distributed()

    fork_ranks(world, compute_and_keep)


def keep(result: object, folder: Path, name: str) -> None:
    """Saves what this rank has computed, under the name of its job, for `kept` to read."""
    torch.save(result, folder / f"{name}-{os.environ['RANK']}.pt")


def kept(folder: Path, name: str) -> list:
    """What the ranks of the job of that name have computed, by rank."""
    count = len([*folder.glob(f"{name}-*.pt")])
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(count)]


def free_port() -> int:
    """A free port below the range from which the system assigns ports: otherwise a connection of a different job could
    take it first. Never returns a port twice, because the first job may not have taken it yet."""
    while True:
        port = random.SystemRandom().randrange(10_000, 29_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port
