"""What windows do to acceptance by context: part 1 of the experiment in docs/windows.md, with the library target.

    python benchmarks/window_arms.py run --folder runs/windows --seeds 0 1 2     trains and judges; what is there is kept
    python benchmarks/window_arms.py report --folder runs/windows                tables and marks from what is there
    python benchmarks/window_arms.py report --folder runs/windows --json         the same as one JSON document

Each arm is a run of launchers/train.py from stored hidden states, judged by launchers/evaluate.py; each result is a file of its
own, with its command and its processor seconds. Intervals: 95%, by a bootstrap over seeds and prompts, paired: all arms are
judged on the same prompts.
"""

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from reporting import headline, origin, positive, table

from eagle3.errors import UserError, run_command

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "long-context-demo.yaml"
TRAINED, LONGEST = 512, 8192  # tokens of a piece, and sixteen times that
RESAMPLES = 4000
PLAIN_ROPE = "model.draft.rope_parameters={rope_type: default, rope_theta: 10000.0}"
PIECES = ("data.max_length=512", "training.global_batch_size=10", "evaluation.held_out_samples=200")
SPANS = ("data.spans={length: 512, per_document: 1}", "training.global_batch_size=10")
# What the marks of docs/windows.md ask for.
LEVEL, FALLEN, CLOSE = 0.93, 0.75, 0.95
ALONE, OTHERS = (
    "trained with the window, less the same window at serving alone",
    "a key fewer or more at serving, less as trained",
)


class Arm(NamedTuple):
    """A draft. data: of the store it trains from. keys: of the recipe. judged: windows at serving; None for as trained."""

    name: str
    data: str
    keys: tuple[str, ...]
    judged: tuple[int | None, ...] = (None,)


def window(size: int) -> str:
    return f"model.draft.window={size}"


STORES = {"pieces": PIECES[:1], "files": ()}
ARMS = [
    Arm("full attention, plain rope", "pieces", (*PIECES, PLAIN_ROPE), (None, 32, 128)),
    Arm("full attention, YaRN", "pieces", PIECES, (None, 32, 128)),
    Arm("window 16", "pieces", (*PIECES, PLAIN_ROPE, window(16))),
    # a key fewer, as Triton's draft steps have it, and a key more
    Arm("window 32", "pieces", (*PIECES, PLAIN_ROPE, window(32)), (None, 31, 33)),
    *(Arm(f"window {size}", "pieces", (*PIECES, PLAIN_ROPE, window(size))) for size in (128, 512)),
    *(Arm(f"spans of files, window {size}", "files", (*SPANS, PLAIN_ROPE, window(size))) for size in (32, 128)),
]
FULL = PLAIN, _ = [arm.name for arm in ARMS if arm.name.startswith("full attention")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--folder", type=Path, default=Path("runs/windows"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--per-context", type=positive, default=24, help="prompts of each context")
    parser.add_argument("--json", action="store_true", help="report: print one JSON document")
    parser.add_argument("keys", nargs="*", metavar="section.key=value", help="run: change the recipe of all arms")
    options = parser.parse_intermixed_args()
    if options.what == "run":
        for seed in options.seeds:  # seed by seed: what there is after each is whole
            for arm in ARMS:
                run_arm(arm, seed, options.folder, options.per_context, options.keys)
        return 0
    found = read_results(options.folder)
    document = origin(load=os.getloadavg()[0]) | {"arms": found, "marks": marks(found)}
    print(json.dumps(document, indent=1) if options.json else in_markdown(document))
    return 0


def run_arm(arm: Arm, seed: int, folder: Path, per_context: int, keys: Sequence[str]) -> None:
    """Train the arm and judge it, where that is not done yet."""
    store, run = folder / f"states-{arm.data}", folder / f"{arm.name.replace(',', '').replace(' ', '-')}-{seed}"
    results = {size: run / f"judged-{size or 'as-trained'}.json" for size in arm.judged}
    if all(result.exists() for result in results.values()):
        return
    recipe = ["--recipe", str(RECIPE), *keys]
    stored = f"hidden_states.path={store}"
    note_cost(store / "cost.json", "capture.py", [*recipe, *STORES[arm.data], stored, "--quiet"])
    seeds = [f"training.seed={seed}", f"data.seed={seed}"]
    chosen = [*recipe, *arm.keys, *seeds, "hidden_states.mode=stored", stored, f"output.dir={run}"]
    note_cost(run / "cost.json", "train.py", [*chosen, "--resume", "auto", "--quiet"])
    judge = ["--by-context", "--per-context", str(per_context), "--temperature", "1", "--seed", "0", "--quiet"]
    for size, result in results.items():
        if not result.exists():
            served = [] if size is None else ["--window", str(size)]
            partial = result.with_suffix(".partial")
            partial.unlink(missing_ok=True)
            out = ["--draft", str(run / "export"), "--out", str(partial)]
            seconds = launch("evaluate.py", [*recipe, *judge, *served, *out])
            result.write_text(json.dumps(json.loads(partial.read_text()) | {"processor_seconds": seconds}, indent=1))
            partial.unlink()


def note_cost(file: Path, launcher: str, arguments: list[str]) -> None:
    """Run the launcher unless `file` says what it took."""
    if not file.exists():
        seconds = launch(launcher, arguments)
        file.write_text(json.dumps({"command": shlex.join([launcher, *arguments]), "processor_seconds": seconds}))


