"""What every benchmark reports about itself (command, date, machine), and tables."""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def origin(**machine: Any) -> dict[str, Any]:
    """The head of a result's JSON document; `machine`: more about the machine."""
    from torch import __version__ as torch_version
    from torch import cuda

    listing, name = Path("/proc/cpuinfo"), platform.processor()
    if listing.exists():
        name = re.search(r"model name\s*: (.*)", listing.read_text() + f"model name : {name}")[1]
    about = {"cpu": name, "cores": os.cpu_count(), "torch": torch_version}
    about |= {"gpu": cuda.get_device_name()} if cuda.is_available() else {}
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": about | machine,
    }


def headline(document: dict[str, Any]) -> str:
    machine = document["machine"]
    gpu = f", {machine['gpu']}" if "gpu" in machine else ""
    return f"{machine['cpu']}, {machine['cores']} cores{gpu}, torch {machine['torch']}, {document['date'][:10]}"


def positive(text: str) -> int:
    """For argparse: a whole number, 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def table(title: str, head: list[str], rows: list[list[Any]]) -> str:
    """A title and a table, in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join([title, "", *(f"| {' | '.join(map(str, line))} |" for line in lines)])


def report_parts(
    parts: dict[str, Callable[[], Any]],
    options: argparse.Namespace,
    drafts: dict[str, Any],
    markdown: Callable[[dict[str, Any]], str],
    stdout: int,
) -> None:
    """Measure the parts one after another, and write the document to the descriptor `stdout`: as JSON if options.json
    is set, otherwise as `markdown` formats it. The time that each part took goes to stderr."""
    loads, results = {}, {}
    for part, measure in parts.items():
        loads[part], began = os.getloadavg()[0], time.monotonic()
        results[part] = measure()
        print(f"{part}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    document = origin(load_before=loads) | {
        "settings": {key: value for key, value in vars(options).items() if key != "json"} | {"drafts": drafts},
        "results": results,
    }
    with os.fdopen(stdout, "w") as out:
        print(json.dumps(document, indent=1) if options.json else markdown(document), file=out)
