"""A real SGLang's answers are the target's greedy decoding, and training supervises exactly them."""

import json
from pathlib import Path

import pytest
import torch
from prepare_cases import OPTIONS, prepare
from sglang_case import cpu_environment
from sglang_case import options as engine_options
from tiny_run import TEMPLATE, conversations, make_target
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3.targets.sglang.server import SGLangServer
from eagle3.text.conversations import read_conversations
from eagle3.text.prepare import preview

pytestmark = pytest.mark.sglang

NEW_TOKENS = 60
PROMPTS = 6
LOOKUP = {"name": "lookup", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}
CALL = {"type": "function", "function": {"name": "lookup", "arguments": '{"place": "Ghent"}'}}
WITH_TOOLS = {
    "messages": [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "reasoning_content": "It may rain.", "tool_calls": [CALL]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "Yes."},
    ],
    "tools": [{"type": "function", "function": LOOKUP}],
}


def teach(folder, steps: int = 150) -> None:
    """Let the random target learn its conversations, so that its answers are words and come to an end."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in conversations(40)]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        model(**batch, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    model.save_pretrained(folder)


def greedy(folder, messages: list[dict]) -> tuple[str, bool]:
    """What transformers decodes after these messages, and whether the text came to an end."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    tokens = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    ended = tokens[-1].item() == tokenizer.eos_token_id
    return tokenizer.decode(tokens, skip_special_tokens=True), ended


def test_answers_are_the_greedy_decoding_of_the_target_and_training_supervises_exactly_them(tmp_path, launcher):
    target, source, out = make_target(tmp_path / "target"), tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    teach(target)
    rows = conversations(PROMPTS)
    follow_up = [{"role": "user", "content": "Tell me story 9."}, {"role": "assistant", "content": "No."}]
    rows[0]["messages"] += follow_up
    rows.append({"messages": [{"role": "user", "content": "Tell me " * 200}]})  # longer than the context
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def regenerate(source: Path, out: Path, temperature: float, *further: object) -> str:
        words = ["--data", source, "--out", out, "--endpoint", server.url, "--temperature", temperature]
        code, stdout, mistakes = launcher("regenerate.py", *words, "--max-tokens", NEW_TOKENS, *further)
        assert code == 0, stdout + mistakes
        return stdout

    with cpu_environment(), SGLangServer(engine_options(target)) as server:
        first = regenerate(source, out, 0)
        content = out.read_bytes()
        again = regenerate(source, out, 0)
        (tmp_path / "tools.jsonl").write_text(json.dumps(WITH_TOOLS))
        further = ("--turns", "last", "--truncated", "keep", "--seed", 3, "--top-p", 0.9)
        further += ("--template-variables", '{"enable_thinking": false}')
        regenerate(tmp_path / "tools.jsonl", tmp_path / "more.jsonl", 0.7, *further)
    assert out.read_bytes() == content and "0 answered now" in again

    (row,) = read_conversations([str(tmp_path / "more.jsonl")])
    (original,) = read_conversations([str(tmp_path / "tools.jsonl")])
    assert [message["content"] for message in row.messages[:-1]] == [one["content"] for one in original.messages[:-1]]
    assert row.messages[1]["reasoning_content"] == "It may rain." and row.tools == original.tools
    assert row.messages[-1]["content"] not in ("", "Yes.")

    answered = [json.loads(line) for line in content.splitlines()]
    expected, truncated = {}, 0
    for row in rows[:PROMPTS]:
        messages, whole = [], True
        for message in row["messages"]:
            if message["role"] == "assistant" and whole:
                text, whole = greedy(target, messages)
                message = {"role": "assistant", "content": text}
            messages.append(message)
        truncated += not whole
        if whole:
            expected[messages[0]["content"]] = messages
    assert len(expected) >= PROMPTS - 2, "the target has learnt to end its answers"
    assert {row["messages"][0]["content"]: row["messages"] for row in answered} == expected
    summary = json.loads((tmp_path / "answers.jsonl.record" / "summary.json").read_text())
    counts = {"refused by the server": 1} | ({"truncated at the length limit": truncated} if truncated else {})
    assert summary["left_out"] == counts and "1 left out: refused by the server" in first

    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.chat_template == TEMPLATE
    options = {**OPTIONS, "chat_template": None, "max_length": 256, "cache_dir": tmp_path / "cache"}
    samples = prepare([str(out)], tokenizer, **options).samples
    shown = [preview(samples[index], tokenizer, color=False) for index in range(len(samples))]
    assert shown == ["".join(map(marked, row["messages"])) for row in answered]


def marked(message: dict) -> str:
    """A message as the template renders it, with the target's words between the marks of `preview`."""
    body = f"{message['content']}<|im_end|>"
    return f"<|im_start|>{message['role']}\n" + (f"⟦{body}⟧" if message["role"] == "assistant" else body) + "\n"
