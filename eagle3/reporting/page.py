"""The page of a run: the contents of its folder as a single, self-contained HTML file that reads well on a phone."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from eagle3.console import counted, duration, memory_size
from eagle3.planning.policy import policy, tier_table
from eagle3.reporting.advice import advise
from eagle3.reporting.charts import Absent
from eagle3.reporting.markdown import Table, layout_in_words, summary
from eagle3.reporting.plot import Plot, image
from eagle3.reporting.record import (
    Record,
    RunRecord,
    all_pay_offs,
    context_rows,
    number,
    rule,
    set_rows,
    short,
    source_name,
    target_name,
    tree,
    window_in_words,
    windows_judged,
)

SECTIONS = {  # title -> names of the charts
    "Training": ("total_loss", "held_out", "loss", "acceptance", "learning_rate", "gradient_norm"),
    "Acceptance": ("positions", "contexts", "pay_off"),
    "Speed and memory": ("throughput", "memory"),
    "Data": ("lengths",),
}
PARTS = {"train": "training", "held_out": "held out"}
MOST_EXAMPLES = 8
MOST_PROMPT, OPENING = 2000, 90  # limits in characters
SLOWER = (
    "; below 1x, drafting and verifying took longer than the accepted drafts saved, as usual for a small target or on "
    "a CPU, where to verify several tokens takes longer than to decode one"
)


def rendered(template: str, **values: Any) -> str:
    """Render HTML in which all text from data is escaped, and no script can run."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    return environment.get_template(template).render(**values)


def page(run: RunRecord, plots: Sequence[Plot | Absent]) -> str:
    """The page as HTML."""
    numbers = {
        "Training": ([], []),
        "Acceptance": ([*filter(None, (_sets_table(run),)), *_contexts_tables(run), *_pay_off_tables(run)], []),
        "Speed and memory": _memory(run),
        "Data": _data(run),
    }
    sections = [
        {
            "title": title,
            "charts": [(plot, image(plot, "svg")) for plot in plots if plot.name in names and isinstance(plot, Plot)],
            "missing": [plot for plot in plots if plot.name in names and isinstance(plot, Absent)],
            "tables": numbers[title][0],
            "notes": numbers[title][1],
        }
        for title, names in SECTIONS.items()
    ]
    return rendered(
        "page.html",
        title=run.folder.path.resolve().name,
        target=target_name(run),
        started=run.started,
        tiles=_tiles(run),
        advice=[(advice, {name: run.key(name) for name in advice.keys}) for advice in advise(run)],
        absent=run.absent,
        sections=sections,
        summary=summary(run),
        examples=[_example(one) for one in (run.evaluation.get("examples") or [])[:MOST_EXAMPLES]],
        recipe=run.recipe_text,
        facts=_facts(run),
    )


def _tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """The key figures, each as (name, value, note); the note may be empty."""
    result, best, pace, all_steps = run.evaluation, run.exported, run.pace, run.started.get("steps")
    untrained, speed, tiles = result.get("untrained"), result.get("speed"), []
    length_note = "by context, below" if run.by_context else "not judged yet"
    if result:
        length_note = (
            "tokens per verification, the target's own counted; "
            f"{counted(result['conversations'], 'conversation')}, {rule(result)}, {tree(result) or 'chains'}, by "
            f"{result.get('engine')} "
            f"{result.get('engine_version')}"
            + (f"; untrained {untrained['acceptance_length']:.2f}" if untrained else "")
        )
    if speed:
        gain = speed["speculative"] / speed["plain"]
        note = (
            f"{speed['speculative']:,.1f} tokens a second with the draft, {speed['plain']:,.1f} without, one "
            f"conversation at a time{'' if gain > 1 else SLOWER}"
        )
        tiles = [("Speed by the draft", f"{gain:.2f}x", note)]
    return [
        ("Acceptance length", number(result.get("acceptance_length")), length_note),
        (
            "Acceptance length, held out",
            number(best.get("acceptance_length")),
            f"from hidden states, greedy; loss {number(best.get('loss'))}, at step {best['step']}"
            if best
            else "not measured",
        ),
        *tiles,
        ("Steps", f"{len(run.train):,}", f"of {all_steps:,}" if all_steps else ""),
        (
            "Tokens trained on",
            short(pace.tokens),
            f"{short(pace.supervised)} supervised, each counted as often as seen",
        ),
        ("Time in steps", duration(pace.seconds), "without measurements, checkpoints and judging"),
    ]


def _contexts_tables(run: RunRecord) -> list[Table]:
    """The numbers behind the chart of by_context.json, and acceptance by draft position, for each window judged."""
    head = ("context", "length", "95% interval", "prompts", "verified")
    return [
        _with_positions(
            ", ".join(filter(None, ("By context", rule(judged), tree(judged), window_in_words(judged)))),
            head,
            context_rows(judged),
        )
        for judged in windows_judged(run.by_context)
    ]


