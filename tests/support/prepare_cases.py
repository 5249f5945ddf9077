"""Conversations and a byte tokenizer, for tests that prepare samples in milliseconds."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from places import CHAT_TEMPLATES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle3.text.encode import SampleEncoder
from eagle3.text.prepare import Prepared, prepare_samples
from eagle3.text.samples import SampleSet, SampleWriter

TEMPLATE = (CHAT_TEMPLATES / "zephyr.jinja").read_text()
OPTIONS = {"chat_template": TEMPLATE, "max_length": 100, "too_long": "stop", "unusable": "stop"}
OPTIONS |= {"max_samples": None, "workers": 1, "report": print}


def byte_tokenizer(
    special: Sequence[str] = ("</s>", "<|user|>", "<|assistant|>"),
    merged: Sequence[tuple[str, str]] = (),
    eos_token: str = "</s>",
    bos_token: str | None = None,
) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, for each of the `special` texts and for each pair `merged`."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merged)]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=list(merged)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos_token, bos_token=bos_token)


def jsonl(path: Path, *rows: object) -> str:
    """Writes rows into a file, and returns its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def turns(*contents: str) -> list[dict]:
    """A conversation that a user begins."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]


def prepare(sources: list[str], tokenizer: PreTrainedTokenizerFast, **options: object) -> Prepared:
    """options: those of prepare_samples, and the encoder's rules."""
    own = {name: options.pop(name) for name in ("max_samples", "workers", "cache_dir", "report")}
    return prepare_samples(sources, SampleEncoder(tokenizer, **options), **own)


def prepared(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, *answers: str | None | dict, **options: object
) -> Prepared:
    """Prepares one-question conversations with these answers; None for one without an answer, a dict for a row as it
    is."""
    rows = [
        answer if isinstance(answer, dict) else {"messages": turns("Hi", answer)[: 1 if answer is None else 2]}
        for answer in answers
    ]
    options = {**OPTIONS, "cache_dir": tmp_path / "cache", **options}
    return prepare([jsonl(tmp_path / "data.jsonl", *rows)], tokenizer, **options)


def write_set(samples: SampleSet, folder: Path) -> None:
    with SampleWriter(folder) as writer:
        writer.add((sample.ids.numpy(), sample.loss_mask.numpy()) for sample in samples)


def packed(count: int, seed: int = 0) -> SampleSet:
    rng = np.random.default_rng(seed)
    return SampleSet.pack(
        [(rng.integers(0, 50, n).astype(np.int32), rng.random(n) < 0.5) for n in rng.integers(9, 20, count)]
    )
