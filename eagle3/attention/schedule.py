"""Cuts the attention of any queries to any keys of a stream into dense blocks. Positions decide, not layouts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.attention.block import Visibility

# Queries in one block: enough for dense kernels, few enough that the masked diagonal stays a small share.
QUERY_BLOCK = 512
# Keys in one full piece: a kernel's copies of them stay small however long the prefix is.
KEY_BLOCK = 8192
# Rows from the first to the last query of a block, in blocks: limits what a mask may cover if queries have gaps.
SPAN_BLOCKS = 8
# Queries in a masked piece under a window: the window divided by WINDOW_SHARE, but at least FEWEST_QUERIES, or there
# would be more pieces than work. A piece computes window + queries - 1 keys for each query, which sees only `window` of
# them.
WINDOW_SHARE, FEWEST_QUERIES = 4, 64


class Piece(NamedTuple):
    """Queries [start, stop) against keys [start, stop), counted along the query and key tensors."""

    queries: slice
    keys: slice
    visibility: Visibility


@dataclass(frozen=True)
class PrefixSchedule:
    """Which queries see which keys, cut into pieces. A query sees the keys of its document up to its own row or, with a
    window, the last `window` of them."""

    query_rows: Tensor  # [Q] rows of the stream, ascending, padded with -1 at the end
    key_rows: Tensor  # [S] likewise
    pieces: tuple[Piece, ...]
    window: int | None = None

    def visible(self, piece: Piece) -> Tensor | None:
        """The mask [queries, keys] of a `masked` piece; None for any other."""
        if piece.visibility != "masked":
            return None
        queries, keys = self.query_rows[piece.queries, None], self.key_rows[None, piece.keys]
        visible = keys <= queries
        return visible if self.window is None else visible & (keys > queries - self.window)

    def dense_pieces(self, bands: bool) -> Iterator[Piece]:
        """Yields all pieces. Unless `bands` are allowed, cuts banded pieces into masked ones, for kernels without
        windows."""
        for piece in self.pieces:
            if bands or piece.visibility != "banded":
                yield piece
            else:
                own = piece.keys.stop - piece.queries.stop  # from a query's place to the place of its own row's key
                for start, stop in _slices(piece.queries, _masked_queries(self.window)):
                    first = max(piece.keys.start, start + own - self.window + 1)
                    yield Piece(slice(start, stop), slice(first, stop + own), "masked")

    def to(self, device: torch.device) -> "PrefixSchedule":
        return PrefixSchedule(self.query_rows.to(device), self.key_rows.to(device), self.pieces, self.window)


def schedule_prefix(
    query_rows: Tensor,
    query_positions: Tensor,
    key_rows: Tensor,
    *,
    block: int = QUERY_BLOCK,
    key_block: int = KEY_BLOCK,
    window: int | None = None,
) -> PrefixSchedule:
    """Cuts the attention of query rows to key rows (each ascending, padded with -1 at the end) into dense pieces.

    The keys may be any subset of the rows: a ring rank's share. Queries are taken in runs of at most `block`, inside
    one document and without long gaps. A run becomes:
    - full rectangles, of at most `key_block` keys, over the keys that all its queries see;
    - on the diagonal, a causal square if the keys there are exactly its own rows, else a mask;
    - under a window, another mask on the far side. If the run's rows are consecutive and all keys that they see are
      here, it becomes a single `banded` piece instead; other runs are kept short under a window.

    Queries that see no key of a piece are left out of it, since such a row has no softmax.

    query_positions: [Q], in the document.
    """
    queries, keys = query_rows[query_rows >= 0], key_rows[key_rows >= 0].contiguous()
    firsts = queries - query_positions[: len(queries)]
    cutter = _Cutter(queries, firsts, keys, key_block, window)
    pieces: list[Piece] = []
    for start, stop in _runs(queries, firsts, block, SPAN_BLOCKS * block):
        if window is None:
            pieces += cutter.run(start, stop)
        elif band := cutter.band(start, stop):
            pieces += band
        else:
            run = slice(start, stop)
            for begin, end in _runs(queries[run], firsts[run], min(block, _masked_queries(window)), window):
                pieces += cutter.run(start + begin, start + end)
    return PrefixSchedule(query_rows, key_rows, tuple(pieces), window)


@dataclass(frozen=True)
class _Cutter:
    """Cuts what runs of queries see of the keys into pieces."""

    queries: Tensor
    firsts: Tensor  # [Q]: first row of each query's document
    keys: Tensor
    key_block: int
    window: int | None

    def band(self, start: int, stop: int) -> list[Piece]:
        """The single piece of a run of consecutive rows if all keys that it sees are here; else an empty list."""
        first, last = int(self.queries[start]), int(self.queries[stop - 1])
        low = max(int(self.firsts[start]), first - self.window + 1)
        begin, end = self._places(low, last + 1)
        whole = last - first == stop - start - 1 and end - begin == last + 1 - low
        return self._pieces((start, stop), (begin, end), "banded") if whole else []

    def run(self, start: int, stop: int) -> list[Piece]:
        rows, document, window = self.queries[start:stop], int(self.firsts[start]), self.window
        first, last = int(rows[0]), int(rows[-1])
        low, far = (document if window is None else max(document, row - window + 1) for row in (first, last))
        low, far, diagonal, after, high = self._places(low, far, first, first + 1, last + 1)
        pieces = []
        if low < far:  # keys that the run's last queries no longer see
            seeing = int(torch.searchsorted(rows, self.keys[far - 1] + window))
            pieces += self._pieces((start, start + seeing), (low, far), "masked")
        if torch.equal(self.keys[diagonal:high], rows):
            pieces += self._pieces((start, stop), (far, diagonal), "full")
            return pieces + self._pieces((start, stop), (diagonal, high), "causal")
        pieces += self._pieces((start, stop), (far, after), "full")
        if after < high:
            blind = int(torch.searchsorted(rows, self.keys[after]))
            pieces += self._pieces((start + blind, stop), (after, high), "masked")
        return pieces

    def _pieces(self, queries: tuple[int, int], keys: tuple[int, int], visibility: Visibility) -> list[Piece]:
        width = self.key_block if visibility == "full" else max(1, keys[1] - keys[0])
        return [Piece(slice(*queries), slice(*part), visibility) for part in _slices(slice(*keys), width)]

    def _places(self, *rows: int) -> list[int]:
        return torch.searchsorted(self.keys, torch.tensor(rows)).tolist()


def _masked_queries(window: int) -> int:
    return max(FEWEST_QUERIES, window // WINDOW_SHARE)


def _slices(whole: slice, width: int) -> Iterator[tuple[int, int]]:
    for start in range(whole.start, whole.stop, width):
        yield start, min(start + width, whole.stop)


def _runs(queries: Tensor, firsts: Tensor, block: int, span: int) -> list[tuple[int, int]]:
    """Runs [start, stop) of at most `block` queries within one document. A run is also cut where two neighbours are
    more than `block` rows apart, and where it would reach over more than `span` rows."""
    cuts = (firsts.diff() != 0) | (queries.diff() > block)
    bounds = [0, *(cuts.nonzero().flatten() + 1).tolist(), len(queries)]
    reach = torch.searchsorted(queries.contiguous(), queries + span).tolist()
    runs = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        while begin < end:
            stop = min(begin + block, end, reach[begin])
            runs.append((begin, stop))
            begin = stop
    return runs
