"""The planner, compared with bytes counted in real steps, and what it must get right in words."""

import dataclasses

import pytest
import torch
from layouts import Layout, draft_config, pack, prepare
from live_bytes import LiveBytes, device_tensors
from memory import full_width
from places import ZERO2
from shares import share_of

from eagle3.objective.recompute import MemoryPlan
from eagle3.planning.memory import host_bytes, rank_bytes, step_bytes
from eagle3.planning.step import Planned, Sizes
from eagle3.recipe.schema import Training
from eagle3.training.deepspeed_file import deepspeed_config
from eagle3.training.engine import start_engine

BLOCK = 2**21
STREAMS = {
    "one short document": [[(300, True)]],
    "packed documents": [[(512, True)]] * 4,
    "an answer after a long prompt": [[(3000, False), (300, True)]],
}


def config(hidden_times: int = 1):
    small = draft_config(heads=4, kv_heads=2, head_dim=32 * hidden_times)
    wide = 3 * small.hidden_size
    return dataclasses.replace(small, intermediate_size=wide, vocab_size=1000, draft_vocab_size=500)


class Step:
    """A step of a draft on a stream, prepared and planned."""

    def __init__(self, topology, draft, stream, steps=5, dtype=torch.float32, recompute="full", **planned) -> None:
        torch.set_num_threads(1)
        memory, stream = MemoryPlan(recompute, BLOCK), pack(stream, draft.vocab_size)
        self.prepared = prepare(stream, draft, steps, Layout(), topology, dtype, memory=memory)
        self.share = share_of(self.prepared.plan, stream)
        self.planned = Planned(draft, steps, dtype, memory=memory, device=topology.device.type, **planned)

    def error(self) -> float:
        """The planned peak of a forward and backward pass, weights and inputs included, relative to the counted."""
        prepared = self.prepared
        with LiveBytes([*device_tensors(prepared.batch), *prepared.objective.parameters()]) as counted:
            prepared.objective(prepared.batch, prepared.weights).surrogate.backward()
        return step_bytes(self.planned, self.share).total() / counted.peak - 1


@pytest.mark.parametrize(
    ("recompute", "normed"), [("full", False), ("attention_kept", False), ("none", False), ("none", True)]
)
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_planned_peak_is_within_ten_percent_of_the_bytes_of_a_step(topology, dtype, name, recompute, normed):
    """normed: with norms of queries and keys, and biases"""
    draft = dataclasses.replace(config(), qk_norm=normed, attention_bias=normed)
    assert abs(Step(topology, draft, STREAMS[name], dtype=dtype, recompute=recompute).error()) < 0.1


@pytest.mark.parametrize("hidden_times", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_the_plan_follows_the_number_of_steps_and_the_width(topology, steps, hidden_times):
    assert abs(Step(topology, config(hidden_times), STREAMS["packed documents"], steps).error()) < 0.1


@pytest.mark.parametrize("logits", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", STREAMS)
def test_a_teacher_of_logits_is_planned_for(topology, name, logits):
    draft = config()
    step = Step(topology, draft, STREAMS[name], logit_bytes=logits.itemsize)
    teacher, share = step.prepared.batch.teacher, step.share
    logit_teacher = dataclasses.replace(teacher, last=(teacher.last @ teacher.head.T).to(logits), head=None)
    step.prepared = step.prepared._replace(batch=dataclasses.replace(step.prepared.batch, teacher=logit_teacher))
    assert abs(step.error()) < 0.1
    waiting = dataclasses.replace(step.planned, residence="host", sizes=Sizes(tensor=2))
    rows = 3 * share.rows * draft.target_hidden_size * 4
    assert host_bytes(waiting, share) == rows + share.teacher * 250 * logits.itemsize  # a rank's half of the columns


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_the_engine_around_it_the_peak_of_a_step_is_within_ten_percent_of_the_plan(topology, dtype):
    """The engine adds DeepSpeed's masters, moments, reduced gradients and buckets. Measured from the second step on,
    when all of these exist."""
    bucket = 500_000
    step = Step(topology, config(2), [[(256, True)]], 3, getattr(torch, dtype), bucket=2 * bucket)
    prepared = step.prepared
    settings = deepspeed_config(ZERO2, Training(global_batch_size=1, dtype=dtype), 1)
    settings["zero_optimization"]["reduce_bucket_size"] = bucket
    with LiveBytes([*device_tensors(prepared.batch), *prepared.objective.parameters()]) as bytes_:
        engine = start_engine(prepared.objective, topology, settings)
        for _ in range(2):
            bytes_.restart()
            engine.backward(engine(prepared.batch, prepared.weights).surrogate)
            engine.step()
    assert abs(rank_bytes(step.planned, step.share).total() / bytes_.peak - 1) < 0.1


@pytest.mark.slow
def test_a_step_at_the_width_of_an_8b_target_takes_what_is_planned(topology):
    """In fp32, with some 20 GFLOP per token, this takes minutes and 10 GB of memory."""
    torch.set_num_threads(2)
    (row,) = full_width(topology, tokens=512)
    assert abs(row["ratio"] - 1) < 0.1
