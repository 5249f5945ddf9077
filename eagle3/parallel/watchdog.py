"""Ends the job when a rank dies or hangs, and names that rank. Without it, the other ranks could wait for days.

In every rank a thread sends a heartbeat: each second it writes to the job's store where its main thread is, and how
long it has been there. The first rank listens to all others, the others listen to the first, and the first two ranks of
each node also listen to their own node, where they can see which processes are alive. A rank has died if its process is
gone, or if it is on a different node and has been silent for `silent_seconds`. A rank that stays at one place for
`hang_seconds` hangs, or waits for one that does.

Every rank also watches its launcher. If that is gone, the rank stops as on SIGTERM.
"""

import json
import linecache
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from secrets import token_hex
from types import FrameType
from typing import NamedTuple

import psutil
import torch.distributed as dist

from eagle3.console import Console
from eagle3.errors import SharedUserError
from eagle3.parallel.topology import job_store, meeting, node_name

BEAT_SECONDS = 1.0
# Time limit for reaching the job's store, which takes seconds on a machine that is starting many processes.
CONNECT = timedelta(minutes=1)
SILENT_SECONDS = 25.0
# Allowed silence of a rank that is unwatched or at a quiet place (see Beat): longer than the interpreter is held there.
ASLEEP_SECONDS = 900.0
# How long a rank that lost a peer waits to learn which one; generous, because a busy machine is slow.
VERDICT_SECONDS = SILENT_SECONDS + 20.0
# Time from a verdict to the end of the processes, so that their own error messages can still appear.
GRACE_SECONDS = 3.0
SEE_OFF_SECONDS = 5.0
# After so many beats without its launcher a rank stops: by then the launcher's own parent has ended, too, and has seen
# that ranks were left (launchers/environment.sh).
ORPHANED_BEATS = 10
# After so many more it ends, whatever it is doing.
STOP_BEATS = 60
VERDICT = "verdict"
PACKAGE = Path(__file__).parent.parent
# Deepspeed has two processes above a rank: its command, and one that starts the node's ranks.
LAUNCHER = re.compile(r"(.*/)?(deepspeed|torchrun)|(deepspeed\.launcher|torch\.distributed)\.\w+|slurmstepd:.*")
# What torchrun and deepspeed set in the environment of ranks alone.
SET_FOR_RANKS = ("TORCHELASTIC_RUN_ID", "CROSS_RANK")


class Beat(NamedTuple):
    """A rank's latest report."""

    count: int
    node: str
    pid: int
    place: str  # what the main thread is doing, as passed to Watchdog.at
    seconds: float  # time spent at `place`
    collective: str | None  # the collective in which it is waiting, if any
    where: str  # the function of this package in which it is
    watched: bool  # whether the rank is at work, so that it may neither hang nor fall silent
    quiet: bool  # whether `place` may hold the interpreter, and with it the heartbeat, for a long time
    left: bool  # whether the rank has finished

    @property
    def who(self) -> str:
        return f"(process {self.pid} on {self.node})"


class RankVerdict(NamedTuple):
    """The reason why the job ends."""

    text: str
    first_gone: bool = False  # whether the first rank, which normally reports the verdict, is gone


