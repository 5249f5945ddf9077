"""The turns of a text that a chat template has already rendered, told by the template's own special tokens.

Of such a text nothing can be rendered again and compared, as eagle3.text.chat does. What is known is how the template opens a
turn (its generation prompt) and closes it, from short conversations of this file. Both must be added tokens of the
tokenizer, which plain text cannot hold; in rendered text every special token is taken for what it is.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from eagle3.text.template import PROBED, RESULT, Render, Unusable, call_form, probing_call

# Contents of the short conversations; no template changes or trims such characters.
QUESTION, ANSWER, NEXT = "\ue000", "\ue001", "\ue002"


class AddedToken(NamedTuple):
    """One occurrence of an added token in a text: characters [start, stop)."""

    content: str
    start: int
    stop: int


class Turns(NamedTuple):
    """How a template writes an assistant's turns.

    prompts: what may stand before one: the generation prompt, and what the history shows of it where that is less. anchor: the
    first added token of each, `before` characters after its beginning. closer: the added token that ends a turn. ends: that, and
    the added tokens that begin another message, so that a turn in which one of those comes first has lost its closer.
    """

    prompts: tuple[str, ...]
    anchor: str
    before: int
    closer: str
    ends: frozenset[str]


def turns_of(render: Render, added: Sequence[str]) -> Turns:
    """What a template prints around turns. added: the tokenizer's added tokens, longest first. Raises Unusable."""
    token = re.compile("|".join(map(re.escape, filter(None, added))) or "(?!)")
    question, answer = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
    asked = _between(render([question], generation_prompt=True), QUESTION)
    told = _between(render([question]), QUESTION)
    talk = render([question, answer, {"role": "user", "content": NEXT}])
    user_end = _common_pieces(asked, told, token)
    prompt = asked[len(user_end) :]
    anchor = token.search(prompt)
    if anchor is None:
        raise Unusable(
            "the chat template's generation prompt holds no added token, so rendered text does not show turns"
        )
    closer = token.match(_between(render([question, answer]), ANSWER).lstrip())
    if closer is None:
        raise Unusable(
            "the chat template ends turns with no added token, so rendered text does not show where they end"
        )
    shown = _between(talk, QUESTION, ANSWER).removeprefix(user_end)
    short = len(shown) > anchor.start() and prompt.startswith(shown) and token.search(shown)
    following = [found[0] for found in token.finditer(_between(talk, ANSWER, NEXT))]
    others = [*(following[1:2] if following[:1] == [closer[0]] else following[:1]), *_result_token(render, token)]
    prompts = (prompt, shown) if short else (prompt,)
    return Turns(prompts, anchor[0], anchor.start(), closer[0], frozenset([closer[0], anchor[0], *others]))


def _result_token(render: Render, token: re.Pattern) -> list[str]:
    """The added token that begins a tool's result, if one does: a turn in which it stands holds what the target did not say."""
    messages = probing_call(call_form(render))
    try:
        called, answered = render(messages[:2]), render(messages)
    except Unusable:
        return []
    own = token.findall(called.rpartition(PROBED)[2])
    before = answered.rpartition(PROBED)[2].partition(RESULT)[0]
    return [found for found in token.findall(before) if found not in own][:1]


def turn_spans(text: str, tokens: Sequence[AddedToken], turns: Turns, bos: str) -> list[tuple[int, int]]:
    """Characters [start, stop) of every assistant turn but one that opens the text, from the end of the generation prompt to
    that of the closer. tokens: all added tokens of the text, in order. Raises Unusable."""
    spans = []
    for number, token in enumerate(tokens):
        opening = token.start - turns.before
        prompt = next((prompt for prompt in turns.prompts if text.startswith(prompt, opening)), None)
        opens_text = opening < 0 or not text[:opening].removeprefix(bos).strip()
        if token.content != turns.anchor or prompt is None or opens_text:
            continue
        start = opening + len(prompt)
        ends = (one for one in tokens[number + 1 :] if one.start >= start and one.content in turns.ends)
        end = next(ends, None)
        if end is None or end.content != turns.closer:
            raise Unusable(f"the rendered text has an assistant turn without its {turns.closer}")
        spans.append((start, end.stop))
    if not spans:
        raise Unusable("no assistant turn in the rendered text")
    return spans


def _between(text: str, begin: str, end: str | None = None) -> str:
    """What stands between two contents, or after one."""
    if any(text.count(mark) != 1 for mark in (begin, end) if mark):
        raise Unusable(
            "the chat template leaves out or repeats the content of a message, so rendered text does not show turns"
        )
    after = text.partition(begin)[2]
    return after if end is None else after.partition(end)[0]


def _common_pieces(a: str, b: str, token: re.Pattern) -> str:
    """The longest beginning that both have in common and that ends beside an added token, or with one of the texts."""
    shared = (cut for cut in _edges(a, token) & _edges(b, token) if b.startswith(a[:cut]))
    return a[: max(shared)]


def _edges(text: str, token: re.Pattern) -> set[int]:
    return {0, len(text), *(edge for found in token.finditer(text) for edge in found.span())}
