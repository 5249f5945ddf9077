"""Any decoder-only Hugging Face checkpoint as a target, run by transformers in this process."""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from eagle3.errors import UserError
from eagle3.target.interface import (
    HiddenStates,
    TargetHead,
    TeacherSummary,
    check_aux_layers,
    default_aux_layers,
    summarize_teacher,
)


class TransformersTarget:
    """A `Target` around a loaded causal language model, which it freezes and puts into eval mode.

    aux_layers: 0-based, low to high, or None for EAGLE3's default. Layer i's output is the residual stream after layer
    i, un-normed: transformers' `hidden_states[i+1]`, but for the last layer, where transformers has the normed one.
    prefill_tokens: the largest batch of `prefill`, in tokens with padding; a single longer document runs alone.
    Raises UserError when the model's layers cannot be found or its logits are not `lm_head(last hidden state)`.
    """

    def __init__(self, model: PreTrainedModel, *, aux_layers: Sequence[int] | None, prefill_tokens: int) -> None:
        self.name = name = model.config.name_or_path or type(model).__name__
        self.model = model.eval().requires_grad_(False)
        self.decoder = model.get_decoder()
        self.layers = getattr(self.decoder, "layers", None)
        if self.decoder is model or not isinstance(self.layers, nn.ModuleList):
            raise UserError(
                f"target {name!r}: {type(model).__name__} has no list of decoder layers under get_decoder().layers; "
                "choose a decoder-only target"
            )
        self.aux_layers = check_aux_layers(
            default_aux_layers(len(self.layers)) if aux_layers is None else aux_layers, len(self.layers)
        )
        self.prefill_tokens = prefill_tokens
        self.head = _target_head(name, model)
        self.vocab_size, self.hidden_size = self.head.head.shape
        self._check_logits(name)

    def weights(self) -> TargetHead:
        """The frozen embedding and lm_head, on the model's device and in its dtype."""
        return self.head

    def prefill(self, documents: Sequence[Tensor]) -> list[HiddenStates]:
        """See `Target.prefill`. The tensors lie on the model's device, each in storage of its own."""
        self.check_tokens(documents)
        results: dict[int, HiddenStates] = {}
        for batch in length_buckets([len(document) for document in documents], self.prefill_tokens):
            results.update(zip(batch, self._prefill_batch([documents[i] for i in batch]), strict=True))
        return [results[i] for i in range(len(documents))]

    def check_tokens(self, documents: Sequence[Tensor]) -> None:
        """UserError for an empty document and for a token id outside the vocabulary."""
        for number, document in enumerate(documents):
            if document.numel() == 0:
                raise UserError(f"target: document {number} has no tokens; leave it out")
            low, high, limit = int(document.min()), int(document.max()), len(self.head.embedding)
            if low < 0 or high >= limit:
                raise UserError(
                    f"target: document {number} has token id {low if low < 0 else high}, outside the vocabulary of "
                    f"{limit}; tokenise with this target's own tokenizer"
                )

    # no_grad, not inference_mode: training saves these tensors for its backward, which inference tensors refuse.
    @torch.no_grad()
    def _prefill_batch(self, documents: list[Tensor]) -> list[HiddenStates]:
        lengths = [len(document) for document in documents]
        ids = nn.utils.rnn.pad_sequence(documents, batch_first=True).to(self.head.head.device)
        with self.captured_layers() as captured:
            # No attention mask: a causal row never sees the padding to its right, padding rows are dropped, and
            # without a mask attention takes its fused causal path instead of building a [T, T] mask.
            last = self.decoder(input_ids=ids, attention_mask=None, use_cache=False).last_hidden_state
        # Cut the padding off before the head sees it; every tensor returned is a copy, so the batch can be freed.
        rows = torch.cat([last[b, :length] for b, length in enumerate(lengths)])
        summary = self.summarize(rows)
        return [
            HiddenStates(
                aux=torch.cat([captured[layer][b, :length] for layer in self.aux_layers], dim=-1),
                last=last[b, :length].clone(),
                argmax=argmax.clone(),
                logsumexp=logsumexp.clone(),
            )
            for b, (length, argmax, logsumexp) in enumerate(
                zip(lengths, summary.argmax.split(lengths), summary.logsumexp.split(lengths), strict=True)
            )
        ]

    def summarize(self, last: Tensor) -> TeacherSummary:
        """What the teacher says after each row of last [N, Ht]; UserError where that is not finite."""
        summary = summarize_teacher(last, self.head.head)
        if not summary.logsumexp.isfinite().all():
            raise UserError("target: its logits are not finite; set model.target_dtype to bfloat16 or float32")
        return summary

    @contextlib.contextmanager
    def captured_layers(self) -> Iterator[dict[int, Tensor]]:
        """Collect the aux layers' outputs [B, T, Ht] of the forward pass run inside. Hooks, because
        output_hidden_states would keep every layer's."""
        captured: dict[int, Tensor] = {}

        def hook_of(layer: int):
            def hook(_module, _arguments, output) -> None:
                stream = output[0] if isinstance(output, tuple) else output
                if stream.dim() != 3 or stream.shape[-1] != self.hidden_size:
                    raise UserError(
                        f"target: layer {layer} returns {list(stream.shape)}, not a residual stream of width "
                        f"{self.hidden_size}; choose a target with a plain residual stream"
                    )
                captured[layer] = stream

            return hook

        handles = [self.layers[layer].register_forward_hook(hook_of(layer)) for layer in self.aux_layers]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _check_logits(self, name: str) -> None:
        """Compare the model's own logits with head @ last on a few tokens: a model may scale, cap or cut its logits in
        code, under a name that no list of config fields knows, and then the teacher would be wrong without a word."""
        states = []
        hook = self.decoder.register_forward_hook(lambda _m, _a, output: states.append(output.last_hidden_state))
        ids = torch.arange(min(8, self.vocab_size), device=self.head.head.device)[None]
        try:
            logits = self.model(input_ids=ids, use_cache=False).logits[0].float()
        finally:
            hook.remove()
        expected = states[0][0].float() @ self.head.head.float().T
        # 2 % of the largest logit is far above bf16 rounding and far below any scale or cap worth the name.
        if logits.shape != expected.shape or (logits - expected).abs().max() > 0.02 * expected.abs().max():
            raise UserError(
                f"target {name!r}: {type(self.model).__name__} changes its logits after the lm_head, which the teacher "
                "does not do yet; choose another target"
            )