class Watchdog(AbstractContextManager):
    """Watches the job from every rank inside a `with` block. `at` records where this rank is.

    hang_seconds: None if no rank is ever to count as hung.
    report: called with the reason before this process exits with code 1; only on one rank, or on the first two of each
        node if the first rank died.
    """

    def __init__(
        self,
        *,
        hang_seconds: float | None,
        report: Callable[[str], None],
        local_rank: int = 0,
        silent_seconds: float = SILENT_SECONDS,
        asleep_seconds: float = ASLEEP_SECONDS,
    ) -> None:
        self.rank, self.world, self.local_rank = dist.get_rank(), dist.get_world_size(), local_rank
        # A shell is no launcher, so that it may end before a run that it started in the background.
        self.launcher = [process.pid for process in psutil.Process().parents() if _is_launcher(process)]
        self.hang_seconds, self.report = hang_seconds, report
        self.silent_seconds, self.asleep_seconds = silent_seconds, asleep_seconds
        self.main, self.place, self.since = threading.get_ident(), "starting", time.monotonic()
        self.watched = self.quiet = self.left = self.broken = False
        self.node = node_name()
        self.count = self.orphaned = 0
        with meeting():
            store = job_store(CONNECT)
            token = [token_hex(8)]
            dist.broadcast_object_list(token)
            # Use a separate prefix, because the store may have served an earlier run.
            self.store = dist.PrefixStore(f"watchdog/{token[0]}", store)
            self._beat()
            dist.barrier()  # wait until every rank has sent a heartbeat
            # For each rank that this one listens to: its last heartbeat, and when that arrived.
            self.heard = {rank: (self._heard_of(rank), time.monotonic()) for rank in self._listens_to()}
        store.set_timeout(timedelta(seconds=silent_seconds))
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self.watcher = threading.Thread(target=self._watch_store, name="watchdog's watchdog", daemon=True)
        self.thread.start()
        self.watcher.start()

    def at(self, place: str, quiet: bool = False) -> None:
        """Records that the main thread has moved on to `place`, for example `step 7, stream 1 of 2`.

        quiet: whether the interpreter may be held there for a long time.
        """
        self.place, self.since, self.quiet = place, time.monotonic(), quiet
        if quiet:
            with suppress(dist.DistError):  # the watchdog thread will notice that the store is gone
                self._beat()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the block, a rank that stays at one place for hang_seconds counts as hung."""
        self.at("starting")
        self.watched = True
        try:
            yield
        finally:
            self.watched = False

    def await_verdict(self) -> None:
        """Gives the watchdog time to find out which rank broke a collective. Once it knows, it ends this process."""
        self.broken = True
        time.sleep(VERDICT_SECONDS)

    def end_if_broken(self) -> None:
        """Ends this process and names the cause if another rank has died. The launcher will then stop all ranks."""
        if verdict := self._exchange():
            self._end(verdict)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stops watching. A rank that leaves because of an error of its own counts as dead for the others, which would
        wait for it in vain."""
        self.left = kind is None or issubclass(kind, SharedUserError)
        self.ended.set()
        self.thread.join()
        self.watcher.join()
        with suppress(dist.DistError):  # the first rank may have left already, with its store
            self._beat()
            # The first rank sees the others off, since they print errors once its store is gone.
            until = time.monotonic() + (SEE_OFF_SECONDS if self.left and self.rank == 0 else 0.0)
            while time.monotonic() < until and not all(self._heard_of(rank).left for rank in self.heard):
                time.sleep(0.05)

    def _listens_to(self) -> list[int]:
        if self.rank == 0:
            return [*range(1, self.world)]
        beside = range(1, self.world) if self.local_rank < 2 else ()
        return [0, *(rank for rank in beside if rank != self.rank and self._heard_of(rank).node == self.node)]

    def _run(self) -> None:
        sound = True
        while not self.ended.wait(BEAT_SECONDS):
            verdict = None
            try:
                verdict = self._exchange()
            except Exception as error:  # if this thread ended, later deaths would go unnoticed
                if sound:
                    Console(speaks=True).warn(f"the watchdog of rank {self.rank} failed once and continues: {error!r}")
                sound = False
            self.orphaned += self._launcher_is_gone()
            if self.orphaned in (ORPHANED_BEATS, ORPHANED_BEATS + STOP_BEATS):
                self._stop()
            if verdict and not self.ended.is_set():
                self._end(verdict)

    def _watch_store(self) -> None:
        """Ends this process if an exchange does not return because the store's machine was lost or its process stopped.
        Counts only seconds in which the interpreter was free, so that the exchange could have run."""
        if self.rank == 0:
            return  # the store is in this process
        seconds, previous = 0.0, 0
        while True:
            self.thread.join(BEAT_SECONDS)
            if not self.thread.is_alive():
                return
            seconds = seconds + BEAT_SECONDS if self.count == previous else 0.0
            previous = self.count
            if seconds > self.silent_seconds:
                self._end(self._first_gone(f"was not heard from for {seconds:.0f} s, last"))

    def _exchange(self) -> RankVerdict | None:
        try:
            self._beat()
            return self._verdict()
        except dist.DistError:
            return self._without_store()

    def _without_store(self) -> RankVerdict | None:
        """The verdict after the store is gone. The store was in the first rank's process, or else in the launcher's; a
        rank that has lost its own launcher stops by itself."""
        # The store closes shortly before its process ends. Without it and a launcher, beats keep their pace.
        time.sleep(0.0 if self.orphaned else BEAT_SECONDS)
        if self.rank == 0 or (self._first.node == self.node and _lives(self._first.pid)):
            lost = RankVerdict("the launcher that keeps the job's store has ended", first_gone=True)
            return None if self._launcher_is_gone() else lost
        return self._first_gone("has ended,")

    def _first_gone(self, event: str) -> RankVerdict:
        """Says where this rank is, too, since what was heard of the first one may be a second old."""
        beside = f", with rank {self.rank} at {self.place}" * (self.place != self._first.place)
        return RankVerdict(f"rank 0 {self._first.who} {event} at {self._first.place}{beside}", first_gone=True)

    @property
    def _first(self) -> Beat:
        return self.heard[0][0]

    def _beat(self) -> None:
        self.count += 1
        collective, where = _whereabouts(self.main)
        beat = Beat(
            count=self.count,
            node=self.node,
            pid=os.getpid(),
            place=self.place,
            seconds=time.monotonic() - self.since,
            collective=collective,
            where=where,
            watched=self.watched,
            quiet=self.quiet,
            left=self.left,
        )
        self.store.set(f"beat/{self.rank}", json.dumps(beat))

    def _verdict(self) -> RankVerdict | None:
        if self.store.check([VERDICT]):
            return RankVerdict(*json.loads(self.store.get(VERDICT)))
        now = time.monotonic()
        for rank, (last, at) in self.heard.items():
            beat = self._heard_of(rank)
            self.heard[rank] = beat, at if beat.count == last.count else now
        if verdict := self._died(now) or (self._hangs(now) if self.rank == 0 else None):
            self.store.set(VERDICT, json.dumps(verdict))
        return verdict

    def _heard_of(self, rank: int) -> Beat:
        return Beat(*json.loads(self.store.get(f"beat/{rank}")))

    def _died(self, now: float) -> RankVerdict | None:
        for rank, (beat, at) in self.heard.items():
            if beat.left:
                continue
            loud = beat.watched and (self.broken or not beat.quiet)
            if beat.node == self.node:
                if not _lives(beat.pid):
                    return RankVerdict(f"rank {rank} {beat.who} has ended, at {beat.place}", rank == 0)
            elif now - at > (self.silent_seconds if loud else self.asleep_seconds):
                return RankVerdict(
                    f"rank {rank} {beat.who} was not heard from for {now - at:.0f} s, last at {beat.place}", rank == 0
                )
        return None

    def _hangs(self, now: float) -> RankVerdict | None:
        beats = {self.rank: self._heard_of(self.rank)} | {
            rank: beat._replace(seconds=beat.seconds + now - at) for rank, (beat, at) in self.heard.items()
        }
        longest = max((beat.seconds for beat in beats.values() if beat.watched), default=0.0)
        if self.hang_seconds is None or longest < self.hang_seconds:
            return None
        busy = {rank: beat for rank, beat in beats.items() if beat.collective is None}
        # A rank that works alone, as in a capture, keeps moving from place to place, whatever happens to the others.
        absent = {rank: beat for rank, beat in busy.items() if beat.seconds > longest / 2} or busy or beats
        waiting = {rank: beat for rank, beat in beats.items() if beat.collective and rank not in absent}
        did = "did not arrive" if waiting else "hangs"
        culprits = "; ".join(f"rank {rank} {beat.who} {did}: {_doing(beat)}" for rank, beat in list(absent.items())[:4])
        waits = "".join(f"; rank {rank} waits in {_doing(beat)}" for rank, beat in list(waiting.items())[:1])
        return RankVerdict(f"no progress for {longest:.0f} s: {culprits}{waits}")

    def _launcher_is_gone(self) -> bool:
        """Whether deepspeed, torchrun or Slurm, whose ranks live on if it is killed, has ended: one of its processes,
        or all of them before this watchdog began."""
        if not self.launcher:
            return os.getppid() == 1 and any(name in os.environ for name in SET_FOR_RANKS)
        return not all(map(_lives, self.launcher))

    def _stop(self) -> None:
        """Stops this rank, since its launcher is gone: at first as on SIGTERM, after which training ends its step and
        writes a checkpoint, and then at once."""
        if self.orphaned > ORPHANED_BEATS:
            os._exit(1)
        if self.local_rank == 0:
            self._report("what started this job's ranks (deepspeed, torchrun or Slurm) has ended, so they stop")
        os.kill(os.getpid(), signal.SIGTERM)

    def _end(self, verdict: RankVerdict) -> None:
        if self.rank == 0 or (verdict.first_gone and self.local_rank < 2):
            self._report(verdict.text)
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    def _report(self, text: str) -> None:
        """Reports in a thread of its own: if the output is a full pipe that nobody reads, this rank still ends."""
        threading.Thread(target=self.report, args=(text,), daemon=True).start()


