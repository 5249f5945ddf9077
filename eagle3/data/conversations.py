"""Reads conversations from files, folders, presets and dataset ids into one form, and says exactly which row is wrong."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from eagle3.console import Progress
from eagle3.data.download import downloaded_rows, is_dataset, is_slice, plain_row, source_of_id
from eagle3.data.presets import preset_source
from eagle3.errors import UserError, shown
from eagle3.parsing import parse_json

KINDS = (".json", ".jsonl", ".parquet")
FORMS = "`messages` (role, content), `conversations` (from, value) or `text`"
# Where people's data keep an assistant's thoughts: Qwen3 and SGLang, vLLM, gpt-oss. The first is ours.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
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
    messages: an assistant's thoughts are in `reasoning_content`, calls in `tool_calls` with their arguments as objects.
    tools: the tool schemas that the chat template shows, in OpenAI's form, if the row has any.
    """

    origin: str
    messages: tuple[dict, ...] | None
    text: str | None
    tools: list | None = None

    @property
    def characters(self) -> int:
        """Of all that a template may print."""
        return _characters([self.text, self.messages, self.tools])


def _characters(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(len, value)) + _characters(list(value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_characters, value))
    return 0 if value is None else len(str(value))


def read_conversations(
    sources: list[str],
    limit: int | None = None,
    *,
    downloads: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> list[Conversation]:
    """The conversations of all sources, in order; with `limit` the first so many.

    A source is a .json, .jsonl or .parquet file, a folder of those, `standard_library` (conversations), `standard_library:files`,
    `standard_library:held_out_files` (texts), `preset:NAME` (see eagle3.data.presets) or a dataset id; the last two may end in `@revision`, and an id names another split than "train"
    as `owner/name:split`. A row has `messages` (OpenAI), `conversations` (ShareGPT) or `text`. downloads: folder where the
    rows of datasets are kept, so that they travel once; None to keep none. report: gets progress lines. Raises UserError
    for a source that cannot be read or has no rows and for a row of another form.
    """
    return list(iterate_conversations(sources, limit, downloads=downloads, report=report))


def iterate_conversations(
    sources: list[str],
    limit: int | None = None,
    *,
    downloads: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Iterator[Conversation]:
    """`read_conversations` one by one, so that no more than one need be held."""
    done = 0
    for source in sources:
        wanted = None if limit is None else limit - done
        if wanted == 0:
            break
        progress, before = Progress(report, f"reading {source}", wanted, "conversations"), done
        for origin, row in _rows(source, wanted, downloads, report):
            yield _conversation(origin, row)
            done += 1
            progress.advance()
        if done == before:
            raise UserError(f"{source}: holds no rows; give data with at least one conversation")
        progress.end()


def _rows(
    source: str, wanted: int | None, downloads: Path | None, report: Callable[[str], None]
) -> Iterator[tuple[str, Any]]:
    """(origin, row as it stands) for the first `wanted` rows of one source, or all."""
    path = Path(source).expanduser()
    if source.startswith("preset:"):
        return downloaded_rows(preset_source(source), wanted, downloads, report)
    if source.partition(":")[0] == "standard_library":
        return islice(_library_rows(source), wanted)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in KINDS)
        if not files:
            raise UserError(f"{source}: this folder holds no {', '.join(KINDS)} file; name the folder that does")
        return islice(chain.from_iterable(map(_file_rows, files)), wanted)
    if path.is_file():
        return islice(_file_rows(path), wanted)
    if is_slice(source):
        raise UserError(
            f"{source}: slices of a split are not taken; leave [...] out, and bound the rows with data.max_samples "
            "(regenerate.py: --limit)"
        )
    if not is_dataset(source) or path.suffix in (*KINDS, ".csv", ".txt", ".gz"):
        raise UserError(f"{source}: no such file or folder; mend the path in data.train or data.held_out")
    return downloaded_rows(source_of_id(source), wanted, downloads, report)


def _library_rows(source: str) -> Iterator[tuple[str, Any]]:
    from eagle3.data.standard_library import SOURCES

    if source not in SOURCES:
        raise UserError(f"{source}: no such part of the standard library; name one of {', '.join(SOURCES)}")
    for number, row in enumerate(SOURCES[source](), 1):
        yield f"{source} row {number}", row


def _file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    readers = {".json": _json_rows, ".jsonl": _line_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise UserError(f"{path}: files of kind {path.suffix!r} are not read; convert it to one of {', '.join(KINDS)}")
    try:
        yield from readers[path.suffix](path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check its rights and its disk") from error


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """A list of rows, one row, or (despite the name) one row a line."""
    try:
        content = parse_json(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error}); convert the file") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # what follows the first value is the next line's
            yield from _line_rows(path)
            return
        raise UserError(f"{path}:{error.lineno}: not valid JSON ({error.msg}); fix the file") from error
    for number, row in enumerate(content if isinstance(content, list) else [content], 1):
        yield f"{path} row {number}", row


def _line_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig") as lines:
        number = 0
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}:{number}", parse_json(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: not valid JSON ({error.msg}, {shown(line)}); fix the line") from error
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
                yield f"{path} row {number}", plain_row(f"{path} row {number}", row)
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, ArithmeticError) as error:
        raise UserError(f"{path}: not a readable parquet file ({error!s:.200}); fix or convert it") from error


