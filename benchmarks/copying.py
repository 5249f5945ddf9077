"""Make a small target for which distant context matters, and texts to train its drafts on and to judge them: for part 2
of the experiment in docs/windows-experiment.md.

    python benchmarks/copying.py --folder runs/copying

In the conversations, a user shows lists of random words and asks for code of the standard library to be continued.
Later the user asks for a list again, as a whole or with one word replaced. Only the list itself, up to 16,384 tokens
earlier, determines the answer. The target is taught to find the list: in the first training steps, some of its
attention heads are told what to look at.

The folder gets target/, pieces.jsonl and whole.jsonl to train drafts on, prompts.jsonl to judge them, and target.json:
the target's loss on the answers, by distance, with the right list and with another list in its place.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from reporting import headline, origin, table
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle3.demo.target import Muon, batches, byte_level_tokenizer, train_language_model
from eagle3.durable import write_text
from eagle3.errors import run_command
from eagle3.recipe.schema import Demo
from eagle3.text.standard_library import standard_library_text

LONGEST, PIECE = 16384, 512  # tokens of a conversation
CONTEXTS = (512, 2048, 8192, LONGEST)
KINDS = ("whole", "edited", "code")  # what a prompt asks for; kinds take turns
PER_KIND = 8  # prompts of each context
LIST_WORDS = range(20, 41)
CODE_TOKENS = range(40, 161)  # tokens of a turn about code; half are in the answer
SHOWN = 0.6  # share of the turns without a due question that show a list
ANSWER_ROOM = 128  # tokens that an edited list of 40 words needs, with its question
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2 * LONGEST,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e10},
    "tie_word_embeddings": False,
}
# Stages of training: number of conversations, their least and most tokens, tokens per batch, and steps.
LENGTHS = ((1200, 512, 4096, 4096, 400), (60, 4096, LONGEST, LONGEST, 30), (60, 6144, LONGEST, LONGEST, 100))
RATES = {"learning_rate": 0.02, "adam_learning_rate": 0.004}


class Turn(NamedTuple):
    user: str
    assistant: str


class WordList(NamedTuple):
    name: str
    words: tuple[str, ...]

    def shown(self) -> Turn:
        return Turn(f"list {self.name}:{_text(self.words)}", "noted")

    def question(self) -> Turn:
        return Turn(f"repeat list {self.name}", _text(self.words))

    def edited(self, old: str, new: str) -> Turn:
        changed = [new if word == old else word for word in self.words]
        return Turn(f"repeat list {self.name} with {new} for {old}", _text(changed))


class Writer:
    """Writes conversations of given lengths, all from one seed."""

    def __init__(self, files: Sequence[dict], tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.code = [tokenizer(row["text"])["input_ids"] for row in files]
        self.code = [ids for ids in self.code if len(ids) > max(CODE_TOKENS)]
        words = sorted(token[1:] for token in tokenizer.get_vocab() if token[0] == "Ġ")  # one token each
        self.words = [word for word in words if len(word) > 2 and word.isalpha() and word.islower()]
        self.tokenizer, self.random = tokenizer, random.Random(seed)

    def word_list(self, size: int | None = None) -> WordList:
        size = size or self.random.choice(LIST_WORDS)
        return WordList(" ".join(self.random.sample(self.words, 2)), tuple(self.random.sample(self.words, size)))

    def question(self, shown: WordList, kind: str) -> Turn:
        if kind == "whole":
            return shown.question()
        return shown.edited(self.random.choice(shown.words), self.random.choice(self.words))

    def code_turn(self) -> Turn:
        size, ids = self.random.choice(CODE_TOKENS), self.random.choice(self.code)
        start = self.random.randrange(len(ids) - size)
        halves = ids[start : start + size // 2], ids[start + size // 2 : start + size]
        return Turn(*(self.tokenizer.decode(half) for half in halves))

    def turns(self, tokens: int) -> list[Turn]:
        """Turns of at most `tokens` tokens in all; the next turn would not fit. Each list is asked for once, after a
        distance that is log-uniform over the tokens left."""
        turns, used, due = [], 0, []
        while used < tokens - ANSWER_ROOM:
            waiting = [entry for entry in due if entry[0] <= used]
            if waiting:
                due.remove(waiting[0])
                turn = self.question(waiting[0][1], self.random.choice(KINDS[:2]))
            elif self.random.random() < SHOWN:
                shown, left = self.word_list(), tokens - used
                turn = shown.shown()
                due.append((used + ANSWER_ROOM * (left / ANSWER_ROOM) ** self.random.random(), shown))
            else:
                turn = self.code_turn()
            size = self.tokens(turn)
            if used + size > tokens:
                break
            turns, used = [*turns, turn], used + size
        return turns

    def prompt(self, context: int, kind: str) -> tuple[list[Turn], WordList]:
        """A conversation of just below `context` tokens, and the list that it shows first. Unless `kind` is code, its
        last turn asks for that list."""
        shown = self.word_list(max(LIST_WORDS))
        last = self.code_turn() if kind == "code" else self.question(shown, kind)
        first = shown.shown()
        middle = self.turns(context - self.tokens(first) - self.tokens(last))
        return [first, *middle, last], shown

    def tokens(self, turn: Turn) -> int:
        return len(encoded(self.tokenizer, [turn]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/copying"))
    parser.add_argument("--json", action="store_true", help="print target.json")
    options = parser.parse_args()
    document = make(options.folder)
    print(json.dumps(document, indent=1) if options.json else in_markdown(document))
    return 0


def make(folder: Path) -> dict[str, Any]:
    """Make the folder's content unless target.json exists already. Returns what target.json says."""
    record = folder / "target.json"
    if record.exists():
        return json.loads(record.read_text())
    began = time.process_time()
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = standard_library_text("files")
    tokenizer = byte_level_tokenizer(train, SHAPE["vocab_size"], SHAPE["max_position_embeddings"])
    writer = Writer(train, tokenizer, seed=0)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, eos_token_id=tokenizer.eos_token_id, bos_token_id=None))
    # The lengths grow in stages. From one stage to the next, the model still finds what it has learnt to look for; with
    # a single jump from short to long, it does not.
    point(model, batches(written(writer, 2000, 256, 768), 4096, seed=0), steps=250)
    for seed, (count, least, most, batch_tokens, steps) in enumerate(LENGTHS, start=1):
        texts = written(writer, count, least, most)
        demo = Demo(batch_tokens=batch_tokens, steps=steps, seed=seed, **RATES)
        loss = train_language_model(model, texts, demo, print)
    trained = time.process_time() - began
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")

    texts = Writer(train, tokenizer, seed=1)
    lengths = [1024 * 2**power for power in range(1, 5) for _ in range(16)]
    write_rows(folder / "whole.jsonl", [texts.turns(length) for length in lengths])
    write_rows(folder / "pieces.jsonl", [texts.turns(PIECE) for _ in range(1500)])
    judged = Writer(held_out, tokenizer, seed=2)
    prompts = [
        (context, kind, *judged.prompt(context, kind))
        for context in CONTEXTS
        for _ in range(PER_KIND)
        for kind in KINDS
    ]
    write_rows(folder / "prompts.jsonl", [turns for _, _, turns, _ in prompts])
    losses = {
        kind: {
            context: measured(model, judged, [each for each in prompts if each[:2] == (context, kind)])
            for context in CONTEXTS
        }
        for kind in KINDS
    }
    document = origin() | {
        "parameters": model.num_parameters(),
        "training_loss": loss,
        "training_seconds": round(trained, 1),
        "losses": losses,
    }
    write_text(record, json.dumps(document, indent=1))
    return document


