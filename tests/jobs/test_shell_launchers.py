"""The bash launchers without Slurm: what they refuse, what they would start, and real runs of single_node.sh.

tests/slurm/run.py tries the others on a real Slurm.
"""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from limits import wait_until
from places import LAUNCHERS, ROOT, TESTS
from tiny_run import finish, launch, make_target, metrics, write_recipe

SCRIPTS = sorted(LAUNCHERS.glob("*.sh")) + sorted((TESTS / "slurm").glob("*.sh"))
VARIABLES = ("PROCESSES", "CUDA_VISIBLE_DEVICES", "CONTAINER_IMAGE", "PYTORCH_ALLOC_CONF")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    return write_recipe(folder, make_target(folder / "target"), output={"check_export": False})


def forget_settings(monkeypatch) -> None:
    for name in (*VARIABLES, *(name for name in os.environ if name.startswith("SLURM"))):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def start(monkeypatch, recipe, tmp_path):
    """Starts a launcher on the recipe, with overrides and environment variables."""
    forget_settings(monkeypatch)

    def run(script: str, *arguments: str, before: tuple[str, ...] = (), **settings: str):
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        output = f"output.dir={tmp_path / 'run'}"
        # Make SIGINT trappable, which it is not for processes that a shell started in the background.
        script_file = str(LAUNCHERS / script)
        return launch("env", "--default-signal=INT", "bash", script_file, *before, str(recipe), output, *arguments)

    return run


def finish_refused(process) -> str:
    """The process's one line, once it has ended with exit code 2. On a busy machine, lines before it say what it waits
    for."""
    *waits, line = finish(process, code=2).splitlines()
    assert line.startswith("error: ") and all("] loading " in wait for wait in waits), waits
    return line


def test_values_of_other_sbatch_options_are_not_taken_for_gpus(start):
    before = ("-N", "2", "--time", "24:00:00", "-J", "3", "--")
    output = finish(start("slurm_multi.sh", "--dry-run", "training.global_batch_size=16", before=before))
    assert "2 nodes of 8 processes" in output


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_can_read_every_script(script):
    subprocess.run(["bash", "-n", script], check=True)


def test_single_node_shows_what_it_would_start_and_starts_nothing(start, recipe, tmp_path):
    settings = {"PYTORCH_ALLOC_CONF": "backend:native", "CUDA_VISIBLE_DEVICES": "4,6,7", "PROCESSES": "2"}
    text = finish(start("single_node.sh", "--dry-run", "--resume", "auto", "parallelism.ring=2", **settings))
    assert "tensor 1 x ulysses 1 inside a node, ring 2 inside a node, data 1" in text
    command = re.search(r"^deepspeed --hostfile /dev/null --master_port (\d+) (.*)$", text, re.MULTILINE)
    assert 20000 <= int(command[1]) < 30000
    output = f"output.dir={tmp_path / 'run'}"
    assert command[2] == f"{LAUNCHERS / 'train.py'} {recipe} {output} --resume auto parallelism.ring=2"
    # with --num_gpus DeepSpeed would take GPUs 0 and 1
    assert "export CUDA_VISIBLE_DEVICES=4\\,6\n" in text
    assert "export PYTORCH_ALLOC_CONF=backend:native\n" in text and "export OMP_NUM_THREADS=1\n" in text
    assert f"export PYTHONPATH={ROOT}" in text and not (tmp_path / "run").exists()


