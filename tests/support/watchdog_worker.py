"""Ranks that die, hang or leave in the ways of tests/training/test_watchdog.py. A real watchdog watches each as soon as
the job has formed.

python tests/support/watchdog_worker.py CASE...
"""

import datetime
import os
import select
import signal
import sys
import time
from contextlib import nullcontext, suppress
from functools import partial

import torch
import torch.distributed as dist
from limits import NOTICED_SECONDS
from processes import begin_ranks

from eagle3.errors import SharedUserError, UserError
from eagle3.parallel.topology import Topology, patient, start_distributed, stop_distributed
from eagle3.parallel.watchdog import Watchdog

RANKS = 3
# Far longer than a heartbeat or a small collective takes on a busy machine.
SILENT, ASLEEP, HANGS = 10.0, 14.0, 15.0
PATIENCE = datetime.timedelta(seconds=10)  # for the job to form, and for collectives in cases in WORKING
# The node of each rank, for cases with several nodes.
NODES = {"killed elsewhere": "011", "first killed elsewhere": "011", "stopped": "012", "asleep": "012"}
# Cases that end before there is a watchdog.
FORMING = ("never comes", "dies while the job forms", "dies before the watchdog")
WORKING = ("first works", "first works and dies", "works for long")
FIRST = ("first killed", "first killed elsewhere", "first stopped")


def ranks(case: str) -> None:
    rank = int(os.environ["RANK"])
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # PyTorch writes there about lost connections, in pieces of lines
    if case in NODES:
        nodes = NODES[case]
        os.environ["SLURMD_NODENAME"] = f"n{nodes[rank]}"
        os.environ["LOCAL_RANK"] = str(nodes[:rank].count(nodes[rank]))
    if case == "killed unread":
        os.dup2(full_pipe(), sys.stdout.fileno())
    try:
        topology = begin(case, rank)
        with (
            Watchdog(
                hang_seconds=HANGS,
                silent_seconds=SILENT,
                asleep_seconds=ASLEEP,
                local_rank=int(os.environ["LOCAL_RANK"]),
                report=lambda verdict: say(f"{case}: {verdict}"),
            ) as watchdog,
            patient(topology, PATIENCE) if case in WORKING else nullcontext(),
        ):
            work(case, rank, topology, watchdog)
    except Exception as error:
        if case in FORMING and isinstance(error, UserError):
            say(f"{case}: {error}")
        say(f"(rank {rank} of {case}: {error!r})")  # for people who investigate a failure
        raise
    stop_distributed()


def full_pipe() -> int:
    """The end of a pipe that takes nothing more. Its other end stays open."""
    _, end = os.pipe()
    os.set_blocking(end, False)
    with suppress(BlockingIOError):
        while True:
            os.write(end, bytes(select.PIPE_BUF))
    os.set_blocking(end, True)
    return end


def say(line: str) -> None:
    """Writes the line in one piece. Without a buffer, print would write the line and its end separately, and other
    ranks' output could come between."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def begin(case: str, rank: int) -> Topology:
    if rank == 1 and case == "never comes":
        die()
    if rank == 1 and case == "dies while the job forms":
        dist.init_process_group("gloo", timeout=PATIENCE)
        die()
    topology = start_distributed(timeout=PATIENCE) if case in FORMING else start_distributed()
    if rank == 1 and case == "dies before the watchdog":
        die()
    return topology


def work(case: str, rank: int, topology: Topology, watchdog: Watchdog) -> None:
    if case == "shared mistake":
        time.sleep(0.7 * rank)
        raise SharedUserError("all ranks make it")
    if case == "asleep":
        await_hearing(watchdog)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        load_for_ever()
    try:  # as training does
        with watchdog.watching():
            for step in range(10 if case == "sound" else 1):  # in all, a sound job takes longer than HANGS
                watchdog.at(f"step {step}, stream 1 of 2")
                if case == "sound":
                    time.sleep(0.12 * HANGS)
                if rank == (0 if case in FIRST else 1):
                    await_hearing(watchdog)
                    misbehave(case)
                add_up()
        if case in WORKING:
            with patient(topology, 10 * PATIENCE):
                if rank == (1 if case == "works for long" else 0):
                    time.sleep(2.5 * PATIENCE.total_seconds())
                    if case == "first works and dies":
                        die()
                add_up()
    except RuntimeError:
        watchdog.await_verdict()
        raise


def await_hearing(watchdog: Watchdog) -> None:
    """Returns once all ranks have heard where this one is."""
    for beats in (1, 2):  # this rank sends where it is; then the others look
        counts = {rank: watchdog._heard_of(rank).count + beats for rank in range(RANKS)}
        while any(watchdog._heard_of(rank).count < count for rank, count in counts.items()):
            time.sleep(0.1)


def misbehave(case: str) -> None:
    if "killed" in case:
        die()
    if "stopped" in case:
        os.kill(os.getpid(), signal.SIGSTOP)
    if case == "own mistake":
        raise UserError("this rank alone makes it")
    if case == "hangs":
        load_for_ever()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def load_for_ever() -> None:
    while True:
        time.sleep(0.1)


def add_up() -> None:
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    began = time.monotonic()
    jobs = {case: begin_ranks(RANKS, partial(ranks, case)) for case in sys.argv[1:]}
    stopped = {"stopped": 1, "asleep": 1, "first stopped": 0}
    waited_for = [process for case in jobs for rank, process in enumerate(jobs[case]) if stopped.get(case) != rank]
    for process in waited_for:
        process.join(max(0.0, began + NOTICED_SECONDS - time.monotonic()))
    for case, processes in jobs.items():
        late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
        for process in processes:
            process.kill()
            process.join()
        print(f"{case}: ended with {[process.exitcode for process in processes]}, late {late}", flush=True)
