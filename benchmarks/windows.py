"""Measure what the length of a prompt costs a draft with a window: bytes stored, time and memory of a training step.

    python benchmarks/windows.py          a table in Markdown (about 10 minutes)
    python benchmarks/windows.py --json   one JSON document

Each step has one document: a prompt of 8k to 256k tokens and an answer of 1,024, under a window of 512 keys; prompts of
up to --full-to tokens are also measured with full attention. Hidden states are random, written to a store part by part,
and read as training reads them. Seconds are processor seconds, the least over several rounds; bytes are those of live
tensors (live_bytes.py). Needs an otherwise idle machine.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from reporting import headline, origin, positive, table

from eagle3.errors import run_command

STEPS, WINDOW, ANSWER = 7, 512, 1024
CONTEXTS = [2**power for power in range(13, 19)]
PART = 4096
FLAT = 1.10  # the most that the longest prompt's step may cost relative to the shortest's
PROVENANCE = {"target": "random"}


class Case(NamedTuple):
    """Number of tokens in the prompt, and the draft's window in keys (None for full attention)."""

    prompt: int
    window: int | None


def main() -> int:
    options = _options()
    stdout = os.dup(1)  # kept for the result: DeepSpeed logs to the stdout that it finds when imported
    os.dup2(2, 1)
    from layouts import Layout

    topology = Layout().start()
    cases = [Case(prompt, WINDOW) for prompt in CONTEXTS if prompt <= options.to]
    cases += [Case(prompt, None) for prompt in CONTEXTS if prompt <= options.full_to]
    rows = [measure(case, topology, options.rounds) for case in cases]
    windowed = [row for row in rows if row["window"]]
    ratios = {name: windowed[-1][name] / windowed[0][name] for name in ("step_seconds", "step_peak")}
    document = origin(load=os.getloadavg()[0]) | {"rows": rows, "ratios": ratios, "mark": FLAT}
    with os.fdopen(stdout, "w") as out:
        print(json.dumps(document, indent=1) if options.json else _markdown(document), file=out)
    return 0 if max(ratios.values()) <= FLAT else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--to", type=positive, default=CONTEXTS[-1], help="longest prompt (default 262144)")
    parser.add_argument("--full-to", type=positive, default=2**15, help="the same with full attention (default 32768)")
    parser.add_argument("--rounds", type=positive, default=3)
    return parser.parse_args()


def measure(case: Case, topology, rounds: int) -> dict[str, Any]:
    from dataclasses import replace

    import torch
    from layouts import Layout, prepare_rows, run_step
    from live_bytes import LiveBytes, device_tensors
    from memory import WIDTH, draft_of_8b

    from eagle3.parallel.sequence import Reach, Stream, plan_sequence
    from eagle3.states.store.reader import HiddenStateStore
    from eagle3.states.store.shard import Encoding
    from eagle3.states.store.writer import StoreWriter
    from eagle3.text.samples import SampleSet

    draft = replace(draft_of_8b(WIDTH), window=case.window)
    tokens = case.prompt + ANSWER
    ids = torch.randint(draft.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(tokens) >= case.prompt
    (sample,) = SampleSet.pack([(ids.int().numpy(), mask.numpy())])
    reach = Reach() if case.window is None else Reach(STEPS, case.window)
    encoding = Encoding("none", "bfloat16", draft.target_hidden_size, reach=reach)
    head = torch.randn(draft.vocab_size, draft.target_hidden_size, generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        with StoreWriter(folder, PROVENANCE, encoding) as writer:
            writer.add(sample.id, ids, mask, random_states(tokens, draft.target_hidden_size))
        stored = sum(path.stat().st_size for path in Path(folder).iterdir())
        provenance = {**PROVENANCE, "codec": "none", "dtype": "bfloat16", **reach._asdict()}
        store = HiddenStateStore.open(folder, provenance)
        best: dict[str, float] = {}
        for _ in range(rounds):
            clock = Clock(best)
            stream = Stream.pack([ids], [mask], "reference")
            plan = plan_sequence(stream, Reach(STEPS, case.window))
            clock.tick("plan_seconds")
            (rows,) = store.read_at([store.locations[sample.id]], [(plan.rows, plan.teacher)])
            clock.tick("read_seconds")
            floats = rows.aux.float(), rows.teacher.values.float()
            prepared = prepare_rows(stream, plan, *floats, head, draft, Layout(), topology)
            step = run_step(prepared, topology)
            best["step_seconds"] = min(best.get("step_seconds", step.cpu_seconds), step.cpu_seconds)
    prepared.objective.zero_grad()
    with LiveBytes([*device_tensors(prepared.batch), *prepared.objective.parameters()]) as bytes_:
        prepared.objective(prepared.batch, prepared.weights).surrogate.backward()
    whole = [getattr(stream, name) for name in ("ids", "document", "position", "end", "supervised")]
    planned = [value for value in vars(plan).values() if isinstance(value, torch.Tensor)]
    row = {"prompt": case.prompt, "window": case.window, "stored": stored, **best, "step_peak": bytes_.peak}
    row |= {"ids_masks_and_plan": sum(each.nbytes for each in (*whole, *planned)), "rows": len(plan.rows)}
    print(row, file=sys.stderr)
    return row


class Clock:
    """Keeps the least processor seconds between ticks, by name."""

    def __init__(self, best: dict[str, float]) -> None:
        self.best, self.last = best, time.process_time()

    def tick(self, name: str) -> None:
        now = time.process_time()
        self.best[name] = min(self.best.get(name, now - self.last), now - self.last)
        self.last = now


def random_states(tokens: int, hidden: int) -> Iterator:
    import torch

    from eagle3.states.rows import LastHidden, Rows

    generator = torch.Generator().manual_seed(2)
    for start in range(0, tokens, PART):
        rows = min(PART, tokens - start)
        aux, last = (torch.randn(rows, width, generator=generator).bfloat16() for width in (3 * hidden, hidden))
        yield Rows(aux, LastHidden(last, torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)))


def _markdown(document: dict[str, Any]) -> str:
    head = [
        "prompt",
        "attention",
        "rows read",
        "stored",
        "step, s",
        "step, peak",
        "read, s",
        "plan, s",
        "ids, masks, plan",
    ]
    rows = [
        [
            f"{row['prompt']:,}",
            f"window {row['window']}" if row["window"] else "full",
            f"{row['rows']:,}",
            f"{row['stored'] / 1e6:.1f} MB",
            f"{row['step_seconds']:.2f}",
            f"{row['step_peak'] / 1e6:.0f} MB",
            f"{row['read_seconds']:.3f}",
            f"{row['plan_seconds']:.3f}",
            f"{row['ids_masks_and_plan'] / 1e6:.1f} MB",
        ]
        for row in document["rows"]
    ]
    ratios = document["ratios"]
    title = (
        f"{headline(document)}; an answer of {ANSWER:,} tokens, K = {STEPS}, the draft of an 8B target at 1/8 of its "
        f"width, fp32. "
        f"Longest prompt over shortest under the window: step time {ratios['step_seconds']:.3f}, peak "
        f"{ratios['step_peak']:.3f} "
        f"(mark {document['mark']})."
    )
    return table(title, head, rows)


if __name__ == "__main__":
    run_command(main)
