"""A prompt prefilled in chunks over ranks gives what the target gives in one piece, or is refused."""

import gc

import pytest
import torch
from long_prefill_worker import (
    ALTERNATING,
    CHUNK_TOKENS,
    FAMILIES,
    LAYOUTS,
    LENGTHS,
    differences,
    document_of,
    families,
    long_prefill,
    target_of,
)
from processes import kept
from tiny_run import run_script
from torch import nn
from transformers import DogeConfig, DogeForCausalLM, Lfm2Config, Lfm2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

from eagle3.attention.block import PLAIN, PLAIN_BLOCKS
from eagle3.errors import UserError
from eagle3.targets.long_prefill import LongPrefill
from eagle3.targets.transformers import TransformersTarget

TOLERANCE = 1e-5
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """What each rank computed in every layout, all of them in one launch."""
    folder = tmp_path_factory.mktemp("long_prefill")
    run_script("tests/support/long_prefill_worker.py", folder)
    return {layout: kept(folder, str(layout)) for layout in LAYOUTS}


every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"ulysses{layout[0]}-ring{layout[1]}")
every_family = pytest.mark.parametrize("family", FAMILIES)


@every_layout
def test_every_layout_gives_the_hidden_states_of_one_process(computed, layout):
    for results in computed[layout][:: layout[0] * layout[1]]:
        for family in (*families(*layout), "logits"):
            assert set(results[family]) == set(LENGTHS)
            for length, errors in results[family].items():
                assert_same(errors, f"{family}, {length} tokens")


@every_layout
def test_what_one_rank_finds_wrong_is_said_by_all_and_leaves_none_waiting(computed, layout):
    for messages in (rank["refusals"] for rank in computed[layout]):
        assert "document 0 has token id 96, outside the vocabulary of 96" in messages["token id on one rank"]
        assert "its logits are not finite" in messages["overflow on one rank"]
        assert "well again" not in messages
        assert ("heads" in messages) == (layout[0] == 4)
        assert "'Qwen3NextForCausalLM': has layers of type linear_attention, whose state" in messages["recurrent"]
        assert messages["recurrent"].endswith("set hidden_states.ulysses and ring to 1, which prefills it in chunks")


def test_heads_that_the_ulysses_ranks_cannot_share_are_refused_with_the_degrees_that_can(computed):
    assert computed[4, 1][3]["refusals"]["heads"].startswith(
        "hidden_states.ulysses: 4 does not divide the target's 6 attention heads; use one of 1, 2, 3, 6,"
    )


@every_family
def test_chunks_of_one_process_give_the_whole(family, topology):
    prefill = long_prefill(target_of(family), topology)
    for length in (1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 40):
        assert_same(differences(prefill, document_of(length)), f"{length} tokens")


def test_chunk_sizes_and_scaled_rope_change_nothing(topology):
    target = target_of("llama", rope_parameters=YARN)
    for chunk_tokens in (1, 7, 64):
        prefill = LongPrefill(target, *3 * [topology.alone], chunk_tokens)
        assert_same(differences(prefill, document_of(50)), f"chunks of {chunk_tokens}")


@pytest.mark.parametrize(("family", "windows"), [("gpt_oss", {None, 5}), ("deepseek_v3", {None}), ("gemma2", set())])
def test_kernels_are_chosen_for_each_window_by_the_targets_own_heads(family, windows, topology):
    """Not for scores with a softcap, which only plain products compute."""
    shapes, used = set(), []

    def forward(*arguments):
        used.append(arguments[-1].visibility)
        return PLAIN.forward(*arguments)

    def choose(**shape):
        shapes.add(tuple(shape.items()))
        return PLAIN_BLOCKS._replace(full=PLAIN._replace(forward=forward))

    prefill = LongPrefill(target_of(family), *3 * [topology.alone], CHUNK_TOKENS, choose)
    assert_same(differences(prefill, document_of(40)), family)
    heads, kv_heads, widest = {"gpt_oss": (8, 2, 8), "deepseek_v3": (4, 4, 16), "gemma2": (4, 2, 16)}[family]
    expected = {"heads": heads, "kv_heads": kv_heads, "head_dim": widest, "dtype": torch.float32}
    assert shapes == {tuple({**expected, "window": window}.items()) for window in windows}
    assert bool(used) == bool(windows)


@every_family
def test_the_targets_own_prefill_is_bit_for_bit_what_it_was(family, topology):
    target, document = target_of(family), document_of(30)
    implementation = target.model.config._attn_implementation
    (before,) = target.prefill([document])
    prefill = long_prefill(target, topology)
    chunks = prefill.chunks(document)
    next(chunks)
    (during,) = target.prefill([document])
    list(chunks)
    (after,) = target.prefill([document])
    for name, tensor in before.named().items():
        assert torch.equal(tensor, during.named()[name]) and torch.equal(tensor, after.named()[name])
    assert target.model.config._attn_implementation == implementation


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
def test_documents_taken_in_turns_do_not_mix(family, topology):
    target = target_of(family)
    one, other = (long_prefill(target, topology) for _ in range(2))
    documents = [document_of(length) for length in (40, 39, 38)]
    runs = [one.chunks(documents[0]), other.chunks(documents[1]), one.chunks(documents[2])]
    for chunks, document in zip(zip(*runs, strict=True), range(7), strict=True):
        pieces = [chunk.named() for chunk in chunks]
        rows = slice(document * CHUNK_TOKENS, (document + 1) * CHUNK_TOKENS)
        for piece, states in zip(pieces, target.prefill(documents), strict=True):
            torch.testing.assert_close(piece["values"], states.teacher.values[rows], rtol=1e-4, atol=1e-4)


