"""Servers that hang, flood or answer nonsense: every request ends at its deadline, within its memory, in one line.

The server is a real one on this machine. The route that is asked for says how it misbehaves.
"""

import gzip
import socketserver
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress

import pytest

from eagle3.errors import SharedUserError, UserError
from eagle3.regeneration.endpoint import Answer, endpoint_urls, find_model
from eagle3.servers import MOST_BYTES, Declined, MalformedAnswer, NoAnswer, TooSlow, Typed, ask_once
from eagle3.targets.sglang.asking import Generated, ModelInfo, ServerInfo, reported

SECONDS = 0.5
OK = b"HTTP/1.1 200 OK\r\n"
BOMB = gzip.compress(bytes(100 << 20), 1)


# Route -> what is sent at once, what then comes a byte at a time, and what comes again and again after that.
ROUTES = {
    "slow-headers": (OK, b"X: " + b"x" * 10_000, b""),
    "slow-body": (OK + b"Content-Length: 10000\r\n\r\n", b" " * 10_000, b""),
    "endless-headers": (OK, b"", b"X: y\r\n" * 10_000),
    "endless-informational": (b"", b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "endless-body": (OK + b"\r\n", b"", b" " * 100_000),
    "endless-chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"", b"186a0\r\n" + b" " * 100_000 + b"\r\n"),
    "endless-error": (b"HTTP/1.1 500 No\r\n\r\n", b"", b" " * 100_000),
    "bomb": (OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB, b"", b""),
    "cut": (OK + b"Content-Length: 10\r\n\r\n{", b"", b""),
    "no-http": (b"hello\r\n\r\n", b"", b""),
    "redirect": (b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n", b"", b""),
}


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        route = self.rfile.readline().split()[1].decode().strip("/").split("/")[0]
        self.server.asked.append(route)
        with suppress(OSError):  # the client has had enough
            if route == "silent":
                self.rfile.read()
            body = self.server.body
            answer = (OK + b"Content-Length: %d\r\n\r\n" % len(body) + body, b"", b"")
            head, slow, endless = ROUTES.get(route, answer)
            self.wfile.write(head)
            for place in range(len(slow)):
                time.sleep(SECONDS / 20)
                self.wfile.write(slow[place : place + 1])
            while endless:
                self.wfile.write(endless)


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.body = b"{}"
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as started:
        threading.Thread(target=started.serve_forever, args=(0.01,), daemon=True).start()
        yield started
        started.shutdown()


class Anything(Typed):
    pass


@pytest.mark.parametrize("route", ["slow-headers", "slow-body", "silent", "endless-informational"])
def test_an_answer_that_takes_too_long_ends_at_the_deadline_however_often_a_byte_comes(server, route):
    with pytest.raises(TooSlow, match=f"no whole answer within {SECONDS} s"):
        ask_once(f"{server.url}/{route}", Anything, SECONDS)


@pytest.mark.parametrize(
    "route", ["endless-headers", "endless-body", "endless-chunks", "endless-error", "bomb", "cut", "no-http"]
)
def test_what_is_no_whole_answer_is_one_error_and_takes_no_more_memory_than_the_limit(server, route):
    tracemalloc.start()
    try:
        with pytest.raises(NoAnswer) as error:
            ask_once(f"{server.url}/{route}", Anything, 120)
        assert tracemalloc.get_traced_memory()[1] < 4 * MOST_BYTES
    finally:
        tracemalloc.stop()
    assert not isinstance(error.value, TooSlow) and len(str(error.value).splitlines()) == 1


def test_a_redirect_is_not_followed(server):
    with pytest.raises(Declined, match="302: it redirects to /elsewhere"):
        ask_once(f"{server.url}/redirect", Anything, 120)
    assert "elsewhere" not in server.asked


NONSENSE = [b"[]", b"null", b"7", b'"text"', b"{", b"", b"\xff", b"[" * 100_000, b"9" * 100_000]
INFOS = [
    b"{}",
    b'{"version": 5}',
    b'{"version": ""}',
    b'{"version": "0.5.23", "context_length": "x"}',
    b'{"version": "0.5.23", "context_length": -1}',
    b'{"version": "0.5.23", "launch_command": "python \\"unclosed"}',
    b'{"version": "0.5.23", "forward_hooks": [[]]}',
    b'{"version": "0.5.23", "forward_hooks": [{"name": "eagle3-capture", "config": 5}]}',
    b'{"version": "0.5.23", "return_aux_hidden_state_layer_ids": 1}',
]
MODELS = [b"{}", b'{"data": 5}', b'{"data": [5]}', b'{"data": [{"id": null}]}', b'{"data": [{"id": ""}]}']
GENERATED = [b"{}", b'{"meta_info": null}', b'{"meta_info": {"finish_reason": []}}', b'{"meta_info": []}']
COMPLETIONS = [
    b"{}",
    b'{"choices": []}',
    b'{"choices": [{"finish_reason": null, "message": {}}]}',
    b'{"choices": [{"finish_reason": "stop", "message": {"content": 5}}]}',
    b'{"choices": [{"finish_reason": "stop", "message": {"tool_calls": [5]}}]}',
    b'{"choices": [{"finish_reason": "stop", "message": {}}], "usage": {"completion_tokens": -1}}',
    b'{"choices": [{"finish_reason": "stop", "message": {"content": "\\ud800"}}]}',
]


@pytest.mark.parametrize(
    ("kind", "bodies"),
    [(ServerInfo, INFOS), (ModelInfo, [b'{"model_path": 5}']), (Generated, GENERATED), (Answer, COMPLETIONS)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_answer_of_another_type_is_malformed_and_says_where(server, kind, bodies):
    for server.body in [*NONSENSE, *bodies]:
        with pytest.raises(MalformedAnswer):
            ask_once(f"{server.url}/body", kind, 120)


def test_nonsense_from_a_capture_server_or_an_endpoint_is_one_line_with_the_remedy(server):
    for server.body in [*NONSENSE, *INFOS]:
        with pytest.raises(SharedUserError, match=f"{server.url} does not answer /server_info .*--print-server"):
            reported(server.url, ServerInfo)
    for server.body in [*NONSENSE, *MODELS]:
        with pytest.raises(UserError, match="no endpoint can be used .*start a server, or fix the address") as error:
            find_model(endpoint_urls([server.url]), None, None, print)
        assert len(str(error.value).splitlines()) == 1
