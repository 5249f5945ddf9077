"""Everything that depends on SGLang's version: flags, hook calls, and the format of its answers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from eagle3.draft.config import DraftConfig
from eagle3.errors import SharedUserError
from eagle3.targets.logits import LogitTransform
from eagle3.targets.sglang.asking import START, ModelInfo, ServerInfo, reported, require_supported

# Architectures whose class in the tested SGLang takes an EAGLE3 draft (has set_eagle3_layers_to_capture).
EAGLE3_TARGETS = frozenset(
    ("ApertusForCausalLM", "BailingMoEForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM")
    + ("Cosmos3ForConditionalGeneration", "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM")
    + ("DeepseekV3ForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM", "Gemma3ForCausalLM")
    + ("Gemma3ForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
    + ("Gemma4UnifiedForConditionalGeneration", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")
    + ("Glm5NextForConditionalGeneration", "GlmMoeDsaForCausalLM", "GptOssForCausalLM", "IQuestCoderForCausalLM")
    + ("InternLM3ForCausalLM", "InternS1ProForConditionalGeneration", "InternS2MobiusForConditionalGeneration")
    + ("InternS2PreviewForConditionalGeneration", "KimiK25ForConditionalGeneration", "Llama4ForCausalLM")
    + ("Llama4ForConditionalGeneration", "LlamaForCausalLM", "LongcatFlashForCausalLM", "MellumForCausalLM")
    + ("MiniMaxM2ForCausalLM", "MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration")
    + ("Ministral3ForCausalLM", "MistralForCausalLM", "MistralLarge3ForCausalLM", "Phi3ForCausalLM")
    + ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM")
    + ("Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3VLForConditionalGeneration")
    + ("Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
    + ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Qwen4ExpForConditionalGeneration")
    + ("SarvamMoEForCausalLM", "TeleFLMForCausalLM")
)
HOOK = "eagle3-capture"
# Settings that a server must have; otherwise rows would be lost, or would be on a different rank.
REQUIRED_SETTINGS: dict[str, Any] = {
    "disable_radix_cache": True,
    "cuda_graph_backend_prefill": "disabled",
    "enable_mixed_chunk": False,
    "enable_layernorm_sp": False,
    "enable_attn_tp_input_scattered": False,
    "enable_pdmux": False,
    "enable_dp_attention": False,
    "pp_size": 1,
    "dp_size": 1,
}
# Settings that change what a server computes, with what they are unless someone asks for something else. SGLang may
# choose another value for a target by itself (a checkpoint's own quantisation), which is then part of that target.
SAME_NUMBERS: dict[str, tuple[Any, ...]] = {
    "quantization": (None,),
    "quantization_param_path": (None,),
    "quantize_and_serve": (False,),
    "modelopt_quant": (None,),
    "rl_quant_profile": (None,),
    "kv_cache_dtype": ("auto",),
    "load_format": ("auto", "safetensors"),
    "model_loader_extra_config": ({}, "{}"),
    "custom_weight_loader": ([],),
    "json_model_override_args": ({}, "{}"),
    "lora_paths": (None, [], {}),
    "enable_lora": (None, False),
    "uno_lora_path": (None,),
}
# Decoder layers whose class leaves the residual stream out of what SGLang captures (sgl-project/sglang#39286). There, a
# hook of ours reads it.
WITHOUT_RESIDUAL = ("Gemma3DecoderLayer",)
# Types of targets of which SGLang captures the layers that were asked for only if the first is 1, and otherwise those
# before (deepseek_v2.py and glm4_moe_lite.py, set_eagle3_layers_to_capture).
FIRST_IS_ONE = frozenset(
    ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "kimi_k25")
)
WEIGHT_VERSION = "default"  # until somebody replaces the weights of a running server


class HookCall(NamedTuple):
    """The arguments that SGLang's logits processor gets for a prefill of N tokens from several requests."""

    ids: Tensor  # [N]
    last: Tensor  # [N, H], after the final norm
    aux: Sequence[Tensor] | Tensor | None  # [N, 3H]; None if the model's class passes it as a keyword
    head: Any  # the lm_head module, sharded over its tensor-parallel group
    requests: list[tuple[str, int, int]]  # id, tokens in this call, tokens before it


def require_captured(aux_layers: Sequence[int], num_layers: int, model_type: str) -> None:
    """Raises UserError if SGLang cannot capture these layers, for this model_type of a target's config: it captures a
    layer's input, and no layer takes the last layer's output as input."""
    if model_type in FIRST_IS_ONE and aux_layers[0] != 1:
        raise SharedUserError(
            f"model.aux_layers: {list(aux_layers)}: for a {model_type}, SGLang takes each layer for the one before it, "
            "here and when it serves the draft, unless the first is 1; begin with 1"
        )
    if max(aux_layers) >= num_layers - 1:
        raise SharedUserError(
            f"model.aux_layers: {list(aux_layers)} has the last of the target's {num_layers} layers, whose output "
            f"SGLang does not capture, neither here nor when it serves the draft; name layers below {num_layers - 1}"
        )


