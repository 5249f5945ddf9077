"""Show where the trainer waits for the GPU, and what engine and optimiser add to a step, without a GPU.

    bash tests/cuda_build/run.sh FOLDER benchmarks/training_loop.py tokens=8192,recompute=full

Runs the trainer's parts on fake CUDA tensors (tracing.py): two optimiser steps of two streams each under DeepSpeed
ZeRO-2, a held-out measurement and the engine's checkpoint, without its data. The case is one of launches.py, on one
rank; each stream has one sample of its length. Prints, for each of these parts, the estimated time and every place that
waits for the device.
"""

import json
import tempfile
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from launches import Case, fake_draft, parser_of, start, traced_case
from one_rank import LLAMA_3_1_8B
from roofline import Device
from shares import share_of
from torch._subclasses.fake_tensor import FakeTensorMode
from tracing import Tracer

from eagle3.console import Console
from eagle3.errors import UserError, run_command
from eagle3.objective.model import DraftObjective, micro_batch
from eagle3.parallel.sequence import Reach, SequenceSharding
from eagle3.parallel.topology import Topology
from eagle3.patches import NormLimit
from eagle3.planning.memory import rank_bytes
from eagle3.recipe.schema import Recipe
from eagle3.states.loader import DrawnSample, SampleReading, StreamLoader
from eagle3.states.rows import LastHidden, Rows
from eagle3.text.samples import SampleSet
from eagle3.training.checkpoint import Checkpoints
from eagle3.training.deepspeed_file import deepspeed_config
from eagle3.training.engine import start_engine, warmup_cosine
from eagle3.training.run_folder import RunFolder
from eagle3.training.trainer import Trainer
from eagle3.training.watched import watched

STEPS, STREAMS = 2, 2
ZERO2 = Path(__file__).parents[1] / "ds_configs" / "zero2.json"


class ZeroRows:
    """A source of hidden states on the CPU, all zero."""

    alone = False  # so that nothing is read ahead by another thread, outside the trace

    def rows(self, readings: list[SampleReading]) -> list[Rows]:
        return [self._zeros(len(reading.aux), len(reading.teacher)) for reading in readings]

    def _zeros(self, aux: int, teacher: int) -> Rows:
        wide, dtype = LLAMA_3_1_8B.target_hidden_size, torch.bfloat16
        predictions = torch.zeros(teacher, dtype=torch.long), torch.zeros(teacher)
        return Rows(
            torch.zeros(aux, 3 * wide, dtype=dtype), LastHidden(torch.zeros(teacher, wide, dtype=dtype), *predictions)
        )


class FakeObjective(DraftObjective):
    """An objective whose weights are on the device already. They are fake, and Module.to cannot swap these."""

    def to(self, *target: Any, **options: Any) -> "FakeObjective":
        return self

    def bfloat16(self) -> "FakeObjective":
        return self


class LoopTrace:
    """The tracer of a job, and what it recorded of each part."""

    def __init__(self, device: Device) -> None:
        self.tracer, self.parts = Tracer(FakeTensorMode(allow_non_fake_inputs=True), device), {}

    @contextmanager
    def part(self, name: str):
        trace = self.tracer.trace
        trace.waits.clear()
        with self.tracer.measure(name):
            yield
        launches = trace.total((name,)).launches
        self.parts[name] = {"seconds": trace.seconds[name], "launches": launches, "waits": dict(trace.waits)}


def trace_loop(case: Case, device: Device, folder: Path) -> dict[str, Any]:
    """Run the parts; return what was recorded of each, and the peak memory beside the planner's."""
    topology, recipe, trace = start(case), recipe_of(case, folder / "run"), LoopTrace(device)
    run = RunFolder(recipe.output.dir)
    with (
        closing(run),
        watched(topology, hang_minutes=None, advice="", less_memory="") as watchdog,
    ):
        trainer = trainer_of(case, topology, recipe, run, watchdog, trace)
        with trace.tracer:
            for step in range(STEPS):
                with trace.part(f"step {step + 1}"):
                    trainer._train_step(step)
            with trace.part("held out"):
                trainer._measure_held_out(STEPS, None)
            with trace.part("checkpoint"), torch.serialization.skip_data(materialize_fake_tensors=True):
                trainer.engine.save_checkpoint(str(folder), "checkpoint", save_latest=False)
    (stream,) = trainer.train_loader.load([DrawnSample(0, 0)], 1)
    planned = rank_bytes(case.planned, share_of(stream.plan, stream.stream)).total()
    peak = trace.tracer.trace
    return {"parts": trace.parts, "peak_bytes": peak.peak, "peak_place": peak.peak_place, "planned_bytes": planned}


def recipe_of(case: Case, folder: Path) -> Recipe:
    training = {
        "max_steps": STEPS,
        "global_batch_size": STREAMS,
        "accumulation": STREAMS,
        "ttt_steps": case.steps,
        "dtype": "bfloat16",
    }
    memory = {"recompute": case.recompute, "inputs": case.inputs}
    sections = {"training": training, "memory": memory, "output": {"dir": str(folder)}}
    return Recipe.model_validate({"model": {"target": "none"}, **sections})


def trainer_of(case: Case, topology: Topology, recipe: Recipe, run: RunFolder, watchdog, trace: LoopTrace) -> Trainer:
    """The trainer of a draft that is fake, on samples of random tokens."""
    tracer, config, training = trace.tracer, LLAMA_3_1_8B, recipe.training
    draft, head = fake_draft(case, topology, tracer)
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(STREAMS, case.tokens), dtype=np.int32)
    mask = np.arange(case.tokens) >= round(case.tokens * (1 - case.supervised))
    loader = StreamLoader(
        SampleSet.pack([(ids, mask) for ids in tokens]),
        ZeroRows(),
        partial(micro_batch, draft_id=torch.arange(config.vocab_size), head=head, dtype=torch.bfloat16),
        reach=Reach(case.steps, case.window or None),
        rule=training.rows,
        sharding=SequenceSharding(),
        data=topology.data,
        sequence=topology.sequence,
    )
    console = Console(speaks=True)
    with tracer:
        engine = start_engine(
            FakeObjective(draft, topology, case.mode, case.memory),
            topology,
            deepspeed_config(ZERO2, training, topology.data.size()),
            warmup_cosine(STEPS, training.warmup_fraction, training.final_learning_rate_fraction),
        )
    return Trainer(
        recipe=recipe,
        topology=topology,
        folder=run,
        engine=engine,
        norms=NormLimit(engine, training.skip_above_norm),
        train_loader=loader,
        held_out_loader=loader,
        checkpoints=Checkpoints(run.checkpoints, 1, "traced", console.warn),
        console=console,
        watchdog=watchdog,
        steps=STEPS,
    )


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    options = parser.parse_args()
    case, device = traced_case(options)
    if case.tensor * case.ulysses * case.ring > 1:
        raise UserError(f"{options.case!r}: has several ranks; training_loop.py runs one, launches.py traces layouts")
    with tempfile.TemporaryDirectory() as folder:
        numbers = trace_loop(case, device, Path(folder))
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    print(f"\n{case}\nestimated for an {device.name}, copies between host and device not counted:")
    for name, part in numbers["parts"].items():
        print(f"{name}: {part['seconds']:.3f} s, {part['launches']:,} launches, waits: {part['waits'] or 'none'}")
    peak, planned = numbers["peak_bytes"], numbers["planned_bytes"]
    print(f"peak {peak / 1e9:.2f} GB in {numbers['peak_place']}; planned {planned / 1e9:.2f} ({planned / peak:.3f})")
    return 0


if __name__ == "__main__":
    run_command(main)