NO_PROCESS, GAPS = ("--gpus-per-node=0",), ": parts need tasks without gaps; write it as 1-N"
A_JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("script", "before", "arguments", "settings", "message"),
    [
        ("single_node.sh", (), ("training.max_stepz=3",), {}, "did you mean training.max_steps"),
        ("single_node.sh", (), (), {"PROCESSES": "two"}, "PROCESSES=two"),
        ("single_node.sh", (), ("parallelism.ulysses=3",), {"PROCESSES": "3"}, "3 does not divide the 4 attention"),
        ("single_node.sh", (), (), {"CUDA_VISIBLE_DEVICES": "GPU-1a2b"}, "CUDA_VISIBLE_DEVICES=GPU-1a2b"),
        ("single_node.sh", (), (), {"CUDA_VISIBLE_DEVICES": "0,1", "PROCESSES": "4"}, "more than the GPUs here, 2; "),
        ("slurm_multi.sh", (), ("training.max_stepz=3",), {}, "did you mean training.max_steps"),
        ("slurm_multi.sh", (), ("parallelism.ulysses=4",), {"PROCESSES": "2"}, "would cross nodes of 2 processes"),
        ("slurm_multi.sh", ("--nodes=2-4", "--"), (), {}, "--nodes=2-4"),
        ("slurm_multi.sh", ("--nodes=0", "--"), (), {}, "a job has 1 node or more"),
        ("slurm_multi.sh", (*NO_PROCESS, "--"), (), {}, "set PROCESSES"),
        ("slurm_multi.sh", (), (), {"MAX_REQUEUES": "x"}, "MAX_REQUEUES=x: is not a number"),
        ("slurm_multi.sh", (), (), {"CONTAINER_MOUNTS": "a:b"}, "CONTAINER_MOUNTS=a:b: is for a job in a container"),
        ("slurm_multi.sh", ("--nodes", "2"), (), {}, "--nodes: is not an option here; those of sbatch come first"),
        ("slurm_multi.sh", ("--part", "0/2"), (), {}, "--part: is not an option here: each task of sbatch's --array"),
        ("slurm_multi.sh", (), (), A_JOB, "no GPU in this job"),
        ("slurm_capture.sh", (), (), {}, "hidden_states.path is not set"),
        ("slurm_capture.sh", (), ("hidden_states.path=x",), {}, "capture here with launchers/capture.py"),
        ("slurm_capture.sh", ("--array=1,3", "--"), ("--dry-run",), {}, f"--array=1,3{GAPS}"),
        ("slurm_capture.sh", ("--array=x", "--"), ("--dry-run",), {}, f"--array=x{GAPS}"),
        (
            *("slurm_capture.sh", (), ("--dry-run", "hidden_states.path=x", "data.train=[absent.jsonl]"), {}),
            "absent.jsonl: no such file or folder",
        ),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_exit_code_2(start, tmp_path, script, before, arguments, settings, message):
    assert message in finish_refused(start(script, *arguments, before=before, **settings))
    assert not (tmp_path / "run").exists()


def test_a_launcher_started_by_another_shell_says_so(recipe):
    assert "start it with bash" in finish_refused(launch("sh", str(LAUNCHERS / "single_node.sh"), str(recipe)))


@pytest.mark.parametrize("script", ["slurm_multi.sh", "slurm_capture.sh"])
def test_a_copy_that_does_not_know_its_repository_says_so(script, recipe, tmp_path):
    copy = shutil.copy(LAUNCHERS / script, tmp_path)
    assert "submit launchers/" + script in finish_refused(launch("bash", str(copy), str(recipe)))


def test_a_job_of_several_nodes_is_shown_to_its_last_line(start, recipe, tmp_path):
    before = ("-N4", "--gpus-per-node=h100:2", "--partition=lab", "--")
    text = finish(start("slurm_multi.sh", "--dry-run", "parallelism.ring=8", before=before))
    output = f"output.dir={tmp_path / 'run'}"
    assert "4 nodes of 2 processes" in text and "ring 8 crosses nodes" in text
    script = LAUNCHERS / "slurm_multi.sh"
    assert f"sbatch {' '.join(before[:-1])} {script} {recipe} {output} parallelism.ring=8\n" in text
    train = f"{LAUNCHERS / 'train.py'} {recipe} {output} parallelism.ring=8 --resume auto --stop-code 75\n"
    step = next(line for line in text.splitlines(keepends=True) if line.startswith("srun "))
    assert step.startswith("srun --nodes=4 --ntasks=4 --ntasks-per-node=1 ") and step.endswith(train)
    assert "--output=slurm-JOB-node%n.log" in step and "container" not in text
    node = next(line for line in text.splitlines(keepends=True) if line.startswith("deepspeed "))
    assert "--node_rank 0 --master_addr HEAD_NODE --master_port FREE_PORT" in node and node.endswith(train)


@pytest.mark.parametrize(
    ("script", "ranks", "layout"),
    [
        ("single_node.sh", {"PROCESSES": "2"}, "data 2; 8 samples a step"),
        ("single_node.sh", {"PROCESSES": "3"}, "training.global_batch_size raised from 8 to 9, for 3 streams per step"),
        ("slurm_multi.sh", {}, "training.global_batch_size raised from 8 to 16, for 16 streams per step"),
    ],
)
def test_without_arguments_the_quickstart_is_trained_on_any_number_of_ranks(
    monkeypatch, tmp_path, script, ranks, layout
):
    """Started elsewhere: this repository may hold a run."""
    forget_settings(monkeypatch)
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    shown = finish(launch("env", f"--chdir={tmp_path}", "bash", str(LAUNCHERS / script), "--dry-run"))
    assert layout in shown and "begins runs/quickstart" in shown
    assert re.search(r"^deepspeed .*launchers/train.py( --resume auto --stop-code 75)?$", shown, re.MULTILINE)


@pytest.mark.parametrize("script", ["single_node.sh", "slurm_multi.sh", "slurm_capture.sh"])
def test_help_is_the_head_of_the_script(script):
    for word in ("--help", "-h"):
        output = finish(launch("bash", str(LAUNCHERS / script), word))
        assert f"bash launchers/{script} [" in output
        assert "#" not in output.splitlines()[0] and "SBATCH --" not in output


def test_a_container_is_an_option_of_srun_and_a_resume_of_the_callers_wins(start):
    """With the default layout, two nodes of eight GPUs."""
    settings = {"CONTAINER_IMAGE": "lab/eagle3:1", "CONTAINER_MOUNTS": "/data:/data"}
    output = finish(start("slurm_multi.sh", "--dry-run", "--resume", **settings)).replace("\\", "")
    assert "checked in the job" in output and "--container-image=lab/eagle3:1" in output
    assert f"--container-mounts={ROOT}:{ROOT},{ROOT}:{ROOT},/data:/data" in output
    assert "slurm_node.sh 2 8 HEAD_NODE FREE_PORT" in output
    assert "--resume --stop-code 75\n" in output and "auto" not in output


def test_the_doctor_takes_the_place_of_train(start, recipe, tmp_path):
    text = finish(start("slurm_multi.sh", "--dry-run", "--doctor", CONTAINER_IMAGE="lab/eagle3:1"))
    output = f"output.dir={tmp_path / 'run'}"
    assert f"slurm_multi.sh {recipe} {output} --doctor\n" in text
    assert text.endswith(f"{LAUNCHERS / 'doctor.py'} {recipe} {output}\n") and "train.py" not in text


def test_a_capture_array_is_shown_to_its_last_line(start, recipe, tmp_path):
    path = f"hidden_states.path={tmp_path / 'store'}"
    output = finish(start("slurm_capture.sh", "--dry-run", path, before=("--array=1-8", "--gpus-per-node=4", "--")))
    assert f"sbatch --array=1-8 --gpus-per-node=4 {LAUNCHERS / 'slurm_capture.sh'} {recipe}" in output
    assert f"capture.py --part I/N {recipe}" in output and not (tmp_path / "store").exists()


@pytest.mark.slow
def test_two_processes_stop_by_a_signal_with_a_checkpoint_and_continue_from_it(start, tmp_path):
    run = tmp_path / "run"
    long = ("training.max_steps=100000", "training.checkpoint_every=100000", "evaluation.every=100000")
    arguments = ("parallelism.ring=2", "--resume", "auto", "--stop-code", "75", *long)
    before = 0
    for number, code in ((signal.SIGINT, 130), (signal.SIGUSR1, 75)):  # SIGTERM goes SIGINT's way
        process = start("single_node.sh", *arguments, PROCESSES="2")
        steps = before + 3
        wait_until(lambda steps=steps: (run / "metrics.jsonl").exists() and len(metrics(run)) >= steps, process)
        process.send_signal(number)  # only to the script
        output = finish(process, code)
        steps = len(metrics(run))
        assert f"after step {steps} of 100000" in output
        name = "Ctrl-C" if number == signal.SIGINT else "SIGUSR1"
        assert f"\n{name}: SIGUSR1 asks the ranks to finish their step" in output
        assert (f"resumed after step {before}" in output) == (before > 0)
        assert (run / "checkpoints" / f"step-{steps:08d}" / "manifest.json").exists()
        assert processes_of(run) == []
        before = steps
    assert [record["step"] for record in metrics(run)] == list(range(1, before + 1))


def processes_of(run: Path) -> list[str]:
    """Command lines of the processes that are still working on a run."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in listed if f"output.dir={run}" in line]
