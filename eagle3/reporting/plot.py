"""Describes a chart (axes with ticks, series, and the sentence that defines them), and draws it with matplotlib: as an
SVG image for a page, or as a PNG file for documents, chats and slides."""

import io
import itertools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, Locator, LogLocator, MaxNLocator

from eagle3.reporting.record import mean, short, tokens_label

MOST_POINTS = 500  # points in a series; more than a chart can show
SMOOTHED = 20  # a trend averages over this part of the steps
WIDE = 20  # least ratio of greatest to least value for a logarithmic axis
Look = Literal["line", "pale", "dashed", "rule", "dots", "stairs"]


# Okabe and Ito's palette, whose colours colour-blind people can tell apart.
BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"
GREY = "#6b7280"
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)


def shades(count: int) -> list[str]:
    """Colours for ordered series; the first stands out most."""
    return [matplotlib.colors.to_hex(matplotlib.colormaps["viridis"](0.88 * at)) for at in np.linspace(0, 1, count)]


def tick_name(value: float) -> str:
    """Label of a tick, for example 0.25, 4012, 12k, 1.5M, 5e-5."""
    if 0 < abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.10g}" if abs(value) < 1e4 else short(value, 4)


class Axis(NamedTuple):
    """An axis, which covers what is drawn."""

    label: str
    ticks: Locator
    tick_name: Callable[[float], str] = tick_name
    scale: Literal["linear", "log"] = "linear"
    margin: float = 0.04  # share of it left free beyond the values
    low: float | None = None  # its lower end, whatever the values


class Series(NamedTuple):
    """One series of a plot."""

    label: str
    x: np.ndarray  # [n]; of a histogram the edges [n + 1] of its bins
    y: np.ndarray  # [n], nan if there is no value
    colour: str
    # line, pale, dashed: curves; rule: a level that is the same everywhere, its only y; dots: points without a curve;
    # stairs: a histogram
    look: Look = "line"
    dotted: bool = False  # whether a curve's points are drawn
    band: np.ndarray | None = None  # [n, 2], band around y
    group: str = ""  # series in a group are read together, for example those for training or for held-out text


class Plot(NamedTuple):
    """A chart, independent of how it is drawn."""

    name: str  # name of its file
    title: str
    about: str  # defines its numbers, in a sentence or two
    alt: str  # describes the chart, with its numbers, for people who cannot see it
    x: Axis
    y: Axis
    series: Sequence[Series]


def trend(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Like `thinned`, with each value the mean of the last twentieth of the steps, since one batch says little."""
    steps, values = thinned(steps, values)
    span = max(1, len(values) // SMOOTHED)
    return steps, np.array([mean(values[max(0, end - span) : end]) for end in range(1, len(values) + 1)])


def thinned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reduce a long curve to the means of equally long runs of points. steps: [n]; values: [n] or [n, k], may be
    nan."""
    if len(steps) <= MOST_POINTS:
        return steps, values
    return tuple(np.array([*map(mean, np.array_split(each, MOST_POINTS))]) for each in (steps, values))


def level(label: str, height: float, colour: str = GREY) -> Series:
    """A level that is the same everywhere. label: names its height, too."""
    return Series(label, np.zeros(0), np.array([height]), colour, "rule")


def short_number(value: float) -> str:
    """The value with about four digits, for example 0.3612, 21.05, 2.000, 4,012, 9.86e-5; `unknown` for nan."""
    if not np.isfinite(value):
        return "unknown"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return tick_name(value) if 0 < abs(value) < 1e-3 else f"{value:#.4g}"


def step_axis() -> Axis:
    return count_axis("optimiser step")


def count_axis(label: str) -> Axis:
    """An axis of whole numbers, which it just covers."""
    return Axis(label, MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]), margin=0)


def number_axis(label: str, low: float | None = None) -> Axis:
    return Axis(label, MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]), low=low)


def wide_axis(label: str, values: np.ndarray) -> Axis:
    """An axis for these values: logarithmic, if a linear one would hide some."""
    finite = values[np.isfinite(values)]
    low, high = finite.min(), finite.max()
    if not 0 < low < high / WIDE:
        return number_axis(label)
    return Axis(label, LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)), scale="log")


def share_axis(label: str) -> Axis:
    """An axis from 0, in percent."""
    ticks = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10])
    return Axis(label, ticks, lambda tick: f"{100 * tick:g}%", low=0)


