"""Measure how fast SGLang servers capture hidden states, compared with the same prefill without capture.

    python benchmarks/capture.py                  lines, and a table in Markdown
    python benchmarks/capture.py --json FILE      one JSON document in FILE as well

A Llama with random weights prefills the same documents in five ways, which take turns in every round; medians count:
- `plain`: a server that decodes from token ids, without a radix cache, with CUDA graphs as SGLang has them;
- `unasked`: the capturing server when nothing is to be captured, which shows the cost of SGLang's own auxiliary states
  and of the missing graphs;
- `30%`: the capturing server's rows go through the spool, are read, and are dropped; the last 30% of each document are
  supervised, and only what training reads of it is asked for;
- `all`: the same with everything supervised;
- `store`: the rows of `all` are written to a store.

The goals are 0.95 of plain's rate for 30% and 0.88 for all, in processor time. A capture computes the logits of every
row that teaches, a prefill only the last row's; computing those of all rows alone is timed, too.

Both servers run throughout, and sleep when idle. Processor seconds are those of the server's processes and, separately,
of this process: on a shared CPU they say more than the clock.

The default shape on a GPU is that of Llama-3.1-8B. On a CPU it is a small one: the lm_head's work is the same share of
the layers' work, 8%, but there are some 30 times as many bytes of hidden states per operation. Needs an installed
SGLang, on a CPU in the environment of tests/sglang_cpu. The servers need about 50 GB of a GPU.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from reporting import headline, origin, positive, table

from eagle3.errors import run_command

WAYS = ("plain", "unasked", "30%", "all", "store")
GOALS = {"30%": 0.95, "all": 0.88}
SHARES = {"30%": 0.3, "all": 1.0, "store": 1.0}  # supervised
SHAPES = {
    "cuda": {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "intermediate": 14336, "vocabulary": 128256}
    | {"documents": 64, "tokens": 4096, "in_flight": 32, "chunk_tokens": 8192, "dtype": "bfloat16", "attention": None},
    "cpu": {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 2, "intermediate": 1792, "vocabulary": 4096}
    | {"documents": 32, "tokens": 512, "in_flight": 16, "chunk_tokens": 2048, "dtype": "float32"}
    | {"attention": "torch_native"},
}
LOOK_SECONDS = 0.05


class Round(NamedTuple):
    """The cost of prefilling all documents once."""

    seconds: float  # by the clock
    server: float  # processor seconds of the server
    client: float  # processor seconds of this process


def main() -> int:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = _options(SHAPES[device])
    places = {"spool": str(options.spool), "folder": "given" if options.folder else "temporary"}
    settings = {name: value for name, value in vars(options).items() if name != "json"} | places
    about = origin(sglang=version("sglang"), load_before=os.getloadavg()[0]) | {"settings": settings}
    for results in measure(options, device):  # after every round, because a time limit may end this
        document = about | {"results": results}
        if options.json:
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(_markdown(document))
    return 0


def _options(shape: dict[str, Any]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON document there")
    helps = {
        "documents": "in a round",
        "tokens": "of a document",
        "in_flight": "documents that a server is asked for at a time",
        "chunk_tokens": "of one forward",
    }
    for name, value in shape.items():
        kind = positive if isinstance(value, int) else str
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=value, help=helps.get(name, "of the target")
        )
    parser.add_argument("--spool-dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of captured rows")
    parser.add_argument("--tensor", type=positive, default=1, help="GPUs of each server")
    parser.add_argument("--rounds", type=positive, default=5, help="after one to warm up")
    parser.add_argument("--spool", type=Path, default=Path("/dev/shm"), help="where the spool's folder is made")
    parser.add_argument("--spool-gib", type=float, default=8.0, help="GiB of rows that may wait there")
    parser.add_argument("--folder", type=Path, help="where the stores are written; default: a temporary folder")
    return parser.parse_args()


def measure(options: argparse.Namespace, device: str) -> Iterator[dict[str, Any]]:
    """The figures of all rounds so far, after every round but the first."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (options.documents, options.tokens)
    documents = list(torch.randint(options.vocabulary, shape, generator=generator))
    rounds: dict[str, list[Round]] = {way: [] for way in WAYS}
    logits, loads, most = [], [], 0
    with running(options) as (ways, pids, spool):
        for number in range(options.rounds + 1):
            turn = number % len(WAYS)
            for way in WAYS[turn:] + WAYS[:turn]:
                with watched(spool) as seen:
                    timing = timed(lambda way=way: ways[way](documents), pids[way])
                print(f"round {number}: {way}: {timing}", flush=True)
                if number:
                    rounds[way].append(timing)
                    most = max(most, seen[0])
            if number:
                logits.append(summary_seconds(options, device))
                loads.append(os.getloadavg()[0])
                yield summed_up(rounds, options) | {
                    "logits": logits_share(logits, rounds["plain"], options),
                    "spool": {"most_bytes": most, "bytes_per_token": bytes_per_token(options, 1.0)},
                    "load": loads,
                }


