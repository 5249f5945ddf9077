"""The charts of one run, from the contents of its folder. A chart that cannot be drawn says what is missing."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from matplotlib.ticker import FixedLocator

from eagle3.console import counted
from eagle3.evaluation.context_results import ContextJudgement
from eagle3.planning.payoff import ESTIMATED
from eagle3.reporting.plot import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SMOOTHED,
    VERMILLION,
    Axis,
    Plot,
    Series,
    context_axis,
    count_axis,
    level,
    number_axis,
    shades,
    share_axis,
    short_number,
    step_axis,
    thinned,
    trend,
    wide_axis,
)
from eagle3.reporting.record import (
    RunRecord,
    column,
    columns,
    mean,
    tokens_label,
)

FEW = 700  # verifications; with fewer, the acceptance length is uncertain by more than about 0.05
TRAINING, HELD_OUT = "training", "held out"
PARTS = {"train": TRAINING, "held_out": HELD_OUT}
ABOUT_HELD_OUT = "Tokens produced per pass of the target, if the held-out answers were decoded greedily."
ABOUT_RATE = (
    "Probability that sampling at temperature 1 accepts the draft of each TTT step, given that all before it are "
    "accepted. Early in training it is far above the accuracies: flat distributions overlap even if their best "
    "tokens differ."
)
ABOUT_POSITIONS = (
    "Share of the verifications that accepted a draft and all before it. Their sum is the number of accepted drafts "
    "per verification."
)


class Absent(NamedTuple):
    """A chart that cannot be drawn, with what is missing."""

    name: str
    title: str
    why: str


def loss_label(run: RunRecord) -> str:
    return "nats a token, weighted sum" if run.key("training.loss") == "kl" else "weighted sum of the TTT steps"


def about_loss(run: RunRecord) -> str:
    """The definition of `loss`, wherever it appears."""
    steps, decay = run.key("training.ttt_steps"), run.key("training.step_decay")
    steps = "the TTT steps" if steps is None else f"the {steps} TTT steps"
    weights = "" if decay is None else f", each weighted {decay:g} times the one before"
    return f"What training minimises, loss in the step lines: the losses of {steps}{weights}, summed."


def _loss(run: RunRecord, name: str, title: str, key: str) -> Plot:
    values, held_out = column(run.train, key), column(run.held_out, key)
    all_steps = column(run.train, "step")
    series = [
        Series("each step", *thinned(all_steps, values), GREY, "pale"),
        Series(f"{TRAINING} ({_window(values)}, {_from_to(values)})", *trend(all_steps, values), BLUE),
    ]
    alt = f"{title}: {_from_to(values)} over {len(values)} optimiser steps"
    if np.isfinite(held_out).any():
        series.append(Series(HELD_OUT, column(run.held_out, "step"), held_out, VERMILLION, "dots"))
        alt += f"; held out it ends at {short_number(held_out[-1])}"
    return Plot(name, title, about_loss(run), f"{alt}.", step_axis(), number_axis(loss_label(run)), series)


def _from_to(values: np.ndarray) -> str:
    tenth = max(1, len(values) // 10)
    return f"from {short_number(mean(values[:tenth]))} to {short_number(mean(values[-tenth:]))}"


def _window(values: np.ndarray) -> str:
    return f"mean of {counted(max(1, len(values) // SMOOTHED), 'step')}"


def _step_losses(run: RunRecord, name: str, title: str, key: str) -> Plot:
    label = "nats a token" if run.key("training.loss") == "kl" else "loss"
    return _by_ttt_step(run, name, title, key, label, "Each TTT step's own loss, without a weight.")


def _by_ttt_step(run: RunRecord, name: str, title: str, key: str, label: str, about: str) -> Plot:
    """A chart with training as lines and held-out text as dots, in one colour per TTT step."""
    curves, held_out = columns(run.train, key), columns(run.held_out, key)
    all_steps, colours = column(run.train, "step"), shades(curves.shape[1])
    steps, smooth = trend(all_steps, curves)
    series = [
        Series(f"step {place}", at, values, colour, look, group=group)
        for group, at, of_steps, look in (
            (f"{TRAINING}, {_window(curves)}", steps, smooth, "line"),
            (HELD_OUT, column(run.held_out, "step"), held_out, "dots"),
        )
        for place, (values, colour) in enumerate(zip(of_steps.T, colours, strict=False), 1)
    ]
    alt = (
        f"{title} over {len(curves)} optimiser steps: TTT step 1 goes {_from_to(curves[:, 0])}, "
        f"TTT step {curves.shape[1]} {_from_to(curves[:, -1])}"
    )
    if len(held_out):
        alt += f"; held out they end at {short_number(held_out[-1][0])} and {short_number(held_out[-1][-1])}"
    return Plot(name, title, about, f"{alt}.", step_axis(), number_axis(label), series)


def _norm(run: RunRecord, name: str, title: str, key: str) -> Plot:
    clip, skip = run.key("training.gradient_clipping"), run.key("training.skip_above_norm")
    clipped = f", before it is clipped at training.gradient_clipping {clip:g}" if clip else ""
    about = (
        f"Norm of the whole gradient{clipped}"
        f"{f'; a step above training.skip_above_norm {skip:g} is skipped' if skip else ''}."
    )
    return _of_steps(run, name, title, key, wide_axis("norm", column(run.train, key)), about, ORANGE)


def _of_steps(run: RunRecord, name: str, title: str, key: str, axis: Axis, about: str, colour: str) -> Plot:
    values, all_steps = column(run.train, key), column(run.train, "step")
    series = Series(title.lower(), *thinned(all_steps, values), colour)
    alt = f"{title}: {_from_to(values)}, at most {short_number(float(np.nanmax(values)))}."
    return Plot(name, title, about, alt, step_axis(), axis, [series])


def _positions(run: RunRecord, name: str, title: str) -> Plot | None:
    if not run.evaluation:
        return None
    shares = run.evaluation.position_acceptance
    places = np.arange(1, len(shares) + 1)
    return Plot(
        name,
        title,
        ABOUT_POSITIONS,
        f"{title}, from the first: {', '.join(f'{share:.2f}' for share in shares)}.",
        Axis("draft position", FixedLocator(places)),
        share_axis("of verifications"),
        [Series(f"decoding, {run.evaluation.rule}", places, np.array(shares), BLUE, dotted=True)],
    )


def measured_curve(judged: ContextJudgement, label: str = "measured", colour: str = VERMILLION) -> Series:
    """Acceptance lengths by context, with their confidence intervals if known."""
    rows = [(each.context, each.acceptance_length, *(each.interval or (np.nan, np.nan))) for each in judged.contexts]
    contexts, lengths, *ends = np.array(rows).T
    band = np.stack(ends, 1) if any(each.interval for each in judged.contexts) else None
    return Series(label, contexts, lengths, colour, dotted=True, band=band)


def estimated_curve(run: RunRecord) -> Series | None:
    """Acceptance lengths by context in the exported draft's held-out record. nan for contexts with fewer than FEW
    verifications; None if all have fewer."""
    names = ("contexts", "acceptance_by_context", "verifications_by_context")
    contexts, lengths, verifications = (columns([run.exported], name)[0] for name in names)
    known = verifications >= FEW
    if not len(contexts) or not (known & np.isfinite(lengths)).any():
        return None
    lengths = np.where(known, lengths, np.nan)
    return Series("estimated from hidden states, greedy", contexts, lengths, BLUE, "dashed", dotted=True)


def contexts_plot(name: str, series: Sequence[Series]) -> Plot:
    title = "Acceptance length by context"
    summary = "; ".join(
        f"{curve.label} "
        + ", ".join(f"{y:.2f} at {tokens_label(x)}" for x, y in zip(curve.x, curve.y, strict=True) if np.isfinite(y))
        for curve in series
    )
    banded = any(each.band is not None for each in series)
    return Plot(
        name,
        title,
        "Tokens produced per pass of the target, accepted drafts and its own, after contexts of up to this many tokens."
        + (" Bands: 95% intervals." if banded else ""),
        f"{title}: {summary}.",
        context_axis("context in tokens", np.unique(np.concatenate([each.x for each in series]))),
        number_axis("tokens per verification", low=1),
        series,
    )


def _contexts(run: RunRecord, name: str, _: str) -> Plot | None:
    real, estimated = run.by_context, estimated_curve(run)
    series = [measured_curve(real, f"real decoding, {real.rule}")] if real else []
    series += [estimated] if estimated else []
    return contexts_plot(name, series) if series else None


def pay_off_plot(name: str, series: Sequence[Series], about: str) -> Plot:
    """Speed-ups by context, with a level at 1, below which drafting loses."""
    title = "Speed-up by context"
    summary = "; ".join(
        f"{label} from {gains[0]:.2f} at {tokens_label(contexts[0])} to {gains[-1]:.2f} at {tokens_label(contexts[-1])}"
        for label, contexts, gains, *_ in series
    )
    return Plot(
        name,
        title,
        about,
        f"{title}: {summary}.",
        context_axis("context in tokens", np.unique(np.concatenate([each.x for each in series]))),
        number_axis("times as fast as without a draft"),
        [*series, level("no gain 1.00", 1.0)],
    )


def _held_out(run: RunRecord, name: str, title: str) -> Plot | None:
    steps, lengths = column(run.held_out, "step"), column(run.held_out, "acceptance_length")
    if not np.isfinite(lengths).any():
        return None
    return Plot(
        name,
        title,
        ABOUT_HELD_OUT,
        f"{title}: from {short_number(lengths[0])} to {short_number(lengths[-1])}.",
        step_axis(),
        number_axis("tokens per verification"),
        [Series(HELD_OUT, steps, lengths, VERMILLION, dotted=True)],
    )


def _pay_off(run: RunRecord, name: str, _: str) -> Plot | None:
    """A line for each batch, with the best number of draft tokens at each context."""
    series, sources = [], []
    for pay_off in run.by_context.pay_off if run.by_context else ():
        estimated, best = pay_off.is_estimated, pay_off.best
        batches = sorted({cell.batch for cell in best})
        for batch, colour in zip(batches, shades(len(batches)) if estimated else [VERMILLION], strict=True):
            points = np.array([(cell.context, cell.speed_up) for cell in best if cell.batch == batch]).T
            label = f"{ESTIMATED if estimated else 'measured'}, batch {batch}"
            series.append(Series(label, *points, colour, "dashed" if estimated else "line", dotted=True))
        sources.append(pay_off.source)
    if not series:
        return None
    about = (
        f"With the best number of draft tokens at each context; {'; '.join(sources)}. Batch: conversations at a time."
    )
    return pay_off_plot(name, series, about)


def _throughput(run: RunRecord, name: str, title: str, key: str) -> Plot:
    axis, about = number_axis("tokens a second", low=0), "Tokens of training per second, prompts included."
    plot = _of_steps(run, name, title, key, axis, about, GREEN)
    median = float(np.nanmedian(column(run.train, key)))
    series = [plot.series[0]._replace(label="each step"), level(f"median {short_number(median)}", median)]
    return plot._replace(series=series, alt=f"{title}: a median of {median:,.0f} tokens a second.")


def _memory(run: RunRecord, name: str, title: str, key: str) -> Plot:
    used, all_steps, memory = column(run.train, key), column(run.train, "step"), run.started.get("memory", {})
    before, estimate = memory.get("before_gib"), memory.get("estimate_gib")
    alt = f"{title}: {np.nanmax(used):.2f} GiB"
    series = [Series("measured", *thinned(all_steps, used), BLUE)]
    if before is not None:
        series.append(level(f"before the draft was made {before:.2f}", before))
        alt += f", of which {before:.2f} were there before the draft was made"
    if estimate is not None:
        both = before + estimate
        series.append(level(f"that and the planner's estimate {both:.2f}", both, ORANGE))
        alt += f"; the planner's estimate for the draft is {estimate:.2f}"
    about = f"The peak so far, {memory.get('measured') or 'in GiB'}."
    return Plot(name, title, about, f"{alt}.", step_axis(), number_axis("GiB", low=0), series)


def _lengths(run: RunRecord, name: str, title: str) -> Plot | None:
    data = run.started.get("data", {})
    parts = [data[part] | {"label": label} for part, label in PARTS.items() if data and data[part].get("lengths")]
    if not parts:
        return None
    series = [
        Series(
            part["label"],
            np.array(part["lengths"]["edges"]),
            np.array(part["lengths"]["counts"]) / sum(part["lengths"]["counts"]),
            colour,
            "stairs",
        )
        for part, colour in zip(parts, (BLUE, ORANGE), strict=False)
    ]
    axis, edges = count_axis("tokens of a sample"), [each.x for each in series]
    if any(each[-1] - each[-2] > 1.5 * (each[1] - each[0]) for each in edges):  # bins that grow
        least, most = np.log2(min(each[0] for each in edges)), np.log2(max(each[-1] for each in edges))
        axis = context_axis(axis.label, 2.0 ** np.arange(np.ceil(least), np.floor(most) + 1))._replace(margin=0)
    return Plot(
        name,
        title,
        "After truncation; by the middle of each bin.",
        f"Histogram of {title.lower()}: the longest has {max(part['longest'] for part in parts):,} tokens.",
        axis,
        share_axis("of samples"),
        series,
    )


# File name, title, key in metrics.jsonl, and the function that draws it. In the order of the page, as below.
OF_STEPS: tuple[tuple[str, str, str, Callable[[RunRecord, str, str, str], Plot]], ...] = (
    ("total_loss", "Loss", "loss", _loss),
    ("loss", "Loss by TTT step", "step_losses", _step_losses),
    (
        "acceptance",
        "Acceptance rate by TTT step",
        "acceptance_rate",
        partial(_by_ttt_step, label="probability", about=ABOUT_RATE),
    ),
    (
        "learning_rate",
        "Learning rate",
        "learning_rate",
        partial(
            _of_steps,
            axis=number_axis("learning rate", low=0),
            about="The rate that the optimiser used in each step.",
            colour=GREEN,
        ),
    ),
    ("gradient_norm", "Gradient norm", "gradient_norm", _norm),
    ("throughput", "Throughput of training", "tokens_per_second", _throughput),
    ("memory", "Peak memory of the first rank", "memory_gib", _memory),
)
# File name, title, the function that draws it, and what is missing if it draws nothing.
OTHERS: tuple[tuple[str, str, Callable[[RunRecord, str, str], Plot | None], str], ...] = (
    ("held_out", "Acceptance length, held out", _held_out, "nothing was held out, or not measured yet"),
    (
        "positions",
        "Accepted by draft position",
        _positions,
        "evaluation.json is not there; launchers/evaluate.py writes it",
    ),
    ("contexts", "Acceptance length by context", _contexts, "launchers/evaluate.py --by-context measures it"),
    ("pay_off", "Speed-up by context", _pay_off, "launchers/evaluate.py --by-context measures and estimates it"),
    ("lengths", "Sample lengths", _lengths, "run.json is not there; the start of a run writes it"),
)


def charts(run: RunRecord) -> Iterator[Plot | Absent]:
    """All charts of a run. A single point is no chart, so its value is told instead."""
    for name, title, key, draw in OF_STEPS:
        known = any(np.isfinite(np.array(record.get(key), np.float64)).any() for record in run.train)
        plot = draw(run, name, title, key) if known else None
        yield _or_absent(plot, name, title, "metrics.jsonl has no such numbers yet")
    for name, title, draw, why in OTHERS:
        yield _or_absent(draw(run, name, title), name, title, why)


def _or_absent(plot: Plot | None, name: str, title: str, why: str) -> Plot | Absent:
    curves = [each for each in plot.series if each.look != "rule"] if plot else []
    if any(each.look == "stairs" or np.isfinite(each.y).sum() > 1 for each in curves):
        return plot
    return Absent(name, title, f"one point makes no chart ({plot.alt.removesuffix('.')})" if plot else why)
