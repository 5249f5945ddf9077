"""Measure sequence parallelism and prompt skipping: bytes sent, balance of work, time of a step, gain of skipping.

    python benchmarks/sequence_parallel.py          tables in Markdown
    python benchmarks/sequence_parallel.py --json   one JSON document

Ends with an assertion error if bytes differ from the formula, losses differ between layouts, or skipping changes
gradients. Progress and logs go to stderr. Takes some minutes; times need an otherwise idle machine.
"""

import argparse
import json
import os
import socket
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from reporting import headline, positive, report_parts, table

from eagle3.errors import run_command

PARTS = ("bytes", "balance", "time", "skipping")
Rows = list[dict[str, Any]]
LAYOUTS = "u2 r2-gather r2-p2p tp2 u4 u4-kv2 r4-gather r4-p2p u2-r2-gather u2-r2-p2p tp2-u2 tp2-r2-gather tp2-r2-p2p"
TIMED = "u2 r2-gather r2-p2p tp2 u4 r4-gather r4-p2p u2-r2-gather"
# Small enough for a CPU: hidden size is heads x head_dim, the MLP twice that, the vocabulary 64.
DRAFTS = {
    "bytes": {"heads": 8, "kv_heads": 4, "head_dim": 8},
    "time": {"heads": 4, "kv_heads": 4, "head_dim": 16},
    "skipping": {"heads": 2, "kv_heads": 2, "head_dim": 16},
}


def main() -> int:
    options = _options()
    stdout = os.dup(1)  # kept for the result: DeepSpeed logs to the stdout that it finds when imported
    os.dup2(2, 1)
    parts = _parts(options)
    report_parts({part: parts[part] for part in options.only}, options, DRAFTS, _markdown, stdout)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--steps", type=positive, default=4, help="K, the training-time-test steps")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS.split(), help="whose bytes are counted")
    parser.add_argument("--timed-layouts", nargs="+", default=TIMED.split(), help="whose steps are timed")
    parser.add_argument(
        "--rings", nargs="+", type=positive, default=[2, 4, 8], help="ring sizes whose balance is measured"
    )
    parser.add_argument("--bytes-tokens", type=positive, default=1000, help="of the stream whose bytes are counted")
    parser.add_argument("--bytes-dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of that draft")
    parser.add_argument("--balance-tokens", type=positive, default=131072, help="of the streams that are dealt")
    parser.add_argument("--time-tokens", type=positive, default=8192, help="of the timed stream")
    parser.add_argument(
        "--skipping-tokens", type=positive, default=32768, help="of the document whose prompts are skipped"
    )
    parser.add_argument(
        "--repeats", type=positive, default=3, help="timed steps after one to warm up; the median counts"
    )
    options = parser.parse_args()
    if options.skipping_tokens < 20 * 512:
        parser.error(f"--skipping-tokens is {options.skipping_tokens}: spans of 512 that are 5% take 10240 at least")
    return options


def _parts(options: argparse.Namespace) -> dict[str, Callable[[], Rows]]:
    # Imported only now: after stdout was put aside, but before processes are forked, so that these start at once.
    import sequence_parallel_measures as measures
    import torch
    from layouts import Layout, draft_config

    drafts = {part: draft_config(**sizes) for part, sizes in DRAFTS.items()}
    layouts, timed = ([Layout.parse(name) for name in names] for names in (options.layouts, options.timed_layouts))
    for part, chosen in (("bytes", layouts), ("time", timed)):
        for layout in chosen:  # refuse a layout that does not fit before anything runs
            layout.draft(drafts[part])

    def by_ranks(layouts: list[Layout], measure: Callable[[list[Layout]], Rows]) -> Rows:
        worlds = sorted({layout.ranks for layout in layouts})
        results = [
            _on_ranks(world, partial(measure, [layout for layout in layouts if layout.ranks == world]))
            for world in worlds
        ]
        return [row for rows in results for row in rows]

    def sent_bytes() -> Rows:
        dtype = getattr(torch, options.bytes_dtype)
        sizes = {"config": drafts["bytes"], "tokens": options.bytes_tokens, "steps": options.steps, "dtype": dtype}
        rows = by_ranks(layouts, partial(measures.measure_bytes, **sizes))
        measures.check_gather_saves(rows, options.steps)
        return rows

    def balance() -> Rows:
        return _on_ranks(1, partial(measures.measure_balance, options.rings, options.balance_tokens, options.steps))

    def step_time() -> Rows:
        sizes = {"config": drafts["time"], "tokens": options.time_tokens, "steps": options.steps}
        rows = by_ranks([Layout(), *timed], partial(measures.measure_time, **sizes, repeats=options.repeats))
        return measures.compare_with_one_process(rows)

    def skipping() -> Rows:
        sizes = (drafts["skipping"], options.skipping_tokens, options.steps, options.repeats)
        return _on_ranks(1, partial(measures.measure_skipping, *sizes))

    return {"bytes": sent_bytes, "balance": balance, "time": step_time, "skipping": skipping}


