"""The page of a run: what its folder holds as one HTML file that needs nothing else, to be read on a phone too."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from eagle3.console import counted, duration, memory_size
from eagle3.reporting.advice import Advice, advise
from eagle3.reporting.charts import Absent
from eagle3.reporting.curves import context_rows, number, rule, short
from eagle3.reporting.markdown import Table
from eagle3.reporting.plot import Plot
from eagle3.reporting.record import Record, RunRecord, target_name
from eagle3.reporting.summary import layout_in_words, summary
from eagle3.reporting.vector import vector

SECTIONS = {  # title -> names of its charts
    "Training": ("total_loss", "accepted", "loss", "acceptance", "learning_rate", "gradient_norm"),
    "Acceptance": ("positions", "contexts"),
    "Speed and memory": ("throughput", "memory"),
    "Data": ("lengths",),
}
PARTS = {"train": "training", "held_out": "held out"}
MOST_EXAMPLES = 8
MOST_PROMPT, OPENING, MOST_VALUE = 2000, 90, 60  # characters


def rendered(template: str, **values: Any) -> str:
    """HTML; every text that came from data is escaped. The page's own script is the only one that may run in it."""
    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (folder / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(script=Markup(script), script_digest=digest, **values)


def page(run: RunRecord, plots: Sequence[Plot | Absent]) -> str:
    numbers = {"Data": _data(run), "Speed and memory": _memory(run), "Acceptance": (_contexts_table(run), [])}
    sections = []
    for title, names in SECTIONS.items():
        mine = [plot for plot in plots if plot.name in names]
        charts = [vector(plot) for plot in mine if isinstance(plot, Plot)]
        missing = [plot for plot in mine if isinstance(plot, Absent)]
        table, notes = numbers.get(title, (None, []))
        sections.append({"title": title, "charts": charts, "missing": missing, "table": table, "notes": notes})
    return rendered(
        "page.html",
        title=run.folder.path.resolve().name,
        subtitle=_subtitle(run),
        tiles=_tiles(run),
        advice=[_shown(run, advice) for advice in advise(run)],
        absent=run.absent,
        sections=sections,
        summary=summary(run),
        examples=[_example(one) for one in (run.evaluation.get("examples") or [])[:MOST_EXAMPLES]],
        recipe=run.recipe_text,
        facts=_facts(run),
    )


def comparison(names: Sequence[str], plots: Sequence[Plot], tables: Sequence[Table], markdown: str) -> str:
    """The page of several runs. markdown: the tables again, to be pasted."""
    return rendered(
        "comparison.html",
        title=", ".join(names),
        charts=[vector(plot) for plot in plots],
        tables=tables,
        markdown=markdown,
    )


def _subtitle(run: RunRecord) -> str:
    parts = [f"An EAGLE3 draft for {target_name(run)}"]
    if run.started:
        began = "resumed" if run.started.get("continues") else "begun"
        parts.append(f"{began} {run.started['started'].replace('T', ' ').replace('+00:00', ' UTC')}")
    return ", ".join(parts)


def _tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """Name, value, and a note, which may be empty."""
    judged, best, pace, all_steps = run.evaluation, run.exported, run.pace, run.started.get("steps")
    length_note, best_note, speed = "by context, below" if run.by_context else "not judged yet", "not measured", []
    if judged:
        length_note = (
            f"tokens a verification, the target's own counted; {counted(judged['conversations'], 'conversation')}{_rule(judged)}, "
            f"by {judged.get('engine')} {judged.get('engine_version')}"
        )
    if untrained := judged.get("untrained"):
        length_note += f"; untrained {untrained['acceptance_length']:.2f}"
    if best:
        best_note = (
            "a verification, simulated, the target's own token not counted; "
            f"loss {number(best.get('loss'))}, at step {best['step']}"
        )
    if found := judged.get("speed"):
        plain = f"{found['plain']:,.1f} without, one conversation at a time"
        note = f"{found['speculative']:,.1f} tokens a second with the draft, {plain}"
        speed = [("Speed by the draft", f"{found['speculative'] / found['plain']:.2f}x", note)]
    seen = f"{short(pace.supervised)} supervised, each counted as often as seen"
    return [
        ("Acceptance length", number(judged.get("acceptance_length")), length_note),
        ("Accepted drafts, held out", number(best.get("simulated_acceptance_length")), best_note),
        *speed,
        ("Steps", f"{len(run.train):,}", f"of {all_steps:,}" if all_steps else ""),
        ("Tokens trained on", short(pace.tokens), seen),
        ("Time in steps", duration(pace.seconds), "without measurements, checkpoints and judging"),
    ]


def _rule(judged: Record) -> str:
    sampled = f", temperature {judged['temperature']:g}" if judged.get("temperature") else ""
    return sampled + (f", a tree of {judged['topk']} branches" if judged.get("topk", 1) > 1 else "")


def _shown(run: RunRecord, advice: Advice) -> dict[str, Any]:
    """With the values that the keys have now."""
    values = {name: "null" if run.key(name) is None else str(run.key(name)) for name in advice.keys}
    keys = {
        name: value if len(value) <= MOST_VALUE else f"{value[: MOST_VALUE - 1]}…" for name, value in values.items()
    }
    return advice._asdict() | {"keys": keys}


def _contexts_table(run: RunRecord) -> Table | None:
    """Of by_context.json: what the chart shows, in numbers, and acceptance by draft position."""
    if not run.by_context.get("contexts"):
        return None
    found = context_rows(run.by_context)
    positions = max(len(shares) for _, shares in found)
    head = ("context", "length", "95% interval", "prompts", "verified", *(f"draft {n + 1}" for n in range(positions)))
    rows = [[*row, *map(number, shares), *["–"] * (positions - len(shares))] for row, shares in found]
    return Table(f"By context, {rule(run.by_context)}", head, rows)


def _data(run: RunRecord) -> tuple[Table | None, list[str]]:
    """What the samples are, and how they were made."""
    if not run.started:
        return None, []
    parts = [run.started["data"][part] for part in PARTS]
    read = [part.get("prepared") or {} for part in parts]
    counts = {
        "samples": [part["samples"] for part in parts],
        "tokens": [part["tokens"] for part in parts],
        "supervised": [part["supervised"] for part in parts],
        "their share": [f"{part['supervised'] / max(1, part['tokens']):.1%}" for part in parts],
        "longest, tokens": [part["longest"] for part in parts],
        "rows read": [rows.get("rows") for rows in read],
        "dropped": [sum(rows["dropped"].values()) if rows else None for rows in read],
        "truncated": [rows.get("truncated") for rows in read],
        "empty answers": [rows.get("empty_answers") for rows in read],  # not counted by older runs
    }
    rows = [(name, *map(_cell, found)) for name, found in counts.items()]
    vocabulary = run.started["vocabulary"]
    notes = [
        f"Draft vocabulary: {vocabulary['size']:,} of the target's {vocabulary['target_size']:,} tokens, "
        f"{vocabulary['coverage']:.2%} of the supervised ones."
    ]
    for rows_read, name in zip(read, PARTS.values(), strict=True):
        dropped = rows_read.get("dropped", {})
        notes += [f"Dropped ({name}): {count:,} for {reason}." for reason, count in dropped.items()]
    return Table("Samples", ("", *PARTS.values()), rows), notes


def _cell(found: int | str | None) -> str:
    if found is None:
        return "–"
    return found if isinstance(found, str) else f"{found:,}"


def _memory(run: RunRecord) -> tuple[Table | None, list[str]]:
    """The planner's estimate, and what it covers."""
    memory = run.started.get("memory", {})
    if memory.get("estimate_gib") is None:
        return None, [f"The planner made no estimate: {memory['why']}"] if memory.get("why") else []
    parts, stream = memory["parts_gib"] | {"all": memory["estimate_gib"]}, memory["stream"]
    note = (
        f"Measured is what is {memory['measured']}, at its peak so far. The estimate is for the largest stream that the "
        f"samples can make: {stream['tokens']:,} tokens of {counted(stream['documents'], 'document')}, "
        f"{stream['supervised']:.0%} "
        "supervised. It covers the draft, its optimiser, DeepSpeed's buffers and the step; not Python, libraries, the target "
        "where it runs in the same process, or the data, most of which were there before the draft was made. Buffers count whole, "
        "though memory that was never written to is not resident."
    )
    rows = [(name, memory_size(gib * 2**30)) for name, gib in parts.items()]
    return Table("The planner's estimate", ("what a rank holds", "memory"), rows), [note]


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


def _facts(run: RunRecord) -> dict[str, str]:
    if not run.started:
        return {}
    machine, layout, target, draft = (run.started[name] for name in ("machine", "layout", "target", "draft"))
    window = run.key("model.draft.window")
    return {
        "target": f"{target['architecture']}, {target['layers']} layers of {target['hidden_size']}, context {target['context']:,}",
        "draft": f"{draft['parameters']:,} trained weights, context {draft['context']:,}"
        + (f", window {window:,}" if window else ""),
        "processes": f"{machine['processes']}: {layout_in_words(layout)}",
        "accelerator": machine["gpu"] or "none",
        "machine": f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB, {machine['system']}",
        **run.started["versions"],
    }
