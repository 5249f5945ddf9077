"""The charts of one run, each from what its folder holds; where that lacks what a chart needs, the chart says so."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from eagle3.reporting.curves import Curve, estimated_curve, mean, measured_curve, rule, simulated_positions, told_curve
from eagle3.reporting.plot import (
    BLUE,
    GREEN,
    ORANGE,
    VERMILLION,
    Axis,
    Colour,
    Plot,
    Series,
    context_axis,
    count_axis,
    number_axis,
    shades,
    share_axis,
    short_number,
    step_axis,
    thinned,
)
from eagle3.reporting.plot import rule as level
from eagle3.reporting.record import Record, RunRecord, column, columns

TRAINING, HELD_OUT = "training", "held out"


class Absent(NamedTuple):
    """A chart that could not be drawn, and what for it is missing."""

    name: str
    title: str
    why: str


def charts(run: RunRecord) -> Iterator[Plot | Absent]:
    """All charts of a run, in the order of the page."""
    makers: tuple[Callable[[RunRecord], Plot | Absent], ...]
    makers = (_loss, _step_losses, _accepted, _acceptance, _rate, _norm)
    makers += (_positions, _contexts, _throughput, _memory, _lengths)
    for maker in makers:
        yield maker(run)


def _loss(run: RunRecord) -> Plot | Absent:
    return _course(run, "total_loss", "loss", "Loss", loss_label(run), about_loss(run))


def loss_label(run: RunRecord) -> str:
    return "nats a token, weighted sum" if run.key("training.loss") == "kl" else "weighted sum of the TTT steps"


def about_loss(run: RunRecord) -> str:
    """What `loss` is, wherever it is written."""
    steps, decay = run.key("training.ttt_steps"), run.key("training.step_decay")
    steps = "the TTT steps" if steps is None else f"the {steps} TTT steps"
    weights = "" if decay is None else f", each weighted {decay:g} times the one before"
    return f"What training minimises, loss in the step lines: the losses of {steps}{weights}, summed."


def _accepted(run: RunRecord) -> Plot | Absent:
    key, label = "simulated_acceptance_length", "drafts a verification"
    return _course(run, "accepted", key, "Accepted drafts, simulated", label, ABOUT_ACCEPTED)


ABOUT_ACCEPTED = (
    "Drafts that a greedy verification would accept, from hidden states; accepted drafts in the step lines. An acceptance length "
    "counts the target's own token, too: it is 1 more."
)


def _course(run: RunRecord, name: str, key: str, title: str, label: str, about: str) -> Plot | Absent:
    """One number over the steps, in training and held out."""
    values, held_out = column(run.train, key), column(run.held_out, key)
    if not np.isfinite(values).any():
        return Absent(name, title, "metrics.jsonl has no such numbers yet")
    all_steps, measured = column(run.train, "step"), column(run.held_out, "step")
    series = [Series(TRAINING, *thinned(all_steps, values), BLUE)]
    alt = f"{title}: {_from_to(values)} over {len(values)} optimiser steps"
    if np.isfinite(held_out).any():
        series.append(Series(HELD_OUT, measured, held_out, VERMILLION, "dots"))
        alt += f"; held out it ends at {_told(held_out[-1])}"
    axis = number_axis(label, [each.y for each in series])
    return Plot(name, title, about, f"{alt}.", step_axis(all_steps), axis, series)


def _from_to(values: np.ndarray) -> str:
    tenth = max(1, len(values) // 10)
    return f"from {_told(mean(values[:tenth]))} to {_told(mean(values[-tenth:]))}"


def _told(value: float) -> str:
    return f"{value:.3g}" if np.isfinite(value) else "unknown"


def _step_losses(run: RunRecord) -> Plot | Absent:
    unit = "nats a token" if run.key("training.loss") == "kl" else "loss"
    about = "Each TTT step's own loss, without a weight."
    return _by_ttt_step(run, "loss", "step_losses", "Loss by TTT step", unit, about)


def _acceptance(run: RunRecord) -> Plot | Absent:
    about = (
        "How probably sampling at temperature 1 accepts the draft of each TTT step, those before it taken as accepted. Early in "
        "training it is far above accepted drafts: flat distributions overlap though their best tokens differ."
    )
    return _by_ttt_step(run, "acceptance", "acceptance_rate", "Acceptance rate by TTT step", "probability", about)


def _by_ttt_step(run: RunRecord, name: str, key: str, title: str, label: str, about: str) -> Plot | Absent:
    """Training as lines, held out as dots, a colour a TTT step."""
    curves = columns(run.train, key)
    if not np.isfinite(curves).any():
        return Absent(name, title, "metrics.jsonl has no such numbers yet")
    all_steps, colours = column(run.train, "step"), shades(curves.shape[1])
    steps, smooth = thinned(all_steps, curves)
    measured, held_out = column(run.held_out, "step"), columns(run.held_out, key)
    series = [
        Series(f"step {place}", steps, values, colour, group=TRAINING)
        for place, (values, colour) in enumerate(zip(smooth.T, colours, strict=True), 1)
    ]
    series += [
        Series(f"step {place}", measured, values, colour, "dots", group=HELD_OUT)
        for place, (values, colour) in enumerate(zip(held_out.T, colours, strict=False), 1)
    ]
    axis = number_axis(label, [each.y for each in series])
    return Plot(name, title, about, _told_course(title, curves, held_out), step_axis(all_steps), axis, series)


def _told_course(title: str, curves: np.ndarray, held_out: np.ndarray) -> str:
    alt = f"{title} over {len(curves)} optimiser steps: TTT step 1 goes {_from_to(curves[:, 0])}, "
    alt += f"TTT step {curves.shape[1]} {_from_to(curves[:, -1])}"
    if len(held_out):
        alt += f"; held out they end at {_told(held_out[-1][0])} and {_told(held_out[-1][-1])}"
    return alt + "."


def _rate(run: RunRecord) -> Plot | Absent:
    about = "Of each step, as its optimiser used it."
    return _of_steps(run, "learning_rate", "learning_rate", "Learning rate", "learning rate", about, GREEN, zero=True)


def _norm(run: RunRecord) -> Plot | Absent:
    clip, skip = run.key("training.gradient_clipping"), run.key("training.skip_above_norm")
    about = "Of the whole gradient"
    about += f", before it is clipped at training.gradient_clipping {clip:g}" if clip else ""
    about += f"; a step above training.skip_above_norm {skip:g} is skipped." if skip else "."
    return _of_steps(run, "gradient_norm", "gradient_norm", "Gradient norm", "norm", about, ORANGE, logarithmic=True)


def _of_steps(
    run: RunRecord,
    name: str,
    key: str,
    title: str,
    label: str,
    about: str,
    colour: Colour,
    **scale: bool,
) -> Plot | Absent:
    """One number of each step."""
    values, all_steps = column(run.train, key), column(run.train, "step")
    if not np.isfinite(values).any():
        return Absent(name, title, "metrics.jsonl has no such numbers yet")
    series = [Series(title.lower(), *thinned(all_steps, values), colour)]
    axis = number_axis(label, [series[0].y], **scale)
    alt = f"{title}: {_from_to(values)}, at most {short_number(float(np.nanmax(values)))}."
    return Plot(name, title, about, alt, step_axis(all_steps), axis, series)


def _positions(run: RunRecord) -> Plot | Absent:
    name, title = "positions", "Accepted by draft position"
    simulated, judged = simulated_positions(run), (run.evaluation or {}).get("position_acceptance") or []
    if not simulated and not judged:
        return Absent(name, title, "neither held-out measurements nor evaluation.json are there")
    series = [
        Series(label, np.arange(1, len(shares) + 1), np.array(shares), colour, look, dotted=True)
        for label, shares, colour, look in (
            ("simulated from held-out hidden states, greedy", simulated, BLUE, "line"),
            (f"real speculative decoding, {rule(run.evaluation or {})}", judged, VERMILLION, "dashed"),
        )
        if shares
    ]
    told = "; ".join(f"{each.label} {', '.join(f'{share:.2f}' for share in each.y)}" for each in series)
    places = np.arange(1, max(len(each.y) for each in series) + 1)
    axis = Axis("draft position", 0.8, places[-1] + 0.2, [(float(n), str(n)) for n in places], lambda n: f"{n:.0f}")
    about = (
        "Share of the verifications that accepted a draft and all before it. Their sum is the accepted drafts a verification. "
        "Simulated: over held-out samples as they are written; real: in the target's own continuations, of fewer conversations."
    )
    return Plot(name, title, about, f"{title}, from the first: {told}.", axis, share_axis("of verifications"), series)


def curve_series(label: str, curve: Curve, colour: Colour, look: str = "line") -> Series:
    """Acceptance length by context, with its interval where one is known."""
    band = curve.interval if np.isfinite(curve.interval).any() else None
    return Series(label, curve.contexts, curve.lengths, colour, look, dotted=True, band=band)


def contexts_plot(name: str, series: Sequence[Series], told: str) -> Plot:
    title = "Acceptance length by context"
    values = [each.y for each in series] + [each.band for each in series if each.band is not None]
    axis = number_axis("tokens a verification", [*values, np.ones(1)])._replace(tell=lambda length: f"{length:.2f}")
    contexts = context_axis("context in tokens", np.unique(np.concatenate([each.x for each in series])))
    about = "Tokens that one pass of the target yields, accepted drafts and its own, after contexts of up to so many tokens."
    about += " Bands: 95% intervals." if any(each.band is not None for each in series) else ""
    return Plot(name, title, about, f"{title}: {told}.", contexts, axis, series)


def _contexts(run: RunRecord) -> Plot | Absent:
    measured = measured_curve(run.by_context) if run.by_context and run.by_context["contexts"] else None
    estimated, series, told = estimated_curve(run), [], []
    if measured:
        series.append(curve_series(f"real decoding, {rule(run.by_context)}", measured, VERMILLION))
        told.append(f"real decoding {told_curve(measured)}")
    if estimated:
        series.append(curve_series("estimated from hidden states, greedy", estimated, BLUE, "dashed"))
        told.append(f"estimated {told_curve(estimated)}")
    if not series:
        return Absent("contexts", "Acceptance length by context", "launchers/evaluate.py --by-context measures it")
    return contexts_plot("contexts", series, "; ".join(told))


def _throughput(run: RunRecord) -> Plot | Absent:
    label, about = "tokens a second", "Of training, tokens of prompts included."
    plot = _of_steps(run, "throughput", "tokens_per_second", "Throughput of training", label, about, GREEN, zero=True)
    if isinstance(plot, Absent):
        return plot
    median = float(np.nanmedian(column(run.train, "tokens_per_second")))
    series = [plot.series[0]._replace(label="each step"), level("median", plot.x, median)]
    return plot._replace(series=series, alt=f"{plot.title}: a median of {median:,.0f} tokens a second.")


def _memory(run: RunRecord) -> Plot | Absent:
    name, title = "memory", "Peak memory of the first rank"
    used, all_steps = column(run.train, "memory_gib"), column(run.train, "step")
    if not np.isfinite(used).any():
        return Absent(name, title, "metrics.jsonl has no such numbers yet")
    memory, peak = (run.started or {}).get("memory") or {}, float(np.nanmax(used))
    before, estimate = memory.get("before_gib"), memory.get("estimate_gib")
    steps, alt = step_axis(all_steps), f"{title}: {peak:.2f} GiB"
    series = [Series("measured", *thinned(all_steps, used), BLUE)]
    if before is not None:
        series.append(level("before the draft was made", steps, before))
        alt += f", of which {before:.2f} were there before the draft was made"
        if estimate is not None:
            series.append(level("that and the planner's estimate", steps, before + estimate, ORANGE))
            alt += f"; the planner's estimate for the draft is {estimate:.2f}"
    axis = number_axis("GiB", [each.y for each in series], zero=True)._replace(tell=lambda size: f"{size:.2f}")
    return Plot(name, title, f"The most so far, {memory.get('measured') or 'in GiB'}.", f"{alt}.", steps, axis, series)


def _lengths(run: RunRecord) -> Plot | Absent:
    name, title = "lengths", "Sample lengths"
    data = (run.started or {}).get("data") or {}
    known = [part for part in ("train", "held_out") if (data.get(part) or {}).get("lengths")]
    if not known:
        return Absent(name, title, "run.json is not there; the start of a run writes it")
    histograms = [data[part]["lengths"] for part in known]
    ends = [edge for each in histograms for edge in (each["edges"][0], each["edges"][-1])]
    logarithmic = 0 < 2 * min(ends) <= max(ends) and any(_grows(each) for each in histograms)
    looks = {"train": (TRAINING, BLUE), "held_out": (HELD_OUT, ORANGE)}
    series = []
    for part, histogram in zip(known, histograms, strict=True):
        label, colour = looks[part]
        edges, counts = np.array(histogram["edges"]), np.array(histogram["counts"], float)
        middles = np.sqrt(edges[1:] * edges[:-1]) if logarithmic else (edges[1:] + edges[:-1]) / 2
        series.append(Series(label, middles, counts / max(1, counts.sum()), colour, "stairs", edges=edges))
    edges = np.concatenate([each.edges for each in series])
    label, most = "tokens of a sample", 1.05 * max(each.y.max() for each in series)
    if logarithmic:
        powers = 2.0 ** np.arange(np.ceil(np.log2(edges.min())), np.floor(np.log2(edges.max())) + 1)
        axis = context_axis(label, powers)._replace(low=float(edges.min()), high=float(edges.max()))
    else:
        axis = count_axis(label, edges)
    axis = axis._replace(tell=lambda tokens: f"{tokens:,.0f}")
    longest = max(data[part].get("longest") or 0 for part in known)
    alt = f"Histogram of {title.lower()}: the longest has {longest:,} tokens."
    about = "After truncation; by the middle of each bin."
    return Plot(name, title, about, alt, axis, share_axis("of samples", most or 1.0), series)


def _grows(histogram: Record) -> bool:
    """Whether the bins do."""
    edges = histogram["edges"]
    return edges[-1] - edges[-2] > 1.5 * (edges[1] - edges[0])
