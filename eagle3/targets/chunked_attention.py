"""Attention of a target over one long document, chunk by chunk, each chunk and the cache spread over ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from eagle3.attention.ring import RingAttention, SharedKeyValue
from eagle3.attention.schedule import PrefixSchedule, schedule_prefix
from eagle3.attention.ulysses import Ulysses
from eagle3.errors import SharedUserError, UserError

# What `window_of_mask` says beside a window.
NO_WINDOW, UNKNOWN_MASK = 0, -1
# Arguments that repeat where the tokens are, which rope has used already.
WHERE = ("position_ids", "cache_position")


class Chunk(NamedTuple):
    """Tokens [start, stop) of the document, `share` of them a rank; the last ranks' may be pads."""

    start: int
    stop: int
    share: int


def deal_chunks(length: int, ranks: int, chunk_tokens: int) -> list[Chunk]:
    starts = range(0, length, ranks * chunk_tokens)
    stops = (min(start + ranks * chunk_tokens, length) for start in starts)
    return [Chunk(start, stop, -(-(stop - start) // ranks)) for start, stop in zip(starts, stops, strict=True)]


@dataclass
class ChunkedAttention:
    """Attention of one document that is under way: its cache and the current chunk. `attend` is what transformers calls in
    every layer.

    refusal: makes the error for a model whose attention is not known, from what it does. cache: of each layer one [2, U * share, kv_heads, d] a chunk, the oldest that some token still sees first. attended:
    layers that have attended in this chunk. schedules: of this chunk's queries against each ring rank's keys, by window.
    """

    ulysses: Ulysses
    ring: ProcessGroup
    refusal: Callable[[str], UserError]
    chunks: list[Chunk]
    number: int = 0
    cache: dict[int, list[Tensor]] = field(default_factory=dict)
    attended: list[int] = field(default_factory=list)
    schedules: dict[int | None, tuple[PrefixSchedule, ...]] = field(default_factory=dict)

    @property
    def chunk(self) -> Chunk:
        return self.chunks[self.number]

    def begin(self, number: int) -> None:
        self.number, self.attended, self.schedules = number, [], {}

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        dropout: float = 0.0,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention interface: query and key [1, heads or kv_heads, share, d], value of maybe another width
        -> [1, share, heads, width of value]. All of this rank's tokens. s_aux [heads]: attention sinks."""
        ulysses = self.ulysses
        ranks, heads, widest = ulysses.group.size(), query.shape[1], max(query.shape[-1], value.shape[-1])
        others |= {"dropout": dropout or None, "is_causal=False": is_causal is False}
        unknown = [name for name, given in others.items() if given is not None and given is not False]
        if unknown := sorted(set(unknown) - set(WHERE)):
            raise self.refusal(f"attends with {', '.join(unknown)}")
        if heads % ranks:
            fitting = [str(degree) for degree in range(1, heads + 1) if heads % degree == 0]
            raise SharedUserError(
                f"hidden_states.ulysses: {ranks} does not divide the target's {heads} attention heads; use one of "
                f"{', '.join(fitting)}, and hidden_states.ring for more ranks"
            )
        window = self._window(attention_mask, sliding_window)
        # Zeros widen a head without changing scores, and the output only by zeros (latent attention has wider keys).
        tokens_first = (each[0].transpose(0, 1) for each in (query, key, value))
        q, k, v = (nn.functional.pad(each, (0, widest - each.shape[-1])) for each in tokens_first)
        both = ulysses.to_heads(ulysses.replicate(torch.cat((k, v), -1)))
        key_value = self._cached(module, window, both.unflatten(-1, (2, -1)).permute(2, 0, 1, 3))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        ring = RingAttention(self.ring, "p2p", scale, softcap)
        if window not in self.schedules:
            self.schedules[window] = self._schedule(window, query.device)
        out, lse = ring(ulysses.to_heads(q), SharedKeyValue(key_value), self.schedules[window])
        if s_aux is not None:  # one more term in the softmax's denominator
            sink = s_aux.flatten().chunk(ranks)[ulysses.group.rank()]
            out = (out * torch.sigmoid(lse - sink)[..., None]).to(out.dtype)
        return ulysses.to_tokens(out)[None, ..., : value.shape[-1]].contiguous(), None

    def _window(self, mask: Tensor | None, sliding_window: int | None) -> int | None:
        """The window of a layer, on which the mask that transformers makes for it and its own argument agree."""
        window = UNKNOWN_MASK
        if isinstance(mask, Tensor) and mask.dtype == torch.int64 and mask.numel() == 1:
            window = int(mask)
        if window != (sliding_window or NO_WINDOW):
            raise self.refusal("hides other keys than later ones and those beyond config.sliding_window")
        return window or None

    def _cached(self, module: nn.Module, window: int | None, key_value: Tensor) -> Tensor:
        """This rank's keys and values [2, S, kv_heads, d] that the chunk's tokens see, its own included."""
        layer = getattr(module, "layer_idx", None)
        if layer is None or layer in self.attended:
            raise self.refusal(f"attends in {type(module).__name__} twice in a layer, or says no layer")
        self.attended.append(layer)
        parts = self.cache.setdefault(layer, [])
        del parts[: len(parts) + 1 - len(self._seen(window))]
        parts.append(key_value)
        return torch.cat(parts, 1)

    def _seen(self, window: int | None) -> list[Chunk]:
        """The chunks whose keys this chunk's or a later one's tokens see; the same on every rank."""
        chunks, start = self.chunks[: self.number + 1], self.chunk.start
        return [chunk for chunk in chunks if window is None or chunk.stop > start - window + 1]

    def _schedule(self, window: int | None, device: torch.device) -> tuple[PrefixSchedule, ...]:
        ring = self.ring
        queries = self._rows(self.chunk, ring.rank())
        keys = (torch.cat([self._rows(chunk, rank) for chunk in self._seen(window)]) for rank in range(ring.size()))
        return tuple(schedule_prefix(queries, queries, rows, window=window).to(device) for rows in keys)

    def _rows(self, chunk: Chunk, ring_rank: int) -> Tensor:
        """Positions of a Ulysses group's tokens of a chunk, -1 pads at the end."""
        rows = chunk.share * self.ulysses.group.size()
        positions = chunk.start + ring_rank * rows + torch.arange(rows)
        return torch.where(positions < chunk.stop, positions, -1)


def window_of_mask(*, mask_function: Any, local_size: int = NO_WINDOW, **_: Any) -> Tensor:
    """transformers' mask interface: instead of a mask, its window [1, 1, 1, 1], if it is a causal mask under a window;
    some places decide, at the edges and far apart. local_size: the window in transformers' words.
    """
    places = torch.cat((torch.tensor([-1, 0, 1]), local_size + torch.tensor([-1, 0, 1]), 2 ** torch.arange(24)))
    queries, distances = torch.cartesian_prod(places, places).T
    there = (queries >= 0) & (distances <= queries)
    queries, distances = queries[there], distances[there]
    first = torch.zeros_like(queries)
    expected = (distances >= 0) & ((distances < local_size) | (local_size == NO_WINDOW))
    known = torch.equal(mask_function(first, first, queries, queries - distances).expand_as(expected), expected)
    return torch.full((1, 1, 1, 1), local_size if known else UNKNOWN_MASK)