def summed_up(rounds: dict[str, list[Round]], options: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds. A ratio is the median of the rounds' ratios, because both parts of a round's ratio
    suffer from the same other jobs."""
    tokens, ways = options.documents * options.tokens, {}
    for way, timings in rounds.items():
        pairs = list(zip(rounds["plain"], timings, strict=True))
        ways[way] = {
            "tokens_per_s": (rate := tokens / statistics.median(each.seconds for each in timings)),
            "spool_bytes_per_s": rate * bytes_per_token(options, SHARES[way]) if way in SHARES else 0.0,
            "of_plain": statistics.median(plain.seconds / each.seconds for plain, each in pairs),
            "processor_of_plain": statistics.median(plain.server / each.server for plain, each in pairs),
            "server_processor_s": statistics.median(each.server for each in timings),
            "client_processor_s": statistics.median(each.client for each in timings),
            "rounds": [each._asdict() for each in timings],
        }
    reached = {way: ways[way]["processor_of_plain"] >= goal for way, goal in GOALS.items()}
    return {"ways": ways, "goals": GOALS, "reached": reached}


@contextmanager
def running(
    options: argparse.Namespace,
) -> Iterator[tuple[dict[str, Callable[[Sequence[Any]], None]], dict[str, int], Path]]:
    """Start the servers. Yields, for each way, a function that prefills documents and the process id of its server; and
    the job's folder in the spool."""
    from eagle3.draft.derivation import default_aux_layers
    from eagle3.states.spool import Spool
    from eagle3.targets.checkpoint import fingerprint
    from eagle3.targets.sglang.client import Producer, Servers
    from eagle3.targets.sglang.hook import HookSettings
    from eagle3.targets.sglang.server import EngineOptions, SGLangServer
    from eagle3.targets.sglang.target import SGLangTarget
    from eagle3.targets.sglang.version import DECODING_FLAGS, capture_flags

    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
        spool_folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.spool, prefix="capture-"))
        save_config(options, work / "target")
        engine = EngineOptions(
            model=str(work / "target"),
            dtype=options.dtype,
            tensor=options.tensor,
            memory_fraction=0.45,  # of the free memory, for the first server and then for the second
            kv_tokens=max(4 * options.chunk_tokens, 2 * options.tokens),
            attention=options.attention,
            chunk_tokens=options.chunk_tokens,
        )
        settings = HookSettings(spool_folder, options.spool_dtype, fingerprint(work / "target"), options.hidden)
        layers = default_aux_layers(options.layers)
        both = ["--load-format", "dummy"]
        print("starting two servers", flush=True)
        plain = stack.enter_context(SGLangServer(engine, [*DECODING_FLAGS, *both]))
        flags = capture_flags(layers, settings._asdict())
        capturing = stack.enter_context(SGLangServer(engine, [*flags, *both]))
        spool = stack.enter_context(Spool(spool_folder))
        servers = Servers([capturing.url], spool.path, options.in_flight)
        producer = Producer(servers, spool, round(options.spool_gib * 2**30), readers=0)
        stack.callback(producer.close)
        target = SGLangTarget(producer, settings.encoding, vocab_size=options.vocabulary, aux_layers=layers)

        ways = {
            "plain": lambda documents: prefill(plain.url, documents, options.in_flight),
            "unasked": lambda documents: prefill(capturing.url, documents, options.in_flight),
            **capturing_ways(target, options, work),
        }
        pids = {way: (plain if way == "plain" else capturing).process.pid for way in WAYS}
        yield ways, pids, spool.path