def length_buckets(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Batches of indices, longest documents first, such that documents x longest <= budget tokens; a longer document
    gets a batch of its own."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def load_target(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: str | torch.dtype = "auto",
    aux_layers: Sequence[int] | None = None,
    prefill_tokens: int = 8192,
    device: str | torch.device = "cpu",
) -> TransformersTarget:
    """Load a checkpoint (hub id or folder) for prefill. dtype: a torch dtype, its name, or "auto" (as stored).

    Raises UserError for a missing folder or unreachable id, a checkpoint that is not a whole causal language model, and
    logits that are capped, scaled or biased.
    """
    model = _load_causal_lm(str(name_or_path), revision, trust_remote_code, dtype)
    return TransformersTarget(model.to(device), aux_layers=aux_layers, prefill_tokens=prefill_tokens)


def load_target_head(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: str | torch.dtype = "auto",
) -> TargetHead:
    """Embedding and lm_head on the CPU, for training from a store. The whole model is loaded on the way, then dropped.

    Raises UserError like `load_target`.
    """
    return _target_head(str(name_or_path), _load_causal_lm(str(name_or_path), revision, trust_remote_code, dtype))


def target_config(
    name_or_path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """The config of the target's language model (of its text part, where it has several); UserError if unreadable."""
    name = str(name_or_path)
    with _readable(name, "config"):
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    return config.get_text_config(decoder=True)


def load_tokenizer(
    name_or_path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The target's tokenizer; UserError if there is none."""
    name = str(name_or_path)
    with _readable(name, "tokenizer"):
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)


def fingerprint(name_or_path: str | Path, *, revision: str | None = None) -> str:
    """32 hex digits that tell one target from another, for provenance; costs milliseconds a weight file.

    A hub id is known by its commit. A folder is known by config.json, the weights' index, and every weight file's name,
    size and a sample of its bytes: a fine-tuned copy keeps names, sizes and headers, but not its bytes. A change of
    single values between the sampled bytes goes unseen. The folder's own path does not count: it may be moved.
    """
    name, digest = str(name_or_path), hashlib.sha256()
    with _readable(name, "config"):
        if not Path(name).is_dir():
            config = Path(hf_hub_download(name, "config.json", revision=revision))
            digest.update(f"{name}@{config.parent.name}".encode())  # snapshots/<commit>/config.json in the hub's cache
            return digest.hexdigest()[:32]
        digest.update((Path(name) / "config.json").read_bytes())
        for pattern in ("*.index.json", "*.safetensors", "*.bin"):
            for file in sorted(Path(name).glob(pattern)):
                digest.update(f"{file.name} {file.stat().st_size}".encode())
                for chunk in _sampled_bytes(file):
                    digest.update(chunk)
    return digest.hexdigest()[:32]


def _sampled_bytes(file: Path, windows: int = 64, window: int = 4096) -> Iterator[bytes]:
    """`windows` evenly spaced pieces of the file, its first and last bytes among them; all of a small file."""
    last = max(file.stat().st_size - window, 0)
    with file.open("rb") as stream:
        for start in sorted({last * i // (windows - 1) for i in range(windows)}):
            stream.seek(start)
            yield stream.read(window)


def _load_causal_lm(
    name: str, revision: str | None, trust_remote_code: bool, dtype: str | torch.dtype
) -> PreTrainedModel:
    config = target_config(name, revision=revision, trust_remote_code=trust_remote_code)
    _refuse_transformed_logits(name, config)
    disable_progress_bar()  # it garbles a log, and loading says nothing worth a bar
    with _readable(name, "causal language model"):
        model, loading = AutoModelForCausalLM.from_pretrained(
            name, revision=revision, trust_remote_code=trust_remote_code, dtype=dtype, output_loading_info=True
        )
    # transformers only warns, and fills what is missing with random numbers.
    missing = sorted(str(key) for key in loading["missing_keys"])
    if missing:
        raise UserError(
            f"target {name!r}: its checkpoint lacks {len(missing)} weights of {type(model).__name__} ({missing[0]} "
            "first); name the checkpoint of a whole causal language model in model.target"
        )
    return model


def _refuse_transformed_logits(name: str, config: PretrainedConfig) -> None:
    values = config.to_dict()
    scales = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")
    caps = ("final_logit_softcapping", "logits_soft_cap")
    for field in (*scales, *caps):
        if values.get(field) is not None and not (field in scales and values[field] == 1):
            raise UserError(
                f"target {name!r}: its config has {field}={values[field]!r}, and logits that are capped or scaled are "
                "not supported yet (the teacher would be wrong); choose another target"
            )


def _target_head(name: str, model: PreTrainedModel) -> TargetHead:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        found = f"a {type(head).__name__} with a bias" if isinstance(head, nn.Linear) else f"{type(head).__name__}"
        raise UserError(f"target {name!r}: its lm_head is {found}, not linear without bias; choose another target")
    return TargetHead(embedding=model.get_input_embeddings().weight.detach(), head=head.weight.detach())


@contextlib.contextmanager
def _readable(name: str, what: str) -> Iterator[None]:
    """Turn what transformers and the hub raise for a checkpoint they cannot read into one line with a remedy."""
    looks_like_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    if looks_like_path and not Path(name).is_dir():
        raise UserError(f"target {name!r}: no such folder; name a checkpoint's folder or a hub id in model.target")
    try:
        yield
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        remedy = (
            "name the folder of a complete checkpoint in model.target"
            if Path(name).is_dir()
            else "check the id, the connection and your access to it, or name a downloaded folder in model.target"
        )
        raise UserError(f"target {name!r}: its {what} cannot be read ({reason}); {remedy}") from error
