"""Read and check chat templates, and run them within limits on time and memory to turn messages into text.

The recipe's choices (`Choices`) decide what is rendered and which tokens are supervised.
"""

import datetime
import json
import re
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jinja2

from eagle3.errors import UserError
from eagle3.text.conversations import REASONING_KEYS, Conversation

if TYPE_CHECKING:  # checks that run before a job starts must not wait for transformers to load
    from transformers import PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%([-+]?)\s*(generation|endgeneration)\s*([-+]?)%\}")
# The settings that transformers uses, but without its generation tags, which `with_marks` replaces.
PARSER = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
THOUGHTS_END = "</think>"
PROBED, RESULT = "probed_value", "probed_result"

# The time limit grows with the number of messages, because a conversation is rendered once or twice per message. With
# Llama 3's template, a conversation of 4 MB took 24 s if it had 1,000 messages, and 0.1 s if it had 2.
SECONDS, SECONDS_A_MESSAGE = 30.0, 0.1
MEMORY, MEMORY_A_CHARACTER = 1 << 30, 64  # bytes; Python needs up to 4 per character, and filters make copies
# A rendering may be longer than its messages: JSON escapes characters, and a template may add a system prompt.
CHARACTERS, CHARACTERS_A_CHARACTER = 1 << 20, 4
GRACE = 20.0  # seconds past the time limit after which the system kills a process that never handled its signal
PAGE = resource.getpagesize()

Render = Callable[..., str]  # (messages, generation_prompt=False, template=the one chosen) -> text


class Unusable(ValueError):
    """Raised if a conversation's loss mask cannot be determined with certainty. The message says why, but quotes no
    sample."""


@dataclass(frozen=True)
class Choices:
    """A recipe's choices of what to render and supervise."""

    supervise: Literal["all_turns", "last_turn"] = "all_turns"  # which assistant turns
    reasoning: Literal["keep", "drop"] = "keep"  # what to do with reasoning in assistant turns
    # "rendered": rows of `text` were already rendered by the chat template, and hold its special tokens
    text: Literal["plain", "rendered"] = "plain"
    template_variables: Mapping[str, Any] = field(default_factory=dict)  # passed to the template with the messages
    today: datetime.date = datetime.date(2026, 1, 1)  # the date given to templates that ask for it


