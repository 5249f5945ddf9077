"""A target that runs in SGLang servers, for whoever wants hidden states of whole documents."""

import queue
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import count

import torch
from torch import Tensor

from eagle3.states.capture import token_bytes
from eagle3.states.rows import Rows
from eagle3.states.spool import SpoolReader, Ticket
from eagle3.states.store.reader import Location
from eagle3.states.store.shard import DATA_START, Encoding
from eagle3.targets.logits import check_tokens
from eagle3.targets.sglang.client import Producer

# Rows that are read at a time from a sample in the spool.
PART_ROWS = 8192
# Documents that wait for room in the spool, beside those that servers work on.
AHEAD = 256


def spool_bytes(encoding: Encoding, tokens: int) -> int:
    """What a sample takes in the spool; its index and its tables, some bytes a chunk, are left out."""
    return DATA_START + round(tokens * token_bytes(encoding))


class SGLangTarget:
    """A `Target` behind running servers: hidden states come through a spool, in its number format.

    encoding: of the spool. producer: has no readers but this one. Raises UserError for what the servers refuse.
    """

    def __init__(
        self, producer: Producer, encoding: Encoding, *, vocab_size: int, aux_layers: tuple[int, int, int]
    ) -> None:
        assert producer.readers == 0
        self.producer, self.encoding = producer, encoding
        self.reader = SpoolReader(producer.spool.path, 0)
        self.hidden_size, self.vocab_size, self.aux_layers = encoding.hidden_size, vocab_size, aux_layers
        self.teacher = encoding.teacher
        self._numbers = count()

    def prefill(self, documents: Sequence[Tensor]) -> list[Rows]:
        """See `Target.prefill`."""
        found = {place: Rows.cat([*parts]) for place, parts in self.arriving(documents)}
        return [found[place] for place in range(len(documents))]

    def arriving(self, documents: Iterable[Tensor]) -> Iterator[tuple[int, Iterator[Rows]]]:
        """Hidden states of documents (token ids [T] each) in the order in which they come: a document's place in the row of
        documents, and its rows, some at a time; to be read once, before the next document is asked for. Documents are taken
        from the iterable as the servers can take more."""
        there: queue.SimpleQueue[tuple[int, Ticket, Tensor, Future[None]]] = queue.SimpleQueue()
        waiting, asked = 0, enumerate(documents)
        while True:
            while waiting < AHEAD and (following := next(asked, None)) is not None:
                place, ids = following
                check_tokens(ids, place, self.vocab_size)
                ticket = Ticket.of(self.producer.spool.job, f"{next(self._numbers):032x}", len(ids), time_asked=0)
                future = self.producer.ask(ticket, ids, spool_bytes(self.encoding, len(ids)))
                future.add_done_callback(lambda done, p=place, t=ticket, i=ids: there.put((p, t, i, done)))
                waiting += 1
            if not waiting:
                return
            place, ticket, ids, future = there.get()
            waiting -= 1
            future.result()
            location = self.reader.wait(ticket)
            self.reader.require_tokens(location, ids)
            yield place, self._parts(location)
            self.reader.forget(ticket)
            self.producer.release(ticket)

    def _parts(self, location: Location) -> Iterator[Rows]:
        for rows in torch.arange(location.entry.tokens).split(PART_ROWS):
            yield self.reader.read(location, rows, rows)
