"""Bytes that a rank sends in one step: counted at the collectives, and by the planner's formula."""

import dataclasses
import itertools
from typing import Any, get_args

import torch
from sent_bytes import SentBytes
from sharded_cases import STEPS, Sharded
from shares import share_of
from training_path import batch_counts, batch_weights, load_draft, stream_batch

from eagle3.attention.ring import RingMode
from eagle3.objective.model import DraftObjective
from eagle3.objective.recompute import MemoryPlan, Recompute
from eagle3.parallel.sequence import Stream, plan_sequence
from eagle3.parallel.topology import Topology
from eagle3.planning.step import Planned, Sizes, Traffic, sent_bytes

# In bfloat16, so that a gradient in fp32 has twice the bytes of its tensor.
DTYPE = torch.bfloat16
WAYS = list(itertools.product(get_args(RingMode), get_args(Recompute)))


def count_bytes(base: Sharded, topology: Topology) -> dict[str, Any]:
    """For each ring mode and recompute mode: `counted` and `expected` bytes by kind and phase, and `shared`, how many
    numbers this rank's K_0 and V_0 have."""
    return {
        " ".join(way): _count(dataclasses.replace(base, ring_mode=way[0], recompute=way[1]), topology) for way in WAYS
    }


def _count(sharded: Sharded, topology: Topology) -> dict[str, Any]:
    case, memory = sharded.case(), MemoryPlan(sharded.recompute)
    draft = load_draft(case, topology, DTYPE)
    objective = DraftObjective(draft, topology, sharded.ring_mode, memory)
    batch = stream_batch(case, case.documents, STEPS, DTYPE, topology, sharded.sharding)
    weights = batch_weights(objective, [batch], batch_counts([batch], topology), sharded.config, topology)
    with SentBytes(case.config.head_dim) as counter:
        distilled = objective(batch, weights)
        counter.phase = "backward"
        distilled.surrogate.backward()
    stream = Stream.pack([each.ids for each in case.documents], [each.loss_mask for each in case.documents], case.rows)
    share = share_of(plan_sequence(stream, STEPS, sharded.sharding, topology.sequence.rank()), stream)
    sizes = Sizes(sharded.tensor, sharded.ulysses, sharded.ring)
    planned = Planned(case.config, STEPS, DTYPE, sizes, sharded.ring_mode, memory, device="cpu")
    return {
        "counted": _named(counter.sent),
        "expected": _named(sent_bytes(planned, share)),
        "shared": 2 * share.keys * case.config.num_key_value_heads * case.config.head_dim,
    }


def _named(traffic: Traffic) -> dict[str, float]:
    return {f"{kind} {phase}": number for (kind, phase), number in traffic.items() if number}