def written(writer: Writer, count: int, least: int, most: int) -> list[Tensor]:
    """Conversations of log-uniform lengths in tokens: int64 [T] each."""
    sizes = [int(least * (most / least) ** writer.random.random()) for _ in range(count)]
    return [encoded(writer.tokenizer, writer.turns(size)) for size in sizes]


def point(model: LlamaForCausalLM, coming: Iterator[Any], steps: int) -> None:
    """Train with a second loss, on attention. It teaches the model to copy, which it would learn late or never by
    itself.

    Two heads of the first layer should look at the previous token and the one before it. One head in each of the next
    two layers should look at the token that followed the same two tokens earlier, if that token also comes next here.
    """
    model.set_attn_implementation("eager")
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and ".layers." in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or ".layers." not in name]
    optimizers = [
        Muon(matrices, lr=RATES["learning_rate"]),
        torch.optim.AdamW(others, lr=RATES["adam_learning_rate"], betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for step, batch in enumerate(islice(coming, steps), start=1):
        ids = batch.clamp(min=0)
        seen = model(input_ids=ids, labels=batch, use_cache=False, output_attentions=True)
        (seen.loss + 0.1 * pointed(ids, seen.attentions)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            print(f"pointing: {step}/{steps} steps, loss {seen.loss.item():.3f}", flush=True)
    model.set_attn_implementation("sdpa")


def pointed(ids: Tensor, attentions: Sequence[Tensor]) -> Tensor:
    """-log of the attention that the heads give to where they should look. ids: [B, T]; attentions: [B, heads, T, T]
    per layer."""
    before, before_that = _earlier(ids, 1), _earlier(ids, 2)
    coming = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -2)], 1)
    same = (before[:, None] == ids[:, :, None]) & (before_that[:, None] == before[:, :, None])
    right = (same & (ids[:, None] == coming[:, :, None])).tril()
    weights = [attentions[0][:, head].diagonal(-1 - head, 1, 2).flatten() for head in (0, 1)]
    weights += [(attentions[layer][:, 0] * right).sum(-1)[right.any(-1)] for layer in (1, 2)]
    return -sum((each + 1e-6).log().mean() for each in weights)


