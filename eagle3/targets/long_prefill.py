"""Prefill a document that is too long for one GPU, chunk by chunk, with each chunk and the cache spread over ranks."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionMaskInterface, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eagle3.attention.block import BlockKernels
from eagle3.attention.ring import RingAttention
from eagle3.attention.schedule import PrefixSchedule, schedule_prefix
from eagle3.attention.ttt import Ulysses
from eagle3.errors import SharedUserError, UserError
from eagle3.parallel.topology import agreed
from eagle3.states.rows import Rows
from eagle3.targets.facts import RECURRENT, length_ropes, recurrent_layers
from eagle3.targets.logits import check_tokens
from eagle3.targets.transformers import TransformersTarget
from eagle3.tensors import send
from eagle3.text.samples import Sample

# The name under which our attention is registered with transformers while the decoder runs with it.
IMPLEMENTATION = "eagle3_long_prefill"
# What `window_of_mask` returns for a causal mask without a window, and for any other mask.
NO_WINDOW, UNKNOWN_MASK = 0, -1
# Arguments with the tokens' positions, which `attend` ignores because rope has already been applied.
WHERE = ("position_ids", "cache_position")


# Chooses kernels by what a rank's attention asks for: heads, kv_heads, head_dim, dtype, window.
ChooseKernels = Callable[..., BlockKernels]


class Chunk(NamedTuple):
    """Tokens [start, stop) of the document, spread over the ranks."""

    start: int
    stop: int
    share: int  # tokens per rank; the last ranks may have padding


def deal_chunks(length: int, ranks: int, chunk_tokens: int) -> list[Chunk]:
    starts = range(0, length, ranks * chunk_tokens)
    stops = (min(start + ranks * chunk_tokens, length) for start in starts)
    return [Chunk(start, stop, -(-(stop - start) // ranks)) for start, stop in zip(starts, stops, strict=True)]


@dataclass
class ChunkedAttention:
    """Attention for one document: the cache and the current chunk. transformers calls `attend` in every layer."""

    ulysses: Ulysses
    ring: dist.ProcessGroup
    # Builds the error for a model whose attention is not supported, from a description of what the model does.
    refusal: Callable[[str], UserError]
    chunks: list[Chunk]
    choose: ChooseKernels | None
    states: DynamicCache | None  # of layers that carry a state from chunk to chunk; None if there are none
    number: int = 0  # index of the current chunk
    # Per layer: the keys and values [2, U * share, kv_heads, d] of each chunk, from the oldest chunk still in view.
    cache: dict[int, list[Tensor]] = field(default_factory=dict)
    attended: list[int] = field(default_factory=list)  # layers that have attended in this chunk
    # Per window: the schedule of this chunk's queries against each ring rank's keys.
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
        **options: Any,
    ) -> tuple[Tensor, None]:
        """The attention function that transformers calls. Attends for all tokens of this rank.

        query is [1, heads, share, d]; key [1, kv_heads, share, d]; value also has kv_heads, but may have a different
        width. The result is [1, share, heads, width of value]. Supported options: s_aux [heads] (attention sinks),
        softcap, and dropout and is_causal if they change nothing.
        """
        ulysses = self.ulysses
        ranks, heads, widest = ulysses.group.size(), query.shape[1], max(query.shape[-1], value.shape[-1])
        sinks, softcap = options.pop("s_aux", None), options.pop("softcap", None)
        options |= {
            "dropout": options.get("dropout") or None,
            "is_causal=False": options.pop("is_causal", None) is False,
        }
        unknown_options = [name for name, setting in options.items() if setting is not None and setting is not False]
        if unknown_options := sorted(set(unknown_options) - set(WHERE)):
            raise self.refusal(f"attends with {', '.join(unknown_options)}")
        if heads % ranks:
            divisors = [str(degree) for degree in range(1, heads + 1) if heads % degree == 0]
            raise SharedUserError(
                f"hidden_states.ulysses: {ranks} does not divide the target's {heads} attention heads; use one of "
                f"{', '.join(divisors)}, and hidden_states.ring for more ranks"
            )
        window = self._window(attention_mask, sliding_window)
        # Pad to one width, since latent attention has wider keys. Zeros change no scores and add only zeros to the
        # output.
        tokens_first = (each[0].transpose(0, 1) for each in (query, key, value))
        q, k, v = (nn.functional.pad(each, (0, widest - each.shape[-1])) for each in tokens_first)
        stacked = ulysses.to_heads(ulysses.replicate(torch.cat((k, v), -1)))
        key_value = self._cached(module, window, stacked.unflatten(-1, (2, -1)).permute(2, 0, 1, 3))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q, kernels = ulysses.to_heads(q), None
        if self.choose and softcap is None:
            shape = {"heads": q.shape[1], "kv_heads": key_value.shape[2], "head_dim": widest, "dtype": q.dtype}
            kernels = self.choose(**shape, window=window)
        ring = RingAttention(self.ring, "p2p", scale, softcap, kernels)
        if window not in self.schedules:
            self.schedules[window] = self._schedule(window, query.device)
        out, lse = ring(q, key_value, self.schedules[window])
        if sinks is not None:  # a sink adds a term to the softmax's denominator
            sink = sinks.flatten().chunk(ranks)[ulysses.group.rank()]
            out = (out * torch.sigmoid(lse - sink)[..., None]).to(out.dtype)
        return ulysses.to_tokens(out)[None, ..., : value.shape[-1]].contiguous(), None

    def _window(self, mask: Tensor | None, sliding_window: int | None) -> int | None:
        """A layer's window, on which its mask and its `sliding_window` argument must agree."""
        known = isinstance(mask, Tensor) and mask.dtype == torch.int64 and mask.numel() == 1
        window = int(mask) if known else UNKNOWN_MASK
        if window != (sliding_window or NO_WINDOW):
            raise self.refusal("hides other keys than later ones and those beyond config.sliding_window")
        return window or None

    def _cached(self, module: nn.Module, window: int | None, key_value: Tensor) -> Tensor:
        """This rank's keys and values [2, S, kv_heads, d] that the chunk's tokens see, including the chunk's own."""
        layer = getattr(module, "layer_idx", None)
        if layer is None or layer in self.attended:
            raise self.refusal(f"attends in {type(module).__name__} twice in a layer, or says no layer")
        self.attended.append(layer)
        parts = self.cache.setdefault(layer, [])
        del parts[: len(parts) + 1 - len(self._visible(window))]
        parts.append(key_value)
        return torch.cat(parts, 1)

    def _visible(self, window: int | None) -> list[Chunk]:
        """The chunks so far with keys that tokens of this chunk or a later one see. The same on every rank."""
        chunks, start = self.chunks[: self.number + 1], self.chunk.start
        return [chunk for chunk in chunks if window is None or chunk.stop > start - window + 1]

    def _schedule(self, window: int | None, device: torch.device) -> tuple[PrefixSchedule, ...]:
        ring, place = self.ring, partial(send, device=device)
        queries = self._rows(self.chunk, ring.rank())
        keys = (torch.cat([self._rows(chunk, rank) for chunk in self._visible(window)]) for rank in range(ring.size()))
        return tuple(schedule_prefix(queries, queries, rows, window=window).map(place) for rows in keys)

    def _rows(self, chunk: Chunk, ring_rank: int) -> Tensor:
        """Document positions of a Ulysses group's tokens in a chunk, with -1 for padding at the end."""
        rows = chunk.share * self.ulysses.group.size()
        positions = chunk.start + ring_rank * rows + torch.arange(rows)
        return torch.where(positions < chunk.stop, positions, -1)


