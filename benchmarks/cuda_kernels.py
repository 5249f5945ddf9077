"""What the kernels of the attention's blocks compute and how fast, and whether a whole training step on the device
agrees with the CPU.

    python benchmarks/cuda_kernels.py                        on CUDA
    python benchmarks/cuda_kernels.py --device cpu --tiny    whether the code runs

Blocks are held against the definition in fp64 on the CPU, differentiated by autograd: the error of the output, its
log-sum-exp and the three gradients, relative to their largest entry and in the L2 norm. Inputs are the same numbers in
every format, in which all of them are exact. Steps are held against the same step in fp32 on the CPU. An error beyond
its bound is told, and the exit code is then 1.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from one_rank import document, save, start
from one_rank_measures import batch_of, random_rows, stream_of, weights_of
from torch import Tensor

from eagle3.attention.block import (
    block_attention,
    block_attention_backward,
    kernel_name,
    merge_blocks,
)
from eagle3.attention.plain import BlockGradients, BlockOutput, Scoring, Visibility
from eagle3.draft.config import DraftConfig
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import run_command
from eagle3.objective.model import DraftObjective, MemoryPlan
from eagle3.parallel.sequence import plan_sequence
from eagle3.parallel.topology import Topology, stop_distributed

PARTS = ("blocks", "steps")
RESULTS = ("out", "lse", "dq", "dk", "dv")
# Relative L2 errors: some units in the last place of the format. fp32 as good as split TF32 on tensor cores.
BLOCK_BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4, torch.float64: 1e-10}
# Of the loss, and of the gradient of the worst weight, through seven dependent steps.
STEP_BOUNDS = {torch.bfloat16: (1e-2, 1e-1), torch.float32: (1e-5, 1e-3)}


class Block(NamedTuple):
    """merged: in two blocks of half the keys each, as a ring makes them."""

    queries: int
    keys: int
    visibility: Visibility
    heads: int
    kv_heads: int
    merged: bool = False


class Inputs(NamedTuple):
    """q, grad [Q, heads, d]; k, v [S, kv_heads, d]; visible [Q, S]."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    visible: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> "Inputs":
        numbers = (tensor.to(device, dtype) for tensor in self[:4])
        return Inputs(*numbers, self.visible.to(device))


