"""What tests of real SGLang share: its environment, capturing servers of tiny targets, and a target that uses them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import HANG_SECONDS
from places import ROOT
from sglang_cpu.environment import sglang_environment

from eagle3.states.rows import Rows
from eagle3.states.spool import Spool
from eagle3.targets.checkpoint import fingerprint
from eagle3.targets.sglang.client import Producer, Servers
from eagle3.targets.sglang.hook import HookSettings
from eagle3.targets.sglang.server import EngineOptions, SGLangServer
from eagle3.targets.sglang.target import SGLangTarget
from eagle3.targets.sglang.version import capture_flags
from eagle3.text.samples import Sample

VOCABULARY = 256
HIDDEN = 64
AUX_LAYERS = (1, 2, 4)


@contextmanager
def cpu_environment(tensor: int = 1) -> Iterator[None]:
    """Inside the block, the environment is one in which SGLang can start a server of `tensor` ranks."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sglang_environment(tensor).items():
            patch.setenv(name, value)
        yield


def in_sglang(*command: object) -> Any:
    """What a script that imports SGLang prints in its last line."""
    words, streams = [sys.executable, *map(str, command)], {"capture_output": True, "text": True}
    run = subprocess.run(words, cwd=ROOT, env=sglang_environment(), timeout=HANG_SECONDS, **streams)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def options(model: Path, **changes) -> EngineOptions:
    """Engine options that are small enough for a CPU, with chunks so short that a prompt of 200 tokens takes seven."""
    small = {
        "dtype": "float32",
        "memory_fraction": 0.2,
        "kv_tokens": 4096,
        "attention": "intel_amx",
        "chunk_tokens": 32,
    }
    return EngineOptions(str(model), **{**small, **changes})


def hook_of(spool: Path, model: Path, **changes) -> HookSettings:
    return HookSettings(str(spool), "float32", fingerprint(model), HIDDEN)._replace(**changes)


def whole(ids: torch.Tensor) -> Sample:
    """A sample of these tokens, of which every row but the first teaches."""
    return Sample("", ids, torch.ones(len(ids), dtype=torch.bool))


@contextmanager
def capturing_server(
    model: Path, settings: HookSettings, aux_layers=AUX_LAYERS, flags: Sequence[str] = (), **changes
) -> Iterator[SGLangServer]:
    chosen = options(model, **changes)
    flags = [*capture_flags(aux_layers, settings._asdict()), *flags]
    with cpu_environment(chosen.tensor), SGLangServer(chosen, flags) as server:
        yield server


@contextmanager
def target_behind(
    urls: list[str],
    settings: HookSettings,
    most_bytes: int = 2**30,
    vocab_size: int = VOCABULARY,
) -> Iterator[SGLangTarget]:
    with Spool(settings.spool) as spool:
        producer = Producer(Servers(urls, spool.path, 4), spool, most_bytes, readers=0)
        try:
            yield SGLangTarget(producer, settings.encoding, vocab_size)
        finally:
            producer.close()


def documents(*lengths: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def largest_errors(actual: Rows, expected: Rows) -> dict[str, float]:
    """Largest errors of aux and of the teacher's values and logsumexp, relative to the largest value; for argmax, the
    number of rows that differ."""
    errors = {"argmax": float((actual.teacher.argmax != expected.teacher.argmax).sum())}
    for name in ("aux", "values", "logsumexp"):
        mine, other = actual.named()[name].double(), expected.named()[name].double()
        errors[name] = float((mine - other).abs().max() / other.abs().max())
    return errors


def left_in(folder: Path) -> list[str]:
    """Every file and folder of a spool."""
    return sorted(os.path.relpath(os.path.join(root, name), folder) for root, d, f in os.walk(folder) for name in d + f)