def save_config(options: argparse.Namespace, folder: Path) -> None:
    """Writes the config of the target, whose weights the servers make up."""
    from transformers import LlamaConfig

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=2 * options.tokens,
        tie_word_embeddings=False,
    ).save_pretrained(folder)


def capturing_ways(target: Any, options: argparse.Namespace, work: Path) -> dict[str, Callable[[Sequence[Any]], None]]:
    """The ways in which the capturing server's rows are used. work: a folder for stores."""
    from eagle3.states.store.writer import StoreWriter
    from eagle3.text.samples import Sample

    def samples(documents: Sequence[Any], way: str) -> list[Sample]:
        mask = supervised(options, SHARES[way])
        return [Sample(f"{place:032x}", ids, mask) for place, ids in enumerate(documents)]

    def read(documents: Sequence[Any], way: str) -> None:
        for _, parts in target.arriving(samples(documents, way)):
            rows = sum(part.tokens for part in parts)
            assert rows == options.tokens, f"{rows} rows of a document of {options.tokens} tokens"

    def store(documents: Sequence[Any]) -> None:
        asked = samples(documents, "store")
        with tempfile.TemporaryDirectory(dir=work) as folder, StoreWriter(folder, {}, target.encoding) as writer:
            for place, parts in target.arriving(asked):
                writer.add(asked[place].id, asked[place].ids, asked[place].loss_mask, parts)

    return {"30%": partial(read, way="30%"), "all": partial(read, way="all"), "store": store}


def prefill(url: str, documents: Sequence[Any], in_flight: int) -> None:
    """Send requests as a capture's client does, but without the id that tells the hook to capture."""
    from eagle3.targets.sglang.asking import Generated, ask
    from eagle3.targets.sglang.version import greedy_request

    def one(ids: Any) -> None:
        body = greedy_request(ids.tolist(), 1)
        body["sampling_params"]["ignore_eos"] = True
        tokens = ask(url, "/generate", Generated, body, timeout=3600).prompt_tokens
        assert tokens == len(ids), f"{tokens} tokens prefilled of {len(ids)}"

    with ThreadPoolExecutor(in_flight) as pool:
        list(pool.map(one, documents))


def timed(run: Callable[[], None], pid: int) -> Round:
    own, server, began = time.process_time(), processor_seconds(pid), time.perf_counter()
    run()
    seconds = time.perf_counter() - began
    return Round(seconds, processor_seconds(pid) - server, time.process_time() - own)


def processor_seconds(pid: int) -> float:
    """Processor seconds of a process and all its descendants."""
    import psutil

    root, total = psutil.Process(pid), 0.0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@contextmanager
def watched(folder: Path) -> Iterator[list[int]]:
    """Inside the block, a thread keeps looking at `folder`. Yields a list of one number: the most bytes of files seen
    there at a time."""
    most, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            size = 0
            for place, _, names in os.walk(folder):  # ignores folders that vanish meanwhile
                for name in names:
                    with suppress(FileNotFoundError):
                        size += os.stat(os.path.join(place, name)).st_blocks * 512
            most[0] = max(most[0], size)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield most
    finally:
        ended.set()
        watcher.join()


