"""The transformers target, compared with the model itself: hidden_states, final norm, logits."""

import json
import shutil
from functools import partial
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
import transformers
from live_bytes import LargestTensor
from safetensors.torch import load_file, save_file
from tiny_draft import SHAPE, as_target, tiny_llama
from transformers import (
    BertConfig,
    BertLMHeadModel,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
)

from eagle3.draft.derivation import default_aux_layers
from eagle3.errors import UserError
from eagle3.states.rows import length_buckets
from eagle3.targets.checkpoint import fingerprint, load_tokenizer, target_config
from eagle3.targets.head import load_target_head
from eagle3.targets.logits import BLOCK_ROWS, LogitTransform, summarize_teacher
from eagle3.targets.transformers import TransformersTarget, load_target

FALCON_H1 = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_n_groups": 1}
FALCON_H1 |= dict.fromkeys(("head_dim", "mamba_d_head", "mamba_d_state", "mamba_chunk_size"), 16)


def tiny_qwen3() -> Qwen3ForCausalLM:
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)).eval()
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 2.0)  # so that the norm changes more than a stream's scale
    return model


# Documents of more than 20 tokens are rotated in another way than shorter ones.
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 20}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
MAKERS = {"llama": tiny_llama, "qwen3": tiny_qwen3}
MAKERS |= {"tied": partial(tiny_llama, 2, tie_word_embeddings=True)}
MAKERS |= {"longrope": partial(tiny_llama, 3, rope_parameters=LONGROPE)}
MODELS = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def documents(*lengths: int, seed: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (length,), generator=generator) for length in lengths]


