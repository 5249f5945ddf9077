"""From a step's number to its packed streams with the rows of hidden states that this rank's plans name."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from eagle3.parallel.sequence import SequencePlan, SequenceSharding, Stream, plan_sequence
from eagle3.parallel.topology import agreed
from eagle3.states.batches import deal_streams
from eagle3.states.exchange import request_rows
from eagle3.states.rows import Rows, Target
from eagle3.states.spool import SpoolReader, Ticket
from eagle3.states.store.reader import HiddenStateStore, RowRequest, StoredTokens
from eagle3.text.samples import Sample, SampleSet
from eagle3.text.spans import Spans

# Times that a loader may ask for one sample, below 2**28, and the channel share eight hexadecimal digits.
CHANNEL_SHIFT = 28


class HiddenStateSource(Protocol):
    """Where hidden states come from. alone: ranks need not ask together, and threads of one may ask at a time."""

    alone: bool

    def rows(self, samples: Sequence[Sample], aux: Sequence[Tensor], teacher: Sequence[Tensor]) -> list[Rows]:
        """For each sample the auxiliary states at rows aux[i] and what the teacher needs at rows teacher[i] (int64 on
        the CPU, maybe none). All ranks of a stream call it together, unless `alone`: same samples, rows of their own."""


class LiveSource:
    """Runs the target. group: all ranks that work on one stream; each sample is prefilled by one of them, which sends
    every rank its rows. device: where the target's states lie and the group's backend exchanges tensors. keep_on: where
    the rows then wait for their turn."""

    alone = False

    def __init__(
        self, target: Target, group: ProcessGroup, device: torch.device, keep_on: torch.device | None = None
    ) -> None:
        self.target, self.group, self.device, self.keep_on = target, group, device, keep_on or device

    def rows(self, samples: Sequence[Sample], aux: Sequence[Tensor], teacher: Sequence[Tensor]) -> list[Rows]:
        if self.group.size() == 1:
            whole = self.target.prefill([sample.ids for sample in samples])
            return [
                self._kept(Rows(held.aux[a], held.teacher[b])) for held, a, b in zip(whole, aux, teacher, strict=True)
            ]
        owners = deal_streams([len(sample.ids) for sample in samples], self.group.size())
        mine = owners[self.group.rank()]
        # All before the first exchange: ranks in step after each batch would wait for the longest of every batch.
        whole = agreed((lambda: self.target.prefill([samples[place].ids for place in mine])) if mine else None) or []
        aux_requests = request_rows(aux, owners, self.group, self.device)
        teacher_requests = request_rows(teacher, owners, self.group, self.device)
        aux_rows = aux_requests.fetch([held.aux for held in whole])
        names = ("values", "argmax", "logsumexp")
        columns = [teacher_requests.fetch([getattr(held.teacher, name) for held in whole]) for name in names]
        teachers = [self.target.teacher(*of_document) for of_document in zip(*columns, strict=True)]
        return [self._kept(Rows(*pair)) for pair in zip(aux_rows, teachers, strict=True)]

    def _kept(self, rows: Rows) -> Rows:
        return rows.map(lambda tensor: tensor.to(self.keep_on))


class StoredSource:
    """Reads a store; of the hidden states nothing but this rank's rows leaves the disk, and ranks need not talk."""

    alone = True

    def __init__(self, store: HiddenStateStore) -> None:
        self.store = store

    def rows(self, samples: Sequence[Sample], aux: Sequence[Tensor], teacher: Sequence[Tensor]) -> list[Rows]:
        asked = zip(samples, aux, teacher, strict=True)
        return self.store.read([RowRequest(one.id, a, b, StoredTokens(one.ids, one.loss_mask)) for one, a, b in asked])


class SpooledSource:
    """A `HiddenStateSource` in which no rank talks to another: they meet in the job's folder of a spool.

    All ranks of a stream call `rows` for the same samples, so that they come to the same tickets; the samples are read in
    the order of the call, whatever order they arrive in. ask: on the one rank that asks the target for them, else None; told
    a ticket and its token ids, it returns at once. channel: another one for each loader, so that what one thread asks for
    names no file of another's, whichever of them comes first on a rank.
    """

    alone = True

    def __init__(
        self, reader: SpoolReader, job: str, ask: Callable[[Ticket, Tensor], None] | None, channel: int = 0
    ) -> None:
        self.reader, self.job, self.ask, self.channel = reader, job, ask, channel
        self._asked: Counter[tuple[str, int]] = Counter()

    def beside(self, channel: int) -> "SpooledSource":
        """The same for another loader."""
        return SpooledSource(self.reader, self.job, self.ask, channel)

    def rows(self, samples: Sequence[Sample], aux: Sequence[Tensor], teacher: Sequence[Tensor]) -> list[Rows]:
        tickets = [self._ticket(sample) for sample in samples]
        if self.ask:
            for ticket, sample in zip(tickets, samples, strict=True):
                self.ask(ticket, sample.ids)
        found = []
        for ticket, sample, a, b in zip(tickets, samples, aux, teacher, strict=True):
            location = self.reader.wait(ticket)
            self.reader.require_tokens(location, sample.ids)
            found.append(self.reader.read(location, a, b))
            self.reader.done(ticket)
        return found

    def _ticket(self, sample: Sample) -> Ticket:
        tokens = len(sample.ids)
        time_asked = self._asked[sample.id, tokens]
        self._asked[sample.id, tokens] += 1
        return Ticket.of(self.job, sample.id, tokens, self.channel << CHANNEL_SHIFT | time_asked)


