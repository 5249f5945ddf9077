"""The page of a run: what its folder holds as one HTML file that needs nothing else, to be read on a phone too."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from eagle3.console import counted, duration, memory_size
from eagle3.reporting.advice import Advice, advise
from eagle3.reporting.charts import Absent
from eagle3.reporting.curves import context_rows, number, rule
from eagle3.reporting.plot import Plot
from eagle3.reporting.record import Record, RunRecord, target_name
from eagle3.reporting.summary import short, summary
from eagle3.reporting.vector import HEIGHT, WIDTH, vector

SECTIONS = {  # title -> names of its charts
    "Training": ("total_loss", "accepted", "loss", "acceptance", "learning_rate", "gradient_norm"),
    "Acceptance": ("positions", "contexts"),
    "Speed and memory": ("throughput", "memory"),
    "Data": ("lengths",),
}
MOST_EXAMPLES = 8
MOST_PROMPT, OPENING, MOST_VALUE = 2000, 90, 60  # characters


class Tile(NamedTuple):
    name: str
    value: str
    note: str = ""


class Table(NamedTuple):
    """note: what stands below it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


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
    return environment.get_template(template).render(
        script=Markup(script), script_digest=digest, width=WIDTH, height=HEIGHT, **values
    )


def page(run: RunRecord, plots: Sequence[Plot | Absent]) -> str:
    return rendered(
        "page.html",
        title=run.folder.path.resolve().name,
        subtitle=_subtitle(run),
        tiles=_tiles(run),
        advice=[_shown(run, advice) for advice in advise(run)],
        absent=run.absent,
        sections=[_section(run, title, plots) for title in SECTIONS],
        summary=summary(run),
        examples=[_example(one) for one in ((run.evaluation or {}).get("examples") or [])[:MOST_EXAMPLES]],
        recipe=run.recipe_text,
        facts=_facts(run),
    )


def comparison(names: Sequence[str], plots: Sequence[Plot], tables: Sequence[Table], markdown: str) -> str:
    """The page of several runs. markdown: the tables again, to be pasted."""
    charts = [vector(plot) for plot in plots]
    return rendered("comparison.html", title=", ".join(names), charts=charts, tables=tables, markdown=markdown)


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
            f"tokens a verification, the target's own counted; {note}"
            if note
            else ("by context, below" if run.by_context else "not judged yet"),
        ),
        Tile(
            "Accepted drafts, held out",
            number(best.get("simulated_acceptance_length")),
            f"a verification, simulated, the target's own token not counted; loss {number(best.get('loss'))}, at step {best['step']}"
            if best
            else "not measured",
        ),
        *_speed(judged),
        Tile("Steps", f"{steps:,}", f"of {all_steps:,}" if all_steps else ""),
        Tile(
            "Tokens trained on",
            short(pace.tokens),
            f"{short(pace.supervised)} supervised, each counted as often as seen",
        ),
        Tile("Time in steps", duration(pace.seconds), "without measurements, checkpoints and judging"),
    ]


def _speed(judged: Record) -> list[Tile]:
    if not (found := judged.get("speed")):
        return []
    note = f"{found['speculative']:,.1f} tokens a second with the draft, {found['plain']:,.1f} without, one conversation at a time"
    return [Tile("Speed by the draft", f"{found['speculative'] / found['plain']:.2f}x", note)]


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


def _section(run: RunRecord, title: str, plots: Sequence[Plot | Absent]) -> dict[str, Any]:
    mine = [plot for plot in plots if plot.name in SECTIONS[title]]
    return {
        "title": title,
        "charts": [vector(plot) for plot in mine if isinstance(plot, Plot)],
        "missing": [plot for plot in mine if isinstance(plot, Absent)],
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
        ("rows read", lambda each: each["rows"]),
        ("dropped", lambda each: sum(each["dropped"].values())),
        ("truncated", lambda each: each["truncated"]),
        ("empty answers", lambda each: each.get("empty_answers")),  # not counted by older runs
    ):
        found = [each and take(each) for each in read]
        rows.append((name, *("–" if count is None else f"{count:,}" for count in found)))
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
    parts = memory["parts_gib"] | {"all": memory["estimate_gib"]}
    rows = [(name, memory_size(gib * 2**30)) for name, gib in parts.items()]
    return Table("The planner's estimate", ("what a rank holds", "memory"), rows)


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
            f"{run.started['draft']['parameters']:,} trained weights, context {run.started['draft']['context']:,}"
            + (f", window {window:,}" if (window := run.key("model.draft.window")) else ""),
        ),
        ("processes", f"{machine['processes']}: " + " x ".join(f"{name} {size}" for name, size in layout.items())),
        ("accelerator", machine["gpu"] or "none"),
        ("machine", f"{processor}, {machine['system']}"),
        *run.started["versions"].items(),
    ]
