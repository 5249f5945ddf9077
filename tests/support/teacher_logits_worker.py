"""Trains on two ranks with the teacher given as logits and as hidden states, all cases in one launch, for
tests/targets/test_teacher_logits.py."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from definition import Case, random_case
from processes import compute
from training_path import TeacherKind, Trained, train_case

from eagle3.objective.losses import LossConfig
from eagle3.objective.recompute import MemoryPlan
from eagle3.objective.streaming import Residence
from eagle3.parallel.sequence import SequenceSharding
from eagle3.parallel.topology import Topology

STEPS = 4
KINDS: tuple[TeacherKind, ...] = ("hidden", "logits")
# What the target does to its logits: scale and cap.
TRANSFORMS = {"plain": (1.0, None), "scaled": (0.3, None), "capped": (1.0, 2.5), "both": (1.7, 3.0)}
# Degrees of tensor and Ulysses.
LAYOUTS = {"tensor": (2, 1), "ulysses": (1, 2)}
DTYPES = (torch.float64, torch.float32)


@dataclass(frozen=True)
class Run:
    """One batch with one kind of teacher."""

    transform: str
    loss: str
    dtype: torch.dtype
    kind: TeacherKind
    residence: Residence = "device"

    @property
    def name(self) -> str:
        return f"{self.transform} {self.loss} {str(self.dtype)[6:]} {self.kind} {self.residence}"

    @property
    def case(self) -> Case:
        """Three documents: one with a prompt, one wholly supervised, and one supervised in parts."""
        masks = ([0] * 5 + [1] * 12, [1] * 9, [0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1])
        scale, cap = TRANSFORMS[self.transform]
        return replace(random_case(masks, seed=11), scale=scale, cap=cap)


def runs() -> list[Run]:
    every = [Run(transform, "kl", dtype, kind) for transform in TRANSFORMS for dtype in DTYPES for kind in KINDS]
    every += [Run("both", "lk_lambda", dtype, kind) for dtype in DTYPES for kind in KINDS]
    return [*every, Run("both", "kl", torch.float64, "logits", "host")]


def on_two_ranks(run: Run) -> bool:
    """Whether to try the run there. The transform with both scale and cap shows what either alone would."""
    return run.transform in ("plain", "both")


def execute(run: Run, topology: Topology) -> Trained:
    """Trains with blocks of a few rows."""
    sharding = SequenceSharding(topology.ulysses.size(), query_block=4)
    how = {"sharding": sharding, "memory": MemoryPlan("full", block_bytes=40_000), "residence": run.residence}
    return train_case(run.case, topology, run.dtype, STEPS, LossConfig(run.loss), **how, teacher_kind=run.kind)


def work(topology: Topology) -> dict[str, Trained]:
    """By the runs' names."""
    return {run.name: execute(run, topology) for run in filter(on_two_ranks, runs())}


if __name__ == "__main__":
    for layout, sizes in LAYOUTS.items():
        compute(Path(sys.argv[1]), layout, 2, sizes, work)
