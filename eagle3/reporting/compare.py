"""Several runs beside one another: acceptance length by context, as one chart and one table."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eagle3.durable import write_text
from eagle3.errors import UserError
from eagle3.reporting.curves import Curve, measured_curve, tokens_label, told_curve
from eagle3.reporting.markdown import escaped
from eagle3.reporting.record import Record, read_json
from eagle3.reporting.schemas import ByContext
from eagle3.training.run_folder import RunFolder

WIDE = 6.4  # inches: for a document, not a phone
CHART, TABLE = "acceptance-by-context.png", "acceptance-by-context.md"
CONDITIONS = (
    "target",
    "texts",
    "engine",
    "engine_version",
    "temperature",
    "seed",
    "draft_tokens",
    "new_tokens",
    "prompts",
)


class Compared(NamedTuple):
    """A run's by_context.json under the name it has in chart and table."""

    name: str
    found: Record

    @property
    def curve(self) -> Curve:
        return measured_curve(self.found)


def read_compared(folders: Sequence[Path], names: Sequence[str] | None) -> list[Compared]:
    """names: one a run, default the folders' own. Raises UserError where a run has no by_context.json, or names are not one a
    run and all different."""
    names = [folder.resolve().name for folder in folders] if names is None else [name.strip() for name in names]
    if len(names) != len(folders) or len(set(names)) != len(names) or not all(names):
        wanted = ",".join(f"name{place}" for place in range(1, len(folders) + 1))
        raise UserError(
            f"--names {','.join(names)}: {len(folders)} runs need {len(folders)} different names; write --names {wanted}, with names of yours"
        )
    compared = []
    for name, folder in zip(names, folders, strict=True):
        path = RunFolder(folder).by_context
        found = read_json(path, ByContext, "make it again with launchers/evaluate.py --by-context")
        if found is None:
            raise UserError(f"{path}: no such file; make it with launchers/evaluate.py --by-context")
        if not found.get("contexts"):
            raise UserError(f"{path}: measured no context; make it again with launchers/evaluate.py --by-context")
        compared.append(Compared(name, found))
    return compared


def table(compared: Sequence[Compared]) -> str:
    """Markdown: a row a context, a column a run, with 95% intervals and the number of verifications; and a line of what was
    not the same for all."""
    rows = {each.name: {row["context"]: row for row in each.found["contexts"]} for each in compared}
    contexts = sorted({context for of_run in rows.values() for context in of_run})
    lines = [
        "| context | " + " | ".join(escaped(each.name) for each in compared) + " |",
        "|---:|" + "---|" * len(compared),
        *(
            f"| {tokens_label(context)} | "
            + " | ".join(_cell(rows[each.name].get(context)) for each in compared)
            + " |"
            for context in contexts
        ),
        "",
        "Acceptance length, in tokens a verification [95% interval] (verifications). " + _conditions(compared),
    ]
    return "\n".join(lines) + "\n"


def _cell(row: Record | None) -> str:
    if row is None or row.get("acceptance_length") is None:
        return "–"
    low, high = row.get("interval") or (None, None)
    interval = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return f"{row['acceptance_length']:.2f}{interval} ({row['verifications']:,})"


def _conditions(compared: Sequence[Compared]) -> str:
    """How it was measured, and a warning where runs were measured differently."""
    told = []
    for name in CONDITIONS:
        values = [_prompts(each.found) if name == "prompts" else each.found.get(name) for each in compared]
        if set(values) == {None}:  # files of an earlier version
            continue
        if len(set(values)) == 1:
            told.append(f"{name} {values[0]}")
        else:
            told.append(
                f"{name} DIFFERS: " + ", ".join(f"{v} ({c.name})" for c, v in zip(compared, values, strict=True))
            )
    return escaped("; ".join(told)) + "."


def _prompts(found: Record) -> str:
    """How many prompts a context has."""
    counts = sorted({row["conversations"] for row in found["contexts"]})
    return f"{counts[0]} a context" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} a context"


def draw_compared(compared: Sequence[Compared]) -> bytes:
    """PNG: a line a run, with its 95% band."""
    from eagle3.reporting.charts import draw_curve
    from eagle3.reporting.drawing import SERIES, Drawing, context_axis, style

    with style():
        title = "Acceptance length by context"
        drawing = Drawing("acceptance-by-context", title, "context (tokens)", "tokens a verification", WIDE)
        axes, curves = drawing.axes, [each.curve for each in compared]
        for place, (each, curve) in enumerate(zip(compared, curves, strict=True)):
            look = {"color": SERIES[place % len(SERIES)], "marker": "osD^vP"[place % 6]}
            draw_curve(axes, curve, each.name, **look)
        context_axis(axes, np.unique(np.concatenate([curve.contexts for curve in curves])))
        axes.set_ylim(min(1.0, axes.get_ylim()[0]), 1.05 * axes.get_ylim()[1])
        told = "; ".join(f"{each.name} {told_curve(curve)}" for each, curve in zip(compared, curves, strict=True))
        drawing.legend(columns=min(3, len(compared)))
        return drawing.chart(f"{title}: {told}.").png


def write_comparison(compared: Sequence[Compared], out: Path) -> str:
    """Chart and table into folder `out`; returns the table."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be made ({error.strerror}); name another folder") from error
    written = table(compared)
    (out / CHART).write_bytes(draw_compared(compared))
    write_text(out / TABLE, written)
    return written
