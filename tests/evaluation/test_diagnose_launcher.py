"""diagnose.py names a fault in a draft from a hub id, its target's folder and a file of prompts, and refuses what it
cannot diagnose."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_draft import export_trained
from tiny_run import conversations, make_target, run_script
from transformers import AutoTokenizer

from eagle3.draft.config import draft_digest
from eagle3.draft.interchange import EMBEDDING
from eagle3.durable import unsealed
from eagle3.evaluation.prompts import read_prompts
from eagle3.parallel.topology import usable_cores
from eagle3.targets.transformers import load_target

ID, REVISION = "someone/draft", "0" * 40


@pytest.fixture(scope="module")
def case(tmp_path_factory, topology):
    """A folder with `target`, `prompts.jsonl`, and a hub's cache `hub` with a draft that has the wrong embedding."""
    torch.set_num_threads(1)  # as in every test; `topology` has just set the machine's number
    folder = tmp_path_factory.mktemp("diagnosed")
    target_folder, prompts = make_target(folder / "target"), folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in conversations(6)))
    target = load_target(target_folder, dtype="float32")
    cached = folder / "hub" / f"models--{ID.replace('/', '--')}"
    export = cached / "snapshots" / REVISION
    export.parent.mkdir(parents=True)
    texts = read_prompts(prompts, AutoTokenizer.from_pretrained(target_folder), None, 200)
    export_trained(export, target, texts, topology, updates=150)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(REVISION)
    tensors = load_file(export / "model.safetensors")
    wrong = target.head.embedding.roll(1, 0).contiguous().clone()
    save_file(tensors | {EMBEDDING: wrong}, export / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_draft_from_the_hub_is_diagnosed_with_its_target_and_a_file_of_prompts(case, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(case / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(usable_cores()))  # leaves it one of them
    words = ["--draft", ID, "--target", str(case / "target"), "--prompts", str(case / "prompts.jsonl")]
    keys = ["model.target_dtype=float32", "evaluation.new_tokens=24", "evaluation.draft_tokens=3"]
    out = case / "diagnosis.json"
    output = run_script("launchers/diagnose.py", *words, *keys, "--out", str(out), code=1)
    assert "fault 1: with the target's embedding, " in output and f"leave {EMBEDDING} out of its weights" in output
    assert "tokens a verification, " in output and "as the mean over conversations" in output
    for grouping in ("context", "token", "entropy of the target"):
        assert f"first drafts accepted by {grouping}: " in output
    assert "acceptance length by context (greedy, 24 new tokens)" in output
    assert "estimated for 1 x H100 by data sheet, not measured" in output and output.count("drafting pays ") == 2
    result = json.loads(out.read_text())
    assert [each["conversations"] for each in result["by_context"]["contexts"]] == [6]
    assert unsealed(result, "diagnosis")["draft_digest"] == draft_digest(next((case / "hub").glob("*/snapshots/*")))
    assert result["draft"] == ID and result["decoded"]["lossless"] and len(result["faults"]) == 1
    assert result["faults"][0]["explains"] and result["texts"] == "prompts.jsonl"
    assert "prompts: 6 make wide intervals" in output
    tried = {each["name"] for each in result["tried"]}
    assert {"the prompts in their other form", "the target in bfloat16"} <= tried
    assert torch.tensor(result["evidence"]["by_position"]).shape == (3,)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "somewhere/model"], "--target: needs texts; name a file of conversations or questions"),
        (["--target", "a/b", "--prompts", "p.jsonl"], "--target: needs a draft beside it; name its folder or hub id"),
        (["--prompts", "p.jsonl"], "--prompts p.jsonl: no such file; name a .jsonl"),
        (["evaluation.new_tokens=5"], "evaluation.new_tokens: 5 tokens hold no chain of 4"),
        (["--out", "."], "--out .: exists, but is not a file"),
        (["--out", "none/d.json"], "--out none/d.json: there is no folder none"),
        (["--draft", "./nothing"], "draft './nothing': no such folder; train first"),
        (["--prompts", "a.txt", "--prompts", "b.txt"], "--prompts b.txt: takes one file, and a.txt is given too"),
        (["--gpu", "l4"], "argument --gpu: invalid choice: 'l4' (choose from"),
        (["evaluation.conversations=0", "--draft", "a/b"], "recipe: evaluation.conversations is 0"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused_before_anything_loads(refused, words, message):
    assert message in refused("diagnose.py", *words)


def test_a_diagnosis_goes_beside_the_draft_that_it_is_of(refused, tmp_path):
    """Not into the folder that the command runs in. What is there already shows which place was meant."""
    (tmp_path / "export").mkdir()
    (tmp_path / "diagnosis.json").write_text("[]")
    message = refused("diagnose.py", "--draft", tmp_path / "export")
    assert f"{tmp_path}/diagnosis.json: holds something other than an evaluation" in message
