"""Measure the hidden-state store on a trained model's states: size and rates of each codec, and of the usual format.

    python benchmarks/store.py          a table in Markdown
    python benchmarks/store.py --json   one JSON document

The states are those of a recipe's target (by default the quickstart's) over its training samples, in bfloat16. The
format that is usual in the field is one pickled file per sample, plain or gzipped. Rates are in raw bytes, for the
codecs alone, in memory, and for writing to a folder with a flush and reading everything from the page cache. All take
turns in several rounds, and the best round counts. A rank of eight reads one eighth of each sample's rows. What is read
is compared with what was written. Needs an otherwise idle machine.
"""

import argparse
import gzip
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from reporting import headline, origin, positive, table

from eagle3.errors import run_command

ROOT = Path(__file__).parent.parent
CODECS = ("none", "lossless", "fp8")
RANKS = 8
RATES = ("write_mb_per_s", "read_mb_per_s")


class Timing(NamedTuple):
    """What a format takes for all samples."""

    size: int  # bytes on the disk
    write: float  # seconds
    read: float  # seconds
    share: float  # seconds to read one eighth of each sample's rows


@dataclass(frozen=True)
class Sample:
    id: str
    ids: Any
    loss_mask: Any
    states: Any

    @property
    def raw(self) -> int:
        return self.states.aux.nbytes + self.states.teacher.values.nbytes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument(
        "--recipe", type=Path, default=ROOT / "recipes" / "quickstart.yaml", help="whose target and data"
    )
    parser.add_argument("--tokens", type=positive, default=60_000, help="of samples, taken in order")
    parser.add_argument("--join", type=positive, default=4096, help="tokens of the second measurement's samples")
    parser.add_argument("--threads", type=positive, default=2, help="that encode and decode; files at a time for gzip")
    parser.add_argument("--rounds", type=positive, default=3, help="of everything but gzip's writes, which have one")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    stdout = os.dup(1)  # kept for the result: DeepSpeed logs to the stdout that it finds when imported
    os.dup2(2, 1)
    samples = hidden_states(options.recipe, options.tokens)
    settings = vars(options) | {"recipe": options.recipe.name, "folder": "given" if options.folder else "temporary"}
    document = origin(load_before=os.getloadavg()[0]) | {"settings": settings, "results": {}}
    for name, of_kind in (("as they are", samples), ("joined", joined(samples, options.join))):
        print(name, flush=True)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            formats = measure(of_kind, Path(folder), options.threads, options.rounds)
        document["results"][name] = {
            "samples": len(of_kind),
            "tokens": sum(len(sample.ids) for sample in of_kind),
            "hidden_size": of_kind[0].states.teacher.values.shape[1],
            "raw_bytes": sum(sample.raw for sample in of_kind),
            "formats": formats,
            "codecs": measure_codecs(of_kind, options.threads, options.rounds),
        }
    with os.fdopen(stdout, "w") as out:
        print(json.dumps(document, indent=1) if options.json else _markdown(document), file=out)
    return 0


def hidden_states(recipe_file: Path, tokens: int) -> list[Sample]:
    """Samples of about `tokens` tokens in all, with their states in bfloat16. The loss masks mark every token as
    supervised, so that every row but the first has a last hidden state, as in the usual format."""
    import torch

    from eagle3.jobs.job import choose_draft, find_target, gather_inputs, start_target
    from eagle3.parallel.topology import start_distributed
    from eagle3.recipe.loading import load_recipe
    from eagle3.states.rows import LastHidden, Rows

    recipe, topology = load_recipe(recipe_file), start_distributed()
    say = partial(print, flush=True)
    job = choose_draft(gather_inputs(find_target(recipe, topology.device, say), say), say)
    target = start_target(job.known, topology.device, job.vocabulary)
    chosen, total = [], 0
    for place in range(len(job.inputs.train)):
        chosen.append(job.inputs.train[place])
        total += len(chosen[-1].ids)
        if total >= tokens:
            break
    samples = []
    for start in range(0, len(chosen), 64):
        members = chosen[start : start + 64]
        for sample, states in zip(members, target.prefill([sample.ids for sample in members]), strict=True):
            states = states.map(lambda tensor: tensor.cpu())
            teacher, halved = states.teacher, states.teacher.values.bfloat16()
            rows = Rows(states.aux.bfloat16(), LastHidden(halved, teacher.argmax, teacher.logsumexp.float()))
            samples.append(Sample(sample.id, sample.ids, torch.ones(len(sample.ids), dtype=torch.bool), rows))
    return samples


