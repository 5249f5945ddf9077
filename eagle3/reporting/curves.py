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
    return Curve(column(rows, "context"), column(rows, "acceptance_length"), columns(rows, "interval", least=2))


def estimated_curve(run: RunRecord) -> Curve | None:
    """From the held-out record of the exported draft: drafted tokens that would be accepted, and the target's own. Nan where
    fewer than FEW positions tell; None where no context has more."""
    names = ("contexts", "acceptance_by_context", "supervised_by_context")
    contexts, accepted, supervised = (columns([run.exported], name)[0] for name in names)
    known = supervised >= FEW
    if not len(contexts) or not (known & np.isfinite(accepted)).any():
        return None
    return Curve(contexts, np.where(known, 1 + accepted, np.nan), np.full((len(contexts), 2), np.nan))


def simulated_positions(run: RunRecord) -> list[float]:
    """The share of verifications that would accept drafts 0..i, by the held-out accuracies of the exported draft."""
    return np.cumprod(columns([run.exported], "accuracy")[0]).tolist()


def rule(judged: Record) -> str:
    """How tokens were chosen, of an evaluation.json or by_context.json."""
    return f"at temperature {judged['temperature']:g}" if judged.get("temperature") else "greedy"


def context_rows(by_context: Record) -> list[tuple[list[str], list[float]]]:
    """What is told of each context of a by_context.json, ascending: its tokens, acceptance length, 95% interval, prompts and
    verifications; and the share of the verifications that accepted drafts 0..i."""
    rows = []
    for row in sorted(by_context["contexts"], key=lambda row: row["context"]):
        low, high = row.get("interval") or (None, None)
        told = [
            tokens_label(row["context"]),
            number(row.get("acceptance_length")),
            "–" if low is None or high is None else f"{low:.2f} to {high:.2f}",
            f"{row['conversations']:,}",
            f"{row['verifications']:,}",
        ]
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


def short(value: float, digits: int = 3) -> str:
    """1,234 as it is; 372,235 as 372k; 1,234,567 as 1.23M."""
    for least, unit, letter in ((10**9, 10**9, "G"), (10**6, 10**6, "M"), (10**4, 10**3, "k")):
        if abs(value) >= least:
            return f"{value / unit:.{digits}g}{letter}"
    return f"{value:,}"


def mean(values: np.ndarray) -> np.ndarray:
    """Over the first axis, of those that are numbers; nan where none is."""
    known = ~np.isnan(values)
    counts = known.sum(0)
    return np.where(counts > 0, np.where(known, values, 0).sum(0) / np.maximum(counts, 1), np.nan)
