"""Ten optimiser steps under DeepSpeed ZeRO-2, with accumulation and unequal counts, as one rank of a layout."""

import torch
from definition import random_case
from places import ZERO2
from sharded_cases import Sharded
from training_path import batch_counts, batch_weights, load_draft, stream_batch

from eagle3.draft.interchange import exported_tensors, whole_tensors
from eagle3.objective.losses import batch_metrics, sum_sums
from eagle3.objective.model import DraftObjective
from eagle3.parallel.topology import Topology
from eagle3.recipe.schema import Training
from eagle3.training.deepspeed_file import deepspeed_config
from eagle3.training.engine import full_weights, gradient_scale, start_engine

STEPS, TTT_STEPS, STREAMS = 10, 2, 4
LEARNING_RATE = 2e-3
COURSES = [
    Sharded(2, 1, 1, 1),
    Sharded(1, 2, 1, 2),
    Sharded(1, 1, 4, 1, ring_mode="p2p"),
    Sharded(2, 1, 2, 2),
    Sharded(2, 2, 2, 1, ring_mode="p2p"),
]


def reference(course: Sharded) -> Sharded:
    """The same training in one process, without recomputation."""
    return Sharded(1, 1, 1, 1, recompute="none")


def run_course(course: Sharded, topology: Topology) -> dict[str, torch.Tensor]:
    """Trains. Returns losses and norms [STEPS], and the final fp32 weights, whole on every rank."""
    shape = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2}
    draft = load_draft(random_case([[1]], seed=3, **shape), topology, torch.float32)
    accumulation = STREAMS // course.data
    training = Training(
        global_batch_size=STREAMS, accumulation=accumulation, learning_rate=LEARNING_RATE, gradient_clipping=0.5
    )
    objective = DraftObjective(draft, topology, course.ring_mode, course.memory)
    engine = start_engine(objective, topology, deepspeed_config(ZERO2, training, course.data))
    losses, norms = [], []
    for step in range(STEPS):
        streams = _masks(step)
        case = random_case([mask for stream in streams for mask in stream], seed=100 + step, **shape)
        documents = iter(case.documents)
        dealt = [[next(documents) for _ in stream] for stream in streams]
        mine = dealt[topology.data.rank() * accumulation :][:accumulation]
        batches = [stream_batch(case, each, TTT_STEPS, torch.float32, topology, course.sharding) for each in mine]
        counts = batch_counts(batches, topology)
        weights = batch_weights(engine.module, batches, counts, course.config, topology)
        sums = []
        for batch in batches:
            distilled = engine(batch, weights)
            engine.backward(distilled.surrogate * gradient_scale(course.data, accumulation))
            engine.step()
            sums.append(distilled.sums)
        losses.append(batch_metrics(course.config, sum_sums(sums, topology.batch), counts).loss)
        norms.append(float(engine.get_global_grad_norm()))
    weights = exported_tensors(whole_tensors(full_weights(draft), draft, topology.tensor))
    numbers = {"losses": torch.tensor(losses, dtype=torch.float64), "norms": torch.tensor(norms, dtype=torch.float64)}
    return numbers | {name: weight.contiguous() for name, weight in weights.items()}


def _masks(step: int) -> list[list[list[int]]]:
    """The loss masks of four streams. Counts differ between streams and steps, and one stream has none."""
    return [
        [[0] * (step % 5) + [1] * (3 + 2 * stream), [0, 1] * (1 + stream)] if (step + stream) % 4 else [[0] * 6]
        for stream in range(STREAMS)
    ]