def joined(samples: Sequence[Sample], tokens: int) -> list[Sample]:
    """The same rows end to end, cut into samples as long as long conversations: of `tokens` tokens. The rest is left
    out."""
    import torch

    from eagle3.states.rows import Rows

    rows = Rows.cat([sample.states for sample in samples])
    ids = torch.cat([sample.ids for sample in samples])
    cuts = [slice(start, start + tokens) for start in range(0, len(ids) - tokens + 1, tokens)]
    cuts = cuts or [slice(0, len(ids))]
    mask = torch.ones(len(ids), dtype=torch.bool)
    return [Sample(f"{place:08x}", ids[cut], mask[cut], rows[cut].map(torch.clone)) for place, cut in enumerate(cuts)]


def measure(samples: Sequence[Sample], folder: Path, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    formats: dict[str, Callable[[Path], Timing]] = {
        f"store, {codec}": lambda path, codec=codec: time_store(samples, path, codec, threads) for codec in CODECS
    }
    formats["a file a sample"] = lambda path: time_files(samples, path, None, 1)
    for level in (6, 9):
        formats[f"a file a sample, gzip -{level}"] = lambda path, level=level: time_files(samples, path, level, 1)
    formats[f"the same, {threads} files at a time"] = lambda path: time_files(samples, path, 9, threads)
    best: dict[str, Timing] = {}
    for number in range(rounds):
        for name, run in formats.items():
            if number and "gzip" in name or number and "the same" in name:
                continue  # a minute each
            timing = run(folder / "one")
            shutil.rmtree(folder / "one")
            before = best.get(name, timing)
            best[name] = Timing(timing.size, *(min(pair) for pair in zip(timing[1:], before[1:], strict=True)))
            print(f"round {number + 1}: {name}: {timing}", flush=True)
    raw = sum(sample.raw for sample in samples)
    return {
        name: {
            "size": timing.size / raw,
            "write_mb_per_s": raw / 1e6 / timing.write,
            "read_mb_per_s": raw / 1e6 / timing.read,
            "seconds_for_an_eighth": timing.share,
            "seconds_for_all": timing.read,
        }
        for name, timing in best.items()
    }


def measure_codecs(samples: Sequence[Sample], threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Measures encoding and decoding alone. Each sample's aux and last are encoded separately, chunk by chunk (by gzip,
    as a whole)."""
    import torch

    from eagle3.states.store.shard import Encoding

    states = [sample.states for sample in samples]
    tensors = [pair for each in states for pair in (("aux", each.aux), ("last", each.teacher.values))]
    hidden, raw = samples[0].states.teacher.values.shape[1], sum(sample.raw for sample in samples)
    best: dict[str, dict[str, float]] = {}

    def note(name: str, size: int, write: float, read: float) -> None:
        rates = {"size": size / raw, "write_mb_per_s": raw / 1e6 / write, "read_mb_per_s": raw / 1e6 / read}
        before = best.setdefault(name, rates)
        best[name] = {key: max(before[key], rate) for key, rate in rates.items()}

    for number in range(rounds):
        with ThreadPoolExecutor(threads) as pool:
            for codec in CODECS:
                encoding = Encoding(codec, "bfloat16", hidden)
                codecs = {name: encoding.make_codec(name) for name in ("aux", "last")}

                def encode(one: tuple, codecs=codecs, encoding=encoding) -> list[memoryview | bytes]:
                    name, rows = one
                    return codecs[name].encode(rows, encoding.chunk_rows(name))

                def decode(one: tuple, data: bytes, sizes: list[int], codecs=codecs) -> torch.Tensor:
                    name, rows = one
                    out = torch.empty_like(rows)
                    codecs[name].decode(memoryview(data), sizes, out)
                    return out

                began = time.perf_counter()
                encoded = list(pool.map(encode, tensors))
                write = time.perf_counter() - began
                sizes = [[len(chunk) for chunk in chunks] for chunks in encoded]
                data = [b"".join(chunks) for chunks in encoded]
                began = time.perf_counter()
                decoded = list(pool.map(decode, tensors, data, sizes))
                read = time.perf_counter() - began
                same = all(torch.equal(out, rows) for (_, rows), out in zip(tensors, decoded, strict=True))
                assert same or codec == "fp8", "what is decoded is what was encoded"
                note(codec, sum(map(sum, sizes)), write, read)
        for streams in (1, threads) if not number else ():
            with ThreadPoolExecutor(streams) as pool:
                began = time.perf_counter()
                pieces = [tensor.contiguous().view(torch.uint8).numpy().reshape(-1) for _, tensor in tensors]
                encoded = list(pool.map(lambda piece: gzip.compress(piece, 9), pieces))
                written = time.perf_counter()
                assert sum(pool.map(lambda data: len(gzip.decompress(data)), encoded)) == raw
                seconds = written - began, time.perf_counter() - written
                note(f"gzip -9, {streams} at a time", sum(map(len, encoded)), *seconds)
    return best


def time_store(samples: Sequence[Sample], path: Path, codec: str, threads: int) -> Timing:
    import torch

    from eagle3.states.store.reader import HiddenStateStore
    from eagle3.states.store.shard import Encoding
    from eagle3.states.store.writer import StoreWriter

    began = time.perf_counter()
    encoding = Encoding(codec, "bfloat16", samples[0].states.teacher.values.shape[1])
    with StoreWriter(path, {}, encoding, threads=threads) as writer:
        for sample in samples:
            writer.add(sample.id, sample.ids, sample.loss_mask, sample.states)
    write = time.perf_counter() - began
    store = HiddenStateStore.open(str(path), {"codec": codec, "dtype": "bfloat16"}, threads=threads)

    def read(first: Callable[[int], int], last: Callable[[int], int]) -> float:
        """Reads each sample's rows from first to last, a few samples at a time as a loader does. Returns the
        seconds."""
        began = time.perf_counter()
        for start in range(0, len(samples), 16):
            members = samples[start : start + 16]
            rows = [torch.arange(first(len(sample.ids)), last(len(sample.ids))) for sample in members]
            locations = [store.locations[sample.id] for sample in members]
            read = store.read_at(locations, [(each, each[each > 0]) for each in rows])
            for sample, of_sample, stored in zip(members, rows, read, strict=True):
                if codec != "fp8":
                    assert torch.equal(stored.aux[-1], sample.states.aux[of_sample[-1]]), (
                        "what is read is what was written"
                    )
        return time.perf_counter() - began

    whole = read(lambda tokens: 0, lambda tokens: tokens)
    share = read(lambda tokens: tokens // 2, lambda tokens: tokens // 2 + -(-tokens // RANKS))
    return Timing(sum(file.stat().st_size for file in path.glob("shard-*")), write, whole, share)


def time_files(samples: Sequence[Sample], path: Path, level: int | None, threads: int) -> Timing:
    """Times one file per sample. A rank's share costs as much as everything, because a compressed pickle cannot be read
    in part."""
    import torch

    path.mkdir()

    def write(sample: Sample) -> int:
        states = sample.states
        buffer = io.BytesIO()
        content = {"ids": sample.ids, "loss_mask": sample.loss_mask, **states.named()}
        torch.save(content, buffer)
        data = buffer.getvalue() if level is None else gzip.compress(buffer.getvalue(), level)
        with (path / sample.id).open("wb") as file:
            file.write(data)
            os.fsync(file.fileno())
        return len(data)

    def read(sample: Sample) -> None:
        data = (path / sample.id).read_bytes()
        content = torch.load(io.BytesIO(data if level is None else gzip.decompress(data)), weights_only=True)
        assert torch.equal(content["aux"], sample.states.aux), "what is read is what was written"

    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        size = sum(pool.map(write, samples))
        written = time.perf_counter()
        list(pool.map(read, samples))
        whole = time.perf_counter() - written
    return Timing(size, written - began, whole, whole)


def _markdown(document: dict[str, Any]) -> str:
    parts = []
    for name, result in document["results"].items():
        reference = result["formats"]["a file a sample, gzip -9"]
        rows = [
            [
                kind,
                f"{of_kind['size']:.1%}",
                *(f"{of_kind[rate]:,.0f} ({of_kind[rate] / reference[rate]:.1f})" for rate in RATES),
                f"{of_kind['seconds_for_an_eighth'] / of_kind['seconds_for_all']:.2f}",
            ]
            for kind, of_kind in result["formats"].items()
        ]
        title = (
            f"Samples {name}: {result['samples']}, {result['tokens']:,} tokens, hidden size {result['hidden_size']}, "
            f"{result['raw_bytes'] / 1e6:,.0f} MB raw, {document['settings']['threads']} threads "
            f"({headline(document)}); "
            "in brackets, times the rate of gzip -9"
        )
        parts.append(
            table(title, ["format", "of raw", "write MB/s", "read MB/s", "time to read an eighth / all"], rows)
        )
        reference = result["codecs"]["gzip -9, 1 at a time"]
        rows = [
            [
                kind,
                f"{of_kind['size']:.1%}",
                *(f"{of_kind[rate]:,.0f} ({of_kind[rate] / reference[rate]:.1f})" for rate in RATES),
            ]
            for kind, of_kind in result["codecs"].items()
        ]
        parts.append(table("The codecs alone, in memory:", ["codec", "of raw", "encode MB/s", "decode MB/s"], rows))
    return "\n\n".join(parts)


if __name__ == "__main__":
    run_command(main)