class ServerDiffers(SharedUserError):
    """Raised if a server computes something else than this job needs, or is set up to do so."""


def require_capture(
    url: str,
    hook: Mapping[str, Any],
    aux_layers: Sequence[int],
    *,
    dtype: str,
    revision: str | None = None,
    longest: int | None = None,
    allow_untested: bool = False,
) -> None:
    """Raises ServerDiffers unless the server at `url` captures what this job needs, by what it says of itself; it names
    all that is different. Raises UserError if it does not answer.

    hook: the settings of its hook
    dtype, revision: with which the server should load the target
    longest: length of the longest sample in tokens
    allow_untested: whether its SGLang may be newer than those that were tested
    """
    info = reported(url, ServerInfo)
    require_supported(info.version, url, allow_untested)
    actual_hook, context = reported_settings(info), info.context_length
    if actual_hook is None:
        raise ServerDiffers(f"target.servers: {url} was started without this project's hook; {START}")
    if longest and context and longest + CONTEXT_RESERVE > context:
        raise SharedUserError(
            f"target.servers: {url} was started with --context-length {context}, too short for a sample of "
            f"{longest:,} tokens; {START}; or lower data.max_length"
        )
    settings = dict(info)
    actual = {name: settings.get(name) for name in (*REQUIRED_SETTINGS, "revision")} | actual_hook
    actual |= {"dtype of the target": settings.get("dtype"), "aux layers": info.return_aux_hidden_state_layer_ids or []}
    required = {**REQUIRED_SETTINGS, "revision": revision, **hook}
    required |= {"dtype of the target": dtype, "aux layers": list(aux_layers)}
    different = {name: (actual.get(name), value) for name, value in required.items() if actual.get(name) != value}
    different |= other_numbers(info, reported(url, ModelInfo))
    if different:
        differences = ", ".join(f"{name} {value!r} (here: {here!r})" for name, (value, here) in different.items())
        raise ServerDiffers(
            f"target.servers: {url} was started with other settings than this recipe's: {differences}; {START}"
        )


def other_numbers(info: ServerInfo, model: ModelInfo) -> dict[str, tuple[Any, Any]]:
    """For each setting with which a server computes something else than its checkpoint says: what it is, and what it
    should be."""
    settings, asked = dict(info), {word.split("=")[0] for word in info.launch_command}
    different = {  # a file named by --config may set anything
        name: (settings.get(name), usual[0])
        for name, usual in SAME_NUMBERS.items()
        if settings.get(name) not in usual and asked & {"--config", "--" + name.replace("_", "-")}
    }
    for name, usual in (("weight_version", WEIGHT_VERSION), ("model_path", settings.get("model_path"))):
        if (loaded := getattr(model, name)) not in (None, usual):
            different[f"{name} (its weights were replaced)"] = (loaded, usual)
    return different


def capture_flags(aux_layers: Sequence[int], hook: Mapping[str, Any]) -> list[str]:
    """Flags for a capturing server: the aux layers, our hook with its settings, no draft, and nothing that would lose
    rows.

    A radix-cache hit would skip rows, and a replayed CUDA graph runs no hooks.
    """
    specs = [
        {
            "name": HOOK,
            "target_modules": ["*logits_processor"],
            "hook_factory": "eagle3.targets.sglang.hook:CaptureHook",
            "config": dict(hook),
        },
        {
            "name": f"{HOOK}-layers",
            "target_modules": [
                f"{prefix}model.layers.{layer}" for prefix in ("", "language_model.") for layer in aux_layers
            ],
            "hook_factory": "eagle3.targets.sglang.hook:make_layer_hook",
        },
    ]
    return [
        *("--speculative-algorithm", "EAGLE3", "--enable-return-aux-hidden-states"),
        *("--return-aux-hidden-state-layer-ids", *map(str, aux_layers)),
        *("--forward-hooks", json.dumps(specs)),
        *("--disable-radix-cache", "--skip-tokenizer-init"),
        "--sleep-on-idle",  # otherwise its scheduler keeps a core busy while the server has nothing to do
        *("--cuda-graph-backend-prefill", "disabled", "--cuda-graph-backend-decode", "disabled"),
    ]


def hook_call(arguments: Sequence[Any]) -> HookCall | None:
    """Parse the logits processor's arguments; None if this is not a prefill of requests."""
    ids, last, head, batch, *rest = arguments
    aux = rest[0] if rest else None
    if getattr(batch, "rids", None) is None or not batch.forward_mode.is_extend():
        return None
    if ids is None:  # a class that calls its language model with embeddings
        ids = batch.input_ids
    requests = list(zip(batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True))
    return HookCall(ids, last, aux, head, requests)