def _doing(beat: Beat) -> str:
    return f"{beat.collective + ', ' if beat.collective else ''}{beat.where}, at {beat.place}"


def _whereabouts(main: int) -> tuple[str | None, str]:
    """The collective in which a thread of this process is waiting, and the innermost function of this package on that
    thread. If no thread is waiting, None and the main thread's function. (On a GPU, backward has threads of its
    own.)"""
    stacks = {
        thread: [frame for frame, _ in traceback.walk_stack(innermost)]
        for thread, innermost in sys._current_frames().items()
        if thread == main or thread != threading.get_ident()
    }
    for frames in stacks.values():
        if collective := _collective(frames):
            return collective, _where(frames)
    return None, _where(stacks.get(main, []))


def _collective(frames: list[FrameType]) -> str | None:
    """The outermost function of torch.distributed on the stack, or the wait for an asynchronous collective."""
    names = [frame.f_code.co_name for frame in frames if frame.f_code.co_filename.endswith("distributed_c10d.py")]
    if names:
        return names[-1]
    code, line = frames[0].f_code, frames[0].f_lineno or 0  # no line number: between two statements
    mine = Path(code.co_filename).is_relative_to(PACKAGE)
    return "wait" if mine and ".wait()" in linecache.getline(code.co_filename, line) else None


def _where(frames: list[FrameType]) -> str:
    """The innermost function of this package, with file and line."""
    mine = (
        f"{frame.f_code.co_name} ({path.relative_to(PACKAGE.parent)}:{frame.f_lineno})"
        for frame in frames
        if (path := Path(frame.f_code.co_filename)).is_relative_to(PACKAGE)
    )
    return next(mine, "outside of this package")


def _is_launcher(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # it has just ended, or may not be looked at
        return any(map(LAUNCHER.fullmatch, process.cmdline()[:4]))
    return False


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
