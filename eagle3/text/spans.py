"""Spans: which of a document's supervised tokens a step learns from, where a recipe does not take all of them."""

import hashlib
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from eagle3.console import counted
from eagle3.text.samples import Sample, SampleSet


@dataclass(frozen=True)
class Spans:
    """At most `per_document` runs of `length` supervised tokens of a document, drawn anew in every epoch, the same on every rank.

    A document's supervised tokens are cut into runs of `length`, the first one shorter by a random number of tokens, and
    `per_document` of these runs are chosen. So all of its tokens are chosen equally often, and with W keys of a window a
    document costs at most per_document (W + length) rows. Unsupervised tokens inside a run, such as a user's turn, do not count.
    """

    length: int
    per_document: int
    seed: int

    def draw(self, sample: Sample, epoch: int) -> Tensor:
        """bool [T]: what of the sample's loss mask lies in the spans of an epoch; all of it where that many hold it."""
        supervised = sample.loss_mask.nonzero().flatten()
        if len(supervised) <= self.most:
            return sample.loss_mask
        numbers = (self._number(sample.id, epoch, place) for place in count())
        runs = (torch.arange(len(supervised)) + next(numbers) % self.length) // self.length
        total, chosen = int(runs[-1]) + 1, set[int]()
        while len(chosen) < self.per_document:
            chosen.add(next(numbers) % total)
        drawn = torch.zeros_like(sample.loss_mask)
        drawn[supervised[torch.isin(runs, torch.tensor([*chosen]))]] = True
        return drawn

    def __str__(self) -> str:
        return f"data.spans={{length: {self.length}, per_document: {self.per_document}}} and data.seed={self.seed}"

    @property
    def most(self) -> int:
        """Supervised tokens of a document that has enough of them."""
        return self.length * self.per_document

    def describe(self, samples: SampleSet, anew: bool) -> str:
        """What becomes of the samples' supervised tokens. anew: whether each epoch draws its own spans."""
        supervised = samples.count(lambda loss_mask: loss_mask)[:, 0]
        longer, taken = int((supervised > self.most).sum()), int(np.minimum(supervised, self.most).sum())
        if not longer:
            return (
                f"data.spans: changes nothing here, no sample has more than the {self.most:,} supervised tokens that "
                f"{self.per_document} spans of {self.length:,} hold"
            )
        drawn = "drawn anew in each epoch" if anew else "the same in each epoch, as the store has them"
        return (
            f"data.spans: up to {taken:,} of {supervised.sum():,} supervised tokens an epoch, {drawn}; "
            f"{longer:,} of {counted(len(samples), 'sample')} have more than {self.per_document} spans of {self.length:,} hold"
        )

    def fixed(self, samples: SampleSet) -> SampleSet:
        """The samples with the spans of the first epoch for loss masks, as a store has them."""
        return samples.masked(lambda sample: self.draw(sample, 0))

    def _number(self, sample_id: str, epoch: int, place: int) -> int:
        """Random, by a hash: stores keep what was drawn, and generators change with the versions of their libraries."""
        digest = hashlib.sha256(f"{self.seed} {epoch} {place} {sample_id}".encode()).digest()
        return int.from_bytes(digest[:8], "little")