def tensor_ranks() -> Any:
    """The server's tensor-parallel ranks: `device_group`, and `cpu_group` to exchange what is on the host."""
    from sglang.srt.distributed import get_tp_group

    return get_tp_group()


def loaded_checkpoint() -> tuple[str, str | None]:
    """Path or hub id, and revision, of what this server was told to load."""
    from sglang.srt.runtime_context import get_server_args

    settings = get_server_args()
    return settings.model_path, settings.revision


class Head(NamedTuple):
    """This rank's part of the lm_head."""

    first_id: int  # token id of the first column
    valid: int  # how many columns are tokens; the rest are padding
    whole: bool  # whether every rank has all columns


def head_of(head: nn.Module) -> Head:
    """This rank's part of SGLang's lm_head: a VocabParallelEmbedding or, if it is tied to an embedding that is on every
    rank (Gemma-3), that one."""
    shard = getattr(head, "shard_indices", None)
    if shard is None or head.tp_size == 1:
        tokens = len(head.weight) if shard is None else shard.num_org_elements
        return Head(0, tokens, whole=True)
    return Head(shard.org_vocab_start_index, shard.num_org_elements, whole=False)


def plain_weight(head: nn.Module) -> Tensor | None:
    """The lm_head's matrix [V/tp, H]; None if the lm_head is quantised or has a bias."""
    weight, method = getattr(head, "weight", None), type(getattr(head, "quant_method", None)).__name__
    plain = method in ("NoneType", "UnquantizedEmbeddingMethod") and getattr(head, "bias", None) is None
    return weight if plain and weight is not None and weight.is_floating_point() else None


def transform_of(processor: nn.Module) -> LogitTransform:
    """The transform that SGLang's logits processor applies to logits."""
    scale, cap = processor.logit_scale, processor.final_logit_softcapping
    return LogitTransform(1.0 if scale is None else scale, cap or None)


def local_logits(processor: nn.Module, head: nn.Module, last: Tensor) -> Tensor:
    """The model's own logits [n, V/tp] in this rank's columns for last hidden states [n, H], scaled and capped as in
    LogitsProcessor._get_logits, but not gathered."""
    return transform_of(processor).apply(processor._compute_lm_head(last, head))


def reported_settings(info: ServerInfo) -> dict[str, Any] | None:
    """The settings of our hook on a server; None if it has no such hook."""
    return next((hook.config or {} for hook in info.forward_hooks or () if hook.name == HOOK), None)


# What the judge and the export check need -----------------------------------------------------------------------------

DRAFT_CLASS = "LlamaForCausalLMEagle3"  # the architecture that an export's config.json names
# For the only backend that drafts several steps on a CPU. A single flag for prefill and decode would be ignored without
# AMX.
CPU_ATTENTION = ("--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx")
# For a server that decodes from token ids. It has no prefix cache, so that all prompts are timed alike, and takes no
# core from another server while it has nothing to do.
DECODING_FLAGS = ("--skip-tokenizer-init", "--disable-radix-cache", "--sleep-on-idle")
CONTEXT_RESERVE = 6  # tokens of the context that no request can use (SGLang's tp_worker.py, get_worker_info)


def why_not_served(config: DraftConfig) -> str:
    """Why SGLang 0.5.23 would compute something else than this draft; empty if it would not. It takes states as wide as
    the draft for the draft's own (srt/models/llama_eagle3.py, LlamaModel.forward)."""
    unknown = [
        *(name for name in ("norm_before_residual", "qk_norm", "attention_bias") if getattr(config, name)),
        *(["auxiliary states as wide as the draft"] if config.aux_width == config.hidden_size else []),
    ]
    return f"SGLang does not know {unknown[0]}, and would silently compute something else" if unknown else ""


def speculative_flags(draft: str, steps: int, topk: int, tree_tokens: int, window: int | None = None) -> list[str]:
    """Flags for a server that decodes with an EAGLE3 draft.

    tree_tokens: tokens per verification, including the last token of the output; steps + 1 for a chain
    window: keys that a query of the draft sees, its own included; None for all. SGLang does not read it from
        config.json, and its flag counts the keys before the query's own (docs/windows.md).
    """
    return [
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", draft),
        *("--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk)),
        *("--speculative-num-draft-tokens", str(tree_tokens)),
        *([] if window is None else ["--speculative-draft-window-size", str(window - 1)]),
    ]


def greedy_request(ids: Sequence[int], new_tokens: int) -> dict[str, Any]:
    """The body of a POST to /generate."""
    return {"input_ids": list(ids), "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens}}


def scores_request(ids: Sequence[int], token_ids: Sequence[int]) -> dict[str, Any]:
    """A request for the log-probabilities of `token_ids` as the next token after `ids`, and for the largest of all."""
    options = {"return_logprob": True, "top_logprobs_num": 1, "token_ids_logprob": list(token_ids)}
    return greedy_request(ids, 1) | options
