"""Load the packed streams of a step, with the rows of hidden states that this rank's plans need."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, count
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from eagle3.parallel.sequence import Reach, Rule, SequencePlan, SequenceSharding, Stream, plan_sequence
from eagle3.parallel.topology import agreed, gathered
from eagle3.states.rows import Rows, Target, deal_streams
from eagle3.states.spool import SpoolReader, Ticket
from eagle3.states.store.reader import HiddenStateStore
from eagle3.text.samples import Sample, SampleSet, Spans

# A ticket's counter has eight hex digits: 4 bits for the loader's channel, then 28 that count its requests for the
# sample.
CHANNEL_SHIFT = 28


class SampleReading(NamedTuple):
    """What a rank reads of a sample. Row indices are int64 on the CPU; there may be none."""

    sample: Sample
    supervised: Tensor  # [T] bool: the tokens that are trained on, of which all ranks together read what they need
    aux: Tensor  # the rows whose auxiliary states this rank reads
    teacher: Tensor  # the rows whose teacher's values it reads


class LiveSource:
    """Runs the target. Each sample is prefilled by one rank, which sends every other rank the rows that it needs.

    group: all ranks that work on one stream
    device: where the target's states are and the group's backend exchanges tensors
    keep_on: where the rows are held until they are needed; default: `device`
    """

    alone = False

    def __init__(
        self, target: Target, group: dist.ProcessGroup, device: torch.device, keep_on: torch.device | None = None
    ) -> None:
        self.target, self.group, self.device, self.keep_on = target, group, device, keep_on or device

    def rows(self, readings: Sequence[SampleReading]) -> list[Rows]:
        documents = [reading.sample.ids for reading in readings]
        if self.group.size() == 1:
            return [
                self._kept(Rows(states.aux[reading.aux], states.teacher[reading.teacher]))
                for states, reading in zip(self.target.prefill(documents), readings, strict=True)
            ]
        owners = deal_streams([*map(len, documents)], self.group.size())
        mine = owners[self.group.rank()]
        # Prefill everything before the first exchange: otherwise every batch would wait for the slowest rank.
        results = agreed(lambda: self.target.prefill([documents[index] for index in mine]), bool(mine)) or []
        own_wanted = {kind: [getattr(reading, kind).numpy() for reading in readings] for kind in ("aux", "teacher")}
        wanted = gathered(own_wanted, self.group)  # 8 bytes a row, against kilobytes of hidden states
        columns = [
            self._exchanged([states.named()[name] for states in results], owners, [each[kind] for each in wanted])
            for name, kind in (("aux", "aux"), ("values", "teacher"), ("argmax", "teacher"), ("logsumexp", "teacher"))
        ]
        per_document = zip(*columns, strict=True)
        return [self._kept(Rows(aux, self.target.teacher(*teacher))) for aux, *teacher in per_document]

    def _exchanged(
        self, tensors: Sequence[Tensor], owners: Sequence[Sequence[int]], wanted: Sequence[Sequence[np.ndarray]]
    ) -> list[Tensor]:
        """Exchange rows of one kind of tensor, bit for bit. Returns those of each document that this rank wants.
        Collective.

        tensors: [T, ...] for each document of this rank
        owners: for each rank, its documents. Each document has one owner; the first rank owns at least one.
        wanted: for each rank, the rows of each document that it wants
        """
        own, documents = wanted[self.group.rank()], [*chain(*owners)]
        # The first rank says what a row looks like, because others may own no document.
        shape, dtype = gathered((tensors[0].shape[1:], tensors[0].dtype) if tensors else None, self.group)[0]
        requests = [[of_rank[document] for document in owners[self.group.rank()]] for of_rank in wanted]
        send_counts = [sum(map(len, of_rank)) for of_rank in requests]
        outgoing = torch.empty(sum(send_counts), *shape, dtype=dtype, device=self.device)
        pieces = outgoing.split([len(rows) for rows in chain(*requests)])
        for tensor, rows, piece in zip([*tensors] * len(owners), chain(*requests), pieces, strict=True):
            torch.index_select(tensor, 0, torch.from_numpy(rows).to(self.device), out=piece)
        receive_counts = [sum(len(own[document]) for document in of_rank) for of_rank in owners]
        incoming = outgoing.new_empty(sum(receive_counts), *shape)
        dist.all_to_all_single(incoming, outgoing, receive_counts, send_counts, group=self.group)
        arrived = incoming.split([len(own[document]) for document in documents])
        by_document = dict(zip(documents, arrived, strict=True))
        return [by_document[document] for document in sorted(documents)]

    def _kept(self, rows: Rows) -> Rows:
        return rows.map(lambda tensor: tensor.to(self.keep_on))


@dataclass(frozen=True)
class StoredSource:
    """Reads a store. A rank reads only the chunks that hold its rows, and ranks do not communicate."""

    store: HiddenStateStore
    alone = True

    def rows(self, readings: Sequence[SampleReading]) -> list[Rows]:
        rows = [(reading.aux, reading.teacher) for reading in readings]
        return self.store.read([reading.sample for reading in readings], rows)


class SpooledSource:
    """Reads hidden states that a running target writes to a spool. Ranks do not communicate; they share the job's
    folder in the spool. All ranks of a stream call `rows` with the same samples, so they derive the same tickets
    (request names). Samples are read in the order of the call, even if they arrive in another order.

    ask: requests what all ranks together read of a sample (`SampleReading.supervised` tells), and returns at once; None
        on all ranks of the stream but one
    channel: different for each loader, so that the files of two loaders never share a name, even if ranks call the
    loaders in different orders
    """

    alone = True

    def __init__(
        self, reader: SpoolReader, job: str, ask: Callable[[Ticket, SampleReading], None] | None, channel: int = 0
    ) -> None:
        self.reader, self.job, self.ask, self.channel = reader, job, ask, channel
        self._times_asked: defaultdict[tuple[str, int], count[int]] = defaultdict(count)

    def beside(self, channel: int) -> "SpooledSource":
        """The same source for another loader."""
        return SpooledSource(self.reader, self.job, self.ask, channel)

    def rows(self, readings: Sequence[SampleReading]) -> list[Rows]:
        tickets = [self._ticket(reading.sample) for reading in readings]
        if self.ask:
            for ticket, reading in zip(tickets, readings, strict=True):
                self.ask(ticket, reading)
        results = []
        for ticket, reading in zip(tickets, readings, strict=True):
            location = self.reader.wait(ticket, reading.sample.ids)
            results.append(self.reader.read(location, reading.aux, reading.teacher))
            self.reader.done(ticket)
        return results

    def _ticket(self, sample: Sample) -> Ticket:
        tokens = len(sample.ids)
        time_asked = self.channel << CHANNEL_SHIFT | next(self._times_asked[sample.id, tokens])
        return Ticket.of(self.job, sample.id, tokens, time_asked)


# Where hidden states come from. `rows` gives the rows of each reading. If `alone`, a rank may call it without the
# others, from one thread at a time; otherwise all ranks of the job call it together, those of a stream with the same
# samples, each with its own rows.
HiddenStateSource = LiveSource | StoredSource | SpooledSource
Batch = TypeVar("Batch")  # what a loader makes of a stream


@dataclass(frozen=True)
class LoadedStream(Generic[Batch]):
    """This rank's part of a stream."""

    stream: Stream
    plan: SequencePlan
    batch: Batch


