"""Acceptance from one pass over a target's texts, beside what decoding measures on the same texts: the quickstart's
draft, with full attention and with a window, greedy and sampled at temperature 1.

    python benchmarks/one_pass.py run OUT                trains, reads and judges what is not there yet (20 minutes)
    python benchmarks/one_pass.py report OUT             a table from what is there
    python benchmarks/one_pass.py report OUT --json      the same as one JSON document

The pass is the held-out measurement of a training run that starts from the export and leaves it as it is. The judge
answers the prompts of the same texts. Greedily, it writes these texts; at temperature 1, it writes others, with every
seed anew. SGLang decodes greedily, and only where it is installed.

What the target samples is measured twice: as the tokens that it drew, with two seeds, and as text in a file, which is
often tokenised otherwise when it is read.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reporting import origin, table
from served_rows import ROOT, launch

RECIPE = ROOT / "recipes" / "quickstart.yaml"
ANSWER = 112  # tokens of the demo target's answers, at most
TEXTS = 120  # of the 236 held-out questions
SEEDS = (0, 1)  # of sampling
ARMS = {"full attention": (), "window 32": ("model.draft.window=32",)}
ENGINES = ("transformers", "sglang")
MEASURED = (f"data.max_held_out={TEXTS}", f"evaluation.held_out_samples={TEXTS}")
ONE_STEP = (  # which changes nothing, and measures
    *("data.max_samples=8", "training.max_steps=1", "training.learning_rate=1e-30", "output.check_export=false"),
    *("evaluation.conversations=0", *MEASURED),
)


def run(out: Path) -> None:
    """Whatever is not done yet. A launcher's result is whole where it exists."""
    cache = f"data.cache_dir={out / 'cache'}"
    for arm, keys in ARMS.items():
        folder = out / arm.replace(" ", "-")
        export = folder / "run" / "export"
        if not (export / "config.json").exists():
            launch("train.py", RECIPE, *keys, cache, f"output.dir={folder / 'run'}", "evaluation.conversations=0")
        for kind, texts in (("greedy", "demo_answers:held_out"), ("sampled", sampled_texts(out))):
            same = [
                *(RECIPE, *keys, cache, f'data.held_out=["{texts}"]', f"evaluation.conversations={TEXTS}", *MEASURED),
                f"evaluation.new_tokens={ANSWER}",
            ]
            if not (folder / kind / "export" / "config.json").exists():
                launch(
                    *("train.py", *same, f"output.dir={folder / kind}", f"model.draft.init_from={export}"),
                    *ONE_STEP,
                )
            for seed in SEEDS if kind == "sampled" else ():
                if not (folder / f"drawn-{seed}" / "export" / "config.json").exists():
                    words = [sys.executable, __file__, "draw", out, "--arm", arm, "--seed", seed]
                    subprocess.run([*map(str, words)], check=True)
            for name, options in judgements(kind).items():
                if not (result := folder / f"{name}.json").exists():
                    env = engine_environment() if "sglang" in options else None
                    launch("evaluate.py", *same, "--draft", export, "--out", result, *options, env=env)


def engine_environment() -> dict[str, str] | None:
    """What SGLang needs without a GPU."""
    if torch.cuda.is_available():
        return None
    sys.path.insert(0, str(ROOT / "tests"))
    from sglang_cpu.environment import sglang_environment

    return sglang_environment()


def measure_drawn(out: Path, arm: str, seed: int) -> None:
    """Measure the draft on the tokens that the target draws at temperature 1 after the held-out prompts."""
    import eagle3.jobs.train as job
    from eagle3.evaluation.acceptance import Sampled
    from eagle3.evaluation.speculative import plain_decoding
    from eagle3.parallel.topology import start_distributed
    from eagle3.recipe.loading import load_recipe
    from eagle3.targets.transformers import load_target
    from eagle3.text.samples import SampleSet
    from eagle3.training.deepspeed_file import ZERO2

    folder, topology = out / arm.replace(" ", "-"), start_distributed(1, 1, 1)
    keys = [
        *(*ARMS[arm], f"data.cache_dir={out / 'cache'}", 'data.held_out=["demo_answers:held_out"]'),
        *(f"output.dir={folder / f'drawn-{seed}'}", f"model.draft.init_from={folder / 'run' / 'export'}", *ONE_STEP),
    ]
    gather = job.gather_inputs

    def with_drawn_answers(known, console):
        inputs, answers, alike = gather(known, console), [], 0
        target = load_target(known.target, aux_layers=known.aux_layers, prefill_tokens=8192, device=topology.device)
        for number, sample in enumerate(inputs.held_out):
            prompt = sample.ids[: int(sample.loss_mask.nonzero()[0])]
            rule = Sampled(1.0, torch.Generator(topology.device).manual_seed(1000 * seed + number))
            drawn = plain_decoding(target, prompt, rule, new_tokens=ANSWER).tokens
            ids = np.array([*prompt.tolist(), *drawn], np.int32)
            answers.append((ids, np.arange(len(ids)) >= len(prompt)))
            text = known.tokenizer.decode(drawn)
            alike += known.tokenizer(text, add_special_tokens=False)["input_ids"] == drawn
        print(f"{alike} of {len(answers)} answers are tokenised as they were drawn", flush=True)
        return replace(inputs, held_out=SampleSet.pack(answers))

    job.gather_inputs = with_drawn_answers
    job.train(load_recipe(RECIPE, keys), ZERO2, topology)


