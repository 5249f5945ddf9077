"""A chart as the shapes and words of an SVG drawing and its legend, in which the page's script finds the values to show."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from eagle3.reporting.plot import Axis, Colour, Plot, Series

WIDTH, HEIGHT = 440, 270  # of the drawing; the page scales it
TOP, RIGHT, BOTTOM, LETTER = 26, 14, 42, 8.5
SEPARATOR = ";"
Place = Callable[[np.ndarray], np.ndarray]  # of values, in the drawing


class Tick(NamedTuple):
    place: float
    name: str


class Shape(NamedTuple):
    """kind: its class in the page's style. path: of SVG."""

    kind: str
    path: str
    colour: Colour


class Entry(NamedTuple):
    """Of the legend: a series, with its last value and where that is. xs, ys: places of its points in the drawing; ats, values:
    what they are, in words. Each is one text with separators, and empty for a rule, which is the same everywhere."""

    label: str
    colour: Colour
    look: str
    value: str
    at: str
    xs: str
    ys: str
    ats: str
    values: str


class Row(NamedTuple):
    """Entries that are read together, and where: `lead` and then `at`, the first one's."""

    lead: str
    at: str
    entries: Sequence[Entry]


class Vector(NamedTuple):
    title: str
    about: str
    alt: str
    left: float
    right: float
    top: float
    bottom: float
    xlabel: str
    ylabel: str
    xticks: Sequence[Tick]
    yticks: Sequence[Tick]
    shapes: Sequence[Shape]
    rows: Sequence[Row]


def vector(plot: Plot) -> Vector:
    left = 12 + LETTER * max((len(name) for _, name in plot.y.ticks), default=0)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def across(values: np.ndarray) -> np.ndarray:
        return left + plot.x.place(values) * (right - left)

    def down(values: np.ndarray) -> np.ndarray:
        return bottom - plot.y.place(values).clip(0, 1) * (bottom - TOP)

    rows = []
    for group, members in itertools.groupby(plot.series, key=lambda series: series.group):
        entries = [_entry(plot, series, across(series.x), down(series.y)) for series in members]
        rows.append(Row(f"{group}, {plot.x.label}" if group else plot.x.label, entries[0].at, entries))
    return Vector(
        plot.title,
        plot.about,
        plot.alt,
        round(left, 1),
        right,
        TOP,
        bottom,
        plot.x.label,
        plot.y.label,
        _ticks(plot.x, across),
        _ticks(plot.y, down),
        [shape for series in plot.series for shape in _shapes(series, across, down, bottom)],
        rows,
    )


def _ticks(axis: Axis, place: Place) -> list[Tick]:
    return [Tick(round(float(place(np.array(value))), 1), name) for value, name in axis.ticks]


def _entry(plot: Plot, series: Series, xs: np.ndarray, ys: np.ndarray) -> Entry:
    known = np.flatnonzero(np.isfinite(xs) & np.isfinite(ys))
    values, ats = [_value(plot.y, series, place) for place in known], [plot.x.tell(series.x[place]) for place in known]
    last = (values[-1], ats[-1]) if len(known) else ("–", "")
    if series.look == "rule":  # nothing to point at
        known, values, ats = [], [], []
    return Entry(
        series.label,
        series.colour,
        series.look,
        *last,
        " ".join(f"{xs[place]:.1f}" for place in known),
        " ".join(f"{ys[place]:.1f}" for place in known),
        SEPARATOR.join(ats),
        SEPARATOR.join(values),
    )


def _value(axis: Axis, series: Series, place: int) -> str:
    told = axis.tell(float(series.y[place]))
    if series.band is None or not np.isfinite(series.band[place]).all():
        return told
    low, high = series.band[place]
    return f"{told} ({axis.tell(float(low))} to {axis.tell(float(high))})"


def _shapes(series: Series, across: Place, down: Place, bottom: float) -> list[Shape]:
    xs, ys = across(series.x), down(series.y)
    if series.look == "stairs":
        edges = across(series.edges)
        top = "".join(f"V{y:.1f}H{edge:.1f}" for y, edge in zip(ys, edges[1:], strict=True))
        return [Shape("stairs", f"M{edges[0]:.1f} {bottom}{top}V{bottom}", series.colour)]
    shapes = []
    if series.band is not None:
        low, high = (down(edge) for edge in series.band.T)
        known = np.isfinite(xs) & np.isfinite(low) & np.isfinite(high)
        around = [*zip(xs[known], high[known], strict=True), *zip(xs[known][::-1], low[known][::-1], strict=True)]
        if around:
            shapes.append(Shape("band", "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in around) + "z", series.colour))
    if series.look != "dots":
        shapes.append(Shape(series.look, _line(xs, ys), series.colour))
    if series.dotted or series.look == "dots":
        known = np.isfinite(xs) & np.isfinite(ys)
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in zip(xs[known], ys[known], strict=True))
        shapes.append(Shape("dots", dots, series.colour))
    return shapes


def _line(xs: np.ndarray, ys: np.ndarray) -> str:
    """A curve with gaps where a point has no place."""
    path, pen = [], "M"
    for x, y in zip(xs, ys, strict=True):
        if np.isfinite(x) and np.isfinite(y):
            path.append(f"{pen}{x:.1f} {y:.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(path)
