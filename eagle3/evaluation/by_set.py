"""Acceptance by prompt set: benchmarks that are judged together, each with its own figures and intervals."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from eagle3.console import Say, Warned, aligned
from eagle3.evaluation.by_context import output_in_a_word, ratio_intervals
from eagle3.evaluation.speculative import CountedConversation, SpeculativeResult


def over_sets(
    sizes: Mapping[str, int], decoded: Sequence[CountedConversation], report: Say
) -> dict[str, SpeculativeResult]:
    """The figures of each prompt set, by its name. A set in which nothing was verified is left out, with a warning to
    `report`.

    sizes: number of conversations of each set, in the order of `decoded`
    """
    rest, figures = iter(decoded), {}
    for name, size in sizes.items():
        its_own = list(islice(rest, size))
        if any(each.verifications for each in its_own):
            figures[name] = SpeculativeResult.over(its_own)
        else:
            ended = "the target ends all its conversations with their first token"
            report(Warned(f"prompt set {name}: left out, {ended}; use other prompts"))
    return figures


def set_records(sets: Mapping[str, SpeculativeResult], seed: int) -> list[dict[str, Any]]:
    """What evaluation.json has of each set: its name, everything that it also has of all sets together, and the 95%
    confidence interval of its acceptance length, [low, high]; None if only one conversation was verified. seed: for the
    bootstrap."""
    return [
        {
            "name": name,
            **figures.as_dict(),
            "interval": _interval(figures, seed),
            "speed": figures.speed._asdict(),
        }
        for name, figures in sets.items()
    ]


def set_lines(sets: Mapping[str, SpeculativeResult], seed: int) -> list[str]:
    """Two tables with a row for each set: acceptance lengths, and shares by position. Beside its name, a row takes at
    most 65 columns. seed: for the bootstrap."""
    lengths = [
        [
            name,
            f"{figures.conversations}",
            f"{figures.verifications}",
            f"{figures.acceptance_length:.2f}",
            " to ".join(f"{end:.2f}" for end in _interval(figures, seed) or ()) or "-",
            f"{figures.mean_acceptance_length:.2f}",
            f"{figures.speed.gain:.2f}x",
            output_in_a_word(figures),
        ]
        for name, figures in sets.items()
    ]
    shares = [[name, *(f"{share:.2f}" for share in figures.position_acceptance)] for name, figures in sets.items()]
    positions = [f"{place + 1}" for place in range(max(len(row) for row in shares) - 1)]
    return [
        "acceptance length by prompt set (mean: over conversations)",
        *aligned([["set", "conv.", "verified", "length", "95% interval", "mean", "speed", "output"], *lengths]),
        "accepted by draft position",
        *aligned([["set", *positions], *shares]),
    ]


def _interval(figures: SpeculativeResult, seed: int) -> list[float] | None:
    yielded, verifications = np.array(figures.of_each).T
    intervals = ratio_intervals(yielded[:, None], verifications, seed)
    return None if intervals is None else intervals[0].tolist()
