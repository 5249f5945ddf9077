"""The loss mask of a conversation under any chat template: what the target itself would generate, and nothing else.

For each message in turn, its content is marked and the whole conversation is rendered again: what differs from the true
rendering is what that message contributed. The generation prompt shows where an assistant's turn begins. The text is
never searched for a content, so contents that repeat, or hold the template's own markers, cannot mislead. Anything that
remains ambiguous is refused (`Unusable`).
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, cycle, islice
from typing import Any, NamedTuple

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerBase

from eagle3.text.conversations import REASONING_KEYS, Conversation
from eagle3.text.rendered_text import AddedToken, any_of, turn_spans, turns_of
from eagle3.text.template import (
    GENERATION,
    Choices,
    Render,
    Unusable,
    as_template_reads,
    renderer,
    require_calls,
    with_marks,
)

PRIVATE_USE = range(0xE000, 0xF900)
THINKING = re.compile("think|thought", re.IGNORECASE)  # what names and words that open a think block contain
MOST_TOKENS_OF_A_CHARACTER = 8  # more than the four bytes of one, as tokens may straddle characters

Span = tuple[int, int]  # characters [start, stop) of the rendering


class Encoded(NamedTuple):
    ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T], True for tokens that the target generates
    text: str  # the rendering that was tokenised
    empty_answers: tuple[int, ...] = ()  # first token of each turn without text (only added tokens and white space)


@dataclass(frozen=True)
class Region:
    """What one message contributed to the rendering: characters [start, stop)."""

    start: int
    stop: int
    # True if, apart from white space, nothing printed before the content depends on the message.
    direct: bool
    # What the template prints after the message; None if the comparison cannot show it.
    closing: str | None


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    chat_template: str | None,
    choices: Choices = Choices(),
) -> Encoded:
    """Token ids and loss mask of one conversation.

    What is supervised:
    - in `messages`, every assistant turn that answers something, from the end of the generation prompt to the
      end-of-turn token. An assistant message that opens a conversation is not supervised, because no prompt would make
      the target generate it.
    - with a template that marks turns with `{% generation %}`, what it marks
    - in plain `text`, all tokens
    - in rendered `text`, the turns that the template's special tokens delimit

    chat_template: Jinja source that replaces the tokenizer's own

    Raises Unusable if the mask cannot be determined with certainty, and UserError if no conversation can be encoded
    with this tokenizer and template.
    """
    if conversation.messages is None and choices.text == "plain":
        ids = tokenized(tokenizer, conversation.text, add_special_tokens=True)["input_ids"]
        return Encoded(np.asarray(ids, np.int32), np.ones(len(ids), bool), conversation.text)
    template, render = renderer(tokenizer, chat_template, conversation, choices)
    contents = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()}
    added_tokens = sorted(filter(None, contents.values()), key=len, reverse=True)
    if conversation.messages is None:
        text = conversation.text
        ids, offsets = _with_offsets(tokenizer, text)
        tokens = _added_tokens(text, ids, offsets, contents)
        spans = turn_spans(text, tokens, turns_of(render, added_tokens), tokenizer.bos_token or "")
    else:
        messages = as_template_reads(conversation.messages, template, choices.reasoning, render)
        text, spans = _talk_spans(messages, template, render, added_tokens, choices.supervise)
        ids, offsets = _with_offsets(tokenizer, text)
    if choices.supervise == "last_turn":
        spans = spans[-1:]
    return _supervised(ids, text, offsets, spans, list(contents))


def _added_tokens(text: str, ids: np.ndarray, offsets: np.ndarray, contents: dict[int, str]) -> list[AddedToken]:
    """The added tokens in a text, in order. contents: the text of every added token, by id. If the tokenizer counts
    white space on the left as part of an added token, it is cut off."""
    tokens = zip(map(contents.get, ids.tolist()), offsets.tolist(), strict=True)
    return [
        AddedToken(content, max(text.find(content, start, stop), start), stop)
        for content, (start, stop) in tokens
        if content is not None
    ]


def _talk_spans(
    messages: list[dict], template: str, render: Render, added_tokens: list[str], supervise: str
) -> tuple[str, list[Span]]:
    """The rendered messages, and the spans of the assistant's turns in them."""
    count = sum(message["role"] == "assistant" for message in messages)
    if not count:
        raise Unusable("no assistant turn")
    text = render(messages)
    if GENERATION.search(template):
        marks = _unused(text)
        spans = _marked_spans(text, render(messages, template=with_marks(template, *marks)), *marks)
        if supervise == "last_turn" and len(spans) != count:
            raise Unusable("there is not one {% generation %} block for each assistant turn in the chat template")
    else:
        spans = _assistant_spans(messages, text, render, added_tokens)
    require_calls(messages, text, render)
    return text, spans