def _sets_table(run: RunRecord) -> Table | None:
    """The numbers of each prompt set in evaluation.json, and acceptance by draft position."""
    if not run.evaluation.get("sets"):
        return None
    head = (
        "prompts",
        "length",
        "95% interval",
        "mean over conversations",
        "conversations",
        "verified",
        "times as fast",
    )
    return _with_positions(f"By prompt set, {rule(run.evaluation)}", head, set_rows(run.evaluation))


def _pay_off_tables(run: RunRecord) -> list[Table]:
    """For each kind of costs, the speed-up by context and batch."""
    title = "Speed-up with the best number of draft tokens (in brackets)"
    return [
        Table(f"{title}, {pay_off.source}; {pay_off.verdict()}", table[0], table[1:])
        for pay_off in all_pay_offs(run.by_context)
        for table in (pay_off.speed_up_table(),)
    ] + [
        Table(
            f"Draft tokens by batch, one number for all these contexts, {pay_off.source}",
            *tier_table(policy(pay_off.cells)),
        )
        for pay_off in all_pay_offs(run.by_context)
        if pay_off.is_estimated
    ]


def _with_positions(title: str, head: Sequence[str], rows: Sequence[tuple[list[str], list[float]]]) -> Table:
    """A table whose rows go on with the share of each draft position."""
    positions = max(len(shares) for _, shares in rows)
    return Table(
        title,
        [*head, *(f"draft {n + 1}" for n in range(positions))],
        [[*row, *map(number, shares), *["–"] * (positions - len(shares))] for row, shares in rows],
    )


def _data(run: RunRecord) -> tuple[list[Table], list[str]]:
    """A table of the samples, and notes on how they were made."""
    if not run.started:
        return [], []
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
        "empty answers": [rows.get("empty_answers") for rows in read],
    }
    rows = [(name, *map(_cell, row)) for name, row in counts.items()]
    vocabulary = run.started["vocabulary"]
    notes = [
        f"Draft vocabulary: {vocabulary['size']:,} of the target's {vocabulary['target_size']:,} tokens, "
        f"{vocabulary['coverage']:.2%} of the supervised ones.",
        *(
            f"Dropped ({name}): {count:,} for {reason}."
            for rows, name in zip(read, PARTS.values(), strict=True)
            for reason, count in rows.get("dropped", {}).items()
        ),
    ]
    tables = [Table("Samples", ("", *PARTS.values()), rows)]
    if sources := run.started["data"]["train"].get("sources"):
        names = ("source", "available", "used", "tokens", "supervised")
        head = ("Source", "samples", "in an epoch", "tokens", "supervised")
        rows = [(source_name(each["source"]), *(_cell(each[name]) for name in names[1:])) for each in sources]
        tables.append(Table("What an epoch has of each source", head, rows))
    return tables, notes


def _cell(value: int | str | None) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else f"{value:,}"


def _memory(run: RunRecord) -> tuple[list[Table], list[str]]:
    """The planner's memory estimate, and notes on what it covers."""
    memory = run.started.get("memory", {})
    if memory.get("estimate_gib") is None:
        return [], [f"The planner made no estimate: {memory['why']}"] if memory.get("why") else []
    parts, stream = memory["parts_gib"] | {"all": memory["estimate_gib"]}, memory["stream"]
    note = (
        f"Measured is what is {memory['measured']}, at its peak so far. The estimate is for the largest stream that "
        f"the samples can make: {stream['tokens']:,} tokens of {counted(stream['documents'], 'document')}, "
        f"{stream['supervised']:.0%} supervised. It covers the draft, its optimiser, DeepSpeed's buffers and the "
        "step; not Python, libraries, the target where it runs in the same process, or the data, most of which were "
        "there before the draft was made. Buffers count whole, though memory that was never written to is not "
        "resident."
    )
    rows = [(name, memory_size(gib * 2**30)) for name, gib in parts.items()]
    return [Table("The planner's estimate", ("what a rank holds", "memory"), rows)], [note]


def _example(example: Record) -> dict[str, Any]:
    prompt = example["prompt"]
    opening = " ".join(prompt.split())
    return {
        "opening": opening if len(opening) <= OPENING else f"…{opening[-OPENING:]}",
        "prompt": prompt if len(prompt) <= MOST_PROMPT else f"…{prompt[-MOST_PROMPT:]}",
        "first": example.get("first"),
        "verifications": [
            # a line break in a rejected token would break up the text, although the output never contained it
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
        "target": f"{target['architecture']}, {target['layers']} layers of {target['hidden_size']}, context "
        f"{target['context']:,}",
        "draft": f"{draft['parameters']:,} trained weights, context {draft['context']:,}"
        + (f", window {window:,}" if window else ""),
        "processes": f"{machine['processes']}: {layout_in_words(layout)}",
        "accelerator": machine["gpu"] or "none",
        "machine": f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB, "
        f"{machine['system']}",
        **run.started["versions"],
    }
