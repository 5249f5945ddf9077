"""Frozen rows that stay on the host and come to the device slice by slice; the next slice is copied while one is in
use."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class _Slot:
    """A buffer on the device."""

    buffer: Tensor
    rows: slice | None = None  # what is, or will be, in it and has not been read
    filled: "torch.cuda.Event | None" = None  # when `rows` are there
    used: "torch.cuda.Event | None" = None  # when the reader of its previous content is done


class StreamedRows:
    """Rows of `held` [rows, width], which are on the host, as `held[slice]` on `device`. Slices are asked for in
    ascending order, over and over; each is valid until the next one is asked for.

    On a GPU the rows are pinned, and a separate stream copies one slice ahead into the other of two buffers. It does
    not touch that buffer before the work on its previous content is done, so the device never holds more than two
    slices.
    """

    def __init__(self, held: Tensor, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.held, self.device = held.cpu().pin_memory() if self.cuda else held, device
        self.copies = torch.cuda.Stream(device) if self.cuda else None
        self.slots: list[_Slot] = []
        self.turn = 0

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, rows: slice) -> Tensor:
        if not self.cuda:
            return self.held[rows].to(self.device)
        wanted = slice(rows.start, min(rows.stop, len(self.held)))
        width, here = wanted.stop - wanted.start, torch.cuda.current_stream(self.device)
        if not self.slots or len(self.slots[0].buffer) < width:
            self.slots = [_Slot(self.held.new_empty(width, *self.held.shape[1:], device=self.device)) for _ in range(2)]
            for slot in self.slots:
                slot.buffer.record_stream(self.copies)
            self.copies.wait_stream(here)  # the memory may belong to work that is still queued
        self.slots[self.turn].used = here.record_event()  # everything that reads the last slice has been queued
        self.turn = 1 - self.turn
        slot, other = self.slots[self.turn], self.slots[1 - self.turn]
        if slot.rows != wanted:
            self._fill(slot, wanted)
        here.wait_event(slot.filled)
        slot.rows = None
        following = slice(wanted.stop, min(wanted.stop + width, len(self.held)))
        if following.start < following.stop:
            self._fill(other, following)
        return slot.buffer[:width]

    def _fill(self, slot: _Slot, rows: slice) -> None:
        with torch.cuda.stream(self.copies):
            if slot.used:
                self.copies.wait_event(slot.used)
            slot.buffer[: rows.stop - rows.start].copy_(self.held[rows], non_blocking=True)
            slot.filled = self.copies.record_event()
        slot.rows = rows
