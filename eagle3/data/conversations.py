"""Reads conversations from files, folders and dataset ids into one form, and says exactly which row is wrong."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from eagle3.errors import UserError

KINDS = (".json", ".jsonl", ".parquet")
FORMS = "`messages` (role, content), `conversations` (from, value) or `text`"
# ShareGPT's names and their relatives; the OpenAI names map to themselves.
ROLES = {
    **{name: "user" for name in ("user", "human")},
    **{name: "assistant" for name in ("assistant", "gpt", "chatgpt", "bing", "bard", "model")},
    **{name: name for name in ("system", "developer")},
    **{name: "tool" for name in ("tool", "function", "observation", "tool_response", "function_response", "ipython")},
}


@dataclass(frozen=True)
class Conversation:
    """One row of the data: either chat `messages` (OpenAI form) or plain `text`, never both.

    origin: where it came from, such as `data.jsonl:17`, for error lines.
    tools: the tool schemas that the chat template shows, if the row has any.
    """

    origin: str
    messages: tuple[dict, ...] | None
    text: str | None
    tools: list | None = None


def read_conversations(sources: list[str], limit: int | None = None) -> list[Conversation]:
    """The conversations of all sources, in order; with `limit` the first so many.

    A source is a .json, .jsonl or .parquet file, a folder of those, the word `standard_library`, or a dataset id (its
    "train" split). A row has `messages` (OpenAI), `conversations` (ShareGPT) or `text`. Raises UserError for a source
    that cannot be read or has no rows and for a row of another form.
    """
    conversations: list[Conversation] = []
    for source in sources:
        wanted = None if limit is None else limit - len(conversations)
        if wanted == 0:
            break
        found = [_conversation(origin, row) for origin, row in islice(_rows(source), wanted)]
        if not found:
            raise UserError(f"{source}: holds no rows; give data with at least one conversation")
        conversations += found
    return conversations


def _rows(source: str) -> Iterator[tuple[str, Any]]:
    """(origin, row as it stands) for every row of one source."""
    path = Path(source).expanduser()
    if source == "standard_library":
        from eagle3.data.standard_library import standard_library_conversations

        for number, row in enumerate(standard_library_conversations(), 1):
            yield f"{source} row {number}", row
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in KINDS)
        if not files:
            raise UserError(f"{source}: this folder holds no {', '.join(KINDS)} file; name the folder that does")
        for file in files:
            yield from _file_rows(file)
    elif path.is_file():
        yield from _file_rows(path)
    elif source.startswith(("/", ".", "~")) or source.count("/") > 1 or path.suffix in (*KINDS, ".csv", ".txt", ".gz"):
        raise UserError(f"{source}: no such file or folder; mend the path in data.train or data.held_out")
    else:
        yield from _dataset_rows(source)


def _file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix == ".jsonl":
        yield from _line_rows(path)
    elif path.suffix == ".json":
        yield from _json_rows(path)
    else:
        raise UserError(f"{path}: files of kind {path.suffix!r} are not read; convert it to one of {', '.join(KINDS)}")


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """A list of rows, one row, or (despite the name) one row a line."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error}); convert the file") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # what follows the first value is the next line's
            yield from _line_rows(path)
            return
        raise UserError(f"{path}:{error.lineno}: not valid JSON ({error.msg}); mend the file") from error
    for number, row in enumerate(content if isinstance(content, list) else [content], 1):
        yield f"{path} row {number}", row


def _line_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig") as lines:
        number = 0
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}:{number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: not valid JSON ({error.msg}, {_short(line)}); mend the line") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 text after line {number} ({error}); convert the file") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    # pyarrow itself, not `datasets`: no copy of the file in a cache, and each file keeps its own columns.
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(batch_size=1024) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield f"{path} row {number}", _without_nulls(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file ({error}); mend or convert it") from error


def _dataset_rows(source: str) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset

    try:
        rows = load_dataset(source, split="train")
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{source}: no file or folder here, and as a dataset id it cannot be loaded ({error}); mend the name, or"
            f" download the dataset and name its files"
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"{source} row {number}", _without_nulls(row)


def _without_nulls(value: Any) -> Any:
    """Arrow gives every row every key of the column and fills in nulls; a template would see them as present."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _conversation(origin: str, row: Any) -> Conversation:
    if not isinstance(row, dict):
        raise UserError(f"{origin}: the row is {_short(row)}, not an object with {FORMS}; mend the row")
    for key in ("messages", "conversations"):
        if row.get(key) is not None:
            if not isinstance(row[key], list):
                raise UserError(f"{origin}: {key} is {_short(row[key])}, not a list of messages; mend the row")
            messages = [_message(f"{origin}: {key}[{index}]", message) for index, message in enumerate(row[key])]
            if key == "conversations" and row.get("system"):
                messages.insert(0, {"role": "system", "content": _content(f"{origin}: system", row["system"])})
            return Conversation(origin, tuple(messages), None, _tools(origin, row.get("tools")))
    if row.get("text") is not None:
        if not isinstance(row["text"], str):
            raise UserError(f"{origin}: text is {_short(row['text'])}, not a string; mend the row")
        return Conversation(origin, None, row["text"])
    raise UserError(f"{origin}: the row has the keys {sorted(row)} and none of {FORMS}; rename or convert the column")


def _message(where: str, message: Any) -> dict:
    """The OpenAI form of one message, its further keys (reasoning_content, tool_calls, ...) kept."""
    if not isinstance(message, dict):
        raise UserError(f"{where} is {_short(message)}, not an object with role and content; mend the row")
    role_key, content_key = ("from", "value") if "from" in message and "role" not in message else ("role", "content")
    name = message.get(role_key)
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise UserError(f"{where}: unknown role {_short(name)}; use one of {', '.join(ROLES)}")
    further = {key: value for key, value in message.items() if key not in (role_key, content_key) and value is not None}
    if calls := further.get("tool_calls"):
        further["tool_calls"] = [_tool_call(f"{where}: tool_calls", call) for call in calls]
    content = message.get(content_key)
    if content is None and not (role == "assistant" and further):
        raise UserError(f"{where} has no {content_key}; mend the row")
    return {"role": role, "content": "" if content is None else _content(where, content), **further}


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"{where}: content is {_short(content)}, not a string or a list of text parts; mend the row")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UserError(f"{where}: content part {_short(part)} is not text; take rows with other parts out")
    return "".join(part["text"] for part in content)


def _tool_call(where: str, call: Any) -> dict:
    """OpenAI writes a call's arguments as a JSON string; chat templates, and so serving engines, want the object."""
    if not isinstance(call, dict):
        raise UserError(f"{where}: {_short(call)} is not an object; mend the row")
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(where, call["function"])}
    if not isinstance(call.get("arguments"), str):
        return call
    try:
        return {**call, "arguments": json.loads(call["arguments"])}
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: arguments {_short(call['arguments'])} are not valid JSON; mend the row") from error


def _tools(origin: str, tools: Any) -> list | None:
    if isinstance(tools, str):  # many parquet files hold the schemas as one JSON string
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise UserError(f"{origin}: tools {_short(tools)} are not valid JSON; mend the row") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError(f"{origin}: tools is {_short(tools)}, not a list of tool schemas; mend the row")
    return tools or None


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
