"""What the rows that serving uses give a draft, and samples of equal weight: the quickstart, trained by either rule.

    python benchmarks/served_rows.py run OUT                trains and judges what is not there yet (an hour)
    python benchmarks/served_rows.py report OUT             a table from what is there
    python benchmarks/served_rows.py report OUT --json      the same as one JSON document

For answers of at most 16, 64 and 256 tokens, and two seeds: `training.rows` served and reference, and with the longest
answers `training.normalization` samples. Each draft decodes the same unseen questions twice: to the end, and for a
single verification, which shows how often the first proposal after a prefill is accepted. Keys after the options change
the recipe of all.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from reporting import origin, table

ROOT = Path(__file__).parent.parent
QUESTIONS = 120
DRAFT_TOKENS = 4


class Arm(NamedTuple):
    """A way to train. answer: tokens, at most."""

    answer: int
    name: str
    keys: tuple[str, ...]

    def folder(self, out: Path, seed: int | str) -> Path:
        return out / f"{self.answer}-{self.name.replace(',', '').replace(' ', '-')}-{seed}"


RULES = {rule: (f"training.rows={rule}",) for rule in ("served", "reference")}
SAMPLES = ("training.normalization=samples",)
ARMS = [Arm(answer, rule, keys) for answer in (16, 64, 256) for rule, keys in RULES.items()]
ARMS.append(Arm(256, "served, samples of equal weight", SAMPLES))
JUDGED = {"whole": None, "first": 2}  # new tokens: as many as answers have, or one verification after the prefill
MEASURED = ("first", "acceptance_length")


def run(arm: Arm, seed: int, out: Path, keys: Sequence[str]) -> None:
    """Train one draft and judge it, except for what is done already."""
    folder = arm.folder(out, seed)
    keys = [
        str(ROOT / "recipes" / "quickstart.yaml"),
        *(f"model.demo.answer_tokens={arm.answer}", f"training.seed={seed}", f"output.dir={folder}"),
        *(f"evaluation.conversations={QUESTIONS}", f"evaluation.draft_tokens={DRAFT_TOKENS}", "evaluation.every=10000"),
        *(*arm.keys, *keys),
    ]
    if not (folder / "export" / "config.json").exists():
        launch("train.py", *keys, "evaluation.conversations=0")
    for name, new_tokens in JUDGED.items():
        if not (result := folder / f"{name}.json").exists():
            launch("evaluate.py", *keys, f"evaluation.new_tokens={new_tokens or arm.answer}", "--out", str(result))


def launch(script: str, *words: Any, env: dict[str, str] | None = None) -> None:
    command = [sys.executable, str(ROOT / "launchers" / script), *map(str, words)]
    subprocess.run(command, cwd=ROOT, check=True, env=env)


def results(out: Path) -> list[dict[str, Any]]:
    """Of each arm, the means over the seeds that are there."""
    rows = []
    for arm in ARMS:
        judged = [
            {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in JUDGED}
            for folder in sorted(out.glob(arm.folder(Path(), "[0-9]*").name))
            if all((folder / f"{name}.json").exists() for name in JUDGED)
        ]
        if judged:
            rows.append(
                {
                    "answer": arm.answer,
                    "arm": arm.name,
                    "first": [each["first"]["position_acceptance"][0] for each in judged],
                    "acceptance_length": [each["whole"]["acceptance_length"] for each in judged],
                    "lossless": all(each[name]["lossless"] for each in judged for name in JUDGED),
                }
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--json", action="store_true", help="report: print one JSON document")
    parser.add_argument("keys", nargs="*", metavar="section.key=value", help="run: change the recipe of all arms")
    options = parser.parse_intermixed_args()
    if options.what == "run":
        for seed in options.seeds:  # seed by seed, so that results are complete after each
            for arm in ARMS:
                run(arm, seed, options.out.resolve(), options.keys)
        return 0
    document = origin() | {"arms": results(options.out)}
    rows = [
        [
            *(str(each["answer"]), each["arm"]),
            *(f"{np.mean(each[name]):.3f} ({', '.join(f'{one:.3f}' for one in each[name])})" for name in MEASURED),
        ]
        for each in document["arms"]
    ]
    head = ["answers, tokens at most", "trained with", "first proposal accepted", "acceptance length"]
    print(json.dumps(document) if options.json else table("Means over the seeds, and each.", head, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
