"""Which turns of a conversation the target is asked for, in what context, and which of its answers are fit to learn from."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from eagle3.parsing import parse_json
from eagle3.regeneration.endpoint import Answer, Endpoint, NoAnswer
from eagle3.text.conversations import Conversation

SENT = ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id")  # of a message


WHOLE = ("stop", "tool_calls", "function_call")  # reasons for which an answer ends where it should
BROKEN_OFF = {"length": "truncated at the length limit", "content_filter": "stopped by the server's content filter"}


class LeftOut(Exception):
    """A conversation that gives no row. reason: the same for all of its kind; detail: of this one."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Generation:
    """What decides the answers; one file holds answers of one such set. None: the server's own default."""

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
        """Of a request for the answer to `messages`."""
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "seed")}
        given |= {"tools": tools, "chat_template_kwargs": self.template_variables or None}
        given = {name: value for name, value in given.items() if value is not None}
        return {"model": self.model, "messages": messages, "max_tokens": self.max_tokens, **given}


class Plan(NamedTuple):
    """A conversation in OpenAI form. asked: which messages the target is to give anew; of these the contents are dropped and
    the original's tool calls kept, to compare with. id: hex digest of all that and of what decides the answers."""

    id: str
    origin: str
    messages: list[dict]
    asked: frozenset[int]
    tools: list | None


def plan_of(conversation: Conversation, generation: Generation) -> Plan:
    """Which turns to ask for. Raises LeftOut for a conversation that holds none."""
    if conversation.messages is None:
        raise LeftOut("plain text, which has no turns")
    messages = [_sendable(message, generation.reasoning) for message in conversation.messages]
    _name_calls(messages)
    if not messages:
        raise LeftOut("no messages")
    if messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})  # a prompt without an answer gets one
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index > 0]
    asked = turns if generation.turns == "all" else turns[-1:]
    if not asked:
        raise LeftOut("no turn that answers a message")
    if any(messages[index - 1]["role"] == "assistant" for index in asked):
        raise LeftOut("an assistant's turn that follows another of its own")
    for index in asked:
        messages[index] = {name: messages[index][name] for name in ("role", "tool_calls") if name in messages[index]}
    _json([messages, conversation.tools], "text")
    content = json.dumps([messages, sorted(asked), conversation.tools, asdict(generation)], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:32]
    return Plan(digest, conversation.origin, messages, frozenset(asked), conversation.tools)


def _sendable(message: dict, reasoning: str) -> dict:
    """The message with the keys that an endpoint knows."""
    dropped = ("reasoning_content",) if reasoning == "drop" else ()
    return {name: message[name] for name in SENT if message.get(name) is not None and name not in dropped}


def _name_calls(messages: list[dict]) -> None:
    """Tool calls get their arguments as a JSON string, as OpenAI has it; calls and results without an id get one."""
    waiting: list[str] = []
    number = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_named_call(call, f"call_{number + place}") for place, call in enumerate(calls)]
            number += len(calls)
            waiting = [call["id"] for call in message["tool_calls"]]
        elif message["role"] == "tool":
            identity = message.setdefault("tool_call_id", waiting[0] if waiting else f"call_{number}")
            if identity in waiting:
                waiting.remove(identity)


def _named_call(call: dict, name: str) -> dict:
    """name: the id of a call that has none."""
    arguments = call["function"].get("arguments", {})
    if not isinstance(arguments, str):
        arguments = _json(arguments, "text")
    function = {"name": call["function"]["name"], "arguments": arguments}
    return {"id": str(call.get("id") or name), "type": "function", "function": function}


def _json(value: Any, where: str) -> str:
    """Raises LeftOut for what cannot be sent: rows of a parquet file may hold dates and bytes, and any text half a character."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
        return text
    except TypeError as error:
        raise LeftOut("a value that JSON does not have, which cannot be sent", str(error)) from None
    except UnicodeEncodeError:
        raise LeftOut(f"half of a surrogate pair in the {where}, which is no character") from None


class Work:
    """A plan on its way: the messages so far, tries that failed, and why the row ends early, if it does."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.failures = plan, 0
        self.messages: list[dict] = []
        self.cut: str | None = None
        self.tokens = self.think_tags = 0

    async def ask(self, endpoint: Endpoint, generation: Generation) -> None:
        """Get what is missing. Raises LeftOut, and what Endpoint.chat does; then what has come stays."""
        plan = self.plan
        while len(self.messages) < len(plan.messages) and self.cut is None:
            index = len(self.messages)
            if index in plan.asked:
                answer = await endpoint.chat(generation.body(self.messages, plan.tools))
                self.tokens += answer.tokens
                turn = _turn(answer, generation)
                self.think_tags += "</think>" in answer.content or "<think>" in answer.content
                self.cut = _ends_early(answer, plan, index, turn)
                self.messages.append(turn)
            else:
                self.messages.append(plan.messages[index])

    def row(self) -> dict:
        tools = {"tools": self.plan.tools} if self.plan.tools else {}
        return {"id": self.plan.id, "messages": self.messages, **tools}


def _turn(answer: Answer, generation: Generation) -> dict:
    """The answer as a message. Raises LeftOut where it is none to learn from."""
    finish = answer.finish_reason
    if finish == "abort":  # SGLang's, of what it was answering when it was told to end
        raise NoAnswer("the server broke the answer off (finish_reason abort)")
    if finish not in WHOLE and not (finish == "length" and generation.truncated == "keep"):
        raise LeftOut(BROKEN_OFF.get(finish, f"finish_reason {finish}"))
    if not answer.content.strip() and not answer.tool_calls:
        raise LeftOut("an empty answer")
    turn: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning and generation.reasoning == "keep":
        turn["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        if not all(isinstance(_arguments(call), dict) for call in answer.tool_calls):
            raise LeftOut("a tool call whose arguments are no JSON object")
        turn["tool_calls"] = answer.tool_calls
    _json(turn, "answer")
    return turn


def _ends_early(answer: Answer, plan: Plan, index: int, turn: dict) -> str | None:
    """Why what follows in the original does not follow this turn; None where it does, or where nothing follows. Equal
    calls take the original's ids, which the results that follow name."""
    if index == len(plan.messages) - 1:
        return None
    if answer.finish_reason == "length":
        return "at a truncated answer"
    calls = plan.messages[index].get("tool_calls", [])
    if [_call(call) for call in calls] != [_call(call) for call in answer.tool_calls]:
        return "where the target calls other tools than the original"
    if calls:
        turn["tool_calls"] = [
            {**call, "id": original["id"]} for call, original in zip(answer.tool_calls, calls, strict=True)
        ]
    return None


def _call(call: dict) -> tuple:
    return call["function"]["name"], _arguments(call)


def _arguments(call: dict) -> Any:
    try:
        return parse_json(call["function"]["arguments"])
    except ValueError:
        return call["function"]["arguments"]
