"""Show what a training step launches, computes, moves and holds on a GPU, and estimate its time, without a GPU.

    bash tests/cuda_build/run.sh FOLDER benchmarks/launches.py tokens=8192,recompute=none
    bash tests/cuda_build/run.sh FOLDER benchmarks/launches.py tokens=32768,recompute=full,ulysses=8 --json step.json

Runs one rank's step of the draft of Llama-3.1-8B on fake CUDA tensors (tracing.py), forward and backward, and draws up
a roofline timeline of it (roofline.py), at rates that were measured on an H200: bf16, K = 7, draft vocabulary 32,000.
Communication, copies between host and device and limits of the launch queue are not counted.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from one_rank import LLAMA_3_1_8B
from one_rank_measures import FrozenInputs, batch_of, model_flops, stream_of, weights_of
from roofline import DEVICES, Device
from shares import share_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from tracing import Row, Trace, Tracer

from eagle3.attention.block import EFFICIENT, FLASH, FLASH4, BlockKernels
from eagle3.attention.ring import RingMode
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import UserError, run_command
from eagle3.jobs.gate import require_divisible
from eagle3.objective.model import DraftObjective, Kernels
from eagle3.objective.recompute import MemoryPlan, Recompute
from eagle3.objective.streaming import Residence
from eagle3.parallel.sequence import Reach, SequenceSharding, plan_sequence
from eagle3.parallel.topology import Topology, start_distributed
from eagle3.planning.memory import step_bytes
from eagle3.planning.step import Planned, Sizes

# Attributes that Megatron-core and DeepSpeed set on a weight; kept when the weight is moved.
MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce", "sequence_parallel")
# Rooms (rows of the table), by where a kernel is launched; the first match counts.
ATTENTION = {"flash4": FLASH4, "flash": FLASH}
ROOMS = (
    ("loss", ("objective/distill", "objective/streaming", "objective/softmaxes", "objective/fused")),
    ("own keys", ("attention/fused_own",)),
    ("sums of gradients and shared rows", ("attention/shared",)),
    ("prefix attention", ("attention/",)),
    ("exchange", ("deepspeed ",)),
    ("rotation and SwiGLU", ("draft/rope", "draft/pointwise", "draft/fused_pointwise")),
)
CHOICES = {
    "recompute": get_args(Recompute),
    "inputs": get_args(Residence),
    "mode": get_args(RingMode),
    "attention": tuple(ATTENTION),
}


@dataclass(frozen=True)
class Case:
    """One rank's step."""

    tokens: int = 8192  # of the stream, one document
    supervised: float = 1.0  # share of it, at its end
    window: int = 0  # 0: full attention
    recompute: str = "none"
    inputs: str = "device"
    tensor: int = 1
    ulysses: int = 1
    ring: int = 1
    mode: str = "gather"
    rank: int = 0
    steps: int = 7  # K
    block_mib: int = 1024
    attention: str = "flash4"

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Parse text like `tokens=8192,recompute=none`. Raises UserError if it is malformed."""
        fields = {field.name: field.type for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            if name not in fields:
                raise UserError(f"{text!r}: {part!r}: write NAME=VALUE with one of {', '.join(fields)}")
            try:
                values[name] = fields[name](value)
            except ValueError as error:
                raise UserError(f"{text!r}: {name} is {value!r}; write a number") from error
        case = cls(**values)
        for name, allowed in CHOICES.items():
            if (value := getattr(case, name)) not in allowed:
                raise UserError(f"{text!r}: {name} is {value!r}; write {', '.join(allowed)}")
        ranks = case.tensor * case.ulysses * case.ring
        for name, fits, rule in (
            ("tokens", case.tokens > 0, "1 or more"),
            ("steps", case.steps > 0, "1 or more"),
            ("block_mib", case.block_mib > 0, "1 or more"),
            ("supervised", 0 < case.supervised <= 1, "a share above 0, at most 1"),
            ("window", case.window == 0 or case.window >= case.steps, f"0 for none, or at least steps, {case.steps}"),
            ("tensor", case.tensor > 0, "1 or more"),
            ("ulysses", case.ulysses > 0, "1 or more"),
            ("ring", case.ring > 0, "1 or more"),
            ("rank", 0 <= case.rank < ranks, f"0 to {ranks - 1}, one of this layout's ranks"),
        ):
            if not fits:
                raise UserError(f"{text!r}: {name} is {getattr(case, name)}; write {rule}")
        require_divisible(LLAMA_3_1_8B, case.tensor, case.ulysses)
        return case

    @property
    def memory(self) -> MemoryPlan:
        return MemoryPlan(self.recompute, self.block_mib * 2**20)

    @property
    def blocks(self) -> BlockKernels:
        flash = ATTENTION[self.attention]
        return BlockKernels(flash, flash, EFFICIENT, banded=flash, windowed=flash)

    @property
    def planned(self) -> Planned:
        """The step, for the planner."""
        sizes = Sizes(self.tensor, self.ulysses, self.ring)
        return Planned(LLAMA_3_1_8B, self.steps, torch.bfloat16, sizes, self.mode, self.memory, residence=self.inputs)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--json", type=Path, help="add the numbers to the list in this file, too")
    parser.add_argument("--top", type=int, default=0, help="list that many places, the longest first")
    options = parser.parse_args()
    case, device = traced_case(options)
    earlier = json.loads(options.json.read_text(encoding="utf-8")) if options.json and options.json.exists() else []
    numbers = report(case, device, options.top)
    if options.json:
        options.json.write_text(json.dumps([*earlier, numbers], indent=1) + "\n", encoding="utf-8")
    return 0


def parser_of(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("case", help="tokens=8192,recompute=none; also " + ", ".join(vars(Case())))
    parser.add_argument("--device", choices=DEVICES, default="h100", help="whose rates")
    parser.add_argument("--launch", type=float, metavar="US", help="microseconds of the host for each kernel")
    return parser


def traced_case(options: argparse.Namespace) -> tuple[Case, Device]:
    """What the command line asks for. Raises UserError."""
    if not torch.cuda.is_available():
        raise UserError(f"{Path(sys.argv[0]).name}: needs torch's CUDA build; start it with tests/cuda_build/run.sh")
    device = DEVICES[options.device]
    return Case.parse(options.case), device if options.launch is None else device._replace(launch=1e-6 * options.launch)


def start(case: Case) -> Topology:
    """Form the groups of a job in which this process is one rank, and the other ranks do not exist."""
    world = case.tensor * case.ulysses * case.ring
    os.environ.update(RANK=str(case.rank), LOCAL_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29999")
    dist.init_process_group("fake", rank=case.rank, world_size=world, store=FakeStore())
    import deepspeed  # uses the process group that exists

    deepspeed.init_distributed(dist_backend="nccl", auto_mpi_discovery=False, verbose=False)
    return start_distributed(tensor=case.tensor, ulysses=case.ulysses, ring=case.ring)


class FakeDraft(Eagle3Draft):
    """A draft whose weights are fake tensors, which Module.to cannot swap."""

    def to(self, *target: Any) -> "FakeDraft":
        for part in self.modules():
            for name, weight in part._parameters.items():
                if weight is not None:
                    moved = nn.Parameter(weight.detach().to(*target), requires_grad=weight.requires_grad)
                    vars(moved).update({mark: value for mark, value in vars(weight).items() if mark in MARKS})
                    part._parameters[name] = moved
        return self


def fake_draft(case: Case, topology: Topology, tracer: Tracer) -> tuple[FakeDraft, Tensor]:
    """The draft, and this rank's part of the target's head for the draft vocabulary, on the device and watched."""
    config = LLAMA_3_1_8B
    with tracer.fake:
        draft = FakeDraft(config, topology.modules, torch.bfloat16).to(topology.device)
        shape = config.draft_vocab_size // case.tensor, config.target_hidden_size
        head = torch.empty(*shape, dtype=torch.bfloat16, device=topology.device)
    for weight in (*draft.parameters(), head):
        tracer.watch(weight)
    return draft, head


def trace_step(case: Case, device: Device) -> tuple[Trace, dict[str, Any]]:
    """Runs the case. Returns the trace, and the step's model FLOPs and planned bytes."""
    topology, config = start(case), LLAMA_3_1_8B
    stream = stream_of(case.tokens, case.supervised, config.vocab_size)
    sharding = SequenceSharding(ulysses=case.ulysses, ring=case.ring)
    plan = plan_sequence(stream, Reach(case.steps, case.window or None), sharding, topology.sequence.rank())
    tracer = Tracer(FakeTensorMode(allow_non_fake_inputs=True), device)
    draft, head = fake_draft(case, topology, tracer)
    wide = config.target_hidden_size
    with tracer.fake:
        rows = ((len(plan.rows), 3 * wide), (len(plan.teacher), wide))
        frozen = [torch.empty(*shape, dtype=torch.bfloat16) for shape in rows]
    with tracer:
        with tracer.measure("inputs"):
            batch = batch_of(config, stream, plan, FrozenInputs(*frozen, head), topology.device, case.inputs)
        objective = DraftObjective(draft, topology, case.mode, case.memory, Kernels(case.blocks))
        weights = weights_of(dataclasses.replace(batch, query_of=plan.query_of, teacher=_counted(batch.teacher)))
        with tracer.measure("forward"):
            distilled = objective(batch, weights)
        with tracer.measure("backward"):
            distilled.surrogate.backward()
    flops = sum(model_flops(config, stream, plan).values()) / case.tensor
    return tracer.trace, {"model_flops": flops, "planned": step_bytes(case.planned, share_of(plan, stream)).total()}


