"""Run the Slurm launchers on a real Slurm of two nodes (lab.sh): `python tests/slurm/run.py [case ...]`, as root.

Prints one line per case. Exit code 1 if one fails. Takes about a quarter of an hour on two cores, mostly for one time
limit.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from tiny_run import make_target, metrics, write_recipe  # noqa: E402

LAB = ROOT / "tests" / "slurm" / "lab.sh"
# What the lab's nodes lack, and what every run here does without.
NODES = ("--gpus-per-node=0",)
RING = ("parallelism.ring=2",)
# Seconds within which a job has to reach its first steps. On an idle machine this takes half a minute.
STARTS = 300
LONG = ("training.max_steps=20000", "training.checkpoint_every=5", "evaluation.every=20000")


def until(happened: Callable[[], object], seconds: float, what: str) -> object:
    """What `happened` returns, as soon as that is true. Fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (result := happened()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.5)
    return result


class Lab:
    """The running lab, and jobs in a separate folder for each case."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "slurm"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))},
            "PATH": path,
            "SLURM_CONF": str(self.state / "slurm.conf"),
            "PROCESSES": "1",
        }

    def run(self, *command: object, folder: Path, **environment: str) -> subprocess.CompletedProcess:
        """Runs a command to its end. Captures stdout and stderr together."""
        return subprocess.run(
            [str(word) for word in command],
            cwd=folder,
            env=self.environment | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )

    def slurm(self, *command: object) -> str:
        return self.run(*command, folder=self.folder).stdout

    def case(self, name: str, **sections: dict) -> tuple[Path, Path]:
        """A new folder for the case, and a recipe in it."""
        folder = self.folder / name
        folder.mkdir()
        quiet = {"output": {"check_export": False}, **sections}
        return folder, write_recipe(folder, self.folder / "target", **quiet)

    def submit(self, folder: Path, *words: object, script: str = "slurm_multi.sh") -> str:
        """Submits a job through the launcher itself. Returns the job's number."""
        process = self.run("bash", ROOT / "launchers" / script, *NODES, *words, folder=folder)
        match = re.search(r"Submitted batch job (\d+)", process.stdout)
        assert match, f"not submitted: {process.stdout}"
        return match[1]

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says about a job (in an array, about one task)."""
        shown = self.slurm("scontrol", "show", "job", "-o", number).splitlines()[0]
        return dict(word.partition("=")[::2] for word in shown.split() if "=" in word)

    def await_end(self, number: str, seconds: float, state: str = "COMPLETED") -> dict[str, str]:
        """Waits until the job and all its processes are gone. Returns what Slurm says about the job."""
        until(lambda: not self.slurm("squeue", "-h", "-j", number).strip(), seconds, f"the end of job {number}")
        job = self.job(number)
        assert job["JobState"] == state, f"job {number} is {job['JobState']} ({job['ExitCode']}), not {state}"
        return job

    def await_said(self, log: Path, text: str, seconds: float) -> None:
        until(lambda: log.exists() and text in log.read_text(), seconds, f"{text!r} in {log.name}")

    def end(self, number: str) -> None:
        """Ends a job by the signal that makes a run write a checkpoint and stop for good."""
        self.slurm("scancel", "--batch", "--signal=TERM", number)
        job = self.await_end(number, 60, "FAILED")
        assert job["ExitCode"] == "75:0" and job["Restarts"] == "0", f"after SIGTERM: {job['ExitCode']}"


def two_nodes_follow_one_process(lab: Lab) -> None:
    folder, recipe = lab.case("equal")
    number = lab.submit(folder, "--", recipe, *RING)
    lab.await_end(number, STARTS)
    process = lab.run("bash", ROOT / "launchers/single_node.sh", recipe, f"output.dir={folder / 'one'}", folder=folder)
    assert process.returncode == 0, process.stdout
    two, one = metrics(folder / "run"), metrics(folder / "one")
    assert len(one) == len(two) == 8, f"{len(one)} and {len(two)} steps"
    for name in ("loss", "gradient_norm"):
        differences = [abs(a[name] - b[name]) / abs(b[name]) for a, b in zip(two, one, strict=True)]
        assert max(differences) < 1e-5, f"{name} differs by {max(differences):.1e}"


def the_time_limit_changes_no_bit(lab: Lab) -> None:
    """There are more steps than one part has time for. Slurm may signal a minute early."""
    long = ("training.max_steps=1200", "training.checkpoint_every=400", "evaluation.every=400")
    folder, recipe = lab.case("limit")
    number = lab.submit(folder, "--time=3", "--signal=B:USR1@40", "--", recipe, *RING, *long)
    lab.await_end(number, 2400)
    log = (folder / f"slurm-{number}-node0.log").read_text()
    parts = log.count("stopped by SIGUSR1 after step")
    assert parts >= 1 and log.count("resumed after step") == parts, f"{parts} interruptions"
    assert int(lab.job(number)["Restarts"]) == parts, lab.job(number)["Restarts"]
    undisturbed = lab.submit(folder, "--", recipe, *RING, *long, f"output.dir={folder / 'undisturbed'}")
    lab.await_end(undisturbed, 1800)
    runs = [folder / "run", folder / "undisturbed"]
    actual, expected = (load_file(run / "export" / "model.safetensors") for run in runs)
    assert actual.keys() == expected.keys(), "other weights"
    assert all(torch.equal(actual[name], expected[name]) for name in expected), "weights differ"
    actual, expected = ([record["loss"] for record in metrics(run)] for run in runs)
    assert actual == expected and len(actual) == 1200, "losses differ"


def a_job_that_never_makes_a_step_is_not_queued_for_ever(lab: Lab) -> None:
    folder, recipe = lab.case("fruitless")
    number = lab.submit(folder, "--", recipe, *RING, *LONG)
    for part in (1, 2):
        lab.await_said(folder / f"slurm-{number}.out", f"part {part}: ", STARTS)
        lab.slurm("scancel", "--batch", "--signal=USR1", number)
    lab.await_end(number, 60, "FAILED")
    job, log = lab.job(number), (folder / f"slurm-{number}.out").read_text()
    assert (job["ExitCode"], job["Restarts"]) == ("75:0", "1"), f"{job['ExitCode']} after {job['Restarts']} restarts"
    assert "error: stopped twice before the first step" in log, log


def without_arguments_the_quickstart_is_trained(lab: Lab) -> None:
    """The recipe's batch of 8 cannot be divided among six ranks. The target is made first, unless the cache has it."""
    folder = lab.folder / "quickstart"
    folder.mkdir()
    line = ("sbatch", "--parsable", *NODES, ROOT / "launchers/slurm_multi.sh")
    number = lab.run(*line, folder=folder, PROCESSES="3").stdout.strip()
    lab.await_said(folder / f"slurm-{number}.out", "training.global_batch_size raised from 8 to 12", STARTS)
    lab.await_said(folder / f"slurm-{number}-node0.log", "step 1/420", 10 * STARTS)
    lab.end(number)
    assert (folder / "runs" / "quickstart" / "checkpoints").is_dir(), "no checkpoint in runs/quickstart"


