"""Starts the launchers as users do, under a time limit, and keeps what a try is judged by: exit code, output, seconds.

A launcher is a script in a process of its own, with arguments, an environment and two output files. To be quick it is
forked from this process, which has imported PyTorch and the other packages (nothing of the project); `fresh` starts a
new interpreter instead. The ranks of a job get the variables that `torchrun` and `deepspeed` set.
"""

import atexit
import ctypes
import os
import random
import resource
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

PAUSE = 0.005
# Seconds of a try, where it states no other: twenty times what it takes on a quiet machine.
LIMIT = 300
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
# Beyond what this process has mapped: what eats all memory must not end the machine.
MOST_MORE = 10 << 30
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# One thread each: two cores are shared by the ranks of a job, and sums are then the same in every run.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}


class Ended(NamedTuple):
    """A launcher, or all ranks of a job, at its end.

    codes: of each process, negative for the signal that ended it, None where the time limit did. peak_mib: resident
    memory of the process and its children, the largest of many looks (the largest rank's, of a job).
    """

    codes: tuple[int | None, ...]
    out: str
    err: str
    seconds: float
    peak_mib: float

    @property
    def well(self) -> bool:
        return not any(code != 0 for code in self.codes)

    @property
    def late(self) -> bool:
        return None in self.codes

    @property
    def output(self) -> str:
        return self.out + self.err


@dataclass
class Process:
    pid: int
    out: Path
    err: Path
    began: float
    code: int | None = None
    ended: float | None = None
    peak: int = 0

    def kill(self) -> None:
        """This process alone; what it started lives on, as after a kill from outside. Before `finish`, after which its
        number may be another's."""
        os.kill(self.pid, signal.SIGKILL)


def have_met(first: Process) -> bool:
    """Whether the ranks of a job have: the first one's first line with a time in front comes before that, as do those
    that say what it loads; its next one comes after."""
    lines = [line for line in first.out.read_bytes().splitlines() if b"[ " in line and b"] loading " not in line]
    return len(lines) > 1


