"""The quickstart's target: a small Llama trained on the spot, because a draft needs a language model to predict."""

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from eagle3.console import Progress, waiting
from eagle3.demo.training import measure_language_model, read_saved, train_language_model, write_saved
from eagle3.errors import UserError
from eagle3.recipe.schema import Demo
from eagle3.text.cache import found, replacing_folder

BATCH = 256  # questions answered together
FORMAT = 3  # raise this if a change here makes a different model from the same arguments
ANSWERS, HELD_OUT_ANSWERS = "answers.jsonl", "held_out_answers.jsonl"
RECORD = "training.json"
# The chat template repeats these literally, so that it can be read on its own.
TURN_START, TURN_END, PADDING = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def demo_target(
    rows: list[dict],
    held_out: list[dict],
    demo: Demo,
    *,
    cache_dir: Path,
    device: torch.device | str = "cpu",
    report: Callable[[str], None] = print,
    make: bool = True,
) -> Path:
    """The folder of a small model trained on `rows`, which are conversations (`messages`) or files (`text`). If it was
    trained before, it is taken from `cache_dir`.

    The folder holds the files that `from_pretrained` needs, `training.json` and, if rows are conversations, the
    target's own greedy answers, of at most `answer_tokens` tokens, to up to `answers` opening questions of each set
    (answers.jsonl, held_out_answers.jsonl). The draft learns from these, because it has to predict what its target
    says. The folder's name is a hash of the rows, the parameters and the libraries' versions. The folder appears by a
    rename; what a stopped process has done stays beside it, and the next one goes on from there, bit for bit. A cached
    folder is compared with its digests, and made again if a file does not match.

    In conversations, tokens beyond `context` are cut off; files are cut into pieces. Weights are the same for the same
    arguments, device and number of threads.

    report: gets a line now and then
    make: whether to train the target if it is not in the cache

    Raises UserError for too little text, and if the target is not cached and `make` is false.
    """
    versions = [tokenizers.__version__, torch.__version__, transformers.__version__]
    inputs = [FORMAT, versions, demo.model_dump(), rows, held_out]
    identity = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(cache_dir).expanduser() / f"demo-target-{identity}"
    is_cached = found(folder, "the demo target", report)
    if not (is_cached or make):
        raise UserError(
            f"model.target: demo: there is no whole one in {folder}, and a new one would not be the target that the "
            "draft learnt from; set data.cache_dir or model.demo as in training, and use the same Python and packages, "
            "or name the target's folder as model.target"
        )
    if not is_cached:
        with replacing_folder(folder, resumable=True) as unfinished:
            _make(unfinished, rows, held_out, demo, torch.device(device), report)
    record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    origin = "found in the cache" if is_cached else f"made in {record['seconds']:.0f} s"
    losses = f"loss {record['loss']:.3f}, held-out loss {record['held_out_loss']:.3f} nats a token"
    report(f"demo target: {losses}, {record['held_out_accuracy']:.0%} of held-out tokens right ({origin})")
    return folder


def demo_shape(demo: Demo) -> dict[str, Any]:
    """The shape of a demo target as arguments of LlamaConfig."""
    return {
        "vocab_size": demo.vocab_size,
        "hidden_size": demo.hidden_size,
        "intermediate_size": demo.intermediate_size,
        "num_hidden_layers": demo.layers,
        "num_attention_heads": demo.heads,
        "num_key_value_heads": demo.key_value_heads,
        "max_position_embeddings": demo.context,
        "rope_parameters": demo.rope_parameters,
    }