def scancel_leaves_a_checkpoint_that_resumes(lab: Lab) -> None:
    folder, recipe = lab.case("scancel")
    rare = (*RING, *LONG, "training.checkpoint_every=10000")
    number = lab.submit(folder, "--", recipe, *rare)
    lab.await_said(folder / f"slurm-{number}-node0.log", "step 10/", STARTS)
    lab.slurm("scancel", number)
    lab.await_end(number, 60, "CANCELLED")
    goes_on(lab, folder, "--", recipe, *rare)


def a_run_goes_on_with_another_number_of_nodes(lab: Lab) -> None:
    folder, recipe = lab.case("nodes")
    number = lab.submit(folder, "--", recipe, *RING, *LONG)
    lab.await_said(folder / f"slurm-{number}-node0.log", "step 10/", STARTS)
    lab.end(number)
    goes_on(lab, folder, "--nodes=1", "--", recipe, *LONG)


def goes_on(lab: Lab, folder: Path, *words: object) -> None:
    """Submits a job that resumes after the last step of the run, and ends it."""
    steps, number = len(metrics(folder / "run")), lab.submit(folder, *words)
    lab.await_said(folder / f"slurm-{number}-node0.log", f"resumed after step {steps}", STARTS)
    lab.await_said(folder / f"slurm-{number}-node0.log", f"step {steps + 2}/", 60)
    lab.end(number)


