"""What a chart shows: its axes with their ticks, its series, and the sentence that defines them. Both the PNG (drawing.py) and
the page's own drawing (vector.py) are made from it."""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import matplotlib
import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator

from eagle3.reporting.curves import mean, short, tokens_label

MOST_POINTS = 500  # of a series; more than a chart has dots to show
WIDE = 20  # from the least to the greatest value: from here on an axis is logarithmic, where it may be
MARGIN = 0.04  # of an axis, beyond the values
MOST, MOST_SPREAD = 1e100, 1e12  # numbers beyond, of a run gone wrong, stand at an axis's end
Look = Literal["line", "pale", "dashed", "rule", "dots", "stairs"]


class Colour(NamedTuple):
    """On a white page, and on a dark one."""

    light: str
    dark: str


# Okabe and Ito's palette, which colour-blind people tell apart, and its like for dark pages.
BLUE, ORANGE = Colour("#0072b2", "#4db2f0"), Colour("#e69f00", "#f2b73f")
GREEN, VERMILLION = Colour("#009e73", "#2fc99b"), Colour("#d55e00", "#ff8f4d")
PURPLE, SKY = Colour("#cc79a7", "#e39ac3"), Colour("#56b4e9", "#8fd0f7")
GREY = Colour("#6b7280", "#9aa5b1")
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)


def shades(count: int) -> list[Colour]:
    """Colours of an ordered series; the first stands out most."""
    scale, steps = matplotlib.colormaps["viridis"], np.linspace(0, 1, max(1, count))
    both = zip(scale(0.88 * steps), scale(1 - 0.58 * steps), strict=True)
    return [Colour(*(matplotlib.colors.to_hex(colour) for colour in pair)) for pair in both]


class Axis(NamedTuple):
    """From low to high. ticks: each with its name. tell: a value in words, for people who point at it."""

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    tell: Callable[[float], str]
    base: int | None = None  # of a logarithmic axis

    def place(self, values: np.ndarray) -> np.ndarray:
        """Of values, from 0 at the axis's low end to 1 at its high end; nan for what has no place."""
        values = np.clip(values, -MOST, MOST)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            if self.base is None:
                return (values - self.low) / (self.high - self.low)
            return np.log(values / self.low) / math.log(self.high / self.low)


class Series(NamedTuple):
    """x, y: [n], nan in y where there is none. look: line, pale and dashed are curves; rule a level, the same everywhere; dots stand by
    themselves; stairs a histogram with `edges` [n + 1] around x. dotted: a curve whose points show. band: [n, 2], around y.
    group: series of one are read together, such as those of training and those of held-out text."""

    label: str
    x: np.ndarray
    y: np.ndarray
    colour: Colour
    look: Look = "line"
    dotted: bool = False
    band: np.ndarray | None = None
    edges: np.ndarray | None = None
    group: str = ""


class Plot(NamedTuple):
    """name: of its file. about: what its numbers are, in a sentence or two. alt: what it shows, with its numbers, for those who do
    not see it."""

    name: str
    title: str
    about: str
    alt: str
    x: Axis
    y: Axis
    series: Sequence[Series]


def thinned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A long curve by the means of equal runs of points. steps: [n]; values: [n] or [n, k], nan where there is none."""
    if len(steps) <= MOST_POINTS:
        return steps, values
    edges = np.linspace(0, len(steps), MOST_POINTS + 1).astype(int)
    runs = [slice(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    return np.array([steps[run].mean() for run in runs]), np.array([mean(values[run]) for run in runs])


def level(label: str, x: Axis, height: float, colour: Colour = GREY) -> Series:
    """The same everywhere."""
    return Series(label, np.array([x.low, x.high]), np.array([height, height]), colour, "rule")


def tick_name(value: float) -> str:
    """Of one tick among others: 0.25, 4012, 12k, 1.5M, 5e-5."""
    if 0 < abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.10g}" if abs(value) < 1e4 else short(value, 4)


def short_number(value: float) -> str:
    """In four digits or so: 0.3612, 21.05, 2.000, 4,012, 9.86e-5."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return tick_name(value) if 0 < abs(value) < 1e-3 else f"{value:#.4g}"


def step_axis(steps: np.ndarray) -> Axis:
    return count_axis("optimiser step", steps, lambda step: f"{step:,.0f}")


def count_axis(label: str, counts: np.ndarray, tell: Callable[[float], str] = tick_name) -> Axis:
    """Of whole numbers, as they are."""
    low, high = _ends([counts])
    ticks = MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]).tick_values(low, high)
    return Axis(label, low, high, _within(ticks, low, high), tell)


def number_axis(label: str, values: Sequence[np.ndarray], *, zero: bool = False, logarithmic: bool = False) -> Axis:
    """Around the values. zero: from 0. logarithmic: where the values spread so wide that a linear axis would hide most."""
    low, high = _ends(values)
    if logarithmic and low > 0 and high > WIDE * low:
        low, high = max(low, high / MOST_SPREAD) / 1.1, high * 1.1
        ticks = LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)).tick_values(low, high)
        return Axis(label, low, high, _within(ticks, low, high), short_number, base=10)
    low = min(0.0, low) if zero else low - MARGIN * (high - low)
    high += MARGIN * (high - low)
    ticks = MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return Axis(label, low, high, _within(ticks, low, high), short_number)


def share_axis(label: str, most: float = 1.0) -> Axis:
    """From 0 to `most`, in percent."""
    ticks = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]).tick_values(0, most)
    return Axis(label, 0, most, _within(ticks, 0, most, lambda tick: f"{100 * tick:g}%"), lambda share: f"{share:.1%}")


def context_axis(label: str, contexts: np.ndarray) -> Axis:
    """Logarithmic, with each context's own tick, or each other's where they are many."""
    every = 1 + (len(contexts) - 1) // 9
    ticks = [(float(context), tokens_label(context)) for context in contexts[::every]]
    return Axis(label, float(contexts[0]) / 1.15, float(contexts[-1]) * 1.15, ticks, tokens_label, base=2)


def _ends(values: Sequence[np.ndarray]) -> tuple[float, float]:
    """The least and the greatest finite value, apart from one another."""
    finite = np.concatenate([np.ravel(each) for each in values])
    finite = finite[np.abs(finite) <= MOST]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    return (low, high) if high > low else (low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5))


def _within(
    ticks: np.ndarray, low: float, high: float, name: Callable[[float], str] = tick_name
) -> list[tuple[float, str]]:
    slack = 1e-9 * (high - low)
    return [(float(tick), name(float(tick))) for tick in ticks if low - slack <= tick <= high + slack]
