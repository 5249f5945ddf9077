"""Ranks that die, hang or leave in the ways of tests/test_watchdog.py, each watched by a real watchdog.

python tests/watchdog_worker.py CASE...
"""

import datetime
import os
import signal
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
from processes import begin_ranks

from eagle3.errors import SharedUserError, UserError
from eagle3.parallel.topology import start_distributed, stop_distributed
from eagle3.parallel.watchdog import Watchdog

RANKS = 3
SILENT, HANGS = 5.0, 8.0
PATIENCE = 4.0  # of collectives, where the first rank works for longer


def ranks(case: str) -> None:
    if case == "stopped":
        os.environ["SLURMD_NODENAME"] = f"n{os.environ['RANK']}"  # each on a node of its own
    patience = {"timeout": datetime.timedelta(seconds=PATIENCE)} if case.startswith("first works") else {}
    start_distributed(**patience)
    with Watchdog(
        address=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        hang_seconds=HANGS,
        silent_seconds=SILENT,
        local_rank=int(os.environ["LOCAL_RANK"]),
        report=lambda verdict: print(f"{case}: {verdict}", flush=True),
    ) as watchdog:
        rank = dist.get_rank()
        if case == "shared mistake":
            time.sleep(0.7 * rank)
            raise SharedUserError("all ranks make it")
        try:  # as training does
            with watchdog.watching():
                for step in range(10 if case == "sound" else 1):  # a sound job takes longer than HANGS in all
                    watchdog.at(f"step {step}, stream 1 of 2")
                    time.sleep(1.0 if case == "sound" else 2.5)  # some beats
                    if rank == (0 if case == "first killed" else 1):
                        misbehave(case)
                    add_up()
            if case.startswith("first works"):
                work_alone(case, watchdog)
                add_up()
        except RuntimeError:
            watchdog.await_verdict()
            raise
    stop_distributed()


def work_alone(case: str, watchdog: Watchdog) -> None:
    if dist.get_rank():
        watchdog.await_first()
        return
    time.sleep(2.5 * PATIENCE)
    if case == "first works and dies":
        os.kill(os.getpid(), signal.SIGKILL)
    watchdog.first_is_done()


def misbehave(case: str) -> None:
    if case in ("killed", "first killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if case == "own mistake":
        raise UserError("this rank alone makes it")
    if case == "hangs":
        load_for_ever()


def load_for_ever() -> None:
    while True:
        time.sleep(0.1)


def add_up() -> None:
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    began = time.monotonic()
    jobs = {case: begin_ranks(RANKS, partial(ranks, case)) for case in sys.argv[1:]}
    waited_for = [process for case in jobs for rank, process in enumerate(jobs[case]) if (case, rank) != ("stopped", 1)]
    for process in waited_for:
        process.join(max(0.0, began + 60 - time.monotonic()))
    for case, processes in jobs.items():
        late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
        for process in processes:
            process.kill()
            process.join()
        print(f"{case}: ended with {[process.exitcode for process in processes]}, late {late}", flush=True)
