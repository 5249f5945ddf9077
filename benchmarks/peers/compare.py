"""SpecForge's own EAGLE3 training step and ours, in one call: the same device, shape, inputs and weights.

    pip install --no-deps --target /tmp/peers specforge==0.2.0
    PYTHONPATH=.:/tmp/peers python benchmarks/peers/compare.py --tokens 2944 8192 --json peers.json
    PYTHONPATH=.:/tmp/peers python benchmarks/peers/compare.py --device cpu --shape medium --tokens 512

A step is the forward and backward pass of K = 7 steps of the unroll, without optimiser and data. SpecForge computes it
by two backends (`fa`, `flex_attention`) and with two kinds of teacher: `compact` (the step computes its distributions,
as ours does, but also the log-sum-exp over the whole vocabulary, which our capture stores) and `given` (all of it was
made beforehand; ours stays as it is). Where the package flash-attn is missing, torch's own FlashAttention-2 operators
take the place of its two functions in SpecForge's `fa`; specforge_step.py says what else is replaced on a CPU.

The two take turns: one step that is not counted, then a few that are. Seconds are the median of all counted steps. On a
CPU they are processor seconds of all threads, of which PyTorch has one: waiting threads spin, and that would count. So
these seconds compare work, not speed on all cores. Peaks are of tensors, with weights, gradients and inputs of the side
that is measured. Both losses are divided by the number of tokens, so they have to agree.

Exit codes: 1 if losses differ or a case failed (out of memory is a result), 2 if SpecForge cannot be imported.
"""

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from one_rank import DRAFTS, TINY, document, save, start
from one_rank_measures import Bench, Case
from reporting import headline, positive, table
from specforge_step import BACKENDS, TEACHERS, SpecForgeStep, import_specforge, replace_what_cannot_run

from eagle3.draft.config import DraftConfig
from eagle3.errors import UserError, first_sentence, run_command
from eagle3.objective.losses import LossConfig
from eagle3.parallel.topology import stop_distributed

MEDIUM = dataclasses.replace(
    TINY,
    hidden_size=256,
    target_hidden_size=256,
    intermediate_size=896,
    num_attention_heads=8,
    head_dim=32,
    vocab_size=8192,
    draft_vocab_size=2048,
)
SHAPES = DRAFTS | {"medium": MEDIUM, "tiny": TINY}
BY_TOKENS = LossConfig(normalization="tokens")  # as SpecForge
AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # of the losses, relative


class Step(Protocol):
    """One side's step."""

    def forward(self) -> Tensor: ...

    def clear(self) -> None: ...


class Side:
    """A step with its measurements."""

    def __init__(self, step: Step, device: torch.device) -> None:
        self.step, self.cuda = step, device.type == "cuda"
        self.seconds: list[float] = []
        self.loss, self.peak = 0.0, 0

    def round(self, repeats: int) -> None:
        """One step that is not counted, and `repeats` that are."""
        self._once()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.seconds += [self._once() for _ in range(repeats)]
        self.peak = max(self.peak, torch.cuda.max_memory_allocated() if self.cuda else 0)
        self.step.clear()

    def _once(self) -> float:
        self.step.clear()
        began = self._now()
        loss = self.step.forward()
        loss.backward()
        seconds = self._now() - began
        self.loss = float(loss.detach())
        return seconds

    def _now(self) -> float:
        if not self.cuda:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def result(self, others: int) -> dict[str, Any]:
        """others: bytes that the other side held meanwhile."""
        return {
            "seconds": statistics.median(self.seconds),
            "all_seconds": self.seconds,
            "loss": self.loss,
            "peak_bytes": self.peak - others if self.cuda else None,
        }