def _make(
    folder: Path,
    rows: list[dict],
    held_out: list[dict],
    demo: Demo,
    device: torch.device,
    report: Callable[[str], None],
) -> None:
    """Train the target and write its files."""
    start = time.monotonic()
    disable_progress_bar()  # the bar for saving the model garbles logs
    with waiting(report, "demo target: making a tokenizer"):
        tokenizer = byte_level_tokenizer(rows, demo.vocab_size, demo.context)
    with waiting(report, "demo target: tokenising its text"):
        documents = _documents(tokenizer, rows, demo.context)
        short_documents = _documents(tokenizer, rows, demo.short_context) if demo.short_context else []
        held_out_documents = _documents(tokenizer, held_out, demo.context)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(demo.seed)
        ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        try:
            model = LlamaForCausalLM(LlamaConfig(**demo_shape(demo), **ids, tie_word_embeddings=False)).to(device)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"model.demo.rope_parameters: {demo.rope_parameters}: transformers does not take this rope "
                f"({error!r}); fix it, or leave it out"
            ) from error
    report(
        f"demo target: {model.num_parameters() / 1e6:.1f}M parameters, {sum(map(len, documents)):,} tokens of text, "
        f"{demo.steps} steps of up to {demo.batch_tokens} tokens"
    )
    saved = folder.parent  # goes with the temporary folder
    loss = train_language_model(model, documents, demo, report, short_documents, saved / "training")
    held_out_loss, accuracy = measure_language_model(model, held_out_documents, demo.batch_tokens, report)
    seconds = time.monotonic() - start
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # on a full disk, their writers, which are in Rust, raise errors of their own
        raise OSError(str(error)) from error
    for source, name in ((rows, ANSWERS), (held_out, HELD_OUT_ANSWERS)):
        if "text" in source[0]:
            continue  # files have no questions
        count = min(demo.answers, len(source))
        questions = [source[place * len(source) // count]["messages"][0] for place in range(count)]  # evenly spread
        answers = greedy_answers(model, tokenizer, questions, demo.answer_tokens, report, saved / name)
        text = "".join(json.dumps({"messages": messages}) + "\n" for messages in answers)
        (folder / name).write_text(text, encoding="utf-8")
    record = {"loss": loss, "held_out_loss": held_out_loss, "held_out_accuracy": accuracy, "seconds": seconds}
    (folder / RECORD).write_text(json.dumps(record | {"steps": demo.steps}, indent=1), encoding="utf-8")


def byte_level_tokenizer(rows: list[dict], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `vocab_size` tokens on the rows, with a ChatML template. Any text round-trips.

    Raises UserError if there is too little text.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PADDING, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = ([row["text"]] if "text" in row else [turn["content"] for turn in row["messages"]] for row in rows)
    bpe.train_from_iterator(texts, trainer)
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


def _documents(tokenizer: PreTrainedTokenizerFast, rows: list[dict], longest: int) -> list[torch.Tensor]:
    """Tokenise rows into documents (int64) of at most `longest` tokens: the beginning of a rendered conversation, or
    all of a file, in pieces. Every document begins at position 0, as texts do when the target is used."""
    texts = [row.get("text") or tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
    documents = []
    for row, ids in zip(rows, tokenizer(texts, verbose=False)["input_ids"], strict=True):
        starts = range(0, len(ids), longest) if "text" in row else (0,)
        documents += [torch.tensor(ids[start : start + longest]) for start in starts]
    return [document for document in documents if len(document) > 1]


@torch.no_grad()
def greedy_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    questions: list[dict],
    new_tokens: int,
    report: Callable[[str], None],
    saved: Path,
) -> list[list[dict]]:
    """Answer each opening message greedily. Returns [question, answer] in the questions' order.

    An answer longer than `new_tokens` is cut off. Empty answers, which teach nothing, are left out.

    saved: file for the answers so far; batches whose answers are in it are not asked again
    """
    prompts = [
        tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True) for question in questions
    ]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    answers = read_saved(saved, report) or {}
    report(f"answering {len(order):,} questions")
    progress = Progress(report, "answering", len(order), "questions")
    for start in range(0, len(order), BATCH):
        indices = order[start : start + BATCH]
        if indices[0] in answers:
            continue
        batch = tokenizer(
            [prompts[index] for index in indices],
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
            return_token_type_ids=False,
        ).to(model.device)
        ids = model.generate(**batch, max_new_tokens=new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        answers.update(zip(indices, texts, strict=True))
        write_saved(saved, answers)
        progress.advance(len(indices))
    return [
        [question, {"role": "assistant", "content": answers[index]}]
        for index, question in enumerate(questions)
        if answers[index].strip()
    ]
