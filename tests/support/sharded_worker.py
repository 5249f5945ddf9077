"""Runs the cases of sharded_cases.py, all in one launch, and writes what each computed for
tests/parallel/test_sharded.py."""

import dataclasses
import itertools
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from deepspeed.sequence.layer import DistributedAttention
from definition import random_case
from places import GOLDEN, ZERO2
from processes import compute
from sent_bytes import SentBytes
from sharded_cases import HEADS, MOST_PROCESSES, STEPS, Sharded, base_cases, covering_cases
from shares import share_of
from torch import Tensor, nn
from training_path import batch_weights, load_draft, stream_batch, train_case

from eagle3.attention.ring import RingMode
from eagle3.attention.schedule import schedule_prefix
from eagle3.attention.ttt import KeyValue, TTTAttention
from eagle3.draft.interchange import exported_tensors, whole_tensors
from eagle3.jobs.verify import read_case, run_case
from eagle3.objective.losses import batch_metrics, batch_sum
from eagle3.objective.model import DraftObjective
from eagle3.objective.recompute import MemoryPlan, Recompute
from eagle3.parallel.sequence import Reach, Stream, plan_sequence
from eagle3.parallel.topology import Topology
from eagle3.planning.step import Planned, Sizes, Traffic, sent_bytes
from eagle3.recipe.schema import Training
from eagle3.training.deepspeed_file import deepspeed_config
from eagle3.training.engine import full_weights, gradient_scale, start_engine

GOLDEN_CASES = ("dense", "ragged", "windowed", "served")


def run(sizes: tuple[int, ...], cases: list[Sharded], courses: list[Sharded], topology: Topology) -> dict:
    """What each rank computes: cases and courses, golden cases and the bytes sent by name, and differences from
    DeepSpeed's attention."""
    results, ulysses = {}, sizes[1]
    for case in cases:
        data = case.case()
        for dtype in dtypes(case):
            results[case.name, dtype] = train_case(
                data, topology, dtype, STEPS, case.config, case.dealt(data), case.sharding, case.ring_mode, case.memory
            )
        if case in base_cases() and case.sizes == (1, 2, 2, 1):
            results["bytes"] = count_bytes(case, topology)
        for name in golden_cases(case):
            golden = read_case(GOLDEN / name)
            results[case.name, name] = run_case(
                golden, topology, 7, torch.float32, ZERO2, case.sharding, case.ring_mode, case.memory
            )
    if ulysses > 1 and math.prod(sizes) == ulysses:
        results["distributed attention"] = [differences(topology, kv_heads) for kv_heads in (ulysses, 8)]
    return results | {(course.name, "course"): run_course(course, topology) for course in courses}


def dtypes(case: Sharded) -> tuple[torch.dtype, ...]:
    rounded = ((in_fp32, torch.float32), (in_bfloat16, torch.bfloat16))
    return (torch.float64, *(dtype for included, dtype in rounded if included(case)))


def in_fp32(case: Sharded) -> bool:
    """Each layout once."""
    return case in base_cases()


def in_bfloat16(case: Sharded) -> bool:
    """The layouts of 8 processes on one data-parallel rank."""
    return case in base_cases() and case.world == 8 and case.data == 1


def golden_cases(case: Sharded) -> list[str]:
    """The golden cases that a layout computes: one, by turns, and all of them on 8 processes of one data-parallel rank.
    None if the cases' 4 query and 2 key/value heads cannot be dealt to it."""
    layouts = base_cases()
    if case not in layouts or case.world > MOST_PROCESSES or 4 % (case.tensor * case.ulysses):
        return []
    if case.world == MOST_PROCESSES and case.data == 1:
        return [*GOLDEN_CASES]
    return [GOLDEN_CASES[layouts.index(case) % len(GOLDEN_CASES)]]


# Bytes that a rank sends in one step: counted at the collectives, and by the planner's formula ------------------------

WAYS = list(itertools.product(get_args(RingMode), get_args(Recompute)))


def count_bytes(base: Sharded, topology: Topology) -> dict[str, Any]:
    """For each ring mode and recompute mode: `counted` and `expected` bytes by kind and phase, and `shared`, how many
    numbers this rank's K_0 and V_0 have. In bfloat16, so that a gradient in fp32 has twice the bytes of its tensor."""
    return {
        " ".join(way): _count(dataclasses.replace(base, ring_mode=way[0], recompute=way[1]), topology) for way in WAYS
    }


def _count(sharded: Sharded, topology: Topology) -> dict[str, Any]:
    case, memory, dtype = sharded.case(), MemoryPlan(sharded.recompute), torch.bfloat16
    draft = load_draft(case, topology, dtype)
    objective = DraftObjective(draft, topology, sharded.ring_mode, memory)
    batch = stream_batch(case, case.documents, STEPS, dtype, topology, sharded.sharding)
    _, weights = batch_weights(objective, [batch], sharded.config, topology)
    with SentBytes(case.config.head_dim) as counter:
        distilled = objective(batch, weights)
        counter.phase = "backward"
        distilled.surrogate.backward()
    stream = Stream.pack([each.ids for each in case.documents], [each.loss_mask for each in case.documents], case.rows)
    share = share_of(plan_sequence(stream, Reach(STEPS), sharded.sharding, topology.sequence.rank()), stream)
    sizes = Sizes(sharded.tensor, sharded.ulysses, sharded.ring)
    planned = Planned(case.config, STEPS, dtype, sizes, sharded.ring_mode, memory, device="cpu")
    return {
        "counted": _named(counter.sent),
        "expected": _named(sent_bytes(planned, share)),
        "shared": 2 * share.keys * case.config.num_key_value_heads * case.config.head_dim,
    }