def _counted(teacher):
    """The teacher with real best tokens on the CPU, where they can be counted. All of them are in the draft
    vocabulary."""
    return dataclasses.replace(teacher, best=torch.zeros(len(teacher.best), dtype=torch.long))


def report(case: Case, device: Device, top: int) -> dict[str, Any]:
    """Prints the tables of a case and returns its numbers."""
    trace, about = trace_step(case, device)
    total, seconds = trace.total(), trace.seconds["forward"] + trace.seconds["backward"]
    utilisation = about["model_flops"] / seconds / device.peak
    print(f"\n{case}\nestimated for an {device.name}, communication not counted:")
    print(
        f"step {seconds:.3f} s (forward {trace.seconds['forward']:.3f}, backward {trace.seconds['backward']:.3f}), MFU "
        f"{utilisation:.3f}, {case.tokens / seconds:,.0f} tokens/s of the stream; {total.launches:,} launches "
        f"({total.launches * device.launch:.3f} s of the host)"
    )
    planned, share = about["planned"], about["planned"] / trace.peak
    print(f"peak {trace.peak / 1e9:.2f} GB in {trace.peak_place}; planned {planned / 1e9:.2f} ({share:.3f})")
    print("waits for the device:", dict(trace.waits) or "none")
    for (kind, place), size in trace.transfers.items():
        print(f"{kind}: {size / 1e6:,.1f} MB in {place}")
    rooms: dict[str, Row] = defaultdict(Row)
    for key, row in trace.rows.items():
        if key[0] in ("forward", "backward"):
            for name, value in vars(row).items():
                setattr(rooms[room(*key)], name, getattr(rooms[room(*key)], name) + value)
    print("\n| room | launches | TFLOP | GB | kernel s |\n|---|---|---|---|---|")
    for name, row in sorted(rooms.items(), key=lambda item: -item[1].seconds):
        print(f"| {name} | {row.launches:,} | {row.flops / 1e12:,.1f} | {row.bytes / 1e9:,.1f} | {row.seconds:.3f} |")
    for key, row in sorted(trace.rows.items(), key=lambda item: -item[1].seconds)[:top]:
        print(f"{' | '.join(key)}: {row.calls:,} calls, {row.bytes / 1e9:,.1f} GB, {row.seconds:.4f} s")
    return {
        "case": dataclasses.asdict(case),
        "device": device.name,
        "seconds": seconds,
        "utilisation": utilisation,
        "peak_bytes": trace.peak,
        "planned_bytes": planned,
        "launches": total.launches,
        "waits": dict(trace.waits),
        "rooms": {name: vars(row) for name, row in rooms.items()},
    }


def room(phase: str, place: str, operator: str, kind: str) -> str:
    """The room that a kernel counts towards."""
    if kind != "memory":
        return f"{kind}, loss" if kind == "products" and "distill" in place else kind
    for name, marks in ROOMS:
        if place.startswith(marks):
            return name
    return f"other, {phase}"


if __name__ == "__main__":
    run_command(main)
