"""Decide which turns of a conversation to ask the target for, in what context, and which answers can be learnt from."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from eagle3.parsing import parse_json
from eagle3.regeneration.endpoint import Answer, Endpoint, LeftOut
from eagle3.servers import NoAnswer
from eagle3.text.conversations import Conversation

SENT = ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id")  # keys of a message that are sent
WHOLE = ("stop", "tool_calls", "function_call")  # finish reasons of complete answers
BROKEN_OFF = {"length": "truncated at the length limit", "content_filter": "stopped by the server's content filter"}


@dataclass(frozen=True)
class Generation:
    """Settings that determine the answers. All rows of a file share one set. None stands for the server's default."""

    model: str
    turns: Literal["all", "last"]
    reasoning: Literal["keep", "drop"]
    truncated: Literal["drop", "keep"]
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    template_variables: dict[str, Any] = field(default_factory=dict)

    def body(self, messages: list[dict], tools: list | None) -> dict[str, Any]:
        """The body of a request for the answer to `messages`."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "tools": tools,
            "chat_template_kwargs": self.template_variables or None,
        }
        return {name: value for name, value in body.items() if value is not None}


@dataclass
class Work:
    """A conversation in OpenAI's form, of which the target writes some turns anew."""

    id: str  # hex digest of the original, the turns asked for, and the settings that determine the answers
    origin: str
    original: list[dict]
    # Indices of messages that the target writes anew. Their contents are dropped; tool calls are kept for comparison.
    asked: frozenset[int]
    tools: list | None
    # What has come of it so far:
    messages: list[dict] = field(default_factory=list)
    cut: str | None = None  # why the row ends early, if it does
    tokens: int = 0  # generated
    think_tags: int = 0  # answers with a think tag in the content
    failures: int = 0  # requests without an answer

    async def ask(self, endpoint: Endpoint, generation: Generation) -> None:
        """Request the missing answers. Raises LeftOut, and whatever Endpoint.chat raises. Earlier answers are kept."""
        while len(self.messages) < len(self.original) and self.cut is None:
            turn = self.original[len(self.messages)]
            if len(self.messages) in self.asked:
                answer = await endpoint.chat(generation.body(self.messages, self.tools))
                self.tokens += answer.tokens
                self.think_tags += "</think>" in answer.content or "<think>" in answer.content
                last = len(self.messages) == len(self.original) - 1
                turn, self.cut = _turn(answer, generation, None if last else turn.get("tool_calls", []))
            self.messages.append(turn)


def plan_of(conversation: Conversation, generation: Generation) -> Work:
    """Decide which turns to ask for. Raises LeftOut if the conversation has none."""
    if conversation.messages is None:
        raise LeftOut("plain text, which has no turns")
    sent = [name for name in SENT if name != "reasoning_content" or generation.reasoning == "keep"]
    messages = [
        {name: message[name] for name in sent if message.get(name) is not None} for message in conversation.messages
    ]
    _name_calls(messages)
    if not messages:
        raise LeftOut("no messages")
    if messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})  # a prompt without an answer gets one
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index > 0]
    requested_turns = turns if generation.turns == "all" else turns[-1:]
    if not requested_turns:
        raise LeftOut("no turn that answers a message")
    if any(messages[index - 1]["role"] == "assistant" for index in requested_turns):
        raise LeftOut("an assistant's turn that follows another of its own")
    for index in requested_turns:
        messages[index] = {name: messages[index][name] for name in ("role", "tool_calls") if name in messages[index]}
    _json([messages, conversation.tools], "text")
    content = json.dumps([messages, sorted(requested_turns), conversation.tools, asdict(generation)], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:32]
    return Work(digest, conversation.origin, messages, frozenset(requested_turns), conversation.tools)


def _name_calls(messages: list[dict]) -> None:
    """Turn the arguments of tool calls into JSON strings, as OpenAI has them, and add ids where there are none."""
    pending_ids: list[str] = []
    number = 0
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                name, arguments = call["function"]["name"], call["function"].get("arguments", {})
                function = {
                    "name": name,
                    "arguments": arguments if isinstance(arguments, str) else _json(arguments, "text"),
                }
                calls.append({"id": str(call.get("id") or f"call_{number}"), "type": "function", "function": function})
                number += 1
            message["tool_calls"], pending_ids = calls, [call["id"] for call in calls]
        elif message["role"] == "tool":
            call_id = message.setdefault("tool_call_id", pending_ids[0] if pending_ids else f"call_{number}")
            if call_id in pending_ids:
                pending_ids.remove(call_id)


def _json(value: Any, where: str) -> str:
    """The value as JSON. Raises LeftOut if it cannot be sent: rows may hold dates, and texts unpaired surrogates."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
        return text
    except TypeError as error:
        raise LeftOut("a value that JSON does not have, which cannot be sent", str(error)) from None
    except UnicodeEncodeError:
        raise LeftOut(f"half of a surrogate pair in the {where}, which is not a character") from None


def _turn(answer: Answer, generation: Generation, expected_calls: list | None) -> tuple[dict, str | None]:
    """Turn an answer into a message. Raises LeftOut if it cannot be learnt from, NoAnswer if the server aborted it.

    expected_calls: those of the original; None if nothing follows. If the answer's calls equal them, they get the
    original ids, because the results that follow refer to those.

    Also returns why the rest of the original cannot follow; None if it can, or if nothing follows.
    """
    finish, calls = answer.finish_reason, answer.tool_calls
    if finish == "abort":  # SGLang was told to end while it was answering
        raise NoAnswer("the server broke the answer off (finish_reason abort)")
    if finish not in WHOLE and not (finish == "length" and generation.truncated == "keep"):
        raise LeftOut(BROKEN_OFF.get(finish, f"finish_reason {finish}"))
    if not answer.content.strip() and not calls:
        raise LeftOut("an empty answer")
    turn: dict[str, Any] = {"role": "assistant", "content": answer.content}
    reasoning = answer.reasoning_content or answer.plain_reasoning
    if reasoning and generation.reasoning == "keep":
        turn["reasoning_content"] = reasoning
    if calls:
        if not all(isinstance(_call(call)[1], dict) for call in calls):
            raise LeftOut("a tool call whose arguments are not a JSON object")
        turn["tool_calls"] = calls
    _json(turn, "answer")
    if expected_calls is None:
        return turn, None
    if finish == "length":
        return turn, "at a truncated answer"
    if [*map(_call, expected_calls)] != [*map(_call, calls)]:
        return turn, "where the target calls other tools than the original"
    if calls:
        turn["tool_calls"] = [call | {"id": own["id"]} for call, own in zip(calls, expected_calls, strict=True)]
    return turn, None


def _call(call: dict) -> tuple[str, Any]:
    """A call's name and arguments, parsed if they are JSON."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    try:
        return name, parse_json(arguments)
    except ValueError:
        return name, arguments
