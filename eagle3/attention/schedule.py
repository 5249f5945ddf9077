"""Cuts the attention of any queries to any keys of a stream into dense blocks. Positions decide, not layouts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
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
# Consecutive queries that become one band: fewer share blocks with their neighbours, since a launch has its own cost.
BAND_QUERIES = 64
# Queries, and keys, in a piece of a band that has more than twice as many of both.
BAND_ROWS = 2**17
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
    block: int = QUERY_BLOCK  # queries and keys in one piece, for kernels that take no bands
    key_block: int = KEY_BLOCK

    def visible(self, piece: Piece) -> Tensor | None:
        """The mask [queries, keys] of a `masked` piece; None for any other."""
        if piece.visibility != "masked":
            return None
        queries, keys = self.query_rows[piece.queries, None], self.key_rows[None, piece.keys]
        visible = keys <= queries
        return visible if self.window is None else visible & (keys > queries - self.window)

    def dense_pieces(self, bands: bool) -> Iterator[Piece]:
        """Yields all pieces. Cuts banded pieces: into others for kernels that take no `bands`, and for those that do
        if they are so long that what a kernel takes for itself would matter."""
        for piece in self.pieces:
            short = _length(piece.queries) + _length(piece.keys) <= 2 * BAND_ROWS
            if piece.visibility != "banded":
                yield piece
            elif bands and short:
                square = self.window is None and _length(piece.queries) == _length(piece.keys)
                yield piece._replace(visibility="causal") if square else piece
            elif self.window is None:
                yield from self._squares(piece, *((BAND_ROWS,) * 2 if bands else (self.block, self.key_block)))
            else:
                yield from self._strips(piece, bands)

    def _squares(self, band: Piece, block: int, key_block: int) -> Iterator[Piece]:
        """A band without a window: blocks of queries, each with the keys before it and a causal square."""
        own = band.keys.stop - band.queries.stop  # from a query's place to the place of its own row's key
        for start, stop in _slices(band.queries, block):
            before = slice(band.keys.start, start + own)
            yield from (Piece(slice(start, stop), slice(*part), "full") for part in _slices(before, key_block))
            yield Piece(slice(start, stop), slice(start + own, stop + own), "causal")

    def _strips(self, band: Piece, bands: bool) -> Iterator[Piece]:
        """A band under a window: blocks of queries, each with the keys that some of them see, as bands or masks."""
        own = band.keys.stop - band.queries.stop
        for start, stop in _slices(band.queries, BAND_ROWS if bands else _masked_queries(self.window)):
            first = max(band.keys.start, start + own - self.window + 1)
            yield Piece(slice(start, stop), slice(first, stop + own), "banded" if bands else "masked")

    def map(self, change: Callable[[Tensor], Tensor]) -> "PrefixSchedule":
        """Applies `change` to both tensors."""
        return replace(self, query_rows=change(self.query_rows), key_rows=change(self.key_rows))


def overlap(pieces: Sequence[Piece]) -> bool:
    """Whether a query is in more than one of the pieces, so that their outputs have to be merged."""
    return any(after.queries.start < before.queries.stop for before, after in pairwise(pieces))


def schedule_prefix(
    query_rows: Tensor,
    query_positions: Tensor,
    key_rows: Tensor,
    window: int | None = None,
    *,
    block: int = QUERY_BLOCK,
    key_block: int = KEY_BLOCK,
) -> PrefixSchedule:
    """Cuts the attention of query rows to key rows (each ascending, padded with -1 at the end) into dense pieces.

    The keys may be any subset of the rows: a ring rank's share. Consecutive queries of a document become one `banded`
    piece if all keys that they see are here. Other queries are taken in runs of at most `block`, inside one document
    and without long gaps (and kept short under a window). A run becomes:
    - full rectangles, of at most `key_block` keys, over the keys that all its queries see;
    - on the diagonal, a causal square if the keys there are exactly its own rows, else a mask;
    - under a window, another mask on the far side.

    Queries that see no key of a piece are left out of it, since such a row has no softmax.

    query_positions: [Q], in the document.
    """
    queries, keys = query_rows[query_rows >= 0], key_rows[key_rows >= 0].contiguous()
    firsts = queries - query_positions[: len(queries)]
    cutter = _Cutter(queries, firsts, keys, key_block, window)
    pieces: list[Piece] = []
    for start, stop, consecutive in _stretches(queries, firsts):
        if consecutive and (band := cutter.band(start, stop)):
            pieces += band
            continue
        for begin, end in cutter.runs(start, stop, block, SPAN_BLOCKS * block):
            if band := cutter.band(begin, end):
                pieces += band
            elif window is None:
                pieces += cutter.run(begin, end)
            else:
                for part in cutter.runs(begin, end, min(block, _masked_queries(window)), window):
                    pieces += cutter.run(*part)
    return PrefixSchedule(query_rows, key_rows, tuple(pieces), window, block, key_block)


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
        document = int(self.firsts[start])
        low = document if self.window is None else max(document, first - self.window + 1)
        begin, end = self._places(low, last + 1)
        whole = last - first == stop - start - 1 and end - begin == last + 1 - low
        return self._pieces((start, stop), (begin, end), "banded") if whole else []

    def runs(self, start: int, stop: int, block: int, span: int) -> Iterator[tuple[int, int]]:
        """Runs of at most `block` queries within one document. A run is also cut where two neighbours are more than
        `block` rows apart, and where it would reach over more than `span` rows."""
        queries, firsts = self.queries[start:stop].contiguous(), self.firsts[start:stop]
        cuts = (firsts.diff() != 0) | (queries.diff() > block)
        bounds = [0, *(cuts.nonzero().flatten() + 1).tolist(), len(queries)]
        reach = torch.searchsorted(queries, queries + span).tolist()
        for begin, end in pairwise(bounds):
            while begin < end:
                last = min(begin + block, end, reach[begin])
                yield start + begin, start + last
                begin = last

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


def _length(part: slice) -> int:
    return part.stop - part.start


def _slices(whole: slice, width: int) -> Iterator[tuple[int, int]]:
    for start in range(whole.start, whole.stop, width):
        yield start, min(start + width, whole.stop)


def _stretches(queries: Tensor, firsts: Tensor) -> Iterator[tuple[int, int, bool]]:
    """Yields stretches [start, stop) of the queries, and whether a stretch is BAND_QUERIES or more consecutive rows of
    one document. All queries between two of those are one stretch."""
    bounds = [0, *(((firsts.diff() != 0) | (queries.diff() != 1)).nonzero().flatten() + 1).tolist(), len(queries)]
    open_start = 0
    for start, stop in pairwise(bounds):
        if stop - start >= BAND_QUERIES:
            if open_start < start:
                yield open_start, start, False
            yield start, stop, True
            open_start = stop
    if open_start < len(queries):
        yield open_start, len(queries), False
