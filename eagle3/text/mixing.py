"""How much of each source an epoch of training has: a share or a number of its samples, chosen by a hash."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from eagle3.console import counted
from eagle3.errors import refuse
from eagle3.text.samples import SampleSet

MOST_TIMES = 1000  # most repetitions of a sample in an epoch


class MixedPart(NamedTuple):
    """A source in a set of samples that holds the sources one after another. By default, an epoch takes every sample
    once."""

    source: str
    stored: int  # samples of it in the set, held-out ones included
    weight: float = 1.0  # how often an epoch takes each: 0.5 half of them, 2.5 each twice and half of them once more
    samples: int | None = None  # how many samples it takes, in place of a weight; more than there are repeat some


class Mixed(NamedTuple):
    """One source in a mixture."""

    source: str
    available: int  # samples to train on
    used: int  # samples in an epoch, with repetitions
    tokens: int  # in an epoch
    supervised: int

    def __str__(self) -> str:
        times = f" from {self.available:,}" if self.used != self.available else ""
        return (
            f"{self.source}: {counted(self.used, 'sample')} an epoch{times}, {self.tokens:,} tokens, "
            f"{self.supervised:,} supervised"
        )


def mixture(samples: SampleSet, parts: Sequence[MixedPart], seed: int) -> tuple[SampleSet, list[Mixed]]:
    """An epoch's samples, in the order of the sources, and what it has of each. The same for the same samples and seed.
    Raises UserError if a source gets none. samples: some of the stored samples of a set (others are held out)."""
    bounds, draws = np.cumsum([0, *(part.stored for part in parts)]), samples.draws(seed, b"mixture")
    lengths, supervised = samples.lengths, samples.count(lambda loss_mask: loss_mask)[:, 0]
    chosen, mixed = [], []
    for (source, _, weight, taken), (low, high) in zip(parts, pairwise(bounds), strict=True):
        places = np.flatnonzero((samples.indices >= low) & (samples.indices < high))
        number = round(weight * len(places)) if taken is None else taken
        available = counted(len(places), "sample")
        refuse(
            "data.train",
            (
                not len(places),
                f"all samples of {source} are held out; name other data in data.held_out, or leave this source out",
            ),
            (
                number > MOST_TIMES * len(places),
                f"{number:,} samples of {source} are more than {MOST_TIMES:,} times its {available}; lower samples",
            ),
            (
                not number,
                f"{source} has {available} to train on, of which a weight of {weight:g} leaves none; raise it, "
                "or leave this source out",
            ),
        )
        times, extra = divmod(number, len(places))
        counts = np.full(len(places), times)
        counts[np.argsort(draws[places], kind="stable")[:extra]] += 1
        chosen.append(np.repeat(places, counts))
        tokens, taught = int(counts @ lengths[places]), int(counts @ supervised[places])
        mixed.append(Mixed(source, len(places), number, tokens, taught))
    return samples.subset(np.concatenate(chosen)), mixed
