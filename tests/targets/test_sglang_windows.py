"""What --speculative-draft-window-size means in SGLang's backends, according to their own functions: see
docs/windows.md."""

import json

import pytest
from sglang_case import in_sglang

# Keys that a query sees, its own included, under a flag of N, as the table in docs/windows.md has it.
TABLE = {"triton": {"extend": 1, "draft steps": 0}, "torch_native": {"extend": 1, "draft steps": 1}}
CASES = [(40, 6), (3, 6), (20, 20)]  # tokens before the queries, N
QUERIES = 4


@pytest.mark.sglang
def test_backends_show_a_query_as_many_keys_as_the_table_says():
    seen = in_sglang("tests/support/sglang_windows_worker.py", json.dumps(CASES), QUERIES)
    for (prefix, window), keys in zip(CASES, seen, strict=True):
        for backend, kinds in TABLE.items():
            for kind, more in kinds.items():
                positions = range(prefix, prefix + QUERIES)
                expected = [list(range(max(0, place + 1 - window - more), place + 1)) for place in positions]
                assert keys[backend][kind] == expected, (backend, kind, prefix, window)
