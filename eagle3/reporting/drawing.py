"""A chart as a PNG file, by matplotlib: for a document, a chat, or a slide."""

import io
import itertools
import math

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from eagle3.reporting.plot import GREY, Plot, Series

# Narrow, so that its letters keep their size on a phone: 340 CSS pixels there are 340 points.
WIDTH, HEIGHT, DPI = 4.7, 3.5, 180  # inches, dots an inch
INK = "#1f2933"
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.edgecolor": GREY.light,
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
    "text.parse_math": False,  # a $ in a run's name is a $
    "figure.facecolor": "white",
}
LOOKS = {
    "line": {},
    "pale": {"alpha": 0.45},
    "dashed": {"linestyle": "--"},
    "rule": {"linestyle": ":"},
    "dots": {"linestyle": "", "marker": "o", "markersize": 6, "markeredgecolor": "white"},
    "stairs": {"linewidth": 4},
}
MARKERS = "osD^vP"  # of series whose points show


def png(plot: Plot, width: float = WIDTH) -> bytes:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, HEIGHT), dpi=DPI, layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(plot.title, loc="left")
        for axis, name in ((plot.x, "x"), (plot.y, "y")):
            values, names = ([tick[side] for tick in axis.ticks] for side in (0, 1))
            axes.set(**{f"{name}label": axis.label, f"{name}scale": "log" if axis.base else "linear"})
            axes.set(**{f"{name}lim": (axis.low, axis.high), f"{name}ticks": values, f"{name}ticklabels": names})
        axes.minorticks_off()
        groups = [list(members) for _, members in itertools.groupby(plot.series, key=lambda series: series.group)]
        entries = [
            Line2D([], [], label=_label(plot, series), **_look(series, place)) for place, series in enumerate(groups[0])
        ]
        for others in groups[1:]:  # in the colours of the first
            entries.append(Line2D([], [], label=others[0].group, **_look(others[0]) | {"color": GREY.light}))
        for members in groups:
            for place, series in enumerate(members):
                _draw(axes, series, place)
        columns = math.ceil(len(entries) / math.ceil(len(entries) / 5))
        if max(len(entry.get_label()) for entry in entries) > 20:
            columns = 1 if width == WIDTH else 3
        # below the axes, so that it hides no data
        figure.legend(handles=entries, loc="outside lower center", ncols=columns, handlelength=1.5, columnspacing=1.1)
        written = io.BytesIO()
        figure.savefig(written, format="png", metadata={"Software": None})
    return written.getvalue()


def _label(plot: Plot, series: Series) -> str:
    return f"{series.label} {plot.y.tell(float(series.y[0]))}" if series.look == "rule" else series.label


def _look(series: Series, place: int = 0) -> dict:
    marked = {"marker": MARKERS[place % len(MARKERS)], "markersize": 5} if series.dotted else {}
    return {"color": series.colour.light, "linewidth": 1.6} | marked | LOOKS[series.look]


def _draw(axes: Axes, series: Series, place: int) -> None:
    if series.look == "stairs":
        axes.stairs(series.y, series.edges, color=series.colour.light, fill=True, alpha=0.25)
        axes.stairs(series.y, series.edges, color=series.colour.light, linewidth=1.4)
        return
    if series.band is not None:
        axes.fill_between(series.x, *series.band.T, color=series.colour.light, alpha=0.18, linewidth=0)
    dots = series.look == "dots" or series.dotted
    dense = {"linewidth": 1} if series.look in ("line", "pale") and not dots else {}
    axes.plot(series.x, series.y, zorder=3 if dots else 2, clip_on=not dots, **_look(series, place) | dense)
