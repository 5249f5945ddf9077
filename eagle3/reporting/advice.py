"""What looks wrong in a run, each with the number that shows it and the recipe key that changes it."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from eagle3.reporting.curves import Curve, estimated_curve, mean, measured_curve, simulated_positions, tokens_label
from eagle3.reporting.record import RunRecord, column

LEAST_SUPERVISED = 0.05  # share of the tokens
FEW_SUPERVISED = 1_000_000  # tokens; EAGLE3's own drafts saw hundreds of millions
LEAST_COVERAGE = 0.95
MOST_LEFT_OUT = 0.05  # share of the conversations that were read
FALL = 0.8  # of the acceptance length at short contexts that should be left at long ones
DIVERGED = 1.2  # of the training loss at the begin
RISE = 1.01  # of the lowest held-out loss
FAR = 0.1  # between simulated and real shares of a draft position


class Advice(NamedTuple):
    """finding: with its number. change: what to do about it. keys: of the recipe, as they stand there."""

    finding: str
    change: str
    keys: tuple[str, ...]


class Remedy(NamedTuple):
    """As in Advice."""

    change: str
    keys: tuple[str, ...]


# By the kind of the reason for which rows are left out; None: of a run that does not tell.
LEFT_OUT = {
    "malformed": Remedy("Malformed rows: correct them, by the reasons under Data.", ("data.malformed",)),
    "too_large": Remedy("Rows that are too large: cut each into several.", ("data.malformed", "data.too_long")),
    "too_long": Remedy(
        "Rows that are too long: raise the length, for a draft for long contexts needs them.",
        ("data.max_length", "data.too_long"),
    ),
    "unusable": Remedy(
        "Rows with nothing to learn from: look at the reasons under Data, and at the chat template.",
        ("data.unusable", "data.chat_template"),
    ),
    None: Remedy("See the reasons under Data.", ("data.malformed", "data.unusable", "data.too_long")),
}


def advise(run: RunRecord) -> list[Advice]:
    """Everything that looks wrong; a check whose numbers the folder lacks finds nothing."""
    checks: tuple[Callable[[RunRecord], Advice | None], ...]
    checks = (
        _lossy,
        _diverged,
        _unlearnt,
        _skipped,
        _supervised_share,
        _few_supervised,
        _coverage,
        _left_out,
        _overfitted,
    )
    checks += (_far_from_simulated, _falls_with_context)
    return [found for check in checks if (found := check(run))]


def _lossy(run: RunRecord) -> Advice | None:
    wrong = (run.evaluation or {}).get("mismatches") or 0
    if not wrong:
        return None
    finding = f"The output of {wrong} of {run.evaluation['conversations']} conversations differs from plain decoding."
    change = "Rounding alone does not explain it. Judge again with the target in float32 before trusting other numbers."
    return Advice(finding, change, ("model.target_dtype",))


def _diverged(run: RunRecord) -> Advice | None:
    losses = column(run.train, "loss")
    window = max(1, len(losses) // 10)
    if len(losses) < 3 * window or not np.isfinite(losses).all():
        return None
    first, last = float(mean(losses[:window])), float(mean(losses[-window:]))
    if last <= DIVERGED * first:
        return None
    finding = f"Training loss rose from {first:.3f} to {last:.3f}."
    change = "The run diverged and its draft is worth nothing: lower the rate, or clip gradients."
    return Advice(finding, change, ("training.learning_rate", "training.gradient_clipping"))


def _unlearnt(run: RunRecord) -> Advice | None:
    trained = (run.evaluation or {}).get("acceptance_length")
    untrained = ((run.evaluation or {}).get("untrained") or {}).get("acceptance_length")
    if trained is None or untrained is None or trained > 1.05 * untrained:
        return None
    finding = f"The trained draft's acceptance length is {trained:.2f}, that of an untrained one {untrained:.2f}."
    change = "It has learnt next to nothing that helps: train longer, or with another learning rate."
    return Advice(finding, change, ("training.max_steps", "training.epochs", "training.learning_rate"))


def _skipped(run: RunRecord) -> Advice | None:
    if not run.skipped:
        return None
    finding = f"{len(run.skipped)} of {len(run.train)} optimiser steps were skipped, the last at step {run.skipped[-1]['step']}."
    change = (
        "Their gradients were not finite or too large: look at the samples that metrics.jsonl names, or lower the rate."
    )
    return Advice(finding, change, ("training.learning_rate", "training.warmup_fraction", "training.skip_above_norm"))


def _data(run: RunRecord, part: str) -> dict:
    return ((run.started or {}).get("data") or {}).get(part) or {}


def _supervised_share(run: RunRecord) -> Advice | None:
    data = _data(run, "train")
    share = data["supervised"] / data["tokens"] if data.get("tokens") else 1.0
    if share >= LEAST_SUPERVISED:
        return None
    finding = f"{share:.1%} of the training tokens are supervised."
    change = (
        "The rest is prompt: take data with longer answers, or supervise every turn (prepare.py --preview 3 shows it)."
    )
    return Advice(finding, change, ("data.supervise", "data.train"))


def _few_supervised(run: RunRecord) -> Advice | None:
    supervised = _data(run, "train").get("supervised")
    if supervised is None or supervised >= FEW_SUPERVISED:
        return None
    finding = f"The training data have {supervised:,} supervised tokens."
    change = f"Below {FEW_SUPERVISED:,} a draft for a real target stays poor: take more conversations."
    return Advice(finding, change, ("data.train", "data.max_samples"))


def _coverage(run: RunRecord) -> Advice | None:
    vocabulary = (run.started or {}).get("vocabulary") or {}
    share = vocabulary.get("coverage")
    if share is None or share >= LEAST_COVERAGE:
        return None
    finding = f"The draft vocabulary of {vocabulary['size']:,} tokens covers {share:.1%} of the supervised ones."
    change = f"The draft can never propose the others: take up to {vocabulary['target_size']:,} tokens, or other ones."
    return Advice(finding, change, ("model.draft.vocab_size", "model.draft.vocabulary"))


def _left_out(run: RunRecord) -> Advice | None:
    read = _data(run, "train").get("prepared")
    if not read or not read["rows"]:
        return None
    dropped, truncated = sum(read["dropped"].values()), read["truncated"]
    if dropped + truncated <= MOST_LEFT_OUT * read["rows"]:
        return None
    counts = Counter({"too_long": truncated})
    for reason, count in read["dropped"].items():
        counts[(read.get("kinds") or {}).get(reason)] += count
    met = [LEFT_OUT[kind] for kind in LEFT_OUT if counts[kind]]
    finding = f"Of {read['rows']:,} rows {dropped:,} were dropped and {truncated:,} truncated."
    keys = dict.fromkeys(key for each in met for key in each.keys)
    return Advice(finding, " ".join(each.change for each in met), tuple(keys))


def _overfitted(run: RunRecord) -> Advice | None:
    held_out, measured = column(run.held_out, "loss"), column(run.held_out, "step")
    if len(held_out) < 2 or not np.isfinite(held_out).any() or not np.isfinite(held_out[-1]):
        return None
    best = int(np.nanargmin(held_out))
    steps, losses = column(run.train, "step"), column(run.train, "loss")
    window = max(1, len(steps) // 10)
    until = int(np.searchsorted(steps, measured[best], side="right"))
    then, now = float(mean(losses[max(0, until - window) : until])), float(mean(losses[-window:]))
    if held_out[-1] <= RISE * held_out[best] or not now < then:
        return None
    finding = (
        f"Held-out loss rose from {held_out[best]:.3f} at step {measured[best]:.0f} to {held_out[-1]:.3f}, while training "
        f"loss fell from {then:.3f} to {now:.3f}."
    )
    change = "The draft learns its samples by heart: train for less long, or on more data."
    return Advice(finding, change, ("training.epochs", "training.max_steps", "data.train"))


def _far_from_simulated(run: RunRecord) -> Advice | None:
    real, simulated = (run.evaluation or {}).get("position_acceptance") or [], simulated_positions(run)
    if (run.evaluation or {}).get("temperature") or (run.evaluation or {}).get("topk", 1) > 1:
        return None  # the simulation is of greedy chains
    verifications = (run.evaluation or {}).get("verifications") or 0
    pairs = list(zip(simulated, real, strict=False))
    for place, (expected, found) in enumerate(pairs, 1):
        noise = 3 * (expected * (1 - expected) / verifications) ** 0.5 if verifications else np.inf
        if abs(expected - found) > max(FAR, noise):
            finding = f"Draft position {place}: {expected:.0%} accepted as simulated on held-out text, {found:.0%} in decoding."
            change = (
                "The texts differ, or the number formats do: train on the target's own answers (launchers/regenerate.py), and "
                "judge in the format of the hidden states."
            )
            return Advice(finding, change, ("data.train", "model.target_dtype", "hidden_states.dtype"))
    return None


def _falls_with_context(run: RunRecord) -> Advice | None:
    curve, how = (measured_curve(run.by_context), "measured") if run.by_context else (None, "")
    if curve is None:
        curve, how = estimated_curve(run), "estimated"
    if curve is None or not (fallen := _fall(curve)):
        return None
    near, far = fallen
    finding = (
        f"Acceptance length falls from {curve.lengths[near]:.2f} at {tokens_label(curve.contexts[near])} tokens to "
        f"{curve.lengths[far]:.2f} at {tokens_label(curve.contexts[far])} ({how})."
    )
    change = "Train on samples as long as those to be served, and look at the draft's rope."
    return Advice(finding, change, ("data.max_length", "data.train", "model.draft.rope_parameters"))


def _fall(curve: Curve) -> tuple[int, int] | None:
    """(best, last) context of a curve whose end lies well below its best, beyond what chance explains."""
    known = np.flatnonzero(np.isfinite(curve.lengths))
    if len(known) < 2:
        return None
    best, last = int(known[np.argmax(curve.lengths[known])]), int(known[-1])
    above = curve.interval[last][1] >= curve.interval[best][0]  # False where an interval is not known
    if curve.lengths[last] >= FALL * curve.lengths[best] or above:
        return None
    return best, last