def blocks(tiny: bool) -> list[Block]:
    """Of the sizes that schedules are made of, and odd ones, whose masks and log-sum-exps are padded."""
    unit, groupings = (16, ((4, 2), (4, 4))) if tiny else (512, ((32, 8), (32, 32), (8, 1)))
    shapes: tuple[tuple[int, int, Visibility], ...] = (
        (unit, 16 * unit, "full"),
        (unit, unit, "causal"),
        (unit, 2 * unit, "masked"),
        (unit - 3, 2 * unit - 11, "masked"),
        (unit - 3, unit // 2 - 5, "full"),
        (unit - 3, unit - 3, "causal"),
    )
    unmerged = [Block(*shape, *grouping) for grouping in groupings for shape in shapes]
    usual = groupings[0]
    return [
        *unmerged,
        Block(unit, 16 * unit, "full", *usual, merged=True),
        Block(unit - 3, unit - 6, "full", *usual, merged=True),
    ]


def inputs_of(block: Block, head_dim: int) -> Inputs:
    """fp64 on the CPU: normal numbers rounded to 32nds and cut at 4, which all formats hold."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * 32).round().div(32).clamp(-4, 4)

    query, key = (block.queries, block.heads, head_dim), (block.keys, block.kv_heads, head_dim)
    # as on a ring rank's diagonal: the first queries see some keys, the last ones all
    visible = torch.ones(block.queries, block.keys, dtype=torch.bool)
    if block.visibility != "full":
        visible = visible.tril(block.keys - block.queries)
    return Inputs(draw(*query), draw(*key), draw(*key), draw(*query), visible)


def definition(inputs: Inputs) -> tuple[Tensor, ...]:
    """RESULTS by autograd, a key/value head at a time."""
    scale, group = inputs.q.shape[-1] ** -0.5, inputs.q.shape[1] // inputs.k.shape[1]
    results = []
    for head in range(inputs.k.shape[1]):
        heads = slice(head * group, (head + 1) * group)
        q, k, v = (x.clone().requires_grad_() for x in (inputs.q[:, heads], inputs.k[:, head], inputs.v[:, head]))
        scores = torch.einsum("qgd,sd->gqs", q, k) * scale
        scores = scores.masked_fill(~inputs.visible, float("-inf"))
        lse = scores.logsumexp(-1)
        out = torch.einsum("gqs,sd->qgd", (scores - lse[..., None]).exp(), v)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), inputs.grad[:, heads])
        results.append((out.detach(), lse.detach().t(), dq, dk[:, None], dv[:, None]))
    return tuple(torch.cat(parts, 1) for parts in zip(*results, strict=True))


class Call:
    """A block's forward and backward as eagle3/attention/ring.py makes them."""

    def __init__(self, block: Block, inputs: Inputs) -> None:
        self.block, self.inputs = block, inputs
        half = block.keys // 2
        self.parts = [slice(0, half), slice(half, block.keys)] if block.merged else [slice(0, block.keys)]
        visible = inputs.visible if block.visibility == "masked" else None
        self.scoring = Scoring(inputs.q.shape[-1] ** -0.5, block.visibility, visible)

    def forward(self) -> BlockOutput:
        merged = None
        for keys in self.parts:
            q, k, v = self.inputs.q, self.inputs.k[keys], self.inputs.v[keys]
            part = block_attention(q, k, v, self.scoring)
            if not self.block.merged:
                return part
            part = BlockOutput(part.out.to(part.lse.dtype), part.lse)
            merged = part if merged is None else merge_blocks(merged, part)
        return BlockOutput(merged.out.to(self.inputs.q.dtype), merged.lse)

    def backward(self, output: BlockOutput) -> BlockGradients:
        inputs = self.inputs
        gradients = [
            block_attention_backward(inputs.grad, inputs.q, inputs.k[keys], inputs.v[keys], *output, self.scoring)
            for keys in self.parts
        ]
        if not self.block.merged:
            return gradients[0]
        dq = sum(part.q.to(output.lse.dtype) for part in gradients).to(inputs.q.dtype)
        return BlockGradients(dq, torch.cat([part.k for part in gradients]), torch.cat([part.v for part in gradients]))


def seconds_of(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Of one call, in a row of them."""
    if device.type == "cpu":
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - began) / repeats
    for _ in range(3):
        work()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(repeats):
        work()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3 / repeats


def relative(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """Error over the largest entry, and in the L2 norm. nan where one is not finite."""
    error = actual.detach().to("cpu", expected.dtype) - expected
    return float(error.abs().max() / expected.abs().max()), float(error.norm() / expected.norm())


def measure_block(
    block: Block, inputs: Inputs, expected: tuple[Tensor, ...], dtype: torch.dtype, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Numerics and time of one block in one number format. Backward has five products to forward's two."""
    call = Call(block, inputs.to(device, dtype))
    output = call.forward()
    gradients = call.backward(output)
    errors = {name: relative(x, y) for name, x, y in zip(RESULTS, (*output, *gradients), expected, strict=True)}
    flops = 4 * int(inputs.visible.sum()) * block.heads * inputs.q.shape[-1]
    forward, backward = (seconds_of(work, device, repeats) for work in (call.forward, lambda: call.backward(output)))
    head_dim = inputs.q.shape[-1]
    return {
        "block": block._asdict(),
        "dtype": str(dtype).removeprefix("torch."),
        "kernel": kernel_name(device, dtype, head_dim, block.visibility),
        "error_of_largest": {name: error[0] for name, error in errors.items()},
        "error_l2": {name: error[1] for name, error in errors.items()},
        "within_bound": all(error[1] <= BLOCK_BOUNDS[dtype] for error in errors.values()),
        "forward_seconds": forward,
        "backward_seconds": backward,
        "forward_tflops": flops / forward / 1e12,
        "backward_tflops": 2.5 * flops / backward / 1e12,
    }


class StepRun(NamedTuple):
    """loss: the surrogate. gradients: of each trained weight, in fp32 on the CPU."""

    loss: float
    gradients: dict[str, Tensor]


def run_steps(device: str, tiny: bool) -> list[dict[str, Any]]:
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
    plan = plan_sequence(stream, 7)
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
    results = []
    for dtype, recompute, inputs in product(STEP_BOUNDS, ("none", "attention_kept", "full"), ("device", "host")):
        actual = run(topology, dtype, recompute, inputs)
        errors = {name: relative(actual.gradients[name], gradient)[1] for name, gradient in expected.gradients.items()}
        worst = max(errors, key=errors.__getitem__)
        loss = abs(actual.loss - expected.loss) / abs(expected.loss)
        results.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "recompute": recompute,
                "inputs": inputs,
                "loss_error": loss,
                "worst_gradient_error_l2": errors[worst],
                "worst_gradient": worst,
                "within_bound": loss <= STEP_BOUNDS[dtype][0]
                and all(error <= STEP_BOUNDS[dtype][1] for error in errors.values()),
            }
        )
    stop_distributed()
    return results


def run_blocks(device: torch.device, tiny: bool, head_dim: int, repeats: int) -> list[dict[str, Any]]:
    results = []
    for block in blocks(tiny):
        inputs = inputs_of(block, head_dim)
        expected = definition(inputs)
        results += [measure_block(block, inputs, expected, dtype, device, repeats) for dtype in BLOCK_BOUNDS]
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small blocks and streams")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20, help="timed calls after three to warm up")
    parser.add_argument("--out", type=Path, help="a JSON file, written anew after every part")
    options = parser.parse_args()
    settings = vars(options)
    work = {
        "blocks": lambda: run_blocks(start(options.device).device, options.tiny, options.head_dim, options.repeats),
        "steps": lambda: run_steps(options.device, options.tiny),
    }
    results: dict[str, list[dict[str, Any]]] = {}
    for part in options.only:
        began = time.perf_counter()
        results[part] = work[part]()
        print(f"{part}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        save(options.out, document(settings, results))
        print({"blocks": _blocks_table, "steps": _steps_table}[part](results[part]), end="\n\n", flush=True)
    beyond = sum(not row["within_bound"] for rows in results.values() for row in rows)
    print(f"{beyond} of {sum(map(len, results.values()))} beyond their bound")
    return 1 if beyond else 0


def _blocks_table(rows: list[dict[str, Any]]) -> str:
    head = ["block", "heads", "format", "kernel", *(f"{name} (L2)" for name in RESULTS)]
    head += ["forward ms (TFLOP/s)", "backward ms (TFLOP/s)", "within bound"]
    cells = []
    for row in rows:
        block = Block(**row["block"])
        what = f"{block.queries} x {block.keys} {block.visibility}"
        what += ", merged" * block.merged
        errors = [f"{row['error_of_largest'][name]:.0e} ({row['error_l2'][name]:.0e})" for name in RESULTS]
        times = [f"{1e3 * row[f'{way}_seconds']:.3f} ({row[f'{way}_tflops']:.0f})" for way in ("forward", "backward")]
        heads = f"{block.heads}/{block.kv_heads}"
        cells.append([what, heads, row["dtype"], row["kernel"], *errors, *times, _yes(row)])
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
