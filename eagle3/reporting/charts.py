"""The charts of one run, each from what its folder holds; where that lacks what a chart needs, the chart says so."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from eagle3.reporting.curves import (
    Curve,
    estimated_curve,
    mean,
    measured_curve,
    rule,
    simulated_positions,
    told_curve,
)
from eagle3.reporting.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    VERMILLION,
    Chart,
    Drawing,
    context_axis,
    shades,
    style,
    thinned,
)
from eagle3.reporting.record import Record, RunRecord, column, columns

MARKER = {"markersize": 6.5, "markeredgecolor": "white", "markeredgewidth": 1}


class Absent(NamedTuple):
    """A chart that could not be drawn, and what for it is missing."""

    title: str
    why: str


def draw(run: RunRecord) -> Iterator[Chart | Absent]:
    """All charts of a run, in the order of the page."""
    charts: tuple[Callable[[RunRecord], Chart | Absent], ...]
    charts = (_loss, _acceptance, _positions, _contexts, _throughput, _memory, _lengths)
    with style():
        for chart in charts:
            yield chart(run)


def _loss(run: RunRecord) -> Chart | Absent:
    unit = " (nats a token)" if run.key("training.loss") == "kl" else ""
    return _by_ttt_step(run, "loss", "step_losses", "Loss by TTT step", f"loss{unit}")


def _acceptance(run: RunRecord) -> Chart | Absent:
    title = "Acceptance rate by TTT step"
    return _by_ttt_step(run, "acceptance", "acceptance_rate", title, "probability of acceptance")


def _by_ttt_step(run: RunRecord, name: str, key: str, title: str, ylabel: str) -> Chart | Absent:
    """Training as thin lines, held out as markers, a colour a TTT step."""
    curves = columns(run.train, key)
    if not np.isfinite(curves).any():
        return Absent(title, "metrics.jsonl has no such numbers yet")
    drawing = Drawing(name, title, "optimiser step", ylabel)
    axes, colours = drawing.axes, shades(curves.shape[1])
    steps, smooth = thinned(column(run.train, "step"), curves)
    measured, held_out = column(run.held_out, "step"), columns(run.held_out, key)
    for place, colour in enumerate(colours):
        axes.plot(steps, smooth[:, place], color=colour, linewidth=0.8, alpha=0.6)
        axes.plot([], [], color=colour, linewidth=2.5, label=f"step {place + 1}")
        if place < held_out.shape[1]:
            axes.plot(measured, held_out[:, place], "o", color=colour, zorder=3, **MARKER)
    axes.plot([], [], "o", color=GREY, label="held out", **MARKER)
    entries = len(colours) + 1
    drawing.legend(columns=math.ceil(entries / math.ceil(entries / 5)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    return drawing.chart(_told_course(title, curves, held_out))


def _told_course(title: str, curves: np.ndarray, held_out: np.ndarray) -> str:
    tenth = max(1, len(curves) // 10)
    first, last = mean(curves[:tenth]), mean(curves[-tenth:])
    alt = (
        f"{title} over {len(curves)} optimiser steps: TTT step 1 goes from {first[0]:.3g} to {last[0]:.3g}, "
        f"TTT step {len(first)} from {first[-1]:.3g} to {last[-1]:.3g}"
    )
    if len(held_out):
        alt += f"; held out they end at {held_out[-1][0]:.3g} and {held_out[-1][-1]:.3g}"
    return alt + "."


def _positions(run: RunRecord) -> Chart | Absent:
    title = "Accepted by draft position"
    simulated, judged = simulated_positions(run), (run.evaluation or {}).get("position_acceptance") or []
    if not simulated and not judged:
        return Absent(title, "neither held-out measurements nor evaluation.json are there")
    drawing = Drawing("positions", title, "draft position", "share of the verifications")
    axes, told = drawing.axes, []
    for label, shares, look in (
        ("simulated from held-out hidden states, greedy", simulated, {"color": BLUE, "marker": "o"}),
        (
            f"real speculative decoding, {rule(run.evaluation or {})}",
            judged,
            {"color": VERMILLION, "marker": "s", "linestyle": "--"},
        ),
    ):
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, label=label, **look)
            told.append(f"{label} {', '.join(f'{share:.2f}' for share in shares)}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _share_axis(axes)
    drawing.legend(columns=1)
    return drawing.chart(f"{title}, from the first: {'; '.join(told)}.")


def _share_axis(axes: Axes) -> None:
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))


def draw_curve(axes: Axes, curve: Curve, label: str, **look) -> None:
    axes.plot(curve.contexts, curve.lengths, label=label, markersize=5, **look)
    axes.fill_between(curve.contexts, *curve.interval.T, color=look["color"], alpha=0.18, linewidth=0)


def _contexts(run: RunRecord) -> Chart | Absent:
    title = "Acceptance length by context"
    measured = measured_curve(run.by_context) if run.by_context else None
    estimated = estimated_curve(run)
    if measured is None and estimated is None:
        return Absent(title, "launchers/evaluate.py --by-context measures it")
    drawing = Drawing("contexts", title, "context (tokens)", "tokens a verification")
    axes, told = drawing.axes, []
    if measured:
        draw_curve(axes, measured, f"real decoding, {rule(run.by_context)}, 95% band", color=VERMILLION, marker="s")
        told.append(f"real decoding {told_curve(measured)}")
    if estimated:
        draw_curve(axes, estimated, "estimated from hidden states, greedy", color=BLUE, marker="o", linestyle="--")
        told.append(f"estimated {told_curve(estimated)}")
    context_axis(axes, np.union1d(*(curve.contexts if curve else [] for curve in (measured, estimated))))
    axes.set_ylim(min(1.0, axes.get_ylim()[0]), 1.05 * axes.get_ylim()[1])
    drawing.legend(columns=1)
    return drawing.chart(f"{title}: {'; '.join(told)}.")


def _throughput(run: RunRecord) -> Chart | Absent:
    title = "Throughput of training"
    speeds = column(run.train, "tokens_per_second")
    if not np.isfinite(speeds).any():
        return Absent(title, "metrics.jsonl has no such numbers yet")
    drawing = Drawing("throughput", title, "optimiser step", "tokens a second, with prompts")
    steps, smooth = thinned(column(run.train, "step"), speeds)
    median = float(np.nanmedian(speeds))
    drawing.axes.plot(steps, smooth, color=GREEN, linewidth=1, label="each step")
    drawing.axes.axhline(median, color=GREY, linestyle=":", label=f"median {median:,.0f}")
    drawing.axes.set_ylim(bottom=0)
    drawing.axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    drawing.axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    drawing.legend(columns=2)
    return drawing.chart(f"{title}: a median of {median:,.0f} tokens a second.")


def _memory(run: RunRecord) -> Chart | Absent:
    title = "Peak memory of the first rank"
    used = column(run.train, "memory_gib")
    if not np.isfinite(used).any():
        return Absent(title, "metrics.jsonl has no such numbers yet")
    drawing, memory = Drawing("memory", title, "optimiser step", "GiB"), (run.started or {}).get("memory") or {}
    axes, peak = drawing.axes, float(np.nanmax(used))
    before, estimate = memory.get("before_gib"), memory.get("estimate_gib")
    alt = f"{title}: {peak:.2f} GiB"
    axes.plot(*thinned(column(run.train, "step"), used), color=BLUE, label=f"measured, at most {peak:.2f}")
    if before is not None:
        axes.axhline(before, color=GREY, linestyle=":", label=f"before the draft was made: {before:.2f}")
        alt += f", of which {before:.2f} were there before the draft was made"
        if estimate is not None:
            bound = before + estimate
            axes.axhline(bound, color=ORANGE, linestyle="--", label=f"that and the planner's estimate: {bound:.2f}")
            alt += f"; the planner's estimate for the draft is {estimate:.2f}"
    axes.set_ylim(bottom=0)
    axes.margins(y=0.1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    drawing.legend(columns=1)
    return drawing.chart(alt + ".")


def _lengths(run: RunRecord) -> Chart | Absent:
    title = "Sample lengths"
    data = (run.started or {}).get("data") or {}
    found = {name: data[name]["lengths"] for name in ("train", "held_out") if (data.get(name) or {}).get("lengths")}
    if not found:
        return Absent(title, "run.json is not there; the start of a run writes it")
    drawing = Drawing("lengths", title, "tokens of a sample", "share of the samples")
    axes = drawing.axes
    for name, colour in (("train", BLUE), ("held_out", ORANGE)):
        if name in found:
            edges, counts = found[name]["edges"], np.array(found[name]["counts"], float)
            look = {"fill": True, "alpha": 0.35} if name == "train" else {"linewidth": 1.6}
            axes.stairs(counts / counts.sum(), edges, color=colour, **look)
    edges = np.concatenate([each["edges"] for each in found.values()])
    if _logarithmic(found.values()):
        powers = 2.0 ** np.arange(np.ceil(np.log2(edges.min())), np.floor(np.log2(edges.max())) + 1)
        context_axis(axes, powers)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    handles = {"train": Line2D([], [], color=BLUE, linewidth=6, alpha=0.35, label="training")}
    handles["held_out"] = Line2D([], [], color=ORANGE, linewidth=1.6, label="held out")
    drawing.legend(columns=2, handles=[handles[name] for name in found])
    longest = max(data[name].get("longest") or 0 for name in found)
    return drawing.chart(f"Histogram of {title.lower()}: the longest has {longest:,} tokens.")


def _logarithmic(histograms: Sequence[Record]) -> bool:
    """Whether the bins grow."""
    return any(
        each["edges"][-1] - each["edges"][-2] > 1.5 * (each["edges"][1] - each["edges"][0]) for each in histograms
    )
