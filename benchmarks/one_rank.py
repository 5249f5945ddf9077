"""Measure a GPU's training step at a Llama-3.1-8B draft's real shape: time, utilisation, memory, largest context.

    python benchmarks/one_rank.py --case tokens=32768,recompute=none --case tokens=131072,recompute=full
    python benchmarks/one_rank.py --case tokens=131072,largest=1                the largest context that fits
    python benchmarks/one_rank.py --case tokens=1048576,ring=8                  one rank of eight
    python benchmarks/one_rank.py --draft hidden-2048 --case tokens=4096,documents=4   another shape
    python benchmarks/one_rank.py --device cpu --tiny --case tokens=64          whether the code runs

A step is the forward and backward pass of one document whose last tokens are supervised, because answers at the end see
the most keys. Hidden states are random and made on the device. For a ring, this process computes what one rank would:
its share of keys and queries, with random numbers for the other ranks' keys and values, and so without communication;
tokens/s are then the whole stream's. The optimiser and DeepSpeed's buffers take no part; the bytes that the optimiser
would add are printed separately. Utilisation is of model FLOPs.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from one_rank_measures import OPTIMISER_BYTES, Bench, Case
from reporting import origin

from eagle3.draft.config import DraftConfig
from eagle3.errors import UserError, run_command
from eagle3.parallel.topology import Topology, start_distributed, stop_distributed

LLAMA_3_1_8B = DraftConfig(
    hidden_size=4096,
    target_hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    draft_vocab_size=32000,
    max_position_embeddings=2**24,
)
TINY = DraftConfig(
    hidden_size=32,
    target_hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=96,
    draft_vocab_size=64,
    max_position_embeddings=2**24,
)
DRAFTS = {
    "8b": LLAMA_3_1_8B,
    "hidden-2048": dataclasses.replace(
        LLAMA_3_1_8B, hidden_size=2048, target_hidden_size=2048, intermediate_size=8192, head_dim=64
    ),
}
# Dense products of an H100 SXM in bf16, without sparsity (NVIDIA's data sheet).
PEAK_TFLOPS = 989.0


def start(device: str) -> Topology:
    """Start a job of one process. Raises UserError if there is no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: cuda, but there is no CUDA device here; pass --device cpu --tiny to try the code")
    topology = start_distributed()
    return topology if device == "cuda" else dataclasses.replace(topology, device=torch.device("cpu"))


def document(settings: dict[str, Any], results: Any) -> dict[str, Any]:
    """A benchmark's JSON document: where, when and how it ran, and its results."""
    machine: dict[str, Any] = {}
    if torch.cuda.is_available():
        machine = {"gpu_bytes": torch.cuda.get_device_properties(0).total_memory, "cuda": torch.version.cuda}
    return origin(**machine) | {"settings": settings, "results": results}


def save(path: Path | None, content: dict[str, Any]) -> None:
    """Write the file whole or not at all, so that a benchmark that is cut off has saved its results so far."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".partial")
        beside.write_text(json.dumps(content, indent=1, default=str) + "\n")
        beside.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", action="append", required=True, help="NAME=VALUE,...; may be given again and again")
    parser.add_argument("--draft", choices=DRAFTS, default="8b", help="its shape")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="a draft of a few thousand weights in place of the real one"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--peak-tflops", type=float, default=PEAK_TFLOPS, help="of the device in this number format")
    parser.add_argument("--estimates", type=Path, help="a JSON file of launches.py, to print its seconds beside")
    parser.add_argument("--out", type=Path, help="a JSON file, written anew after every case")
    options = parser.parse_args()
    cases = [Case.parse(text) for text in options.case]
    config = TINY if options.tiny else DRAFTS[options.draft]
    settings = vars(options) | {"draft": dataclasses.asdict(config)}
    estimates = json.loads(options.estimates.read_text()) if options.estimates else []
    topology = start(options.device)
    bench = Bench(config, getattr(torch, options.dtype), topology, options.peak_tflops)
    results: list[dict[str, Any]] = []

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    for case in cases:
        short = dataclasses.replace(case, tokens=min(case.tokens, 8192), warm_up=0, repeats=1)
        bench.attempt(short)  # kernels are loaded on first use
        began = time.perf_counter()
        result = bench.largest(case, say) if case.largest else bench.attempt(case)
        estimate = estimated_seconds(case, options.draft, estimates)
        results.append({"case": dataclasses.asdict(case), "estimated_seconds": estimate} | result)
        say(f"{case}: {time.perf_counter() - began:.0f} s")
        save(options.out, document(settings, results))
    print("\n".join([_HEAD, *(_line(row) for row in results)]))
    print(
        "\nPeak: tensors of the step with the draft's weights and their gradients. Not in it: the optimiser's "
        f"{OPTIMISER_BYTES} bytes a weight, {OPTIMISER_BYTES * bench.trained / 2**30:.1f} GiB on one rank."
    )
    stop_distributed()
    return 0


def estimated_seconds(case: Case, draft: str, estimates: list[dict[str, Any]]) -> float | None:
    """Seconds of this step according to launches.py, for the first device that it was estimated for."""
    if draft != "8b" or case.ring > 1 or case.documents > 1:
        return None
    asked = {name: getattr(case, name) for name in ("tokens", "supervised", "window", "recompute", "inputs", "steps")}
    return next((each["seconds"] for each in estimates if asked.items() <= each["case"].items()), None)


_HEAD = (
    "| tokens | supervised | window | ring | recompute | inputs | seconds (forward + backward) | estimated | "
    "tokens/s | model FLOPs used | peak GiB |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def _line(row: dict[str, Any]) -> str:
    case = row["case"]
    cells = [case["tokens"], f"{case['supervised']:.0%}", case["window"] or "", case["ring"], case["recompute"]]
    cells += [case["inputs"]]
    if "largest_tokens" in row:
        peaks = [attempt["peak_bytes"] for attempt in row["tried"].values() if "out_of_memory" not in attempt]
        cells[0] = f"largest: {row['largest_tokens']}"
        return _cells([*cells, "", "", "", "", _gib(max((peak or 0 for peak in peaks), default=None))])
    if "out_of_memory" in row:
        return _cells([*cells, "out of memory", "", "", "", _gib(row["peak_bytes"])])
    seconds = f"{row['seconds']:.2f} ({row['forward_seconds']:.2f} + {row['backward_seconds']:.2f})"
    used = f"{row['model_flops_utilisation']:.1%}"
    estimated = "" if row["estimated_seconds"] is None else f"{row['estimated_seconds']:.2f}"
    return _cells([*cells, seconds, estimated, f"{row['tokens_per_second']:.0f}", used, _gib(row["peak_bytes"])])


def _cells(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _gib(number: int | None) -> str:
    return f"{number / 2**30:.1f}" if number else ""


if __name__ == "__main__":
    run_command(main)
