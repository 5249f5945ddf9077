"""Whether the kernels of attention, position-wise work and loss are right on this GPU and how fast they are, and
whether a whole training step on it agrees with the CPU.

    python benchmarks/cuda_kernels.py                        on CUDA
    python benchmarks/cuda_kernels.py --device cpu --tiny    whether the code runs

Kernels are tried as training tries them when it starts (eagle3/kernels/proof.py), for several kinds of drafts. Steps
are compared with the same step in fp32 on the CPU. If something is wrong, the exit code is 1.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from one_rank import document, save, start
from one_rank_measures import batch_of, random_rows, stream_of, weights_of
from torch import Tensor

from eagle3.draft.config import DraftConfig
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import run_command
from eagle3.kernels.choice import candidates_for, prove
from eagle3.kernels.proof import KernelDemand
from eagle3.objective.model import DraftObjective
from eagle3.objective.recompute import MemoryPlan
from eagle3.parallel.sequence import Reach, plan_sequence
from eagle3.parallel.topology import Topology, stop_distributed

PARTS = ("kernels", "steps")
# A draft of an 8B target, then other head sizes, groups and number formats.
DEMANDS = {
    "8B, bf16": KernelDemand(32, 8, 128, torch.bfloat16, 512, steps=7, hidden=4096, columns=32000),
    "8B, fp16": KernelDemand(32, 8, 128, torch.float16, None, steps=7, hidden=4096, columns=32000),
    "8B, fp32": KernelDemand(32, 8, 128, torch.float32, None, steps=7, hidden=4096, columns=32000),
    "one head of Ulysses 8": KernelDemand(4, 1, 128, torch.bfloat16, 512, steps=7, hidden=4096, columns=32000),
    "no groups, head size 64": KernelDemand(32, 32, 64, torch.bfloat16, None, steps=5, hidden=2048, columns=32000),
    "head size 256": KernelDemand(8, 4, 256, torch.bfloat16, None, steps=7, hidden=2560, columns=32000),
}
TINY = KernelDemand(4, 2, 8, torch.float32, 20, steps=3, hidden=16, columns=100)
# Relative errors allowed in the loss, and in the gradient of the worst weight, through seven dependent steps.
STEP_BOUNDS = {torch.bfloat16: (1e-2, 1e-1), torch.float32: (1e-5, 1e-3)}


def try_kernels(device: str, tiny: bool) -> Iterator[dict[str, Any]]:
    topology = start(device)
    for name, demand in {"tiny": TINY}.items() if tiny else DEMANDS.items():
        candidates = candidates_for(demand, topology.device)
        timed = topology.device.type == "cuda"
        table = prove(candidates, demand, topology, timed)
        for kind, verdicts in table.items():
            for verdict in verdicts:
                yield {"draft": name, "kind": kind, "within_bound": verdict.right} | verdict._asdict()


class StepRun(NamedTuple):
    """loss: the surrogate. gradients: of each trained weight, in fp32 on the CPU."""

    loss: float
    gradients: dict[str, Tensor]


def run_steps(device: str, tiny: bool) -> Iterator[dict[str, Any]]:
    """Whole steps on the device in every mode against one in fp32 on the CPU, from the same weights and inputs."""
    topology = start(device)
    on_cpu = dataclasses.replace(topology, device=torch.device("cpu"))
    config = DraftConfig(
        hidden_size=256,
        target_hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=2048,
        draft_vocab_size=1024,
        max_position_embeddings=4096,
    )
    stream = stream_of(150 if tiny else 3000, 0.4, config.vocab_size)
    plan = plan_sequence(stream, Reach(7))
    torch.manual_seed(4)
    rows = random_rows(config, plan, torch.bfloat16, on_cpu.device, "device")
    origin = Eagle3Draft(config, topology.modules, torch.float32)
    with torch.no_grad():
        for weight in origin.parameters():  # away from nearly uniform attention; numbers that bf16 holds
            weight.mul_(4 if weight.dim() > 1 else 1).copy_(weight.bfloat16())

    def run(where: Topology, dtype: torch.dtype, recompute: str = "none", inputs: str = "device") -> StepRun:
        draft = Eagle3Draft(config, topology.modules, dtype)
        draft.load_state_dict(origin.state_dict())
        frozen = type(rows)(rows.aux.to(dtype), rows.last.to(dtype), rows.head.to(where.device, dtype))
        batch = batch_of(config, stream, plan, frozen, where.device, inputs)
        objective = DraftObjective(draft.to(where.device), where, memory=MemoryPlan(recompute, 4 * 2**20))
        loss = objective(batch, weights_of(batch)).surrogate
        loss.backward()
        gradients = {name: w.grad.float().cpu() for name, w in draft.named_parameters() if w.requires_grad}
        return StepRun(float(loss.detach()), gradients)

    expected = run(on_cpu, torch.float32)
    for dtype, recompute, inputs in product(STEP_BOUNDS, ("none", "attention_kept", "full"), ("device", "host")):
        actual = run(topology, dtype, recompute, inputs)
        errors = {
            name: float((actual.gradients[name] - gradient).norm() / gradient.norm())
            for name, gradient in expected.gradients.items()
        }
        worst = max(errors, key=errors.__getitem__)
        loss = abs(actual.loss - expected.loss) / abs(expected.loss)
        yield {
            "dtype": str(dtype).removeprefix("torch."),
            "recompute": recompute,
            "inputs": inputs,
            "loss_error": loss,
            "worst_gradient_error_l2": errors[worst],
            "worst_gradient": worst,
            "within_bound": loss <= STEP_BOUNDS[dtype][0]
            and all(error <= STEP_BOUNDS[dtype][1] for error in errors.values()),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small drafts and streams")
    parser.add_argument("--out", type=Path, help="a JSON file, written anew after every row")
    options = parser.parse_args()
    settings = vars(options)
    work = {"kernels": try_kernels, "steps": run_steps}
    results: dict[str, list[dict[str, Any]]] = {}
    for part in options.only:
        began = time.perf_counter()
        results[part] = []
        for row in work[part](options.device, options.tiny):
            results[part].append(row)
            save(options.out, document(settings, results))
        print(f"{part}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        print({"kernels": _kernels_table, "steps": _steps_table}[part](results[part]), end="\n\n", flush=True)
    beyond = sum(not row["within_bound"] for rows in results.values() for row in rows)
    print(f"{beyond} of {sum(map(len, results.values()))} beyond their bound")
    stop_distributed()
    return 1 if beyond else 0


def _kernels_table(rows: list[dict[str, Any]]) -> str:
    head = ["draft", "blocks", "kernel", "error, of its bound", "forward + backward ms", "wrong"]
    cells = [
        [row["draft"], row["kind"], row["kernel"], f"{row['error']:.3f}"]
        + ["" if row["seconds"] is None else f"{1e3 * row['seconds']:.3f}", row["reason"]]
        for row in rows
    ]
    return _table(head, cells)


def _steps_table(rows: list[dict[str, Any]]) -> str:
    head = ["format", "recompute", "inputs", "loss", "worst gradient (L2)", "of", "within bound"]
    cells = [
        [row["dtype"], row["recompute"], row["inputs"], f"{row['loss_error']:.0e}"]
        + [f"{row['worst_gradient_error_l2']:.0e}", row["worst_gradient"], _yes(row)]
        for row in rows
    ]
    return _table(head, cells)


def _yes(row: dict[str, Any]) -> str:
    return "yes" if row["within_bound"] else "NO"


def _table(head: list[str], rows: list[list[Any]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [head, ["---"] * len(head), *rows])


if __name__ == "__main__":
    run_command(main)
