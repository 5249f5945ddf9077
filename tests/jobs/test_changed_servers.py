"""A capturing server that computes something else in the middle of a job ends the job, which names it.

The server is the stand-in that benchmarks/reliability uses: its rows come from transformers.
"""

import subprocess
import sys

import yaml
from places import ROOT
from sglang_case import left_in
from tiny_run import capture, write_recipe

STAND_IN = ROOT / "benchmarks" / "reliability" / "capture_server.py"


def test_a_capture_ends_with_the_name_of_the_server_that_changed_and_when_it_was_last_right(tmp_path, target):
    spool, store = tmp_path / "spool", tmp_path / "store"
    recipe = write_recipe(tmp_path, target, hidden_states={"path": str(store), "shard_tokens": 200})
    values = yaml.safe_load(recipe.read_text()) | {"target": {"backend": "sglang", "spool": str(spool)}}
    recipe.write_text(yaml.safe_dump(values))
    command = [sys.executable, STAND_IN, target, spool, "other weights", "--after", "10", "--aux", "1", "2", "3"]
    with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().strip()
            output = capture(recipe, f"target.servers=['{url}']", code=2)
        finally:
            server.kill()
    (line,) = [line for line in output.splitlines() if line.startswith("error:")]
    assert f"target.servers: {url}: its hidden states are not those of this job's start (aux is off by" in line
    assert f"delete the newer shards in {store}, and run capture.py again" in line
    assert "complete" not in output and "Traceback" not in output and left_in(spool) == []
