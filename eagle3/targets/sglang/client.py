"""Asks running SGLang servers for hidden states: shares out the work, and goes on without servers that died."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from eagle3.console import Warned
from eagle3.errors import SharedUserError, UserError
from eagle3.states.spool import Spool, Ticket, fail
from eagle3.targets.sglang.asking import ask, server_info
from eagle3.targets.sglang.hook import HookSettings
from eagle3.targets.sglang.installed import require_supported
from eagle3.targets.sglang.version import CONTEXT_RESERVE, REQUIRED_SETTINGS, hook_settings

ANSWER_SECONDS = 3600.0
# A server that answered writes the rows meanwhile. The first ones tell whether they come at all; later ones may have much
# before them on their way.
FIRST_ROWS_SECONDS, ROWS_SECONDS = 60.0, 600.0
LOOK_SECONDS = 0.5
POLL_SECONDS = 0.005
# How long a server that does not answer may take to come back.
MOST_FAILURES = 10
RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0)


def require_capture(
    url: str, settings: HookSettings, aux_layers: Sequence[int], command: str, longest: int | None = None
) -> None:
    """Raises UserError unless the server at `url` captures what this job wants. command: one that starts such a server;
    longest: tokens of the longest sample."""
    info = server_info(url, f"start it, for example: {command}")
    require_supported(str(info.get("version")), url)
    hook = hook_settings(info)
    if hook is None:
        raise SharedUserError(f"target.servers: {url} was started without this project's hook; start it so: {command}")
    taught, wants = (
        "hidden" if one is None else "logits" for one in (hook.get("draft_vocabulary"), settings.draft_vocabulary)
    )
    if taught != wants:
        raise SharedUserError(
            f"target.servers: {url} was started for target.teacher={taught}, this recipe wants {wants}; start it so: {command}"
        )
    context = info.get("context_length")
    if longest and context and longest + CONTEXT_RESERVE > context:
        raise SharedUserError(
            f"target.servers: {url} was started with --context-length {context}, too short for a sample of {longest:,} tokens; "
            f"start it so: {command}; or lower data.max_length"
        )
    found = {name: info.get(name) for name in REQUIRED_SETTINGS} | dict(hook)
    found["aux layers"] = list(info.get("return_aux_hidden_state_layer_ids") or [])
    wanted = {**REQUIRED_SETTINGS, "aux layers": list(aux_layers), **settings._asdict()}
    for name, value in wanted.items():
        if found.get(name) != value:
            raise SharedUserError(
                f"target.servers: {url} was started with {name} {found.get(name)!r}, this recipe wants {value!r}; "
                f"start it so: {command}"
            )


class Request(NamedTuple):
    """ids: of a sample, [T]. there: done when it lies in the spool; its exception is a UserError. failures: how often a server
    gave no answer."""

    ticket: Ticket
    ids: Tensor
    there: "Future[None]"
    failures: int = 0


class Servers:
    """Requests wait in one queue, from which each server takes up to `in_flight` at a time.

    A server that does not answer gets some seconds to come back; then it is left out, and its requests go to the others.
    report: told about that. With no server left all requests fail.
    """

    def __init__(
        self, urls: Sequence[str], folder: Path, in_flight: int, report: Callable[[str], None] = print
    ) -> None:
        assert urls
        self.folder, self.report = folder, report
        self.waiting: deque[Request] = deque()
        self.changed = threading.Condition()
        self.live = set(urls)
        self.closed = self.rows_came = False
        self.lost: str | None = None
        for url in urls:
            for _ in range(in_flight):
                threading.Thread(target=self._serve, args=(url,), name=f"ask {url}", daemon=True).start()

    def request(self, request: Request) -> None:
        """Ask for a sample; at once where it was asked for before."""
        with self.changed:
            if self.lost:
                request.there.set_exception(SharedUserError(self.lost))
                return
            add = self.waiting.appendleft if request.failures else self.waiting.append
            add(request)
            self.changed.notify()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _serve(self, url: str) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closed or self.waiting or url not in self.live)
                if self.closed or url not in self.live:
                    return
                request = self.waiting.popleft()
            try:
                self._fetch(url, request)
                request.there.set_result(None)
            except UserError as error:
                request.there.set_exception(error)
            except OSError as error:
                self._again(url, request, error)
                if not self._comes_back(url):
                    self._leave_out(url, error)
                    return
            except Exception as error:  # else whoever waits for it would wait for ever
                request.there.set_exception(
                    UserError(f"{url}: {error!r}; this is a mistake of this project, report it")
                )
                raise

    def _again(self, url: str, request: Request, error: OSError) -> None:
        request = request._replace(failures=request.failures + 1)
        if request.failures < MOST_FAILURES:
            self.request(request)
            return
        request.there.set_exception(
            UserError(
                f"{url}: gave no answer to a sample of {request.ticket.tokens:,} tokens, for the {MOST_FAILURES}th time "
                f"({error}); look at the server's log, and lower target.memory_fraction or the sample's length"
            )
        )

    def _fetch(self, url: str, request: Request) -> None:
        ticket = request.ticket
        body = {
            "rid": ticket.text,
            "input_ids": request.ids.tolist(),
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        }
        index, failed = self.folder / ticket.index, self.folder / ticket.mark("failed")
        if index.exists():  # a server made it whose answer was lost
            return
        answer = ask(url, "/generate", body, timeout=ANSWER_SECONDS).get("meta_info", {})
        if answer.get("finish_reason", {}).get("type") == "abort":
            raise OSError(f"aborted: {answer['finish_reason'].get('message')}")
        answered = looked = time.monotonic()
        while not index.exists():
            with suppress(FileNotFoundError):
                raise UserError(f"{url}: {failed.read_text(encoding='utf-8')}")
            if self.closed:
                return
            now = time.monotonic()
            if self.rows_came and now - answered > ROWS_SECONDS:
                raise OSError(f"answered, but left no rows within {ROWS_SECONDS:.0f} s")
            if not self.rows_came and now - answered > FIRST_ROWS_SECONDS:
                raise UserError(
                    f"{url}: answered, but left no rows in {self.folder}; target.spool must be the same folder for the "
                    "server and for this process, and both must be run by one user (it computed "
                    f"{answer.get('prompt_tokens')} tokens)"
                )
            if now - looked > LOOK_SECONDS:
                looked = now
                os.listdir(self.folder.parent)  # a network file system then looks again at what it took for absent
                ask(url, "/model_info")  # OSError where the server died: rows that it had not written are lost
            time.sleep(POLL_SECONDS)
        self.rows_came = True

    def _comes_back(self, url: str) -> bool:
        for seconds in RETRY_SECONDS:
            time.sleep(seconds)
            if self.closed or url not in self.live:
                return False
            with suppress(OSError):
                ask(url, "/model_info", timeout=5)
                return True
        return False

    def _leave_out(self, url: str, error: OSError) -> None:
        with self.changed:
            if url not in self.live or self.closed:
                return
            self.live.discard(url)
            if self.live:
                self.report(Warned(f"{url} does not answer ({error}): left out; {len(self.live)} servers go on"))
            else:
                self.lost = (
                    f"target.servers: no server is left ({url}: {error}); start one and continue: capture.py goes on where it "
                    "stopped, train.py with --resume"
                )
                for request in self.waiting:
                    request.there.set_exception(SharedUserError(self.lost))
                self.waiting.clear()
            self.changed.notify_all()


def require_room(tokens: int, size: int, most_bytes: int) -> None:
    """UserError where a sample of so many tokens, `size` bytes in the spool, never fits a share of `most_bytes`."""
    if size > most_bytes:
        raise SharedUserError(
            f"target.spool_gib: leaves this process {most_bytes / 2**30:.3g} GiB, but a sample of {tokens:,} tokens takes "
            f"{size / 2**30:.3g}; set it {1.01 * size / most_bytes:.3g} times as large, or lower data.max_length"
        )


class Producer:
    """Asks for samples in the order given, as far as the spool has room; readers make room by being done.

    most_bytes: of samples in the spool or on their way to it. readers: who read every sample; where there are none, the
    caller says `release`.
    """

    def __init__(self, servers: Servers, spool: Spool, most_bytes: int, readers: int) -> None:
        self.servers, self.spool, self.most_bytes, self.readers = servers, spool, most_bytes, readers
        self.asked: deque[tuple[Request, int]] = deque()  # with their bytes; they wait for room
        self.held: dict[Ticket, int] = {}  # bytes of what is in the spool, or on its way
        self.lock = threading.Lock()
        self.closed = False
        if readers:
            threading.Thread(target=self._reap, name="reap", daemon=True).start()

    def ask(self, ticket: Ticket, ids: Tensor, size: int) -> "Future[None]":
        """Done when the sample is there. size: its bytes in the spool. Raises UserError where it never fits."""
        require_room(ticket.tokens, size, self.most_bytes)
        there: Future[None] = Future()
        there.add_done_callback(partial(self._tell_readers, ticket))
        with self.lock:
            self.asked.append((Request(ticket, ids, there), size))
            self._use_room()
        return there

    def release(self, ticket: Ticket) -> None:
        """Delete a sample and use its room."""
        self.spool.remove(ticket, self.readers)
        with self.lock:
            self.held.pop(ticket, None)
            self._use_room()

    def close(self) -> None:
        self.closed = True
        self.servers.close()

    def _use_room(self) -> None:
        """Under the lock."""
        while self.asked and sum(self.held.values()) + self.asked[0][1] <= self.most_bytes:
            request, size = self.asked.popleft()
            self.held[request.ticket] = size
            self.servers.request(request)

    def _tell_readers(self, ticket: Ticket, done: "Future[None]") -> None:
        """Of a sample that failed."""
        try:
            if error := done.exception():
                fail(self.spool.path, ticket, str(error))
        except OSError:
            self.spool.close()  # readers then see that its owner is gone

    def _reap(self) -> None:
        while not self.closed:
            with self.lock:
                held = list(self.held)
            for ticket in held:
                if self.spool.readers(ticket, self.readers) == self.readers:
                    with suppress(OSError):  # then in the next round
                        self.release(ticket)
            time.sleep(POLL_SECONDS)