def context_axis(label: str, contexts: np.ndarray) -> Axis:
    """A logarithmic axis with a tick at each context, or at some of them if there are many."""
    every = 1 + (len(contexts) - 1) // 9
    return Axis(label, FixedLocator(contexts[::every]), tokens_label, "log")


# Drawn by matplotlib --------------------------------------------------------------------------------------------------

# Narrow, so that letters keep their size on a phone, whose width of 340 CSS pixels corresponds to 340 points.
WIDTH, HEIGHT, DPI = 4.7, 3.5, 180  # inches, dots per inch
LETTERS = 13  # letters of a legend in an inch
INK = "#1f2933"
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "axes.axisbelow": True,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "text.parse_math": False,  # a $ in a run's name is only a $
    "figure.facecolor": "white",
    "svg.hashsalt": "",  # names of its parts that do not change from one drawing to the next
}
# A PNG names no software, an SVG no date, so that a run's charts are the same files each time.
METADATA = {"png": {"Software": None}, "svg": {"Date": None}}
LOOKS = {
    "line": {},
    "pale": {"alpha": 0.45},
    "dashed": {"linestyle": "--"},
    "rule": {"linestyle": ":"},
    "dots": {"linestyle": "", "marker": "o", "markersize": 6, "markeredgecolor": "white"},
    "stairs": {"linewidth": 4},
}
MARKERS = "osD^vP"  # for series whose points are drawn


def image(plot: Plot, form: Literal["png", "svg"], width: float = WIDTH) -> bytes:
    """The chart as a file: a PNG with its title, or an SVG without, for a page that has one. width: in inches."""
    title = plot.title if form == "png" else ""
    written = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        drawn(plot, width, title).savefig(written, format=form, metadata=METADATA[form])
    return written.getvalue()


def drawn(plot: Plot, width: float = WIDTH, title: str = "") -> Figure:
    figure = Figure(figsize=(width, HEIGHT), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left")
    for axis, name, its_ticks in ((plot.x, "x", axes.xaxis), (plot.y, "y", axes.yaxis)):
        axes.set(**{f"{name}label": axis.label, f"{name}scale": axis.scale, f"{name}margin": axis.margin})
        its_ticks.set_major_locator(axis.ticks)
        its_ticks.set_major_formatter(lambda value, _, name=axis.tick_name: name(value))
    axes.minorticks_off()
    groups = [list(members) for _, members in itertools.groupby(plot.series, key=lambda series: series.group)]
    looks = [(its.label, _look(its, place)) for place, its in enumerate(groups[0])]
    # the other groups use the colours of the first
    looks += [(others[0].group, _look(others[0]) | {"color": GREY}) for others in groups[1:]]
    entries = [Line2D([], [], label=label, **look) for label, look in looks]
    for members in groups:
        for place, series in enumerate(members):
            _draw(axes, series, place)
    axes.set(xlim=(plot.x.low, None), ylim=(plot.y.low, None))
    columns = int(LETTERS * width) // (max(len(entry.get_label()) for entry in entries) + 6)
    columns = min(len(entries), 5, max(1, columns))
    # below the axes, where it hides no data
    figure.legend(handles=entries, loc="outside lower center", ncols=columns, handlelength=1.5, columnspacing=1.1)
    return figure


def _look(series: Series, place: int = 0) -> dict:
    marked = {"marker": MARKERS[place % len(MARKERS)], "markersize": 5} if series.dotted else {}
    return {"color": series.colour, "linewidth": 1.6} | marked | LOOKS[series.look]


def _draw(axes: Axes, series: Series, place: int) -> None:
    if series.look == "stairs":
        axes.stairs(series.y, series.x, color=series.colour, fill=True, alpha=0.25)
        axes.stairs(series.y, series.x, color=series.colour, linewidth=1.4)
        return
    if series.look == "rule":
        axes.axhline(series.y[0], **_look(series))
        return
    if series.band is not None:
        axes.fill_between(series.x, *series.band.T, color=series.colour, alpha=0.18, linewidth=0)
    dots = series.look == "dots" or series.dotted
    dense = {"linewidth": 1} if series.look in ("line", "pale") and not dots else {}
    axes.plot(series.x, series.y, zorder=3 if dots else 2, clip_on=not dots, **_look(series, place) | dense)
