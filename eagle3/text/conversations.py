"""Read conversations from files, folders, presets and dataset ids into one form, and say exactly which row is wrong."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

from eagle3.console import Progress, Say
from eagle3.errors import UserError, refuse, shown
from eagle3.parsing import parse_json
from eagle3.text.datasets import Dataset, dataset_named, downloaded_rows
from eagle3.text.rows import (
    KINDS,
    LISTED,
    UNKNOWN_ROLE,
    MalformedRow,
    MalformedRows,
    by_reason,
    file_rows,
    first_readable,
)
from eagle3.text.standard_library import SOURCES

FORMS = "`messages` (role, content), `conversations` (from, value), `instruction` and `output`, or `text`"
# Keys under which data sets keep an assistant's reasoning: Qwen3's and SGLang's, vLLM's, gpt-oss's. We use the first.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# ShareGPT's role names and similar ones; OpenAI's map to themselves.
ROLES = {
    **{name: "user" for name in ("user", "human")},
    **{name: "assistant" for name in ("assistant", "gpt", "chatgpt", "bing", "bard", "model")},
    **{name: name for name in ("system", "developer")},
    **{name: "tool" for name in ("tool", "function", "observation", "tool_response", "function_response", "ipython")},
}
KIND_NAMES = {str: "a string", list: "a list", dict: "an object"}
KNOWN_ROLES = "user, assistant, system, developer, tool and ShareGPT's names for them"


@dataclass(frozen=True)
class Conversation:
    """One row of the data: either chat `messages` in OpenAI's form or plain `text`, never both."""

    origin: str  # where it came from, for example `data.jsonl:17`, for error messages
    # An assistant's reasoning is in `reasoning_content`; its calls are in `tool_calls`, with arguments as objects.
    messages: tuple[dict, ...] | None
    text: str | None
    tools: list | None = None  # the row's tool schemas in OpenAI's form, which the chat template shows

    @property
    def characters(self) -> int:
        """Number of characters in everything that a template may print."""
        return _characters([self.text, self.messages, self.tools])


def _characters(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(len, value)) + _characters(list(value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_characters, value))
    return 0 if value is None else len(str(value))


def read_conversations(sources: list[str], limit: int | None = None, **options: Any) -> list[Conversation]:
    """All conversations of `iterate_conversations` at once."""
    return list(iterate_conversations(sources, limit, **options))


def iterate_conversations(
    sources: list[str],
    limit: int | None = None,
    *,
    malformed: MalformedRows | None = None,
    downloads: Path | None = None,
    report: Say = lambda line: None,
) -> Iterator[Conversation]:
    """Yield the conversations of all sources, one at a time and in order. A source is one of:
    - a .json, .jsonl or .parquet file, or a folder of these
    - `standard_library` (conversations), `standard_library:files` or `standard_library:held_out_files` (texts)
    - `preset:NAME` (see eagle3.text.datasets) or a dataset id, both optionally with `@revision`; an id names a split
      other than "train" as `owner/name:split`

    A row has `messages` (OpenAI), `conversations` (ShareGPT), `instruction` and `output` (Alpaca) or `text`.

    limit: stop after this many conversations
    malformed: counts the malformed rows, and decides whether they are left out or refused at the end; default: refused
    downloads: folder in which rows of datasets are kept, so that they are downloaded once; None to keep none
    report: gets progress lines

    Raises UserError if malformed rows are refused, and for a source that cannot be read or has no readable row.
    """
    malformed = malformed or MalformedRows()
    count = 0
    for source in sources:
        remaining = None if limit is None else limit - count
        if remaining == 0:
            break
        start, old_flaws = count, malformed.counts.copy()
        progress = Progress(report, f"reading {source}", remaining, "conversations")
        dataset = dataset_of(source)
        if dataset and malformed.refused:  # download nothing if the data will be refused
            break
        rows = (
            downloaded_rows(dataset, remaining, downloads, report, _conversation)
            if dataset
            else first_readable(_local_rows(source), _conversation, remaining)
        )
        for origin, row in rows:
            if isinstance(row, MalformedRow):
                malformed.add(origin, row)
                if count == start and malformed.refused and (malformed.counts - old_flaws).total() == LISTED:
                    break  # the whole source has a different form
            else:
                yield row
                count += 1
                progress.advance()
        flaws = malformed.counts - old_flaws
        if count == start:
            remedy = "convert it to a form of docs/data.md, or give other data"
            refuse(
                source,
                (not flaws, "holds no rows; give data with at least one conversation"),
                (malformed.drop, f"no row can be read ({by_reason(flaws)}); {remedy}"),
            )
        progress.end()
    if malformed.refused:
        raise malformed.refusal(sources, count + malformed.counts.total())


