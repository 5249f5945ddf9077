"""Tokens per second of SGLang with and without a draft, for several requests at a time.

    python benchmarks/real_model/batches.py RESULT --target FOLDER --draft EXPORT --at-a-time 1,4 PROMPTS.jsonl ...

Two servers stand side by side and answer all prompts in turn, greedily, twice, in the order with, without, without,
with; the one that is not asked sleeps. RESULT gets tokens, seconds and verifications.
"""

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from eagle3.evaluation.sglang_judge import DraftTree, side_by_side
from eagle3.targets.sglang.asking import Generated, ask
from eagle3.targets.sglang.server import EngineOptions, SGLangServer
from eagle3.targets.sglang.version import CPU_ATTENTION, DECODING_FLAGS, greedy_request, speculative_flags

SECONDS = 3600.0
KINDS = ("with", "without")  # the draft


def answer_all(server: SGLangServer, prompts: list[list[int]], new_tokens: int, at_a_time: int) -> dict[str, float]:
    began = time.perf_counter()
    with ThreadPoolExecutor(at_a_time) as threads:
        requests = (greedy_request(prompt, new_tokens) for prompt in prompts)
        answers = list(threads.map(lambda body: ask(server.url, "/generate", Generated, body, SECONDS), requests))
    return {
        "seconds": time.perf_counter() - began,
        "tokens": sum(len(each.tokens) for each in answers),
        "verifications": sum(sum(each.histogram) for each in answers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("prompts", type=Path, nargs="+", help="JSONL files of conversations that end with a question")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--at-a-time", type=lambda text: [int(word) for word in text.split(",")], default=[1, 4])
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    rows = [json.loads(line) for path in options.prompts for line in path.read_text(encoding="utf-8").splitlines()]
    prompts = [
        tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=True)["input_ids"]
        for row in rows
    ]
    tree = DraftTree.of(options.draft_tokens, 1, None)
    room = max(options.at_a_time) * (max(map(len, prompts)) + options.new_tokens + tree.room)
    engine = EngineOptions(options.target, dtype="float32", memory_fraction=0.3, kv_tokens=2 * room)
    attention = () if torch.cuda.is_available() else CPU_ATTENTION
    plain = [*DECODING_FLAGS, *attention]
    measured: list[dict[str, Any]] = []
    with side_by_side(engine, ([*plain, *speculative_flags(str(options.draft), *tree)], plain), room, print) as found:
        if not found:
            raise SystemExit("the two servers do not fit side by side")
        servers = dict(zip(KINDS, found, strict=True))
        for server in found:
            answer_all(server, prompts[:1], 8, 1)  # to warm up
        for at_a_time in options.at_a_time:
            for kind in (*KINDS, *reversed(KINDS)):
                passed = answer_all(servers[kind], prompts, options.new_tokens, at_a_time)
                measured.append({"draft": kind, "at_a_time": at_a_time, **passed})
                print(measured[-1], flush=True)
    options.result.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
