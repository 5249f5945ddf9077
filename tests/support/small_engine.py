"""An engine with a draft of a few weights, its optimiser steps, and what they leave."""

import torch
from definition import small_config
from places import ZERO2

from eagle3.draft.model import Eagle3Draft
from eagle3.objective.model import DraftObjective
from eagle3.recipe.schema import Training
from eagle3.training.deepspeed_file import deepspeed_config
from eagle3.training.engine import full_weights, start_engine, warmup_cosine

RUN = "0123456789abcdef" * 2


def small_engine(topology, dtype="float32", steps=100, schedule=None, **config):
    """config: more keys of DeepSpeed's file."""
    torch.manual_seed(1)
    draft = Eagle3Draft(small_config(), topology.modules, getattr(torch, dtype))
    training = Training(global_batch_size=1, learning_rate=1e-2, max_steps=steps, dtype=dtype)
    config = deepspeed_config(ZERO2, training, data_ranks=1) | config
    schedule = schedule or warmup_cosine(steps, 0.1, 0.0)
    return start_engine(DraftObjective(draft, topology), topology, config, schedule)


def advance(engine, steps=1):
    """Optimiser steps towards random weights: each depends on the weights, on Adam's state, the rate and on torch's
    random numbers."""
    for _ in range(steps):
        trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
        engine.backward(sum((weight - torch.randn_like(weight)).square().sum() for weight in trained))
        engine.step()


def weights(engine):
    return {name: tensor.clone() for name, tensor in full_weights(engine.module.draft).items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