class Uncached(DynamicLayer):
    """Stands in for an attention layer in a cache, and keeps nothing, because `ChunkedAttention` does."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def require_one_rank(target: str, config: PretrainedConfig, ranks: int) -> None:
    """Raises UserError if the ranks cannot prefill one prompt together, because layers carry a state."""
    if ranks > 1 and recurrent_layers(config):
        raise SharedUserError(
            f"target {target!r}: has layers of type {RECURRENT}, whose state goes from token to token, so a prompt "
            "cannot be spread over ranks; set hidden_states.ulysses and ring to 1, which prefills it in chunks"
        )


def carried_states(config: PretrainedConfig) -> DynamicCache | None:
    """Room for the states of those layers; None if there are none."""
    recurrent = recurrent_layers(config)
    if not recurrent:
        return None
    cache = DynamicCache(config=config)
    cache.layers = [state if layer in recurrent else Uncached() for layer, state in enumerate(cache.layers)]
    return cache


def window_of_mask(*, mask_function: Any, local_size: int = NO_WINDOW, **_: Any) -> Tensor:
    """Recognise a mask; transformers calls this instead of building one. Returns [1, 1, 1, 1] with the window of a
    causal mask (NO_WINDOW if unlimited), or UNKNOWN_MASK for any other mask. Checks only sampled positions: at the
    edges, and at growing distances.

    local_size: transformers' name for the window
    """
    positions = torch.cat((torch.tensor([-1, 0, 1]), local_size + torch.tensor([-1, 0, 1]), 2 ** torch.arange(24)))
    queries, distances = torch.cartesian_prod(positions, positions).T
    valid = (queries >= 0) & (distances <= queries)
    queries, distances = queries[valid], distances[valid]
    zeros = torch.zeros_like(queries)
    expected = (distances >= 0) & ((distances < local_size) | (local_size == NO_WINDOW))
    known = torch.equal(mask_function(zeros, zeros, queries, queries - distances).expand_as(expected), expected)
    return torch.full((1, 1, 1, 1), local_size if known else UNKNOWN_MASK)


class LongPrefill:
    """Prefills one document on ulysses x ring ranks. Equals `TransformersTarget.prefill` up to rounding.

    Each chunk's tokens are dealt contiguously to the ranks. A rank holds the activations of `chunk_tokens` tokens, and
    keys and values for its Ulysses share of the heads. In full-attention layers, these are the keys and values of its
    ring share of the document; in sliding layers, only those of them that a later token still sees.

    sequence: the ranks of ulysses x ring, with the Ulysses rank varying fastest (see Topology); all of them construct
        this together
    chunk_tokens: tokens per rank and chunk
    choose: chooses the kernels for attention whose scores have no softcap (those are left to plain products); may be
        collective over `sequence`; None: the usual ones

    Raises UserError on all ranks if the model's layers do anything that is not supported here, or if its chunked
    prefill of a short document differs from an ordinary prefill.
    """

    def __init__(
        self,
        target: TransformersTarget,
        ulysses: dist.ProcessGroup,
        ring: dist.ProcessGroup,
        sequence: dist.ProcessGroup,
        chunk_tokens: int,
        choose: ChooseKernels | None = None,
    ) -> None:
        """Check the model. Collective over `sequence`."""
        assert sequence.size() == ulysses.size() * ring.size(), "the sequence group is made of Ulysses and ring"
        assert sequence.rank() == ring.rank() * ulysses.size() + ulysses.rank(), "Ulysses ranks are the fastest"
        self.target, self.ulysses, self.ring, self.sequence = target, Ulysses(ulysses), ring, sequence
        self.chunk_tokens, self.choose = chunk_tokens, choose
        # `window_of_mask` holds no state and may stay registered. Without a mask function, transformers would not
        # consider masks at all.
        AttentionMaskInterface.register(IMPLEMENTATION, window_of_mask)
        self._check_config()
        self._check_short_document()

    def chunks(self, document: Tensor) -> Iterator[Rows | None]:
        """Prefill `document` (token ids, int64 [T]). Yields its rows chunk by chunk, in order and without padding, on
        the first rank of `sequence`, and None for each chunk on the other ranks.

        Collective over `sequence`: every rank passes the same document and takes every chunk. Raises UserError on all
        of them, like `TransformersTarget.prefill`.
        """
        agreed(lambda: check_tokens(document, 0, len(self.target.head.embedding)), group=self.sequence)
        return self._chunks(document, self.chunk_tokens)

    def arriving(self, documents: Iterable[Sample]) -> Iterator[tuple[int, Iterator[Rows | None]]]:
        """Yield each document's index and its `chunks`, one document after another."""
        for index, document in enumerate(documents):
            yield index, self.chunks(document.ids)

    def _chunks(self, document: Tensor, chunk_tokens: int) -> Iterator[Rows | None]:
        chunks = deal_chunks(len(document), self.sequence.size(), chunk_tokens)
        states = carried_states(self.target.decoder.config)
        run = ChunkedAttention(self.ulysses, self.ring, self.refusal, chunks, self.choose, states)
        for number in range(len(run.chunks)):
            run.begin(number)
            yield self._chunk(run, document)

    # no_grad, not inference_mode, as in TransformersTarget.
    @torch.no_grad()
    def _chunk(self, run: ChunkedAttention, document: Tensor) -> Rows | None:
        chunk, target = run.chunk, self.target
        first = chunk.start + self.sequence.rank() * chunk.share
        own = document[first : min(first + chunk.share, chunk.stop)].to(target.device)
        ids = nn.functional.pad(own, (0, chunk.share - len(own)))[None]
        # Positions continue into the padding: transformers would take a jump for the start of a new document.
        positions = torch.arange(first, first + chunk.share, device=ids.device)[None]
        with self._attending(run), target.captured_layers() as states:
            output = target.decoder(
                input_ids=ids,
                position_ids=positions,
                attention_mask=None,
                past_key_values=run.states,
                use_cache=False,
            )
        known = sorted([*run.attended, *recurrent_layers(target.decoder.config)])
        if known != list(range(len(target.layers))):
            raise self.refusal(f"has {len(target.layers)} layers, of which {len(known)} attend in a known way")
        aux, last = torch.cat([states[layer][0] for layer in target.aux_layers], dim=-1), output.last_hidden_state[0]
        # Leave out the padding, which may overflow.
        teacher = agreed(lambda: target.teach(output, last[: len(own)]), group=self.sequence)
        pads = chunk.share - len(own)
        padded = teacher.map(lambda rows: nn.functional.pad(rows, (0, 0, 0, pads) if rows.dim() == 2 else (0, pads)))
        all_rows = Rows(aux, padded).map(self._to_first)
        return all_rows[: chunk.stop - chunk.start] if self.sequence.rank() == 0 else None

    def _to_first(self, rows: Tensor) -> Tensor | None:
        """Gather the rows of all ranks, in rank order, on the first rank."""
        size = self.sequence.size()
        if size == 1:
            return rows
        result = rows.new_empty(size * len(rows), *rows.shape[1:]) if self.sequence.rank() == 0 else None
        parts = None if result is None else list(result.chunk(size))
        dist.gather(rows.contiguous(), parts, group=self.sequence, group_dst=0)
        return result

    @contextlib.contextmanager
    def _attending(self, run: ChunkedAttention) -> Iterator[None]:
        """Make the decoder attend through `run` inside the block."""
        decoder = self.target.decoder
        previous = decoder.config._attn_implementation
        ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION] = run.attend
        try:
            decoder.set_attn_implementation(IMPLEMENTATION)
            yield
        finally:
            decoder.set_attn_implementation(previous)
            del ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION]

    def refusal(self, flaw: str) -> UserError:
        return SharedUserError(
            f"target {self.target.name!r}: {type(self.target.model).__name__} {flaw}, so its prompts cannot be spread "
            "over ranks or chunks; set hidden_states.ulysses and ring to 1 and prefill_tokens to the longest sample, "
            "or choose another target"
        )

    def _check_config(self) -> None:
        config, decoder = self.target.decoder.config, self.target.decoder
        known = {"full_attention", "sliding_attention", RECURRENT}
        if types := sorted(set(getattr(config, "layer_types", None) or ()) - known):
            raise self.refusal(f"has layers of type {', '.join(types)}")
        require_one_rank(self.target.name, config, self.sequence.size())
        for kind in length_ropes(config):
            raise self.refusal(f"rotates keys by the length of the whole prompt (rope type {kind})")
        # A model file with its own table of attention functions does not find ours. `_chunk` notices one without any.
        module = inspect.getmodule(type(decoder))
        if getattr(module, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS) is not ALL_ATTENTION_FUNCTIONS:
            raise self.refusal("has attention functions of its own")
        if "position_ids" not in inspect.signature(decoder.forward).parameters:
            raise self.refusal("takes no position_ids")

    @torch.no_grad()
    def _check_short_document(self) -> None:
        """Prefill a short document in chunks of two tokens per rank, and compare. A model that reads other tokens in
        any other way (a convolution, a state that is not carried on) goes wrong in most rows."""
        device = self.target.device
        document = torch.arange(8 * self.sequence.size() + 1, device=device) % self.target.vocab_size
        chunks = list(self._chunks(document, 2))

        def compare() -> None:
            if self.sequence.rank() == 0:
                expected = self.target.prefill([document])[0].teacher.values.double()
                difference = Rows.cat(chunks).teacher.values.double() - expected
                # Half of the digits must agree; in half precision a quarter, since rounding can route a token to other
                # experts, and later tokens see the result. In a random tiny gpt-oss, half of the tokens differ by 0.15.
                precision = torch.finfo(chunks[0].teacher.values.dtype)
                limit = precision.eps ** (0.25 if precision.bits == 16 else 0.5)
                misses = int((~(difference.norm(dim=-1) <= limit * expected.norm(dim=-1))).sum())  # nan counts as wrong
                if 2 * misses > len(document):
                    raise self.refusal(f"gives other hidden states in chunks at {misses} of {len(document)} tokens")

        agreed(compare, group=self.sequence)
