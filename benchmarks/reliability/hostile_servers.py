"""Servers that hang, flood or answer nonsense, and servers whose hidden states are wrong or become so.

Nothing that they give can be used, so a launcher that ends well has not looked: that counts as silently wrong. Run as a
script, this is such a server: hostile_servers.py WAY [TEXT]. It prints its URL.
"""

import gzip
import json
import random
import socketserver
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Stated in docs/reliability.md: seconds for what a server says of itself, of an endpoint and of a capturing server.
ENDPOINT_SECONDS, SERVER_SECONDS = 10, 30
START = 120  # seconds that a launcher needs for its own start, on a busy machine
MOST_MIB = 1500  # of a launcher that reads from a server; PyTorch and its own data included
TIMEOUT = 5  # --timeout of regenerate.py, which tries four times and waits in between
OK = b"HTTP/1.1 200 OK\r\n"
LONG = {
    "a header, one byte at a time": OK + b"X: " + b"x" * 10_000,
    "a body, one byte at a time": OK + b"Content-Length: 10000\r\n\r\n" + b" " * 10_000,
    "nothing": b" " * 10_000,
}
ENDLESS = {
    "endless headers": (OK, b"X: y\r\n" * 10_000),
    "an endless body": (OK + b"\r\n", b" " * 100_000),
    "endless chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n", (b"3e8\r\n" + b" " * 1000 + b"\r\n") * 100),
    "an endless error": (b"HTTP/1.1 500 No\r\n\r\n", b" " * 100_000),
}
BOMB, TEXT, CHAT = "a body that expands to 2 GiB", "text", "models, and then:"
NONSENSE = ["[]", "null", "7", '"text"', "{", "[" * 100_000, "9" * 100_000]
HOOKS = [{"name": "eagle3-capture", "config": {}}]
SERVER_INFOS = [
    {"version": []},
    {"version": "0.5.23", "forward_hooks": HOOKS, "context_length": "x"},
    {"version": "0.5.23", "forward_hooks": HOOKS, "launch_command": 'python "unclosed'},
    {"version": "0.5.23", "forward_hooks": [[]]},
    {"version": "0.5.23", "forward_hooks": [{"name": "eagle3-capture", "config": 5}]},
]
MODELS = [{"data": 5}, {"data": [5]}, {"data": [{"id": None}]}, {"data": [{"id": [1]}]}]
# Of capture_server.py, and from which sample on: the first is that of the start.
WRONG = [
    ("argmax beyond the vocabulary", 1),
    ("a negative argmax", 1),
    ("a log-sum-exp of NaN", 1),
    ("an infinite log-sum-exp", 1),
    ("other weights", 0),
    ("other weights", 8),
]


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        way, *text = sys.argv[1:]
        path = self.rfile.readline().split()[1]
        if way == CHAT and path == b"/v1/models":
            return self.whole(b'{"data": [{"id": "tiny"}]}')
        with suppress(OSError):
            self.misbehave(text.pop(0) if way == CHAT else way, *text)
        return None

    def misbehave(self, way: str, text: str = "") -> None:
        if way in LONG:
            time.sleep(1e6 if way == "nothing" else 0)
            for place in range(len(LONG[way])):
                self.wfile.write(LONG[way][place : place + 1])
                time.sleep(0 if place < 40 else 1)
        elif way in ENDLESS:
            self.wfile.write(ENDLESS[way][0])
            while True:
                self.wfile.write(ENDLESS[way][1])
        elif way == BOMB:
            self.whole(gzip.compress(bytes(2 << 30), 1), b"Content-Encoding: gzip\r\n")
        else:
            self.whole(text.encode())

    def whole(self, body: bytes, further: bytes = b"") -> None:
        self.wfile.write(OK + further + b"Content-Length: %d\r\n\r\n" % len(body) + body)


if __name__ == "__main__":
    socketserver.ThreadingTCPServer.daemon_threads = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Handler) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()