def _on_ranks(world: int, measure: Callable[[], Rows]) -> Rows:
    """Run `measure` in `world` processes, with the environment that a launcher sets. Returns what rank 0 measures. The
    processes are forked, so this process must not have computed on tensors: that starts threads, which a child
    lacks."""
    from torch.multiprocessing import start_processes

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        start_processes(_be_rank, (world, port, measure, result), nprocs=world, start_method="fork")
        return json.loads(result.read_text())


def _be_rank(rank: int, world: int, port: int, measure: Callable[[], Rows], result: Path) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    rows = measure()
    if rank == 0:
        result.write_text(json.dumps(rows))


def _markdown(document: dict[str, Any]) -> str:
    about = f"{headline(document)}; K = {document['settings']['steps']}."
    tables = {"bytes": _bytes_table, "balance": _balance_table, "time": _time_table, "skipping": _skipping_table}
    return "\n\n".join([about, *(tables[part](rows, document) for part, rows in document["results"].items())])


def _bytes_table(rows: Rows, document: dict[str, Any]) -> str:
    settings, kinds = document["settings"], ("Ulysses K0,V0", "Ulysses q,out", "Ulysses lse", "ring K0,V0", "tensor")

    def cell(row: dict[str, Any], kind: str) -> str:
        both = [row["sent"].get(f"{kind} {phase}", 0) / 1e3 for phase in ("forward", "backward")]
        return " / ".join(f"{number:.1f}" for number in both) if any(both) else ""

    return table(
        "Kilobytes that a rank sends in one step, forward / backward, counted at the collectives and equal to the "
        f"formula ({settings['bytes_tokens']} tokens, {settings['bytes_dtype']}, {_draft('bytes')}). Last column: "
        "gigabytes by the formula for 128k supervised tokens, K = 7, the bfloat16 draft of an 8B target.",
        ["layout", "ranks", *kinds, "all", "GB at 128k"],
        [
            [row["layout"], row["ranks"], *(cell(row, kind) for kind in kinds), f"{row['total'] / 1e3:.1f}"]
            + [f"{row['total_at_128k'] / 1e9:.1f}"]
            for row in rows
        ],
    )


def _balance_table(rows: Rows, document: dict[str, Any]) -> str:
    names = ("work", "queries", "queries_ulysses_2", "hop_zigzag", "hop_contiguous")
    return table(
        "Largest over mean, over the ring's ranks: causal attention work, queries, queries of each rank when the ring "
        "is of pairs of Ulysses ranks, and attention work in the worst hop of p2p with either layout of the keys.",
        [
            "loss mask",
            "tokens",
            "unrolled",
            "ring",
            "work",
            "queries",
            "with Ulysses 2",
            "zigzag hop",
            "contiguous hop",
        ],
        [
            [row["mask"], row["tokens"], row["unrolled"], row["ring"], *(f"{row[name]:.3f}" for name in names)]
            for row in rows
        ],
    )


def _time_table(rows: Rows, document: dict[str, Any]) -> str:
    cores = document["machine"]["cores"]
    return table(
        f"One step (forward and backward, fp32, {document['settings']['time_tokens']} tokens in one document, "
        f"{_draft('time')}), one thread a rank. The machine has {cores} cores, which more ranks than that share, so no "
        f"step can be more than {cores} times faster; processor seconds, of the rank that takes most, are what a core "
        f"for each rank would leave. All losses agree to 1e-5. {_load(document, 'time')}",
        ["loss mask", "layout", "ranks", "seconds", "times faster", "processor seconds", "times fewer"],
        [
            [row["mask"], row["layout"], row["ranks"], f"{row['seconds']:.2f}", f"{row['speedup']:.2f}"]
            + [f"{row['cpu_seconds']:.2f}", f"{row['cpu_speedup']:.2f}"]
            for row in sorted(rows, key=lambda row: row["mask"])
        ],
    )


def _skipping_table(rows: Rows, document: dict[str, Any]) -> str:
    def both(row: dict[str, Any], which: str) -> str:
        return f"{row[which]['seconds']:.2f} ({row[which]['cpu_seconds']:.2f})"

    return table(
        f"Skipping prompts: one document of {document['settings']['skipping_tokens']} tokens, 5% supervised; one "
        f"process, one thread, fp32, {_draft('skipping')}. Seconds (of processor time). Gradients: largest difference, "
        f"relative to the largest entry of a weight's gradient. {_load(document, 'skipping')}",
        ["supervised", "queries", "all", "supervised only", "times faster", "gradients differ", "norms differ"],
        [
            [row["mask"], f"{row['share_of_queries']:.1%}", both(row, "all"), both(row, "supervised")]
            + [f"{row['times_faster']:.1f} ({row['times_faster_cpu']:.1f})" + ", below 5" * (row["times_faster"] < 5)]
            + [f"{row['gradient_difference']:.1e}", f"{row['gradient_norm_difference']:.1e}"]
            for row in rows
        ],
    )


def _load(document: dict[str, Any], part: str) -> str:
    return f"Load average before: {document['machine']['load_before'][part]:.1f}."


def _draft(part: str) -> str:
    return "draft with " + ", ".join(f"{name} {size}" for name, size in DRAFTS[part].items())


if __name__ == "__main__":
    run_command(main)
