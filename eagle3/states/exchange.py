"""Rows of documents that one rank of a group holds each, sent to the ranks that ask for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class RowRequests:
    """Who wants which rows, known to those who hold them; `fetch` then moves one kind of rows, as often as wanted.

    wanted: rows that this rank wants of each owner's documents together; sizes: of each document, in the owners' order.
    asked [n] int64, on the exchange's device: the rows that others (and itself) want of this rank's documents, by rank
    of the group, then by document; asked_sizes: their numbers, [ranks][documents held].
    """

    owners: Sequence[Sequence[int]]
    wanted: list[int]
    sizes: list[int]
    asked: Tensor
    asked_sizes: list[list[int]]
    group: ProcessGroup

    def fetch(self, held: Sequence[Tensor]) -> list[Tensor]:
        """Collective. held: [T, ...] of each document that this rank owns, in the order of `owners`, on the exchange's
        device; same number format and width on every rank. Returns for each document of the group, in the order of
        the request, its wanted rows [n, ...], bit for bit."""
        assert len(held) == len(self.owners[self.group.rank()]), "a rank sends of exactly the documents it owns"
        row = self._row_format(held)
        outgoing = row.new_empty(len(self.asked), *row.shape)
        sizes = [size for of_rank in self.asked_sizes for size in of_rank]
        documents = [document for _ in self.asked_sizes for document in held]
        pieces = zip(documents, self.asked.split(sizes), outgoing.split(sizes), strict=True)
        for document, rows, piece in pieces:
            torch.index_select(document, 0, rows, out=piece)
        arrived = _all_to_all(outgoing, [sum(of_rank) for of_rank in self.asked_sizes], self.wanted, self.group)
        order = [document for documents in self.owners for document in documents]
        parts = dict(zip(order, arrived.split(self.sizes), strict=True))
        return [parts[document] for document in range(len(order))]

    def _row_format(self, held: Sequence[Tensor]) -> Tensor:
        """An empty tensor like one row. The group's first rank, which always owns a document, tells the others."""
        told = [(held[0].shape[1:], held[0].dtype) if held else None]
        dist.broadcast_object_list(told, group=self.group, group_src=0, device=self.asked.device)
        shape, number_format = told[0]
        return torch.empty(shape, dtype=number_format, device=self.asked.device)


def request_rows(
    rows: Sequence[Tensor], owners: Sequence[Sequence[int]], group: ProcessGroup, device: torch.device
) -> RowRequests:
    """Collective over `group`. rows: for each document, on every rank the same documents, the rows that this rank
    wants, int64 on the CPU, any order, maybe none. owners: for each rank of the group the documents it holds; each
    document has one owner and the first rank owns at least one. device: where the group's backend exchanges tensors.

    Asking costs 8 bytes a row, beside kilobytes of hidden states, and spares every rank the plans of all others.
    """
    order = [document for documents in owners for document in documents]
    assert owners[0] and sorted(order) == list(range(len(rows))), "each document has one owner, the first rank has one"
    counts = torch.tensor([len(wanted) for wanted in rows], device=device)
    everyones = [torch.empty_like(counts) for _ in owners]
    dist.all_gather(everyones, counts, group=group)
    wanted = [sum(len(rows[document]) for document in documents) for documents in owners]
    by_rank = torch.stack(everyones).tolist()
    asked_sizes = [[asks[document] for document in owners[group.rank()]] for asks in by_rank]
    asked = _all_to_all(
        torch.cat([rows[document] for document in order]).to(device),
        wanted,
        [sum(of_rank) for of_rank in asked_sizes],
        group,
    )
    return RowRequests(owners, wanted, [len(rows[document]) for document in order], asked, asked_sizes, group)


def _all_to_all(outgoing: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """Send sent[r] consecutive rows to each rank r, which gets them in the order of the senders."""
    arrived = outgoing.new_empty(sum(received), *outgoing.shape[1:])
    dist.all_to_all_single(arrived, outgoing, received, sent, group=group)
    return arrived
