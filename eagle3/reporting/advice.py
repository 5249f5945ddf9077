"""Finds things that look wrong in a run. Each finding gives the number behind it and the recipe keys that change it."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from eagle3.reporting.charts import estimated_curve, measured_curve
from eagle3.reporting.record import RunRecord, column, mean, tokens_label

LEAST_SUPERVISED = 0.05  # least share of supervised tokens
FEW_SUPERVISED = 1_000_000  # number of tokens; EAGLE3's own drafts saw hundreds of millions
LEAST_COVERAGE = 0.95
MOST_LEFT_OUT = 0.05  # share of the conversations read
FALL = 0.8  # share of the acceptance length at short contexts that long ones should reach
DIVERGED = 1.2  # as a multiple of the training loss at the start
RISE = 1.01  # as a multiple of the lowest held-out loss
FAR = 0.1  # of the held-out acceptance length, by which that of decoding differs


class Advice(NamedTuple):
    """Something that looks wrong, and what to do about it."""

    finding: str  # what looks wrong, with the number behind it
    change: str  # what to do
    keys: tuple[str, ...]  # recipe keys to change


# Kind of reason for leaving out rows -> what to do, and the keys.
LEFT_OUT = {
    "malformed": ("Malformed rows: correct them, by the reasons under Data.", ("data.malformed",)),
    "too_large": ("Rows that are too large: cut each into several.", ("data.malformed", "data.too_long")),
    "too_long": (
        "Rows that are too long: raise the length, since a draft for long contexts needs them.",
        ("data.max_length", "data.too_long"),
    ),
    "unusable": (
        "Rows with nothing to learn from: look at the reasons under Data, and at the chat template.",
        ("data.unusable", "data.chat_template"),
    ),
}


def advise(run: RunRecord) -> list[Advice]:
    """Everything that looks wrong. A check finds nothing if the folder lacks its numbers."""
    of_data = (_supervised, _coverage, _left_out) if run.started else ()
    checks = (_lossy, _diverged, _unlearnt, _skipped, *of_data, _overfitted, _far_from_held_out, _falls_with_context)
    return [advice for check in checks for advice in check(run)]


def _lossy(run: RunRecord) -> Iterator[Advice]:
    if run.evaluation and run.evaluation.mismatches:
        yield Advice(
            f"The output of {run.evaluation.mismatches} of {run.evaluation.conversations} conversations differs from "
            "plain decoding.",
            "Rounding alone does not explain it. Judge again with the target in float32 before trusting other numbers.",
            ("model.target_dtype",),
        )


def _diverged(run: RunRecord) -> Iterator[Advice]:
    losses = column(run.train, "loss")
    tenth = max(1, len(losses) // 10)
    if len(losses) < 3 * tenth or not np.isfinite(losses).all():
        return
    first, last = float(mean(losses[:tenth])), float(mean(losses[-tenth:]))
    if last > DIVERGED * first:
        yield Advice(
            f"Training loss rose from {first:.3f} to {last:.3f}.",
            "The run diverged and its draft is worth nothing: lower the rate, or clip gradients.",
            ("training.learning_rate", "training.gradient_clipping"),
        )


def _unlearnt(run: RunRecord) -> Iterator[Advice]:
    if not run.evaluation or not run.evaluation.untrained:
        return
    trained, untrained = run.evaluation.acceptance_length, run.evaluation.untrained.acceptance_length
    if trained <= 1.05 * untrained:
        yield Advice(
            f"The trained draft's acceptance length is {trained:.2f}, that of an untrained one {untrained:.2f}.",
            "It has learnt next to nothing that helps: train longer, or with another learning rate.",
            ("training.max_steps", "training.epochs", "training.learning_rate"),
        )


def _skipped(run: RunRecord) -> Iterator[Advice]:
    if run.skipped:
        yield Advice(
            f"{len(run.skipped)} of {len(run.train)} optimiser steps were skipped, the last at step "
            f"{run.skipped[-1]['step']}.",
            "Their gradients were not finite or too large: look at the samples that metrics.jsonl names, or lower the "
            "rate.",
            ("training.learning_rate", "training.warmup_fraction", "training.skip_above_norm"),
        )


def _supervised(run: RunRecord) -> Iterator[Advice]:
    data = run.started["data"]["train"]
    tokens, supervised = data["tokens"], data["supervised"]
    if supervised < LEAST_SUPERVISED * tokens:
        last = run.key("data.supervise") == "last_turn"
        more_turns, keys = (", or supervise every turn", ("data.supervise",)) if last else ("", ())
        yield Advice(
            f"{supervised / tokens:.1%} of the training tokens are supervised.",
            f"The rest is prompt: use data with longer answers{more_turns} (prepare.py --preview 3 shows it).",
            ("data.train", *keys),
        )
    if supervised < FEW_SUPERVISED and run.key("model.target") != "demo":  # its text is what it is
        yield Advice(
            f"The training data have {supervised:,} supervised tokens.",
            f"Below {FEW_SUPERVISED:,} a draft for a real target stays poor: use more conversations.",
            ("data.train", "data.max_samples"),
        )


def _coverage(run: RunRecord) -> Iterator[Advice]:
    vocabulary = run.started["vocabulary"]
    if (share := vocabulary["coverage"]) < LEAST_COVERAGE:
        yield Advice(
            f"The draft vocabulary of {vocabulary['size']:,} tokens covers {share:.1%} of the supervised ones.",
            f"The draft can never propose the others: use up to {vocabulary['target_size']:,} tokens, or other ones.",
            ("model.draft.vocab_size", "model.draft.vocabulary"),
        )


def _left_out(run: RunRecord) -> Iterator[Advice]:
    read = run.started["data"]["train"].get("prepared")
    if not read:
        return
    dropped, truncated = sum(read["dropped"].values()), read["truncated"]
    if dropped + truncated <= MOST_LEFT_OUT * read["rows"] or not read["rows"]:
        return
    counts = Counter({"too_long": truncated})
    for reason, count in read["dropped"].items():
        counts[read["kinds"][reason]] += count
    met = [remedy for kind, remedy in LEFT_OUT.items() if counts[kind]]
    yield Advice(
        f"Of {read['rows']:,} rows {dropped:,} were dropped and {truncated:,} truncated.",
        " ".join(change for change, _ in met),
        tuple(dict.fromkeys(key for _, keys in met for key in keys)),
    )


def _overfitted(run: RunRecord) -> Iterator[Advice]:
    held_out, measured = column(run.held_out, "loss"), column(run.held_out, "step")
    if len(held_out) < 2 or not np.isfinite(held_out[-1]):
        return
    best = int(np.nanargmin(held_out))
    steps, losses = column(run.train, "step"), column(run.train, "loss")
    tenth = max(1, len(steps) // 10)
    until = int(np.searchsorted(steps, measured[best], side="right"))
    then, now = float(mean(losses[max(0, until - tenth) : until])), float(mean(losses[-tenth:]))
    if held_out[-1] > RISE * held_out[best] and now < then:
        yield Advice(
            f"Held-out loss rose from {held_out[best]:.3f} at step {measured[best]:.0f} to {held_out[-1]:.3f}, while "
            f"training loss fell from {then:.3f} to {now:.3f}.",
            "The draft memorises its samples: train for a shorter time, or on more data.",
            ("training.epochs", "training.max_steps", "data.train"),
        )


def _far_from_held_out(run: RunRecord) -> Iterator[Advice]:
    expected, result = run.exported.get("acceptance_length"), run.evaluation
    if not expected or not result or result.temperature or result.topk > 1:
        return  # held-out numbers are of greedy chains
    actual = result.acceptance_length
    # by which it varies if all drafts of a chain are as likely to be accepted
    noise = 3 * ((expected - 1) * expected / result.verifications) ** 0.5
    if abs(expected - actual) > max(FAR * expected, noise):
        yield Advice(
            f"Acceptance length {expected:.2f} on held-out text, {actual:.2f} in decoding.",
            "The texts differ, or the number formats do: train on the target's own answers "
            "(launchers/regenerate.py), and judge in the format of the hidden states.",
            ("data.train", "model.target_dtype", "hidden_states.dtype"),
        )


def _falls_with_context(run: RunRecord) -> Iterator[Advice]:
    """Finds a curve that ends far below its best point, by more than chance explains."""
    curve = measured_curve(run.by_context) if run.by_context else estimated_curve(run)
    known = np.flatnonzero(np.isfinite(curve.y)) if curve else []
    if len(known) < 2:
        return
    best, last = known[np.argmax(curve.y[known])], known[-1]
    chance = curve.band is not None and curve.band[last][1] >= curve.band[best][0]  # False if one is unknown
    if curve.y[last] < FALL * curve.y[best] and not chance:
        near, far = (f"{curve.y[place]:.2f} at {tokens_label(curve.x[place])}" for place in (best, last))
        yield Advice(
            f"Acceptance length falls from {near} tokens to {far} ({curve.label}).",
            "Train on samples as long as those to be served, and look at the draft's rope.",
            ("data.max_length", "data.train", "model.draft.rope_parameters"),
        )