def the_doctor_looks_at_both_nodes(lab: Lab) -> None:
    folder, recipe = lab.case("doctor")
    number = lab.submit(folder, "--doctor", "--", recipe)
    lab.await_end(number, STARTS)
    log = (folder / f"slurm-{number}-node0.log").read_text()
    assert "nodes: 2 (n1" in log and "sound: " in log, log
    assert not (folder / "run").exists(), "a run was begun"


def a_dead_node_loses_no_checkpoint_and_the_job_comes_back(lab: Lab) -> None:
    folder, recipe = lab.case("node")
    number = lab.submit(folder, "--", recipe, *RING, *LONG)
    log = folder / f"slurm-{number}-node0.log"
    lab.await_said(log, "step 12/", STARTS)
    daemon = psutil.Process(int((lab.state / "slurmd-n2.pid").read_text()))
    steps = [process for process in psutil.process_iter() if f"[{number}." in " ".join(process.cmdline())]
    of_n2 = [step for step in steps if any(b.environ().get("SLURMD_NODENAME") == "n2" for b in step.children())]
    assert of_n2, "no process of the job's step on n2"
    for process in [daemon, *of_n2, *(child for step in of_n2 for child in step.children(recursive=True))]:
        process.kill()
    try:
        lab.await_said(folder / f"slurm-{number}.out", "does not answer", 240)
        # Until then Slurm wants to end this job there, and would end its next part.
        until(lambda: "down" in lab.slurm("sinfo", "-h", "-n", "n2", "-o", "%T"), 240, "n2 is down")
    finally:
        subprocess.run(["bash", LAB, "node", lab.state, "n2"], check=True)
    lab.await_said(log, "resumed after step", 300)
    assert int(lab.job(number)["Restarts"]) == 1, "not queued again"
    lab.slurm("scancel", number)
    until(lambda: not lab.slurm("squeue", "-h", "-j", number).strip(), 60, "its end")


def a_wrong_recipe_takes_no_node(lab: Lab) -> None:
    folder, recipe = lab.case("wrong")
    before = lab.slurm("scontrol", "show", "job", "-o").splitlines()
    for words in (("training.max_stepz=3",), ("parallelism.ulysses=2",), ("parallelism.ring=3",)):
        process = lab.run("bash", ROOT / "launchers/slurm_multi.sh", *NODES, "--", recipe, *words, folder=folder)
        lines = [line for line in process.stdout.splitlines() if line.startswith("error: ")]
        assert process.returncode == 2 and len(lines) == 1, f"exit code {process.returncode}: {process.stdout}"
        assert "Traceback" not in process.stdout, process.stdout
    assert len(lab.slurm("scontrol", "show", "job", "-o").splitlines()) == len(before), "a job was made"
    line = ("sbatch", "--parsable", *NODES, ROOT / "launchers/slurm_multi.sh", recipe, "training.max_stepz=3")
    number = lab.run(*line, folder=folder).stdout.strip()
    job = lab.await_end(number, 60, "FAILED")
    assert job["ExitCode"] == "2:0", job["ExitCode"]
    lines = (folder / f"slurm-{number}.out").read_text().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and "max_steps" in lines[0], lines
    assert not list(folder.glob("*node*.log")), "a node was started"