@MODELS
def test_prefill_gives_the_models_own_hidden_states_and_logits(make, tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    target = load_target(tmp_path, dtype="float32", aux_layers=(0, 2, 3))
    (document,) = documents(37)
    (states,) = target.prefill([document])
    with torch.no_grad():
        expected = model(document[None], output_hidden_states=True)
    aux = torch.cat([expected.hidden_states[layer + 1][0] for layer in (0, 2, 3)], dim=-1)
    torch.testing.assert_close(states.aux, aux, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(states.teacher.values, expected.hidden_states[-1][0], rtol=1e-6, atol=1e-6)
    assert torch.equal(states.teacher.argmax, expected.logits[0].argmax(-1))
    torch.testing.assert_close(states.teacher.logsumexp, expected.logits[0].logsumexp(-1), rtol=1e-6, atol=1e-5)
    assert states.teacher.argmax.dtype == torch.int64 and states.teacher.logsumexp.dtype == torch.float32


def test_dtype_auto_keeps_the_checkpoints_bf16_and_sums_logits_in_fp32(tmp_path):
    tiny_qwen3().bfloat16().save_pretrained(tmp_path)
    target = load_target(tmp_path)
    (states,) = target.prefill(documents(19))
    assert states.aux.dtype == states.teacher.values.dtype == torch.bfloat16
    logits = states.teacher.values.double() @ target.head.head.double().T
    assert torch.equal(states.teacher.argmax, logits.argmax(-1))
    torch.testing.assert_close(states.teacher.logsumexp.double(), logits.logsumexp(-1), rtol=1e-6, atol=0)


def test_the_last_layers_aux_is_not_normed():
    model = tiny_qwen3()
    target = TransformersTarget(model, aux_layers=(1, 2, 4), prefill_tokens=64)
    (states,) = target.prefill(documents(11))
    normed = model.model.norm(states.aux[:, 2 * 64 :])
    torch.testing.assert_close(normed, states.teacher.values, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(states.aux[:, 2 * 64 :], states.teacher.values, rtol=0.1)


@MODELS
def test_batched_rows_equal_unbatched_rows_in_the_callers_order(make):
    target = TransformersTarget(make(), aux_layers=None, prefill_tokens=64)
    batch = documents(5, 31, 1, 90, 30, 12, 13, 2)  # 90 exceeds the budget and runs alone
    for document, states in zip(batch, target.prefill(batch), strict=True):
        (alone,) = target.prefill([document])
        assert len(states.aux) == len(states.teacher.values) == len(states.teacher.argmax) == len(document)
        torch.testing.assert_close(states.aux, alone.aux, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states.teacher.values, alone.teacher.values, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states.teacher.logsumexp, alone.teacher.logsumexp, rtol=1e-5, atol=1e-5)
        assert torch.equal(states.teacher.argmax, alone.teacher.argmax)


def test_a_rotation_of_its_own_for_every_length_is_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    target = as_target(tiny_llama(rope_parameters=rope, max_position_embeddings=32))
    assert len(target.prefill(documents(32, 5))) == 2
    with pytest.raises(UserError, match="a document of 33 tokens is longer than 32, .* set data.max_length to 32"):
        target.prefill(documents(33, 5))


def test_batches_hold_every_document_once_within_the_budget():
    lengths = [7, 1, 50, 3, 3, 8, 20, 1, 16]
    batches = length_buckets(lengths, 24)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 24
    assert len(batches) == 5  # 50 | 20 | 16 | 8 7 3 | 3 1 1
    assert all(length_buckets([lengths[i] for i in batch], 24) == [list(range(len(batch)))] for batch in batches)


def test_results_hold_no_padding_and_can_be_saved_for_backward():
    target = as_target(tiny_llama())
    for states in target.prefill(documents(3, 40)):
        for tensor in states.named().values():
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        weight = torch.ones(64, requires_grad=True)
        (states.teacher.values * weight).sum().backward()
        torch.testing.assert_close(weight.grad, states.teacher.values.sum(0))
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_rows", [1, 7, 100])
def test_teacher_summary_does_not_depend_on_blocks_and_is_exact(dtype, block_rows):
    generator = torch.Generator().manual_seed(0)
    last, head = (torch.randn(n, 48, generator=generator, dtype=torch.float64).to(dtype) for n in (23, 301))
    summary = summarize_teacher(last, head, block_rows=block_rows)
    logits = last.double() @ head.double().T
    assert torch.equal(summary.argmax, logits.argmax(-1))
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6  # bf16 products are exact in fp32
    torch.testing.assert_close(summary.logsumexp.double(), logits.logsumexp(-1), rtol=tolerance, atol=0)
    assert summary.logsumexp.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_ties_go_to_the_lowest_token_id():
    last = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    head = torch.tensor([[0.0, 1.0], [2.0, 0.0], [2.0, 3.0], [1.0, 3.0]])
    assert summarize_teacher(last, head).argmax.tolist() == [1, 2, 0]


def test_default_aux_layers_follow_the_definition_and_stay_distinct_when_tiny():
    for layers in range(8, 130):
        assert default_aux_layers(layers) == (1, layers // 2 - 1, layers - 4)
    for layers in range(4, 8):
        low, middle, high = default_aux_layers(layers)
        assert 0 <= low < middle < high < layers - 1, "engines do not capture the last layer"
    assert default_aux_layers(3) == (0, 1, 2)
    assert default_aux_layers(60, "minimax_m3_vl_text") == (2, 30, 57)
    with pytest.raises(UserError, match="2 layers"):
        default_aux_layers(2)


@pytest.mark.parametrize("layers", [(0, 1, 5), (2, 1, 3), (1, 1, 2), (-1, 2, 3), ()])
def test_aux_layers_that_do_not_fit_are_refused(layers):
    with pytest.raises(UserError, match=r"model.aux_layers: \[.*0\.\.4"):
        TransformersTarget(tiny_llama(), aux_layers=layers, prefill_tokens=8)


@pytest.mark.parametrize("token", [256, -1])
def test_token_ids_outside_the_vocabulary_are_refused(token):
    target = as_target(tiny_llama())
    with pytest.raises(UserError, match=f"document 1 has token id {token}, .*vocabulary of 256"):
        target.prefill([torch.tensor([3]), torch.tensor([4, token])])
    with pytest.raises(UserError, match="document 0 has no tokens"):
        target.prefill([torch.tensor([], dtype=torch.int64)])


# Families that transform their logits after the lm_head; here strongly enough to be seen.
TRANSFORMED = {
    "gemma2": ("Gemma2", {"head_dim": 16, "final_logit_softcapping": 3.0}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "granite": ("Granite", {"logits_scaling": 6.0}),
    "hyperclovax": ("HyperCLOVAX", {"logits_scaling": 3.0}),
    "falcon_h1": ("FalconH1", {"lm_head_multiplier": 2.5, **FALCON_H1}),
}


def transformed(family: str, folder: Path) -> Path:
    torch.manual_seed(7)
    name, changes = TRANSFORMED[family]
    names = {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**SHAPE | names | changes)
    instance = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        instance.lm_head.weight.mul_(3)
    instance.save_pretrained(folder / family)
    return folder / family


@pytest.mark.parametrize("family", TRANSFORMED)
def test_logits_that_a_family_scales_or_caps_are_those_of_either_teacher(family, tmp_path):
    target = load_target(transformed(family, tmp_path), dtype="float32")
    head = target.head
    assert load_target_head(tmp_path / family).transform == head.transform != LogitTransform()
    (document,) = documents(29)
    (states,) = target.prefill([document])
    with torch.no_grad():
        logits = target.model(document[None]).logits[0]
    torch.testing.assert_close(head.transform.apply(states.teacher.values @ head.head.T), logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states.teacher.logsumexp, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(states.teacher.argmax, logits.argmax(-1))
    plain = summarize_teacher(states.teacher.values, head.head).logsumexp
    assert (plain - states.teacher.logsumexp).abs().max() > 0.1
    draft_ids = torch.tensor([0, 5, 6, 200, 255])
    (states,) = load_target(tmp_path / family, dtype="float32", draft_ids=draft_ids).prefill([document])
    torch.testing.assert_close(states.teacher.values, logits[:, draft_ids], rtol=1e-5, atol=1e-5)
    assert torch.equal(states.teacher.argmax, logits.argmax(-1))


def test_attention_that_a_family_caps_is_capped(tmp_path):
    """sdpa, which transformers would choose, silently drops the cap."""
    folder = transformed("gemma2", tmp_path)
    (document,) = documents(29)
    outputs = {}
    for attention in ("eager", "sdpa"):
        for cap in (0.05, None):
            model = Gemma2ForCausalLM.from_pretrained(folder, attn_implementation=attention)
            for layer in model.model.layers:
                layer.self_attn.attn_logit_softcapping = cap
            with torch.no_grad():
                outputs[attention, cap] = model.model(document[None]).last_hidden_state[0]
    torch.testing.assert_close(outputs["sdpa", 0.05], outputs["eager", None], rtol=1e-5, atol=1e-5)
    assert (outputs["eager", 0.05] - outputs["eager", None]).abs().max() > 1e-2
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attn_logit_softcapping": 0.05}))
    (states,) = load_target(folder, dtype="float32").prefill([document])
    torch.testing.assert_close(states.teacher.values, outputs["eager", 0.05], rtol=1e-5, atol=1e-5)


class Scaled(LlamaForCausalLM):
    """Scales its logits under a name that no config has."""

    def forward(self, *arguments, **keywords):
        output = super().forward(*arguments, **keywords)
        output.logits = output.logits * 0.9
        return output


class EightBitHead(torch.nn.Linear):
    """A quantised lm_head, whose weights are not a floating-point matrix."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__(head.in_features, head.out_features, bias=False)
        self.scale = head.weight.detach().abs().amax() / 127
        self.weight = torch.nn.Parameter((head.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, hidden):
        return torch.nn.functional.linear(hidden, self.weight.to(hidden.dtype)) * self.scale


def strange_models() -> dict[str, LlamaForCausalLM]:
    """Models, by the reason why their hidden states cannot be the teacher."""
    torch.manual_seed(0)
    scaled, biased, quantised = Scaled(LlamaConfig(**SHAPE)), tiny_llama(), tiny_llama()
    biased.lm_head = torch.nn.Linear(64, 256)
    quantised.lm_head = EightBitHead(quantised.lm_head)
    return {
        "Scaled changes its logits after the lm_head": scaled.eval(),
        "lm_head is a Linear with a bias": biased,
        "lm_head is a EightBitHead": quantised,
    }


@pytest.mark.parametrize("reason", strange_models())
def test_what_training_cannot_do_to_hidden_states_is_refused_and_kept_as_logits(reason):
    model = strange_models()[reason]
    with pytest.raises(UserError, match=f"{reason}.* target.teacher=logits"):
        as_target(model)
    draft_ids = torch.arange(1, 256, 3)
    target = TransformersTarget(model, aux_layers=None, prefill_tokens=64, draft_ids=draft_ids)
    batch = documents(5, 31, 90, 1)
    for document, states in zip(batch, target.prefill(batch), strict=True):
        with torch.no_grad():
            logits = model(document[None]).logits[0]
        torch.testing.assert_close(states.teacher.values, logits[:, draft_ids], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states.teacher.logsumexp, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
        assert torch.equal(states.teacher.argmax, logits.argmax(-1))
        for tensor in states.named().values():
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_logits_of_the_whole_vocabulary_exist_for_few_rows_at_a_time():
    target = TransformersTarget(tiny_llama(), aux_layers=None, prefill_tokens=4096, draft_ids=torch.arange(20))
    with LargestTensor() as largest:
        target.prefill(documents(*[500] * 8))
    assert BLOCK_ROWS * 256 <= largest.elements < 4000 * 256


def test_a_teacher_of_logits_keeps_what_a_bf16_model_says_unrounded():
    model = tiny_qwen3().bfloat16()
    target = TransformersTarget(model, aux_layers=None, prefill_tokens=64, draft_ids=torch.arange(0, 256, 2))
    (document,) = documents(19)
    (states,) = target.prefill([document])
    with torch.no_grad():
        logits = model(document[None]).logits[0]
    assert states.teacher.values.dtype == torch.bfloat16 and torch.equal(states.teacher.values, logits[:, ::2])
    assert states.teacher.logsumexp.dtype == torch.float32
    torch.testing.assert_close(states.teacher.logsumexp, logits.float().logsumexp(-1), rtol=1e-6, atol=0)


def test_a_model_that_cannot_run_is_refused_in_one_line():
    model = tiny_llama()
    model.model.layers[2].self_attn.o_proj = torch.nn.Linear(63, 64)
    with pytest.raises(UserError, match=r"LlamaForCausalLM cannot run \(RuntimeError: mat1 and mat2"):
        as_target(model)


def test_a_model_without_a_layer_list_is_refused():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=8, n_head=1))
    bert = BertLMHeadModel(BertConfig(**SHAPE, is_decoder=True))
    for model in (gpt2, bert):
        with pytest.raises(UserError, match="no list of decoder layers"):
            as_target(model)


def test_checkpoints_that_cannot_be_read_are_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "t5").mkdir()
    T5Config().save_pretrained(tmp_path / "t5")
    cut = tmp_path / "cut"
    tiny_llama().save_pretrained(cut)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for name, reason in (
        (tmp_path / "nowhere", "no such folder; name a checkpoint's folder"),
        (tmp_path / "empty", "its config.json is not there"),
        (tmp_path / "t5", "causal language model cannot be read .*Unrecognized configuration class"),
        (cut, "causal language model cannot be read"),
        ("nobody/no-such-model", "check the id, the connection"),
    ):
        with pytest.raises(UserError, match=reason) as mistake:
            load_target(name)
        assert "\n" not in str(mistake.value) and "model.target" in str(mistake.value)
    with pytest.raises(UserError, match="tokenizer cannot be read"):
        load_tokenizer(cut)
    with pytest.raises(UserError, match="check the id, the connection"):
        fingerprint("nobody/no-such-model")


def test_a_checkpoint_that_lacks_weights_is_refused_rather_than_filled_at_random(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="lacks 1 weights of LlamaForCausalLM .*lm_head.weight"):
        load_target(tmp_path)


def test_target_config_is_the_text_part_of_a_nested_one(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    assert target_config(tmp_path).num_hidden_layers == 5
    text = {"model_type": "qwen2", "num_hidden_layers": 7}
    nested = {"model_type": "llava", "text_config": text, "vision_config": {"model_type": "clip_vision_model"}}
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "config.json").write_text(json.dumps(nested))
    assert target_config(tmp_path / "nested").num_hidden_layers == 7


def test_fingerprint_follows_the_content_and_not_the_folder(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "moved")
    tiny_llama(seed=9).save_pretrained(tmp_path / "retrained")  # same shapes, other numbers
    tiny_llama(rope_theta=5e5).save_pretrained(tmp_path / "config")
    prints = [fingerprint(tmp_path / name) for name in ("a", "moved", "retrained", "config")]
    assert prints[0] == prints[1] and len(set(prints)) == 3