def dataset_of(source: str) -> Dataset | None:
    """The dataset that a source names; None for a local source. Raises UserError if the source is invalid, as far as
    that can be checked without reading it."""
    path = Path(source).expanduser()
    if source.startswith("preset:"):
        return dataset_named(source)
    if source.partition(":")[0] == "standard_library":
        if source not in SOURCES:
            raise UserError(f"{source}: no such part of the standard library; name one of {', '.join(SOURCES)}")
    elif path.exists():
        if not _files(path):
            verb = "holds" if path.is_dir() else "is"
            raise UserError(f"{source}: {verb} no {', '.join(KINDS)} file; convert it to one of these, or name another")
    elif "/" not in source and (
        meant := get_close_matches(source.partition(":")[0], ("preset", "standard_library", "demo_answers"), 1, 0.8)
    ):
        raise UserError(f"{source}: no such file or folder; docs/data.md shows how to name {meant[0]}")
    elif path.suffix not in (*KINDS, ".csv", ".txt", ".gz") and (dataset := dataset_named(source)):
        return dataset
    else:
        raise UserError(
            f"{source}: no such file or folder (seen from {Path.cwd()}), nor a dataset's id (owner/name, "
            "owner/name:split, owner/name@revision); fix data.train or data.held_out (docs/data.md), download what a "
            "URL names, and limit rows with data.max_samples"
        )
    return None


def _files(path: Path) -> list[Path]:
    """The files of a source that are read: those in a folder, or the file itself."""
    return sorted(file for file in (path.iterdir() if path.is_dir() else [path]) if file.suffix in KINDS)


def _local_rows(source: str) -> Iterator[tuple[str, Any]]:
    if source in SOURCES:
        return ((f"{source} row {number}", row) for number, row in enumerate(SOURCES[source](), 1))
    return chain.from_iterable(map(file_rows, _files(Path(source).expanduser())))


def _conversation(origin: str, row: Any) -> Conversation:
    if isinstance(row, MalformedRow):
        raise row
    _require(row, dict, "the row")
    key = next((key for key in ("messages", "conversations") if row.get(key) is not None), None)
    if key is None and row.get("instruction") is not None and row.get("output") is not None:
        row, key = {**row, "conversations": _alpaca_turns(row)}, "conversations"
    if key:
        _require(row[key], list, key)
        messages = [_message(f"{key}[{index}]: ", message) for index, message in enumerate(row[key])]
        if key == "conversations" and row.get("system"):
            messages.insert(0, {"role": "system", "content": _content("system: ", row["system"])})
        return Conversation(origin, tuple(messages), None, _tools(row.get("tools")))
    if row.get("text") is not None:
        _require(row["text"], str, "text")
        return Conversation(origin, None, row["text"])
    raise MalformedRow(
        "none of the forms that are read",
        f"the row has the keys {shown(sorted(row), 200)} and none of {FORMS}",
    )


def _require(value: Any, kind: type, key: str, where: str = "") -> None:
    """Raises MalformedRow if the value is not an instance of `kind`. where: prefix of the key in the message"""
    if not isinstance(value, kind):
        raise MalformedRow(f"{key}: not {KIND_NAMES[kind]}", f"{where}{key} is {shown(value)}, not {KIND_NAMES[kind]}")


def _alpaca_turns(row: dict) -> list[dict]:
    """A row of the Alpaca form as ShareGPT's turns; `input` may be missing or empty. Raises MalformedRow."""
    for key in ("instruction", "input", "output"):
        _require(row.get(key) or "", str, key)
    if row.get("history"):
        raise MalformedRow("history: not read", "history: earlier turns are not read in this form; write `messages`")
    question = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
    return [{"from": "user", "value": question}, {"from": "assistant", "value": row["output"]}]


