"""Names the rank that died or hangs, and ends the job: launchers and collectives alone leave it waiting for half an hour.

Every rank has a thread that beats: every second it tells the job's store where its main thread is, and for how long. The
first rank listens to all, the others to the first, and the first two of each node to its node, where they see which processes
live. Who is gone, or on another node and silent for `silent_seconds`, has died; who stays at one place for `hang_seconds`
hangs, or waits for somebody who does.
"""

import json
import linecache
import os
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
from eagle3.parallel.topology import meeting, node_name

BEAT_SECONDS = 1.0
# To reach the job's store, which takes seconds on a machine that starts many processes.
CONNECT = timedelta(minutes=1)
SILENT_SECONDS = 25.0
# Of a rank that is not watched, or at a quiet place: longer than anything there keeps the interpreter.
ASLEEP_SECONDS = 900.0
# How long a rank that lost its peer waits for the word of who that was; on a busy machine everything takes longer.
VERDICT_SECONDS = SILENT_SECONDS + 20.0
# From a verdict to the end of the processes; their own error messages may still come.
GRACE_SECONDS = 3.0
SEE_OFF_SECONDS = 5.0
VERDICT, FIRST_DONE = "verdict", "first is done"
PACKAGE = Path(__file__).parent.parent


class Beat(NamedTuple):
    """What a rank last said. place: what the trainer said it is about to do. seconds: at that place. collective: which one
    it waits in, None where it waits in none. where: the function of this package that it is in. watched: whether it
    trains, so that it may neither hang nor be silent; what comes before and after, and quiet places, may keep the
    interpreter, and so its thread, for long. left: it is done."""

    count: int
    node: str
    pid: int
    place: str
    seconds: float
    collective: str | None
    where: str
    watched: bool
    quiet: bool
    left: bool

    @property
    def who(self) -> str:
        return f"(process {self.pid} on {self.node})"


class Verdict(NamedTuple):
    """Why the job ends. first_gone: the first rank, which else says it, cannot."""

    text: str
    first_gone: bool = False


