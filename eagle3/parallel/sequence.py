"""The packed token stream and the plan of which rows of it a rank computes; both follow from ids and loss mask alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stream:
    """Documents back to back, no batch dimension, no padding. All tensors [T], the same on every rank.

    ids: int64 tokens. document: int64 number of each row's document, from 0. position: int64, from 0 in each document.
    end: int64, the last row of each row's document. supervised: bool; a document's last row never is: it has no
    successor (mask[last] = 0 in the definition).
    """

    ids: Tensor
    document: Tensor
    position: Tensor
    end: Tensor
    supervised: Tensor

    @classmethod
    def pack(cls, ids: Sequence[Tensor], loss_masks: Sequence[Tensor]) -> "Stream":
        """ids, loss_masks: one [T_i] tensor a document, int64 and bool; at least one document, none empty."""
        lengths = torch.tensor([len(document) for document in ids])
        assert len(lengths) and int(lengths.min()) > 0, "a stream holds documents that are not empty"
        document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        stops = lengths.cumsum(0)
        rows = torch.arange(int(stops[-1]))
        end = stops[document] - 1
        supervised = torch.cat(list(loss_masks)).bool() & (rows < end)
        return cls(torch.cat(list(ids)).long(), document, rows - (stops - lengths)[document], end, supervised)

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @cached_property
    def starts(self) -> list[int]:
        """First row of each document."""
        return (self.position == 0).nonzero().flatten().tolist()

    def tokens_after(self, rows: Tensor, distance: int) -> Tensor:
        """ids at rows + distance, 0 beyond the end of the row's document (the definition's zero fill)."""
        ahead = rows + distance
        inside = ahead <= self.end[rows]
        return torch.where(inside, self.ids[ahead.clamp(max=self.tokens - 1)], 0)


@dataclass(frozen=True)
class SequencePlan:
    """What one rank computes of a stream, for K steps.

    keys: rows whose K_0, V_0 it makes. queries: rows it unrolls, those that some step supervises (at least one row,
    which then counts for nothing). teacher: rows whose target distribution it needs, t+1..t+K of its queries.
    rows: keys and queries together, where auxiliary states are read; key_slots, query_slots: their places in `rows`.
    query_of [K, M]: for step k and teacher row m the place of the query t = teacher - 1 - k in `queries`, -1 where there
    is none. supervised [K, M]: that query exists and the definition's mask[t + k] is set. All int64 on the CPU but the
    last, bool; rows ascend.
    """

    keys: Tensor
    queries: Tensor
    teacher: Tensor
    rows: Tensor
    key_slots: Tensor
    query_slots: Tensor
    query_of: Tensor
    supervised: Tensor


def plan_sequence(stream: Stream, steps: int) -> SequencePlan:
    """The plan of a rank that has the whole stream.

    Step k at row t counts where row t+k is supervised and inside t's document; so the queries are the rows with a
    supervised row among t..t+K-1, the teacher rows are the successors of supervised rows, and keys after a document's
    last query are seen by nobody.
    """
    wanted = stream.supervised.clone()
    rows = torch.arange(stream.tokens)
    for step in range(1, min(steps, stream.tokens)):
        ahead = rows[:-step] + step
        wanted[:-step] |= stream.supervised[step:] & (ahead <= stream.end[:-step])
    queries = wanted.nonzero().flatten()
    if not len(queries):
        queries = torch.zeros(1, dtype=torch.long)
    last_query = torch.full((len(stream.starts),), -1).scatter_reduce(0, stream.document[queries], queries, "amax")
    keys = (rows <= last_query[stream.document]).nonzero().flatten()
    teacher = stream.supervised.nonzero().flatten() + 1
    every = torch.unique(torch.cat((keys, queries)))

    place = torch.full((stream.tokens,), -1).index_put((queries,), torch.arange(len(queries)))
    sources = teacher[None] - 1 - torch.arange(steps)[:, None]
    inside = (sources >= 0) & (stream.document[sources.clamp(min=0)] == stream.document[teacher])
    query_of = torch.where(inside, place[sources.clamp(min=0)], -1)
    return SequencePlan(
        keys=keys,
        queries=queries,
        teacher=teacher,
        rows=every,
        key_slots=torch.searchsorted(every, keys),
        query_slots=torch.searchsorted(every, queries),
        query_of=query_of,
        supervised=query_of >= 0,
    )


def supervised_counts(stream: Stream, steps: int) -> Tensor:
    """[K] int64: how many rows step k supervises in the whole stream (the accuracies' denominators)."""
    depth = stream.position[stream.supervised]
    return torch.stack([(depth >= step).sum() for step in range(steps)])
