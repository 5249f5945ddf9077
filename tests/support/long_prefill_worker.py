"""Prefills documents over four processes in every layout, and writes for tests/targets/test_long_prefill.py how far
each is from one process.

python tests/support/long_prefill_worker.py FOLDER
"""

import sys
from functools import partial
from pathlib import Path

import torch
from processes import fork_ranks, keep
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from eagle3.errors import UserError
from eagle3.parallel.topology import Topology, start_distributed, stop_distributed
from eagle3.targets.long_prefill import LongPrefill
from eagle3.targets.transformers import TransformersTarget

WORLD = 4
# (Ulysses, ring); for layouts of two ranks there are two groups, each with its own documents
LAYOUTS = ((2, 1), (4, 1), (1, 2), (1, 4), (2, 2))
CHUNK_TOKENS = 6
# fewer tokens than ranks, no multiple of the ranks, and exactly several chunks of any number of ranks
LENGTHS = (1, 3, 37, 72)
VOCAB = 96
SHAPE = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
SHAPE |= {"num_attention_heads": 4, "max_position_embeddings": 512, "initializer_range": 0.2}
ALTERNATING = ["sliding_attention", "full_attention"] * 2


def llama(**changes) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, "num_key_value_heads": 2, **changes}))


def qwen3(**changes) -> PreTrainedModel:
    """One key/value head for all queries, which no Ulysses degree can divide."""
    return Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "num_key_value_heads": 1, "head_dim": 16, **changes}))


def gpt_oss(**changes) -> PreTrainedModel:
    """Sinks, a window smaller than a chunk in every other layer, experts."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    config = GptOssConfig(**{**SHAPE, **experts, **heads, "sliding_window": 5, "layer_types": ALTERNATING, **changes})
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, 1.0, 1.0)
    return model


def gemma3(**changes) -> PreTrainedModel:
    """Windows that reach over several chunks of one process; each kind of layer has its own rope."""
    rope = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}}
    rope["sliding_attention"] = {"rope_type": "default", "rope_theta": 100.0}
    own = {"head_dim": 16, "query_pre_attn_scalar": 9, "sliding_window": 14, "rope_parameters": rope}
    heads = {"num_key_value_heads": 2, "layer_types": ALTERNATING}
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**SHAPE, **own, **heads, **changes}))


def gemma2(**changes) -> PreTrainedModel:
    """Capped scores, which only transformers' plain attention knows."""
    own = {"head_dim": 16, "sliding_window": 9, "attn_logit_softcapping": 0.5, "final_logit_softcapping": None}
    config = Gemma2Config(**{**SHAPE, **own, "num_key_value_heads": 2, **changes}, attn_implementation="eager")
    return Gemma2ForCausalLM(config)


def deepseek_v3(**changes) -> PreTrainedModel:
    """Latent attention: keys wider than values."""
    ranks = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    more = {"moe_intermediate_size": 32, "first_k_dense_replace": 2, "num_key_value_heads": 4}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**SHAPE, **ranks, **experts, **more, **changes}))


def opt(**changes) -> PreTrainedModel:
    """Learned positions, which rope, being relative, cannot stand in for."""
    own = {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2}
    return OPTForCausalLM(OPTConfig(**{**SHAPE, **own, **changes}))


def qwen3_next(**changes) -> PreTrainedModel:
    """Three layers with a convolution and a recurrent state, one with attention. With the others' large weights, a
    state would multiply rounding errors; in fp64, chunks differ by 1e-13 from the whole then, too."""
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
    linear |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    experts |= {"shared_expert_intermediate_size": 32}
    heads = {"num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.05}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**{**SHAPE, **linear, **experts, **heads, **changes}))


ON_ANY_RANKS = {make.__name__: make for make in (llama, qwen3, gpt_oss, gemma3, gemma2, deepseek_v3, opt)}
FAMILIES = ON_ANY_RANKS | {"qwen3_next": qwen3_next}  # a recurrent state cannot be spread over ranks


def families(ulysses: int, ring: int) -> list[str]:
    """The families to try under a layout. The rarer ones are tried only once."""
    return [*ON_ANY_RANKS] if (ulysses, ring) == (2, 2) else ["llama", "qwen3", "gpt_oss", "gemma3"]


def target_of(family: str, dtype: torch.dtype = torch.float32, **changes) -> TransformersTarget:
    torch.manual_seed(5)
    model = FAMILIES[family](**changes).to(dtype)
    return TransformersTarget(model, aux_layers=(0, 1, 3), prefill_tokens=64)


def target_of_logits() -> TransformersTarget:
    """A target whose lm_head only the model itself can apply."""
    torch.manual_seed(5)
    model = llama()
    model.lm_head = torch.nn.Linear(model.config.hidden_size, VOCAB)
    return TransformersTarget(model, aux_layers=(0, 1, 3), prefill_tokens=64, draft_ids=torch.arange(1, VOCAB, 2))


def document_of(length: int) -> torch.Tensor:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length))


