"""The loss mask of a conversation under any chat template: what the target itself would generate, and nothing else.

Every message is once marked and the whole conversation rendered again: where this differs from the true rendering is
what that message put there. The generation prompt says where an assistant's turn begins. No text is searched
for, so repeated contents, and contents that hold the template's own markers, cannot mislead it; what remains ambiguous is
refused (`Unusable`).
"""

import re
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, chain, cycle, islice, pairwise
from typing import NamedTuple

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerBase

from eagle3.errors import UserError
from eagle3.text.conversations import REASONING_KEYS, Conversation
from eagle3.text.rendered_text import AddedToken, turn_spans, turns_of
from eagle3.text.template import (
    GENERATION,
    Choices,
    Render,
    Unusable,
    as_template_reads,
    chosen_template,
    renderer,
    require_calls,
)

PRIVATE_USE = range(0xE000, 0xF900)


class Encoded(NamedTuple):
    ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T], True for tokens that the target generates
    text: str  # the rendering that was tokenised
    empty_answers: tuple[int, ...] = ()  # first tokens of turns that are added tokens and white space alone


class Span(NamedTuple):
    """Characters [start, stop) of the rendering."""

    start: int
    stop: int


@dataclass(frozen=True)
class Region:
    """What one message put into the rendering: characters [start, stop).

    direct: apart from white space, nothing but the content depends on the message before its content begins.
    closing: what the template prints after the message, where comparing has shown it.
    """

    start: int
    stop: int
    direct: bool
    closing: str | None


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    chat_template: str | None,
    choices: Choices | None = None,
) -> Encoded:
    """Token ids and loss mask of one conversation. `chat_template` (Jinja source) replaces the tokenizer's own.

    Supervised in `messages`: every assistant turn that answers something, from the end of the generation prompt to the
    end-of-turn token. (An assistant message that opens a conversation answers nothing, so no prompt ever makes the target
    generate it.) A template that marks its turns with `{% generation %}` is taken at its word. In plain `text` all
    tokens are supervised, in rendered `text` its turns as the template's special tokens tell them. choices: default Choices().
    Raises Unusable where the mask would not be surely right, UserError where no conversation can be encoded with this tokenizer
    and template.
    """
    choices = choices or Choices()
    if not tokenizer.is_fast:
        raise UserError(
            f"tokenizer {type(tokenizer).__name__}: a slow one, which does not tell where its tokens lie in the text;"
            f" use a model folder with a tokenizer.json"
        )
    if conversation.messages is None and choices.text == "plain":
        ids = tokenized(tokenizer, conversation.text, add_special_tokens=True)["input_ids"]
        return Encoded(np.asarray(ids, np.int32), np.ones(len(ids), bool), conversation.text)
    template = chosen_template(tokenizer, chat_template, conversation.tools, conversation.origin)
    render = renderer(tokenizer, template, conversation, choices)
    contents = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    added = sorted(contents.values(), key=len, reverse=True)
    if conversation.messages is None:
        text = conversation.text
        ids, offsets = _with_offsets(tokenizer, text)
        tokens = _added_tokens(text, ids, offsets, contents)
        spans = turn_spans(text, tokens, turns_of(render, added), tokenizer.bos_token or "")
    else:
        messages = as_template_reads(conversation.messages, template, choices.reasoning, render)
        text, spans = _talk_spans(messages, template, render, added, choices.supervise)
        ids, offsets = _with_offsets(tokenizer, text)
    if choices.supervise == "last_turn":
        spans = spans[-1:]
    return _supervised(ids, text, offsets, spans, list(contents))


def _added_tokens(text: str, ids: np.ndarray, offsets: np.ndarray, contents: dict[int, str]) -> list[AddedToken]:
    """Those of a text, in order. contents: of all added tokens by id; one may have taken white space on its left in."""
    tokens = zip(ids.tolist(), offsets.tolist(), strict=True)
    found = [(contents[number], start, stop) for number, (start, stop) in tokens if number in contents]
    return [AddedToken(content, max(text.find(content, start, stop), start), stop) for content, start, stop in found]


def _talk_spans(
    messages: list[dict], template: str, render: Render, added: list[str], supervise: str
) -> tuple[str, list[Span]]:
    """The messages' rendering, and the spans of the assistant's turns in it."""
    count = sum(message["role"] == "assistant" for message in messages)
    if not count:
        raise Unusable("no assistant turn")
    text = render(messages)
    if GENERATION.search(template):
        marks = _unused(text)
        spans = _marked_spans(text, render(messages, template=_with_marks(template, *marks)), *marks)
        if supervise == "last_turn" and len(spans) != count:
            raise Unusable("the chat template has not one {% generation %} block for each assistant turn")
    else:
        spans = _assistant_spans(messages, text, render, added)
    require_calls(messages, text, render)
    return text, spans


