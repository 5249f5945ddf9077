"""What --speculative-draft-window-size means in SGLang's backends, according to their own functions: see
docs/windows.md."""

import json
import os
import subprocess
import sys

import pytest
from limits import HANG_SECONDS
from places import SUPPORT

# Keys that a query sees, its own included, under a flag of N, as the table in docs/windows.md has it.
TABLE = {"triton": {"extend": 1, "draft steps": 0}, "torch_native": {"extend": 1, "draft steps": 1}}


CASES = [(40, 6), (3, 6), (20, 20)]  # tokens before the queries, N
QUERIES = 4


@pytest.mark.sglang
def test_backends_show_a_query_as_many_keys_as_the_table_says():
    worker = [sys.executable, str(SUPPORT / "sglang_windows_worker.py"), json.dumps(CASES), str(QUERIES)]
    interpreted = {**os.environ, "TRITON_INTERPRET": "1"}
    process = subprocess.run(worker, env=interpreted, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert process.returncode == 0, process.stderr[-2000:]
    for (prefix, window), keys in zip(CASES, json.loads(process.stdout.splitlines()[-1]), strict=True):
        for backend, kinds in TABLE.items():
            for kind, more in kinds.items():
                positions = range(prefix, prefix + QUERIES)
                expected = [list(range(max(0, place + 1 - window - more), place + 1)) for place in positions]
                assert keys[backend][kind] == expected, (backend, kind, prefix, window)
