"""A `Target` made of running SGLang servers."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import count, islice

import torch
from torch import Tensor

from eagle3.states.rows import KeptRows, Rows
from eagle3.states.spool import SpoolReader, Ticket, WantedRows, spool_bytes
from eagle3.states.store.reader import Location
from eagle3.states.store.shard import Encoding
from eagle3.targets.logits import check_tokens
from eagle3.targets.sglang.client import Producer
from eagle3.text.samples import Sample

# Number of rows read from the spool at a time.
PART_ROWS = 8192
# Most documents requested ahead: those waiting for room in the spool and those that servers are working on.
AHEAD = 256


class SGLangTarget:
    """A `Target` that running servers compute. Hidden states come through a spool, in the spool's number format.

    encoding: how rows are encoded in the spool; its reach says which rows of a sample `arriving` gets
    producer: must have no other readers

    Raises UserError if the servers refuse a request.
    """

    def __init__(self, producer: Producer, encoding: Encoding, vocab_size: int) -> None:
        assert producer.readers == 0
        self.producer, self.encoding = producer, encoding
        self.reader = SpoolReader(producer.spool.path, 0, vocab_size)
        self.vocab_size = vocab_size
        self.teacher = encoding.teacher
        self._numbers = count()

    def prefill(self, documents: Sequence[Tensor]) -> list[Rows]:
        """See `Target.prefill`."""
        arriving = self._arriving((ids, WantedRows.all(len(ids))) for ids in documents)
        results = {place: Rows.cat([part.rows for part in parts]) for place, parts in arriving}
        return [results[place] for place in range(len(documents))]

    def arriving(self, documents: Iterable[Sample]) -> Iterator[tuple[int, Iterator[KeptRows]]]:
        """Prefill documents and yield their hidden states in the order in which they arrive.

        Yields each document's index and its rows in parts, which must be read before the next document is taken. New
        documents are taken from the iterable as others finish.
        """
        return self._arriving((each.ids, WantedRows(each.loss_mask, self.encoding.reach)) for each in documents)

    def _arriving(self, documents: Iterable[tuple[Tensor, WantedRows]]) -> Iterator[tuple[int, Iterator[KeptRows]]]:
        outstanding: dict[Future[None], tuple[int, Ticket, Tensor]] = {}
        numbered_documents = enumerate(documents)
        while True:
            for place, (ids, wanted) in islice(numbered_documents, AHEAD - len(outstanding)):
                check_tokens(ids, place, self.vocab_size)
                ticket = Ticket.of(self.producer.spool.job, f"{next(self._numbers):032x}", len(ids), time_asked=0)
                future = self.producer.ask(ticket, ids, wanted, spool_bytes(self.encoding, wanted))
                outstanding[future] = place, ticket, ids
            if not outstanding:
                return
            arrived, _ = wait(outstanding, return_when=FIRST_COMPLETED)
            future = next(iter(arrived))  # one at a time, so that the next document is asked for meanwhile
            place, ticket, ids = outstanding.pop(future)
            future.result()
            yield place, self._parts(self.reader.wait(ticket, ids))
            self.producer.release(ticket)

    def _parts(self, location: Location) -> Iterator[KeptRows]:
        masks = self.reader.kept(location)
        for rows in torch.arange(location.entry.tokens).split(PART_ROWS):
            seen, taught = (mask[rows] for mask in masks)
            yield KeptRows(seen, taught, self.reader.read(location, rows[seen], rows[taught]))