def summary_seconds(options: argparse.Namespace, device: str) -> float:
    """Seconds for the argmax and logsumexp of a round's rows, computed in this process. On a CPU these are processor
    seconds, because others may use it too."""
    import torch

    from eagle3.targets.logits import summarize_teacher

    dtype, tokens = getattr(torch, options.dtype), options.documents * options.tokens
    head = torch.randn(options.vocabulary, options.hidden, device=device, dtype=dtype)
    head /= options.hidden**0.5  # larger logits are slow on a CPU: exponentials become denormal
    last = torch.randn(options.chunk_tokens, options.hidden, device=device, dtype=dtype)
    summarize_teacher(last, head)
    if device == "cuda":
        torch.cuda.synchronize()
    clock = time.perf_counter if device == "cuda" else time.process_time
    began = clock()
    summarize_teacher(last, head).logsumexp.cpu()
    return (clock() - began) * tokens / options.chunk_tokens


def logits_share(seconds: Sequence[float], plain: Sequence[Round], options: argparse.Namespace) -> dict[str, float]:
    """How much computing every row's logits adds to plain's work: measured, and by counting multiplications (without
    attention's scores)."""
    import torch

    prefilled = [one.seconds if torch.cuda.is_available() else one.server for one in plain]
    attention = 2 * options.hidden * (options.hidden // options.heads) * (options.heads + options.kv_heads)
    layers = options.layers * (attention + 3 * options.hidden * options.intermediate)
    return {
        "seconds": statistics.median(seconds),
        "of_plain": statistics.median(each / whole for each, whole in zip(seconds, prefilled, strict=True)),
        "of_layers_by_count": options.vocabulary * options.hidden / layers,
    }


def supervised(options: argparse.Namespace, share: float) -> Any:
    """A document's loss mask [tokens]: its end is supervised."""
    import torch

    return torch.arange(options.tokens) >= round(options.tokens * (1 - share))


def bytes_per_token(options: argparse.Namespace, share: float) -> float:
    from eagle3.states.spool import WantedRows, spool_bytes
    from eagle3.states.store.shard import Encoding

    encoding = Encoding("none", options.spool_dtype, options.hidden)
    return spool_bytes(encoding, WantedRows(supervised(options, share))) / options.tokens


def _markdown(document: dict[str, Any]) -> str:
    results, settings = document["results"], document["settings"]
    per_token = results["spool"]["bytes_per_token"]

    def to_plain(way: str, median: str, seconds: str) -> str:
        pairs = zip(results["ways"]["plain"]["rounds"], results["ways"][way]["rounds"], strict=True)
        ratios = [plain[seconds] / each[seconds] for plain, each in pairs]
        return f"{results['ways'][way][median]:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"

    rows = [
        [way, f"{one['tokens_per_s']:,.0f}", to_plain(way, "of_plain", "seconds")]
        + [f"{one['server_processor_s']:.2f}", to_plain(way, "processor_of_plain", "server")]
        + [f"{one['client_processor_s']:.2f}", f"{one['spool_bytes_per_s'] / 1e6:,.1f}"]
        for way, one in results["ways"].items()
    ]
    title = (
        f"{settings['documents']} documents of {settings['tokens']:,} tokens, hidden size {settings['hidden']}, "
        f"{settings['layers']} layers, vocabulary {settings['vocabulary']:,}; medians (and range) of "
        f"{len(results['load'])} rounds; load "
        f"average {min(results['load']):.1f} to {max(results['load']):.1f} ({headline(document)})"
    )
    head = [
        "way",
        "tokens/s",
        "of plain",
        "server's processor s",
        "plain's / its",
        "client's processor s",
        "spool MB/s",
    ]
    logits = results["logits"]
    more = (
        f"Logits of every row alone: {logits['seconds']:.2f} s a round, {logits['of_plain']:.1%} of plain's time "
        f"({logits['of_layers_by_count']:.1%} of the layers' multiplications). Spool: {per_token:,.0f} bytes a token, "
        f"at most "
        f"{results['spool']['most_bytes'] / 1e6:,.1f} MB at a time. Goals in processor time: "
        + ", ".join(f"{way} {goal}, {'' if results['reached'][way] else 'not '}reached" for way, goal in GOALS.items())
    )
    return "\n\n".join([table(title, head, rows), more])


if __name__ == "__main__":
    run_command(main)
