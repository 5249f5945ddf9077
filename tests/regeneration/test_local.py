"""A checkpoint that transformers runs in place of a server: its answers are those of one prompt at a time, whatever
batch they were in."""

import json

import pytest
import torch
from prepare_cases import jsonl, turns

from eagle3.targets.checkpoint import load_causal_lm

PROMPTS = ["a b c", "d", "the quick brown fox jumps over the lazy dog, and over it again", "e f", "x y z x y z", "q"]


@pytest.fixture
def answers(target, tmp_path, launcher):
    """The launcher's answer to each prompt, in a file of this name."""

    def regenerate(name: str, *options: object, batch: int = 100) -> dict[str, str]:
        out = tmp_path / f"{name}.jsonl"
        data = jsonl(tmp_path / "prompts.jsonl", *({"messages": turns(prompt)} for prompt in PROMPTS))
        words = ["--data", data, "--target", target, "--out", out, "--batch-tokens", batch, "--max-tokens", 24]
        assert launcher("regenerate.py", *words, "--truncated", "keep", *options)[0] == 0
        talks = (json.loads(line)["messages"] for line in out.read_text().splitlines())
        return {question["content"]: answer["content"] for question, answer in talks}

    return regenerate


def test_answers_are_those_of_one_prompt_at_a_time(target, tokenizer, answers):
    model = load_causal_lm(str(target), None, False, torch.float32)
    given = answers("greedy", "--temperature", 0, batch=200)
    assert sorted(given) == sorted(PROMPTS)
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    for prompt, answer in given.items():
        ids = tokenizer.apply_chat_template(turns(prompt), **options)
        whole = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert answer == tokenizer.decode(whole, skip_special_tokens=True)


def test_sampled_answers_come_again_with_the_same_seed(answers):
    first, again, other = (answers(name, "--temperature", 1, "--seed", seed) for name, seed in ("a7", "b7", "c8"))
    assert first == again != other


def test_a_prompt_that_leaves_no_room_is_left_out_and_counted(tmp_path, answers):
    assert len(answers("long", "--temperature", 0, "--max-tokens", 200)) == len(PROMPTS) - 1
    record = json.loads((tmp_path / "long.jsonl.record" / "summary.json").read_text())
    assert record["left_out"] == {"refused by the server": 1}