def compare(
    specforge: SimpleNamespace, bench: Bench, case: Case, backend: str, teacher: str, rounds: int, repeats: int
) -> dict[str, Any]:
    """Both sides' results. Raises torch.OutOfMemoryError."""
    device = bench.topology.device
    allocated: Callable[[], int] = torch.cuda.memory_allocated if device.type == "cuda" else lambda: 0
    prepared = bench.prepare(case, loss=BY_TOKENS)
    held = allocated()
    ours = Side(prepared, device)
    theirs = Side(SpecForgeStep(specforge, prepared, bench.config, backend, teacher), device)
    others = allocated() - held
    for _ in range(rounds):
        theirs.round(repeats)
        ours.round(repeats)
    return {"specforge": theirs.result(held), "ours": ours.result(others)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=positive, nargs="+", default=[2944, 8192])
    parser.add_argument("--documents", type=positive, default=1, help="rows of SpecForge's batch, of equal length")
    parser.add_argument("--supervised", type=float, default=1.0, help="share of each document, at its end")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--backend", choices=BACKENDS, nargs="+", help="default: all; on a CPU fa")
    parser.add_argument("--teacher", choices=TEACHERS, nargs="+", default=list(TEACHERS))
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--repeats", type=positive, default=3, help="counted steps in a round")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16, on a CPU float32")
    parser.add_argument("--json", type=Path, help="file for the results, written anew after every case")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    options.dtype = options.dtype or ("float32" if on_cpu else "bfloat16")
    options.backend = options.backend or (["fa"] if on_cpu else list(BACKENDS))
    if on_cpu and "flex_attention" in options.backend:
        raise UserError("--backend: flex_attention has no backward pass on a CPU; leave it out")
    named = f"supervised={options.supervised},documents={options.documents},recompute=none"
    cases = [Case.parse(f"tokens={tokens},{named}") for tokens in options.tokens]
    if any(case.tokens % case.documents for case in cases):
        raise UserError(f"--documents: {options.documents} does not divide every number of tokens; choose others")
    specforge = import_specforge()
    config: DraftConfig = SHAPES[options.shape]
    topology = start(options.device)
    if on_cpu:
        torch.set_num_threads(1)
    replaced = replace_what_cannot_run(specforge, topology.device)
    bench = Bench(config, getattr(torch, options.dtype), topology, peak_tflops=1)
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    seconds = "processor seconds, one thread" if on_cpu else "seconds"
    settings |= {"draft": dataclasses.asdict(config), "replaced": replaced, "seconds": seconds}
    results: list[dict[str, Any]] = []

    def written() -> dict[str, Any]:
        content = document(settings, results)
        content["machine"] |= {name: version(name) for name in ("specforge", "transformers", "triton")}
        return content

    for case in cases:
        for backend in options.backend:
            for teacher in options.teacher:
                about = {"tokens": case.tokens, "backend": backend, "teacher": teacher}
                began = time.perf_counter()
                try:
                    row = compare(specforge, bench, case, backend, teacher, options.rounds, options.repeats)
                except Exception as error:  # a library's limit in one case must not lose the others
                    row = {"error": f"{type(error).__name__}: {first_sentence(error)}"}
                    row["failed"] = not isinstance(error, torch.OutOfMemoryError)
                gc.collect()
                results.append(about | row)
                print(f"{about}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
                save(options.json, written())
    print(_table(written()))
    stop_distributed()
    differ = [row for row in results if "error" not in row and not _agree(row, bench.dtype)]
    for row in differ:
        print(f"losses differ: {row}", file=sys.stderr)
    return 1 if differ or any(row.get("failed") for row in results) else 0


def _agree(row: dict[str, Any], dtype: torch.dtype) -> bool:
    theirs, ours = row["specforge"]["loss"], row["ours"]["loss"]
    return abs(theirs - ours) <= AGREEMENT[dtype] * abs(ours)


def _table(content: dict[str, Any]) -> str:
    lines = []
    for row in content["results"]:
        cells = [row["tokens"], row["backend"], row["teacher"]]
        if "error" in row:
            lines.append([*cells, row["error"], *[""] * 6])
            continue
        theirs, ours = row["specforge"], row["ours"]
        ratio = f"{ours['seconds'] / theirs['seconds']:.2f}"
        cells += [f"{theirs['seconds']:.4g}", f"{ours['seconds']:.4g}", ratio]
        cells += [f"{side['peak_bytes'] / 2**30:.1f}" if side["peak_bytes"] else "" for side in (theirs, ours)]
        lines.append([*cells, *(f"{side['loss']:.4f}" for side in (theirs, ours))])
    head = ["tokens", "backend", "teacher", "SpecForge s", "ours s", "ours / SpecForge"]
    head += ["SpecForge peak GiB", "ours peak GiB", "SpecForge loss", "ours loss"]
    settings = content["settings"]
    title = f"SpecForge {content['machine']['specforge']} and ours, forward + backward: {settings['shape']} shape, "
    title += f"{settings['dtype']}, {settings['seconds']}; {headline(content)}"
    if settings["replaced"]:
        title += f"; replaced: {'; '.join(settings['replaced'])}"
    return table(title, head, lines)


if __name__ == "__main__":
    run_command(main)
