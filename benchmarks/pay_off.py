"""Hold the model of what forwards cost to measurement.

    python benchmarks/pay_off.py published           another draft's break-even acceptance lengths, ten from five
    python benchmarks/pay_off.py measured --draft F  tokens/s by context and draft tokens, half predicted from half
    python benchmarks/pay_off.py plot NAME=FILE ...  a chart of several by_context.json, with all their windows

The first two print a table in Markdown; --json FILE also writes one JSON document. `measured` decodes with
transformers, by default with the target of recipes/long-context-demo.yaml: four contexts, three numbers of draft
tokens, five rounds, in processor seconds (about 10 minutes on two cores).
"""

import argparse
import itertools
import json
import random
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from reporting import headline, origin, positive, table

from eagle3.errors import run_command
from eagle3.planning.costs import MeasuredCosts, Timing, non_negative
from eagle3.reporting.charts import pay_off_plot
from eagle3.reporting.plot import COLOURS, Plot, Series, image

ROOT = Path(__file__).parent.parent
# A full-attention draft for Kimi-K3, 4 draft tokens, eight B300 (vllm-project/vllm#54691, 2026-09-12):
# context in thousands of tokens -> break-even acceptance length for batches of 1, 2, 4, 8 and 16.
BATCHES, DRAFTS = (1, 2, 4, 8, 16), 4
PUBLISHED = {
    2: (1.47, 1.42, 1.55, 1.63, 1.74),
    32: (1.91, 2.09, 2.82, 3.77, 4.94),
    131: (3.51, 4.53, 6.79, 10.20, 14.59),
}
FITTED = ((2, 1), (2, 16), (131, 1), (131, 16), (32, 4))  # the corners, and one in the middle
MARK_PUBLISHED, MARK_MEASURED = 0.15, 0.10
WIDE = 7.0  # inches of the chart
CONTEXTS, DRAFT_TOKENS = (512, 1024, 2048, 4096), (1, 2, 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("published", "measured", "plot"))
    parser.add_argument("judged", nargs="*", metavar="NAME=FILE", help="plot: results of evaluate.py --by-context")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "long-context-demo.yaml")
    parser.add_argument("--draft", type=Path, help="folder of the draft to measure with")
    parser.add_argument("--per-context", type=positive, default=6, help="prompts of each context")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--out", type=Path, default=Path("speed-up.png"), help="plot: the chart's file")
    parser.add_argument("--json", type=Path, help="a file for the results as one JSON document")
    options = parser.parse_args()
    if options.what == "plot":
        options.out.write_bytes(image(plot(options.judged), "png", WIDE))
        return 0
    if options.what == "measured" and options.draft is None:
        parser.error("measured: name a draft for the recipe's target with --draft")
    results = published() if options.what == "published" else measured(options)
    document = origin() | results
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print((published_text if options.what == "published" else measured_text)(document))
    worst = max(abs(row["error"]) for row in document["rows"] if not row.get("fitted"))
    return 0 if worst <= document["mark"] else 1


# Published -----------------------------------------------------------------------------------------------------------


class BreakEven(NamedTuple):
    context: int
    batch: int
    length: float


class PublishedCosts(NamedTuple):
    """Costs relative to the constant of a target's forward. One coefficient holds the keys that the chain reads and
    those that a verification reads more than a plain step, because the table cannot tell them apart."""

    experts: float  # of the target
    token: float
    key: float
    chain: float  # constant of a chain
    chain_key: float

    def break_even(self, context: int, batch: int) -> float:
        one, many = parts(batch, 1, context), parts(batch, DRAFTS + 1, context)
        plain = 1 + self.experts * one[1] + self.token * one[2] + self.key * one[3]
        drafted = 1 + self.experts * many[1] + self.token * many[2] + self.chain + self.chain_key * one[3]
        return drafted / plain


def parts(batch: int, tokens: int, context: int) -> list[float]:
    """How often a target's forward over so many tokens of each conversation pays each cost: a constant, one that grows
    with log2(1 + tokens in all) (experts that some token chooses), one of each token, and one of each key."""
    return [1.0, float(np.log2(1 + batch * tokens)), batch * tokens, batch * context]