def differences(prefill: LongPrefill, document: torch.Tensor) -> dict[str, float] | None:
    """On the first rank of a sequence group: each tensor's largest difference from the target's own prefill, relative
    to its largest magnitude; for argmax, the number of rows that differ."""
    chunks = list(prefill.chunks(document))
    assert len(chunks) == -(-len(document) // (prefill.chunk_tokens * prefill.sequence.size()))
    if prefill.sequence.rank() > 0:
        assert chunks == [None] * len(chunks)
        return None
    (expected,) = prefill.target.prefill([document])
    actual = {name: torch.cat([chunk.named()[name] for chunk in chunks]) for name in expected.named()}
    relative = {}
    for name, tensor in expected.named().items():
        assert actual[name].shape == tensor.shape and actual[name].dtype == tensor.dtype
        if name != "argmax":
            relative[name] = float((actual[name] - tensor).abs().max() / tensor.abs().max())
    return relative | {"argmax": float((actual["argmax"] != expected.teacher.argmax).sum())}


def long_prefill(target: TransformersTarget, topology: Topology) -> LongPrefill:
    return LongPrefill(target, topology.ulysses, topology.ring, topology.sequence, CHUNK_TOKENS)


def refusals(topology: Topology) -> dict[str, str]:
    """What each rank is told if only one rank meets the mistake. After the mistakes, a sound document shows that
    prefill still works."""
    messages = {}

    def record(name: str, work) -> None:
        try:
            work()
        except UserError as error:
            messages[name] = str(error)

    last = topology.sequence.rank() == topology.sequence.size() - 1
    prefill = long_prefill(target_of("llama"), topology)
    document = document_of(11)
    if last:
        document[3] = VOCAB
    record("token id on one rank", lambda: list(prefill.chunks(document)))
    with torch.no_grad():  # no short document has token 95; in this one, only the last rank of the second chunk does
        prefill.target.head.embedding[95] = float("inf")
    document = torch.arange(2 * CHUNK_TOKENS * topology.sequence.size()) % 90
    document[-1] = 95
    record("overflow on one rank", lambda: list(prefill.chunks(document)))
    record("well again", lambda: list(prefill.chunks(document[:-1])))
    if topology.ulysses.size() == 4:
        record("heads", lambda: long_prefill(target_of("llama", num_attention_heads=6, hidden_size=96), topology))
    record("recurrent", lambda: long_prefill(target_of("qwen3_next"), topology))
    return messages


def run(folder: Path) -> None:
    for ulysses, ring in LAYOUTS:
        topology = start_distributed(1, ulysses, ring)
        # Two groups may do different things, since nothing may wait for a rank of the other group.
        lengths = LENGTHS[:: -1 if topology.data.rank() else 1]
        results = {"refusals": refusals(topology)}
        for family in families(ulysses, ring):
            prefill = long_prefill(target_of(family), topology)
            results[family] = {length: differences(prefill, document_of(length)) for length in lengths}
        prefill = long_prefill(target_of_logits(), topology)
        results["logits"] = {length: differences(prefill, document_of(length)) for length in lengths}
        keep(results, folder, str((ulysses, ring)))
    stop_distributed()


if __name__ == "__main__":
    fork_ranks(WORLD, partial(run, Path(sys.argv[1])))
