"""Chat templates: read and checked before they are run, and run: messages as text, with the choices that a recipe makes
for them."""

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jinja2

from eagle3.errors import UserError, shown
from eagle3.text.conversations import REASONING_KEYS, Conversation
from eagle3.text.limits import Limits

if TYPE_CHECKING:  # what is looked at before anything starts must not wait for transformers
    from transformers import PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%([-+]?)\s*(generation|endgeneration)\s*([-+]?)%\}")
# As transformers has it, which adds the tags of GENERATION.
PARSER = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
THOUGHTS_END = "</think>"
PROBED, RESULT = "probed_value", "probed_result"

Render = Callable[..., str]  # (messages, generation_prompt=False) -> text


class Unusable(ValueError):
    """A conversation for which no mask is surely right; the message says why, without anything of the sample's own."""


@dataclass(frozen=True)
class Choices:
    """What a recipe chooses to render and to supervise.

    supervise: every assistant turn, or the last one only. reasoning: drop leaves out an assistant's thoughts. text: rendered
    says that `text` rows are chat-template renderings with their own special tokens. template_variables: passed to the
    template beside the messages. today: the date that a template is told.
    """

    supervise: Literal["all_turns", "last_turn"] = "all_turns"
    reasoning: Literal["keep", "drop"] = "keep"
    text: Literal["plain", "rendered"] = "plain"
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    today: datetime.date = datetime.date(2026, 1, 1)

    def variables(self) -> dict[str, Any]:
        """All that a template is given beside the messages. strftime_now is how templates ask for the date (gpt-oss, Llama,
        Mistral); transformers would answer with the machine's, and tomorrow's samples would not be today's."""
        return {"strftime_now": self.today.strftime, **self.template_variables}


def read_template(path: Path) -> str:
    """Jinja source. Raises UserError for a file that holds no template, or one that cannot be parsed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # not UTF-8, or no path
        raise UserError(f"{path}: cannot be read ({error}); fix data.chat_template") from error
    if not text.strip():
        raise UserError(
            f"{path}: holds no chat template; fix data.chat_template, or leave it out for the tokenizer's own"
        )
    tags = {"generation": "if true", "endgeneration": "endif"}
    plain = GENERATION.sub(lambda found: f"{{%{found[1]} {tags[found[2]]} {found[3]}%}}", text)
    try:
        PARSER.parse(plain)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{path}:{error.lineno}: {error.message:.200}; fix the chat template there") from error
    return text


def check_variables(template: str, variables: Mapping[str, Any]) -> None:
    """Raises UserError for a variable that the template does not mention, and which would change nothing."""
    for name in variables:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise UserError(
                f"data.template_variables: {name!r} occurs nowhere in the chat template, so it would change nothing; mend the "
                "name or leave it out"
            )


def rendered(
    messages: Sequence[dict],
    generation_prompt: bool = False,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    template: str,
    tools: list | None,
    limits: Limits,
    variables: Mapping[str, Any],
) -> str:
    """Messages as text. template: Jinja source; limits: of the row; variables: what it may read beside them. Raises UserError
    where the template is none, or exceeds the limits, and Unusable where it refuses the messages."""

    def render() -> str:
        try:
            return tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=template,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **variables,
            )
        except MemoryError:  # the limits say what that means
            raise
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"chat template line {error.lineno}: {error.message:.200}; fix it, see data.chat_template"
            ) from error
        except Exception as error:  # a template is a program from outside, which may raise any
            raise Unusable(f"the chat template refuses it ({type(error).__name__}: {error!s:.200})") from error

    return limits.keep(render)


def renderer(
    tokenizer: "PreTrainedTokenizerBase", template: str, conversation: Conversation, choices: Choices
) -> Render:
    """`rendered` with this template, the conversation's tools, and limits for all of its renderings together. Raises
    UserError for a variable among the choices that the template does not mention."""
    check_variables(template, choices.template_variables)
    return partial(
        rendered,
        tokenizer=tokenizer,
        template=template,
        tools=conversation.tools,
        limits=Limits(conversation.origin, len(conversation.messages or ()), conversation.characters),
        variables=choices.variables(),
    )


def chosen_template(
    tokenizer: "PreTrainedTokenizerBase", chat_template: str | None, tools: list | None, origin: str
) -> str:
    """Jinja source: `chat_template`, or the tokenizer's own for conversations with such tools. Raises UserError for none."""
    if chat_template is None and not tokenizer.chat_template:
        raise UserError(
            f"{origin}: the row has messages but the tokenizer has no chat template; name one with data.chat_template"
        )
    try:
        template = tokenizer.get_chat_template(chat_template, tools)
    except ValueError as error:  # of several the tokenizer has, none is the default
        raise UserError(f"{origin}: {error!s:.200}; name a template with data.chat_template") from error
    if not isinstance(template, str):
        raise UserError(
            f"{origin}: the tokenizer's chat template is {shown(template)}, not a text; name one with data.chat_template"
        )
    return template


