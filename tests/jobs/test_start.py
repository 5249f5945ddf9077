"""What train.py says before a job begins: its layout, how it resumes, and why its processes cannot meet."""

import os
import socket
import sys
from functools import partial

import pytest
from places import RECIPES, ZERO2
from tiny_run import finish, launch

from eagle3.errors import UserError
from eagle3.jobs.layout import check_layout
from eagle3.recipe.loading import load_recipe


def recipe(chosen):
    overrides = [f"parallelism.{name}={size}" for name, size in chosen.items()]
    return load_recipe(RECIPES / "quickstart.yaml", ["training.global_batch_size=16", *overrides])


@pytest.mark.parametrize(
    ("job", "message", "chosen"),
    [
        (
            "1x1",
            "tensor 1 x ulysses 1 inside a node, ring 1 inside a node, data 1; 16 samples a step, 16 in each of 1",
            {},
        ),
        (
            "2x6",
            "tensor 2 x ulysses 3 inside a node, ring 2 crosses nodes, data 1;",
            {"tensor": 2, "ulysses": 3, "ring": 2},
        ),
        ("4x8", "ring 4 inside a node, data 8; 16 samples a step, 2 in each of 8 x 1 streams", {"ring": 4}),
        ("3x2", "ring 6 crosses nodes, data 1;", {"ring": 6}),
    ],
)
def test_a_layout_that_fits_is_told(job, message, chosen):
    assert message in check_layout(recipe(chosen), ZERO2, job)


@pytest.mark.parametrize(
    ("job", "message", "chosen"),
    [
        ("2x8", "tensor 1 x ulysses 16 would cross nodes of 8 processes", {"ulysses": 16}),
        ("2x6", "tensor 4 x ulysses 1 would cross nodes of 6 processes", {"tensor": 4}),
        ("1x6", "takes 4 processes or a multiple of that, but this job has 6; start 4 or 8", {"ring": 4}),
        (
            "1x3",
            "global_batch_size 16 cannot be divided among 3 data-parallel ranks x 1 accumulation; use 15 or 18",
            {},
        ),
        ("1x4", "parallelism.ulysses: 4 does not divide the 6 attention heads", {"ulysses": 4}),
        ("0x8", "write nodes x processes per node", {}),
        ("8", "write nodes x processes per node", {}),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_the_remedy(job, message, chosen):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        check_layout(recipe(chosen), ZERO2, job)


@pytest.fixture
def here(launcher):
    return partial(launcher, "train.py")


@pytest.mark.parametrize(
    "words", [("--resume", "training.seed=5"), ("training.seed=5", "--resume"), ("--resume=auto", "training.seed=5")]
)
def test_resume_takes_no_override_for_its_own_word(here, words):
    code, printed, _ = here("--print-recipe", *words)
    assert code == 0 and "seed: 5" in printed


def test_resume_from_anything_else_is_refused(here, tmp_path):
    code, _, stderr = here("--print-recipe", "--resume", str(tmp_path))
    assert code == 2 and stderr == f"error: --resume {tmp_path}: takes no folder; output.dir names the run\n"
    code, _, stderr = here("--print-recipe", "--resume", "yes")
    assert code == 2 and stderr.startswith("error: --resume yes: write --resume to continue a run, or --resume auto ")


def test_check_starts_nothing_and_a_mistake_is_a_line(here):
    code, printed, _ = here("--check", "1x2", "parallelism.ring=2", "training.global_batch_size=4")
    assert code == 0 and printed.startswith("1 node of 2 processes: ") and len(printed.splitlines()) == 1
    code, _, stderr = here("--check", "1x2", "parallelism.ring=3")
    assert code == 2 and stderr.startswith("error: parallelism: ") and len(stderr.splitlines()) == 1


def test_a_port_that_another_job_holds_is_said_with_the_remedy(monkeypatch):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        names = {
            "RANK": 0,
            "WORLD_SIZE": 2,
            "LOCAL_RANK": 0,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": holder.getsockname()[1],
        }
        environment = os.environ | {name: str(value) for name, value in names.items()}
        words = ["env", *(f"{name}={environment[name]}" for name in names), sys.executable, "launchers/train.py"]
        output = finish(launch(*words, "parallelism.ring=2"), 2)
    (line,) = [line for line in output.splitlines() if line.startswith("error:")]
    assert "cannot meet the others" in line and "--master_port" in line and "Traceback" not in output