def launch(launcher: str, arguments: list[str]) -> float:
    """Processor seconds of a launcher. Raises UserError where it fails, which has said why."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{launcher} {shlex.join(arguments)}", file=sys.stderr, flush=True)
    code = subprocess.run([sys.executable, str(ROOT / "launchers" / launcher), *arguments]).returncode
    if code not in (0, 1):  # 1: a tie of sampled tokens, which the result counts
        raise UserError(f"{launcher} ended with code {code}; what it said stands above; run again to continue")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)


def read_results(folder: Path) -> dict[str, Any]:
    """By arm, as it is served: seeds, contexts, processor seconds, and counts [seeds, contexts, prompts, 2] of tokens and
    verifications. Only of seeds that all arms have."""
    files = {
        (served(arm, size), seed_of(path)): path
        for arm in ARMS
        for size in arm.judged
        for path in folder.glob(
            f"{arm.name.replace(',', '').replace(' ', '-')}-[0-9]*/judged-{size or 'as-trained'}.json"
        )
    }
    names = list(dict.fromkeys(name for name, _ in files))
    seeds = sorted(seed for seed in {seed for _, seed in files} if all((name, seed) in files for name in names))
    if not seeds:
        raise UserError(f"--folder {folder}: no seed of which all arms are judged; run this with `run` first")
    found: dict[str, Any] = {}
    for name in names:
        judged = [json.loads(files[name, seed].read_text()) for seed in seeds]
        found[name] = {
            "seeds": seeds,
            "contexts": [each["context"] for each in judged[0]["contexts"]],
            "counts": [[context["of_each"] for context in each["contexts"]] for each in judged],
            "training_seconds": [
                json.loads((files[name, seed].parent / "cost.json").read_text())["processor_seconds"] for seed in seeds
            ],
            "judging_seconds": [each["processor_seconds"] for each in judged],
        }
    return found


def served(arm: Arm, size: int | None) -> str:
    return arm.name if size is None else f"{arm.name}; window {size} at serving"


def seed_of(path: Path) -> int:
    return int(path.parent.name.rpartition("-")[2])


class Resampled:
    """Acceptance lengths of all arms: as measured, and under resamples of seeds and prompts that all arms share."""

    def __init__(self, found: dict[str, Any]) -> None:
        generator = np.random.default_rng(0)
        one = next(iter(found.values()))
        seeds, self.contexts = len(one["seeds"]), one["contexts"]
        self.chosen_seeds = generator.integers(seeds, size=(RESAMPLES, seeds))
        self.counts = {
            name: [np.array([of_seed[place] for of_seed in arm["counts"]]) for place in range(len(self.contexts))]
            for name, arm in found.items()
        }
        sizes = [self.counts[next(iter(found))][place].shape[1] for place in range(len(self.contexts))]
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


def marks(found: dict[str, Any]) -> dict[str, Any]:
    """Each [measured, low, high], and whether the measured one reaches its mark."""
    arms = Resampled(found)
    best = np.max([arms.of(name, TRAINED) for name in FULL], axis=0)
    ratios = {name: interval(arms.of(name, LONGEST) / arms.of(name, TRAINED)) for name in found}
    close = {name: interval(arms.of(name, TRAINED) / best) for name in found}
    trained = [arm.name for arm in ARMS if arm.name not in FULL]
    alone = {
        f"{size} keys, {context} tokens": interval(
            arms.of(f"window {size}", context) - arms.of(served(ARMS[0], size), context)
        )
        for size in (32, 128)
        for context in arms.contexts
    }
    others = {
        f"{size} keys, {context} tokens": interval(
            arms.of(f"window 32; window {size} at serving", context) - arms.of("window 32", context)
        )
        for size in (31, 33)
        for context in arms.contexts
    }
    return {
        "acceptance": {
            name: {context: interval(arms.of(name, context)) for context in arms.contexts} for name in found
        },
        "longest over trained length": ratios,
        "over the best full draft at the trained length": close,
        ALONE: alone,
        OTHERS: others,
        "reached": {
            f"level (at least {LEVEL})": {name: ratios[name][0] >= LEVEL for name in trained},
            f"full attention, plain rope falls (below {FALLEN})": ratios[PLAIN][0] < FALLEN,
            f"as good at the trained length (at least {CLOSE})": {name: close[name][0] >= CLOSE for name in trained},
        },
    }


def in_markdown(document: dict[str, Any]) -> str:
    found, judged = document["arms"], document["marks"]
    contexts = next(iter(found.values()))["contexts"]
    seeds = next(iter(found.values()))["seeds"]

    def cell(values: list[float]) -> str:
        return f"{values[0]:.2f} [{values[1]:.2f}, {values[2]:.2f}]"

    rows = [
        [
            name,
            *(cell(judged["acceptance"][name][context]) for context in contexts),
            cell(judged["longest over trained length"][name]),
            f"{np.mean(arm['training_seconds']):.0f}",
            f"{np.mean(arm['judging_seconds']):.0f}",
        ]
        for name, arm in found.items()
    ]
    head = [
        "draft",
        *(f"{context:,}" for context in contexts),
        f"{LONGEST:,} over {TRAINED}",
        "training, s",
        "judging, s",
    ]
    title = f"{headline(document)}; seeds {', '.join(map(str, seeds))}; processor seconds a seed"
    differences = [
        table(
            f"{what[0].upper()}{what[1:]}",
            ["", "difference"],
            [[name, cell(each)] for name, each in judged[what].items()],
        )
        for what in (ALONE, OTHERS)
    ]
    return "\n\n".join([table(title, head, rows), *differences, "Marks: " + json.dumps(judged["reached"], indent=1)])


if __name__ == "__main__":
    run_command(main)
