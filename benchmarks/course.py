"""Train one recipe in one process and under other layouts, and compare the runs: the table in docs/exactness.md.

    python benchmarks/course.py                                        the quickstart, as there
    python benchmarks/course.py --steps 20 --layouts u2 r2-p2p --processes 4 evaluation.conversations=0

Each layout is one run of launchers/train.py below --out, judged as the recipe says. Keys at the end change the recipe
of all runs.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from layouts import Layout
from reporting import headline, origin, positive, table

from eagle3.errors import UserError, run_command

ROOT = Path(__file__).parent.parent


class Course(NamedTuple):
    """A finished run: the loss of each step, and its evaluation if it was judged."""

    losses: list[float]
    evaluation: dict[str, Any] | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument(
        "--layouts", nargs="+", default=["u2", "r2"], help="beside one process: u2, r2-p2p, tp2-u2, ..."
    )
    parser.add_argument("--processes", type=positive, default=2, help="of each layout; what it leaves is data-parallel")
    parser.add_argument("--steps", type=positive, help="of each run (default: the recipe's)")
    parser.add_argument("--compared", type=positive, default=100, help="first steps whose losses are compared")
    parser.add_argument("--out", type=Path, default=Path("runs/course"))
    parser.add_argument("keys", nargs="*", metavar="section.key=value")
    options = parser.parse_intermixed_args()
    layouts = [Layout(), *map(Layout.parse, options.layouts)]
    keys = [*options.keys, *([f"training.max_steps={options.steps}"] if options.steps else [])]
    courses = [
        train(layout, 1 if layout.ranks == 1 else options.processes, options.recipe, options.out / layout.name, keys)
        for layout in layouts
    ]
    alone, rows = courses[0], []
    for layout, course in zip(layouts, courses, strict=True):
        compared = min(options.compared, len(alone.losses))
        difference = f"{largest_difference(course.losses, alone.losses, compared):.1e}" if course is not alone else ""
        rows.append([layout.name, f"{course.losses[0]:.4f}, {course.losses[-1]:.4f}", difference, judged(course)])
    steps = len(alone.losses)
    head = [
        "",
        f"loss at step 1, {steps}",
        f"largest relative difference of the first {compared} losses",
        "acceptance length",
    ]
    print(table(f"{headline(origin())}; {options.processes} processes.", head, rows))


def train(layout: Layout, processes: int, recipe: Path, folder: Path, keys: list[str]) -> Course:
    """Run launchers/train.py; its output goes to stderr. Raises UserError if it fails."""
    sizes = {"tensor": layout.tensor, "ulysses": layout.ulysses, "ring": layout.ring, "ring_mode": layout.mode}
    command = [Path(sys.executable).with_name("deepspeed"), "--num_gpus", processes]
    command += ["--master_port", random.randrange(10_000, 29_000)]  # because other jobs may run on this machine
    command += [ROOT / "launchers" / "train.py", "--deepspeed", ROOT / "ds_configs" / "zero2.json", "--recipe", recipe]
    command += [*keys, f"output.dir={folder}", *(f"parallelism.{name}={size}" for name, size in sizes.items())]
    code = subprocess.run(list(map(str, command)), stdout=sys.stderr).returncode
    if code:
        raise UserError(f"{layout.name}: launchers/train.py ended with exit code {code}; its output above says why")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    evaluation = folder / "evaluation.json"
    return Course(
        [record["loss"] for record in records if record["kind"] == "train"],
        json.loads(evaluation.read_text(encoding="utf-8")) if evaluation.exists() else None,
    )


def largest_difference(losses: list[float], expected: list[float], steps: int) -> float:
    """Largest difference among the first `steps` losses, relative to the expected ones."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses[:steps], expected[:steps], strict=True))


def judged(course: Course) -> str:
    if course.evaluation is None or course.evaluation.get("acceptance_length") is None:
        return "not judged"
    shares = " ".join(f"{share:.2f}" for share in course.evaluation["position_acceptance"])
    return f"{course.evaluation['acceptance_length']:.2f} ({shares})"


if __name__ == "__main__":
    run_command(main)