def read_template(path: Path) -> str:
    """Read a template's Jinja source. Raises UserError if the file cannot be read or parsed, or holds no template."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or not a path
        raise UserError(f"{path}: cannot be read ({error}); fix data.chat_template") from error
    if not text.strip():
        raise UserError(
            f"{path}: holds no chat template; fix data.chat_template, or leave it out for the tokenizer's own"
        )
    try:
        PARSER.parse(with_marks(text, "", ""))
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{path}:{error.lineno}: {error.message:.200}; fix the chat template there") from error
    except RecursionError as error:
        raise UserError(f"{path}: nested too deep to be parsed; fix data.chat_template") from error
    return text


def with_marks(template: str, begin: str, end: str) -> str:
    """The template with each `{% generation %}` tag replaced by a block that prints a mark, with the same white-space
    control.

    transformers' own `return_assistant_tokens_mask` counts characters printed before the tag, which is wrong inside a
    macro or a captured block; printed marks are right everywhere.
    """
    marks = {"generation": begin, "endgeneration": end}
    return GENERATION.sub(
        lambda tag: f"{{%{tag[1]} if true %}}{{{{ '{marks[tag[2]]}' }}}}{{% endif {tag[3]}%}}", template
    )


def check_variables(template: str, variables: Mapping[str, Any]) -> None:
    """Raises UserError for a variable that the template does not mention, because setting it would change nothing."""
    for name in variables:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise UserError(
                f"data.template_variables: {name!r} occurs nowhere in the chat template, so it would change nothing; "
                "fix the name or leave it out"
            )


def renderer(
    tokenizer: "PreTrainedTokenizerBase", chat_template: str | None, conversation: Conversation, choices: Choices
) -> tuple[str, Render]:
    """A template (Jinja source), which is `chat_template` or the tokenizer's own for the conversation's tools, and a
    function that renders messages with it and these tools, within limits (`_limited`).

    Raises UserError if there is no template, and for a variable in `choices` that it does not mention. Rendering raises
    UserError if the template is invalid or exceeds the limits, and Unusable if the template refuses the messages.
    """
    try:
        template = tokenizer.get_chat_template(chat_template, conversation.tools)
    except ValueError as error:  # the tokenizer has none, or several of which none is the default
        first = str(error).partition("!")[0]  # the rest is advice to programmers
        raise UserError(f"{conversation.origin}: {first:.200}; name a template with data.chat_template") from error
    if not template or not isinstance(template, str):
        raise UserError(
            f"{conversation.origin}: the tokenizer's chat template is no text; name a template with data.chat_template"
        )
    check_variables(template, choices.template_variables)
    # Templates ask for the date with strftime_now (gpt-oss, Llama, Mistral). transformers would give the machine's
    # date, and tomorrow's samples would differ from today's.
    variables = {"strftime_now": choices.today.strftime, **choices.template_variables}

    def render(messages: Sequence[dict], generation_prompt: bool = False, template: str = template) -> str:
        try:
            return tokenizer.apply_chat_template(
                list(messages),
                tools=conversation.tools,
                chat_template=template,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **variables,
            )
        except MemoryError:  # `_limited` turns it into a UserError
            raise
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"chat template line {error.lineno}: {error.message:.200}; fix it, see data.chat_template"
            ) from error
        except Exception as error:  # a template is third-party code, which may raise anything
            raise Unusable(f"the chat template refuses it ({type(error).__name__}: {error!s:.200})") from error

    return template, _limited(render, conversation)


def reasoning_key(template: str) -> str | None:
    """The key from which a template reads an assistant's reasoning; None if it reads none."""
    return next((key for key in REASONING_KEYS if re.search(rf"\.{key}\b|['\"]{key}['\"]", template)), None)


def as_template_reads(
    messages: Sequence[dict], template: str, reasoning: Literal["keep", "drop"], render: Render
) -> list[dict]:
    """Convert messages to the form that the template reads. render: renders with this template.

    An assistant's reasoning moves to the key from which the template reads it. Under "drop", it is left out, and so is
    reasoning inside the content: everything up to the last `</think>`, which is also what templates remove when they
    drop the reasoning of earlier turns. Tool calls are converted to the form that the template prints (`call_form`).
    """
    key = reasoning_key(template) or REASONING_KEYS[0]
    form = call_form(render) if any(message.get("tool_calls") for message in messages) else CallForm()
    result = [dict(message) for message in messages]
    for message in result:
        if message["role"] == "assistant":
            thoughts = message.pop(REASONING_KEYS[0], None)
            if reasoning == "drop" and THOUGHTS_END in message["content"]:
                message["content"] = message["content"].rpartition(THOUGHTS_END)[2].lstrip("\n")
            elif reasoning == "keep" and thoughts is not None:
                message[key] = thoughts
            message.update(form.applied(message))
    return result


class CallForm(NamedTuple):
    """The form in which a template expects tool calls."""

    text_arguments: bool = False  # arguments are JSON text, not an object
    # The content of a message with calls but no words is None, not "". DeepSeek-V3 prints calls only in this form.
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
    """A short conversation: a question, a tool call whose only argument is PROBED, and its result, RESULT."""
    call = {"type": "function", "id": "call00001", "function": {"name": "look", "arguments": {"probed_key": PROBED}}}
    request = form.applied({"role": "assistant", "content": "", "tool_calls": [call]})
    result = {"role": "tool", "tool_call_id": "call00001", "name": "look", "content": RESULT}
    return [{"role": "user", "content": "Look."}, request, result]


