"""Frozen rows that stay on the host and come to the device slice by slice; the next slice is copied while one is in
use."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# Where frozen rows (auxiliary states, the teacher's values) are kept: on the device, or on the host until a chunk needs
# them.
Residence = Literal["device", "host"]


@dataclass
class _Slot:
    buffer: Tensor  # on the device
    rows: slice | None = None  # those in it or on their way, until they are read
    filled: "torch.cuda.Event | None" = None  # when `rows` are there
    used: "torch.cuda.Event | None" = None  # when the reader of its previous content is done


class StreamedRows:
    """Rows of `host` [rows, width], a tensor on the host, as `host[slice]` on `device`. Slices are asked for in
    ascending order, over and over; each is valid until the next one is asked for.

    On a GPU the rows are pinned, and a separate stream copies one slice ahead into the other of two buffers. It does
    not touch that buffer before the work on its previous content is done, so the device never holds more than two
    slices.
    """

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.host, self.device = host.cpu().pin_memory() if self.cuda else host, device
        self.copies = torch.cuda.Stream(device) if self.cuda else None
        self.slots: list[_Slot] = []
        self.turn = 0

    def __len__(self) -> int:
        return len(self.host)

    def __getitem__(self, rows: slice) -> Tensor:
        if not self.cuda:
            return self.host[rows].to(self.device)
        block = slice(rows.start, min(rows.stop, len(self.host)))
        width, here = block.stop - block.start, torch.cuda.current_stream(self.device)
        if not self.slots or len(self.slots[0].buffer) < width:
            self.slots = [_Slot(self.host.new_empty(width, *self.host.shape[1:], device=self.device)) for _ in range(2)]
            for slot in self.slots:
                slot.buffer.record_stream(self.copies)
            self.copies.wait_stream(here)  # the memory may belong to work that is still queued
        self.slots[self.turn].used = here.record_event()  # everything that reads the last slice has been queued
        self.turn = 1 - self.turn
        slot, other = self.slots[self.turn], self.slots[1 - self.turn]
        if slot.rows != block:
            self._fill(slot, block)
        here.wait_event(slot.filled)
        slot.rows = None
        next_block = slice(block.stop, min(block.stop + width, len(self.host)))
        if next_block.start < next_block.stop:
            self._fill(other, next_block)
        return slot.buffer[:width]

    def _fill(self, slot: _Slot, rows: slice) -> None:
        with torch.cuda.stream(self.copies):
            if slot.used:
                self.copies.wait_event(slot.used)
            slot.buffer[: rows.stop - rows.start].copy_(self.host[rows], non_blocking=True)
            slot.filled = self.copies.record_event()
        slot.rows = rows
