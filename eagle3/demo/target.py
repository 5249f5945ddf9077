"""The quickstart's target: a small Llama trained on the spot, because a draft needs a language model to predict."""

import hashlib
import io
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from eagle3.console import Progress, Warned, waiting
from eagle3.durable import write_bytes
from eagle3.errors import UserError
from eagle3.recipe.schema import Demo
from eagle3.text.cache import found, replacing_folder

WINDOW = 1024  # documents sorted by length together, so that batches have little padding
IGNORED = -100  # a label that transformers' loss ignores
WARMUP_FRACTION = 0.05
SAVE_SECONDS = 20.0  # between two saved states
DIGEST_BYTES = 32  # of SHA-256
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
    report(
        f"demo target: loss {record['loss']:.3f}, held-out loss {record['held_out_loss']:.3f} nats a token, "
        f"{record['held_out_accuracy']:.0%} of held-out tokens right ({origin})"
    )
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
    progress, resumed = Progress(report, "answering", len(order), "questions"), len(answers)
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
        progress.at(len(answers), free=resumed)
    return [
        [question, {"role": "assistant", "content": answers[index]}]
        for index, question in enumerate(questions)
        if answers[index].strip()
    ]


# Training: batches with little padding, Muon, linear decay -----------------------------------------------------------


def train_language_model(
    model: LlamaForCausalLM,
    documents: Sequence[torch.Tensor],
    demo: Demo,
    report: Callable[[str], None],
    short: Sequence[torch.Tensor] = (),
    saved: Path | None = None,
) -> float:
    """Train the model in place on `documents` (int64 [T] each) with the settings in `demo`. The first `short_steps`
    steps train on `short`. Returns the mean loss of the last tenth of the steps, in nats per token.

    saved: file for the state now and then, from which the training goes on, bit for bit, if it is there
    """
    batch_tokens, steps, seed = demo.batch_tokens, demo.steps, demo.seed
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and ".layers." in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or ".layers." not in name]
    optimizers = [
        Muon(matrices, lr=demo.learning_rate),
        torch.optim.AdamW(others, lr=demo.adam_learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    short_batches = islice(batches(short, batch_tokens, seed), demo.short_steps) if demo.short_steps else ()
    batch_stream = chain(short_batches, batches(documents, batch_tokens, seed))
    losses: list[torch.Tensor] = []
    if saved and (state := read_saved(saved, report)):
        losses = state.pop()
        for part, kept in zip((model, *optimizers), state, strict=True):
            part.load_state_dict(kept)
        report(f"demo target: goes on after step {len(losses):,}, where it was stopped")
    before, saved_at, progress = len(losses), time.monotonic(), Progress(report, "demo target", steps, "steps")
    for step, batch in enumerate(islice(batch_stream, before, steps), before + 1):
        labels = batch.to(model.device)
        loss = model(input_ids=labels.clamp(min=0), labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, top_rate in zip(optimizers, (demo.learning_rate, demo.adam_learning_rate), strict=True):
            optimizer.param_groups[0]["lr"] = top_rate * rate(step - 1, steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if saved and (step == steps or time.monotonic() - saved_at > SAVE_SECONDS):
            write_saved(saved, [*(part.state_dict() for part in (model, *optimizers)), losses])
            saved_at = time.monotonic()
        progress.at(step, free=before, extra=f"loss {torch.stack(losses[-20:]).mean().item():.3f}")
    return torch.stack(losses[-math.ceil(steps / 10) :]).mean().item()


def write_saved(path: Path, value: Any) -> None:
    """Replaces the file by a value that torch.load gives back, and its digest. A kill leaves the old file or the new
    one."""
    torch.save(value, content := io.BytesIO())
    write_bytes(path, hashlib.sha256(content.getbuffer()).digest() + content.getbuffer())


def read_saved(path: Path, report: Callable[[str], None]) -> Any:
    """What `write_saved` wrote. None if there is nothing or, with a warning, if it is damaged."""
    if not path.exists():
        return None
    content = path.read_bytes()
    if hashlib.sha256(content[DIGEST_BYTES:]).digest() != content[:DIGEST_BYTES]:
        report(Warned(f"{path}: does not fit its digest; this part of the demo target is made again"))
        return None
    return torch.load(io.BytesIO(content[DIGEST_BYTES:]), weights_only=True)


def rate(step: int, steps: int) -> float:
    """The learning rate's multiple at `step`, counted from 0: linear warm-up, then linear decay to nearly 0."""
    warmup = max(1, round(steps * WARMUP_FRACTION))
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


def batches(documents: Sequence[torch.Tensor], batch_tokens: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield batches endlessly. Each epoch has every document once, in a new order, batched with others of similar
    length. See `padded` for what a batch is."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(documents), generator=generator).tolist()
        for start in range(0, len(order), WINDOW):
            batches = list(padded([documents[index] for index in order[start : start + WINDOW]], batch_tokens))
            yield from (batches[index] for index in torch.randperm(len(batches), generator=generator).tolist())


def padded(documents: Sequence[torch.Tensor], batch_tokens: int) -> Iterator[torch.Tensor]:
    """Yield all `documents`, from short to long, in batches of at most `batch_tokens` tokens, padding included.

    A batch is int64 [documents, longest] with IGNORED on the right, as labels are; its ids have 0 there. No attention
    mask is needed: with causal attention, no token sees the padding after it.
    """
    remaining = sorted(documents, key=len)
    while remaining:
        count = 1
        while count < len(remaining) and (count + 1) * len(remaining[count]) <= batch_tokens:
            count += 1
        rows, remaining = remaining[:count], remaining[count:]
        yield pad_sequence(rows, batch_first=True, padding_value=IGNORED)


@torch.no_grad()
def measure_language_model(
    model: LlamaForCausalLM, documents: Sequence[torch.Tensor], batch_tokens: int, report: Callable[[str], None]
) -> tuple[float, float]:
    """Mean loss in nats per token, and share of tokens that are the argmax, over all predicted tokens."""
    loss, correct, count = 0.0, 0, 0
    progress = Progress(report, "demo target, held out", len(documents), "documents")
    for batch in padded(documents, batch_tokens):
        ids = batch.clamp(min=0).to(model.device)
        labels, logits = batch[:, 1:].to(model.device), model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss += cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum").item()
        correct += int((logits.argmax(-1) == labels).sum())
        count += int((labels != IGNORED).sum())
        progress.advance(len(batch))
    return loss / count, correct / count


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024, github.com/KellerJordan/Muon) in float32, only for matrices, without weight decay.

    torch.optim.Muon orthogonalises in bfloat16, which is slow on CPUs without bfloat16 units. With it, a whole step of
    a model this small took 1.1 core-seconds; with this class 0.65, at the same loss.
    """

    def __init__(self, matrices: list[torch.Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                average = self.state[weight].setdefault("average", torch.zeros_like(weight))
                average.lerp_(weight.grad, 1 - group["momentum"])
                update = _orthogonalised(weight.grad.lerp(average, group["momentum"]))
                rows, columns = weight.shape
                weight.sub_(update, alpha=group["lr"] * max(1, rows / columns) ** 0.5)


def _orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """`matrix` with its singular values moved to about 1, by five of Muon's quintic Newton-Schulz steps."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (2.0315 * gram @ gram - 4.7750 * gram) @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T
