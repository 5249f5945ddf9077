"""What the tests share: the process groups of a one-process job, and a single thread, since all tensors are tiny."""

import gc
import os
import runpy
import subprocess
import sys
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from limits import HANG_SECONDS
from places import LAUNCHERS

if not torch.cuda.is_available() and find_spec("sglang") is None:
    # Before Triton is imported: its interpreter runs our kernels on the CPU. SGLang's servers must not inherit that.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser) -> None:
    parser.addoption("--vllm", metavar="PATH", help="vLLM's wheel, or the folder it is unpacked in, for test_vllm.py")


def pytest_configure() -> None:
    """Use one thread from the start: fixtures of a module run before `one_thread`, and a different number of threads
    changes last bits."""
    torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n`, the tests of a file run in one process and share what its fixtures started. Files run in their order:
    xdist would begin with those that have the most tests, and end with one process busy with a long one."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported and collected, which all stays."""
    gc.freeze()


@pytest.fixture(scope="session")
def topology():
    """The groups, formed once and kept: Megatron-core cannot form its groups twice in one process."""
    # imported here, because DeepSpeed takes seconds
    from eagle3.parallel.topology import start_distributed

    started = start_distributed()
    torch.set_num_threads(1)
    return started


@pytest.fixture(autouse=True)
def one_thread():
    """More threads would only wait for one another, which takes many times the work itself on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_progress_lines(monkeypatch):
    """However slow the machine, only tests about progress get lines about it."""
    monkeypatch.setattr("eagle3.console.QUIET_SECONDS", HANG_SECONDS)


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """A tiny target. Read it only; a test that changes a file must use a copy."""
    from tiny_run import make_target

    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def tokenizer(target):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target)


@pytest.fixture
def launcher(monkeypatch, capsys):
    """Runs a launcher in this process. Returns exit code, stdout and stderr."""

    def call(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(LAUNCHERS / name), run_name="__main__")
        streams = capsys.readouterr()
        return ended.value.code, streams.out, streams.err

    return call


@pytest.fixture
def report(launcher):
    return partial(launcher, "report.py")


@pytest.fixture
def refused(launcher):
    """Runs a launcher that must end with exit code 2. Returns the one line that it prints."""

    def line(name: str, *arguments) -> str:
        code, _, stderr = launcher(name, *arguments)
        assert code == 2 and stderr.count("\n") == 1
        return stderr

    return line


@pytest.fixture
def small_disk(tmp_path):
    """A folder with a separate file system of 1 MiB; `mount -o remount,size=` changes its size."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(mounted)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("a small disk takes the right to mount one")
    yield mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)
