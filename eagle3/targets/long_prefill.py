"""Prefill of one document that is too long for one GPU: chunk by chunk, each chunk and the cache spread over ranks."""

import contextlib
import hashlib
import inspect
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eagle3.attention.ulysses import Ulysses
from eagle3.errors import SharedUserError, UserError
from eagle3.parallel.topology import agreed
from eagle3.states.rows import Rows
from eagle3.targets.chunked_attention import ChunkedAttention, deal_chunks, window_of_mask
from eagle3.targets.transformers import TransformersTarget

# What transformers calls our attention, while the decoder runs under it.
IMPLEMENTATION = "eagle3_long_prefill"


class LongPrefill:
    """`TransformersTarget.prefill` of one document over the ranks of ulysses x ring, equal to rounding.

    Each chunk's tokens are dealt contiguously to the ranks. A rank holds the activations of `chunk_tokens` tokens and,
    of every full-attention layer, the keys and values of its ring share of the document for its Ulysses share of the
    heads; of a sliding layer those that a later token still sees.

    sequence: the ranks of ulysses x ring, Ulysses fastest (see Topology); all of them build this together. chunk_tokens:
    of one rank. Raises UserError on all of them for a model whose layers do anything that is not known here, or that
    says of a short document what its own prefill does not.
    """

    def __init__(
        self,
        target: TransformersTarget,
        ulysses: ProcessGroup,
        ring: ProcessGroup,
        sequence: ProcessGroup,
        chunk_tokens: int,
    ) -> None:
        """Collective over `sequence`."""
        assert sequence.size() == ulysses.size() * ring.size(), "the sequence group is made of Ulysses and ring"
        assert sequence.rank() == ring.rank() * ulysses.size() + ulysses.rank(), "Ulysses ranks are the fastest"
        assert chunk_tokens > 0
        self.target, self.ulysses, self.ring, self.sequence = target, Ulysses(ulysses), ring, sequence
        self.chunk_tokens = chunk_tokens
        # It refers to nothing of ours and may stay; transformers makes no masks for a name without it.
        AttentionMaskInterface.register(IMPLEMENTATION, window_of_mask)
        self._check_config()
        self._check_short_document()

    def chunks(self, document: Tensor) -> Iterator[Rows | None]:
        """Consecutive rows of `document` (token ids, int64 [T]), all of it, in order and without
        padding, on the first rank of `sequence`; the others get None as many times.

        Collective over `sequence`: every rank passes the same document and takes every chunk. Raises UserError on all
        of them like `TransformersTarget.prefill`.
        """
        agreed(lambda: self.target.check_tokens([document]), self.sequence)
        digests = [b""] * self.sequence.size()
        dist.all_gather_object(digests, hashlib.sha256(document.cpu().numpy().tobytes()).digest(), group=self.sequence)
        assert len(set(digests)) == 1, "the ranks of a sequence prefill one document together"
        return self._chunks(document, self.chunk_tokens)

    def _chunks(self, document: Tensor, chunk_tokens: int) -> Iterator[Rows | None]:
        chunks = deal_chunks(len(document), self.sequence.size(), chunk_tokens)
        run = ChunkedAttention(self.ulysses, self.ring, self.refusal, chunks)
        for number in range(len(run.chunks)):
            run.begin(number)
            yield self._chunk(run, document)

    # no_grad, not inference_mode: as in TransformersTarget.
    @torch.no_grad()
    def _chunk(self, run: ChunkedAttention, document: Tensor) -> Rows | None:
        chunk, target = run.chunk, self.target
        first = chunk.start + self.sequence.rank() * chunk.share
        own = document[first : min(first + chunk.share, chunk.stop)].to(target.device)
        ids = nn.functional.pad(own, (0, chunk.share - len(own)))[None]
        # Consecutive beyond the end too: transformers takes a jump for the start of another document.
        positions = torch.arange(first, first + chunk.share, device=ids.device)[None]
        with self._attending(run), target.captured_layers() as captured:
            output = target.decoder(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False)
        if sorted(run.attended) != list(range(len(target.layers))):
            raise self.refusal(f"has {len(target.layers)} layers, of which {len(run.attended)} attend in a known way")
        aux, last = torch.cat([captured[layer][0] for layer in target.aux_layers], dim=-1), output.last_hidden_state[0]
        # Pads say nothing, and may overflow.
        teacher, pads = agreed(lambda: target.teach(output, last[: len(own)]), self.sequence), chunk.share - len(own)
        padded = teacher.map(lambda rows: nn.functional.pad(rows, (0, 0, 0, pads) if rows.dim() == 2 else (0, pads)))
        gathered = Rows(aux, padded).map(self._to_first)
        return gathered[: chunk.stop - chunk.start] if self.sequence.rank() == 0 else None

    def _to_first(self, rows: Tensor) -> Tensor | None:
        """All ranks' rows, one after the other, on the first rank."""
        size = self.sequence.size()
        if size == 1:
            return rows
        whole = rows.new_empty(size * len(rows), *rows.shape[1:]) if self.sequence.rank() == 0 else None
        places = None if whole is None else list(whole.chunk(size))
        dist.gather(rows.contiguous(), places, group=self.sequence, group_dst=0)
        return whole

    @contextlib.contextmanager
    def _attending(self, run: ChunkedAttention) -> Iterator[None]:
        """The decoder attends through `run` inside, and as before afterwards."""
        decoder = self.target.decoder
        before = decoder.config._attn_implementation
        ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION] = run.attend
        try:
            decoder.set_attn_implementation(IMPLEMENTATION)
            yield
        finally:
            decoder.set_attn_implementation(before)
            del ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION]

    def refusal(self, what: str) -> UserError:
        return SharedUserError(
            f"target {self.target.name!r}: {type(self.target.model).__name__} {what}, so its prompts cannot be spread "
            "over ranks or chunks; set hidden_states.ulysses and ring to 1 and prefill_tokens to the longest sample, or choose "
            "another target"
        )

    def _check_config(self) -> None:
        config, decoder = self.target.decoder.config, self.target.decoder
        unknown = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
        if unknown:
            raise self.refusal(f"has layers of type {', '.join(unknown)}")
        ropes = getattr(config, "rope_parameters", None) or {}  # of the model, or of each of its layer types
        for rope in (ropes, *ropes.values()):
            kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
            if kind == "longrope" or "dynamic" in kind:
                raise self.refusal(f"rotates keys by the length of the whole prompt (rope type {kind})")
        # A model with a collection of its own does not find ours; that of a module without any is found out in _chunk.
        module = inspect.getmodule(type(decoder))
        if getattr(module, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS) is not ALL_ATTENTION_FUNCTIONS:
            raise self.refusal("has attention functions of its own")
        if "position_ids" not in inspect.signature(decoder.forward).parameters:
            raise self.refusal("takes no position_ids")

    @torch.no_grad()
    def _check_short_document(self) -> None:
        """Chunks of two tokens a rank: whatever looks at other tokens past our attention (a convolution, a state) misses
        them in most rows."""
        device = self.target.device
        document = torch.arange(8 * self.sequence.size() + 1, device=device) % self.target.vocab_size
        chunks = list(self._chunks(document, 2))

        def compare() -> None:
            if self.sequence.rank() == 0:
                expected = self.target.prefill([document])[0].teacher.values.double()
                difference = Rows.cat(chunks).teacher.values.double() - expected
                # Half of the digits. In half precision a quarter: rounding tips a router, whose token goes to other
                # experts, and later tokens see that; of a random tiny gpt-oss half of the tokens differ by 0.15.
                kind = torch.finfo(chunks[0].teacher.values.dtype)
                limit = kind.eps ** (0.25 if kind.bits == 16 else 0.5)
                wrong = int((~(difference.norm(dim=-1) <= limit * expected.norm(dim=-1))).sum())  # nan is wrong too
                if 2 * wrong > len(document):
                    raise self.refusal(f"gives other hidden states in chunks at {wrong} of {len(document)} tokens")

        agreed(compare, self.sequence)
