"""What the tests share: the process groups of a job of one process, and one thread for tensors that are all tiny."""

import os
import runpy
import subprocess
import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from places import LAUNCHERS, TESTS

if not torch.cuda.is_available() and find_spec("sglang") is None:
    # Before Triton is imported: its interpreter runs our kernels on the CPU. SGLang's servers must not inherit that.
    os.environ["TRITON_INTERPRET"] = "1"

SHIMS = str(TESTS / "sglang_cpu" / "shims")


def pytest_addoption(parser) -> None:
    parser.addoption("--vllm", metavar="PATH", help="vLLM's wheel, or the folder it is unpacked in, for test_vllm.py")


def pytest_configure() -> None:
    """One thread from the start, for fixtures of a module come before `one_thread`; another number of threads, other
    last bits. Where SGLang is installed on a machine without GPUs: its torchvision breaks the import of transformers,
    in this process and in those that tests start, unless a shim is there first."""
    torch.set_num_threads(1)
    if find_spec("sglang") and torch.version.cuda is None:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SHIMS, os.environ.get("PYTHONPATH")]))
        sys.path.insert(0, SHIMS)
        if not hasattr(sys.modules.get("sitecustomize"), "DeclareVisionOperators"):  # python may have imported another
            sys.modules.pop("sitecustomize", None)
            import_module("sitecustomize")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n`, the tests of a file run in one process and share what its fixtures started."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


@pytest.fixture(scope="session")
def topology():
    """Started once and left running: Megatron-core's groups cannot be formed twice in one process."""
    # here, for DeepSpeed takes seconds to import
    from eagle3.parallel.topology import start_distributed

    started = start_distributed()
    torch.set_num_threads(1)
    return started


@pytest.fixture(autouse=True)
def one_thread():
    """Threads would only wait for one another; on a busy machine that takes many times the work itself."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """A tiny target, to read: who changes a file of it takes a copy."""
    from tiny_run import make_target

    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def tokenizer(target):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target)


@pytest.fixture
def launcher(monkeypatch, capsys):
    """Runs a launcher in this process: exit code, stdout, stderr."""

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
    """The one line that a launcher says before it ends with exit code 2."""

    def line(name: str, *arguments) -> str:
        code, _, stderr = launcher(name, *arguments)
        assert code == 2 and stderr.count("\n") == 1
        return stderr

    return line


@pytest.fixture
def small_disk(tmp_path):
    """A folder that is a file system of its own, of 1 MiB; `mount -o remount,size=` changes that."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(mounted)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("a small disk takes the right to mount one")
    yield mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)