def _earlier(ids: Tensor, steps: int) -> Tensor:
    return torch.nn.functional.pad(ids, (steps, 0), value=-1)[:, : ids.shape[1]]


@torch.no_grad()
def measured(model: LlamaForCausalLM, writer: Writer, prompts: list[tuple]) -> dict[str, float]:
    """Nats per token of the last answers: with the list that was shown, and with another list in its place."""
    losses = {"with": [], "without": []}
    for _, _, turns, shown in prompts:
        other = WordList(shown.name, writer.word_list(len(shown.words)).words)
        for name, first in (("with", turns[0]), ("without", other.shown())):
            ids = encoded(writer.tokenizer, [first, *turns[1:]])
            start = len(encoded(writer.tokenizer, [first, *turns[1:-1], turns[-1]._replace(assistant="")])) - 2
            logits = model(input_ids=ids[None], use_cache=False, logits_to_keep=len(ids) - start + 1).logits[0, :-1]
            losses[name].append(cross_entropy(logits, ids[start:]).item())
    return {name: round(sum(each) / len(each), 3) for name, each in losses.items()}


def encoded(tokenizer: PreTrainedTokenizerFast, turns: Sequence[Turn]) -> Tensor:
    """Tokens of the turns: int64 [T]."""
    return torch.tensor(tokenizer.apply_chat_template(messages(turns), tokenize=True, return_dict=False))


def messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    return [
        {"role": role, "content": content} for turn in turns for role, content in zip(Turn._fields, turn, strict=True)
    ]


def write_rows(file: Path, conversations: Sequence[Sequence[Turn]]) -> None:
    file.write_text(
        "".join(json.dumps({"messages": messages(turns)}) + "\n" for turns in conversations), encoding="utf-8"
    )


def _text(words: Sequence[str]) -> str:
    return "".join(f" {word}" for word in words)


def in_markdown(document: dict[str, Any]) -> str:
    rows = [
        [kind, *(f"{each['with']:.2f}, {each['without']:.2f}" for each in by_context.values())]
        for kind, by_context in document["losses"].items()
    ]
    title = (
        f"{headline(document)}; {document['parameters']:,} parameters, {document['training_seconds']:.0f} processor "
        f"seconds. Nats a "
        "token of the answer, with the list that it needs and with another one"
    )
    return table(title, ["asked for", *(f"after {int(context):,}" for context in CONTEXTS)], rows)


if __name__ == "__main__":
    run_command(main)
