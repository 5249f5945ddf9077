"""Reads conversations in a separate process, from the hub that HF_ENDPOINT names: one request per line, one answer per
line."""

import contextlib
import json
import sys
import time
from pathlib import Path

from eagle3 import console
from eagle3.errors import UserError
from eagle3.text import datasets
from eagle3.text.conversations import read_conversations
from eagle3.text.rows import MalformedRows

time.sleep = lambda seconds: None  # in all, the libraries would wait for minutes before giving up
console.QUIET_SECONDS = console.FIRST_GAP = console.LAST_GAP = 0.0
datasets.waiting = lambda say, what: contextlib.nullcontext()  # without gaps it would print all the time

for line in sys.stdin:
    request = json.loads(line)
    messages: list[str] = []
    downloads = request.get("downloads") and Path(request["downloads"])
    malformed = MalformedRows(request.get("drop", False))
    try:
        rows = read_conversations(
            [request["source"]], request.get("limit"), malformed=malformed, downloads=downloads, report=messages.append
        )
        answer = {"rows": [[row.origin, row.messages, row.text] for row in rows], "malformed": malformed.counts}
    except UserError as mistake:
        answer = {"error": str(mistake)}
    print(json.dumps(answer | {"told": messages}), flush=True)
