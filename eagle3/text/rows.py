"""Read the rows of .json, .jsonl and .parquet files, each with its origin; a row that cannot be read is `Malformed`.

Malformed rows are counted by reason, and either listed in one error or left out.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from eagle3.console import counted
from eagle3.errors import UserError, shown
from eagle3.parsing import DEEPEST, is_too_deep, parse_json

KINDS = (".json", ".jsonl", ".parquet")
# Longest line: eight times the longest row that is tokenised, because JSON may escape its characters.
MOST_CHARACTERS = 1 << 27
LISTED = 10  # malformed rows listed in an error; reasons for dropped rows listed in a log
NAMED = 3  # reasons listed on one line
UNKNOWN_ROLE = "unknown role"

Row = TypeVar("Row")


class MalformedRow(Exception):
    """A row that cannot be used; raised, or put in the row's place.

    reason: what is wrong, without anything from the row itself, so that rows can be counted by reason
    detail: the reason with the place in the row and the value there; default: the reason alone
    """

    def __init__(self, reason: str, detail: str | None = None) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail or reason


class MalformedRows:
    """The malformed rows found so far.

    drop: leave them out; otherwise reading ends with an error
    setting: the setting with which the user drops them, for messages; None if there is none
    counts: number of rows, by reason
    examples: origin of the first row, by reason
    """

    def __init__(self, drop: bool = False, setting: str | None = None) -> None:
        self.drop, self.setting = drop, setting
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.first: list[str] = []

    @property
    def refused(self) -> bool:
        return bool(self.counts) and not self.drop

    def add(self, origin: str, flaw: MalformedRow) -> None:
        self.counts[flaw.reason] += 1
        self.examples.setdefault(flaw.reason, origin)
        if len(self.first) < LISTED:
            self.first.append(f"{origin}: {flaw.detail}")

    def refusal(self, sources: list[str], rows: int) -> UserError:
        """The error that lists the malformed rows. rows: number of rows read, including malformed ones."""
        count = self.counts.total()
        remedy = f", or leave malformed rows out with {self.setting}" if self.setting and rows > 1 else ""
        if count == 1:
            return UserError(f"{self.first[0]}; fix the row{remedy}")
        if count == rows and UNKNOWN_ROLE not in self.counts:  # a row with an unknown role has the right form
            remedy = (
                "; no row can be read, so the files may be of another form: a list of objects, or an object on each "
                "line, in UTF-8 (docs/data.md)"
            )
        heading = f"; the first {LISTED} are" if count > LISTED else ""
        return UserError(
            f"{', '.join(sources)}: {count:,} of {rows:,} rows read are malformed ({by_reason(self.counts)}){heading}",
            *self.first,
            f"fix them{remedy}",
        )


def by_reason(counts: Counter[str]) -> str:
    """The most frequent reasons, in one line."""
    top_reasons = counts.most_common(NAMED)
    return ", ".join([*(f"{count:,}: {reason}" for reason, count in top_reasons), *others(counts, top_reasons)])


def others(counts: Counter[str], top_reasons: list[tuple[str, int]]) -> list[str]:
    """At most one text: how many rows have other reasons than `top_reasons`. Empty if there are no such rows."""
    other_reasons, rows = len(counts) - len(top_reasons), counts.total() - sum(count for _, count in top_reasons)
    return [f"{rows:,} for {counted(other_reasons, 'other reason')}"] if other_reasons else []


def first_readable(
    rows: Iterable[tuple[str, Any]], parse: Callable[[str, Any], Row], limit: int | None
) -> Iterator[tuple[str, Row | MalformedRow]]:
    """Yield (origin, result) for each row. The result is what `parse` returns, or the Malformed that it raises.

    Ends after the `limit`-th readable row, or when there are no more rows.
    """
    readable = 0
    for origin, row in rows:
        try:
            result = parse(origin, row)
            readable += 1
        except MalformedRow as flaw:
            result = flaw
        yield origin, result
        if readable == limit:
            return


def file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (origin, row or Malformed) for each row of a file whose suffix is one of KINDS. Raises UserError if the
    file cannot be read or its rows cannot be separated."""
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
            begins_list = file.read(1000).lstrip().startswith("[")  # whatever its name says; a row is an object
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
        else:
            yield from _list_rows(path) if begins_list else _line_rows(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check its rights and its disk") from error


def _list_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Read a file that holds a list of rows, or a list on each line."""
    rows = _value(path.read_text(encoding="utf-8-sig", errors="surrogateescape"), lines=True)
    if isinstance(rows, list):
        yield from ((f"{path} row {number}", row) for number, row in enumerate(rows, 1))
    elif any(isinstance(row, list) for _, row in islice(_line_rows(path), 1)):
        yield from _line_rows(path)
    else:
        raise UserError(f"{path}: {rows.detail}, so its rows cannot be separated; fix the file")


def _line_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        number = 0
        while line := lines.readline(MOST_CHARACTERS):
            number += 1
            if len(line) == MOST_CHARACTERS and line[-1] != "\n":
                while (rest := lines.readline(MOST_CHARACTERS)) and rest[-1] != "\n":
                    pass
                yield f"{path}:{number}", MalformedRow(f"a line of {MOST_CHARACTERS:,} characters or more")
            elif line.strip():
                yield f"{path}:{number}", _value(line.rstrip())


def _value(text: str, lines: bool = False) -> Any:
    """Parse JSON. Returns the value, or Malformed if the text is not valid.

    text: has unpaired surrogates in place of bytes that are not UTF-8
    lines: whether the text may span several
    """
    try:
        if not text.isascii():
            text.encode()
        return parse_json(text)
    except UnicodeEncodeError as error:
        byte = f"byte 0x{ord(text[error.start]) & 0xFF:02x}"
        reason, flaw = "not UTF-8 text", json.JSONDecodeError(byte, text, error.start)
    except json.JSONDecodeError as error:
        reason, flaw = "not valid JSON", error
    where = f"line {flaw.lineno}, column {flaw.colno}" if lines else f"column {flaw.colno}"
    excerpt = shown(text[max(flaw.pos - flaw.colno + 1, flaw.pos - 20) : flaw.pos + 20].strip())
    return MalformedRow(reason, f"{reason} ({where}: {flaw.msg}, near {excerpt})")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    # Not read with `datasets`, because pyarrow makes no copy in a cache and lets each file keep its own columns.
    import pyarrow
    import pyarrow.parquet

    flaws = (pyarrow.ArrowException, ValueError, ArithmeticError)

    def rows_of(batch: pyarrow.RecordBatch) -> Iterator[Any]:
        try:
            return map(plain_row, batch.to_pylist())
        except flaws as error:
            if len(batch) == 1:
                return iter(
                    [MalformedRow("a value that cannot be read", f"a value that cannot be read ({error!s:.100})")]
                )
            return chain.from_iterable(rows_of(batch.slice(index, 1)) for index in range(len(batch)))

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = chain.from_iterable(map(rows_of, file.iter_batches(batch_size=1024)))
            for number, row in enumerate(rows, 1):
                yield f"{path} row {number}", row
    except (OSError, *flaws) as error:
        raise UserError(f"{path}: not a readable parquet file ({error!s:.200}); fix or convert it") from error


def plain_row(row: dict) -> dict | MalformedRow:
    """Remove the nulls from an Arrow row. Returns Malformed if the row is nested too deeply.

    Arrow gives each row every key that occurs in the column, and a template would treat the missing ones as present.
    """
    if is_too_deep(row):
        return MalformedRow(f"nested deeper than {DEEPEST} levels")
    return _without_nulls(row)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
