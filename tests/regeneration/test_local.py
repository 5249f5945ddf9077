"""A checkpoint that transformers runs in place of a server: its answers are those of one prompt at a time, whatever
batch they were in."""

import json

import pytest
import torch
from places import LAUNCHERS
from tiny_run import make_target, run_script

from eagle3.targets.checkpoint import load_causal_lm, load_tokenizer

PROMPTS = ["a b c", "d", "the quick brown fox jumps over the lazy dog, and over it again", "e f", "x y z x y z", "q"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


def regenerate(target, folder, *options: str, batch: int = 100, code: int = 0) -> list[dict]:
    data, out = folder / "prompts.jsonl", folder / f"answers-{batch}.jsonl"
    rows = [{"messages": [{"role": "user", "content": prompt}]} for prompt in PROMPTS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [LAUNCHERS / "regenerate.py", "--data", data, "--target", target, "--out", out, "--batch-tokens", batch]
    command += ["--max-tokens", 24, "--truncated", "keep", *options]
    run_script(*command, code=code)
    return [json.loads(line) for line in out.read_text().splitlines()]


def contents(rows: list[dict]) -> dict[str, str]:
    return {row["messages"][0]["content"]: row["messages"][1]["content"] for row in rows}


def test_answers_are_those_of_one_prompt_at_a_time(target, tmp_path):
    model, tokenizer = load_causal_lm(str(target), None, False, torch.float32), load_tokenizer(target)
    answers = contents(regenerate(target, tmp_path, "--temperature", "0", batch=200))
    assert sorted(answers) == sorted(PROMPTS)
    for prompt, answer in answers.items():
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        whole = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert answer == tokenizer.decode(whole, skip_special_tokens=True)


def test_sampled_answers_come_again_with_the_same_seed(target, tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    options = "--temperature", "1", "--seed"
    first, again, other = (
        contents(regenerate(target, folder, *options, seed)) for folder, seed in zip(folders, "778", strict=True)
    )
    assert first == again != other


def test_a_prompt_that_leaves_no_room_is_left_out_and_named(target, tmp_path):
    rows = regenerate(target, tmp_path, "--temperature", "0", "--max-tokens", "200")
    assert len(rows) == len(PROMPTS) - 1
    record = json.loads((tmp_path / "answers-100.jsonl.record" / "summary.json").read_text())
    assert record["left_out"] == {"refused by the server": 1}
