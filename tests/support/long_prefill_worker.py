"""Prefills documents over four processes in every layout, and writes for tests/targets/test_long_prefill.py how far
each is from one process."""

import sys
from functools import partial
from pathlib import Path

import torch
from processes import fork_ranks, keep
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

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
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}


# By model type, what differs from SHAPE.
FAMILIES = {
    "llama": {"num_key_value_heads": 2},
    # one key/value head for all queries, which no Ulysses degree can divide
    "qwen3": {"num_key_value_heads": 1, "head_dim": 16},
    # sinks, a window smaller than a chunk in every other layer, experts
    "gpt_oss": {
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48},
        **{"sliding_window": 5, "layer_types": ALTERNATING},
    },
    # windows that reach over several chunks of one process; each kind of layer has its own rope
    "gemma3_text": {
        **{"num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 9},
        **{"sliding_window": 14, "layer_types": ALTERNATING, "rope_parameters": ROPES},
    },
    # capped scores, which only transformers' plain attention knows
    "gemma2": {
        **{"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 9, "attn_implementation": "eager"},
        **{"attn_logit_softcapping": 0.5, "final_logit_softcapping": None},
    },
    # latent attention: keys wider than values
    "deepseek_v3": {
        **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12},
        **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "first_k_dense_replace": 2, "num_key_value_heads": 4},
    },
    # learned positions, which rope, being relative, cannot stand in for
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2},
    # Three layers with a convolution and a recurrent state, one with attention. With the others' large weights, a state
    # would multiply rounding errors; in fp64, chunks differ by 1e-13 from the whole then, too.
    "qwen3_next": {
        **{"num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.05, "linear_conv_kernel_dim": 4},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"shared_expert_intermediate_size": 32},
    },
}


def families(ulysses: int, ring: int) -> list[str]:
    """The families to try under a layout. The rarer ones are tried only once, and a recurrent state cannot be spread
    over ranks."""
    every = [name for name in FAMILIES if name != "qwen3_next"]
    return every if (ulysses, ring) == (2, 2) else ["llama", "qwen3", "gpt_oss", "gemma3_text"]


def model_of(family: str, **changes) -> PreTrainedModel:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE | FAMILIES[family] | changes))
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, 1.0, 1.0)
    return model


def target_of(family: str, dtype: torch.dtype = torch.float32, **changes) -> TransformersTarget:
    return TransformersTarget(model_of(family, **changes).to(dtype), aux_layers=(0, 1, 3), prefill_tokens=64)


def target_of_logits() -> TransformersTarget:
    """A target whose lm_head only the model itself can apply."""
    model = model_of("llama")
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
