"""Read the rows of .json, .jsonl and .parquet files, each with its origin; a row that cannot be read is `MalformedRow`.

Malformed rows are counted by reason, and either listed in one error or left out.
"""

import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from eagle3.errors import UserError
from eagle3.parsing import DEEPEST, parse_json

KINDS = (".json", ".jsonl", ".parquet")
# Longest line: eight times the longest row that is tokenised, because JSON may escape its characters.
MOST_BYTES = 1 << 27
LISTED = 10  # malformed rows listed in an error; reasons for dropped rows listed in a log
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
    """The reasons in one line, the most frequent first."""
    return ", ".join(f"{count:,}: {reason}" for reason, count in counts.most_common())


def first_readable(
    rows: Iterable[tuple[str, Any]], parse: Callable[[str, Any], Row], limit: int | None
) -> Iterator[tuple[str, Row | MalformedRow]]:
    """Yield (origin, result) for each row. The result is what `parse` returns, or the MalformedRow that it raises.

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
    """Yield (origin, row or MalformedRow) for each row of a file whose suffix is one of KINDS. Raises UserError if the
    file cannot be read or its rows cannot be separated."""
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    try:
        with path.open("rb") as file:
            begins_list = file.read(1000).removeprefix(BOM_UTF8).lstrip().startswith(b"[")  # whatever its name says
            file.seek(0)
            if not begins_list:
                yield from _line_rows(path, file)
                return
            rows = _value(file.read())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check its rights and its disk") from error
    if isinstance(rows, MalformedRow):
        raise UserError(f"{path}: {rows.detail}, so its rows cannot be separated; fix the file")
    yield from ((f"{path} row {number}", row) for number, row in enumerate(rows, 1))


def _line_rows(path: Path, lines: BinaryIO) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(iter(lambda: lines.readline(MOST_BYTES), b""), 1):
        if len(line) == MOST_BYTES and not line.endswith(b"\n"):
            while (rest := lines.readline(MOST_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield f"{path}:{number}", MalformedRow(f"a line of {MOST_BYTES:,} bytes or more")
        elif text := line.removeprefix(BOM_UTF8).strip():
            yield f"{path}:{number}", _value(text)


def _value(text: bytes) -> Any:
    """Parse JSON. Returns the value, or MalformedRow if the text is not valid."""
    try:
        return parse_json(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return MalformedRow("not UTF-8 text", f"not UTF-8 text ({error})")
    except json.JSONDecodeError as error:
        return MalformedRow("not valid JSON", f"not valid JSON ({error})")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    # Not read with `datasets`, because pyarrow makes no copy in a cache and lets each file keep its own columns.
    import pyarrow
    import pyarrow.parquet

    flaws = (pyarrow.ArrowException, ValueError, ArithmeticError)

    def rows_of(batch: pyarrow.RecordBatch) -> list[Any]:
        try:
            return [*map(without_nulls, batch.to_pylist())]
        except flaws as error:
            if len(batch) == 1:
                return [MalformedRow("a value that cannot be read", f"a value that cannot be read ({error!s:.100})")]
            return [row for index in range(len(batch)) for row in rows_of(batch.slice(index, 1))]

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = chain.from_iterable(map(rows_of, file.iter_batches(batch_size=1024)))
            for number, row in enumerate(rows, 1):
                yield f"{path} row {number}", row
    except (OSError, *flaws) as error:
        raise UserError(f"{path}: not a readable parquet file ({error!s:.200}); fix or convert it") from error


def without_nulls(value: Any, depth: int = 0) -> Any:
    """An Arrow row without its nulls: Arrow gives each row every key that occurs in the column, and a template would
    treat the missing ones as present. Raises ValueError if the row is nested too deeply."""
    if depth > DEEPEST:
        raise ValueError(f"a row is nested deeper than {DEEPEST} levels")
    if isinstance(value, dict):
        return {key: without_nulls(item, depth + 1) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item, depth + 1) for item in value]
    return value