def sampled_texts(out: Path) -> Path:
    """The demo target's answers at temperature 1 to the held-out questions, written once."""
    file, (target,) = out / "sampled.jsonl", (out / "cache").glob("demo-target-*")
    if not file.exists():
        launch(
            *("regenerate.py", "--target", target, "--data", target / "held_out_answers.jsonl", "--out", file),
            *("--temperature", 1, "--top-p", 1, "--max-tokens", ANSWER, "--truncated", "keep", "--seed", 0),
        )
    return file


def judgements(kind: str) -> dict[str, tuple[str, ...]]:
    """Options of evaluate.py, by the result's name."""
    if kind == "sampled":
        return {f"judge-sampled-{seed}": ("--temperature", "1", "--seed", str(seed)) for seed in SEEDS}
    engines = [engine for engine in ENGINES if importlib.util.find_spec(engine)]
    room = "target.memory_fraction=0.3"  # SGLang takes most of a machine otherwise
    return {f"judge-greedy-{engine}": (room, "--engine", engine) for engine in engines}


def measured(run: Path, key: str) -> float:
    """A number of the run's held-out measurement."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line[key] for line in lines if line["kind"] == "held_out"][-1]


def decoded(file: Path) -> dict[str, float]:
    """Tokens per verification, as engines count, and without those beyond the answers' limit, of which a text shows
    nothing. (Each answer's first token belongs to no verification.)"""
    judged = json.loads(file.read_text(encoding="utf-8"))
    within = (judged["new_tokens"] - judged["conversations"]) / judged["verifications"]
    return {"acceptance_length": judged["acceptance_length"], "within_answers": within}


def results(out: Path) -> list[dict[str, Any]]:
    """By draft and kind of text: what the pass says, and what was decoded."""
    rows = []
    for arm in ARMS:
        folder = out / arm.replace(" ", "-")
        for kind, key in (("greedy", "acceptance_length"), ("sampled", "acceptance_length_sampled")):
            if not (folder / kind / "metrics.jsonl").exists():
                continue
            judged = {name: folder / f"{name}.json" for name in judgements(kind)}
            rows.append(
                {
                    "draft": arm,
                    "texts": kind,
                    "one_pass": measured(folder / kind, key),
                    "drawn": [
                        measured(each.parents[1], key)
                        for each in sorted(folder.glob("drawn-*/export/config.json"))
                        if kind == "sampled"
                    ],
                    "judged": {name: decoded(file) for name, file in judged.items() if file.exists()},
                }
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "draw", "report"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--json", action="store_true", help="report: print one JSON document")
    parser.add_argument("--arm", choices=ARMS, help="draw: which draft")
    parser.add_argument("--seed", type=int, help="draw")
    options = parser.parse_args()
    if options.what == "run":
        run(options.out.resolve())
        return 0
    if options.what == "draw":
        measure_drawn(options.out.resolve(), options.arm, options.seed)
        return 0
    document = origin() | {"measured": results(options.out)}
    rows = [
        [
            *(each["draft"], each["texts"], f"{each['one_pass']:.3f}"),
            ", ".join(f"{value:.3f}" for value in each["drawn"]),
            *(
                ", ".join(f"{name.removeprefix('judge-')} {values[key]:.3f}" for name, values in each["judged"].items())
                for key in ("within_answers", "acceptance_length")
            ),
        ]
        for each in document["measured"]
    ]
    head = ["draft", "texts", "one pass over text", "over drawn tokens", "decoded, within answers", "decoded"]
    print(json.dumps(document) if options.json else table("Acceptance lengths.", head, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
