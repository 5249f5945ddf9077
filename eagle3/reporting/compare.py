"""Compare several runs: charts of their training curves and acceptance by context, and tables of their key numbers."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import numpy as np

from eagle3.durable import write_bytes, write_text, writing
from eagle3.errors import UserError
from eagle3.evaluation.context_results import ContextAcceptance, ContextJudgement
from eagle3.evaluation.results import Judgement
from eagle3.reporting.charts import ABOUT_HELD_OUT, about_loss, contexts_plot, loss_label, measured_curve
from eagle3.reporting.markdown import Markdown, Table, escaped, summary_rows, template
from eagle3.reporting.plot import COLOURS, Plot, Series, count_axis, image, number_axis, step_axis, thinned
from eagle3.reporting.record import RunRecord, column, read_run, tokens_label

WIDE = 6.4  # inches, for a document rather than a phone
PAGE, RUNS, CONTEXTS = "comparison.html", "runs.md", "acceptance-by-context"
CONDITIONS = (
    "target",
    "texts",
    "engine",
    "engine_version",
    "temperature",
    "seed",
    "draft_tokens",
    "tree",
)
# Recipe keys that decide what a loss or an acceptance measures, and on which texts.
DECISIVE = (
    "model.target",
    "model.draft.vocab_size",
    "data.train",
    "data.held_out",
    "data.held_out_fraction",
    "data.max_length",
    "data.supervise",
    "data.spans",
    "training.loss",
    "training.ttt_steps",
    "training.step_decay",
    "training.normalization",
    "training.seed",
)


def read_compared(folders: Sequence[Path], names: Sequence[str] | None) -> dict[str, RunRecord]:
    """Read the runs to compare, by their names in charts and tables. names: one for each run; default: the folders'.

    Raises UserError if a folder holds no run, or unless each run has a different name.
    """
    names = [folder.resolve().name for folder in folders] if names is None else [name.strip() for name in names]
    if len(names) != len(folders) or len(set(names)) != len(names) or not all(names):
        example = ",".join(f"name{place}" for place in range(1, len(folders) + 1))
        raise UserError(
            f"--names {','.join(names)}: {len(folders)} runs need {len(folders)} different names; write --names "
            f"{example}, with your own names"
        )
    return {name: read_run(folder) for name, folder in zip(names, folders, strict=True)}


def runs_table(compared: Mapping[str, RunRecord]) -> Table:
    """The table of key numbers, with one column per run and a note on further differences."""
    rows = [summary_rows(run) for run in compared.values()]
    numbers = list(dict.fromkeys(number for of_run in rows for number in of_run))
    judged = {name: run.evaluation for name, run in compared.items() if run.evaluation}
    differences = differing(compared, {key: [run.key(key) for run in compared.values()] for key in DECISIVE})
    differences += [f"judged with {line}" for line in differing(judged, _conditions(judged))]
    return Table(
        "Runs",
        ["run", *compared],
        [[number, *(of_run.get(number, "–") for of_run in rows)] for number in numbers],
        f"Not the same for all, so compare with care: {'; '.join(differences)}." if differences else "",
    )


def differing(names: Iterable[str], values: Mapping[str, Sequence[Any]]) -> list[str]:
    """Describe each key whose values differ: which run has which value."""
    return [
        f"{key} DIFFERS: " + ", ".join(f"{value} ({name})" for value, name in zip(of_runs, names, strict=True))
        for key, of_runs in values.items()
        if any(value != of_runs[0] for value in of_runs)
    ]


def contexts_table(judged: Mapping[str, ContextJudgement]) -> Table:
    """The table of acceptance: one row per context, one column per run.

    Cells include 95% confidence intervals and the number of verifications. The note says how the runs were measured,
    and warns if that differs.
    """
    rows = [{row.context: _cell(row) for row in each.contexts} for each in judged.values()]
    values = _conditions(judged)
    same = [f"{name} {group[0]}" for name, group in values.items() if {*group} != {None} and len({*group}) == 1]
    return Table(
        "Acceptance length by context",
        ["context", *judged],
        [[tokens_label(each), *(of_run.get(each, "–") for of_run in rows)] for each in sorted({*chain(*rows)})],
        "Acceptance length, in tokens per verification, with its 95% interval and the number of verifications. "
        f"{'; '.join([*differing(judged, values), *same])}.",
    )


def _cell(row: ContextAcceptance) -> str:
    interval = " [{:.2f}, {:.2f}]".format(*row.interval) if row.interval else ""
    return Markdown(f"{row.acceptance_length:.2f}{interval} ({row.verifications:,})")  # its brackets are no link


def _conditions(judged: Mapping[str, Judgement | ContextJudgement]) -> dict[str, list[Any]]:
    """By which the drafts were judged, each with its values for the runs."""
    return {name: [getattr(each, name) for each in judged.values()] for name in CONDITIONS} | {
        "prompts": [_prompts(each) for each in judged.values()]
    }


def _prompts(judged: Judgement | ContextJudgement) -> str:
    if isinstance(judged, Judgement):
        return f"{judged.conversations}"
    counts = sorted({row.conversations for row in judged.contexts})
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{number} a context, with answers of {judged.new_tokens} tokens"


def compared_plots(compared: Mapping[str, RunRecord]) -> list[Plot]:
    """Charts of loss and held-out acceptance by step and by supervised tokens, and of acceptance by context, if runs
    have them."""
    coloured = [(name, run, colour) for (name, run), colour in zip(compared.items(), cycle(COLOURS), strict=False)]
    abouts = {about_loss(run) for run in compared.values()}
    about = (
        abouts.pop() if len(abouts) == 1 else "What training minimises, which is NOT the same for all: see the table."
    )
    courses = (
        ("loss", "loss", "Loss", loss_label(coloured[0][1]), about),
        (
            "held-out-acceptance",
            "acceptance_length",
            "Acceptance length, held out",
            "tokens per verification",
            ABOUT_HELD_OUT,
        ),
    )
    plots = [_course(coloured, over, *course) for course in courses for over in ("step", "tokens")]
    if curves := [measured_curve(run.by_context, name, colour) for name, run, colour in coloured if run.by_context]:
        plots.append(contexts_plot(CONTEXTS, curves))
    return [plot for plot in plots if plot]


def _course(
    coloured: Sequence[tuple[str, RunRecord, str]], over: str, name: str, key: str, title: str, unit: str, about: str
) -> Plot | None:
    """A chart with pale lines for training and dots for held-out text, by steps or supervised tokens; None if there is
    no data.

    key: key of the values in metrics.jsonl
    unit: unit of the value axis
    """
    training, held_out, ends = [], [], []
    for label, run, colour in coloured:
        steps, values = thinned(column(run.train, "step"), column(run.train, key))
        at, results = column(run.held_out, "step"), column(run.held_out, key)
        if over == "tokens":
            steps, at = run.supervised_until(steps), run.supervised_until(at)
        if np.isfinite(values).any():
            training.append(Series(label, steps, values, colour, "pale", group="training"))
        if np.isfinite(results).any():
            held_out.append(Series(label, at, results, colour, dotted=True, group="held out"))
            ends.append(f"{label} ends at {results[np.isfinite(results)][-1]:.3g}")
    if not (series := training + held_out):
        return None
    axis = step_axis() if over == "step" else count_axis("supervised tokens")
    alt = (
        f"{title} of the runs over {axis.label.removesuffix('s')}s; held out "
        + ", ".join(ends or ["nothing was measured"])
        + "."
    )
    return Plot(
        f"{name}-by-{over}",
        f"{title}, by {axis.label}",
        f"{about} Pale: training; with dots: held out.",
        alt,
        axis,
        number_axis(unit),
        series,
    )


def write_comparison(compared: Mapping[str, RunRecord], out: Path) -> str:
    """Write charts, tables, and a page with both into folder `out`. Returns the tables as Markdown."""
    plots = compared_plots(compared)
    measured = {name: run.by_context for name, run in compared.items() if run.by_context}
    tables = [runs_table(compared), *([contexts_table(measured)] if measured else [])]
    texts = [table.markdown() for table in tables]
    files = dict(zip((RUNS, f"{CONTEXTS}.md"), texts, strict=False))
    if unmeasured := ", ".join(escaped(name) for name in compared if name not in measured):
        texts.append(f"No acceptance by context for {unmeasured}: launchers/evaluate.py --by-context measures it.\n")
    texts += [f"{escaped(f'{name}: {line}')}.\n" for name, run in compared.items() for line in run.foreign]
    markdown = "\n".join(texts)
    title, charts = ", ".join(compared), [(plot, image(plot, "svg")) for plot in plots]
    page = template("comparison.html", autoescape=True)
    files[PAGE] = page.render(title=title, charts=charts, tables=tables, markdown=markdown)
    with writing(out, "free space, or name another folder with --out"):
        out.mkdir(parents=True, exist_ok=True)
        for plot in plots:
            write_bytes(out / f"{plot.name}.png", image(plot, "png", WIDE))
        for name, text in files.items():
            write_text(out / name, text)
    return markdown
