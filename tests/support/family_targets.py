"""Tiny targets of the families in tests/families: each family's real config.json with small sizes, real class, real
template."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from places import CHAT_TEMPLATES, FAMILIES
from tiny_run import byte_level
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from eagle3.targets.checkpoint import whole_config

# Families whose architecture transformers lacks, so that only SGLang can give their hidden states.
WITHOUT_CLASS = {"ling-flash-2.0": "BailingMoeV2ForCausalLM"}

LAYERS = 6
VOCABULARY = 448  # the tokenizer's; that of the models is larger, as in most published ones
PADDED_VOCABULARY = 480
# The tiny sizes of the language model, by the names that any family's config uses.
SIZES = yaml.safe_load("""
{hidden_size: 64, intermediate_size: 128, intermediate_size_mlp: 96, dense_intermediate_size: 128,
 num_attention_heads: 4, head_dim: 16, global_head_dim: 32, rotary_dim: 8,
 query_pre_attn_scalar: 21, # differs from head_dim, as in Gemma-3-27B
 q_lora_rank: 24, kv_lora_rank: 16, qk_nope_head_dim: 16, qk_rope_head_dim: 8, v_head_dim: 16,
 linear_key_head_dim: 16, linear_value_head_dim: 16, linear_num_key_heads: 2, linear_num_value_heads: 4,
 moe_intermediate_size: 32, shared_expert_intermediate_size: 32, shared_intermediate_size: 32,
 n_routed_experts: 4, num_experts: 4, num_local_experts: 4,
 sliding_window: 16, attention_chunk_size: 16, index_n_heads: 2, index_head_dim: 16, index_topk: 16,
 sparse_num_index_heads: 2, sparse_index_dim: 16, sparse_block_size: 4, sparse_topk_blocks: 3}
""")
SIZES["num_hidden_layers"] = LAYERS
# These may only shrink: some are 1, or 0 for none.
AT_MOST = {"num_experts_per_tok": 2, "experts_per_token": 2, "top_k_experts": 2, "n_group": 2, "topk_group": 1}
AT_MOST |= {"num_global_key_value_heads": 2}
VISION_SIZES = yaml.safe_load("""
{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, head_dim: 8, image_size: 56,
 projector_input_dim: 32, projector_output_dim: 32, vision_output_dim: 32, mm_hidden_size: 32,
 vt_hidden_size: 32, vt_intermediate_size: 64, vt_num_hidden_layers: 2, vt_num_attention_heads: 4}
""")
VISION_SIZES["text_hidden_size"] = SIZES["hidden_size"]
CHATML = {
    "special_tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "bos_token": "<|endoftext|>",
    "eos_token": "<|im_end|>",
}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def recipes() -> list[str]:
    """The recipe names of all families, sorted."""
    return sorted(path.parent.name for path in FAMILIES.glob("*/config.json"))


def with_class() -> list[str]:
    return [recipe for recipe in recipes() if recipe not in WITHOUT_CLASS]


def published_config(recipe: str) -> dict[str, Any]:
    """The family's config.json."""
    return json.loads((FAMILIES / recipe / "config.json").read_text("utf-8"))


def architecture(recipe: str) -> str:
    (name,) = published_config(recipe)["architectures"]
    return name


def family_class(recipe: str) -> type[PreTrainedModel]:
    """transformers' class, whose name some families spell in another way."""
    return getattr(transformers, class_names()[plain(architecture(recipe))])


def class_names() -> dict[str, str]:
    """All names in transformers, by their plain spelling."""
    return {plain(name): name for name in dir(transformers)}


def plain(name: str) -> str:
    return name.replace("_", "").lower()