class Launchers:
    """Of the checkout `root`. cpu_seconds: of everything that has ended so far. fresh: see above. before: called in
    each new process at its beginning."""

    def __init__(self, root: Path, logs: Path) -> None:
        self.root, self.logs, self.fresh, self.cpu_seconds = root, logs, False, 0.0
        self.before: Callable[[], None] = lambda: None
        logs.mkdir(parents=True, exist_ok=True)
        self.count = max((int(path.stem) for path in logs.glob("*.out")), default=0)

    def run(self, script: str, *arguments: str, limit: float = LIMIT) -> Ended:
        """script: relative to the checkout, or absolute. limit: seconds."""
        return self.finish([self.start(script, *arguments)], limit)

    def run_job(self, world: int, script: str, *arguments: str, limit: float = LIMIT) -> Ended:
        return self.finish(self.start_job(world, script, *arguments), limit)

    def start_job(self, world: int, script: str, *arguments: str) -> list[Process]:
        alike = {
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": _free_port(),
        }
        return [
            self.start(script, *arguments, variables={**alike, "RANK": rank, "LOCAL_RANK": rank})
            for rank in range(world)
        ]

    def start(self, script: str, *arguments: str, variables: Mapping[str, object] | None = None) -> Process:
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
        environment |= {**ENVIRONMENT, "PYTHONPATH": str(self.root)}
        environment |= {name: str(value) for name, value in (variables or {}).items()}
        command = [str(self.root / script), *map(str, arguments)]

        def be() -> None:
            self.before()
            os.chdir(self.root)
            if self.fresh:
                os.execve(sys.executable, [sys.executable, *command], environment)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
            sys.path.insert(1, environment["PYTHONPATH"])
            runpy.run_path(command[0], run_name="__main__")

        return self._fork(be)

    def call(self, function: Callable[..., None], *arguments: object) -> None:
        """In a child: what starts threads, or patches modules, must not do so in the process that forks."""
        ended = self.finish([self._fork(lambda: function(*arguments))], 300)
        if not ended.well:
            raise RuntimeError(f"{function.__name__}: {ended.codes}\n{ended.output}")

    def _fork(self, be: Callable[[], None]) -> Process:
        self.count += 1
        out, err = (self.logs / f"{self.count:05d}.{kind}" for kind in ("out", "err"))
        out.touch(mode=0o600), err.touch(mode=0o600)
        pid = os.fork()
        if not pid:
            with _child(out, err):
                be()
        return Process(pid, out, err, time.monotonic())

    def finish(self, processes: Sequence[Process], limit: float) -> Ended:
        """Wait for all, at most `limit` seconds from their start; then kill whatever is left of them."""
        looked = 0.0
        while self.alive(processes) and time.monotonic() - processes[0].began < limit:
            time.sleep(PAUSE)
            if time.monotonic() - looked > 0.1:
                looked = time.monotonic()
                for process in processes:
                    process.peak = max(process.peak, _resident(process.pid))
        for process in processes:
            late = process.ended is None
            process.kill()  # one that was not waited for keeps its number, dead or alive
            with suppress(ProcessLookupError):  # it never came to have a group
                os.killpg(process.pid, signal.SIGKILL)
            _, status, used = os.wait4(process.pid, 0)
            process.ended = process.ended or time.monotonic()
            process.code = None if late else os.waitstatus_to_exitcode(status)
            self.cpu_seconds += used.ru_utime + used.ru_stime
        return Ended(
            tuple(process.code for process in processes),
            "".join(process.out.read_text("utf-8", "replace") for process in processes),
            "".join(process.err.read_text("utf-8", "replace") for process in processes),
            max(process.ended - process.began for process in processes),
            max(process.peak for process in processes) / 2**20,
        )

    def alive(self, processes: Sequence[Process]) -> bool:
        """Whether one of them is; notes when the others ended."""
        for process in processes:
            if process.ended is None and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                process.ended = time.monotonic()
        return any(process.ended is None for process in processes)

    def wait_until(self, condition: Callable[[], bool], processes: Sequence[Process], limit: float = LIMIT) -> bool:
        """False where the processes ended, or the time did, before the condition held."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > limit or not self.alive(processes):
                return condition()
            time.sleep(PAUSE)
        return True


def preload() -> None:
    """Import what the launchers spend their start on, so that a fork has it."""
    os.environ.update(ENVIRONMENT)
    quiet = os.dup(1), os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1), os.dup2(null.fileno(), 2)
        try:
            import deepspeed  # noqa: F401
            import matplotlib.pyplot  # noqa: F401
            import megatron.core.parallel_state  # noqa: F401
            import megatron.core.transformer.spec_utils  # noqa: F401
            import pydantic  # noqa: F401
            import torch.distributed.checkpoint  # noqa: F401
            import transformers.models.llama.modeling_llama  # noqa: F401
            from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: F401
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os.dup2(quiet[0], 1), os.dup2(quiet[1], 2)


class _child:
    """The life of a forked process: never returns to the code of its parent. As the interpreter's own end, but for the
    destructors of C++."""

    def __init__(self, out: Path, err: Path) -> None:
        self.files = out, err

    def __enter__(self) -> None:
        os.setsid()
        most = psutil.Process().memory_info().vms + MOST_MORE
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
        for descriptor, path in zip((1, 2), self.files, strict=True):
            os.dup2(os.open(path, os.O_WRONLY | os.O_TRUNC), descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        code = 0
        try:
            if isinstance(error, SystemExit):
                code = error.code if isinstance(error.code, int) else int(error.code is not None)
            elif error:
                traceback.print_exception(error)
                code = 1
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _resident(pid: int) -> int:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)])
    return 0


def _free_port() -> int:
    """Below the ports that the system hands out."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 29_000)))
            return probe.getsockname()[1]
