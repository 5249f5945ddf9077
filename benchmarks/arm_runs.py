"""Trains the drafts of an experiment, judges them, and compares the results; for window_arms.py.

Each arm is a run of launchers/train.py from stored hidden states, judged by launchers/evaluate.py. Each result has a
file of its own, with its processor seconds. Intervals are 95%, by a bootstrap over seeds and prompts, which is paired
because all arms are judged on the same prompts.
"""

import json
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eagle3.errors import UserError

ROOT = Path(__file__).parent.parent
RESAMPLES = 4000


class Arm(NamedTuple):
    """A draft to train and judge."""

    name: str
    data: str  # name of the store that it trains from
    keys: tuple[str, ...]  # overrides of recipe keys
    judged: tuple[int | None, ...] = (None,)  # windows at serving; None for as trained

    def served(self, window: int | None) -> str:
        return self.name if window is None else f"{self.name}; window {window} at serving"

    def run_folder(self, folder: Path, seed: int) -> Path:
        return folder / f"{self.name.replace(',', '').replace(' ', '-')}-{seed}"

    def result(self, folder: Path, seed: int, window: int | None) -> Path:
        return self.run_folder(folder, seed) / f"judged-{window or 'as-trained'}.json"


class Experiment(NamedTuple):
    """The arms to compare, how to run them, and what to make of their results."""

    recipe: tuple[str, ...]  # arguments for every launcher
    stores: dict[str, tuple[str, ...]]  # name of a hidden-state store -> its overrides of recipe keys
    arms: list[Arm]
    judge: tuple[str, ...]  # arguments for evaluate.py
    findings: Callable[[dict[str, Any]], dict[str, Any]]  # computes figures from read_results
    tables: Callable[[dict[str, Any]], str]  # formats results and findings as Markdown
    drawn: Callable[[dict[str, Any]], dict[str, Any]]  # from the findings, some arms' acceptance by context


def run_arm(experiment: Experiment, arm: Arm, seed: int, folder: Path) -> None:
    """Train the arm and judge it, except for what is done already."""
    results = {window: arm.result(folder, seed, window) for window in arm.judged}
    if all(result.exists() for result in results.values()):
        return
    store, run = folder / f"states-{arm.data}", arm.run_folder(folder, seed)
    recipe, data = experiment.recipe, experiment.stores[arm.data]
    stored = ["hidden_states.mode=stored", f"hidden_states.path={store}"]
    _note_cost(store / "cost.json", "capture.py", [*recipe, *data, *stored, "--quiet"])
    seeds = [f"training.seed={seed}", f"data.seed={seed}"]
    chosen = [*recipe, *data, *arm.keys, *seeds, *stored, f"output.dir={run}"]
    _note_cost(run / "cost.json", "train.py", [*chosen, "--resume", "auto", "--quiet"])
    for window, result in results.items():
        if not result.exists():
            served = [] if window is None else ["--window", str(window)]
            partial = result.with_suffix(".partial")
            partial.unlink(missing_ok=True)
            out = ["--draft", str(run / "export"), "--out", str(partial), "--quiet"]
            seconds = _launch("evaluate.py", [*recipe, *experiment.judge, *served, *out])
            result.write_text(json.dumps(json.loads(partial.read_text()) | {"processor_seconds": seconds}, indent=1))
            partial.unlink()


def _note_cost(file: Path, launcher: str, arguments: list[str]) -> None:
    """Run the launcher, and note its cost in `file`, unless that file exists already."""
    if not file.exists():
        seconds = _launch(launcher, arguments)
        file.write_text(json.dumps({"command": shlex.join([launcher, *arguments]), "processor_seconds": seconds}))


def _launch(launcher: str, arguments: list[str]) -> float:
    """Run a launcher and return its processor seconds. Raises UserError if it fails; its own output says why."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{launcher} {shlex.join(arguments)}", file=sys.stderr, flush=True)
    code = subprocess.run([sys.executable, str(ROOT / "launchers" / launcher), *arguments]).returncode
    if code not in (0, 1):  # 1: output that differs from plain decoding, which the result counts
        raise UserError(f"{launcher} ended with code {code}; what it said stands above; run again to continue")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)


def read_results(arms: Sequence[Arm], folder: Path) -> dict[str, Any]:
    """The results of each arm under each of its windows: seeds, contexts, processor seconds, and counts [seeds,
    contexts, prompts, 2] of tokens and verifications. Covers only seeds for which all arms were judged. Raises
    UserError if there is none."""
    pairs = [(arm, window) for arm in arms for window in arm.judged]
    first_arm, first_window = pairs[0]
    pattern = first_arm.result(folder, 0, first_window).relative_to(folder).parent.name
    begun = sorted(int(path.name.rpartition("-")[2]) for path in folder.glob(pattern.rpartition("-")[0] + "-[0-9]*"))
    seeds = [seed for seed in begun if all(arm.result(folder, seed, window).exists() for arm, window in pairs)]
    if not seeds:
        raise UserError(f"--folder {folder}: no seed of which all arms are judged; run this with `run` first")
    results: dict[str, Any] = {}
    for arm, window in pairs:
        judged = [json.loads(arm.result(folder, seed, window).read_text()) for seed in seeds]
        costs = [json.loads((arm.run_folder(folder, seed) / "cost.json").read_text()) for seed in seeds]
        results[arm.served(window)] = {
            "seeds": seeds,
            "contexts": [each["context"] for each in judged[0]["contexts"]],
            "counts": [[context["of_each"] for context in each["contexts"]] for each in judged],
            "training_seconds": [cost["processor_seconds"] for cost in costs],
            "judging_seconds": [each["processor_seconds"] for each in judged],
        }
    return results


class Resampled:
    """Acceptance lengths of all arms: as measured, and under resamples of seeds and prompts that all arms share."""

    def __init__(self, results: dict[str, Any]) -> None:
        generator = np.random.default_rng(0)
        one = next(iter(results.values()))
        seeds, self.contexts = len(one["seeds"]), one["contexts"]
        self.chosen_seeds = generator.integers(seeds, size=(RESAMPLES, seeds))
        self.counts = {
            name: [np.array([of_seed[place] for of_seed in arm["counts"]]) for place in range(len(self.contexts))]
            for name, arm in results.items()
        }
        sizes = [counts.shape[1] for counts in next(iter(self.counts.values()))]
        self.chosen_prompts = [generator.integers(size, size=(RESAMPLES, size)) for size in sizes]

    def of(self, name: str, context: int) -> np.ndarray:
        """Acceptance lengths [1 + RESAMPLES], the measured one first."""
        place = self.contexts.index(context)
        counts, prompts = self.counts[name][place], self.chosen_prompts[place]
        resampled = counts[self.chosen_seeds[:, :, None], prompts[:, None, :]].sum((1, 2))
        both = np.concatenate([counts.sum((0, 1))[None], resampled])
        return both[:, 0] / both[:, 1]


def interval(values: np.ndarray) -> list[float]:
    """The measured value and its 95% interval."""
    return [round(float(each), 4) for each in (values[0], *np.quantile(values[1:], (0.025, 0.975)))]


def cell(values: Sequence[float]) -> str:
    return f"{values[0]:.2f} [{values[1]:.2f}, {values[2]:.2f}]"
