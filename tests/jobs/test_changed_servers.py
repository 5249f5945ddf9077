"""A capturing server that computes something else in the middle of a job ends the job, which names it.

The server is the stand-in that benchmarks/reliability uses: its rows come from transformers.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from places import ROOT
from sglang_case import left_in
from tiny_run import finish, launch, make_target, write_recipe

STAND_IN = ROOT / "benchmarks" / "reliability" / "capture_server.py"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    path = write_recipe(folder, make_target(folder / "target"))
    values = yaml.safe_load(path.read_text())
    values["target"] = {"backend": "sglang", "spool": str(folder / "spool")}
    values["hidden_states"] = values.get("hidden_states", {}) | {"path": str(folder / "store"), "shard_tokens": 200}
    path.write_text(yaml.safe_dump(values))
    return path


@contextmanager
def standing_in(recipe: Path, *words: str) -> Iterator[str]:
    """The URL of a server."""
    folder = recipe.parent
    command = [sys.executable, STAND_IN, folder / "target", folder / "spool", *words]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_capture_ends_with_the_name_of_the_server_that_changed_and_when_it_was_last_right(recipe):
    with standing_in(recipe, "other weights", "--after", "10", "--aux", "1", "2", "3") as url:
        words = ("--recipe", str(recipe), f"target.servers=['{url}']")
        output = finish(launch(sys.executable, "launchers/capture.py", *words), code=2)
    (line,) = [line for line in output.splitlines() if line.startswith("error:")]
    assert f"target.servers: {url}: its hidden states are not those of this job's start (aux is off by" in line
    assert f"delete the newer shards in {recipe.parent / 'store'}, and run capture.py again" in line
    assert "complete" not in output and "Traceback" not in output and left_in(recipe.parent / "spool") == []
