"""Measure how fast capture.py's processes take hidden states out of the spool and store them, and what several gain.

    python benchmarks/capture_processes.py                  lines, and a table in Markdown
    python benchmarks/capture_processes.py --json FILE      one JSON document in FILE as well

Here the servers cost nothing: one stand-in answers every request at once, with links to samples that were written
before. So what is measured is the most that a capture's processes can take from any number of servers. Spool and stores
are in memory (/dev/shm), so that no disk limits them.

Processor seconds are those of the processes that capture, all threads together.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from reporting import headline, origin, positive, table

from eagle3.errors import run_command

CODECS = ("none", "lossless", "fp8")
IN_FLIGHT = 32


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON document there")
    parser.add_argument("--processes", type=positive, nargs="+", default=[1, 2], help="numbers of them to compare")
    parser.add_argument("--samples", type=positive, default=16, help="of each process in a round")
    parser.add_argument("--tokens", type=positive, default=2048, help="of a sample, all supervised")
    parser.add_argument("--hidden", type=positive, default=4096, help="width of the target's hidden states")
    parser.add_argument("--rounds", type=positive, default=3, help="after one to warm up")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where spool and stores are made")
    options = parser.parse_args()
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "folder")}
    document = origin(load_before=os.getloadavg()[0]) | {"settings": settings, "results": measure(options)}
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(_markdown(document))
    return 0


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians over the rounds, for each codec and number of processes."""
    results = []
    with tempfile.TemporaryDirectory(dir=options.folder) as work, stand_in(Path(work), options) as url:
        for codec in CODECS:
            for processes in options.processes:
                rounds = [one_round(Path(work), url, codec, processes, options) for _ in range(options.rounds + 1)][1:]
                result = {
                    "codec": codec,
                    "processes": processes,
                    "gb_per_s": statistics.median(gb / seconds for gb, seconds, _ in rounds),
                    "processor_s_per_gb": statistics.median(processor / gb for gb, _, processor in rounds),
                }
                print(result, flush=True)
                results.append(result)
    return results


def one_round(
    work: Path, url: str, codec: str, processes: int, options: argparse.Namespace
) -> tuple[float, float, float]:
    """GB of rows in the spool, seconds from the first process's start to the last one's end, and processor seconds."""
    context = multiprocessing.get_context("spawn")
    begin = context.Barrier(processes)
    with context.Pool(processes, initializer=_keep, initargs=(begin,)) as pool:
        spans = pool.map(_capture, [(work, url, codec, options)] * processes, chunksize=1)
    size = sum((work / "template" / name).stat().st_size for name in os.listdir(work / "template"))
    seconds = max(end for _, end, _ in spans) - min(start for start, _, _ in spans)
    return processes * size / 1e9, seconds, sum(processor for _, _, processor in spans)


def _keep(begin: Any) -> None:
    """In a new process: what `_capture` waits at."""
    global _begin
    _begin = begin


def _capture(task: tuple[Path, str, str, argparse.Namespace]) -> tuple[float, float, float]:
    """Captures all samples into a store. Returns when it began and ended, and the processor seconds between."""
    from eagle3.states.spool import Spool
    from eagle3.states.store.shard import Encoding
    from eagle3.states.store.writer import StoreWriter
    from eagle3.targets.sglang.client import Producer, Servers
    from eagle3.targets.sglang.target import SGLangTarget

    work, url, codec, options = task
    samples, kept = samples_of(options), Encoding(codec, "bfloat16", options.hidden)
    with (
        Spool(work / "spool", lambda line: None) as spool,
        closing(Producer(Servers([url], spool.path, IN_FLIGHT), spool, 8 << 30, readers=0)) as producer,
        tempfile.TemporaryDirectory(dir=work) as folder,
    ):
        target = SGLangTarget(producer, encoding_of(options), vocab_size=2**15, aux_layers=(1, 2, 3))
        _begin.wait()
        start, processor = time.time(), time.process_time()
        with StoreWriter(folder, {}, kept) as writer:
            for place, parts in target.arriving(samples):
                writer.add(samples[place].id, samples[place].ids, samples[place].loss_mask, parts)
        return start, time.time(), time.process_time() - processor


def samples_of(options: argparse.Namespace) -> list[Any]:
    import torch

    from eagle3.text.samples import Sample

    mask = torch.ones(options.tokens, dtype=torch.bool)
    ids = torch.arange(options.tokens)
    return [Sample(f"{place:032x}", ids + place, mask) for place in range(options.samples)]


def encoding_of(options: argparse.Namespace) -> Any:
    """Of the spool."""
    from eagle3.states.store.shard import Encoding

    return Encoding("none", "bfloat16", options.hidden)


@contextmanager
def stand_in(work: Path, options: argparse.Namespace) -> Iterator[str]:
    """A server, in a process of its own, that answers with links to samples in `work`. Yields its URL."""
    write_samples(work / "template", options)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=_serve, args=(work, there), daemon=True)
    server.start()
    try:
        yield here.recv()
    finally:
        server.kill()
        server.join()


def write_samples(folder: Path, options: argparse.Namespace) -> None:
    """Writes the samples as the hook does, one file each."""
    import torch

    from eagle3.states.rows import Rows
    from eagle3.states.spool import Spool, Ticket, WantedRows, want
    from eagle3.states.spool_writer import RequestRows, SpoolWriter

    folder.mkdir()
    encoding, generator = encoding_of(options), torch.Generator().manual_seed(0)
    aux = torch.randn(options.tokens, 3 * options.hidden, generator=generator).bfloat16()
    last = torch.randn(options.tokens, options.hidden, generator=generator).bfloat16()
    predictions = torch.zeros(options.tokens, dtype=torch.long), torch.ones(options.tokens)
    rows = Rows(aux, encoding.teacher(last, *predictions))
    with Spool(folder.parent / "written", lambda line: None) as spool:
        writer = SpoolWriter(spool.folder, encoding)
        for place, sample in enumerate(samples_of(options)):
            ticket, wanted = Ticket.of(spool.job, f"{place:032x}", options.tokens, 0), WantedRows(sample.loss_mask)
            want(spool.path, ticket, wanted)
            share = RequestRows(ticket, 0, 0, slice(0, options.tokens), wanted)
            writer.take(share, sample.ids, Rows(rows.aux, rows.teacher[wanted.taught]))
        writer.thread.shutdown()
        for path in spool.path.glob("*.safetensors"):
            path.rename(folder / path.name)


def _serve(work: Path, told: Any) -> None:
    from eagle3.states.spool import Ticket

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            ticket = Ticket.parse(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["rid"])
            os.link(work / "template" / ticket.shard, work / "spool" / ticket.job / ticket.shard)
            self._answer({"meta_info": {"finish_reason": {"type": "length"}, "prompt_tokens": ticket.tokens}})

        def _answer(self, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.send(f"http://127.0.0.1:{server.server_port}")
    server.serve_forever()


def _markdown(document: dict[str, Any]) -> str:
    rows = [
        [each["codec"], each["processes"], f"{each['gb_per_s']:.2f}", f"{each['processor_s_per_gb']:.2f}"]
        for each in document["results"]
    ]
    return table(
        headline(document), ["codec of the store", "processes", "GB/s together", "processor seconds per GB"], rows
    )


if __name__ == "__main__":
    run_command(main)