def _message(where: str, message: Any) -> dict:
    """Convert a message to OpenAI's form, reasoning and tool calls included. Other keys stay. Raises MalformedRow."""
    _require(message, dict, "message", where)
    role_key, content_key = ("from", "value") if "from" in message and "role" not in message else ("role", "content")
    name = message.get(role_key)
    role = ROLES.get(str(name).lower())
    if role is None:
        raise MalformedRow(UNKNOWN_ROLE, f"{where}unknown role {shown(name)}, none of {KNOWN_ROLES}")
    standard_keys = (role_key, content_key, *REASONING_KEYS, "tool_calls")
    extras = {key: value for key, value in message.items() if key not in standard_keys and value is not None}
    if reasoning := _reasoning(where, message):
        extras["reasoning_content"] = reasoning
    if calls := _parsed("tool_calls", message.get("tool_calls"), where):
        _require(calls, list, "tool_calls", where)
        extras["tool_calls"] = [_tool_call(f"{where}tool_calls: ", call) for call in calls]
    content = message.get(content_key)
    if content is None and not (role == "assistant" and extras):
        raise MalformedRow("a message without content", f"{where}no {content_key}")
    return {"role": role, "content": "" if content is None else _content(where, content), **extras}


def _content(where: str, content: Any) -> str:
    """The text of a content, which may be in parts. Raises MalformedRow."""
    if not isinstance(content, list):
        content = [{"type": "text", "text": content}]
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise MalformedRow("content: not text", f"{where}content {shown(part)} is not text")
    return "".join(part["text"] for part in content)


def _reasoning(where: str, message: dict) -> str | None:
    """The message's reasoning, whichever of the known keys it is under. Raises MalformedRow."""
    values = {key: message[key] for key in REASONING_KEYS if message.get(key)}
    for key, value in values.items():
        _require(value, str, key, where)
    if len(set(values.values())) > 1:
        raise MalformedRow(
            "reasoning under several names", f"{where}{' and '.join(values)} differ, and only one can be used"
        )
    return next(iter(values.values()), None)


def _parsed(key: str, value: Any, where: str = "") -> Any:
    """Parse the value if it is a JSON string, as Parquet files often store data that has no fixed columns. Raises
    MalformedRow."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value.strip() else None
    except json.JSONDecodeError as error:
        raise MalformedRow(
            f"{key}: not valid JSON", f"{where}{key} {shown(value)} is not valid JSON ({error.msg})"
        ) from error


def _tool_call(where: str, call: Any) -> dict:
    """Convert a call so that its arguments are an object, as chat templates and serving engines expect. In OpenAI's
    form they are a JSON string. Raises MalformedRow."""
    _require(call, dict, "call", where)
    if isinstance(call.get("function"), dict):
        outer, inner = call, call["function"]
    else:
        outer = {"type": "function", **{key: call[key] for key in ("id",) if key in call}}
        inner = {key: value for key, value in call.items() if key not in ("id", "type")}
    if not (isinstance(inner.get("name"), str) and inner["name"]):
        raise MalformedRow("tool_calls: not a call", f"{where}{shown(call)} names no function")
    if isinstance(inner.get("arguments"), str):
        inner = {**inner, "arguments": _parsed("arguments", inner["arguments"], where) or {}}
    return {**outer, "function": inner}


def _tools(tools: Any) -> list | None:
    """Convert tool schemas to the form that serving engines pass to the template:
    `{"type": "function", "function": {...}}`. Raises MalformedRow."""
    tools = _parsed("tools", tools) or []
    _require(tools, list, "tools")
    return [_tool(_parsed("tools", tool)) for tool in tools] or None


def _tool(tool: Any) -> dict:
    _require(tool, dict, "a tool")
    if "function" in tool or tool.get("type", "function") != "function" or not isinstance(tool.get("name"), str):
        return tool  # already in that form, or not a function (`{"type": "web_search"}`)
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