def _conversation(origin: str, row: Any) -> Conversation:
    if not isinstance(row, dict):
        raise UserError(f"{origin}: the row is {shown(row)}, not an object with {FORMS}; mend the row")
    for key in ("messages", "conversations"):
        if row.get(key) is not None:
            if not isinstance(row[key], list):
                raise UserError(f"{origin}: {key} is {shown(row[key])}, not a list of messages; mend the row")
            messages = [_message(f"{origin}: {key}[{index}]", message) for index, message in enumerate(row[key])]
            if key == "conversations" and row.get("system"):
                messages.insert(0, {"role": "system", "content": _content(f"{origin}: system", row["system"])})
            return Conversation(origin, tuple(messages), None, _tools(origin, row.get("tools")))
    if row.get("text") is not None:
        if not isinstance(row["text"], str):
            raise UserError(f"{origin}: text is {shown(row['text'])}, not a string; mend the row")
        return Conversation(origin, None, row["text"])
    raise UserError(
        f"{origin}: the row has the keys {shown(sorted(row), 200)} and none of {FORMS}; rename or convert the column"
    )


def _message(where: str, message: Any) -> dict:
    """The OpenAI form of one message, its further keys (reasoning_content, tool_calls, ...) kept."""
    if not isinstance(message, dict):
        raise UserError(f"{where} is {shown(message)}, not an object with role and content; mend the row")
    role_key, content_key = ("from", "value") if "from" in message and "role" not in message else ("role", "content")
    name = message.get(role_key)
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise UserError(f"{where}: unknown role {shown(name)}; use one of {', '.join(ROLES)}")
    taken = (role_key, content_key, *REASONING_KEYS, "tool_calls")
    further = {key: value for key, value in message.items() if key not in taken and value is not None}
    if reasoning := _reasoning(where, message):
        further["reasoning_content"] = reasoning
    if calls := _parsed(f"{where}: tool_calls", message.get("tool_calls")):
        if not isinstance(calls, list):
            raise UserError(f"{where}: tool_calls is {shown(calls)}, not a list of calls; mend the row")
        further["tool_calls"] = [_tool_call(f"{where}: tool_calls", call) for call in calls]
    content = message.get(content_key)
    if content is None and not (role == "assistant" and further):
        raise UserError(f"{where} has no {content_key}; mend the row")
    return {"role": role, "content": "" if content is None else _content(where, content), **further}


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"{where}: content is {shown(content)}, not a string or a list of text parts; mend the row")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UserError(f"{where}: content part {shown(part)} is not text; take rows with other parts out")
    return "".join(part["text"] for part in content)


def _reasoning(where: str, message: dict) -> str | None:
    """What a message keeps of its thoughts under any of the names that people's data have for it."""
    found = {key: message[key] for key in REASONING_KEYS if message.get(key)}
    for key, value in found.items():
        if not isinstance(value, str):
            raise UserError(f"{where}: {key} is {shown(value)}, not a string; mend the row")
    if len(set(found.values())) > 1:
        raise UserError(f"{where}: {' and '.join(found)} differ; keep one of them")
    return next(iter(found.values()), None)


def _parsed(where: str, value: Any) -> Any:
    """Parquet files often hold what has no fixed columns as JSON strings."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value.strip() else None
    except json.JSONDecodeError as error:
        raise UserError(f"{where} {shown(value)} are not valid JSON ({error.msg}); fix the row") from error


def _tool_call(where: str, call: Any) -> dict:
    """OpenAI writes a call's arguments as a JSON string; chat templates, and so serving engines, want the object."""
    if not isinstance(call, dict):
        raise UserError(f"{where}: {shown(call)} is not an object; mend the row")
    if isinstance(call.get("function"), dict):
        outer, inner = call, call["function"]
    else:
        outer = {"type": "function", **{key: call[key] for key in ("id",) if key in call}}
        inner = {key: value for key, value in call.items() if key not in ("id", "type")}
    if not (isinstance(inner.get("name"), str) and inner["name"]):
        raise UserError(f"{where}: {shown(call)} names no function; mend the row")
    return {**outer, "function": _with_arguments(where, inner)}


def _with_arguments(where: str, function: dict) -> dict:
    if not isinstance(function.get("arguments"), str):
        return function
    return {**function, "arguments": _parsed(f"{where}: arguments", function["arguments"]) or {}}


def _tools(origin: str, tools: Any) -> list | None:
    """Tool schemas as a serving engine hands them to the template: `{"type": "function", "function": {...}}`."""
    tools = _parsed(f"{origin}: tools", tools)
    tools = [_parsed(f"{origin}: tools", tool) for tool in tools] if isinstance(tools, list) else tools
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError(f"{origin}: tools is {shown(tools)}, not a list of tool schemas; mend the row")
    return [_tool(tool) for tool in tools or []] or None


def _tool(tool: dict) -> dict:
    if "function" in tool or tool.get("type", "function") != "function" or not isinstance(tool.get("name"), str):
        return tool  # in that form, or no function (`{"type": "web_search"}`)
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
