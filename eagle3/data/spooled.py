"""Hidden states for training from a running target beside it: each rank reads its rows of samples as they come."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor

from eagle3.data.samples import Sample
from eagle3.data.spool import SpoolReader, Ticket
from eagle3.data.store.reader import DocumentRows


class SpooledSource:
    """A `HiddenStateSource` in which no rank talks to another: they meet in the job's folder of a spool.

    All ranks of a stream call `rows` for the same samples, so that they come to the same tickets; the samples are read in
    the order of the call, whatever order they arrive in. ask: on the one rank that asks the target for them, else None; told
    a ticket and its token ids, it returns at once.
    """

    alone = True

    def __init__(self, reader: SpoolReader, job: str, ask: Callable[[Ticket, Tensor], None] | None) -> None:
        self.reader, self.job, self.ask = reader, job, ask
        self._asked: Counter[tuple[str, int]] = Counter()
        self._lock = threading.Lock()

    def rows(self, samples: Sequence[Sample], aux: Sequence[Tensor], teacher: Sequence[Tensor]) -> list[DocumentRows]:
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
        """Training reads ahead while held-out samples are measured, so two threads may be here. Which of them comes first
        can differ between ranks only for one and the same sample, where it does not matter."""
        tokens = len(sample.ids)
        with self._lock:
            time_asked = self._asked[sample.id, tokens]
            self._asked[sample.id, tokens] += 1
        return Ticket.of(self.job, sample.id, tokens, time_asked)
