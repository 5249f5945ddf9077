"""Tiny targets with random weights, one per model family, which SGLang serves on a CPU and tests capture from."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

# Every family has these sizes: wide enough for two tensor-parallel ranks with two heads and one head of keys each.
VOCABULARY = 256
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # large enough that a forgotten bias, norm or sink shows
    "initializer_range": 0.1,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "gpt_oss": {**EXPERTS, "sliding_window": 16},  # in every other layer
}


def make_target(family: str, folder: Path) -> None:
    """Write an fp32 checkpoint of `family` (one of FAMILIES) with its tokenizer into `folder`; always the same
    weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = random_model(family)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)


def random_model(family: str) -> PreTrainedModel:
    """A target with random weights, norms, biases and sinks included, in the form that transformers builds."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **FAMILIES[family]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if name.endswith("sinks"):
                # SGLang keeps sinks in bf16, as released checkpoints do; about as large as the scores
                parameter.copy_(torch.randn_like(parameter).to(torch.bfloat16))
    return model


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose words t0, t1, ... are the tokens 0, 1, ... Blanks separate words. An unknown word is token
    3."""
    words = Tokenizer(models.WordLevel({f"t{token}": token for token in range(VOCABULARY)}, unk_token="t3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token="t2", unk_token="t3"
    )
