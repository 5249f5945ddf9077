"""vLLM reads the same auxiliary layers for an export as training did: according to vLLM's own functions if its files
are there, and according to the rule that they implement."""

import __future__

import ast
import importlib.util
import json
import zipfile
from bisect import bisect_right
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tiny_draft import tiny_llama
from transformers import AutoConfig, DeepseekV2Config, LlamaForCausalLM, PreTrainedConfig

from eagle3.draft.derivation import default_aux_layers, derive_draft
from eagle3.planning.payoff import vllm_flags
from eagle3.targets.transformers import TransformersTarget

LAYERS = 10
CHOICES = [default_aux_layers(LAYERS), (0, 4, 9), (2, 3, 7)]
every_choice = pytest.mark.parametrize("aux_layers", CHOICES, ids=str)
RUNNERS = {
    "V2 runner": ("v1/worker/gpu/spec_decode/eagle/eagle3_utils.py", "get_eagle3_aux_layers_from_config"),
    "V1 runner": ("v1/worker/gpu_model_runner.py", "GPUModelRunner._get_eagle3_aux_layers_from_config"),
}


class VLLMSource:
    """Reads single functions from vLLM's files and runs them, without an installed vLLM. root: vLLM's wheel, or the
    folder that contains `vllm`."""

    def __init__(self, root: Path) -> None:
        self.root = zipfile.Path(root) if root.suffix == ".whl" else root

    def definition(self, file: str, name: str, **names: Any) -> Any:
        """The function or class of that name (`Class.method` for a method) in `file`, unchanged but without decorators
        and annotations. It sees only `names`; any other name that it uses is a NameError."""
        source = (self.root / "vllm" / file).read_text(encoding="utf-8")
        body = ast.parse(source).body
        for part in name.split("."):
            (item,) = (node for node in body if getattr(node, "name", None) == part)
            body = item.body
        item.decorator_list.clear()
        flags = __future__.annotations.compiler_flag
        code = compile(ast.Module([item], []), f"vllm/{file}", "exec", flags=flags, dont_inherit=True)
        exec(code, names)
        return names[item.name]


@pytest.fixture(scope="module")
def vllm(request) -> VLLMSource:
    chosen, spec = request.config.getoption("--vllm"), importlib.util.find_spec("vllm")
    if not chosen and not (spec and spec.origin):
        pytest.skip("vLLM is not installed, and --vllm names no wheel of it (pip download vllm --no-deps)")
    return VLLMSource(Path(chosen) if chosen else Path(spec.origin).parent.parent)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_llama(vocab_size=50, num_hidden_layers=LAYERS, max_position_embeddings=64).double()


def exported_config(folder: Path, target: LlamaForCausalLM, aux_layers: tuple[int, ...]) -> dict:
    """What an export of a draft for `target` writes; it is in folder/config.json too."""
    draft = derive_draft(target.config, draft_vocab_size=30, aux_layers=aux_layers)
    (folder / "config.json").write_text(json.dumps(draft.to_json("float32")))
    return json.loads((folder / "config.json").read_text())