def call_form(render: Render) -> CallForm:
    """The first form in which the template prints the argument of a short conversation's call. If there is none, the
    usual form; the real conversation is then refused by the template in its own words, or by `require_calls`."""
    for form in (CallForm(), CallForm(text_arguments=True), CallForm(null_content=True), CallForm(True, True)):
        try:
            text = render(probing_call(form))
        except Unusable:
            continue
        if PROBED in text and f"'{PROBED}'" not in text:  # a value quoted as Python prints it would not be JSON
            return form
    return CallForm()


def require_calls(messages: list[dict], text: str, render: Render) -> None:
    """Raises Unusable if the template leaves out a call, i.e. prints the same text without it. The target could not
    generate a call that its template does not print."""
    for index, message in enumerate(messages):
        for position in range(len(message.get("tool_calls") or ())):
            other_calls = [call for number, call in enumerate(message["tool_calls"]) if number != position]
            variant = (
                {**message, "tool_calls": other_calls}
                if other_calls
                else {"role": "assistant", "content": message["content"] or ""}
            )
            try:
                same = render([*messages[:index], variant, *messages[index + 1 :]]) == text
            except Unusable:  # the template notices that the call is missing
                continue
            if same:
                raise Unusable("the chat template leaves out a tool call")


# Limits on the processor time and memory of a template, which is third-party code -----------------------------------


class _TimeUp(BaseException):
    """Raised when a template's time is up. A BaseException, because Jinja catches and ignores some Exceptions."""


def _limited(render: Render, row: Conversation) -> Render:
    """`render` within limits on the time that all renderings of a row may take together, and on the memory and length
    of each. Raises UserError if one is exceeded.

    That ends the run, whatever data.unusable says: an endless template would use up the time limit of every row, and if
    such rows were dropped, the samples would depend on the machine's speed. Limits work only in the process's main
    thread.
    """
    seconds = left = SECONDS + SECONDS_A_MESSAGE * len(row.messages or ())
    memory = MEMORY + MEMORY_A_CHARACTER * row.characters
    longest = CHARACTERS + CHARACTERS_A_CHARACTER * row.characters

    def limited(*arguments: Any, **keywords: Any) -> str:
        nonlocal left
        start = time.process_time()
        try:
            if left <= 0:
                raise _TimeUp
            text = _bounded(partial(render, *arguments, **keywords), left, memory)
            problem = len(text) > longest and f"prints {len(text):,} characters, more than {longest:,}"
        except _TimeUp:
            problem = f"runs for more than {seconds:,.1f} s of processor time"
        except MemoryError:
            problem = f"takes more than {memory / 2**30:,.1f} GiB of memory"
        finally:
            left -= time.process_time() - start
        if problem:
            raise UserError(
                f"{row.origin}: the chat template {problem}, the limit for this row; fix the template "
                "(data.chat_template, else the tokenizer's) or remove the row"
            )
        return text

    return limited


def _bounded(render: Callable[[], str], seconds: float, memory: int) -> str:
    """Call `render` within limits on time and memory, and return its text.

    Raises _TimeUp once this process has used `seconds` of processor time, and MemoryError if its address space would
    grow by more than `memory` bytes. If a single operation of the interpreter takes so long that the signal goes
    unnoticed, the system kills the process GRACE seconds later.

    This is not a context manager, because _TimeUp may be raised at any instruction, even in contextlib's own code
    before the block is entered.
    """
    inside = True

    def notice(number: int, frame: FrameType | None) -> None:
        if inside:
            raise _TimeUp

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        limits = (int(file.read().split()[0]) * PAGE + memory, soft, hard)
    old_handlers = signal.signal(signal.SIGPROF, notice), signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds + GRACE)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            resource.setrlimit(
                resource.RLIMIT_AS, (min(limit for limit in limits if limit != resource.RLIM_INFINITY), hard)
            )
            return render()
        finally:
            inside = False  # `notice` may raise until here, but only once, so the outer `finally` is always completed
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        for number, handler in zip((signal.SIGPROF, signal.SIGVTALRM), old_handlers, strict=True):
            signal.signal(number, handler)