def _named(traffic: Traffic) -> dict[str, float]:
    return {f"{kind} {phase}": number for (kind, phase), number in traffic.items() if number}


# Our attention over a Ulysses group beside DeepSpeed's own ------------------------------------------------------------

TOKENS, DIM, SCALE = 24, 6, 0.4


class CausalSoftmax(nn.Module):
    """The local attention that DistributedAttention is given: [tokens, 1, heads, d], all tokens of this rank's
    heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * SCALE
        unseen = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
        return torch.einsum("bhqk,kbhd->qbhd", scores.masked_fill(unseen, float("-inf")).softmax(-1), v).contiguous()


def differences(topology: Topology, kv_heads: int) -> dict[str, float]:
    """Largest difference on this rank of output and gradients of q, k, v, in fp64."""
    generator = torch.Generator().manual_seed(kv_heads)
    size, rank = topology.ulysses.size(), topology.ulysses.rank()
    shapes = ((HEADS, DIM), (kv_heads, DIM), (kv_heads, DIM), (HEADS, DIM))
    mine = [torch.randn(TOKENS, *shape, generator=generator, dtype=torch.float64).chunk(size)[rank] for shape in shapes]
    *inputs, upstream = (tensor.contiguous() for tensor in mine)

    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    rows = torch.arange(TOKENS)
    attention = TTTAttention.over(topology.ulysses, topology.alone, SCALE)
    shared = attention.start(KeyValue(ours[1], ours[2])).shared
    out = attention(ours[0], shared, (schedule_prefix(rows, rows, rows, block=5),))
    out.backward(upstream)

    theirs = [tensor.clone()[:, None].requires_grad_() for tensor in inputs]
    deepspeed = DistributedAttention(CausalSoftmax(), topology.ulysses, scatter_idx=2, gather_idx=0)
    reference = deepspeed(*theirs, 1)
    reference.backward(upstream[:, None])
    pairs = {"out": (out, reference[:, 0])}
    pairs |= {name: (a.grad, b.grad[:, 0]) for name, a, b in zip("qkv", ours, theirs, strict=True)}
    return {name: float((a - b).abs().max()) for name, (a, b) in pairs.items()}


# Ten optimiser steps under DeepSpeed ZeRO-2, with accumulation and unequal counts -------------------------------------

COURSE_STEPS, TTT_STEPS, STREAMS = 10, 2, 4
LEARNING_RATE = 2e-3
COURSES = [
    Sharded(2, 1, 1, 1),
    Sharded(1, 2, 1, 2),
    Sharded(1, 1, 4, 1, ring_mode="p2p"),
    Sharded(2, 1, 2, 2),
    Sharded(2, 2, 2, 1, ring_mode="p2p"),
]
ALONE = Sharded(1, 1, 1, 1, recompute="none")  # the same training in one process, without recomputation


def run_course(course: Sharded, topology: Topology) -> dict[str, Tensor]:
    """Trains. Returns losses and norms [COURSE_STEPS], and the final fp32 weights, whole on every rank."""
    shape = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2}
    draft = load_draft(random_case([[1]], seed=3, **shape), topology, torch.float32)
    accumulation = STREAMS // course.data
    training = Training(
        global_batch_size=STREAMS, accumulation=accumulation, learning_rate=LEARNING_RATE, gradient_clipping=0.5
    )
    objective = DraftObjective(draft, topology, course.ring_mode, course.memory)
    engine = start_engine(objective, topology, deepspeed_config(ZERO2, training, course.data))
    losses, norms = [], []
    for step in range(COURSE_STEPS):
        streams = _masks(step)
        case = random_case([mask for stream in streams for mask in stream], seed=100 + step, **shape)
        documents = iter(case.documents)
        dealt = [[next(documents) for _ in stream] for stream in streams]
        mine = dealt[topology.data.rank() * accumulation :][:accumulation]
        batches = [stream_batch(case, each, TTT_STEPS, torch.float32, topology, course.sharding) for each in mine]
        counts, weights = batch_weights(engine.module, batches, course.config, topology)
        sums = []
        for batch in batches:
            distilled = engine(batch, weights)
            engine.backward(distilled.surrogate * gradient_scale(course.data, accumulation))
            engine.step()
            sums.append(distilled.sums)
        losses.append(batch_metrics(course.config, batch_sum(sums, topology), counts).loss)
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


if __name__ == "__main__":
    cases, courses = base_cases() + covering_cases(), [*COURSES, ALONE]
    for sizes in sorted({case.sizes for case in cases + courses}):
        # new processes for each layout, because forming groups anew would leave the old groups' threads behind
        mine, own_courses = ([each for each in every if each.sizes == sizes] for every in (cases, courses))
        compute(Path(sys.argv[1]), str(sizes), math.prod(sizes), sizes[:3], partial(run, sizes, mine, own_courses))
