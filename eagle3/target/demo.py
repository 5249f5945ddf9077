"""The quickstart's target: a small Llama trained here, because a draft needs a real language model to predict."""

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle3.errors import UserError
from eagle3.target.answers import greedy_answers
from eagle3.target.muon import Muon

FORMAT = 2  # raise it when this file begins to make another model from the same arguments
# The chat template spells these out, so that it can be read alone.
ANSWERS, HELD_OUT_ANSWERS = "answers.jsonl", "held_out_answers.jsonl"
TURN_START, TURN_END, PADDING = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
WINDOW = 1024  # documents sorted by length together, so that batches carry little padding
IGNORED = -100  # the label that transformers' loss leaves out
WARMUP_FRACTION = 0.05
REPORT_SECONDS = 5.0


class Batch(NamedTuple):
    """Documents padded on the right, int64 [documents, longest]; labels are the ids, IGNORED where padded.

    No attention mask is needed: under causal attention no token sees the padding behind it.
    """

    ids: torch.Tensor
    labels: torch.Tensor


class DemoTarget(NamedTuple):
    """A trained demo target. Losses are nats a token over all tokens; seconds are those its training took."""

    folder: Path
    loss: float
    held_out_loss: float
    seconds: float
    cached: bool


def demo_target(
    conversations: list[dict],
    held_out: list[dict],
    *,
    cache_dir: Path,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    key_value_heads: int,
    context: int,
    batch_tokens: int,
    steps: int,
    learning_rate: float,
    adam_learning_rate: float,
    seed: int,
    answers: int,
    answer_tokens: int,
    device: torch.device | str = "cpu",
    report: Callable[[str], None] = print,
) -> DemoTarget:
    """The folder of a small chat model trained on `conversations`: made once, then found again under `cache_dir`.

    The folder holds what `from_pretrained` needs, `training.json`, and the target's own greedy answers of at most
    `answer_tokens` tokens to up to `answers` opening questions of each set (answers.jsonl, held_out_answers.jsonl): a
    draft has to predict what its target says, so it learns from that. Its name is a hash of the conversations, the
    parameters and the libraries' versions, and it appears in one rename, so a killed run leaves nothing half-made.
    A batch is at most `batch_tokens` tokens with its padding; a conversation's tokens past `context` are cut off.
    `report` gets a line every few seconds. Weights are the same for the same arguments, device and number of threads.
    Raises UserError for shapes that do not fit together and for too little text.
    """
    if hidden_size % (2 * heads) or heads % key_value_heads:
        raise UserError(
            f"model.demo: hidden_size {hidden_size}, heads {heads}, key_value_heads {key_value_heads} do not fit; "
            "make hidden_size an even multiple of heads, and heads a multiple of key_value_heads"
        )
    if batch_tokens < context:
        raise UserError(f"model.demo.batch_tokens: {batch_tokens} is less than one conversation of {context}; raise it")
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "max_position_embeddings": context,
    }
    training = {
        "batch_tokens": batch_tokens,
        "steps": steps,
        "learning_rate": learning_rate,
        "adam_learning_rate": adam_learning_rate,
        "seed": seed,
    }
    answering = {"answers": answers, "answer_tokens": answer_tokens}
    versions = [tokenizers.__version__, torch.__version__, transformers.__version__]
    identity = json.dumps([FORMAT, versions, shape, training, answering, conversations, held_out], sort_keys=True)
    folder = Path(cache_dir).expanduser() / f"demo-target-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    cached = (folder / "training.json").is_file()
    if not cached:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as unfinished:
            finished = Path(unfinished) / folder.name
            _make(finished, conversations, held_out, shape, training, answering, torch.device(device), report)
            try:
                os.replace(finished, folder)
            except OSError:  # another process was faster; its model is as good
                if not (folder / "training.json").is_file():
                    raise
    record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    return DemoTarget(folder, record["loss"], record["held_out_loss"], record["seconds"], cached)


