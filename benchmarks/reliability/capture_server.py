"""Stands in for an SGLang server that captures hidden states, with a flaw of its own, for what SGLang itself would not
do: capture_server.py TARGET SPOOL FLAW [--after N] [--aux LAYER LAYER LAYER].

It prints its URL and then answers as a server does that was started with the line of capture.py --print-server. Rows
are computed by transformers and written by the project's own class, as the hook in SGLang writes them.
"""

import argparse
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from eagle3.states.rows import Rows
from eagle3.states.spool import Ticket, wanted_rows
from eagle3.states.spool_writer import RequestRows, SpoolWriter
from eagle3.targets.checkpoint import fingerprint
from eagle3.targets.sglang.asking import TESTED
from eagle3.targets.sglang.hook import HookSettings
from eagle3.targets.sglang.version import HOOK, REQUIRED_SETTINGS
from eagle3.targets.transformers import load_target


def _with(column: str, value: float) -> Callable[[Rows], Rows]:
    """In every row."""

    def change(rows: Rows) -> Rows:
        filled = torch.full_like(getattr(rows.teacher, column), value)
        return Rows(rows.aux, replace(rows.teacher, **{column: filled}))

    return change


# What becomes of the rows that transformers computed.
FLAWS: dict[str, Callable[[Rows], Rows]] = {
    "none": lambda rows: rows,
    "argmax beyond the vocabulary": _with("argmax", 1 << 20),
    "a negative argmax": _with("argmax", -1),
    "a log-sum-exp of NaN": _with("logsumexp", float("nan")),
    "an infinite log-sum-exp": _with("logsumexp", float("inf")),
    "other weights": lambda rows: Rows(rows.aux.roll(1, -1), rows.teacher),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("spool", type=Path)
    parser.add_argument("flaw", choices=FLAWS)
    parser.add_argument("--after", type=int, default=0, metavar="N", help="only after N samples")
    parser.add_argument("--aux", type=int, nargs=3, default=[0, 2, 3])
    options = parser.parse_args()
    server = Server(options)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.flaw, self.after, self.count = FLAWS[options.flaw], options.after, 0
        self.target = load_target(options.target, dtype="float32", aux_layers=tuple(options.aux))
        identity = fingerprint(str(options.target))
        self.settings = HookSettings(str(options.spool), "float32", identity, self.target.hidden_size)
        self.writer = SpoolWriter(options.spool, self.settings.encoding)
        self.lock = threading.Lock()
        self.info = REQUIRED_SETTINGS | {
            "version": str(TESTED),
            "dtype": "float32",
            "revision": None,
            "model_path": str(options.target),
            "return_aux_hidden_state_layer_ids": options.aux,
            "forward_hooks": [{"name": HOOK, "config": self.settings._asdict()}],
            "launch_command": "sglang",
        }

    def capture(self, ticket: Ticket, ids: torch.Tensor) -> None:
        with self.lock:
            self.count += 1
            (rows,) = self.target.prefill([ids])
            if self.count > self.after:
                rows = self.flaw(rows)
            job = Path(self.settings.spool) / ticket.job
            wanted = wanted_rows(job, ticket)
            kept = Rows(rows.aux[wanted.seen], rows.teacher[wanted.taught])
            self.writer.take(RequestRows(ticket, 0, 0, slice(0, len(ids)), wanted), ids, kept)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        model = {"model_path": self.server.info["model_path"], "weight_version": "default"}
        self.answer({"/server_info": self.server.info, "/model_info": model}[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.capture(Ticket.parse(body["rid"]), torch.tensor(body["input_ids"]))
        self.answer({"meta_info": {"finish_reason": {"type": "length"}, "prompt_tokens": len(body["input_ids"])}})

    def answer(self, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    main()
