"""Acceptance by draft position and by context, as a run's records give it, for charts, advice and card alike."""

from typing import NamedTuple

import numpy as np

from eagle3.reporting.record import Record, RunRecord, column, columns

FEW = 1000  # positions; the acceptance length of fewer is uncertain by more than 0.05 or so


class Curve(NamedTuple):
    """Acceptance length by context. contexts: tokens, ascending. lengths: [n], nan where not measured. interval: [n, 2]
    of 95%, or nan."""

    contexts: np.ndarray
    lengths: np.ndarray
    interval: np.ndarray


def measured_curve(by_context: Record) -> Curve:
    """Of a by_context.json."""
    rows = sorted(by_context["contexts"], key=lambda row: row["context"])
    interval = [row.get("interval") or [None, None] for row in rows]
    low, high = (column([{"edge": edges[side]} for edges in interval], "edge") for side in (0, 1))
    lengths = column(rows, "acceptance_length")
    return Curve(column(rows, "context"), lengths, np.stack((low, high), axis=1))


def estimated_curve(run: RunRecord) -> Curve | None:
    """From the held-out record of the exported draft: drafted tokens that would be accepted, and the target's own. Nan where
    fewer than FEW positions tell; None where no context has more."""
    if run.exported is None or not run.exported.get("contexts"):
        return None
    names = ("contexts", "acceptance_by_context", "supervised_by_context")
    contexts, accepted, supervised = (columns([run.exported], name)[0] for name in names)
    accepted = np.where(supervised >= FEW, accepted, np.nan)
    if np.isnan(accepted).all():
        return None
    return Curve(contexts, 1 + accepted, np.full((len(contexts), 2), np.nan))


def simulated_positions(run: RunRecord) -> list[float]:
    """The share of verifications that would accept drafts 0..i, by the held-out accuracies of the exported draft."""
    accuracy = columns([run.exported], "accuracy") if run.exported else np.zeros((1, 0))
    return np.cumprod(accuracy[0]).tolist()


def rule(judged: Record) -> str:
    """How tokens were chosen, of an evaluation.json or by_context.json."""
    return f"at temperature {judged['temperature']:g}" if judged.get("temperature") else "greedy"


class ContextRow(NamedTuple):
    """What is told of one context of a by_context.json, as text."""

    context: str
    length: str
    interval: str
    prompts: str
    verifications: str


def context_rows(by_context: Record) -> list[tuple[ContextRow, list[float]]]:
    """Of a by_context.json, contexts ascending; and the share of the verifications that accepted drafts 0..i."""
    rows = []
    for row in sorted(by_context["contexts"], key=lambda row: row["context"]):
        low, high = row.get("interval") or (None, None)
        told = ContextRow(
            tokens_label(row["context"]),
            number(row.get("acceptance_length")),
            "–" if low is None or high is None else f"{low:.2f} to {high:.2f}",
            f"{row['conversations']:,}",
            f"{row['verifications']:,}",
        )
        rows.append((told, row.get("position_acceptance") or []))
    return rows


def number(value: float | None) -> str:
    return "–" if value is None or not np.isfinite(value) else f"{value:.2f}"


def told_curve(curve: Curve) -> str:
    pairs = zip(curve.contexts, curve.lengths, strict=True)
    return ", ".join(f"{length:.2f} at {tokens_label(context)}" for context, length in pairs if np.isfinite(length))


def tokens_label(tokens: float) -> str:
    """512, 1k, 1.5k, 128k, 1M: thousands are 1,024, as contexts are."""
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g}{letter}"
    return f"{tokens:g}"


def mean(values: np.ndarray) -> np.ndarray:
    """Over the first axis, of those that are numbers; nan where none is."""
    known = ~np.isnan(values)
    counts = known.sum(0)
    return np.where(counts > 0, np.where(known, values, 0).sum(0) / np.maximum(counts, 1), np.nan)
