"""Plants known faults in small drafts, and asks the diagnosis of each draft what is wrong with it.

    python benchmarks/diagnosing.py train            trains 20 sound drafts for two targets (about 25 minutes)
    python benchmarks/diagnosing.py table            diagnoses all of them, and all with a fault
    python benchmarks/diagnosing.py table --json F   the same, and as a JSON document in the file F

Two cores are enough. The targets are the quickstart's and a deeper, narrower one, both trained on first use.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from planted_faults import PLANTS, SEVERAL, plant_all
from reporting import headline, origin, table
from torch import Tensor

from eagle3.draft.interchange import read_exported
from eagle3.errors import UserError, run_command
from eagle3.evaluation.diagnosis import LEAST_GAIN, Measured, diagnose, measuring
from eagle3.evaluation.known_faults import Change, DraftReading, Surroundings, layers_to_keep
from eagle3.evaluation.prompts import choose_prompts
from eagle3.evaluation.speculative import plain_decoding
from eagle3.evaluation.teacher_forced import WrittenText, read_text
from eagle3.jobs.diagnose import EASIER
from eagle3.jobs.job import find_target, gather_inputs
from eagle3.parallel.topology import start_distributed
from eagle3.recipe.loading import load_recipe
from eagle3.targets.transformers import TransformersTarget, load_target

ROOT = Path(__file__).parent.parent

PROMPTS, NEW_TOKENS, DRAFT_TOKENS = 24, 64, 4
TARGETS = {
    "quickstart": (),
    "deeper": (
        *("model.demo.layers=8", "model.demo.hidden_size=160", "model.demo.intermediate_size=400"),
        *("model.demo.heads=5", "model.demo.key_value_heads=5", "model.demo.seed=1", "model.demo.answers=2000"),
    ),
}
HIDDEN = {"quickstart": 192, "deeper": 160}
# The drafts of each target. `square` has a square head, which can be transposed unnoticed.
DRAFTS = {
    "plain": (),
    "another seed": ("training.seed=1", "data.seed=1"),
    "half the vocabulary": ("model.draft.vocab_size=512",),
    "square": ("model.draft.vocab_size={hidden}",),
    "window 16": ("model.draft.window=16",),
    "window 32": ("model.draft.window=32",),
    "theta 1e6": ("model.draft.rope_parameters={{rope_type: default, rope_theta: 1000000.0}}",),
    "yarn": (
        "model.draft.rope_parameters={{rope_type: yarn, rope_theta: 10000.0, factor: 4.0, "
        "original_max_position_embeddings: 128}}",
    ),
    "fc_norm": ("model.draft.fc_norm=true",),
    "norm_output": ("model.draft.norm_output=true",),
}
SHORT = (
    *("training.max_steps=300", "evaluation.every=300", "training.checkpoint_every=300"),
    *("evaluation.conversations=0", "output.check_export=false"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "table"))
    parser.add_argument("--folder", type=Path, default=Path("runs/planted-faults"))
    parser.add_argument("--json", type=Path, help="table: a file for the results as one JSON document")
    options = parser.parse_args()
    if options.what == "train":
        for name in DRAFTS:
            for target in TARGETS:
                train(options.folder, target, name)
        return 0
    document = origin() | {"drafts": diagnoses(options.folder)}
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(report(document))
    return 0


def export_of(folder: Path, target: str, name: str) -> Path:
    return folder / f"{target}, {name}".replace(", ", "-").replace(" ", "-") / "export"


def recipe_of(folder: Path, target: str, name: str) -> list[str]:
    """Arguments of a launcher for this draft."""
    keys = (key.format(hidden=HIDDEN[target]) for key in (*TARGETS[target], *DRAFTS[name], *SHORT))
    return [str(ROOT / "recipes" / "quickstart.yaml"), *keys, f"output.dir={export_of(folder, target, name).parent}"]


def train(folder: Path, target: str, name: str) -> None:
    if not (export_of(folder, target, name) / "config.json").exists():
        words = [sys.executable, str(ROOT / "launchers" / "train.py"), *recipe_of(folder, target, name), "--quiet"]
        if subprocess.run(words).returncode:
            raise UserError(f"train.py ended with an error for {target}, {name}; what it said stands above")


class Known(NamedTuple):
    """A target, and texts that it wrote."""

    texts: list[WrittenText]
    around: Surroundings
    measure: Callable[[DraftReading], Measured]


def know(folder: Path, target: str) -> Known:
    recipe, *keys = recipe_of(folder, target, "plain")
    topology, say = start_distributed(), lambda line: None
    known = find_target(load_recipe(recipe, keys), topology.device, say, make=False)
    inputs = gather_inputs(known, say, judging=True)
    model = load_target(known.target, aux_layers=known.aux_layers)
    keep = layers_to_keep(known.aux_layers, len(model.layers))
    prompts = choose_prompts(inputs.held_out, PROMPTS, 400)
    questions = known.tokenizer.batch_decode(prompts, skip_special_tokens=True)
    answered = [answer(model, prompt) for prompt in prompts]
    texts = [read_text(model, *each, keep) for each in answered]
    plain = [answer(model, torch.tensor(known.tokenizer(question)["input_ids"])) for question in questions]
    coarse = load_target(known.target, aux_layers=known.aux_layers)
    for parameter in coarse.model.parameters():
        if parameter.dim() == 2:  # to -1, 0 and 1 times a factor for each row, as a quantised target's
            step = parameter.abs().mean(-1, keepdim=True)
            parameter.data = (parameter / step).round().clamp(-1, 1) * step
    others = [
        Change(
            "prompts without the chat template",
            "",
            {"texts": [read_text(model, *each, keep) for each in plain]},
            EASIER,
        ),
        Change("the target in two bits", "", {"texts": [read_text(coarse, *each, keep) for each in answered]}),
    ]
    around = Surroundings(model.head.embedding, {}, others)
    return Known(texts, around, measuring(model.head, topology.modules_alone, DRAFT_TOKENS))


def answer(model: TransformersTarget, prompt: Tensor) -> tuple[Tensor, int]:
    """A prompt and the model's answer [T], and the prompt's length."""
    tokens = torch.tensor(plain_decoding(model, prompt, new_tokens=NEW_TOKENS).tokens)
    return torch.cat((prompt, tokens)), len(prompt)


def diagnoses(folder: Path) -> list[dict[str, Any]]:
    """The diagnosis of each draft as it is and, with each fault and each group of faults, of the first draft of each
    target that can have it."""
    results = []
    for target in TARGETS:
        known = know(folder, target)
        cases = {"none": (), **{fault: (plant,) for fault, plant in PLANTS.items()}, **SEVERAL}
        done = set()
        for name in DRAFTS:
            sound = DraftReading(read_exported(export_of(folder, target, name)), known.texts)
            read = {fault: plant_all(sound, plants, known.around) for fault, plants in cases.items()}
            arounds = dict.fromkeys(read, replace(known.around, others=())) | {"none": known.around}
            for other in known.around.others:
                read[other.name] = sound._replace(**other.fields), ["the texts as they were"]
                as_they_were = other._replace(name="the texts as they were", fields={"texts": known.texts})
                arounds[other.name] = replace(known.around, others=[as_they_were])
            for fault, planted in read.items():
                if planted is not None and fault not in done:
                    done |= {fault} - {"none"}
                    found = {"draft": f"{target}, {name}", "fault": fault}
                    results.append(found | diagnosed(*planted, arounds[fault], known.measure))
                    print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    return results


def diagnosed(
    reading: DraftReading, cures: list[str], around: Surroundings, measure: Callable[[DraftReading], Measured]
) -> dict[str, Any]:
    start = time.perf_counter()
    diagnosis = diagnose(reading, around, str, measure, DRAFT_TOKENS, lambda line: None)
    names = [fault.name for fault in diagnosis.faults]
    equals = [name for fault in diagnosis.faults for name in fault.rivals]
    return {
        "accepted": diagnosis.accepted_drafts,
        "named": names,
        "restored": diagnosis.faults[-1].accepted if names else diagnosis.accepted_drafts,
        "notes": diagnosis.notes,
        "cures": cures,
        "equals": equals,
        "right": len(names) == len(cures)
        and all(any(name.startswith(cure) for name in (*names, *equals)) for cure in cures),
        "changes": len(diagnosis.tried),
        "seconds": time.perf_counter() - start,
    }


def report(document: dict[str, Any]) -> str:
    results = document["drafts"]
    sound = {each["draft"]: each for each in results if each["fault"] == "none"}
    faulty = [each for each in results if each["fault"] != "none"]
    costs = {id(each): sound[each["draft"]]["accepted"] - each["accepted"] for each in faulty}
    verdicts = {
        id(each): "yes" if each["right"] else "NO" if costs[id(each)] >= LEAST_GAIN else "harmless" for each in faulty
    }
    rows = [
        [
            each["fault"],
            each["draft"],
            f"{sound[each['draft']]['accepted']:.2f}",
            f"{each['accepted']:.2f}",
            "; ".join(each["named"]) + (" (and equals)" if each["equals"] else "") or "nothing",
            f"{each['restored']:.2f}",
            verdicts[id(each)],
            f"{each['seconds']:.0f}",
        ]
        for each in faulty
    ]
    counts = Counter(verdicts.values())
    alarms = sum(bool(each["named"] or each["notes"]) for each in sound.values())
    accepted = ", ".join(f"{name} {each['accepted']:.2f}" for name, each in sound.items())
    return table(
        f"{headline(document)}. Of {len(faulty)} cases, {counts['yes']} are named rightly, {counts['NO']} are not, and "
        f"{counts['harmless']} cost less than {LEAST_GAIN} drafts. {alarms} false alarms on {len(sound)} sound drafts "
        f"({accepted}).",
        ["fault", "draft", "sound", "with it", "named, in turn", "without what was named", "right", "seconds"],
        rows,
    )


if __name__ == "__main__":
    run_command(main)
