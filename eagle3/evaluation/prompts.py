"""Reads the prompts that a draft is judged on from a file of conversations, texts or questions."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eagle3.errors import UserError
from eagle3.text.chat import tokenized
from eagle3.text.conversations import Conversation, read_conversations
from eagle3.text.files import KINDS
from eagle3.text.template import Choices, Unusable, as_template_reads, chosen_template, renderer


def read_prompts(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    longest: int,
    choices: Choices | None = None,
) -> list[Tensor]:
    """The prompts (int64 [P]) of a file, in its order; P is at most `longest`.

    .jsonl, .json and .parquet hold rows as training data does: of `messages` and `conversations` everything before the
    last answer is the prompt, with the chat template's generation prompt behind it; a `text` is continued as it stands.
    Of a .txt file every line that is not blank is one user's question. chat_template: Jinja source, None for the
    tokenizer's own. choices: as for training, so that the draft is judged on what it learnt; default Choices(). Raises
    UserError for what cannot be read or rendered, and for a prompt that is too long.
    """
    if not path.is_file():
        raise UserError(f"--prompts {path}: no such file; name a {', '.join(KINDS)} or .txt file")
    conversations = _questions(path) if path.suffix == ".txt" else read_conversations([str(path)])
    prompts = [_prompt(row, tokenizer, chat_template, choices or Choices()) for row in conversations]
    for conversation, prompt in zip(conversations, prompts, strict=True):
        if not len(prompt):
            raise UserError(f"{conversation.origin}: the prompt has no tokens; leave it out")
        if len(prompt) > longest:
            raise UserError(
                f"{conversation.origin}: the prompt has {len(prompt)} tokens, at most {longest} leave room for the answer in "
                "the target's context; shorten it, or lower evaluation.new_tokens"
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
        raise UserError(f"{path}: holds no lines; write one question a line")
    return questions


def _prompt(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, chat_template: str | None, choices: Choices
) -> Tensor:
    try:
        if conversation.messages is None:
            text, plain = conversation.text, choices.text == "plain"  # a rendered text has its own special tokens
        else:
            text, plain = _rendered_prompt(conversation, tokenizer, chat_template, choices), False
        ids = tokenized(tokenizer, text, add_special_tokens=plain)["input_ids"]
    except Unusable as reason:
        raise UserError(f"{conversation.origin}: {reason}; mend the row") from reason
    return torch.tensor(ids, dtype=torch.long)


def _rendered_prompt(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, chat_template: str | None, choices: Choices
) -> str:
    template = chosen_template(tokenizer, chat_template, conversation.tools, conversation.origin)
    render = renderer(tokenizer, template, conversation, choices)
    asked = as_template_reads(_asked(conversation), template, choices.reasoning, render)
    return render(asked, generation_prompt=True)


def _asked(conversation: Conversation) -> list[dict]:
    """The messages before the last answer."""
    messages = list(conversation.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(message["role"] in ("user", "tool") for message in messages):
        raise UserError(f"{conversation.origin}: asks nothing (no user turn before an answer); mend the row")
    return messages
