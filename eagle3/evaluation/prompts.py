"""The prompts that a draft is judged on, from held-out samples or from a file of conversations, texts or questions.

To judge by context length, samples are cut where an answer continues, and put into buckets of doubling length.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eagle3.console import Say
from eagle3.errors import UserError
from eagle3.objective.chains import SHORTEST, contexts_up_to
from eagle3.text.chat import tokenized
from eagle3.text.conversations import Conversation, read_conversations
from eagle3.text.samples import SampleSet
from eagle3.text.template import Choices, Unusable, as_template_reads, renderer

SHORT = (16, 32, 64, 128, 256)  # contexts of texts that are all shorter than the first of the usual list


def longest_prompt(context: int, new_tokens: int, room: int) -> int:
    """Length of the longest prompt that leaves room in the target's context for an answer of `new_tokens`, and for a
    verification of `room` tokens at the answer's end. Raises UserError if there is none."""
    if (longest := context - new_tokens - room) < 1:
        raise UserError(
            f"evaluation.new_tokens: {new_tokens:,} tokens of an answer, and {room:,} of a verification "
            f"(evaluation.draft_tokens), leave no place for a prompt in the target's context of {context:,}; lower them"
        )
    return longest


def choose_prompts(samples: SampleSet, count: int, longest: int) -> list[Tensor]:
    """Choose up to `count` samples, spread evenly over the set. Returns their prompts [P]: all tokens before the first
    supervised one, at most `longest`. Raises UserError if no sample has such a prompt."""
    starts = [(sample.ids, int(sample.loss_mask.int().argmax())) for sample in samples]
    fitting = [ids[:start] for ids, start in starts if 0 < start <= longest]
    if not fitting:
        raise UserError(
            f"evaluation: none of {len(samples)} held-out samples has a prompt of 1 to {longest} tokens; name such "
            "samples in data.held_out, raise data.held_out_fraction, or set evaluation.conversations=0"
        )
    indices = torch.linspace(0, len(fitting) - 1, min(count, len(fitting))).round().long()
    return [fitting[index] for index in indices.tolist()]


def read_prompts(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    longest: int,
    choices: Choices = Choices(),
    *,
    other_form: bool = False,
) -> list[Tensor]:
    """Read the prompts in a file (int64 [P] each), in the file's order.

    .jsonl, .json and .parquet files hold rows like training data. In `messages` and `conversations`, everything
    before the last answer is the prompt, followed by the chat template's generation prompt; a `text` is continued as it
    stands. In a .txt file, every non-blank line is one user question.

    chat_template: Jinja source; None for the tokenizer's own
    longest: most tokens in a prompt
    choices: the same as in training, so that the draft is judged on what it learnt
    other_form: read conversations as plain text without the chat template, and a `text` as a user's question

    Raises UserError for a file or row that cannot be read or rendered, and for a prompt that is too long.
    """
    conversations = _questions(path) if path.suffix == ".txt" else read_conversations([str(path)])
    if other_form:
        conversations = [_in_other_form(conversation) for conversation in conversations]
    prompts = [_prompt(row, tokenizer, chat_template, choices) for row in conversations]
    for conversation, prompt in zip(conversations, prompts, strict=True):
        if not len(prompt):
            raise UserError(f"{conversation.origin}: the prompt has no tokens; leave it out")
        if len(prompt) > longest:
            raise UserError(
                f"{conversation.origin}: the prompt has {len(prompt)} tokens, but at most {longest} leave room for "
                "the answer in the target's context; shorten it, or lower evaluation.new_tokens"
            )
    return prompts


