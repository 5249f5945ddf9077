"""How charts look: size, colours that colour-blind people tell apart, legends beside the data, and PNG bytes."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eagle3.reporting.curves import mean, tokens_label

# Narrow, so that its letters keep their size on a phone: 340 CSS pixels there are 340 points.
WIDTH, HEIGHT, DPI = 4.7, 3.5, 180  # inches, dots an inch
# Okabe and Ito's palette.
BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
SERIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
GREY, INK = "#6b7280", "#1f2933"
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
    "text.parse_math": False,  # a $ in a run's name is a $
    "figure.facecolor": "white",
}
MOST_POINTS = 500  # of a curve; more than a chart has dots to show


class Chart(NamedTuple):
    """name: of its file. alt: what it shows, in a sentence with its numbers, for those who do not see it."""

    name: str
    title: str
    alt: str
    png: bytes


class Drawing:
    """A figure being drawn on `axes`."""

    def __init__(self, name: str, title: str, xlabel: str, ylabel: str, width: float = WIDTH) -> None:
        self.name, self.title = name, title
        self.figure = Figure(figsize=(width, HEIGHT), dpi=DPI, layout="constrained")
        self.axes: Axes = self.figure.add_subplot()
        self.axes.set_title(title, loc="left")
        self.axes.set_xlabel(xlabel)
        self.axes.set_ylabel(ylabel)

    def legend(self, columns: int, **options) -> None:
        """Below the axes, so that it hides no data."""
        self.figure.legend(loc="outside lower center", ncols=columns, handlelength=1.5, columnspacing=1.1, **options)

    def chart(self, alt: str) -> Chart:
        """Finished."""
        written = io.BytesIO()
        self.figure.savefig(written, format="png", metadata={"Software": None})
        return Chart(self.name, self.title, alt, written.getvalue())


@contextmanager
def style() -> Iterator[None]:
    with matplotlib.rc_context(STYLE):
        yield


def shades(count: int) -> list[str]:
    """Colours of an ordered series, dark to light."""
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.88, max(1, count)))
    return [matplotlib.colors.to_hex(colour) for colour in colours]


def thinned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A long curve by the means of equal runs of points. steps: [n]; values: [n] or [n, k], nan where there is none."""
    if len(steps) <= MOST_POINTS:
        return steps, values
    edges = np.linspace(0, len(steps), MOST_POINTS + 1).astype(int)
    runs = [slice(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    return np.array([steps[run].mean() for run in runs]), np.array([mean(values[run]) for run in runs])


def context_axis(axes: Axes, contexts: np.ndarray) -> None:
    """A logarithmic axis with each context's own tick."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [tokens_label(context) for context in contexts])
    axes.minorticks_off()
    axes.tick_params(axis="x", labelrotation=45 if len(contexts) > 9 else 0)