def reasoning_key(template: str) -> str | None:
    """The name under which a template reads an assistant's thoughts; None where it reads none."""
    return next((key for key in REASONING_KEYS if re.search(rf"\.{key}\b|['\"]{key}['\"]", template)), None)


def as_template_reads(
    messages: Sequence[dict], template: str, reasoning: Literal["keep", "drop"], render: Render
) -> list[dict]:
    """The messages in the form that the template reads. render: with this template.

    An assistant's thoughts are under the name that it reads, or left out. Under "drop" thoughts that stand in the content go
    too: all up to the last `</think>`, which is how templates that drop thoughts from earlier turns tell them. Calls have the
    form that it shows.
    """
    key = reasoning_key(template) or REASONING_KEYS[0]
    form = call_form(render) if any(message.get("tool_calls") for message in messages) else CallForm()
    changed = [dict(message) for message in messages]
    for message in changed:
        if message["role"] == "assistant":
            thoughts = message.pop(REASONING_KEYS[0], None)
            if reasoning == "drop" and THOUGHTS_END in message["content"]:
                message["content"] = message["content"].rpartition(THOUGHTS_END)[2].lstrip("\n")
            elif reasoning == "keep" and thoughts is not None:
                message[key] = thoughts
            message.update(form.applied(message))
    return changed


class CallForm(NamedTuple):
    """How a template wants tool calls. text_arguments: as JSON text, not as an object. null_content: without words beside them
    the content is null, not empty (DeepSeek-V3 shows calls in no other way)."""

    text_arguments: bool = False
    null_content: bool = False

    def applied(self, message: dict) -> dict:
        if not message.get("tool_calls"):
            return message
        calls = [self._call(call) for call in message["tool_calls"]] if self.text_arguments else message["tool_calls"]
        content = None if self.null_content and not message["content"] else message["content"]
        return {**message, "content": content, "tool_calls": calls}

    def _call(self, call: dict) -> dict:
        function = call.get("function", {})
        if isinstance(function.get("arguments"), str | None):
            return call
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def probing_call(form: CallForm) -> list[dict]:
    """A short conversation with a question, a call whose only argument is PROBED and the call's RESULT."""
    call = {"type": "function", "id": "call00001", "function": {"name": "look", "arguments": {"probed_key": PROBED}}}
    asking = form.applied({"role": "assistant", "content": "", "tool_calls": [call]})
    result = {"role": "tool", "tool_call_id": "call00001", "name": "look", "content": RESULT}
    return [{"role": "user", "content": "Look."}, asking, result]


def call_form(render: Render) -> CallForm:
    """The first form in which the template shows a call's argument, told by a short conversation. Where it shows none, or
    refuses that conversation, the usual form, so that the refusal of the true one is told in the template's own words."""
    for form in (CallForm(), CallForm(text_arguments=True), CallForm(null_content=True), CallForm(True, True)):
        try:
            text = render(probing_call(form))
        except Unusable:
            continue
        if PROBED in text and f"'{PROBED}'" not in text:  # as Python would print it: no JSON
            return form
    return CallForm()


def require_calls(messages: list[dict], text: str, render: Render) -> None:
    """Raises Unusable where the template prints the same without one of the calls: what the target generated would lack it."""
    for index, message in enumerate(messages):
        for place in range(len(message.get("tool_calls") or ())):
            fewer = [call for number, call in enumerate(message["tool_calls"]) if number != place]
            without = (
                {**message, "tool_calls": fewer}
                if fewer
                else {"role": "assistant", "content": message["content"] or ""}
            )
            try:
                same = render([*messages[:index], without, *messages[index + 1 :]]) == text
            except Unusable:  # it misses the call
                continue
            if same:
                raise Unusable("the chat template leaves out a tool call")
