"""Steps whose gradient is not finite, or far too large, change nothing and are counted. A run with no other steps
stops."""

import math

import pytest
import torch
from places import ZERO2
from small_engine import advance, same, small_engine, weights
from tiny_run import make_target, metrics, write_recipe

from eagle3.errors import UserError
from eagle3.jobs.train import train
from eagle3.patches import NormLimit
from eagle3.recipe.loading import load_recipe

LIMIT = 1e6


def spoil(engine, factor):
    """A step whose gradients are multiplied by `factor`."""
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    engine.backward(sum(weight.square().sum() for weight in trained) * factor)
    engine.step()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e9])
def test_a_bad_step_changes_neither_weights_nor_moments(topology, dtype, factor):
    torch.manual_seed(3)
    engine = small_engine(topology, dtype, steps=10)
    norms = NormLimit(engine, LIMIT)
    advance(engine, 2)
    assert not norms.taken().skipped
    before, state = weights(engine), torch.get_rng_state()
    spoil(engine, factor)
    step = norms.taken()
    assert step.skipped and (step.norm > LIMIT or math.isnan(step.norm)) and math.isnan(step.norm) == (factor != 1e9)
    assert same(weights(engine), before)
    advance(engine)
    after = weights(engine)

    torch.manual_seed(3)
    undisturbed = small_engine(topology, dtype, steps=10)
    advance(undisturbed, 2)
    torch.set_rng_state(state)
    advance(undisturbed)
    assert same(weights(undisturbed), after)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_norm_is_the_one_before_clipping(topology, dtype):
    engine = small_engine(topology, dtype, steps=10)
    norms = NormLimit(engine, LIMIT)
    expected = 2 * math.sqrt(sum(float(weight.double().square().sum()) for weight in weights(engine).values()))
    spoil(engine, 1.0)
    assert norms.taken().norm == pytest.approx(expected, rel=1e-5 if dtype == "float32" else 1e-2)


@pytest.fixture
def recipe(tmp_path):
    training = {"ttt_steps": 3, "global_batch_size": 4, "learning_rate": 2e-3, "max_steps": 16, "checkpoint_every": 2}
    return write_recipe(tmp_path, make_target(tmp_path / "target"), training=training, output={"check_export": False})


def test_skipped_steps_are_counted_and_named_and_the_schedule_goes_on(tmp_path, recipe, topology):
    # so that a step has about the same norm, whether earlier steps were taken or not
    small = "training.learning_rate=1e-9"
    train(load_recipe(recipe, [small, f"output.dir={tmp_path / 'whole'}"]), ZERO2, topology)
    whole = metrics(tmp_path / "whole")
    limit = sum(sorted(record["gradient_norm"] for record in whole)[-5:-3]) / 2
    skipping = f"training.skip_above_norm={limit}", "training.most_skipped=16"
    train(load_recipe(recipe, [small, *skipping]), ZERO2, topology)
    course, skipped = metrics(tmp_path / "run"), metrics(tmp_path / "run", "skipped")
    assert [record["learning_rate"] for record in course] == [record["learning_rate"] for record in whole]
    assert [record["step"] for record in skipped] == [one["step"] for one in course if one["gradient_norm"] > limit]
    assert [record["skipped"] for record in skipped] == [1, 2, 3, 4]
    assert all(len(set(record["samples"])) == 4 for record in skipped)


def test_only_bad_steps_stop_the_run_with_the_samples_named(tmp_path, recipe, topology):
    words = ["training.skip_above_norm=1e-3", "training.most_skipped=3"]
    with pytest.raises(UserError, match="3 steps in a row were skipped.*above training.skip_above_norm") as caught:
        train(load_recipe(recipe, words), ZERO2, topology)
    skipped = metrics(tmp_path / "run", "skipped")
    assert [record["in_a_row"] for record in skipped] == [1, 2, 3]
    assert all(sample in str(caught.value) for sample in skipped[-1]["samples"])
