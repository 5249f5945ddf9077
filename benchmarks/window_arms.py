"""What windows do to acceptance by context: the experiment in docs/windows-experiment.md.

    python benchmarks/window_arms.py run --part 1 --seeds 0 1 2     trains and judges what is not there yet
    python benchmarks/window_arms.py report --part 1                tables and marks from what is there
    python benchmarks/window_arms.py report --part 1 --json         the same as one JSON document
    python benchmarks/window_arms.py report --part 1 --plot F.png   acceptance by context, of some arms

Part 1 uses the target and the text of recipes/long-context-demo.yaml; part 2 uses those of benchmarks/copying.py, and
makes them first. Part 3 trains two drafts for part 2's target for longer, in part 2's folder. Keys after the options
change the recipe of all arms.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import copying
import numpy as np
from arm_runs import ROOT, Arm, Experiment, Resampled, cell, interval, read_results, run_arm
from reporting import headline, origin, table

from eagle3.errors import run_command

PIECE, FILE = 512, 8192  # tokens of a piece, and of part 1's longest context, which is sixteen times as long
SERVED = (None, 32, 128)  # windows at serving, for drafts with full attention
PLAIN_ROPE = "model.draft.rope_parameters={rope_type: default, rope_theta: 10000.0}"
SPANS = "data.spans={length: 512, per_document: 1}"
# Thresholds of the marks in docs/windows-experiment.md.
LEVEL, FALLEN, CLOSE, LOST = 0.93, 0.75, 0.95, 0.95


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--part", type=int, choices=(1, 2, 3), required=True)
    parser.add_argument("--folder", type=Path, help="default: runs/windows-1; of parts 2 and 3 runs/windows-2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", action="store_true", help="report: print one JSON document")
    parser.add_argument("--plot", type=Path, help="report: draw acceptance by context into this PNG file")
    parser.add_argument("keys", nargs="*", metavar="section.key=value", help="run: change the recipe of all arms")
    options = parser.parse_intermixed_args()
    folder = options.folder or Path(f"runs/windows-{min(options.part, 2)}")
    experiments = {1: library, 2: partial(copies, arms=COPIES), 3: partial(copies, arms=LONGER)}
    experiment = experiments[options.part](folder, options.keys)
    if options.what == "run":
        if options.part > 1:
            copying.make(folder)
        for seed in options.seeds:  # seed by seed, so that results are complete after each
            for arm in experiment.arms:
                run_arm(experiment, arm, seed, folder)
        return 0
    results = read_results(experiment.arms, folder)
    document = origin(load=os.getloadavg()[0]) | {"arms": results, "findings": experiment.findings(results)}
    if options.plot:
        options.plot.write_bytes(png_of(experiment.drawn(document["findings"])))
    print(json.dumps(document) if options.json else experiment.tables(document))
    return 0


def window(size: int) -> str:
    return f"model.draft.window={size}"


def judge(*prompts: str) -> tuple[str, ...]:
    return ("--by-context", "--per-context", "24", "--temperature", "1", "--seed", "0", *prompts)


# Part 1: a target that hardly uses far context.

PLAIN, YARN = (
    Arm(
        f"full attention, {rope}",
        "pieces",
        ("training.global_batch_size=10", "evaluation.held_out_samples=200", *keys),
        SERVED,
    )
    for rope, keys in (("plain rope", (PLAIN_ROPE,)), ("YaRN", ()))
)


def library(folder: Path, keys: Sequence[str]) -> Experiment:
    pieces = [
        # window 32 is also judged with one key fewer, as in Triton's draft steps, and with one key more
        Arm(f"window {size}", "pieces", (*PLAIN.keys, window(size)), (None, 31, 33) if size == 32 else (None,))
        for size in (16, 32, 128, 512)
    ]
    spans = [
        Arm(
            f"spans of files, window {size}",
            "files",
            ("training.global_batch_size=10", SPANS, PLAIN_ROPE, window(size)),
        )
        for size in (32, 128)
    ]
    return Experiment(
        recipe=("--recipe", str(ROOT / "recipes" / "long-context-demo.yaml"), *keys),
        stores={"pieces": (f"data.max_length={PIECE}",), "files": ()},
        arms=[PLAIN, YARN, *pieces, *spans],
        judge=judge(),
        findings=library_findings,
        tables=library_tables,
        drawn=lambda findings: {
            name: findings["acceptance"][name]
            for name in (PLAIN.served(None), YARN.served(None), PLAIN.served(128), "window 32", "window 128")
        },
    )


def library_findings(results: dict[str, Any]) -> dict[str, Any]:
    """Figures, each as [measured, low, high], and whether the measured values reach their marks."""
    arms = Resampled(results)
    full = [arm.served(None) for arm in (PLAIN, YARN)]
    windows = [name for name in results if name not in full]
    best = np.max([arms.of(name, PIECE) for name in full], axis=0)
    ratios = {name: interval(arms.of(name, FILE) / arms.of(name, PIECE)) for name in results}
    close = {name: interval(arms.of(name, PIECE) / best) for name in results}

    def less(first: Callable[[int], str], second: Callable[[int], str], sizes: Sequence[int]) -> dict[str, Any]:
        return {
            f"{size} keys": {
                context: interval(arms.of(first(size), context) - arms.of(second(size), context))
                for context in arms.contexts
            }
            for size in sizes
        }

    return {
        "acceptance": {name: {each: interval(arms.of(name, each)) for each in arms.contexts} for name in results},
        f"{FILE:,} over {PIECE}": ratios,
        f"over the best full draft at {PIECE}": close,
        "differences": {
            "trained with the window, less the same window at serving alone": less(
                "window {}".format, PLAIN.served, (32, 128)
            ),
            "a key fewer or more at serving, less as trained": less(
                "window 32; window {} at serving".format, lambda _: "window 32", (31, 33)
            ),
        },
        "reached": {
            f"level (at least {LEVEL})": {name: ratios[name][0] >= LEVEL for name in windows},
            f"full attention, plain rope falls (below {FALLEN})": ratios[full[0]][0] < FALLEN,
            f"as good at {PIECE} (at least {CLOSE})": {name: close[name][0] >= CLOSE for name in windows},
        },
    }


def library_tables(document: dict[str, Any]) -> str:
    results, findings = document["arms"], document["findings"]
    ratio, close = f"{FILE:,} over {PIECE}", f"over the best full draft at {PIECE}"
    tables = [
        acceptance_table(
            document,
            "",
            findings["acceptance"],
            {name: [cell(findings[each][name]) for each in (ratio, close)] for name in results},
            (ratio, close),
        )
    ]
    for what, sizes in findings["differences"].items():
        tables.append(difference_table(what, sizes))
    return "\n\n".join([*tables, "Marks: " + json.dumps(findings["reached"], indent=1)])


# Part 2: a target that answers from far back in its context.

WHOLE = Arm("full attention, whole conversations", "whole", ("training.global_batch_size=2",), (None, 32, 256))
LISTS, CODE = "lists", "code"
COPIES = [
    WHOLE,
    *(Arm(f"pieces, window {size}", "pieces", ("training.global_batch_size=36", window(size))) for size in (32, 256)),
    *(
        Arm(f"spans, window {size}", "whole", ("training.global_batch_size=10", SPANS, window(size)))
        for size in (32, 256)
    ),
]
# Part 3: four times as many steps on pieces, which show each list and ask for it within 512 tokens.
LONGER = [
    Arm(f"pieces, {name}, 600 steps", "pieces", ("training.global_batch_size=36", "training.max_steps=600", *keys))
    for name, keys in (("full attention", ()), ("window 32", (window(32),)))
]


def copies(folder: Path, keys: Sequence[str], arms: Sequence[Arm]) -> Experiment:
    """The experiment of parts 2 and 3. The other arms are compared with the first one."""
    data = {name: f"data.train=[{folder / f'{name}.jsonl'}]" for name in ("whole", "pieces")}
    target = (f"model.target={folder / 'target'}", f"data.cache_dir={folder / 'cache'}", data["whole"])
    return Experiment(
        recipe=("--recipe", str(ROOT / "benchmarks" / "copying.yaml"), *target, *keys),
        stores={name: (train,) for name, train in data.items()},
        arms=list(arms),
        judge=judge("--prompts", str(folder / "prompts.jsonl"), "--contexts", ",".join(map(str, copying.CONTEXTS))),
        findings=copies_findings,
        tables=copies_tables,
        drawn=lambda findings: {
            name: each for name, each in findings["acceptance"][LISTS].items() if name != WHOLE.served(256)
        },
    )


def copies_findings(results: dict[str, Any]) -> dict[str, Any]:
    """Figures, each as [measured, low, high], for prompts that ask for lists and for prompts that ask for code."""
    kinds = {LISTS: [], CODE: []}
    for place, kind in enumerate(copying.KINDS):
        kinds[CODE if kind == "code" else LISTS].append(place)
    acceptance, over = {}, {}
    for what, places in kinds.items():
        arms = Resampled({name: of_kinds(arm, places) for name, arm in results.items()})
        full = next(iter(results))
        acceptance[what] = {name: {each: interval(arms.of(name, each)) for each in arms.contexts} for name in results}
        over[what] = {
            name: {each: interval(arms.of(name, each) / arms.of(full, each)) for each in arms.contexts}
            for name in results
            if name != full
        }
    lost = {
        name: [each for each, values in by_context.items() if values[2] < LOST]
        for name, by_context in over[LISTS].items()
    }
    return {"acceptance": acceptance, "over the full draft": over, f"surely below {LOST} of it, lists": lost}


def of_kinds(arm: dict[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """The arm with only the counts of some kinds of prompts. (Kinds take turns in the file.)"""
    chosen = [
        [
            [counts for place, counts in enumerate(context) if place % len(copying.KINDS) in places]
            for context in of_seed
        ]
        for of_seed in arm["counts"]
    ]
    return arm | {"counts": chosen}


def copies_tables(document: dict[str, Any]) -> str:
    findings = document["findings"]
    tables = [
        acceptance_table(document, f"{what}; ", by_name, {name: [] for name in by_name}, ())
        for what, by_name in findings["acceptance"].items()
    ]
    for what, by_name in findings["over the full draft"].items():
        tables.append(difference_table(f"{what}: acceptance over that of {next(iter(document['arms']))}", by_name))
    lost = f"surely below {LOST} of it, lists"
    return "\n\n".join([*tables, f"{lost}: {json.dumps(findings[lost], indent=1)}"])


# Tables of all parts.


def acceptance_table(
    document: dict[str, Any], what: str, acceptance: dict[str, Any], more: dict[str, list[str]], heads: Sequence[str]
) -> str:
    results = document["arms"]
    one = next(iter(results.values()))
    rows = [
        [
            name,
            *map(cell, by_context.values()),
            *more[name],
            f"{np.mean(results[name]['training_seconds']):.0f}",
            f"{np.mean(results[name]['judging_seconds']):.0f}",
        ]
        for name, by_context in acceptance.items()
    ]
    head = ["draft", *(f"{context:,}" for context in one["contexts"]), *heads, "training, s", "judging, s"]
    seeds = ", ".join(map(str, one["seeds"]))
    return table(f"{what}{headline(document)}; seeds {seeds}; processor seconds a seed", head, rows)


def png_of(acceptance: dict[str, Any]) -> bytes:
    """acceptance: arm -> context -> [measured, low, high]."""
    from eagle3.reporting.charts import contexts_plot
    from eagle3.reporting.plot import COLOURS, Series, image

    series = []
    for (name, by_context), colour in zip(acceptance.items(), COLOURS, strict=False):
        values = np.array([*by_context.values()])
        series.append(Series(name, np.array([*by_context]), values[:, 0], colour, dotted=True, band=values[:, 1:]))
    return image(contexts_plot("acceptance-by-context", series), "png")


def difference_table(title: str, by_name: dict[str, dict[int, list[float]]]) -> str:
    contexts = next(iter(by_name.values()))
    rows = [[name, *map(cell, by_context.values())] for name, by_context in by_name.items()]
    return table(f"{title[0].upper()}{title[1:]}", ["", *(f"{context:,}" for context in contexts)], rows)


if __name__ == "__main__":
    run_command(main)
