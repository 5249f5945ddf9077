"""Rows of .json, .jsonl and .parquet files with their places, each as it stands there or malformed."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from eagle3.errors import UserError, shown
from eagle3.parsing import array_elements, parse_json
from eagle3.text.download import plain_row
from eagle3.text.malformed import Malformed

KINDS = (".json", ".jsonl", ".parquet")
# Of a line: eight times those of the longest row that is tokenised, for JSON may have escaped them.
MOST_CHARACTERS = 1 << 27


def file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(origin, row as it stands, or Malformed) of a file of one of KINDS. Raises UserError where its rows cannot be told
    apart."""
    readers = {".json": _json_rows, ".jsonl": _line_rows, ".parquet": _parquet_rows}
    try:
        yield from readers[path.suffix](path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check its rights and its disk") from error


def require_kind(path: Path) -> None:
    """Raises UserError for a file of a kind that is not read."""
    if path.suffix not in KINDS:
        raise UserError(f"{path}: files of kind {path.suffix!r} are not read; convert it to one of {', '.join(KINDS)}")


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """A list of rows, one row, or (despite the name) one row a line."""
    text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
    content = _value(text, line=1)
    if not isinstance(content, Malformed):
        for number, row in enumerate(content if isinstance(content, list) else [content], 1):
            yield f"{path} row {number}", row
    elif elements := array_elements(text):
        line, counted = 1, 0
        for number, (start, stop) in enumerate(elements, 1):
            line, counted = line + text.count("\n", counted, start), start
            yield f"{path} row {number}", _value(text[start:stop], line)
    elif not text.lstrip().startswith("[") and any(isinstance(row, dict) for _, row in _line_rows(path)):
        yield from _line_rows(path)
    else:
        raise UserError(f"{path}: {content.detail}, so its rows cannot be told apart; fix the file")


def _line_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        number = 0
        while line := lines.readline(MOST_CHARACTERS):
            number += 1
            if len(line) == MOST_CHARACTERS and line[-1] != "\n":
                while (rest := lines.readline(MOST_CHARACTERS)) and rest[-1] != "\n":
                    pass
                yield f"{path}:{number}", Malformed(f"a line of {MOST_CHARACTERS:,} characters or more")
            elif line.strip():
                yield f"{path}:{number}", _value(line.rstrip())


def _value(text: str, line: int | None = None) -> Any:
    """What the JSON says, Malformed if nothing. text: with what was no UTF-8 as halves of surrogate pairs. line: where it
    begins, for a text of several."""
    try:
        if not text.isascii():
            text.encode()
        return parse_json(text)
    except UnicodeEncodeError as error:
        place, flaw = error.start, f"byte 0x{ord(text[error.start]) & 0xFF:02x}"
        reason = "not UTF-8 text"
    except json.JSONDecodeError as error:
        place, flaw = error.pos, error.msg
        reason = "not valid JSON"
    begin = text.rfind("\n", 0, place) + 1
    where = f"column {place - begin + 1}" if line is None else f"line {line + text.count(chr(10), 0, place)}"
    near = shown(text[max(begin, place - 20) : place + 20].strip())
    return Malformed(reason, f"{reason} ({where}: {flaw}, near {near})")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    # pyarrow itself, not `datasets`: no copy of the file in a cache, and each file keeps its own columns.
    import pyarrow
    import pyarrow.parquet

    flaws = (pyarrow.ArrowException, ValueError, ArithmeticError)

    def rows_of(batch: pyarrow.RecordBatch) -> Iterator[Any]:
        try:
            return map(plain_row, batch.to_pylist())
        except flaws as error:
            if len(batch) == 1:
                return iter([Malformed("a value that cannot be read", f"a value that cannot be read ({error!s:.100})")])
            return chain.from_iterable(rows_of(batch.slice(place, 1)) for place in range(len(batch)))

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = chain.from_iterable(map(rows_of, file.iter_batches(batch_size=1024)))
            for number, row in enumerate(rows, 1):
                yield f"{path} row {number}", row
    except (OSError, *flaws) as error:
        raise UserError(f"{path}: not a readable parquet file ({error!s:.200}); fix or convert it") from error
