"""Frozen rows that wait on the host and come to the device a chunk at a time, the next one while this one is used."""

import torch
from torch import Tensor


class StreamedRows:
    """Rows of `held` [rows, width], on the host, as `held[slice]` on `device`; slices are asked for in ascending order,
    again and again. On a GPU the rows are pinned and copied on a stream of their own, one slice ahead."""

    def __init__(self, held: Tensor, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.held, self.device = held.cpu().pin_memory() if self.cuda else held, device
        self.copies = torch.cuda.Stream(device) if self.cuda else None
        self.ahead: tuple[slice, Tensor, torch.cuda.Event] | None = None

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, rows: slice) -> Tensor:
        if not self.cuda:
            return self.held[rows].to(self.device)
        wanted = slice(rows.start, min(rows.stop, len(self.held)))
        if self.ahead is None or self.ahead[0] != wanted:
            self.ahead = self._begin(wanted)
        _, arriving, done = self.ahead
        here = torch.cuda.current_stream(self.device)
        here.wait_event(done)
        arriving.record_stream(here)
        following = slice(wanted.stop, min(2 * wanted.stop - wanted.start, len(self.held)))
        self.ahead = self._begin(following) if following.start < following.stop else None
        return arriving

    def _begin(self, rows: slice) -> tuple[slice, Tensor, "torch.cuda.Event"]:
        with torch.cuda.stream(self.copies):
            arriving = self.held[rows].to(self.device, non_blocking=True)
        return rows, arriving, self.copies.record_event()
