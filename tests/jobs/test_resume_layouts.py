"""A run continues from its checkpoint under a different layout, with the same samples in the same order and the same
numbers."""

from itertools import permutations

import pytest
import torch
from safetensors.torch import load_file
from test_training import assert_same_course
from tiny_run import make_target, metrics, run_script, write_recipe

STEPS = 12
LAYOUTS = {
    "dp2": "2:training.accumulation=1",
    "u2": "2:parallelism.ulysses=2,training.accumulation=2",
    "r2": "2:parallelism.ring=2,parallelism.ring_mode=p2p",
    "tp2": "2:parallelism.tensor=2",
    "u2r2": "4:parallelism.ulysses=2,parallelism.ring=2,memory.recompute=full",
}
CHAIN = ("dp2", "u2", "tp2", "r2", "u2r2", "tp2")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A recipe, with the metrics and the export of a run in one process."""
    folder = tmp_path_factory.mktemp("layouts")
    training = {"ttt_steps": 3, "global_batch_size": 4, "learning_rate": 2e-3, "max_steps": STEPS}
    training |= {"checkpoint_every": 2, "keep_checkpoints": STEPS}
    sections = {"evaluation": {"every": 2}, "output": {"check_export": False}}
    recipe = write_recipe(folder, make_target(folder / "target"), training=training, **sections)
    work(recipe, f"1:output.dir={folder / 'alone'}")
    return recipe


def work(recipe, *runs):
    return run_script("tests/support/training_worker.py", recipe, *runs)


def require_the_course_of_one_process(recipe, name):
    """Compares the loss, the gradient norm and all other numbers of every step, and the exported weights."""
    alone, other = recipe.parent / "alone", recipe.parent / name
    assert [record["step"] for record in metrics(other)] == list(range(1, STEPS + 1))
    assert_same_course(metrics(alone), metrics(other), 1e-5)
    expected, actual = (load_file(folder / "export" / "model.safetensors") for folder in (alone, other))
    assert expected.keys() == actual.keys()
    assert all(torch.allclose(actual[key], expected[key], rtol=1e-4, atol=1e-5) for key in expected)


@pytest.mark.slow
def test_a_run_that_changes_its_layout_five_times_follows_one_process(case):
    runs = [f"{LAYOUTS[CHAIN[0]]},output.dir={case.parent}/chain"]
    for number, layout in enumerate(CHAIN[1:], start=1):
        runs.append(f"cut:{case.parent}/chain,{2 * number}")
        runs.append(LAYOUTS[layout].replace(":", "+resume:", 1) + f",output.dir={case.parent}/chain")
    output = work(case, *runs)
    for number in range(1, len(CHAIN)):
        assert f"resumed after step {2 * number}" in output
    require_the_course_of_one_process(case, "chain")
    assert not list((case.parent / "chain" / "checkpoints").glob("universal*"))


@pytest.mark.slow
@pytest.mark.parametrize("first", LAYOUTS)
def test_every_layout_goes_on_from_every_other(case, first):
    others = [other for one, other in permutations(LAYOUTS, 2) if one == first]
    runs = []
    for other in others:
        name = f"{first}-{other}"
        runs.append(f"copy:{case.parent}/{first},{case.parent}/{name}")
        runs.append(f"cut:{case.parent}/{name},6")
        runs.append(LAYOUTS[other].replace(":", "+resume:", 1) + f",output.dir={case.parent}/{name}")
    work(case, f"{LAYOUTS[first]},output.dir={case.parent}/{first}", *runs)
    for other in others:
        require_the_course_of_one_process(case, f"{first}-{other}")
