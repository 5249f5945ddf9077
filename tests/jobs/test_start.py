"""What train.py says before a job begins: its layout, how it resumes, and why its processes cannot meet."""

import json
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial

import pytest
from places import RECIPES, ZERO2
from privileges import file_modes_count
from processes import free_port
from tiny_run import finish, launch, write_recipe

from eagle3.errors import UserError
from eagle3.jobs.gate import Gate
from eagle3.jobs.train import check_layout
from eagle3.recipe.loading import load_recipe


def recipe(chosen):
    overrides = [f"parallelism.{name}={size}" for name, size in chosen.items()]
    return load_recipe(RECIPES / "quickstart.yaml", ["training.global_batch_size=16", *overrides])


@pytest.mark.parametrize(
    ("job", "message", "chosen"),
    [
        ("1x1", "ulysses 1 inside a node, ring 1 inside a node, data 1; 16 samples a step, 16 in each of 1", {}),
        ("2x6", "ulysses 3 inside a node, ring 2 crosses nodes, data 1;", {"tensor": 2, "ulysses": 3, "ring": 2}),
        ("4x8", "ring 4 inside a node, data 8; 16 samples a step, 2 in each of 8 x 1 streams", {"ring": 4}),
        ("3x2", "ring 6 crosses nodes, data 1;", {"ring": 6}),
        ("3x8", "ring 3 crosses nodes, data 4;", {"ulysses": 2, "ring": 3}),  # ranks 6 to 11 are a group
    ],
)
def test_a_layout_that_fits_is_told(job, message, chosen):
    warnings: list[str] = []
    gate = Gate(recipe(chosen), warnings.append, training=True)
    assert message in check_layout(gate, ZERO2, job) and not warnings


@pytest.mark.parametrize(
    ("job", "message", "chosen"),
    [
        ("2x8", "tensor 1 x ulysses 16 would cross nodes of 8 processes", {"ulysses": 16}),
        ("2x6", "tensor 4 x ulysses 1 would cross nodes of 6 processes", {"tensor": 4}),
        ("1x6", "takes 4 processes or a multiple of that, but this job has 6; start 4 or 8", {"ring": 4}),
        ("1x3", "global_batch_size 16 cannot be divided among 3 data-parallel ranks .*; use 15 or 18", {}),
        ("1x4", "parallelism.ulysses: 4 does not divide the 6 attention heads", {"ulysses": 4}),
        ("0x8", "write nodes x processes per node", {}),
        ("8", "write nodes x processes per node", {}),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_the_remedy(job, message, chosen):
    with pytest.raises(UserError, match=message):
        check_layout(Gate(recipe(chosen), print, training=True), ZERO2, job)


@pytest.fixture
def here(launcher):
    return partial(launcher, "train.py")


def test_resume_from_anything_else_is_refused(here, tmp_path):
    for word in (str(tmp_path), "yes", "latest"):
        code, _, stderr = here("--print-recipe", "--resume", word)
        assert code == 2 and stderr.startswith(f"error: --resume {word}: takes no name or folder; write --resume to ")
        assert stderr.count("\n") == 1


def test_check_starts_nothing_and_a_mistake_is_a_line(here):
    code, printed, _ = here("--check", "1x2", "parallelism.ring=2", "training.global_batch_size=4")
    *loading, line = printed.splitlines()
    assert code == 0 and line.startswith("1 node of 2 processes: ") and all("loading" in each for each in loading)
    code, _, stderr = here("--check", "1x2", "parallelism.ring=3")
    assert code == 2 and stderr.startswith("error: parallelism: ") and len(stderr.splitlines()) == 1


def test_check_refuses_what_the_run_itself_would_refuse_later(here, target, tmp_path):
    own = write_recipe(tmp_path, target)
    foreign = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64, "target_hidden_size": 64}
    foreign |= {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    foreign |= {"vocab_size": 999, "draft_vocab_size": 200, "max_position_embeddings": 256}
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text(json.dumps(foreign))
    code, _, stderr = here("--check", "1x1", own, f"model.draft.init_from={tmp_path / 'export'}", "data.max_length=256")
    assert code == 2 and "name the export of a draft for this target" in stderr and stderr.count("\n") == 1
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with file_modes_count():
        code, _, stderr = here("--check", "1x1", own, f"output.dir={closed / 'runs' / 'mine'}", "data.max_length=256")
    assert code == 2 and stderr.startswith("error: output.dir: ") and f"{closed} cannot be written" in stderr


def test_check_warns_of_what_it_cannot_know(here, target, tmp_path, monkeypatch):
    """Data may have longer samples than the draft reaches, and only the job's nodes may reach the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    own = write_recipe(tmp_path, target)
    code, printed, stderr = here("--check", "1x1", own, "data.max_length=257")
    assert code == 0 and printed and stderr.startswith("warning: data.max_length: 257, but the draft only reaches 256")
    code, printed, stderr = here("--check", "1x1", own, "model.target=acme/no-such-model")
    assert code == 0 and printed and stderr.startswith("warning: the target was not read, so neither ")
    assert "'acme/no-such-model'" in stderr and stderr.count("\n") == 1


def test_a_mistake_with_deepspeed_names_what_works_from_here(here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, stderr = here("--check", "1x1", "--deepspeed", "ds_configs/zero2.json")
    assert code == 2 and stderr.endswith(f"no such file; pass --deepspeed {ZERO2}\n") and ZERO2.is_absolute()
    for words in (("--num_gpus", "2"), ("--num_gpus=2",)):
        code, _, stderr = here(*words)
        assert code == 2 and f"it belongs before the script: deepspeed {' '.join(words)} " in stderr


def test_a_port_that_another_job_holds_is_said_with_the_remedy():
    """Besides, OpenMP reports how its threads wait in a process that found no such setting."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        job = ("RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=0", "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}")
        words = ("env", "-u", "OMP_WAIT_POLICY", "OMP_DISPLAY_ENV=true", *job, sys.executable, "launchers/train.py")
        output = finish(launch(*words, "parallelism.ring=2"), 2)
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in output or shutil.which("nvidia-smi")
    (line,) = [line for line in output.splitlines() if line.startswith("error:")]
    assert "cannot meet the others" in line and "--master_port" in line and "Traceback" not in output


def test_ctrl_c_ends_a_process_that_waits_for_others():
    port = free_port()
    job = ("RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=0", "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}")
    process = launch("env", "--default-signal=INT", *job, sys.executable, "launchers/train.py", "parallelism.ring=2")
    while process.poll() is None:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    finish(process, -signal.SIGINT)
