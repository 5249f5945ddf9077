"""The page of a run: what its folder holds as one HTML file that needs nothing else, to be read on a phone too."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from eagle3.console import counted, duration
from eagle3.reporting.advice import Advice, advise
from eagle3.reporting.charts import Absent
from eagle3.reporting.curves import context_rows, number, rule
from eagle3.reporting.drawing import DPI, HEIGHT, WIDTH, Chart
from eagle3.reporting.record import Record, RunRecord, target_name

SECTIONS = {  # title -> names of its charts, or the titles of those that could not be drawn
    "Training": ("loss", "acceptance", "Loss by TTT step", "Acceptance rate by TTT step"),
    "Acceptance": ("positions", "contexts", "Accepted by draft position", "Acceptance length by context"),
    "Speed and memory": ("throughput", "memory", "Throughput of training", "Peak memory of the first rank"),
    "Data": ("lengths", "Sample lengths"),
}
MOST_EXAMPLES = 8
MOST_PROMPT, OPENING, MOST_VALUE = 2000, 90, 60  # characters


class Tile(NamedTuple):
    name: str
    value: str
    note: str = ""


class Table(NamedTuple):
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def page(run: RunRecord, drawn: Sequence[Chart | Absent]) -> str:
    """HTML; every text that came from data is escaped."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html").render(
        title=run.folder.path.resolve().name,
        subtitle=_subtitle(run),
        tiles=_tiles(run),
        advice=[_shown(run, advice) for advice in advise(run)],
        absent=run.absent,
        sections=[_section(run, title, drawn) for title in SECTIONS],
        examples=[_example(one) for one in ((run.evaluation or {}).get("examples") or [])[:MOST_EXAMPLES]],
        recipe=run.recipe_text,
        facts=_facts(run),
    )


def _subtitle(run: RunRecord) -> str:
    parts = [f"An EAGLE3 draft for {target_name(run)}"]
    if run.started:
        began = "resumed" if run.started.get("continues") else "begun"
        parts.append(f"{began} {run.started['started'].replace('T', ' ').replace('+00:00', ' UTC')}")
    return ", ".join(parts)


def _tiles(run: RunRecord) -> list[Tile]:
    judged, best, pace = run.evaluation or {}, run.exported or {}, run.pace
    untrained = (judged.get("untrained") or {}).get("acceptance_length")
    steps, all_steps = len(run.train), (run.started or {}).get("steps")
    note = (
        f"{counted(judged['conversations'], 'conversation')}{_rule(judged)}, by {judged.get('engine')} {judged.get('engine_version')}"
        if judged
        else ""
    )
    if untrained is not None:
        note += f"; untrained {untrained:.2f}"
    return [
        Tile(
            "Acceptance length",
            number(judged.get("acceptance_length")),
            note or ("by context, below" if run.by_context else "not judged yet"),
        ),
        Tile(
            "Held-out acceptance",
            number(best.get("simulated_acceptance_length")),
            f"simulated, own token not counted; loss, TTT steps weighted by training.step_decay, {number(best.get('loss'))} at step {best['step']}"
            if best
            else "not measured",
        ),
        Tile("Steps", f"{steps:,}", f"of {all_steps:,}" if all_steps else ""),
        Tile("Tokens", short(pace.tokens), f"{short(pace.supervised)} supervised"),
        Tile("Time in steps", duration(pace.seconds), "without measurements, checkpoints and judging"),
    ]


def _rule(judged: Record) -> str:
    sampled = f", temperature {judged['temperature']:g}" if judged.get("temperature") else ""
    return sampled + (f", a tree of {judged['topk']} branches" if judged.get("topk", 1) > 1 else "")


def _shown(run: RunRecord, advice: Advice) -> dict[str, Any]:
    """With the values that the keys have now."""
    values = {name: "null" if run.key(name) is None else str(run.key(name)) for name in advice.keys}
    keys = [{"name": name, "value": shortened(value, MOST_VALUE)} for name, value in values.items()]
    return advice._asdict() | {"keys": keys}