def captures_in_an_array_are_one_capture(lab: Lab) -> None:
    folder, recipe = lab.case("capture")
    array = f"hidden_states.path={folder / 'array'}"
    number = lab.submit(folder, "--array=1-2", "--", recipe, array, script="slurm_capture.sh")
    lab.await_end(f"{number}_1", 240)
    lab.await_end(f"{number}_2", 240)
    process = lab.run(
        sys.executable, ROOT / "launchers/capture.py", "--recipe", recipe, array, "--verify", folder=folder
    )
    assert process.returncode == 0 and "nothing wrong" in process.stdout, process.stdout
    one = f"hidden_states.path={folder / 'one'}"
    process = lab.run(sys.executable, ROOT / "launchers/capture.py", "--recipe", recipe, one, folder=folder)
    assert process.returncode == 0, process.stdout
    parts, whole = (samples(folder / name) for name in ("array", "one"))
    assert len(list((folder / "array").glob("shard-*.safetensors"))) > 1, "one shard only: no second task"
    assert parts.keys() == whole.keys() and len(whole) > 30, f"{len(parts)} and {len(whole)} samples"
    for name, one_sample in whole.items():
        same = all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(parts[name], one_sample, strict=True))
        assert same, f"sample {name} differs"


def samples(store: Path) -> dict[str, list[torch.Tensor]]:
    """What all shards hold for each sample, by its id. (If prefilled in different batches, the last bits may
    differ.)"""
    contents = {}
    for path in store.glob("shard-*.safetensors"):
        tensors, last = load_file(path), 0
        for sample in json.loads(tensors["index"].numpy().tobytes())["samples"]:
            rows = slice(sample["row"], sample["row"] + sample["tokens"])
            taught = slice(last, last := last + sample["taught"])
            columns = [tensors[name][rows] for name in ("ids", "argmax", "loss_mask", "logsumexp", "aux")]
            contents[sample["id"]] = [*columns, tensors["last"][taught]]
    return contents


def a_killed_rank_ends_the_job_within_a_minute_with_the_cause(lab: Lab) -> None:
    folder, recipe = lab.case("rank")
    number = lab.submit(folder, "--", recipe, *RING, *LONG)
    lab.await_said(folder / f"slurm-{number}-node0.log", "step 12/", STARTS)
    ranks = [process for process in psutil.process_iter() if "--local_rank=0" in process.cmdline()]
    (victim,) = (rank for rank in ranks if rank.environ().get("RANK") == "1" and str(recipe) in rank.cmdline())
    victim.send_signal(signal.SIGKILL)
    job = lab.await_end(number, 60, "FAILED")
    assert not job["ExitCode"].startswith(("0:", "75:")), job["ExitCode"]
    log = "".join(path.read_text() for path in folder.glob(f"slurm-{number}*"))
    assert f"rank 1 (process {victim.pid} on n2" in log, "the rank is not named"
    assert "error: exit code" in (folder / f"slurm-{number}.out").read_text(), "no error in the job's log"


CASES = {
    "equal": two_nodes_follow_one_process,
    "limit": the_time_limit_changes_no_bit,
    "fruitless": a_job_that_never_makes_a_step_is_not_queued_for_ever,
    "quickstart": without_arguments_the_quickstart_is_trained,
    "scancel": scancel_leaves_a_checkpoint_that_resumes,
    "node": a_dead_node_loses_no_checkpoint_and_the_job_comes_back,
    "nodes": a_run_goes_on_with_another_number_of_nodes,
    "doctor": the_doctor_looks_at_both_nodes,
    "wrong": a_wrong_recipe_takes_no_node,
    "capture": captures_in_an_array_are_one_capture,
    "rank": a_killed_rank_ends_the_job_within_a_minute_with_the_cause,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--keep", action="store_true", help="leave the folder, logs and all, where it is")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(unknown)}")
    folder = Path(tempfile.mkdtemp(prefix="eagle3-slurm-"))
    lab, failures = Lab(folder), 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`, which ends the lab
    try:
        subprocess.run(["bash", LAB, "start", lab.state], check=True)
        make_target(folder / "target")
        for name in options.cases or CASES:
            began = time.monotonic()
            try:
                CASES[name](lab)
                verdict = "passed"
            except AssertionError as failure:
                verdict, failures = f"FAILED: {failure}", failures + 1
                lab.slurm("scancel", "--user=root")
            print(f"{CASES[name].__name__.replace('_', ' ')}: {verdict} ({time.monotonic() - began:.0f} s)", flush=True)
    finally:
        subprocess.run(["bash", LAB, "stop", lab.state], check=False)
        if options.keep or failures:
            print(f"logs: {folder}")
        else:
            shutil.rmtree(folder)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