def _questions(path: Path) -> list[Conversation]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({error}); convert the file") from error
    questions = [
        Conversation(f"{path}:{number}", ({"role": "user", "content": line.strip()},), None)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not questions:
        raise UserError(f"{path}: holds no lines; write one question per line")
    return questions


def _in_other_form(conversation: Conversation) -> Conversation:
    """The conversation as plain text, or plain text as a conversation."""
    if conversation.messages is None:
        return Conversation(conversation.origin, ({"role": "user", "content": conversation.text},), None)
    contents = (message.get("content") for message in _prompt_messages(conversation))
    return Conversation(conversation.origin, None, "\n\n".join(text for text in contents if isinstance(text, str)))


def _prompt(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, chat_template: str | None, choices: Choices
) -> Tensor:
    try:
        if conversation.messages is None:
            text, plain = conversation.text, choices.text == "plain"  # rendered text has its own special tokens
        else:
            template, render = renderer(tokenizer, chat_template, conversation, choices)
            messages = as_template_reads(_prompt_messages(conversation), template, choices.reasoning, render)
            text, plain = render(messages, generation_prompt=True), False
        ids = tokenized(tokenizer, text, add_special_tokens=plain)["input_ids"]
    except Unusable as reason:
        raise UserError(f"{conversation.origin}: {reason}; fix the row") from reason
    return torch.tensor(ids, dtype=torch.long)


def _prompt_messages(conversation: Conversation) -> list[dict]:
    messages = [*conversation.messages]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(message["role"] in ("user", "tool") for message in messages):
        raise UserError(f"{conversation.origin}: asks nothing (no user turn before an answer); fix the row")
    return messages


# By context ----------------------------------------------------------------------------------------------------------


def prompts_by_context(
    texts: Sequence[tuple[Tensor, np.ndarray]],
    contexts: Sequence[int] | None,
    per_context: int,
    longest: int,
    report: Say = lambda line: None,
) -> dict[int, list[Tensor]]:
    """Choose up to `per_context` prompts of at most `longest` tokens for each context: int64 [P] each, with
    context / 2 < P <= context. They are the beginnings of texts, as long as the context allows.

    texts: int64 [T] each, with the places where it may be cut, ascending. Contexts share texts that are long enough
        for several; the others are chosen evenly.
    contexts: ascending; None for 512, 1024, ... as far as there are prompts; if there are none, for shorter ones
    report: gets a line if contexts are shorter, and for each without a prompt

    Raises UserError if no context has a prompt.
    """
    buckets = contexts_up_to(longest) if contexts is None else contexts
    if contexts is None and not any(_cuts(places, buckets, longest).any() for _, places in texts):
        buckets = SHORT
    cuts = np.array([_cuts(places, buckets, longest) for _, places in texts], np.int64).reshape(-1, len(buckets))
    if not cuts.any():
        raise UserError(
            f"--by-context: none of {len(texts)} texts belongs to a context, which takes prompts of more than half its "
            f"length (the longest has {max((int(each[-1]) for _, each in texts if len(each)), default=0)} tokens, and "
            f"the target's context leaves room for {longest}); use longer texts (data.held_out, data.max_length, "
            "--prompts), or name other contexts in --contexts"
        )
    if buckets is SHORT:
        report(
            f"--by-context: no answer begins after more than {SHORTEST // 2} tokens, so shorter contexts are judged "
            "(--contexts names others)"
        )
    filled = np.flatnonzero(cuts.any(0))
    kept = buckets if contexts is not None else buckets[filled[0] : filled[-1] + 1]
    prompts = {}
    for context, lengths, indices in zip(buckets, cuts.T, _choose(cuts, per_context), strict=True):
        if context in kept:
            prompts[context] = [texts[index][0][: lengths[index]] for index in indices]
            if not indices:
                report(f"context {context:,}: left out, no text is of that length")
    return prompts


def _cuts(rows: np.ndarray, buckets: Sequence[int], longest: int) -> np.ndarray:
    """For each bucket, the last of `rows` (ascending) that it allows; 0 if there is none."""
    last = np.append(0, rows)[np.searchsorted(rows, np.minimum(buckets, longest), side="right")]
    return np.where(2 * last > buckets, last, 0)


def _choose(cuts: np.ndarray, count: int) -> list[list[int]]:
    """Choose up to `count` texts for each bucket. Long contexts choose first, because the fewest texts suit them.

    cuts: [texts, buckets]; 0 if a text does not suit a bucket
    """
    choices, earlier = [], []
    for lengths in cuts.T[::-1]:
        reused = [index for index in earlier if lengths[index]][:count]
        others = np.setdiff1d(np.flatnonzero(lengths), reused)
        extra = min(count - len(reused), len(others))
        spread = np.linspace(0, len(others) - 1, extra).round().astype(int) if extra else []
        choices.append(sorted([*reused, *(int(others[place]) for place in spread)]))
        earlier += [index for index in choices[-1] if index not in earlier]
    return choices[::-1]