@dataclass(frozen=True)
class LoadedStream:
    """One micro-batch before it goes to the draft's device. rows: aux at plan.rows, teacher at plan.teacher."""

    stream: Stream
    plan: SequencePlan
    rows: Rows


class Drawn(NamedTuple):
    """A sample of a global batch: its index in the set, and the epoch that it is drawn in, from 0."""

    index: int
    epoch: int


def draw_batch(step: int, samples: int, batch_size: int, seed: int) -> list[Drawn]:
    """The global batch of optimiser step `step` (from 0): consecutive places in an endless row of shuffled epochs, so that no
    last sample is dropped and the order does not depend on the layout."""
    places, orders = range(step * batch_size, (step + 1) * batch_size), {}
    for epoch in {place // samples for place in places}:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        orders[epoch] = torch.randperm(samples, generator=generator).tolist()
    return [Drawn(orders[place // samples][place % samples], place // samples) for place in places]


class StreamLoader:
    """Loads this rank's part of the streams of its data-parallel rank, the same streams on all ranks of that.

    samples: the same on all ranks, in the same order. steps: K of the unroll. sharding: of a stream over its sequence ranks. data: the group whose ranks have different streams.
    sequence: the group whose ranks share a stream, Ulysses fastest. window: of the draft's attention. spans: what of a sample
    to supervise; default: all of its loss mask.
    """

    def __init__(
        self,
        samples: SampleSet,
        source: HiddenStateSource,
        *,
        steps: int,
        sharding: SequenceSharding,
        data: ProcessGroup,
        sequence: ProcessGroup,
        window: int | None = None,
        spans: Spans | None = None,
    ) -> None:
        assert sequence.size() == sharding.ranks, "a stream is dealt to the ranks of its sequence group"
        self.samples, self.source, self.spans = samples, source, spans
        self.data, self.sequence = data, sequence
        self.plan = partial(plan_sequence, steps=steps, sharding=sharding, rank=sequence.rank(), window=window)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._ahead: tuple[tuple[list[Drawn], int], Future[list[LoadedStream]]] | None = None

    def read_ahead(self, batch: Sequence[Drawn], accumulation: int) -> None:
        """Begin in the background what `load` will be asked for next, where the source lets one rank ask alone."""
        if self.source.alone:
            self._ahead = (list(batch), accumulation), self._background.submit(self._load, batch, accumulation)

    def load(self, batch: Sequence[Drawn], accumulation: int) -> list[LoadedStream]:
        """This rank's part of its `accumulation` streams of the global `batch`, the same list on every rank. Collective over a
        stream's ranks where the source is."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == (list(batch), accumulation):
            return ahead[1].result()
        return self._load(batch, accumulation)

    def _load(self, batch: Sequence[Drawn], accumulation: int) -> list[LoadedStream]:
        members = self._members(batch, accumulation)
        streams = [Stream.pack(*zip(*((s.ids, mask) for s, mask in stream), strict=True)) for stream in members]
        plans = [self.plan(stream) for stream in streams]
        aux, teacher = [], []
        for stream, plan in zip(streams, plans, strict=True):
            aux += _by_document(stream, plan.rows)
            teacher += _by_document(stream, plan.teacher)
        found = iter(self.source.rows([sample for stream in members for sample, _ in stream], aux, teacher))
        return [
            LoadedStream(stream, plan, Rows.cat([next(found) for _ in samples]))
            for samples, stream, plan in zip(members, streams, plans, strict=True)
        ]

    def order_identity(self, batch: Sequence[Drawn]) -> bytes:
        """What must be the same on every rank of the job: ids and lengths of all samples, and a global batch. Ids stand for
        contents: a sample that does not fit its own is never read."""
        ids = self.samples.digests[self.samples.indices]
        return ids.tobytes() + self.samples.lengths.tobytes() + np.asarray(batch, np.int64).tobytes()

    def _members(self, batch: Sequence[Drawn], accumulation: int) -> list[list[tuple[Sample, Tensor]]]:
        """The samples of each stream of this data-parallel rank, and what of each is supervised."""
        streams = self.data.size() * accumulation
        dealt = deal_streams(self.samples.lengths[[drawn.index for drawn in batch]].tolist(), streams)
        mine = dealt[self.data.rank() * accumulation : (self.data.rank() + 1) * accumulation]
        members = [[self._supervised(batch[place]) for place in stream] for stream in mine]
        # A stream that gets no sample has one token that teaches nothing: its ranks must enter every collective all the same.
        spare = self.samples[batch[0].index]
        spare = replace(spare, ids=spare.ids[:1], loss_mask=spare.loss_mask[:1])  # a last row is never supervised
        return [stream or [(spare, spare.loss_mask)] for stream in members]

    def _supervised(self, drawn: Drawn) -> tuple[Sample, Tensor]:
        sample = self.samples[drawn.index]
        return sample, sample.loss_mask if self.spans is None else self.spans.draw(sample, drawn.epoch)


def _by_document(stream: Stream, rows: Tensor) -> list[Tensor]:
    """Ascending rows of the stream as rows of each of its documents."""
    counts = torch.bincount(stream.document[rows], minlength=len(stream.starts))
    return list(stream.position[rows].split(counts.tolist()))