@every_family
def test_bfloat16_is_taken_and_stays(family, topology):
    prefill = long_prefill(target_of(family, torch.bfloat16), topology)
    (states,) = prefill.chunks(document_of(5))
    assert states.aux.dtype == states.teacher.values.dtype == torch.bfloat16
    assert states.teacher.logsumexp.dtype == torch.float32


def test_sliding_layers_keep_no_key_that_nothing_sees_any_more(topology):
    """Counts the tokens held in tensors of the cache's shape [key and value, tokens, kv_heads, d]. After chunk c, a
    layer without a window holds all tokens; one with window 5 holds the last two chunks of 6, though no later token
    sees the first of these chunks."""
    prefill = long_prefill(target_of("gpt_oss"), topology)
    gc.collect()
    for number, _ in enumerate(prefill.chunks(document_of(10 * CHUNK_TOKENS)), start=1):
        shapes = [each.shape for each in gc.get_objects() if type(each) is torch.Tensor and each.dim() == 4]
        tokens = sum(shape[1] for shape in shapes if shape[0] == 2 and shape[2:] == (2, 8))
        assert tokens == CHUNK_TOKENS * (2 * number + 2 * min(number, 2))


LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(("kind", "rope"), [("dynamic", {"factor": 2.0}), ("longrope", LONGROPE)])
def test_rope_that_depends_on_the_prompts_length_is_refused(kind, rope, topology):
    rope = {"rope_type": kind, "rope_theta": 1e4, **rope}
    refused("by the length of the whole prompt", target_of("llama", rope_parameters=rope), topology)


def test_layers_that_are_no_attention_are_refused(topology):
    shape = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 96, "num_hidden_layers": 4, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    convolving = Lfm2ForCausalLM(Lfm2Config(**shape, **heads, full_attn_idxs=[1, 3]))
    refused("Lfm2ForCausalLM has layers of type conv", of(convolving), topology)
    doge = DogeForCausalLM(DogeConfig(**shape, **heads))
    refused("DogeForCausalLM has attention functions of its own", of(doge), topology)


def test_attention_that_does_more_than_is_known_is_refused(topology):
    class Biased(LlamaAttention):
        def forward(self, *arguments, **keywords):
            return super().forward(*arguments, position_bias=torch.ones(1), **keywords)

    class BothWays(LlamaAttention):
        def forward(self, *arguments, **keywords):
            return super().forward(*arguments, is_causal=False, **keywords)

    class Plain(LlamaAttention):
        def forward(self, hidden_states, **keywords):
            return self.o_proj(hidden_states), None

    class Twice(LlamaAttention):
        def forward(self, *arguments, **keywords):
            return super().forward(*arguments, **keywords)[0] + super().forward(*arguments, **keywords)[0], None

    for attention, message in (
        (Biased, "LlamaForCausalLM attends with position_bias"),
        (BothWays, "attends with is_causal=False"),
        (Plain, "has 4 layers, of which 3 attend"),
        (Twice, "attends in Twice twice in a layer"),
    ):
        target = target_of("llama")
        target.layers[2].self_attn.__class__ = attention
        refused(message, target, topology)


def test_masks_that_hide_other_keys_are_refused(topology):
    """Tried with a window on which a layer and its mask disagree, and with tokens that look ahead."""
    target = target_of("qwen3", use_sliding_window=True, sliding_window=7, layer_types=ALTERNATING)
    target.layers[0].self_attn.sliding_window = 8
    refused("hides other keys", target, topology)
    refused("hides other keys", target_of("gemma3_text", use_bidirectional_attention=True), topology)


def test_a_layer_that_mixes_tokens_past_its_attention_is_refused(topology):
    class Shifted(LlamaDecoderLayer):
        def forward(self, hidden_states, *arguments, **keywords):
            before = nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
            return super().forward(hidden_states + 0.1 * before, *arguments, **keywords)

    target = target_of("llama")
    target.layers[1].__class__ = Shifted
    refused(r"gives other hidden states in chunks at \d of 9 tokens", target, topology)


def test_capped_scores_are_refused_where_the_targets_own_attention_drops_the_cap(topology):
    target = target_of("gemma2")
    target.model.set_attn_implementation("sdpa")
    refused("gives other hidden states in chunks", target, topology)


def of(model) -> TransformersTarget:
    return TransformersTarget(model, aux_layers=(0, 1, 3), prefill_tokens=64)


def refused(message: str, target: TransformersTarget, topology) -> None:
    with pytest.raises(UserError, match=message) as mistake:
        long_prefill(target, topology)
    assert "choose another target" in str(mistake.value)


def assert_same(errors: dict[str, float], where: str) -> None:
    assert errors["argmax"] == 0, where
    assert max(errors[name] for name in ("aux", "values", "logsumexp")) <= TOLERANCE, (where, errors)