def fit_published(cells: list[BreakEven]) -> PublishedCosts:
    """The costs with the least squares of relative errors. length x plain = drafted is linear in the costs; dividing by
    what the last solution gives for its left side makes the differences relative."""
    costs = None
    for _ in range(8):
        table, values = [], []
        for cell in cells:
            one, many = parts(cell.batch, 1, cell.context), parts(cell.batch, DRAFTS + 1, cell.context)
            row = np.array(
                [
                    cell.length * one[1] - many[1],
                    cell.length * one[2] - many[2],
                    cell.length * one[3],
                    -1.0,
                    -one[3],
                ]
            )
            drafted = cell.length if costs is None else cell.length * _plain(costs, one)
            table.append(row / drafted)
            values.append((1 - cell.length) / drafted)
        costs = PublishedCosts(*non_negative(np.array(table), np.array(values)).tolist())
    return costs


def _plain(costs: PublishedCosts, parts: list[float]) -> float:
    return 1 + costs.experts * parts[1] + costs.token * parts[2] + costs.key * parts[3]


def published() -> dict[str, Any]:
    cells = [
        BreakEven(context, batch, length)
        for context, lengths in PUBLISHED.items()
        for batch, length in zip(BATCHES, lengths, strict=True)
    ]
    costs = fit_published([cell for cell in cells if cell[:2] in FITTED])
    rows = [
        cell._asdict()
        | {
            "fitted": cell[:2] in FITTED,
            "predicted": (predicted := costs.break_even(cell.context, cell.batch)),
            "error": predicted / cell.length - 1,
        }
        for cell in cells
    ]
    return {"rows": rows, "costs": costs._asdict(), "mark": MARK_PUBLISHED, "other_choices": other_choices(cells)}


def other_choices(cells: list[BreakEven]) -> dict[str, float]:
    """How well five other cells do, of those that hold the four corners, and of those that hold all three contexts."""
    worst: dict[str, list[float]] = {"with the corners": [], "any": []}
    for chosen in itertools.combinations(cells, 5):
        places = {cell[:2] for cell in chosen}
        if len({cell.context for cell in chosen}) < 3:
            continue
        costs = fit_published(list(chosen))
        error = max(
            abs(costs.break_even(cell.context, cell.batch) / cell.length - 1)
            for cell in cells
            if cell[:2] not in places
        )
        worst["any"].append(error)
        if places >= set(FITTED[:4]):
            worst["with the corners"].append(error)
    return {f"{name}: median": statistics.median(errors) for name, errors in worst.items()} | {
        f"{name}: share within the mark": sum(error <= MARK_PUBLISHED for error in errors) / len(errors)
        for name, errors in worst.items()
    }


def published_text(document: dict[str, Any]) -> str:
    def cell(row: dict[str, Any]) -> str:
        if row["fitted"]:
            return f"{row['length']:.2f} (fitted)"
        return f"{row['length']:.2f}, predicted {row['predicted']:.2f} ({row['error']:+.0%})"

    rows = [
        [f"{context}k", *(cell(row) for row in document["rows"] if row["context"] == context)] for context in PUBLISHED
    ]
    return table("Break-even acceptance length:", ["context", *(f"batch {batch}" for batch in BATCHES)], rows)


# Measured ------------------------------------------------------------------------------------------------------------


