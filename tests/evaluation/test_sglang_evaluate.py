"""evaluate.py with SGLang: a file's prompts, a tree of drafts, the result on disk."""

import json
import sys

import pytest
import torch
from sglang_cpu.environment import sglang_environment
from sglang_cpu.targets import VOCABULARY, make_target
from tiny_draft import export_trained
from tiny_run import finish, launch, write_recipe

from eagle3.evaluation.prompts import read_prompts
from eagle3.evaluation.speculative import plain_greedy
from eagle3.targets.checkpoint import load_tokenizer
from eagle3.targets.transformers import load_target

pytestmark = pytest.mark.sglang

STEPS, TOPK, TREE_TOKENS, NEW_TOKENS = 3, 2, 8, 40  # further than the draft was taught


def test_a_tree_is_lossless_and_its_figures_are_written(topology, tmp_path, monkeypatch):
    """The tokenizer has no chat template, so the prompts are texts."""
    torch.set_num_threads(1)
    target, prompts = tmp_path / "target", tmp_path / "prompts.jsonl"
    make_target("llama", target)
    generator = torch.Generator().manual_seed(5)
    words = [[f"t{word}" for word in torch.randint(3, VOCABULARY, (4 + i,), generator=generator)] for i in range(4)]
    prompts.write_text("".join(json.dumps({"text": " ".join(text)}) + "\n" for text in words))
    ids = read_prompts(prompts, load_tokenizer(target), None, longest=100)
    loaded = load_target(target, dtype="float32")
    export_trained(tmp_path / "export", loaded, ids, topology)
    put_out = sum(len(plain_greedy(loaded, prompt, new_tokens=NEW_TOKENS).tokens) for prompt in ids)
    recipe = write_recipe(
        tmp_path,
        target,
        model={"draft": {"vocab_size": 64}},
        data={"train": [str(prompts)], "held_out_fraction": 0},
        evaluation={"draft_tokens": STEPS, "new_tokens": NEW_TOKENS},
    )
    for name, value in sglang_environment().items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "launchers/evaluate.py", "--recipe", recipe, "--engine", "sglang"]
    lines = prompts.read_text().splitlines(keepends=True)
    for name, part in (("few", lines[:1]), ("many", lines[1:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
        command += ["--prompts", tmp_path / f"{name}.jsonl"]
    command += ["--draft", tmp_path / "export", "--topk", TOPK, "--tree-tokens", TREE_TOKENS]
    output = finish(launch(*map(str, command)), timeout=400)
    result = json.loads((tmp_path / "evaluation.json").read_text())
    settings = {"engine": "sglang", "engine_version": "0.5.23", "topk": TOPK, "tree_tokens": TREE_TOKENS}
    assert {name: result[name] for name in settings} == settings
    assert result["conversations"] == result["identical"] == 4 and result["lossless"]
    assert result["new_tokens"] == put_out
    assert result["verifications"] < put_out - 4, "some drafts must be accepted for this to tell"
    shares = result["position_acceptance"]
    assert len(shares) == STEPS and 1 >= shares[0] >= shares[1] >= shares[2] > 0 and shares[2] < 1
    assert f"acceptance length {result['acceptance_length']:.2f}" in output and "tokens/s" in output
    sets = result["sets"]
    assert [(each["name"], each["conversations"], each["identical"]) for each in sets] == [
        ("few", 1, 1),
        ("many", 3, 3),
    ]
    assert [pair for each in sets for pair in each["of_each"]] == result["of_each"]
    for figure in ("verifications", "yielded", "new_tokens"):
        assert sum(each[figure] for each in sets) == result[figure]
    assert [sum(column) for column in zip(*(each["accepted"] for each in sets), strict=True)] == result["accepted"]
    assert result["same_load"] and "same load" not in output
