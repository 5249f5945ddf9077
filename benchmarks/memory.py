"""Measure what a token costs in memory: bytes per supervised and per skipped token, compared with the planner.

    python benchmarks/memory.py                     tables in Markdown (some 10 minutes)
    python benchmarks/memory.py --json              one JSON document
    python benchmarks/memory.py --only full_width   one step at the width of an 8B target, fp32 (slow, 20 GB of memory)

On a CPU, memory is the bytes of live tensors (live_bytes.py); on a GPU, the allocator counts it. The process's resident
memory is recorded as well. A token's bytes are the slope between two lengths. Exit code 1 if a mark is missed.
"""

import argparse
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from reporting import headline, origin
from shares import share_of

from eagle3.errors import run_command

PARTS = ("slopes", "full_width")
STEPS = 7
# The most bytes that a local token may take, for an 8B target's draft in bf16 with full recompute.
MARKS = {"supervised": 300_000, "skipped": 45_000}
WIDTH = 8  # for the slopes, the 8B shape is divided by this, and the bytes are multiplied by it


class Length(NamedTuple):
    """A stream of a certain length."""

    documents: list[list[tuple[int, bool]]]  # each as runs of (tokens, supervised?)
    tokens: int  # number of tokens of the measured kind


def main() -> int:
    options = _options()
    stdout = os.dup(1)  # kept for the result: DeepSpeed logs to the stdout that it finds when imported
    os.dup2(2, 1)
    import torch
    from layouts import Layout

    topology = Layout().start()
    torch.set_num_threads(options.threads)
    parts = {"slopes": slopes, "full_width": partial(full_width, tokens=options.full_width_tokens)}
    results = {part: parts[part](topology) for part in options.only}
    document = origin(load=os.getloadavg()[0]) | {
        "counted_by": "allocator" if topology.device.type == "cuda" else "live tensors",
        "marks": MARKS,
        "results": results,
    }
    with os.fdopen(stdout, "w") as out:
        print(json.dumps(document, indent=1) if options.json else _markdown(document), file=out)
    return 0 if all(row.get("met", True) for rows in results.values() for row in rows) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=["slopes"], help="parts to run")
    parser.add_argument("--full-width-tokens", type=int, default=2048, help="of the full-width step (default 2048)")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def draft_of_8b(width: int):
    """A Llama-3.1-8B's draft, `width` times narrower, with a target vocabulary as small as the draft's."""
    from eagle3.draft.config import DraftConfig

    return DraftConfig(
        hidden_size=4096 // width,
        target_hidden_size=4096 // width,
        intermediate_size=14336 // width,
        num_attention_heads=32 // width,
        num_key_value_heads=8 // width,
        head_dim=128,
        vocab_size=32000 // width,
        draft_vocab_size=32000 // width,
        max_position_embeddings=2**20,
    )