def tokenized(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> BatchEncoding:
    """The text's tokens, however many. Raises Unusable for a text that is none."""
    if re.search("[\ud800-\udfff]", text):
        raise Unusable("half of a surrogate pair in the text, which is no character")
    # verbose would warn of texts longer than the model's context; lists of a long text's ones and zeros take gigabytes
    plain = {"verbose": False, "return_attention_mask": False, "return_token_type_ids": False}
    return tokenizer(text, add_special_tokens=add_special_tokens, **plain)


def _with_offsets(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[np.ndarray, np.ndarray]:
    """int32 [T] ids and int64 [T, 2] characters of each; a template has written its own special tokens."""
    encoded = tokenized(tokenizer, text, add_special_tokens=False)
    [encoding] = encoded.encodings  # which knows the offsets without a list of tuples
    places = chain.from_iterable(map(encoding.token_to_chars, range(len(encoding))))
    offsets = np.fromiter(places, np.int64, 2 * len(encoding)).reshape(-1, 2)
    return np.asarray(encoded["input_ids"], np.int32), offsets


def _unused(text: str) -> tuple[str, str]:
    """Two private-use characters that do not occur in the text: no trimming removes them, no content is like them."""
    unused = list(islice((mark for mark in map(chr, PRIVATE_USE) if mark not in text), 2))
    if len(unused) < 2:
        raise Unusable("it holds all private-use characters, and none is left to mark its messages with")
    return unused[0], unused[1]


# Templates that mark their own turns ---------------------------------------------------------------------------------


def _with_marks(template: str, begin: str, end: str) -> str:
    """The template with each `{% generation %}` tag as a block of the same white-space control that prints a mark.

    transformers' own `return_assistant_tokens_mask` counts characters printed before the tag, which is wrong inside a
    macro or a captured block; printed marks are right everywhere.
    """

    def block(tag: re.Match) -> str:
        before, name, after = tag.groups()
        mark = begin if name == "generation" else end
        return f"{{%{before} if true %}}{{{{ '{mark}' }}}}{{% endif {after}%}}"

    return GENERATION.sub(block, template)


def _marked_spans(text: str, marked: str, begin: str, end: str) -> list[Span]:
    if marked.replace(begin, "").replace(end, "") != text:
        raise Unusable("the chat template changes what its {% generation %} blocks print")
    marks = re.findall(f"[{begin}{end}]", marked)
    if any(mark != expected for mark, expected in zip(marks, cycle((begin, end)), strict=False)):
        raise Unusable("the chat template nests its {% generation %} blocks")
    places = list(accumulate(map(len, re.split(f"[{begin}{end}]", marked))))  # of the marks, and the end
    spans = [Span(*place) for place in zip(places[:-1:2], places[1:-1:2], strict=False)]
    if not spans:
        raise Unusable("the chat template prints no {% generation %} block")
    return spans


# Any other template --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Chat:
    """A conversation, its rendering `text`, and what comparing takes.

    marks: two characters that do not occur in the text. marked: the messages with their contents between the marks; of an
    assistant's, which may hold thinking that the template moves, the marks alone. added: the tokenizer's added tokens,
    longest first.
    """

    messages: list[dict]
    text: str
    render: Render
    marks: tuple[str, str]
    marked: list[dict]
    added: list[str]

    def around_marks(self, rendered: str, index: int) -> tuple[str, str]:
        """What the template prints before and after the marked content of message `index`."""
        if any(rendered.count(mark) != 1 for mark in self.marks):
            role = self.messages[index]["role"]
            raise Unusable(f"the chat template leaves out or repeats the content of a message of the {role}")
        return rendered.partition(self.marks[0])[0], rendered.partition(self.marks[1])[2]

    def leading_token(self, text: str) -> str | None:
        """The added token that the text begins with, after white space."""
        stripped = text.lstrip()
        return next((token for token in self.added if token and stripped.startswith(token)), None)


def _mark(message: dict, begin: str, end: str) -> dict:
    if message["role"] == "assistant":
        return {"role": "assistant", "content": begin + end}
    return {**message, "content": begin + message["content"] + end}


def _assistant_spans(messages: list[dict], text: str, render: Render, added: list[str]) -> list[Span]:
    """The span of every assistant turn but an opening one."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index > 0]
    if not turns:
        raise Unusable("no assistant turn that answers a message")
    marks = _unused(text)
    chat = _Chat(messages, text, render, marks, [_mark(message, *marks) for message in messages], added)
    regions: list[Region] = []
    for index, message in enumerate(messages):
        try:
            regions.append(_region(chat, index))
        except Unusable:
            if len(message) == 2 or index not in turns:  # a message of role and content only: there is no other way
                raise
            regions.append(_prefix_region(chat, index))
    closing = [index for index in turns if regions[index].closing is not None]
    closer = _closer(chat, closing[-1]) if closing else None
    spans = [Span(region.start, region.stop) for region in regions]
    for index in turns:
        region = regions[index]
        stop = region.stop
        if closer and region.closing and chat.leading_token(region.closing) == closer:
            stop += region.closing.index(closer) + len(closer)
        spans[index] = Span(_turn_start(chat, index, regions[index - 1].stop, region), stop)
    # Last line of defence: no turn holds anything that another message put there.
    overlap = any(after.start < before.stop for before, after in pairwise(sorted(spans)))
    if overlap or any(span.stop < span.start for span in spans):
        raise Unusable("what the chat template prints for one message reaches into another's")
    return [spans[index] for index in turns]


def _region(chat: _Chat, index: int) -> Region:
    """What of the text depends on message `index`, by comparing with the rendering that has it marked."""
    rendered = chat.render([*chat.messages[:index], chat.marked[index], *chat.messages[index + 1 :]])
    head, tail = chat.around_marks(rendered, index)
    start = _common_prefix(chat.text, head)
    stop = len(chat.text) - len(tail)
    if not chat.text.endswith(tail) or stop < start:
        role = chat.messages[index]["role"]
        raise Unusable(f"the chat template prints other text after a message of the {role} when that message changes")
    # head[start:] is what the template prints before the marks but not before the true content.
    return Region(start, stop, direct=not head[start:].strip(), closing=tail)


def _prefix_region(chat: _Chat, index: int) -> Region:
    """The turn of an assistant whose message cannot be replaced, because a tool message that follows needs its call.

    It lies between the rendering of what comes before it, with the generation prompt, and that rendering with it, whole or,
    where the template drops thoughts (and words that it takes for such) of earlier turns, without them.
    """
    before = chat.render(chat.messages[:index], generation_prompt=True)
    prompted = before != chat.render(chat.messages[:index])
    message = chat.messages[index]
    thoughtless = {key: value for key, value in message.items() if key not in REASONING_KEYS}
    for version in (message, thoughtless, {**thoughtless, "content": ""}) if prompted else ():
        through = chat.render([*chat.messages[:index], version]).rstrip()
        closed = any(through.endswith(token) for token in chat.added)
        if closed and chat.text.startswith(through) and through.startswith(before):
            return Region(len(before), len(through), direct=True, closing=None)
    raise Unusable("the chat template does not show where an assistant's tool call begins and ends")


def _closer(chat: _Chat, last: int) -> str | None:
    """The added token with which the template ends a conversation's `last` turn, and so the one the target stops at.

    What only follows turns in the middle is not taken for one: it may be the header of the next message.
    """
    rendered = chat.render([*chat.messages[:last], chat.marked[last]])
    return chat.leading_token(chat.around_marks(rendered, last)[1])


def _turn_start(chat: _Chat, index: int, previous: int, region: Region) -> int:
    """Where the target begins to generate turn `index`: right after the generation prompt.

    What the template prints between that and the content (an empty think block, a channel header) is generated too.
    previous: where the message before it stops.
    """
    before = [*chat.messages[: index - 1], chat.marked[index - 1]]
    prompt = chat.render(before, generation_prompt=True)
    opening = chat.around_marks(prompt, index - 1)[1]
    opened = chat.text.startswith(opening, previous)
    start = previous + len(opening)
    # Where nothing but white space lies between, the target generates that too, even if the generation prompt is empty (Llama 2).
    if opened and (not chat.text[start : region.start].strip() or prompt != chat.render(before)):
        return start
    # Either the template has no generation prompt, or the turn shows less than the whole of it (a generation prompt that
    # opens a think block): the turn begins with its content, if that is what begins there.
    if region.direct and (opened or opening.startswith(chat.text[previous : region.start])):
        return region.start
    raise Unusable("the chat template does not show where an assistant's turn begins")


def _common_prefix(a: str, b: str) -> int:
    """Length of the longest common prefix, by bisection: comparing slices is far faster than a loop."""
    if a.startswith(b):
        return len(b)
    return bisect_left(range(1, len(b) + 1), True, key=lambda length: not a.startswith(b[:length]))


# From characters to tokens -------------------------------------------------------------------------------------------


def _supervised(ids: np.ndarray, text: str, offsets: np.ndarray, spans: list[Span], added: list[int]) -> Encoded:
    """Supervised are the tokens that overlap a span and have only white space before it. offsets: int64 [T, 2]."""
    begins, ends = offsets.T
    mask, empty = np.zeros(len(ids), bool), []
    words = ~np.isin(ids, added)
    for start, stop in spans:
        inside = (begins < stop) & (ends > start)
        for token in np.flatnonzero(inside & (begins < start)):
            inside[token] = text[begins[token] : start].isspace()
        mask |= inside
        if inside.any() and not any(text[begin:end].strip() for begin, end in offsets[inside & words]):
            empty.append(int(inside.argmax()))
    return Encoded(ids, mask, text, tuple(empty))
