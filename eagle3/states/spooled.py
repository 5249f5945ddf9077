"""Hidden states for training from a running target beside it: each rank reads its rows of samples as they come."""

from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor

from eagle3.states.rows import Rows
from eagle3.states.spool import SpoolReader, Ticket
from eagle3.text.samples import Sample

# Times that a loader may ask for one sample, below 2**28, and the channel share eight hexadecimal digits.
CHANNEL_SHIFT = 28


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