def measured(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from eagle3.draft.interchange import read_exported
    from eagle3.evaluation.acceptance import Decoding
    from eagle3.evaluation.drafter import draft_of
    from eagle3.evaluation.prompts import longest_prompt, prompts_by_context
    from eagle3.evaluation.results import SpeculativeResult
    from eagle3.evaluation.speculative import decode_conversations
    from eagle3.jobs.evaluate import target_of
    from eagle3.jobs.job import find_target, gather_inputs
    from eagle3.parallel.topology import start_distributed
    from eagle3.recipe.loading import load_recipe

    topology, say = start_distributed(), lambda line: None
    torch.set_num_threads(1)
    known = find_target(load_recipe(options.recipe, []), topology.device, say, make=False)
    inputs, exported = gather_inputs(known, say, judging=True), read_exported(options.draft)
    target = target_of(known, exported, topology, say)
    draft = draft_of(exported, target.head, topology.modules_alone)
    new_tokens = known.recipe.evaluation.new_tokens
    longest = longest_prompt(known.config.max_position_embeddings, new_tokens, max(DRAFT_TOKENS))
    texts = [(sample.ids, np.flatnonzero(sample.loss_mask)) for sample in inputs.held_out]
    buckets = prompts_by_context(texts, CONTEXTS, options.per_context, longest)
    cells = [(context, drafts) for context in buckets for drafts in DRAFT_TOKENS]
    found: dict[tuple[int, int], list[SpeculativeResult]] = {}
    for number in range(options.rounds):
        for context, drafts in random.Random(number).sample(cells, len(cells)):
            decoded = decode_conversations(target, *draft, buckets[context], Decoding(drafts, new_tokens))
            found.setdefault((context, drafts), []).append(SpeculativeResult.over(decoded))
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    return {"rows": list(predictions(found, exported.config.window)), "mark": MARK_MEASURED}


def predictions(found: dict[tuple[int, int], list[Any]], window: int | None):
    """Each cell, predicted from the half that it is not in: like a chessboard. Acceptance by draft position is that of
    the longest chain at the same context, as in a judgement by context."""
    timings = {place: Timing.median([each.timing for each in judged]) for place, judged in found.items()}
    colour = {
        (context, drafts): (CONTEXTS.index(context) + DRAFT_TOKENS.index(drafts)) % 2 for context, drafts in timings
    }
    for place in sorted(timings):
        (context, drafts), timing = place, timings[place]
        costs = MeasuredCosts([timings[other] for other in timings if colour[other] != colour[place]], window)
        measured_rate = statistics.median(each.rate for each in found[place])
        shares = found[context, max(DRAFT_TOKENS)][0].position_acceptance
        at = round(timing.context)
        seconds = costs.drafting(1, drafts, at) + costs.verifying(1, drafts + 1, at)
        predicted = (1 + sum(shares[:drafts])) / seconds
        yield {
            "context": context,
            "drafts": drafts,
            "tokens_per_second": measured_rate,
            "predicted": predicted,
            "error": predicted / measured_rate - 1,
            "plain": 1 / timing.plain,
            "predicted_plain": 1 / costs.verifying(1, 1, at),
            "timing": asdict(timing),
        }


def measured_text(document: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['context']:,}",
            row["drafts"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['predicted']:.0f}",
            f"{row['error']:+.1%}",
            f"{row['plain']:.0f}",
            f"{row['predicted_plain']:.0f}",
        ]
        for row in document["rows"]
    ]
    head = ["context", "draft tokens", "tokens/s", "predicted", "error", "without the draft", "predicted"]
    return table(f"{headline(document)}; tokens per processor second.", head, rows)


# Plot ----------------------------------------------------------------------------------------------------------------


def plot(judged: list[str]) -> Plot:
    """The speed-up with the best number of draft tokens by context, as measured, with a line for each draft and
    window."""
    series = []
    for place, (name, file) in enumerate(each.split("=", 1) for each in judged):
        result = json.loads(Path(file).read_text(encoding="utf-8"))
        for look, one in zip(("line", "dashed", "pale"), (result, *result["other_windows"]), strict=False):
            best = one["pay_off"][0]["best"]
            window = f", window {one['window']}" if one["window"] else ""
            gains = np.array([cell["speed_up"] for cell in best])
            contexts = np.array([float(cell["context"]) for cell in best])
            series.append(Series(name + window, contexts, gains, COLOURS[place], look, dotted=True))
    return pay_off_plot("speed-up", series, "")


if __name__ == "__main__":
    run_command(main)
