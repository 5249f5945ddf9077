"""Attack the project from outside and write down how every try ends.

    python benchmarks/reliability/run.py --out FOLDER                    every attack
    python benchmarks/reliability/run.py cache_flips kills --out FOLDER  some of them
    python benchmarks/reliability/run.py --out FOLDER --resume           go on where an earlier start stopped
    python benchmarks/reliability/run.py --table --out FOLDER            the table of what is written down, in Markdown

FOLDER/tries.jsonl gets a line as each try ends. The attacks run the launchers as users do, on tiny models that are made
on the spot, and compare what comes out with undisturbed runs. full_disk and some of hostile_places mount small file
systems, for which they need root or `unshare -Urm`. Every tenth try starts new interpreters; the others fork from one
that has PyTorch imported. The exit code is 1 where a try ended as none may, 2 where an attack could not be tried.
"""

import argparse
import importlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ground import Ground
from launching import Launchers, preload
from tries import BAD, GOOD, MEANING, Case, NotHere, Verdict

ROOT = Path(__file__).parents[2]
ATTACKS = {
    "cache_flips": "one flipped bit in the tokenised cache",
    "foreign_shards": "shards and indexes of another target's store",
    "shared_folder": "two runs on one output.dir",
    "kills": "SIGKILL at any moment, and the command again",
    "full_disk": "a disk that fills up, and the command again with room",
    "hostile_text": "nested, huge and endless data, recipes, configs and templates",
    "hostile_checkpoints": "planted and broken checkpoints and targets",
    "silent_changes": "files changed between two commands, each as valid as before",
    "hostile_places": "folders, spools, secrets, names, ranks that die",
    "first_hour": "mistakes of a new user's first hour",
    "hostile_servers": "servers that hang, flood, answer nonsense, or compute it",
    "hostile_terminals": "lost permissions, text that controls terminals, launchers killed, open ports",
}
FRESH_EVERY = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"of {', '.join(ATTACKS)}; default: all")
    parser.add_argument("--out", type=Path, required=True, help="folder for tries.jsonl and all that the tries write")
    parser.add_argument("--seed", type=int, default=0, help="of every choice by chance")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N tries of each attack")
    parser.add_argument("--only", metavar="TEXT", help="only tries with TEXT in their name")
    parser.add_argument("--resume", action="store_true", help="skip the tries that tries.jsonl has")
    parser.add_argument("--table", action="store_true", help="start nothing; print the table of tries.jsonl")
    parser.add_argument(
        "--checkout", type=Path, default=ROOT, help="the code to attack; default: the one around this file"
    )
    options = parser.parse_args()
    unknown = [name for name in options.attacks if name not in ATTACKS]
    if unknown:
        parser.error(f"{unknown[0]}: no such attack; name some of {', '.join(ATTACKS)}")
    written, out = options.out / "tries.jsonl", options.out.resolve()
    if options.table:
        print(table(read(written)))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    if not options.resume:
        written.unlink(missing_ok=True)
    earlier = {(one["attack"], one["try"]) for one in read(written)}
    preload()
    launchers = Launchers(options.checkout.resolve(), out / "logs")
    ground, code = Ground(out, launchers), 0
    for attack in options.attacks or ATTACKS:
        try:
            candidates = importlib.import_module(attack).cases(ground, random.Random(f"{attack} {options.seed}"))
            cases = list(candidates)[: options.first]
        except NotHere as reason:
            print(f"{attack}: not tried: {reason}", flush=True)
            code = 2
            continue
        for number, case in enumerate(cases):
            if (attack, case.name) in earlier or (options.only and options.only not in case.name):
                continue
            launchers.fresh = number % FRESH_EVERY == 0
            record = {"attack": attack, "try": case.name, **one_try(case, launchers), "fresh": launchers.fresh}
            with written.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            print(
                f"{attack}: {case.name}: {record['outcome']} in {record['seconds']} s: {record['detail']}", flush=True
            )
    return code or int(any(one["outcome"] in BAD for one in read(written)))


def one_try(case: Case, launchers: Launchers) -> dict[str, Any]:
    """Its outcome, and what it took. A fault of the harness itself ends the harness."""
    began, used, first = time.monotonic(), launchers.cpu_seconds, launchers.count
    verdict: Verdict = case.run()
    assert verdict.outcome in (*GOOD, *BAD), verdict
    return {
        "outcome": verdict.outcome,
        "detail": verdict.detail[:600],
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(launchers.cpu_seconds - used, 1),
        "logs": f"{first + 1:05d}-{launchers.count:05d}",
    }


def read(written: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.read_text(encoding="utf-8").splitlines()] if written.exists() else []


def table(tries: list[dict[str, Any]]) -> str:
    """In Markdown: a line an attack, then what each outcome means."""
    seen = [name for name in (*GOOD, *BAD) if name in BAD or any(one["outcome"] == name for one in tries)]
    rows = [["attack", "tries", *seen, "processor seconds"]]
    rows.append(["---"] * len(rows[0]))
    for attack, counts, seconds in _counted(tries):
        rows.append([attack, counts.total(), *(counts[name] or "" for name in seen), f"{seconds:.0f}"])
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([*lines, "", *(f"* **{name}**: {MEANING[name]}" for name in seen)])


def _counted(tries: list[dict[str, Any]]) -> Iterator[tuple[str, Counter, float]]:
    for attack, about in ATTACKS.items():
        own = [one for one in tries if one["attack"] == attack]
        if own:
            yield (
                f"`{attack}`: {about}",
                Counter(one["outcome"] for one in own),
                sum(one["cpu_seconds"] for one in own),
            )


if __name__ == "__main__":
    sys.exit(main())