def shortened(text: str, most: int) -> str:
    """At most so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _section(run: RunRecord, title: str, drawn: Sequence[Chart | Absent]) -> dict[str, Any]:
    mine = SECTIONS[title]
    return {
        "title": title,
        "charts": [
            {
                "source": f"data:image/png;base64,{base64.b64encode(chart.png).decode()}",
                "alt": chart.alt,
                "width": round(WIDTH * DPI),
                "height": round(HEIGHT * DPI),
            }
            for chart in drawn
            if isinstance(chart, Chart) and chart.name in mine
        ],
        "missing": [chart for chart in drawn if isinstance(chart, Absent) and chart.title in mine],
        "table": {
            "Data": _data_table,
            "Speed and memory": _memory_table,
            "Acceptance": _contexts_table,
        }.get(title, lambda _: None)(run),
        "notes": {"Data": _data_notes, "Speed and memory": _memory_notes}.get(title, lambda _: [])(run),
    }


def _contexts_table(run: RunRecord) -> Table | None:
    """Of by_context.json: what the chart shows, in numbers, and acceptance by draft position."""
    if not run.by_context or not run.by_context["contexts"]:
        return None
    found = context_rows(run.by_context)
    positions = max(len(shares) for _, shares in found)
    head = ("context", "length", "95% interval", "prompts", "verified", *(f"draft {n + 1}" for n in range(positions)))
    rows = [[*row, *map(number, shares), *["–"] * (positions - len(shares))] for row, shares in found]
    return Table(f"By context, {rule(run.by_context)}", head, rows)


def _data_table(run: RunRecord) -> Table | None:
    data = (run.started or {}).get("data")
    if not data:
        return None
    rows = [
        ("samples", *(f"{data[part]['samples']:,}" for part in PARTS)),
        ("tokens", *(f"{data[part]['tokens']:,}" for part in PARTS)),
        ("supervised", *(f"{data[part]['supervised']:,}" for part in PARTS)),
        ("their share", *(f"{data[part]['supervised'] / max(1, data[part]['tokens']):.1%}" for part in PARTS)),
        ("longest, tokens", *(f"{data[part]['longest']:,}" for part in PARTS)),
    ]
    read = [data[part].get("prepared") for part in PARTS]
    for name, take in (
        ("texts read", lambda each: each["rows"]),
        ("dropped", lambda each: sum(each["dropped"].values())),
        ("truncated", lambda each: each["truncated"]),
    ):
        rows.append((name, *("–" if each is None else f"{take(each):,}" for each in read)))
    return Table("Samples", ("", "training", "held out"), rows)


PARTS = ("train", "held_out")


def _data_notes(run: RunRecord) -> list[str]:
    if not run.started:
        return []
    vocabulary, data = run.started["vocabulary"], run.started["data"]
    notes = [
        f"Draft vocabulary: {vocabulary['size']:,} of the target's {vocabulary['target_size']:,} tokens, "
        f"{vocabulary['coverage']:.2%} of the supervised ones."
    ]
    for part, name in zip(PARTS, ("training", "held out"), strict=True):
        for reason, count in ((data[part].get("prepared") or {}).get("dropped") or {}).items():
            notes.append(f"Dropped ({name}): {count:,} for {reason}.")
    return notes


def _memory_table(run: RunRecord) -> Table | None:
    memory = (run.started or {}).get("memory") or {}
    if memory.get("estimate_gib") is None:
        return None
    rows = [(name, f"{size:.3f}") for name, size in memory["parts_gib"].items()]
    return Table(
        "The planner's estimate", ("what a rank holds", "GiB"), [*rows, ("all", f"{memory['estimate_gib']:.3f}")]
    )


def _memory_notes(run: RunRecord) -> list[str]:
    memory = (run.started or {}).get("memory") or {}
    if memory.get("estimate_gib") is None:
        return [f"The planner made no estimate: {memory['why']}"] if memory.get("why") else []
    stream = memory["stream"]
    documents = counted(stream["documents"], "document")
    return [
        f"Measured is what is {memory['measured']}, at its peak so far. The estimate is for the largest stream that the "
        f"samples can make: {stream['tokens']:,} tokens of {documents}, {stream['supervised']:.0%} "
        "supervised. It covers the draft, its optimiser, DeepSpeed's buffers and the step; not Python, libraries, the target "
        "where it runs in the same process, or the data, most of which were there before the draft was made. Buffers count whole, "
        "though memory that was never written to is not resident."
    ]


def _example(example: Record) -> dict[str, Any]:
    prompt = example["prompt"]
    opening = " ".join(prompt.split())
    return {
        "opening": opening if len(opening) <= OPENING else f"…{opening[-OPENING:]}",
        "prompt": prompt if len(prompt) <= MOST_PROMPT else f"…{prompt[-MOST_PROMPT:]}",
        "first": example.get("first"),
        "verifications": [
            # a line end that was never put out would tear the text
            {**each, "rejected": [token.replace("\n", "↵") for token in each["rejected"]]}
            for each in example["verifications"]
        ],
    }


def _facts(run: RunRecord) -> list[tuple[str, str]]:
    if not run.started:
        return []
    machine, layout, target = (run.started[name] for name in ("machine", "layout", "target"))
    processor = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB"
    return [
        (
            "target",
            f"{target['architecture']}, {target['layers']} layers of {target['hidden_size']}, context {target['context']:,}",
        ),
        (
            "draft",
            f"{run.started['draft']['parameters']:,} trained weights, context {run.started['draft']['context']:,}",
        ),
        ("processes", f"{machine['processes']}: " + " x ".join(f"{name} {size}" for name, size in layout.items())),
        ("accelerator", machine["gpu"] or "none"),
        ("machine", f"{processor}, {machine['system']}"),
        *run.started["versions"].items(),
    ]


def short(count: int) -> str:
    """1,234 as it is; 372,235 as 372k; 1,234,567 as 1.23M."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if count >= size:
            return f"{count / (1000 if letter == 'k' else size):.3g}{letter}"
    return f"{count:,}"
