"""A chart as the shapes and words of an SVG drawing and its legend, in which the page's script finds the values to show."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from eagle3.reporting.plot import Colour, Plot, Series

LETTER = 8.5  # width of one, in the drawing
SEPARATOR = ";"
Place = Callable[[np.ndarray], np.ndarray]  # of values, in the drawing
Tick = tuple[float, str]  # its place and its name
Shape = tuple[str, str, Colour]  # its class in the page's style, and a path of SVG


class Entry(NamedTuple):
    """Of the legend: a series, with its last value and where that is. points: for the page's script, places in the drawing (x, y)
    and what they are, in words (at, values). Each is one text with separators, and empty for a rule, which is the same
    everywhere."""

    series: Series
    value: str
    at: str
    points: dict[str, str]


class Vector(NamedTuple):
    """A plot as the page draws it. left: where its axes begin. rows: entries that are read together, each with what leads them."""

    plot: Plot
    left: float
    xticks: Sequence[Tick]
    yticks: Sequence[Tick]
    shapes: Sequence[Shape]
    rows: Sequence[tuple[str, Sequence[Entry]]]

    # The drawing's size, which the page scales, and where its axes end.
    width, height = 440, 270
    top, right, bottom = 26, 426, 228


def vector(plot: Plot) -> Vector:
    left = 12 + LETTER * max((len(name) for _, name in plot.y.ticks), default=0)

    def across(values: np.ndarray) -> np.ndarray:
        return left + plot.x.place(values) * (Vector.right - left)

    def down(values: np.ndarray) -> np.ndarray:
        return Vector.bottom - plot.y.place(values).clip(0, 1) * (Vector.bottom - Vector.top)

    xticks, yticks = (
        [(round(float(place(np.array(value))), 1), name) for value, name in axis.ticks]
        for axis, place in ((plot.x, across), (plot.y, down))
    )
    rows = [
        (
            f"{group}, {plot.x.label}" if group else plot.x.label,
            [_entry(plot, series, across(series.x), down(series.y)) for series in members],
        )
        for group, members in itertools.groupby(plot.series, key=lambda series: series.group)
    ]
    shapes = [(*shape, series.colour) for series in plot.series for shape in _shapes(series, across, down)]
    return Vector(plot, round(left, 1), xticks, yticks, shapes, rows)


def _entry(plot: Plot, series: Series, xs: np.ndarray, ys: np.ndarray) -> Entry:
    known = np.flatnonzero(np.isfinite(xs) & np.isfinite(ys))
    values, ats = [_value(plot, series, place) for place in known], [plot.x.tell(series.x[place]) for place in known]
    last = (values[-1], ats[-1]) if len(known) else ("–", "")
    if series.look == "rule":  # nothing to point at
        known, values, ats = [], [], []
    x, y = (" ".join(f"{each[place]:.1f}" for place in known) for each in (xs, ys))
    return Entry(series, *last, {"x": x, "y": y, "at": SEPARATOR.join(ats), "values": SEPARATOR.join(values)})


def _value(plot: Plot, series: Series, place: int) -> str:
    told = plot.y.tell(float(series.y[place]))
    if series.band is None or not np.isfinite(series.band[place]).all():
        return told
    low, high = (plot.y.tell(float(edge)) for edge in series.band[place])
    return f"{told} ({low} to {high})"


def _shapes(series: Series, across: Place, down: Place) -> Iterator[tuple[str, str]]:
    """Kind and path of each."""
    xs, ys = across(series.x), down(series.y)
    if series.look == "stairs":
        first, *edges = across(series.edges)
        top = "".join(f"V{y:.1f}H{edge:.1f}" for y, edge in zip(ys, edges, strict=True))
        yield "stairs", f"M{first:.1f} {Vector.bottom}{top}V{Vector.bottom}"
        return
    if series.band is not None:
        low, high = (_points(xs, down(edge)) for edge in series.band.T)
        around = [both for both in zip(high, low, strict=True) if all(both)]
        if around:
            yield "band", "M" + "L".join([up for up, _ in around] + [down for _, down in around[::-1]]) + "z"
    points = _points(xs, ys)
    if series.look != "dots":  # a curve with gaps where a point has no place
        runs = (list(run) for known, run in itertools.groupby(points, key=bool) if known)
        yield series.look, "".join("M" + "L".join(run) for run in runs)
    if series.dotted or series.look == "dots":
        yield "dots", "".join(f"M{point}h0" for point in points if point)


def _points(xs: np.ndarray, ys: np.ndarray) -> list[str]:
    """Empty where one has no place."""
    known = np.isfinite(xs) & np.isfinite(ys)
    return [f"{x:.1f} {y:.1f}" if there else "" for x, y, there in zip(xs, ys, known, strict=True)]
