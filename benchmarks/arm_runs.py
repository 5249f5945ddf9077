"""Trains the drafts of an experiment, judges them, and compares what was judged: for window_arms.py.

Each arm is a run of launchers/train.py from stored hidden states, judged by launchers/evaluate.py; each result is a
file of its own, with its command and its processor seconds. Intervals: 95%, by a bootstrap over seeds and prompts,
paired: all arms are judged on the same prompts.
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
    """A draft. data: of the store it trains from. keys: of the recipe. judged: windows at serving; None for as
    trained."""

    name: str
    data: str
    keys: tuple[str, ...]
    judged: tuple[int | None, ...] = (None,)

    def served(self, window: int | None) -> str:
        return self.name if window is None else f"{self.name}; window {window} at serving"

    def run_folder(self, folder: Path, seed: int) -> Path:
        return folder / f"{self.name.replace(',', '').replace(' ', '-')}-{seed}"

    def result(self, folder: Path, seed: int, window: int | None) -> Path:
        return self.run_folder(folder, seed) / f"judged-{window or 'as-trained'}.json"


class Experiment(NamedTuple):
    """recipe: arguments for every launcher. stores: keys of the hidden-state stores by name. judge: arguments for
    evaluate.py. findings: what read_results found, put into numbers. tables: a document of both, in Markdown. drawn: of
    the findings, acceptance by context of some arms."""

    recipe: tuple[str, ...]
    stores: dict[str, tuple[str, ...]]
    arms: list[Arm]
    judge: tuple[str, ...]
    findings: Callable[[dict[str, Any]], dict[str, Any]]
    tables: Callable[[dict[str, Any]], str]
    drawn: Callable[[dict[str, Any]], dict[str, Any]]


def run_arm(experiment: Experiment, arm: Arm, seed: int, folder: Path) -> None:
    """Train the arm and judge it, where that is not done yet."""
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
    """Run the launcher unless `file` says what it took."""
    if not file.exists():
        seconds = _launch(launcher, arguments)
        file.write_text(json.dumps({"command": shlex.join([launcher, *arguments]), "processor_seconds": seconds}))


def _launch(launcher: str, arguments: list[str]) -> float:
    """Processor seconds of a launcher. Raises UserError where it fails, which has said why."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{launcher} {shlex.join(arguments)}", file=sys.stderr, flush=True)
    code = subprocess.run([sys.executable, str(ROOT / "launchers" / launcher), *arguments]).returncode
    if code not in (0, 1):  # 1: a tie of sampled tokens, which the result counts
        raise UserError(f"{launcher} ended with code {code}; what it said stands above; run again to continue")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)


def read_results(arms: Sequence[Arm], folder: Path) -> dict[str, Any]:
    """By arm, as it is served: seeds, contexts, processor seconds, and counts [seeds, contexts, prompts, 2] of tokens
    and verifications. Only of seeds that all arms have. Raises UserError where there is none."""
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
        """[1 + RESAMPLES]: the measured one first."""
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
