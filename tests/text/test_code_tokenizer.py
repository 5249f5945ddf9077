"""A tokenizer that is Python code in the checkpoint (Kimi's): it runs if the recipe says so, the model's code does not,
and the loss mask is right although the tokenizer does not report where tokens are."""

import json
from pathlib import Path

import pytest
import torch
from jobs import inputs_of
from tiny_run import TEMPLATE, make_target, write_recipe

from eagle3.errors import UserError
from eagle3.jobs.job import input_digests
from eagle3.recipe.loading import load_recipe
from eagle3.targets.checkpoint import tokenizer_code
from eagle3.text.samples import Sample

TOKENIZER = '''
from transformers import PreTrainedTokenizer

class Bytes(PreTrainedTokenizer):
    """A token for each byte."""
    vocab_size = 256

    def get_vocab(self):
        return {f"<{byte}>": byte for byte in range(256)} | self.added_tokens_encoder

    def _tokenize(self, text):
        return [f"<{byte}>" for byte in text.encode()]

    def _convert_token_to_id(self, token):
        return int(token[1:-1])

    def _convert_id_to_token(self, token):
        return f"<{token}>"

    def convert_tokens_to_string(self, tokens):
        pieces = (token.encode() if token[1] == "|" else bytes([int(token[1:-1])]) for token in tokens)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def save_vocabulary(self, *arguments, **options):
        return ()
'''
CONFIG = "raise SystemError('the code of the model has run')"
ROWS = [
    [("user", "How far is it to Perú?"), ("assistant", "10 km 🎈é.")],
    [("user", "And?"), ("assistant", ""), ("user", "So?"), ("assistant", "<b> of\n course")],
]


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    """A recipe whose target's tokenizer and config are code."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    target = make_target(tmp_path / "target")
    for file in target.glob("tokenizer*"):
        file.unlink()
    (target / "bytes.py").write_text(TOKENIZER)
    (target / "config_code.py").write_text(CONFIG)
    special = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {"256": {"content": "<|im_start|>", **special}, "257": {"content": "<|im_end|>", **special}}
    tokenizer = {"tokenizer_class": "Bytes", "auto_map": {"AutoTokenizer": ["bytes.Bytes", None]}}
    tokenizer |= {"added_tokens_decoder": added, "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (target / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    config = json.loads((target / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "config_code.Config", "AutoModelForCausalLM": "config_code.Model"}
    (target / "config.json").write_text(json.dumps(config))
    rows = [{"messages": [{"role": role, "content": content} for role, content in row]} for row in ROWS]
    path = write_recipe(tmp_path, target, data={"held_out_fraction": 0.0})
    (tmp_path / "conversations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def text_of(sample: Sample, supervised: bool) -> str:
    names = {256: b"<|im_start|>", 257: b"<|im_end|>"}
    ids = sample.ids[sample.loss_mask] if supervised else sample.ids
    return b"".join(names.get(token) or bytes([token]) for token in ids.tolist()).decode()


def test_the_tokenizers_code_runs_alone_and_the_mask_is_right(recipe, topology):
    torch.set_num_threads(1)
    trusting = load_recipe(recipe, ["model.trust_remote_code=tokenizer"])
    inputs = inputs_of(trusting, topology.device)
    assert type(inputs.known.tokenizer).__name__ == "Bytes" and not inputs.known.tokenizer.is_fast
    for row, sample in zip(ROWS, inputs.train, strict=True):
        answers = [content for role, content in row if role == "assistant"]
        assert text_of(sample, supervised=True) == "".join(f"{answer}<|im_end|>" for answer in answers)
        assert text_of(sample, supervised=False).startswith("<|im_start|>user\n") and len(sample.ids) > 50
    again = inputs_of(trusting, topology.device)
    assert again.train_summary.cached and input_digests(again) == input_digests(inputs)


def test_without_the_users_word_no_code_runs(recipe, topology):
    torch.set_num_threads(1)
    with pytest.raises(UserError, match=r"code \('bytes.Bytes'\); read it, and set model.trust_remote_code=tokenizer"):
        inputs_of(load_recipe(recipe), topology.device)


def test_code_is_asked_for_only_where_transformers_cannot_do_without(tmp_path):
    config = {"auto_map": {"AutoTokenizer": ["own.Own", None]}}
    for name, code in ("Qwen2Tokenizer", None), ("Own", "own.Own"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": name}))
        assert tokenizer_code(str(tmp_path)) == code
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_code(str(tmp_path)) is None