@every_choice
def test_by_the_rule_of_vllm_0_33_0_an_export_reads_the_layers_it_was_trained_on(tmp_path, target, aux_layers):
    """The rule of `get_eagle3_aux_layers_from_config` and `set_eagle3_aux_hidden_state_layers` in 0.33.0's
    vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py: the ids at the top level, otherwise the target's default. And
    the rule of LlamaModel.forward in vllm/model_executor/models/llama.py: the state after layer i, if i + 1 is one of
    the ids."""
    exported = exported_config(tmp_path, target, aux_layers)
    ids = exported.get("eagle_aux_hidden_state_layer_ids") or (2, LAYERS // 2, LAYERS - 3)
    assert tuple(layer for layer in range(LAYERS) if layer + 1 in ids) == aux_layers


@every_choice
@pytest.mark.parametrize("runner", RUNNERS)
def test_vllms_own_functions_capture_the_layers_that_the_draft_was_trained_on(
    vllm, tmp_path, target, aux_layers, runner
):
    """From config.json through vLLM's config class to the tensors that vLLM's loop over a target's layers passes to the
    draft: they are training's. The layers are transformers'; pipeline ranks, logging and compilation are left out."""
    exported_config(tmp_path, target, aux_layers)
    own = vllm.definition(
        "transformers_utils/configs/eagle.py",
        "EAGLEConfig",
        AutoConfig=AutoConfig,
        DeepseekV2Config=DeepseekV2Config,
        PreTrainedConfig=PreTrainedConfig,
    )
    config = own(AutoConfig.from_pretrained(tmp_path), method="eagle3", model_type="eagle")
    speculative = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    chosen = vllm.definition(*RUNNERS[runner])(
        SimpleNamespace(speculative_config=speculative) if runner == "V1 runner" else speculative
    )
    ids = torch.randint(50, (17,), generator=torch.Generator().manual_seed(1))
    (trained,) = TransformersTarget(target, aux_layers=aux_layers, prefill_tokens=64).prefill([ids])
    captured = vllm_forward(vllm, target, ids, chosen)
    assert len(captured) == 3
    assert torch.allclose(torch.cat(captured, dim=-1), trained.aux, rtol=1e-10, atol=1e-10)


def test_the_default_layers_are_those_of_vllms_own_function(vllm):
    """vLLM counts from 1. It has no class for the family whose drafts read other layers (MiniMax-M3)."""
    default = vllm.definition(
        "model_executor/models/interfaces.py", "SupportsEagle3.get_eagle3_default_aux_hidden_state_layers"
    )
    for layers in (8, 28, 61, 80):
        config = SimpleNamespace(num_hidden_layers=layers)
        target = SimpleNamespace(model=SimpleNamespace(layers=[None] * layers), config=config)
        assert tuple(layer - 1 for layer in default(target)) == default_aux_layers(layers)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_vllm_has_a_class_for_the_name_in_an_export(vllm, target, qk_norm):
    draft = derive_draft(target.config, draft_vocab_size=30, aux_layers=(1, 3, 5, 7, 9), qk_norm=qk_norm)
    (name,) = draft.to_json("float32")["architectures"]
    registry = (vllm.root / "vllm" / "model_executor/models/registry.py").read_text(encoding="utf-8")
    family = "Qwen3" if qk_norm else "Llama"
    assert f'"{name}": ("{family.lower()}_eagle3", "Eagle3{family}ForCausalLM")' in registry
    normed = (vllm.root / "vllm" / "model_executor/models/qwen3.py").read_text(encoding="utf-8")
    assert "self.q_norm = RMSNorm(self.head_dim" in normed  # which that class is made of


def test_vllms_own_function_serves_the_whole_context_of_a_yarn_draft(vllm, tmp_path, target):
    """The target's config says 64 positions, which YaRN stretches to 256."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    draft = derive_draft(target.config, draft_vocab_size=30, aux_layers=CHOICES[0], rope_parameters=rope)
    (tmp_path / "config.json").write_text(json.dumps(draft.to_json("float32")))
    config = AutoConfig.from_pretrained(tmp_path)
    longest = vllm.definition(
        "config/model.py", "_get_and_verify_max_len", iter_rope_parameters=lambda each: [each.rope_parameters]
    )
    known = SimpleNamespace(derived_max_model_len_and_key=(config.max_position_embeddings, "max_position_embeddings"))
    asked = {"tokenizer_config": None, "disable_sliding_window": False, "sliding_window": None}
    assert longest(config, known, max_model_len=256, **asked) == 256 == draft.max_position_embeddings


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_vllms_own_functions_give_an_export_the_window_that_it_was_trained_with(
    vllm, tmp_path, target, window, qk_norm
):
    """From config.json through the attention of vLLM's draft layer to the window that flash attention is asked for: W
    keys, counting a query's own. Layers stand in for vLLM's, and kernels are not run."""
    draft = derive_draft(target.config, draft_vocab_size=30, aux_layers=CHOICES[0], window=window, qk_norm=qk_norm)
    (tmp_path / "config.json").write_text(json.dumps(draft.to_json("float32")))
    config = AutoConfig.from_pretrained(tmp_path)
    config.target_layer_count = LAYERS  # as vLLM numbers a draft's layers
    kinds, arguments = SimpleNamespace(DECODER="decoder", ENCODER_ONLY="encoder_only"), {}
    nothing = dict.fromkeys(("QKVParallelLinear", "RowParallelLinear", "get_rope"), lambda *_, **__: None)
    attention = vllm.definition(
        "model_executor/models/llama.py",
        "LlamaAttention",
        nn=torch.nn,
        AttentionType=kinds,
        Attention=lambda *_, **keywords: arguments.update(keywords),
        EncoderOnlyAttention=None,
        extract_layer_index=lambda prefix: int(prefix.split(".")[2]),
        get_tensor_model_parallel_world_size=lambda: 1,
        **nothing,
    )
    attention(config, draft.hidden_size, 4, 2, prefix=f"model.layers.{LAYERS}.self_attn")
    start = vllm.definition(
        "v1/attention/backends/flash_attn.py", "FlashAttentionImpl.__init__", AttentionType=kinds, torch=torch
    )
    flash = SimpleNamespace()
    with pytest.raises(NameError):  # in code after the window, such as the platform
        start(flash, 4, draft.head_dim, 1.0, 2, None, arguments["per_layer_sliding_window"], "auto")
    assert flash.sliding_window == ((-1, -1) if window is None else (window - 1, 0))


def test_vllms_own_functions_read_the_draft_tokens_by_batch(vllm):
    file, names = "v1/spec_decode/dynamic/utils.py", {}
    for name in ("validate_and_normalize_dynamic_sd_schedule", "build_dynamic_sd_schedule_lookup"):
        names[name] = vllm.definition(file, name, **names)
    config = json.loads(vllm_flags("DRAFT", {1: 3, 4: 2, 16: 0})[1])
    ranges = config["num_speculative_tokens_per_batch_size"]
    by_batch = names["build_dynamic_sd_schedule_lookup"](ranges, 64, config["num_speculative_tokens"])
    assert by_batch[1:] == [3] * 3 + [2] * 12 + [0] * 49


def vllm_forward(
    vllm: VLLMSource, target: LlamaForCausalLM, ids: torch.Tensor, layers: tuple[int, ...]
) -> list[torch.Tensor]:
    """The auxiliary states of vLLM's LlamaModel.forward."""
    mixin = vllm.definition(
        "model_executor/models/interfaces.py", "EagleModelMixin", ClassVar=ClassVar, bisect_right=bisect_right
    )
    alone = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    forward = vllm.definition(
        "model_executor/models/llama.py", "LlamaModel.forward", islice=islice, get_pp_group=lambda: alone
    )
    decoder = target.model
    angles = decoder.rotary_emb(torch.zeros(1, dtype=torch.double), torch.arange(len(ids))[None])

    class Model(mixin):
        start_layer, end_layer = 0, LAYERS

        def _cache_aux_pp_layout(self):
            """For pipeline ranks, of which there is only one."""

        def embed_input_ids(self, ids):
            return decoder.embed_tokens(ids)

        def norm(self, hidden, residual):
            return decoder.norm(hidden + residual), hidden + residual

    def layer(own):
        def apply(positions, hidden, residual):
            stream = hidden if residual is None else hidden + residual
            return own(stream[None], position_embeddings=angles)[0] - stream, stream

        return apply

    model = Model()
    model.layers = [layer(own) for own in decoder.layers]
    model._set_aux_hidden_state_layers(layers)
    with torch.no_grad():
        _, captured = forward(model, ids, torch.arange(len(ids)), None, None)
    return captured
