"""A checkpoint that transformers runs in place of a server: its answers are those of one prompt at a time, whatever
batch they were in."""

import asyncio
import json

import pytest
import torch
from prepare_cases import jsonl, turns

from eagle3.regeneration.endpoint import Refused
from eagle3.regeneration.local import LocalTarget
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


def test_of_a_batch_that_memory_does_not_hold_only_the_prompt_that_is_too_long_is_refused(target, monkeypatch):
    local = LocalTarget(str(target), 10**6, torch.device("cpu"))
    generate, most = local.model.generate, len(local.tokenizer("the quick brown fox")["input_ids"]) + 20

    def in_little_memory(ids, **options):
        if ids.numel() > 2 * most or ids.shape[1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return generate(ids, **options)

    async def ask_all():
        bodies = ({"messages": turns(prompt), "max_tokens": 4, "temperature": 0} for prompt in PROMPTS)
        return await asyncio.gather(*map(local.chat, bodies), return_exceptions=True)

    monkeypatch.setattr(local.model, "generate", in_little_memory)
    refused = [
        prompt for prompt, answer in zip(PROMPTS, asyncio.run(ask_all()), strict=True) if type(answer) is Refused
    ]
    assert refused == [max(PROMPTS, key=len)]
