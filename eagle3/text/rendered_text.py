"""Find the turns in a text that a chat template has already rendered, by the template's own special tokens.

Such a text cannot be rendered again and compared, as eagle3.text.chat does with messages. Instead, short conversations
of our own show how the template opens a turn (its generation prompt) and closes it. Both must contain added tokens of
the tokenizer. Ordinary text cannot contain these: whatever looks like one in rendered text is taken for one.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from eagle3.text.template import PROBED, RESULT, Render, Unusable, call_form, probing_call

# Contents of the short conversations; no template changes or trims these characters.
QUESTION, ANSWER, NEXT = "\ue000", "\ue001", "\ue002"


class AddedToken(NamedTuple):
    """One occurrence of an added token in a text: characters [start, stop)."""

    content: str
    start: int
    stop: int


class Turns(NamedTuple):
    """The texts and tokens with which a template delimits an assistant's turns."""

    # Texts that may precede a turn: the generation prompt and, if earlier turns show only part of it, that part.
    prompts: tuple[str, ...]
    anchor: str  # first added token of each prompt
    before: int  # characters from the beginning of a prompt to its anchor
    closer: str  # added token that ends a turn
    # The closer, and added tokens that begin a message: if one of the latter comes first, the closer is missing.
    ends: frozenset[str]


def any_of(tokens: Sequence[str]) -> re.Pattern:
    """Matches each of the tokens; if one begins with another, the one that is named first."""
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def turns_of(render: Render, added_tokens: Sequence[str]) -> Turns:
    """Find out how a template delimits turns. added_tokens: the tokenizer's, longest first. Raises Unusable."""
    token = any_of(added_tokens)
    question, answer = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
    after_question = _between(render([question], generation_prompt=True), QUESTION)
    user_end = _common_pieces(after_question, _between(render([question]), QUESTION), token)
    talk = render([question, answer, {"role": "user", "content": NEXT}])
    prompt = after_question[len(user_end) :]
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
    history = _between(talk, QUESTION, ANSWER).removeprefix(user_end)
    short = [history] if len(history) > anchor.start() and prompt.startswith(history) and token.search(history) else []
    tokens = [match[0] for match in token.finditer(_between(talk, ANSWER, NEXT))]
    others = [
        *(tokens[1:2] if tokens[:1] == [closer[0]] else tokens[:1]),
        *_result_token(render, token),
    ]
    return Turns((prompt, *short), anchor[0], anchor.start(), closer[0], frozenset([closer[0], anchor[0], *others]))


def _result_token(render: Render, token: re.Pattern) -> list[str]:
    """The added token that begins a tool's result, if any. A turn that holds it is partly the tool's."""
    messages = probing_call(call_form(render))
    try:
        call_text, result_text = render(messages[:2]), render(messages)
    except Unusable:
        return []
    call_tokens = token.findall(call_text.rpartition(PROBED)[2])
    between = result_text.rpartition(PROBED)[2].partition(RESULT)[0]
    return [candidate for candidate in token.findall(between) if candidate not in call_tokens][:1]


def turn_spans(text: str, tokens: Sequence[AddedToken], turns: Turns, bos: str) -> list[tuple[int, int]]:
    """Characters [start, stop) of every assistant turn except one that opens the text, from the end of the generation
    prompt to the end of the closer.

    tokens: all added tokens of the text, in order
    bos: the tokenizer's BOS token, which may precede the opening turn

    Raises Unusable.
    """
    spans, opened = [], len(text) - len(text.removeprefix(bos).lstrip())
    for number, token in enumerate(tokens):
        opening = token.start - turns.before
        prompt = next((prompt for prompt in turns.prompts if text.startswith(prompt, opening)), None)
        if token.content != turns.anchor or prompt is None or opening <= opened:
            continue
        start = opening + len(prompt)
        end = next(
            (tag for tag in tokens[number + 1 :] if tag.start >= start and tag.content in turns.ends),
            None,
        )
        if end is None or end.content != turns.closer:
            raise Unusable(f"the rendered text has an assistant turn without its {turns.closer}")
        spans.append((start, end.stop))
    if not spans:
        raise Unusable("no assistant turn in the rendered text")
    return spans


def _between(text: str, begin: str, end: str | None = None) -> str:
    """The text between two contents, or after one. Raises Unusable."""
    if any(text.count(mark) != 1 for mark in (begin, end) if mark):
        raise Unusable(
            "the chat template leaves out or repeats the content of a message, so rendered text does not show turns"
        )
    after = text.partition(begin)[2]
    return after if end is None else after.partition(end)[0]


def _common_pieces(a: str, b: str, token: re.Pattern) -> str:
    """The longest common prefix that ends at the edge of an added token, or at the end of one of the texts."""
    edges = [{0, len(text), *(edge for match in token.finditer(text) for edge in match.span())} for text in (a, b)]
    return a[: max(cut for cut in set.intersection(*edges) if b.startswith(a[:cut]))]
