"""Measure a draft's share of a verification's cost, by context: keys of the new rows, then a chain of tokens.

    python benchmarks/draft_cost.py          a table in Markdown (about 2 minutes)
    python benchmarks/draft_cost.py --json   one JSON document

Reports processor seconds of one thread, the least over several rounds in which the contexts take turns. The draft has
random weights and an eighth of the width of an 8B target's draft, in fp32. Its prefix is random too; the target and its
part of the work are left out.
"""

import argparse
import json
import os
import sys
import time
from typing import Any

from reporting import headline, origin, positive, table

from eagle3.errors import run_command

CONTEXTS = [2**power for power in range(9, 16)]
WINDOWS = (None, 32, 128, 512)
ROWS, CHAIN = 3, 4  # tokens that a verification adds, and that the draft then proposes
FLAT = 1.10  # under a window, the most that the longest context may cost relative to the shortest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--rounds", type=positive, default=30)
    options = parser.parse_args()
    stdout = os.dup(1)  # kept for the result: DeepSpeed logs to the stdout that it finds when imported
    os.dup2(2, 1)
    seconds = {window: measure(window, options.rounds) for window in WINDOWS}
    ratios = {window: of_window[CONTEXTS[-1]] / of_window[CONTEXTS[0]] for window, of_window in seconds.items()}
    document = origin(load=os.getloadavg()[0]) | {
        "rows": [
            {"window": window, "context": context, "seconds": of_window[context]}
            for window, of_window in seconds.items()
            for context in CONTEXTS
        ],
        "ratios": {name(window): ratio for window, ratio in ratios.items()},
        "mark": FLAT,
    }
    with os.fdopen(stdout, "w") as out:
        print(json.dumps(document, indent=1) if options.json else _markdown(document, seconds), file=out)
    return 0 if all(ratio <= FLAT for window, ratio in ratios.items() if window) else 1


def name(window: int | None) -> str:
    return f"window {window}" if window else "full"


def measure(window: int | None, rounds: int) -> dict[int, float]:
    """Processor seconds by context."""
    from dataclasses import replace

    import torch
    from layouts import Layout
    from memory import WIDTH, draft_of_8b

    from eagle3.draft.model import Eagle3Draft
    from eagle3.evaluation.acceptance import Greedy
    from eagle3.evaluation.drafter import ChainDrafter

    topology = Layout().start()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = replace(draft_of_8b(WIDTH), window=window)
    draft = Eagle3Draft(config, topology.modules, torch.float32).eval().requires_grad_(False)
    d2t = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    drafter = ChainDrafter(draft, d2t, CONTEXTS[-1])
    drafter.prefix.normal_()
    aux, tokens = torch.randn(ROWS, 3 * config.target_hidden_size), torch.arange(ROWS)
    best: dict[int, float] = {}
    with torch.no_grad():
        for _ in range(rounds):
            for context in CONTEXTS:
                drafter.rows = context - ROWS
                began = time.process_time()
                drafter.extend(aux, tokens)
                drafter.propose(CHAIN, Greedy())
                took = time.process_time() - began
                best[context] = min(best.get(context, took), took)
    print(name(window), {context: round(1e3 * took, 2) for context, took in best.items()}, file=sys.stderr)
    return best


def _markdown(document: dict[str, Any], seconds: dict[int | None, dict[int, float]]) -> str:
    head = ["draft", *(f"{context:,}" for context in CONTEXTS), f"{CONTEXTS[-1]:,} over {CONTEXTS[0]}"]
    rows = [
        [
            name(window),
            *(f"{1e3 * of_window[context]:.1f}" for context in CONTEXTS),
            f"{document['ratios'][name(window)]:.2f}",
        ]
        for window, of_window in seconds.items()
    ]
    title = (
        f"{headline(document)}; processor milliseconds of {ROWS} new rows and a chain of {CHAIN}, the draft of an 8B "
        f"target at 1/8 "
        f"of its width, fp32 (mark under a window: {document['mark']})."
    )
    return table(title, head, rows)


if __name__ == "__main__":
    run_command(main)