class DrawnSample(NamedTuple):
    """A sample in a global batch."""

    index: int  # in the sample set
    epoch: int  # the epoch that it is drawn in, from 0


def draw_batch(step: int, samples: int, batch_size: int, seed: int) -> list[DrawnSample]:
    """The global batch of optimiser step `step` (from 0): consecutive places in an endless sequence of shuffled epochs.

    No sample at the end of an epoch is dropped, and the order does not depend on the layout.
    """
    places = (divmod(position, samples) for position in range(step * batch_size, (step + 1) * batch_size))
    return [DrawnSample(int(_shuffled(samples, epoch, seed)[place]), epoch) for epoch, place in places]


@lru_cache(maxsize=2)  # a batch may reach into the next epoch
def _shuffled(samples: int, epoch: int, seed: int) -> Tensor:
    """The order of the samples in an epoch."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


class StreamLoader(Generic[Batch]):
    """Loads this rank's part of each stream that its data-parallel rank trains on.

    samples: the same on all ranks, in the same order
    make: makes a batch of a stream, its plan and its rows (aux at plan.rows, teacher at plan.teacher); may run in
        another thread, while the step before is trained
    reach: of the draft
    rule: says which rows of an answer teach
    sharding: how a stream is spread over its sequence ranks
    data: the group whose ranks have different streams
    sequence: the group whose ranks share a stream, with the Ulysses rank varying fastest
    spans: which part of a sample to supervise; default: its whole loss mask
    """

    def __init__(
        self,
        samples: SampleSet,
        source: HiddenStateSource,
        make: Callable[[Stream, SequencePlan, Rows], Batch],
        *,
        reach: Reach,
        rule: Rule,
        sharding: SequenceSharding,
        data: dist.ProcessGroup,
        sequence: dist.ProcessGroup,
        spans: Spans | None = None,
    ) -> None:
        assert sequence.size() == sharding.ranks, "a stream is dealt to the ranks of its sequence group"
        self.samples, self.source, self.make, self.spans = samples, source, make, spans
        self.data, self.sequence, self.rule = data, sequence, rule
        self.plan = partial(plan_sequence, reach=reach, sharding=sharding, rank=sequence.rank())
        self._background = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._ahead: tuple[tuple[list[DrawnSample], int], Future[list[LoadedStream[Batch]]]] | None = None

    def read_ahead(self, batch: Sequence[DrawnSample], accumulation: int) -> None:
        """Start loading, in the background, what the next `load` will ask for. Does nothing unless the source is
        `alone`."""
        if self.source.alone:
            self._ahead = (list(batch), accumulation), self._background.submit(self._load, batch, accumulation)

    def load(self, batch: Sequence[DrawnSample], accumulation: int) -> list[LoadedStream[Batch]]:
        """This rank's part of each of its `accumulation` streams of the global `batch`: a list of the same length on
        every rank. Collective unless the source is `alone`."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == (list(batch), accumulation):
            return ahead[1].result()
        return self._load(batch, accumulation)

    def _load(self, batch: Sequence[DrawnSample], accumulation: int) -> list[LoadedStream[Batch]]:
        members = self._members(batch, accumulation)
        streams = [
            Stream.pack([sample.ids for sample, _ in stream], [mask for _, mask in stream], self.rule)
            for stream in members
        ]
        stream_plans = [(stream, self.plan(stream)) for stream in streams]
        aux = chain.from_iterable(_by_document(stream, plan.rows) for stream, plan in stream_plans)
        teacher = chain.from_iterable(_by_document(stream, plan.teacher) for stream, plan in stream_plans)
        readings = zip(chain.from_iterable(members), aux, teacher, strict=True)
        document_rows = iter(self.source.rows([SampleReading(*member, *rows) for member, *rows in readings]))
        loaded = []
        for samples, (stream, plan) in zip(members, stream_plans, strict=True):
            rows = Rows.cat([next(document_rows) for _ in samples])
            loaded.append(LoadedStream(stream, plan, self.make(stream, plan, rows)))
        return loaded

    def order_identity(self, batch: Sequence[DrawnSample]) -> bytes:
        """Bytes that must be equal on every rank of the job: the ids and lengths of all samples, and a global batch.
        Ids stand for the contents, because a sample that does not match its id is never read."""
        ids = self.samples.digests[self.samples.indices]
        return ids.tobytes() + self.samples.lengths.tobytes() + np.asarray(batch, np.int64).tobytes()

    def _members(self, batch: Sequence[DrawnSample], accumulation: int) -> list[list[tuple[Sample, Tensor]]]:
        """For each stream of this data-parallel rank, its samples, each with the mask of its supervised tokens."""
        streams = self.data.size() * accumulation
        assignments = deal_streams(self.samples.lengths[[drawn.index for drawn in batch]].tolist(), streams)
        mine = assignments[self.data.rank() * accumulation : (self.data.rank() + 1) * accumulation]
        members = [[self._supervised(batch[index]) for index in stream] for stream in mine]
        # A stream without samples gets one token that teaches nothing, since its ranks must take part in collectives.
        filler = self.samples[batch[0].index]
        filler = replace(filler, ids=filler.ids[:1], loss_mask=filler.loss_mask[:1])  # the last row is never supervised
        return [stream or [(filler, filler.loss_mask)] for stream in members]

    def _supervised(self, drawn: DrawnSample) -> tuple[Sample, Tensor]:
        sample = self.samples[drawn.index]
        return sample, sample.loss_mask if self.spans is None else self.spans.draw(sample, drawn.epoch)


def _by_document(stream: Stream, rows: Tensor) -> list[Tensor]:
    """Split ascending rows of a stream into rows of each of its documents."""
    counts = torch.bincount(stream.document[rows], minlength=len(stream.starts))
    return list(stream.position[rows].split(counts.tolist()))