def _make(
    folder: Path,
    conversations: list[dict],
    held_out: list[dict],
    shape: dict,
    training: dict,
    answering: dict,
    device: torch.device,
    report: Callable[[str], None],
) -> None:
    began = time.monotonic()
    tokenizer = byte_level_tokenizer(conversations, shape["vocab_size"], shape["max_position_embeddings"])
    documents = _documents(tokenizer, conversations, shape["max_position_embeddings"], "data.train")
    held_out_documents = _documents(tokenizer, held_out, shape["max_position_embeddings"], "data.held_out")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training["seed"])
        ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        model = LlamaForCausalLM(LlamaConfig(**shape, **ends, tie_word_embeddings=False)).to(device)
    report(
        f"demo target: {model.num_parameters() / 1e6:.1f}M parameters, {sum(map(len, documents)):,} tokens of text, "
        f"{training['steps']} steps of up to {training['batch_tokens']} tokens"
    )
    loss = _train(model, documents, **training, report=report)
    held_out_loss, accuracy = _measure(model, held_out_documents, training["batch_tokens"])
    seconds = time.monotonic() - began
    report(
        f"demo target: held-out loss {held_out_loss:.3f} nats a token, {accuracy:.0%} of tokens right, {seconds:.0f} s"
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for talks, name in ((conversations, ANSWERS), (held_out, HELD_OUT_ANSWERS)):
        questions = [talk["messages"][0] for talk in _spread(talks, answering["answers"])]
        answered = greedy_answers(model, tokenizer, questions, answering["answer_tokens"], report)
        lines = [json.dumps({"messages": messages}) + "\n" for messages in answered]
        (folder / name).write_text("".join(lines), encoding="utf-8")
    record = {
        "loss": loss,
        "held_out_loss": held_out_loss,
        "held_out_accuracy": accuracy,
        "steps": training["steps"],
        "seconds": seconds,
    }
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _spread(conversations: list[dict], count: int) -> list[dict]:
    """`count` of them, evenly spread, or all."""
    count = min(count, len(conversations))
    return [conversations[place * len(conversations) // count] for place in range(count)]


def byte_level_tokenizer(conversations: list[dict], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `vocab_size` tokens learnt from the messages, with a ChatML template; any text round-trips.

    Raises UserError where `vocab_size` has no room for 256 bytes and three special tokens, or the text is too little.
    """
    special = [PADDING, TURN_START, TURN_END]
    if vocab_size < 256 + len(special):
        raise UserError(f"model.demo.vocab_size: {vocab_size} has no room for 256 bytes and 3 marks; give at least 259")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator((turn["content"] for talk in conversations for turn in talk["messages"]), trainer)
    if bpe.get_vocab_size() < vocab_size:
        raise UserError(
            f"model.demo.vocab_size: {vocab_size}, but this text yields {bpe.get_vocab_size()} tokens; lower it"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=PADDING,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )


def _documents(
    tokenizer: PreTrainedTokenizerFast, conversations: list[dict], context: int, key: str
) -> list[torch.Tensor]:
    """The rendered conversations, int64 [at most context tokens] each, as they will be met: from position 0."""
    if not conversations:
        raise UserError(f"{key}: no conversations for the demo target; give it at least one")
    texts = [tokenizer.apply_chat_template(talk["messages"], tokenize=False) for talk in conversations]
    return [torch.tensor(ids[:context]) for ids in tokenizer(texts, verbose=False)["input_ids"]]


def _train(
    model: LlamaForCausalLM,
    documents: list[torch.Tensor],
    *,
    batch_tokens: int,
    steps: int,
    learning_rate: float,
    adam_learning_rate: float,
    seed: int,
    report: Callable[[str], None],
) -> float:
    """Train in place; returns the mean loss of the last tenth of the steps, in nats a token."""
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and ".layers." in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or ".layers." not in name]
    optimizers = [
        Muon(matrices, lr=learning_rate),
        torch.optim.AdamW(others, lr=adam_learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: _rate(step, steps)) for each in optimizers]
    batches = _batches(documents, batch_tokens, seed)
    losses, tokens, began = [], 0, time.monotonic()
    reported = began
    for step in range(1, steps + 1):
        batch = next(batches)
        loss = model(input_ids=batch.ids.to(model.device), labels=batch.labels.to(model.device), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        tokens += int((batch.labels != IGNORED).sum())
        now = time.monotonic()
        if now - reported > REPORT_SECONDS or step == steps:
            recent = torch.stack(losses[-20:]).mean().item()
            report(
                f"demo target: step {step}/{steps}, loss {recent:.3f}, {tokens / (now - began):,.0f} tokens/s, "
                f"{(steps - step) * (now - began) / step:.0f} s left"
            )
            reported = now
    return torch.stack(losses[-math.ceil(steps / 10) :]).mean().item()


def _rate(step: int, steps: int) -> float:
    """Linear warm-up, then linear decay to nearly 0: the multiple of the learning rate at `step`, counted from 0."""
    warmup = max(1, round(steps * WARMUP_FRACTION))
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


def _batches(documents: list[torch.Tensor], batch_tokens: int, seed: int) -> Iterator[Batch]:
    """Endless batches: every document once an epoch, in a new order each time, beside others of about its length."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(documents), generator=generator).tolist()
        for first in range(0, len(order), WINDOW):
            window = list(_padded([documents[index] for index in order[first : first + WINDOW]], batch_tokens))
            yield from (window[index] for index in torch.randperm(len(window), generator=generator).tolist())


def _padded(documents: list[torch.Tensor], batch_tokens: int) -> Iterator[Batch]:
    """All `documents`, from short to long, in batches of at most `batch_tokens` tokens with their padding."""
    waiting = sorted(documents, key=len)
    while waiting:
        count = 1
        while count < len(waiting) and (count + 1) * len(waiting[count]) <= batch_tokens:
            count += 1
        rows, waiting = waiting[:count], waiting[count:]
        yield Batch(*(pad_sequence(rows, batch_first=True, padding_value=value) for value in (0, IGNORED)))


@torch.no_grad()
def _measure(model: LlamaForCausalLM, documents: list[torch.Tensor], batch_tokens: int) -> tuple[float, float]:
    """Mean loss in nats and share of tokens whose argmax is right, over all predicted tokens of `documents`."""
    loss, right, count = 0.0, 0, 0
    for batch in _padded(documents, batch_tokens):
        labels = batch.labels[:, 1:].to(model.device)
        logits = model(input_ids=batch.ids.to(model.device), use_cache=False).logits[:, :-1]
        loss += cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum").item()
        right += int((logits.argmax(-1) == labels).sum())
        count += int((labels != IGNORED).sum())
    return loss / count, right / count
