"""Any decoder-only Hugging Face checkpoint as a target, run by transformers in this process."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from eagle3.draft.derivation import check_aux_layers, default_aux_layers
from eagle3.errors import UserError
from eagle3.states.rows import DraftLogits, LastHidden, Rows, TeacherRows, length_buckets
from eagle3.targets.checkpoint import decoder_layers, decoder_of, load_causal_lm
from eagle3.targets.facts import length_ropes
from eagle3.targets.head import model_head
from eagle3.targets.logits import TeacherSummary, by_blocks, check_tokens, exact_logits


class TransformersTarget:
    """A `Target` around a loaded causal language model, which it freezes and puts into eval mode.

    aux_layers: 0-based, low to high; None for EAGLE3's default. Layer i's output is the un-normed residual stream after
        layer i. This is transformers' `hidden_states[i+1]`, except for the last layer, which transformers norms.
    prefill_tokens: largest batch in `prefill`, in tokens including padding; a longer document runs alone
    draft_ids: [Vd] int64, the draft vocabulary's tokens. If given, the teacher holds the model's own logits for them
        instead of last hidden states.

    Raises UserError if the model's layers cannot be found or, without draft_ids, if training could not compute its
    logits from an lm_head and a transform.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        aux_layers: Sequence[int] | None,
        prefill_tokens: int,
        draft_ids: Tensor | None = None,
    ) -> None:
        self.name = name = model.config.name_or_path or type(model).__name__
        self.model = model.eval().requires_grad_(False)
        self.decoder, self.layers = decoder_of(model), decoder_layers(model)
        if self.layers is None:
            raise UserError(
                f"target {name!r}: {type(model).__name__} has no list of decoder layers under get_decoder().layers, "
                "where hidden states are read; choose another target"
            )
        count, kind = len(self.layers), self.decoder.config.model_type
        self.aux_layers = check_aux_layers(default_aux_layers(count, kind) if aux_layers is None else aux_layers, count)
        self.prefill_tokens = prefill_tokens
        self.head = model_head(name, model, required=draft_ids is None)  # on the model's device and in its dtype
        self.device = self.head.embedding.device
        self.vocab_size, self.hidden_size = self.head.vocab_size, self.head.hidden_size
        self.draft_ids = None if draft_ids is None else draft_ids.to(self.device)
        self.teacher = LastHidden if draft_ids is None else DraftLogits
        self._check_logits()

    def prefill(self, documents: Sequence[Tensor]) -> list[Rows]:
        """See `Target.prefill`. The tensors are on the model's device, each in its own storage.

        The last bits of a document's states depend on its batch (`length_buckets` forms batches from all `documents`).
        """
        for number, document in enumerate(documents):
            check_tokens(document, number, len(self.head.embedding))
        results: dict[int, Rows] = {}
        for batch in self._batches([len(document) for document in documents]):
            results.update(zip(batch, self._prefill_batch([documents[i] for i in batch]), strict=True))
        return [results[i] for i in range(len(documents))]

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Batches of documents (indices) of similar length, none of which changes how another one is rotated. Raises
        UserError for a length at which every length has a rotation of its own."""
        limits = length_ropes(self.decoder.config)
        for kind, limit in limits.items():
            if kind != "longrope" and max(lengths, default=0) > limit:
                raise UserError(
                    f"target {self.name!r}: a document of {max(lengths):,} tokens is longer than {limit:,}, and beyond "
                    f"that, rope type {kind} rotates each length in its own way; set data.max_length to {limit} at most"
                )
        sides: dict[tuple[bool, ...], list[int]] = {}  # a longrope has one rotation up to its limit, and one beyond
        for index, length in enumerate(lengths):
            sides.setdefault(tuple(length > limit for limit in limits.values()), []).append(index)
        for members in sides.values():
            for bucket in length_buckets([lengths[index] for index in members], self.prefill_tokens):
                yield [members[place] for place in bucket]

    # no_grad, not inference_mode: training saves these tensors for its backward pass, which refuses inference tensors.
    @torch.no_grad()
    def _prefill_batch(self, documents: list[Tensor]) -> list[Rows]:
        lengths = [len(document) for document in documents]
        ids = nn.utils.rnn.pad_sequence(documents, batch_first=True).to(self.device)
        with self.captured_layers() as layer_outputs:
            # No attention mask: a causal row never sees the padding to its right, padding rows are dropped, and without
            # a mask attention takes its fused causal path instead of building a [T, T] mask.
            output = self.decoder(input_ids=ids, attention_mask=None, use_cache=False)
        # Cut the padding off before the head sees it. Every returned tensor is a copy, so the batch can be freed.
        rows = torch.cat([output.last_hidden_state[b, :length] for b, length in enumerate(lengths)])
        teacher, results = self.teach(output, rows), []
        for b, indices in enumerate(torch.arange(len(rows), device=self.device).split(lengths)):
            aux = torch.cat([layer_outputs[layer][b, : len(indices)] for layer in self.aux_layers], dim=-1)
            results.append(Rows(aux, teacher[indices]))
        return results

    def teach(self, output: BaseModelOutput, last: Tensor) -> TeacherRows:
        """The teacher's values after last hidden states `last` [N, Ht], which are rows of the decoder's `output`.
        Logits are in the model's own dtype. Raises UserError if the values are not finite."""
        logits_of = partial(self.own_logits, output)
        if self.draft_ids is None:
            logits_of = exact_logits(self.head.head, self.head.transform, last.dtype)
        summary, draft_logits = by_blocks(last, logits_of, TeacherSummary.of, self.draft_ids)
        return self.teacher(last if draft_logits is None else draft_logits, *_finite(summary))

    @torch.no_grad()
    def own_logits(self, output: BaseModelOutput, last: Tensor) -> Tensor:
        """The model's own logits [N, V] for last hidden states [N, Ht], whatever its head is and whatever follows it.

        Runs the model's forward with the decoder replaced by a stand-in that returns `output` with these rows and
        without a cache.
        """
        fields = {**output, "last_hidden_state": last[None]}
        fields.pop("past_key_values", None)
        decoder_output = type(output)(**fields)
        previous_forward = vars(self.decoder).get("forward")  # loading may have set one on the instance
        self.decoder.forward = lambda *_arguments, **_keywords: decoder_output
        try:
            ids = torch.zeros(1, len(last), dtype=torch.int64, device=last.device)
            return self.model(input_ids=ids, use_cache=False).logits[0]
        finally:
            del self.decoder.forward
            if previous_forward is not None:
                self.decoder.forward = previous_forward

    @contextlib.contextmanager
    def captured_layers(self, layers: Sequence[int] | None = None) -> Iterator[dict[int, Tensor]]:
        """Collect the outputs [B, T, Ht] of the aux layers, or of `layers`, in the forward pass that runs inside the
        block. Uses hooks, because output_hidden_states would keep every layer's output."""
        outputs: dict[int, Tensor] = {}

        def hook_of(layer: int):
            def hook(_module, _arguments, output) -> None:
                stream = output[0] if isinstance(output, tuple) else output
                if stream.dim() != 3 or stream.shape[-1] != self.hidden_size:
                    raise UserError(
                        f"target: layer {layer} returns {list(stream.shape)}, not a residual stream of width "
                        f"{self.hidden_size}; choose a target with a plain residual stream"
                    )
                outputs[layer] = stream

            return hook

        with contextlib.ExitStack() as hooks:
            for layer in layers or self.aux_layers:
                hooks.enter_context(self.layers[layer].register_forward_hook(hook_of(layer)))
            yield outputs

    @torch.no_grad()
    def _check_logits(self) -> None:
        """Compare the model's own logits of a few tokens with the teacher's. A model may scale, cap or cut its logits
        in code that no known config field reveals; the teacher would then be silently wrong."""
        outputs, whose = [], f"target {self.name!r}: {type(self.model).__name__}"
        ids = torch.arange(min(8, self.vocab_size), device=self.device)[None]
        try:
            with self.decoder.register_forward_hook(lambda _m, _a, output: outputs.append(output)):
                logits = self.model(input_ids=ids, use_cache=False).logits[0].float()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a config with sizes that do not fit together can cause any
            raise UserError(
                f"{whose} cannot run ({type(error).__name__}: {error!s:.200}); "
                "fix its config.json, or choose another target"
            ) from error
        _finite(TeacherSummary.of(logits))
        last, remedy = outputs[0].last_hidden_state[0], "choose another target"
        if self.draft_ids is None:
            expected = self.head.transform.apply(last.float() @ self.head.head.float().T)
            remedy = "set target.teacher=logits"
        else:
            expected = self.own_logits(outputs[0], last).float()
        same = logits.shape == expected.shape == (len(last), self.vocab_size)
        # 2 % of the largest logit is far more than bf16 rounding, and far less than any real scale or cap changes.
        if not same or (logits - expected).abs().max() > 0.02 * expected.abs().max():
            raise UserError(f"{whose} changes its logits after the lm_head in a way that is not known here; {remedy}")


def load_target(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: str | torch.dtype = "auto",
    aux_layers: Sequence[int] | None = None,
    prefill_tokens: int = 8192,
    device: str | torch.device = "cpu",
    draft_ids: Tensor | None = None,
) -> TransformersTarget:
    """Load a checkpoint (hub id or folder) for prefill.

    dtype: a torch dtype, its name, or "auto" (as stored)
    draft_ids: see TransformersTarget

    Raises UserError for a missing folder or unreachable id, for a checkpoint that is not a whole causal language model,
    and (without draft_ids) for logits that are computed in an unknown way.
    """
    model = load_causal_lm(str(name_or_path), revision, trust_remote_code, dtype)
    return TransformersTarget(
        model.to(device), aux_layers=aux_layers, prefill_tokens=prefill_tokens, draft_ids=draft_ids
    )


def _finite(summary: TeacherSummary) -> TeacherSummary:
    if not summary.logsumexp.isfinite().all():
        raise UserError(
            "target: its logits are not finite (damaged weights, or values beyond float16); set model.target_dtype to "
            "bfloat16 or float32, or download the target again"
        )
    return summary