class Watchdog(AbstractContextManager):
    """Watches a job from every rank while entered. `at` says where a rank is.

    report: told why the job ends, on one rank (where the first rank died, on the first two of each node); then the process
    ends with exit code 1. hang_seconds: None for never. The job's store is reached at address, port (where a launcher has
    put it).
    """

    def __init__(
        self,
        *,
        address: str,
        port: int,
        hang_seconds: float | None,
        report: Callable[[str], None],
        local_rank: int = 0,
        silent_seconds: float = SILENT_SECONDS,
        asleep_seconds: float = ASLEEP_SECONDS,
    ) -> None:
        self.rank, self.world, self.local_rank = dist.get_rank(), dist.get_world_size(), local_rank
        self.hang_seconds, self.report = hang_seconds, report
        self.silent_seconds, self.asleep_seconds = silent_seconds, asleep_seconds
        self.main, self.place, self.since = threading.get_ident(), "starting", time.monotonic()
        self.watched = self.quiet = self.left = self.broken = False
        self.node = node_name()
        self.count = self.exchanges = 0
        with meeting():
            store = (
                dist.TCPStore(address, port, is_master=False, timeout=CONNECT) if self.world > 1 else dist.HashStore()
            )
            token = [token_hex(8)]
            dist.broadcast_object_list(token)
            self.store = dist.PrefixStore(f"watchdog/{token[0]}", store)  # the store may have served a run before
            self._beat()
            dist.barrier()  # every rank has beaten once
            # of every rank that this one listens to: its last beat, and when it came
            self.heard = {rank: (self._heard_of(rank), time.monotonic()) for rank in self._listens_to()}
        store.set_timeout(timedelta(seconds=silent_seconds))
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self.watcher = threading.Thread(target=self._watch_store, name="watchdog's watchdog", daemon=True)
        self.thread.start()
        self.watcher.start()

    def at(self, place: str, quiet: bool = False) -> None:
        """The main thread goes on to `place`, such as `step 7, stream 1 of 2`. quiet: where it may keep the interpreter."""
        self.place, self.since, self.quiet = place, time.monotonic(), quiet
        if quiet:
            with suppress(dist.DistError):  # of which the thread will hear
                self._beat()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, a rank that stays at one place for hang_seconds hangs."""
        self.at("starting")
        self.watched = True
        try:
            yield
        finally:
            self.watched = False

    def first_is_done(self) -> None:
        """The first rank calls this; the others go on from `await_first`."""
        self.store.set(FIRST_DONE, "")

    def await_first(self) -> None:
        """Wait as long as the first rank takes for what it alone does, where a collective would lose patience. Of its death
        this watchdog says a line, as elsewhere."""
        while not self.store.check([FIRST_DONE]):
            time.sleep(BEAT_SECONDS)

    def await_verdict(self) -> None:
        """Give the watchdog the time to say which rank broke a collective; it ends this process when it knows."""
        self.broken = True
        time.sleep(VERDICT_SECONDS)

    def end_if_broken(self) -> None:
        """End this process, the cause named, if another rank has died: a launcher then tells the others to stop."""
        if verdict := self._exchange():
            self._end(verdict)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """A rank that leaves because of a mistake of its own has died, for the others: they wait for it in vain."""
        self.left = kind is None or issubclass(kind, SharedUserError)
        self.ended.set()
        self.thread.join()
        self.watcher.join()
        with suppress(dist.DistError):  # where the first rank, and its store, have left before
            self._beat()
            if self.left and self.rank == 0:
                self._see_off()

    def _see_off(self) -> None:
        """The first rank goes last, if the others are quick: without its store they would be loud."""
        until = time.monotonic() + SEE_OFF_SECONDS
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
            except Exception as error:  # without this thread nobody would hear of a rank that dies later
                if sound:
                    Console(speaks=True).warn(f"the watchdog of rank {self.rank} failed once and goes on: {error!r}")
                sound = False
            self.exchanges += 1
            if verdict and not self.ended.is_set():
                self._end(verdict)

    def _watch_store(self) -> None:
        """An exchange waits for ever where the store's machine is lost or its process stopped. Counted are seconds in which the
        interpreter was free, so that an exchange had its turn."""
        if self.rank == 0:
            return  # it has the store in its own process
        seconds, seen = 0.0, 0
        while True:
            self.thread.join(BEAT_SECONDS)
            if not self.thread.is_alive():
                return
            seconds = seconds + BEAT_SECONDS if self.exchanges == seen else 0.0
            seen = self.exchanges
            if seconds > self.silent_seconds:
                self._end(self._first_gone(f"was not heard of for {seconds:.0f} s, last"))

    def _exchange(self) -> Verdict | None:
        try:
            self._beat()
            return self._verdict()
        except dist.DistError:
            return self._without_store()

    def _without_store(self) -> Verdict:
        """The first rank kept it, unless a launcher did."""
        time.sleep(BEAT_SECONDS)  # it closes some moments before its process has ended
        if self.rank == 0 or (self._first.node == self.node and _lives(self._first.pid)):
            return Verdict("the launcher that keeps the job's store has ended", first_gone=True)
        return self._first_gone("has ended,")

    def _first_gone(self, what: str) -> Verdict:
        return Verdict(f"rank 0 {self._first.who} {what} at {self._first.place}", first_gone=True)

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

    def _verdict(self) -> Verdict | None:
        if self.store.check([VERDICT]):
            return Verdict(*json.loads(self.store.get(VERDICT)))
        now = time.monotonic()
        for rank, (last, at) in self.heard.items():
            beat = self._heard_of(rank)
            self.heard[rank] = beat, at if beat.count == last.count else now
        if verdict := self._died(now) or (self._hangs(now) if self.rank == 0 else None):
            self.store.set(VERDICT, json.dumps(verdict))
        return verdict

    def _heard_of(self, rank: int) -> Beat:
        return Beat(*json.loads(self.store.get(f"beat/{rank}")))

    def _died(self, now: float) -> Verdict | None:
        for rank, (beat, at) in self.heard.items():
            if beat.left:
                continue
            loud = beat.watched and (self.broken or not beat.quiet)
            if beat.node == self.node:
                if not _lives(beat.pid):
                    return Verdict(f"rank {rank} {beat.who} has ended, at {beat.place}", rank == 0)
            elif now - at > (self.silent_seconds if loud else self.asleep_seconds):
                return Verdict(
                    f"rank {rank} {beat.who} was not heard of for {now - at:.0f} s, last at {beat.place}", rank == 0
                )
        return None

    def _hangs(self, now: float) -> Verdict | None:
        beats = {self.rank: self._heard_of(self.rank)} | {
            rank: beat._replace(seconds=beat.seconds + now - at) for rank, (beat, at) in self.heard.items()
        }
        longest = max((beat.seconds for beat in beats.values() if beat.watched), default=0.0)
        if self.hang_seconds is None or longest < self.hang_seconds:
            return None
        busy = {rank: beat for rank, beat in beats.items() if beat.collective is None}
        # Who works alone, as in a capture, goes on from place to place whatever becomes of the others.
        absent = {rank: beat for rank, beat in busy.items() if beat.seconds > longest / 2} or busy or beats
        waiting = {rank: beat for rank, beat in beats.items() if beat.collective and rank not in absent}
        did = "did not arrive" if waiting else "hangs"
        culprits = "; ".join(f"rank {rank} {beat.who} {did}: {_doing(beat)}" for rank, beat in list(absent.items())[:4])
        waits = "".join(f"; rank {rank} waits in {_doing(beat)}" for rank, beat in list(waiting.items())[:1])
        return Verdict(f"no progress for {longest:.0f} s: {culprits}{waits}")

    def _end(self, verdict: Verdict) -> None:
        if self.rank == 0 or (verdict.first_gone and self.local_rank < 2):
            self.report(verdict.text)
        time.sleep(GRACE_SECONDS)
        os._exit(1)


def _doing(beat: Beat) -> str:
    return f"{beat.collective + ', ' if beat.collective else ''}{beat.where}, at {beat.place}"


def _whereabouts(main: int) -> tuple[str | None, str]:
    """The collective that a thread of this process waits in, if any, and the innermost function of this package there;
    else where the main thread is. (Backward runs in threads of its own on a GPU.)"""
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
    """The outermost function of torch.distributed, or the wait for one that was begun before."""
    names = [frame.f_code.co_name for frame in frames if frame.f_code.co_filename.endswith("distributed_c10d.py")]
    if names:
        return names[-1]
    code, line = frames[0].f_code, frames[0].f_lineno or 0  # no line: between two statements
    mine = Path(code.co_filename).is_relative_to(PACKAGE)
    return "wait" if mine and ".wait()" in linecache.getline(code.co_filename, line) else None


def _where(frames: list[FrameType]) -> str:
    """The innermost function of this package, with file and line."""
    for frame in frames:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            return f"{frame.f_code.co_name} ({path.relative_to(PACKAGE.parent)}:{frame.f_lineno})"
    return "outside of this package"


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
