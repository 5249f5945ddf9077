"""Request hidden states from running SGLang servers, which share the work. Servers that die are dropped."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from eagle3.console import Warned, counted
from eagle3.durable import writing
from eagle3.errors import SharedUserError, UserError
from eagle3.servers import TooSlow
from eagle3.states.spool import REMEDY, Spool, Ticket, WantedRows, fail, want
from eagle3.targets.sglang.asking import Generated, ModelInfo, ask
from eagle3.targets.sglang.version import ServerDiffers

# How long one sample may take, waiting behind others included; and the short document that servers are compared by.
ANSWER_SECONDS, PROBE_SECONDS = 3600.0, 600.0
# How long a server may take to write a sample's rows after it has answered. The first sample shows whether rows arrive
# at all, so it gets less time; later ones may queue.
FIRST_ROWS_SECONDS, ROWS_SECONDS = 60.0, 600.0
LOOK_SECONDS = 0.5
POLL_SECONDS = 0.005
# How often to look after a server that is working, how long it may be silent, and how long a request may take before
# another server is asked, too: this many seconds, and this many times as long as the slowest of the last requests.
WATCH_SECONDS, SILENT_SECONDS = 5.0, 60.0
LEAST_PATIENCE, PATIENCE, USUAL_REQUESTS = 60.0, 4, 64
# If servers do not answer: the most failures per request, and the seconds between attempts to reach a server.
MOST_FAILURES = 10
RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0)
COMPARISON_SECONDS = 600.0  # between two comparisons of a working server with what it was at the start


class Request(NamedTuple):
    """A request for one sample."""

    ticket: Ticket
    ids: Tensor  # [T], token ids of the sample
    wanted: WantedRows
    arrived: "Future[None]"  # done when the sample is in the spool; its exception is a UserError
    failures: int = 0  # how many times a server did not answer it
    slow: str | None = None  # a server that has been asked, and takes too long


class Servers:
    """A queue of requests; each server works on up to `in_flight` of them at a time.

    A server that fails gets a few seconds to come back, and one that is silent SILENT_SECONDS. Then it is dropped,
    which is reported through `report`, and the others take over its requests. If no server is left, all requests fail.
    If a request takes much longer than usual, another server is asked, too, and the first answer counts. One that gets
    no answer within `answer_seconds` fails.

    check: raises ServerDiffers if the server at a URL is not what it was at the start, UserError if that cannot be told
    remedy: for rows that came after a server had changed
    """

    def __init__(
        self,
        urls: Sequence[str],
        folder: Path,
        in_flight: int,
        report: Callable[[str], None] = print,
        answer_seconds: float = ANSWER_SECONDS,
        check: Callable[[str], None] = lambda url: None,
        remedy: str = "",
    ) -> None:
        self.folder, self.report, self.answer_seconds = folder, report, answer_seconds
        self.waiting: deque[Request] = deque()
        self.asked: dict[tuple[str, Ticket], tuple[Request, float]] = {}  # by server; with the time of asking
        self.seconds: deque[float] = deque(maxlen=USUAL_REQUESTS)  # that the last answers took
        self.changed = threading.Condition()
        self.live = set(urls)
        self.closed = self.rows_came = False
        self.failure: str | None = None
        # Called with a ticket whose sample came again, after another server's.
        self.discard: Callable[[Ticket], None] = lambda ticket: None
        self.check, self.remedy = check, remedy
        self.right_at = dict.fromkeys(urls, _now())  # when each server was last what it was at the start
        for url in urls:
            for work in (self._watch, *[self._serve] * in_flight):
                threading.Thread(target=work, args=(url,), name=f"ask {url}", daemon=True).start()

    def request(self, request: Request) -> None:
        """Queue a request. One that was asked before goes to the front."""
        with self.changed:
            if self.failure:
                self._finish(request, SharedUserError(self.failure))
                return
            enqueue = self.waiting.appendleft if request.failures or request.slow else self.waiting.append
            enqueue(request)
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _finish(self, request: Request, error: Exception | None = None) -> None:
        try:
            if error:
                request.arrived.set_exception(error)
            else:
                request.arrived.set_result(None)
        except InvalidStateError:  # another server was faster
            self.discard(request.ticket)

    def _next(self, url: str) -> Request | None:
        """Waits for a request that this server may take. None if it is to end."""

        def fitting() -> Request | None:
            return next((request for request in self.waiting if request.slow != url), None)

        with self.changed:
            request = self.changed.wait_for(lambda: self.closed or url not in self.live or fitting())
            if self.closed or url not in self.live:
                return None
            self.waiting.remove(request)
            self.asked[url, request.ticket] = request, time.monotonic()
            return request

    def _serve(self, url: str) -> None:
        while request := self._next(url):
            began = time.monotonic()
            try:
                if not request.arrived.done():
                    self._fetch(url, request)
                    self.seconds.append(time.monotonic() - began)
                self._finish(request)
            except UserError as error:
                self._finish(request, error)
            except OSError as error:
                if not self._comes_back(url):
                    self._leave_out(url, error)  # unless it was silent, and others have taken over already
                    return
                self._again(url, request, error)
            except Exception as error:  # otherwise its caller would wait forever
                self._finish(request, UserError(f"{url}: {error!r}; this is a bug in this project, please report it"))
                raise
            finally:
                with self.changed:
                    self.asked.pop((url, request.ticket), None)

    def _watch(self, url: str) -> None:
        """Looks after a server while it works: drops it if it is silent, and asks another one, too, if it is slow."""
        heard = compared = time.monotonic()
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closed or url not in self.live, WATCH_SECONDS)
                if self.closed or url not in self.live:
                    return
                asked = [entry for (server, _), entry in self.asked.items() if server == url]
                others = len(self.live) > 1
            if not asked:
                heard = time.monotonic()
                continue
            try:
                ask(url, "/model_info", ModelInfo, timeout=SILENT_SECONDS / 3)
                heard = time.monotonic()
            except (OSError, UserError) as error:
                if time.monotonic() - heard > SILENT_SECONDS:
                    self._leave_out(url, error)
                    return
            if time.monotonic() - compared > COMPARISON_SECONDS:
                self.compare(url)
                compared = time.monotonic()
            patience = max(LEAST_PATIENCE, PATIENCE * max(self.seconds, default=0.0))
            for request, began in asked if others else ():
                if request.slow is None and time.monotonic() - began > patience:
                    slow = request._replace(slow=url)
                    with self.changed:
                        if (url, request.ticket) in self.asked:  # otherwise it has just been answered
                            self.asked[url, request.ticket] = slow, began
                            self.request(slow)

    def compare(self, url: str) -> None:
        """Let all requests fail if a server has changed."""
        began = _now()
        try:
            self.check(url)
            self.right_at[url] = began
        except ServerDiffers as error:
            self.fail(f"{error}; it was right at {self.right_at[url]}: {self.remedy}")
        except UserError as error:
            self.report(Warned(f"{url}: was not compared with what it was at the start ({error})"))

    def compare_all(self) -> None:
        """Raises UserError if a server has changed, now or earlier."""
        for url in sorted(self.live):
            self.compare(url)
        if self.failure:
            raise SharedUserError(self.failure)

    def _again(self, url: str, request: Request, error: OSError) -> None:
        request = request._replace(failures=request.failures + 1)
        if request.failures < MOST_FAILURES:
            self.request(request)
            return
        self._finish(
            request,
            UserError(
                f"{url}: gave no answer to a sample of {request.ticket.tokens:,} tokens, for the {MOST_FAILURES}th "
                f"time ({error}); look at the server's log, and lower target.memory_fraction or the sample's length"
            ),
        )

    def _fetch(self, url: str, request: Request) -> None:
        ticket = request.ticket
        with writing(self.folder.parent, REMEDY):
            want(self.folder, ticket, request.wanted)
        body = {
            "rid": ticket.text,
            "input_ids": request.ids.tolist(),
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        }
        shard, failure_note = self.folder / ticket.shard, self.folder / ticket.mark("failed")
        if shard.exists():  # a server had written it, but its answer was lost
            return
        try:
            answer = ask(url, "/generate", Generated, body, timeout=self.answer_seconds)
        except TooSlow as error:
            raise UserError(
                f"{url}: a sample of {ticket.tokens:,} tokens: {error}; look at the server's log, and lower "
                "target.in_flight or name more servers"
            ) from error
        if answer.ended_by == "abort":
            raise OSError(f"aborted: {answer.message}")
        answer_time = last_look = time.monotonic()
        while not shard.exists():
            with suppress(FileNotFoundError):
                raise UserError(f"{url}: {failure_note.read_text(encoding='utf-8')}")
            if self.closed or request.arrived.done():  # by another server, so that this one's rows may be dropped
                return
            now = time.monotonic()
            if self.rows_came and now - answer_time > ROWS_SECONDS:
                raise OSError(f"answered, but left no rows within {ROWS_SECONDS:.0f} s")
            if not self.rows_came and now - answer_time > FIRST_ROWS_SECONDS:
                raise UserError(
                    f"{url}: answered, but left no rows in {self.folder}; target.spool must be the same folder for the "
                    "server and for this process, and both must be run by one user (it computed "
                    f"{answer.prompt_tokens} tokens)"
                )
            if now - last_look > LOOK_SECONDS:
                last_look = now
                os.listdir(self.folder.parent)  # makes a network file system refresh its cached listing
                # Raises OSError if the server died, because its unwritten rows are then lost.
                ask(url, "/model_info", ModelInfo)
            time.sleep(POLL_SECONDS)
        self.rows_came = True

    def _comes_back(self, url: str) -> bool:
        for seconds in RETRY_SECONDS:
            time.sleep(seconds)
            if self.closed or url not in self.live:
                return False
            with suppress(OSError, UserError):
                ask(url, "/model_info", ModelInfo, timeout=5)
                return True
        return False

    def _leave_out(self, url: str, error: OSError) -> None:
        with self.changed:
            if url not in self.live or self.closed:
                return
            self.live.discard(url)
            asked = [request for (server, _), (request, _) in self.asked.items() if server == url]
            if self.live:
                self.report(
                    Warned(f"{url} does not answer ({error}): left out; {counted(len(self.live), 'server')} left")
                )
                elsewhere = {request.ticket for request in self.waiting}
                elsewhere |= {ticket for server, ticket in self.asked if server in self.live}
                self.waiting.extendleft(
                    request._replace(slow=url) for request in asked if request.ticket not in elsewhere
                )
            else:
                self.fail(
                    f"target.servers: no server is left ({url}: {error}); start one and continue: capture.py goes on "
                    "where it stopped, train.py does with --resume"
                )
            self.changed.notify_all()

    def fail(self, reason: str) -> None:
        """Let every request fail, those to come included."""
        with self.changed:
            self.failure = reason
            for request in (*self.waiting, *(request for request, _ in self.asked.values())):
                self._finish(request, SharedUserError(reason))
            self.waiting.clear()


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S%z")


def require_spool_room(tokens: int, size: int, most_bytes: int) -> None:
    """Raises UserError if a sample of this many tokens, which takes `size` bytes, cannot fit into `most_bytes`."""
    if size > most_bytes:
        raise SharedUserError(
            f"target.spool_gib: leaves this process {most_bytes / 2**30:.3g} GiB, but a sample of {tokens:,} tokens "
            f"takes {size / 2**30:.3g}; set it {1.01 * size / most_bytes:.3g} times as large, or lower data.max_length"
        )


class Producer:
    """Requests samples in the given order, each as soon as the spool has room for it. Readers that finish with a sample
    free its room.

    most_bytes: limit on the samples in the spool or on their way to it
    readers: how many processes read every sample; if 0, the caller must `release` samples
    """

    def __init__(self, servers: Servers, spool: Spool, most_bytes: int, readers: int) -> None:
        self.servers, self.spool, self.most_bytes, self.readers = servers, spool, most_bytes, readers
        self.backlog: deque[tuple[Request, int]] = deque()  # requests waiting for room, each with its size in bytes
        # Samples in the spool or on their way to it, each with its future and its size in bytes.
        self.samples: dict[Ticket, tuple[Future[None], int]] = {}
        self.lock = threading.Lock()
        servers.discard = self._discard
        if readers:
            threading.Thread(target=self._reap, name="reap", daemon=True).start()

    def ask(self, ticket: Ticket, ids: Tensor, wanted: WantedRows, size: int) -> "Future[None]":
        """Request a sample, of which the wanted rows take `size` bytes. The future is done when the sample is in the
        spool. Raises UserError if the sample can never fit."""
        require_spool_room(ticket.tokens, size, self.most_bytes)
        future: Future[None] = Future()
        future.add_done_callback(partial(self._tell_readers, ticket))
        with self.lock:
            self.backlog.append((Request(ticket, ids, wanted, future), size))
            self._use_room()
        return future

    def release(self, ticket: Ticket) -> None:
        """Delete a sample and use its room for the next requests."""
        self.spool.remove(ticket, self.readers)
        with self.lock:
            self.samples.pop(ticket, None)
            self._use_room()

    def _discard(self, ticket: Ticket) -> None:
        """Delete a sample that came again, unless it is in use."""
        if ticket not in self.samples:  # without the lock: `Servers.fail` calls this while it holds its own
            self.spool.remove(ticket, self.readers)

    def close(self) -> None:
        self.servers.close()

    def _use_room(self) -> None:
        """Send the requests for which there is room now. The caller holds the lock."""
        taken = sum(size for _, size in self.samples.values())
        while self.backlog and taken + self.backlog[0][1] <= self.most_bytes:
            request, size = self.backlog.popleft()
            self.samples[request.ticket] = request.arrived, size
            taken += size
            self.servers.request(request)

    def _tell_readers(self, ticket: Ticket, future: "Future[None]") -> None:
        """Leave a note for the readers if the sample failed."""
        try:
            if error := future.exception():
                fail(self.spool.path, ticket, str(error))
        except OSError:
            self.spool.close()  # the readers will notice that the spool's owner is gone

    def _reap(self) -> None:
        """Release what all readers have read. They may be done before the thread that asked has seen the sample, which
        would then wait for it in vain: so not before its future is done."""
        while not self.servers.closed:
            with self.lock:
                tickets = [ticket for ticket, (arrived, _) in self.samples.items() if arrived.done()]
            for ticket in tickets:
                if self.spool.readers(ticket, self.readers) == self.readers:
                    with suppress(OSError):  # try again in the next round
                        self.release(ticket)
            time.sleep(POLL_SECONDS)