def make_family_target(recipe: str, folder: Path) -> Path:
    """Write the family's tiny fp32 checkpoint and tokenizer to `folder`, always with the same weights. config.json is
    spelt like the published one, and differs from it only in sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = family_tokenizer(recipe)
    tokenizer.save_pretrained(folder)
    config = tiny_config(recipe, tokenizer)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    random_model(recipe, whole_config(str(folder), None, False)).save_pretrained(folder, max_shard_size="200KB")
    # Again, because save_pretrained has rewritten the file in its own spelling.
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def tiny_config(recipe: str, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The published config.json with small sizes, for fp32 weights that are not quantised."""
    whole = published_config(recipe)
    own = whole.get("text_config", whole)
    for part in (whole, own):
        part.pop("quantization_config", None)
    if "num_key_value_heads" in own:
        fewer = own["num_key_value_heads"] < own["num_attention_heads"]
        own["num_key_value_heads"] = 2 if fewer else SIZES["num_attention_heads"]
    layers = own["num_hidden_layers"]
    for part in (own, own.get("sparse_attention_config", {})):
        part |= {name: value for name, value in SIZES.items() if part.get(name)}
        part |= {name: min(value, part[name]) for name, value in AT_MOST.items() if part.get(name)}
        lists = {name: values for name, values in part.items() if isinstance(values, list) and len(values) == layers}
        part |= {name: values[:LAYERS] for name, values in lists.items()}  # of one value for each layer
    own |= {"vocab_size": PADDED_VOCABULARY, "initializer_range": 0.1}
    if vision := whole.get("vision_config"):
        vision |= {name: size for name, size in VISION_SIZES.items() if name in vision}
        if "vt_hidden_size" in vision:  # Kimi-K2.5, whose sizes transformers knows by other names
            vision |= {name.removeprefix("vt_"): size for name, size in vision.items() if name.startswith("vt_")}
            whole["projection_hidden_size"] = vision["mm_hidden_size"]
    if "mm_tokens_per_image" in whole:
        whole["mm_tokens_per_image"] = 4
    spare = iter(range(VOCABULARY, PADDED_VOCABULARY))  # no tokenizer gives these
    for part in (whole, own):
        part |= {name: "float32" for name in ("torch_dtype", "dtype") if name in part}
        part |= {name: next(spare) for name in part if name.endswith("_token_index")}
        for name in TOKEN_IDS:
            if isinstance(part.get(name), int | list):
                part[name] = _known(part[name], tokenizer.bos_token_id if name[0] == "b" else tokenizer.eos_token_id)
    return whole


def _known(published: int | list[int], token: int) -> int | list[int]:
    """Token ids that the tokenizer has, as many as were published."""
    return [token, *range(token + 1, token + len(published))] if isinstance(published, list) else token


def random_model(recipe: str, config: PretrainedConfig) -> PreTrainedModel:
    """A model of the class that config.json names. Its norms, biases and sinks are random too, as in a trained
    model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = family_class(recipe)(config).float()
        with torch.no_grad():
            head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
            if head.weight is embedding.weight and not config.get_text_config(decoder=True).tie_word_embeddings:
                # Mistral-Small ties by default in its own name, not in its text part's, and has both in its checkpoint.
                head.weight = torch.nn.Parameter(0.1 * torch.randn_like(head.weight))
            for name, tensor in _learnt(model):
                if name.endswith("sinks"):
                    tensor.normal_()  # about as large as the scores
                elif tensor.dim() == 1:
                    tensor.add_(0.2 * torch.randn_like(tensor))
                elif name.endswith("_bias"):  # of experts
                    tensor.normal_(std=0.2)
    return model


def _learnt(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and other state that a checkpoint stores (a router's correction)."""
    stored = model.state_dict()
    yield from model.named_parameters()
    yield from (
        (name, buffer) for name, buffer in model.named_buffers() if name in stored and buffer.is_floating_point()
    )


@functools.cache
def tokenizer_facts(recipe: str) -> dict[str, Any]:
    """special_tokens, bos_token, eos_token and chat_template of this family, or of the family whose template it shares.
    A family whose template is not among the test data gets ChatML."""
    known = FAMILIES / recipe / "masks.yaml"
    if not known.exists():
        template = (CHAT_TEMPLATES / "chatml.jinja").read_text("utf-8")
        return CHATML | {"chat_template": template}
    facts = yaml.safe_load(known.read_text("utf-8"))
    if "same_as" in facts:
        return tokenizer_facts(facts["same_as"])
    return facts | {"chat_template": (FAMILIES / recipe / "chat_template.jinja").read_text("utf-8")}


def family_tokenizer(recipe: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the family's special tokens and chat template, trained on the conversations below."""
    facts = tokenizer_facts(recipe)
    specials = list(dict.fromkeys([*facts["special_tokens"], facts["bos_token"], facts["eos_token"]]))
    contents = [message["content"] for row in conversations() for message in row["messages"]]
    tokenizer = byte_level([*contents, facts["chat_template"]], VOCABULARY, specials)
    own = {name: facts[name] for name in ("bos_token", "eos_token", "chat_template")}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **own)
    assert len(fast) <= VOCABULARY
    return fast


def conversations() -> list[dict[str, Any]]:
    """Twelve short conversations of unequal lengths, with and without a second turn."""
    places = ("Lima", "Quito", "La Paz", "Bogota", "Caracas", "Asuncion")
    rows = []
    for number in range(12):
        place, other = places[number % 6], places[(number + 1 + number // 6) % 6]
        answer = f"From {place} to {other} it is a long way, " + "over hills, " * (number % 4) + "by any road."
        turns = [("user", f"Is it far from {place} to {other}?"), ("assistant", answer)]
        if number % 3 == 0:
            turns += [("user", f"And how is {other}?"), ("assistant", f"{other} is high up, and the nights are cold.")]
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    return rows
