"""Runs that are killed, stopped by a signal or meet a full disk end soon, lose nothing, and continue to the same
weights."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tiny_run import deepspeed, finish, launch, metrics, run_script, write_recipe

TRAINING = {"ttt_steps": 3, "global_batch_size": 4, "learning_rate": 2e-3, "max_steps": 8, "checkpoint_every": 2}


@pytest.fixture
def recipe(tmp_path, target):
    return str(write_recipe(tmp_path, target, training=TRAINING, output={"check_export": False}))


def work(case, recipe, *arguments):
    return run_script("tests/support/survival_worker.py", case, recipe, *arguments)


def require_same_run(one, other):
    """Asserts that both runs are equal, bit for bit."""
    mine, theirs = (load_file(folder / "export" / "model.safetensors") for folder in (one, other))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    computed = ("step", "loss", "gradient_norm", "learning_rate")
    courses = [[[record[name] for name in computed] for record in metrics(folder)] for folder in (one, other)]
    assert courses[0] == courses[1] and len(courses[0]) > 1


def require_named(log):
    """Asserts that every broken job names the rank that ended, unless its draft was exported already, so that only the
    shutdown was left."""
    jobs = re.split(r"killed rank .*: exit codes \[", log)
    for output, codes in zip(jobs, [after.partition("]")[0] for after in jobs[1:]], strict=False):
        whole = {*codes.split(", ")} == {"0"}
        assert whole or "has ended" in output or "/killed/export" in output, log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "moments", "seed", "layout"),
    [
        ("2", "5", "11", ["parallelism.ulysses=2"]),
        ("4", "20", "42", ["parallelism.ulysses=2", "parallelism.ring=2"]),
    ],
)
def test_any_rank_killed_at_any_moment_resumes_to_the_same_weights(tmp_path, recipe, ranks, moments, seed, layout):
    require_named(work("killed", recipe, ranks, moments, seed, *layout))
    require_same_run(tmp_path / "killed", tmp_path / "whole")


def test_a_signal_to_one_rank_stops_all_after_a_checkpoint(tmp_path, recipe):
    output = work("stopped", recipe)
    assert output.count("stopped by SIGTERM after step") == output.count("stopped by SIGUSR1 after step") == 1
    assert output.count("resumed after step") == 2
    run_script("tests/support/training_worker.py", recipe, f"2:output.dir={tmp_path / 'whole'}")
    require_same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_ranks_whose_launcher_is_killed_write_a_checkpoint_and_end(tmp_path, recipe, launcher):
    """The `deepspeed` command itself, above the process that starts the rank; or `torchrun`, which keeps the store of
    its two ranks."""
    run = tmp_path / "orphaned"
    command = deepspeed(1) if launcher == "deepspeed" else ("torchrun", "--standalone", "--nproc_per_node", "2")
    endless = ("training.max_steps=100000", "training.checkpoint_every=50000", f"output.dir={run}")
    process = launch(*command, "launchers/train.py", "--recipe", recipe, *endless)
    while not (run / "metrics.jsonl").exists() or not metrics(run):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    below = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    try:
        output, _ = process.communicate(timeout=240)  # until the ranks have ended, which a full pipe would stop
    finally:
        _, alive = psutil.wait_procs(below, timeout=240)
        for each in alive:
            each.kill()
    assert len(below) == 2 and not alive
    steps = [int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")]
    assert max(steps) == metrics(run)[-1]["step"]
    assert re.search("continue with .*--resume", output), output  # the run's closing line, or the watchdog's


@pytest.mark.slow
def test_a_signalled_run_exits_cleanly_or_with_the_code_asked_for(tmp_path, recipe):
    command = (sys.executable, "launchers/train.py", "--recipe", recipe, "training.max_steps=200", "--resume", "auto")

    def begin(*words: str) -> subprocess.Popen:
        """Starts a run, and waits until it has made some steps."""
        process, steps = launch(*command, *words), 0
        while steps < 3:
            line = process.stdout.readline()
            assert line, "it has ended"
            steps += "] step " in line
        return process

    continuing = f"continue with python launchers/train.py --recipe {recipe} training.max_steps=200 --resume auto\n"
    for number, words, code in (
        (signal.SIGTERM, (), 0),
        (signal.SIGUSR1, ("--stop-code", "75"), 75),
        (signal.SIGINT, ("--stop-code", "75"), 130),  # Ctrl-C asks for no other code
    ):
        process = begin(*words)
        os.kill(process.pid, number)
        output = finish(process, code)
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        assert f"stopped by {name} after step" in output and "Traceback" not in output
        assert words or output.endswith(continuing), output
    process = begin()
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.05)
    output = finish(process, -signal.SIGINT)
    assert "stopped" not in output and "--resume then takes the last checkpoint" in output
    (early,) = [launch(*command, f"output.dir={tmp_path / 'early'}", "--stop-code", "75")]
    early.stdout.readline()
    os.kill(early.pid, signal.SIGTERM)
    assert "every checkpoint that was written is whole, and what was in progress starts over" in finish(early, 75)


@pytest.mark.slow
def test_a_full_disk_keeps_the_older_checkpoint_and_with_room_the_run_goes_on(tmp_path, recipe, small_disk):
    run_script("tests/support/training_worker.py", recipe, f"2:output.dir={tmp_path / 'whole'}")
    checkpoint = max((tmp_path / "whole" / "checkpoints").glob("step-*"))
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    subprocess.run(["mount", "-o", f"remount,size={int(1.6 * size)}", str(small_disk)], check=True)
    output = work("full", recipe, str(small_disk), str(10 * size))
    assert (
        "the checkpoint of step 4 cannot be written" in output
        and "GiB are free" in output
        and "Traceback" not in output
    )
    assert "kept ['step-00000002']" in output and "resumed after step 2" in output
    require_same_run(small_disk / "run", tmp_path / "whole")
