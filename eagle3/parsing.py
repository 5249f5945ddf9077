"""Parses JSON and YAML written by users or downloaded by tools. Any text is either parsed, or refused with the place
and the reason."""

import json
import re
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from eagle3.errors import UserError

# The deepest nesting of lists and objects that is accepted. Tool schemas have about twenty levels; near a thousand,
# Python's parsers, encoders and templates crash.
DEEPEST = 100
MOST_DIGITS = 18  # digits of a whole number in YAML: the code that computes with such numbers expects 64 bits
_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # neither file names nor UTF-8 can contain these
_BRACKET_OR_NUMBER = re.compile(r'"(?:[^"\\]++|\\.)*+"|[\[{\]}]|(?<![.\d])\d{1000,}+(?!\.\d|[eE][-+]?\d)', re.DOTALL)


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. Raises UnicodeDecodeError for bytes that are not text, and json.JSONDecodeError for any other fault,
    including values that are nested too deep and whole numbers with too many digits."""
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        raise
    except (RecursionError, ValueError) as error:
        raise _too_much(text) from error
    if text.count("[") + text.count("{") > DEEPEST and is_too_deep(value):
        raise _too_much(text)
    return value


def read_json_object(path: Path, missing: str, damaged: str, mistake: type[UserError] = UserError) -> dict[str, Any]:
    """Reads the JSON object in a file that a user named. Raises `mistake`, with the remedy `missing` if the file cannot
    be read, and `damaged` if it does not contain a JSON object."""
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise mistake(f"{path}: {problem}; {missing}") from error
    except ValueError as error:
        raise mistake(f"{path}: not valid JSON ({error}); {damaged}") from error
    if not isinstance(values, dict):
        raise mistake(f"{path}: holds {type(values).__name__}, not an object; {damaged}")
    return values


def is_too_deep(value: Any) -> bool:
    """Whether a parsed value has more than DEEPEST levels."""
    level = [value]
    for _ in range(DEEPEST):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [*chain.from_iterable(inner)]
    return any(isinstance(item, dict | list) for item in level)


def _too_much(text: str) -> json.JSONDecodeError:
    """The error for JSON that is nested too deep or has too long a number, at the first such place."""
    depth, digits = 0, sys.get_int_max_str_digits()
    for match in _BRACKET_OR_NUMBER.finditer(text):
        depth += (match[0] in "[{") - (match[0] in "]}")
        if depth > DEEPEST:
            return json.JSONDecodeError(f"nested deeper than {DEEPEST} levels", text, match.start())
        if match[0][0].isdigit() and len(match[0]) > digits:
            return json.JSONDecodeError(f"a whole number of {len(match[0]):,} digits", text, match.start())
    return json.JSONDecodeError("cannot be parsed", text, 0)


def parse_yaml(text: str) -> Any:
    """Parses YAML that has only mappings, lists and scalars; None for an empty text. Raises yaml.YAMLError with line
    and reason, also for text that would crash YAML's reader or grow without bound, and for a duplicate key, where the
    reader would silently keep one of the values."""
    try:
        return yaml.load(text, _PlainLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise yaml.YAMLError(f"{place}{error.problem or error.context:.200}") from error
    except ValueError as error:  # for example, a date that does not exist
        raise yaml.YAMLError(str(error)) from error


class _PlainLoader(yaml.SafeLoader):
    """A loader that refuses aliases (recipes do not need them, but YAML bombs do), tags, deep nesting and long
    numbers."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _refused(event, "aliases (*name) are not accepted; write the value out")
        if event.tag is not None:
            raise _refused(event, f"tags ({event.tag!r:.60}) are not accepted; leave it out")
        if self.depth == DEEPEST:
            raise _refused(event, f"nested deeper than {DEEPEST} levels")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_scalar_node(self, anchor: str | None) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if node.tag.endswith(":int") and len(node.value) > MOST_DIGITS:
            raise _refused(node, f"a whole number of {len(node.value):,} digits; at most {MOST_DIGITS} are accepted")
        if _NO_TEXT.search(node.value):
            raise _refused(node, "a zero byte, or half of a surrogate pair, which is not text")
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise _refused(key, f"the key {key.value!r:.60} appears twice")
                seen.add(key.value)
        return node


def _refused(where: yaml.Node | yaml.Event, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=where.start_mark)


def is_number(value: Any) -> bool:
    """Whether `value` is a number that a float can hold. Booleans do not count."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