def supervised(*counts: int) -> list[Length]:
    return [Length([[(512, True)]] * (count // 512), count) for count in counts]


def skipped(*counts: int) -> list[Length]:
    """Streams with a prompt of these lengths and an answer of 256 tokens."""
    return [Length([[(count, False), (256, True)]], count) for count in counts]


def slopes(topology) -> list[dict[str, Any]]:
    """Bytes per token in bf16, at reduced width, with blocks small enough not to blur the slopes. Supervised tokens are
    measured in every recompute mode, skipped ones with full recompute."""
    import torch

    from eagle3.objective.model import MemoryPlan

    draft, results = draft_of_8b(WIDTH), []
    block = 2**22
    for kind, recompute, lengths in (
        ("supervised", "full", supervised(2048, 4096, 6144)),
        ("supervised", "attention_kept", supervised(1024, 2048)),
        ("supervised", "none", supervised(1024, 2048)),
        ("skipped", "full", skipped(12288, 24576, 36864)),
    ):
        rows = [_step(topology, draft, torch.bfloat16, length, MemoryPlan(recompute, block)) for length in lengths]
        for (one, other), (before, after) in zip(_pairs(lengths), _pairs(rows), strict=True):
            more = other.tokens - one.tokens
            per_token = {name: (after[name] - before[name]) / more * WIDTH for name in ("peak", "planned")}
            met = {"met": per_token["peak"] <= MARKS[kind]} if recompute == "full" else {}
            results.append(
                {
                    "token": kind,
                    "recompute": recompute,
                    "between": [one.tokens, other.tokens],
                    "bytes": per_token["peak"],
                    "planned": per_token["planned"],
                    "planned_at_full_width_on_a_gpu": _planned_on_gpu(kind, recompute),
                    "peaks": [before["peak"], after["peak"]],
                    "seconds": after["seconds"],
                    "resident": after["resident"],
                }
                | met
            )
    return results


def _planned_on_gpu(kind: str, recompute: str) -> float:
    """Bytes of one more token between 65,536 and 131,072 tokens, of which all are supervised or, for skipped tokens,
    only 256."""
    import torch

    from eagle3.objective.model import MemoryPlan
    from eagle3.planning.fitting import PlannedStream
    from eagle3.planning.memory import step_bytes
    from eagle3.planning.step import Planned

    planned, lengths = Planned(draft_of_8b(1), STEPS, torch.bfloat16, memory=MemoryPlan(recompute)), (2**16, 2**17)
    shares = [1.0 if kind == "supervised" else 256 / tokens for tokens in lengths]
    sizes = [
        step_bytes(planned, PlannedStream(tokens, 1, share).share(planned)).total()
        for tokens, share in zip(lengths, shares, strict=True)
    ]
    return (sizes[1] - sizes[0]) / (lengths[1] - lengths[0])


def full_width(topology, tokens: int) -> list[dict[str, Any]]:
    """One step of the whole 8B shape in fp32 with full recompute: its peak, and the planner's."""
    import torch

    from eagle3.objective.model import MemoryPlan

    (length,) = supervised(tokens)
    memory = MemoryPlan("full", 2**28)
    row = _step(topology, draft_of_8b(1), torch.float32, length, memory)
    return [
        {"tokens": length.tokens, "recompute": "full", "dtype": "float32", **row, "ratio": row["planned"] / row["peak"]}
    ]


def _pairs(items: Sequence) -> list[tuple]:
    return list(zip(items, items[1:], strict=False))


def _step(topology, draft, dtype, length: Length, memory) -> dict[str, Any]:
    """Peak bytes of one forward and backward pass, weights and inputs included, and the planner's estimate of it."""
    import torch
    from layouts import Layout, pack, prepare
    from live_bytes import LiveBytes, device_tensors

    gc.collect()
    prepared = prepare(pack(length.documents, draft.vocab_size), draft, STEPS, Layout(), topology, dtype, memory=memory)
    began = time.monotonic()
    if topology.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        prepared.objective(prepared.batch, prepared.weights).surrogate.backward()
        peak = torch.cuda.max_memory_allocated()
    else:
        with LiveBytes([*device_tensors(prepared.batch), *prepared.objective.parameters()]) as bytes_:
            prepared.objective(prepared.batch, prepared.weights).surrogate.backward()
        peak = bytes_.peak
    seconds = time.monotonic() - began
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    planned = _planned(draft, dtype, length, memory, topology.device.type)
    print(
        f"{length.tokens} tokens: peak {peak / 1e6:.1f} MB, planned {planned / 1e6:.1f}, {seconds:.0f} s",
        file=sys.stderr,
    )
    return {"peak": peak, "planned": planned, "seconds": seconds, "resident": resident}


def _planned(draft, dtype, length: Length, memory, device: str) -> int:
    from layouts import pack

    from eagle3.parallel.sequence import Reach, plan_sequence
    from eagle3.planning.memory import step_bytes
    from eagle3.planning.step import Planned

    stream = pack(length.documents, draft.vocab_size)
    share = share_of(plan_sequence(stream, Reach(STEPS)), stream)
    return step_bytes(Planned(draft, STEPS, dtype, memory=memory, device=device), share).total()


def _markdown(document: dict[str, Any]) -> str:
    lines = [f"{headline(document)}; counted by {document['counted_by']}."]
    if rows := document["results"].get("slopes"):
        lines += [
            "",
            f"Kilobytes of a local token, K = {STEPS}, bf16, the draft of an 8B target (measured at 1/{WIDTH} of its "
            f"width, times {WIDTH}). Marks: {MARKS['supervised'] / 1e3:.0f} supervised, {MARKS['skipped'] / 1e3:.0f} "
            "skipped, with full recompute.",
            "",
            "| token | recompute | between | measured | planned | planned for a GPU, full width |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for row in rows:
            between = f"{row['between'][0]} and {row['between'][1]}"
            numbers = " | ".join(
                f"{row[name] / 1e3:.1f}" for name in ("bytes", "planned", "planned_at_full_width_on_a_gpu")
            )
            lines.append(f"| {row['token']} | {row['recompute']} | {between} | {numbers} |")
    for row in document["results"].get("full_width", []):
        lines += [
            "",
            f"Full width, {row['tokens']} supervised tokens, {row['dtype']}, recompute {row['recompute']}: peak "
            f"{row['peak'] / 1e9:.2f} GB, planned {row['planned'] / 1e9:.2f} GB ({row['ratio']:.3f}), "
            f"{row['seconds']:.0f} s, resident {row['resident'] / 1e9:.1f} GB.",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