def tokenized(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> BatchEncoding:
    """Tokenize a text of any length. Raises Unusable for text with unpaired surrogates."""
    if re.search("[\ud800-\udfff]", text):
        raise Unusable("half of a surrogate pair in the text, which is not a character")
    # verbose=True would warn of texts beyond the model's context; masks and type ids, as lists, would take gigabytes
    return tokenizer(
        text,
        add_special_tokens=add_special_tokens,
        verbose=False,
        return_attention_mask=False,
        return_token_type_ids=False,
    )


def _with_offsets(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, int32 [T], and the characters [start, stop) of each, int64 [T, 2]. Adds no special tokens: the
    template has written them."""
    encoded = tokenized(tokenizer, text, add_special_tokens=False)
    if not tokenizer.is_fast:
        ids = np.asarray(encoded["input_ids"], np.int32)
        return ids, _decoded_offsets(tokenizer, text, ids.tolist())
    [encoding] = encoded.encodings  # gives offsets without building a list of tuples
    spans = chain.from_iterable(map(encoding.token_to_chars, range(len(encoding))))
    return np.asarray(encoded["input_ids"], np.int32), np.fromiter(spans, np.int64, 2 * len(encoding)).reshape(-1, 2)


def _decoded_offsets(tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int]) -> np.ndarray:
    """The characters of each token of a tokenizer that does not report them (one that is Python code), found by
    decoding: the tokens' texts, one after another, must be the text. Tokens that share a character, of which each has
    only some bytes, all have its place. Raises Unusable if they are not the text."""
    spans, start, pending = [], 0, []
    for token in ids:
        pending.append(token)
        piece = tokenizer.decode(pending, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if text.startswith(piece, start) and piece:
            spans += len(pending) * [(start, start + len(piece))]
            start, pending = start + len(piece), []
        elif len(pending) == MOST_TOKENS_OF_A_CHARACTER:
            break
    if start != len(text) or pending:
        raise Unusable(
            f"the tokenizer ({type(tokenizer).__name__}, which does not report where tokens are) changes the text"
        )
    return np.array(spans, np.int64).reshape(-1, 2)


def _unused(text: str) -> tuple[str, str]:
    """Two private-use characters that are not in the text. No template trims them, and no content resembles them."""
    marks = list(islice((mark for mark in map(chr, PRIVATE_USE) if mark not in text), 2))
    if len(marks) < 2:
        raise Unusable("the conversation uses all private-use characters, so none is left to mark its messages with")
    return marks[0], marks[1]


# Templates that mark their own turns ---------------------------------------------------------------------------------


def _marked_spans(text: str, marked_text: str, begin: str, end: str) -> list[Span]:
    if marked_text.replace(begin, "").replace(end, "") != text:
        raise Unusable("the chat template changes what its {% generation %} blocks print")
    marks = re.findall(f"[{begin}{end}]", marked_text)
    if len(marks) < 2 or any(mark != expected for mark, expected in zip(marks, cycle((begin, end)), strict=False)):
        raise Unusable("the chat template prints no {% generation %} block, or one inside another")
    positions = list(accumulate(map(len, re.split(f"[{begin}{end}]", marked_text))))  # in `text`: each mark, the end
    return list(zip(positions[:-1:2], positions[1:-1:2], strict=False))


# Any other template --------------------------------------------------------------------------------------------------


class _Chat:
    """A conversation, its rendering `text`, and what is needed to compare renderings.

    added_tokens: the tokenizer's, longest first; added: matches each of them
    marks: two characters that do not occur in the text
    marked: the messages with their contents between the marks. An assistant's content, which may hold reasoning that
        the template moves, is replaced by the marks alone.
    """

    def __init__(self, messages: list[dict], text: str, render: Render, added_tokens: list[str]) -> None:
        self.messages, self.text, self.render = messages, text, render
        self.added_tokens, self.added = added_tokens, any_of(added_tokens)
        begin, end = self.marks = _unused(text)
        self.marked = [
            {"role": "assistant", "content": begin + end}
            if message["role"] == "assistant"
            else {**message, "content": begin + message["content"] + end}
            for message in messages
        ]

    def around(self, index: int, after: Sequence[dict] = (), **options: Any) -> tuple[str, str]:
        """What the template prints before and after the content of message `index`, between the messages before it and
        `after`. options: for `render`"""
        rendering = self.render([*self.messages[:index], self.marked[index], *after], **options)
        if any(rendering.count(mark) != 1 for mark in self.marks):
            raise Unusable(
                "the chat template leaves out or repeats the content of a message of the "
                f"{self.messages[index]['role']}"
            )
        return rendering.partition(self.marks[0])[0], rendering.partition(self.marks[1])[2]

    def leading_token(self, text: str) -> str | None:
        """The added token that the text begins with, after any white space."""
        token = self.added.match(text.lstrip())
        return token and token[0]

    def thinking_in(self, prompt: str) -> int | None:
        """Where a generation prompt opens a think block: at an added token with such a name, or before such a word."""
        return next(
            (
                token.start()
                for token in self.added.finditer(prompt)
                if THINKING.search(token[0]) or THINKING.match(prompt, token.end())
            ),
            None,
        )

    def same_but_for_thinking(self, prompt: str, shown: str) -> bool:
        """Whether two headers of a turn differ in think markers and white space alone, and not because the turn shows
        more than the prompt."""
        prompt, shown = (re.sub(r"\s", "", text) for text in (prompt, shown))
        first, second = (
            self.added.sub(lambda token: "" if THINKING.search(token[0]) else token[0], text)
            for text in (prompt, shown)
        )
        return first == second != "" and not shown.startswith(prompt)


def _assistant_spans(messages: list[dict], text: str, render: Render, added_tokens: list[str]) -> list[Span]:
    """The spans of all assistant turns except one that opens the conversation."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index > 0]
    if not turns:
        raise Unusable("no assistant turn that answers a message")
    chat = _Chat(messages, text, render, added_tokens)
    regions: list[Region] = []
    for index, message in enumerate(messages):
        try:
            regions.append(_region(chat, index))
        except Unusable:
            if len(message) == 2 or index not in turns:  # role and content only: _prefix_region cannot help
                raise
            regions.append(_prefix_region(chat, index))
    # The added token that ends the last turn when the conversation ends there. The target stops at it. One that follows
    # turns only in the middle of a conversation does not count: it may begin the next message.
    closer = None
    if closed_turns := [index for index in turns if regions[index].closing is not None]:
        closer = chat.leading_token(chat.around(closed_turns[-1])[1])
    spans = [(region.start, region.stop) for region in regions]
    for index in turns:
        region = regions[index]
        stop = region.stop
        if closer and region.closing and chat.leading_token(region.closing) == closer:
            stop += region.closing.index(closer) + len(closer)
        spans[index] = (_turn_start(chat, index, regions[index - 1].stop, region), stop)
    # Last line of defence: no turn may hold anything that another message contributed.
    edges = list(chain.from_iterable(sorted(spans)))
    if edges != sorted(edges):
        raise Unusable("what the chat template prints for one message reaches into another's")
    return [spans[index] for index in turns]


def _region(chat: _Chat, index: int) -> Region:
    """The part of the text that depends on message `index`, found by comparison with a rendering in which that message
    is marked."""
    head, tail = chat.around(index, chat.messages[index + 1 :])
    start = _common_prefix(chat.text, head)
    stop = len(chat.text) - len(tail)
    if not chat.text.endswith(tail) or stop < start:
        raise Unusable(
            f"the chat template prints other text after a message of the {chat.messages[index]['role']} when that "
            "message changes"
        )
    # head[start:] is what the template prints before the marks but not before the true content.
    return Region(start, stop, direct=not head[start:].strip(), closing=tail)


def _prefix_region(chat: _Chat, index: int) -> Region:
    """The region of an assistant's message that cannot be marked, because a later tool message needs its tool call.

    It lies between the ends of two renderings: that of the earlier messages with the generation prompt, and that of the
    earlier messages and this one. If the template drops reasoning (and content that it takes for reasoning) from
    earlier turns, this message is rendered without it, and may lack the think block that the prompt opens.
    """
    history, prefix = (chat.render(chat.messages[:index], generation_prompt=prompt) for prompt in (False, True))
    opening = prefix.removeprefix(history)
    thinking = chat.thinking_in(opening)
    starts = [len(prefix), *([] if thinking is None else [len(history) + thinking])]
    message = chat.messages[index]
    without_reasoning = {key: value for key, value in message.items() if key not in REASONING_KEYS}
    versions = (message, without_reasoning, {**without_reasoning, "content": ""})
    for version in versions if prefix.startswith(history) and opening else ():
        rendering = chat.render([*chat.messages[:index], version]).rstrip()
        if rendering.endswith(tuple(chat.added_tokens)) and chat.text.startswith(rendering):
            for start in starts:
                if rendering.startswith(prefix[:start]):
                    return Region(start, len(rendering), direct=True, closing=None)
    raise Unusable("the chat template does not show where an assistant's tool call begins and ends")


def _turn_start(chat: _Chat, index: int, previous_end: int, region: Region) -> int:
    """Where the target begins to generate turn `index`: right after the generation prompt.

    What the template prints between the prompt and the content (an empty think block, a channel header) is generated,
    too. previous_end: where the previous message ends
    """
    prompt = chat.around(index - 1, generation_prompt=True)
    opening = prompt[1]
    opened = chat.text.startswith(opening, previous_end)
    start = previous_end + len(opening)
    # If only white space lies between the prompt and the content, the target generates this white space too, even if
    # the generation prompt is empty (Llama 2).
    if opened and (not chat.text[start : region.start].strip() or prompt != chat.around(index - 1)):
        return start
    # Either the template has no generation prompt, or the turn shows only part of it, or other think markers (a
    # generation prompt that opens a think block). The turn then begins where its region does, provided that the content
    # is what begins there.
    shown = chat.text[previous_end : region.start]
    if region.direct and (opened or opening.startswith(shown) or chat.same_but_for_thinking(opening, shown)):
        return region.start
    raise Unusable("the chat template does not show where an assistant's turn begins")


def _common_prefix(a: str, b: str) -> int:
    """Length of the longest common prefix, by bisection, because comparing slices is far faster than a loop."""
    if a.startswith(b):
        return len(b)
    return bisect_left(range(1, len(b) + 1), True, key=lambda length: not a.startswith(b[:length]))


# From characters to tokens -------------------------------------------------------------------------------------------


def _supervised(ids: np.ndarray, text: str, offsets: np.ndarray, spans: list[Span], added_ids: list[int]) -> Encoded:
    """Supervise the tokens that overlap a span. A token that begins before the span counts only if its part before the
    span is white space. offsets: int64 [T, 2]."""
    begins, ends = offsets.T
    mask, empty_answers = np.zeros(len(ids), bool), []
    words = ~np.isin(ids, added_ids)
    for start, stop in spans:
        inside = (begins < stop) & (ends > start)
        for token in np.flatnonzero(inside & (begins < start)):
            inside[token] = text[begins[token] : start].isspace()
        mask |= inside
        if inside.any() and not any(text[begin:end].strip() for begin, end in offsets[inside & words]):
            empty_answers.append(int(inside.argmax()))
    return Encoded(ids, mask, text, tuple(empty_answers))
