"""From a step's number to its packed streams with the rows of hidden states that this rank's plans name."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from eagle3.data.samples import Sample, SampleSet
from eagle3.data.store import HiddenStateStore, StoredRows
from eagle3.parallel.sequence import SequencePlan, Stream, plan_sequence
from eagle3.target.interface import Target


class HiddenStateSource(Protocol):
    """Where hidden states come from."""

    def rows(self, samples: Sequence[Sample], aux: Sequence[Tensor], last: Sequence[Tensor]) -> list[StoredRows]:
        """For each sample the auxiliary states at rows aux[i] and the last hidden states at rows last[i]."""
        ...


class LiveSource:
    """Runs the target: each sample is prefilled once, then only the wanted rows are kept."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def rows(self, samples: Sequence[Sample], aux: Sequence[Tensor], last: Sequence[Tensor]) -> list[StoredRows]:
        states = self.target.prefill([sample.ids for sample in samples])
        return [
            StoredRows(
                found.aux[a.to(found.aux.device)], found.last[b.to(found.last.device)], found.argmax, found.logsumexp
            )
            for found, a, b in zip(states, aux, last, strict=True)
        ]


class StoredSource:
    """Reads a store; nothing but the wanted rows leaves the disk."""

    def __init__(self, store: HiddenStateStore) -> None:
        self.store = store

    def rows(self, samples: Sequence[Sample], aux: Sequence[Tensor], last: Sequence[Tensor]) -> list[StoredRows]:
        return [self.store.read(sample.id, a, b) for sample, a, b in zip(samples, aux, last, strict=True)]


@dataclass(frozen=True)
class LoadedStream:
    """One micro-batch before it goes to the draft's device. aux [rows, 3Ht] at plan.rows; last [M, Ht], argmax [M],
    logsumexp [M] at plan.teacher."""

    stream: Stream
    plan: SequencePlan
    aux: Tensor
    last: Tensor
    argmax: Tensor
    logsumexp: Tensor


def batch_indices(step: int, samples: int, batch_size: int, seed: int) -> list[int]:
    """Samples of optimiser step `step` (from 0): consecutive places in an endless row of shuffled epochs, so that no
    last sample is dropped and the order does not depend on the layout."""
    places, orders = range(step * batch_size, (step + 1) * batch_size), {}
    for epoch in {place // samples for place in places}:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        orders[epoch] = torch.randperm(samples, generator=generator).tolist()
    return [orders[place // samples][place % samples] for place in places]


def deal_streams(lengths: Sequence[int], streams: int) -> list[list[int]]:
    """Deal samples to `streams` packed streams of about equal length: longest first, each to the shortest stream.

    With at least as many samples as streams none stays empty. Within a stream the samples keep their order.
    """
    totals, dealt = [0] * streams, [[] for _ in range(streams)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        shortest = min(range(streams), key=lambda stream: (totals[stream], stream))
        totals[shortest] += lengths[index]
        dealt[shortest].append(index)
    return [sorted(members) for members in dealt]


class StreamLoader:
    """Loads the streams of this data-parallel rank. steps: K of the unroll; rank, ranks: in the data-parallel group."""

    def __init__(self, samples: SampleSet, source: HiddenStateSource, *, steps: int, rank: int, ranks: int) -> None:
        self.samples, self.source, self.steps, self.rank, self.ranks = samples, source, steps, rank, ranks

    def load(self, indices: Sequence[int], accumulation: int) -> list[LoadedStream]:
        """This rank's `accumulation` streams of the global batch `indices`, the same list on every rank."""
        dealt = deal_streams([int(self.samples.lengths[index]) for index in indices], self.ranks * accumulation)
        mine = dealt[self.rank * accumulation : (self.rank + 1) * accumulation]
        members = [[self.samples[indices[place]] for place in stream] for stream in mine]
        spare = self.samples[indices[0]]  # for a rank that gets none: it must enter every collective all the same
        members = [stream or [replace(spare, loss_mask=torch.zeros_like(spare.loss_mask))] for stream in members]
        streams = [Stream.pack([s.ids for s in stream], [s.loss_mask for s in stream]) for stream in members]
        plans = [plan_sequence(stream, self.steps) for stream in streams]
        aux, last = [], []
        for stream, plan in zip(streams, plans, strict=True):
            aux += _by_document(stream, plan.rows)
            last += _by_document(stream, plan.teacher)
        found = iter(self.source.rows([sample for stream in members for sample in stream], aux, last))
        loaded = []
        for samples, stream, plan in zip(members, streams, plans, strict=True):
            parts = [next(found) for _ in samples]
            loaded.append(
                LoadedStream(
                    stream,
                    plan,
                    aux=torch.cat([part.aux for part in parts]),
                    last=torch.cat([part.last for part in parts]),
                    argmax=torch.cat([part.argmax for part in parts])[plan.teacher],
                    logsumexp=torch.cat([part.logsumexp for part in parts])[plan.teacher],
                )
            )
        return loaded


def _by_document(stream: Stream, rows: Tensor) -> list[Tensor]:
    """Ascending rows of the stream as rows of each of its documents."""
    counts = torch.bincount(stream.document[rows], minlength=len(stream.starts))
    return list(stream.position[rows].split(counts.tolist()))