from ground import Ground  # noqa: E402  (the server does without)
from launching import Ended  # noqa: E402
from tries import Case, Verdict, judge  # noqa: E402


def cases(ground: Ground, dice: random.Random) -> Iterator[Case]:
    broken = [(way,) for way in (*LONG, *ENDLESS, BOMB)]
    for words in [*broken, *((TEXT, text) for text in (*NONSENSE, *map(json.dumps, MODELS)))]:
        yield Case(f"regenerate.py, /v1/models: {_short(words)}", lambda words=words: _endpoint(ground, words))
    for words in [*broken, *((TEXT, text) for text in NONSENSE)]:
        yield Case(f"regenerate.py, chat: {_short(words)}", lambda words=words: _endpoint(ground, (CHAT, *words)))
    for words in [*broken, *((TEXT, text) for text in (*NONSENSE, *map(json.dumps, SERVER_INFOS)))]:
        for launcher in ("train", "capture") if len(words) == 1 else (dice.choice(("train", "capture")),):
            yield Case(
                f"{launcher}.py, /server_info: {_short(words)}",
                lambda launcher=launcher, words=words: _settings(ground, launcher, words),
            )
    for launcher in ("train", "capture"):
        yield Case(f"{launcher}.py, rows: as they are", lambda launcher=launcher: _rows(ground, launcher, "none", 0))
        for flaw, after in WRONG:
            name = f"{launcher}.py, rows: {flaw} after {after} samples"
            yield Case(name, lambda launcher=launcher, wrong=(flaw, after): _rows(ground, launcher, *wrong))


def _short(words: tuple[str, ...]) -> str:
    return " ".join(words)[:60]


def _verdict(ended: Ended) -> Verdict:
    verdict = judge(ended, lambda: "taken as if it were right")
    if verdict.outcome == "refused" and ended.peak_mib > MOST_MIB:
        return Verdict("broken promise", f"{ended.peak_mib:,.0f} MiB; {verdict.detail}")
    return verdict


@contextmanager
def _serving(ground: Ground, script: str, *words: str) -> Iterator[str]:
    """The URL of a server in a process of its own."""
    process = ground.launchers.start(str(Path(__file__).with_name(script)), *words)
    try:
        assert ground.launchers.wait_until(lambda: process.out.read_bytes().endswith(b"\n"), [process])
        yield process.out.read_text().strip()
    finally:
        ground.launchers.finish([process], 0)


def _endpoint(ground: Ground, words: tuple[str, ...]) -> Verdict:
    folder = ground.empty("hostile_servers")
    ground.recipe(folder)
    data = ("--data", str(folder / "conversations.jsonl"), "--limit", "1", "--out", str(folder / "answers.jsonl"))
    with _serving(ground, "hostile_servers.py", *words) as url:
        limit = START + (4 * TIMEOUT + 15 + ENDPOINT_SECONDS if words[0] == CHAT else ENDPOINT_SECONDS)
        call = (*data, "--endpoint", url, "--timeout", str(TIMEOUT))
        return _verdict(ground.launchers.run("launchers/regenerate.py", *call, limit=limit))


def _settings(ground: Ground, launcher: str, words: tuple[str, ...]) -> Verdict:
    folder = ground.empty("hostile_servers")
    with _serving(ground, "hostile_servers.py", *words) as url:
        recipe = _recipe(ground, folder, url)
        return _verdict(getattr(ground, launcher)(recipe, limit=START + SERVER_SECONDS))


def _rows(ground: Ground, launcher: str, flaw: str, after: int) -> Verdict:
    folder = ground.empty("hostile_servers")
    words = (str(ground.target()), str(folder / "spool"), flaw, "--after", str(after))
    with _serving(ground, "capture_server.py", *words) as url:
        ended = getattr(ground, launcher)(_recipe(ground, folder, url))
        return judge(ended) if flaw == "none" else _verdict(ended)


def _recipe(ground: Ground, folder: Path, url: str) -> Path:
    return ground.recipe(folder, target={"backend": "sglang", "servers": [url], "spool": str(folder / "spool")})
