"""Reads rows of datasets as a stream, no more of them than wanted, and keeps them, so that they travel once."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from eagle3.console import waiting
from eagle3.durable import publish
from eagle3.errors import UserError, shown
from eagle3.hub import require_hub
from eagle3.parsing import DEEPEST, is_too_deep, parse_json
from eagle3.text.cache import beside
from eagle3.text.malformed import Malformed, Row, first_readable

# owner/name, or a name of the hub's early days; then perhaps a split and a revision.
DATASET = re.compile(r"(?P<id>[\w-][\w.-]*(/[\w-][\w.-]*)?)(:(?P<split>\w+))?(@(?P<revision>[\w./-]+))?")
HOLDS_ROW = ("messages", "conversations", "text")  # one of which a row has
READ = (*HOLDS_ROW, "system", "tools")  # of a row


@dataclass(frozen=True)
class DatasetSource:
    """Rows of one split of a dataset.

    source: as the user named it. dataset: hub id, folder, or the library's own reader ("json", "parquet"). config, split,
    files, revision: as of `datasets.load_dataset`; files () for those that the dataset itself names. convert: a row in one of
    the forms that conversations have, None for a row to leave out. columns: what convert takes, in words; rows that were
    copied by another rule are not read.
    """

    source: str
    dataset: str
    convert: Callable[[dict], dict | None]
    columns: str
    split: str = "train"
    config: str | None = None
    files: tuple[str, ...] = ()
    revision: str | None = None

    def copy(self, folder: Path, wanted: int | None) -> Path:
        """Where these rows are kept."""
        parts = [self.source, self.dataset, self.config, self.split, self.files, self.revision, self.columns, wanted]
        key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        return folder / f"{re.sub(r'[^a-zA-Z0-9]+', '-', self.source)}-{key}.jsonl"


def is_dataset(source: str) -> bool:
    """Whether the source has the form of a dataset id."""
    return DATASET.fullmatch(source) is not None


def is_slice(source: str) -> bool:
    """Whether it is a dataset id with a slice, as `datasets` writes it: `owner/name:train[:10]`."""
    before, bracket, slice_ = source.partition("[")
    return bool(bracket) and ":" in source and "]" in slice_ and is_dataset(before)


def source_of_id(source: str) -> DatasetSource:
    """Of `owner/name`, `owner/name:split`, `owner/name@revision` or `owner/name:split@revision`."""
    parts = DATASET.fullmatch(source)
    assert parts, source
    return DatasetSource(
        source,
        parts["id"],
        split=parts["split"] or "train",
        revision=parts["revision"],
        convert=read_columns,
        columns=", ".join(READ),
    )


def read_columns(row: dict) -> dict:
    """The columns that conversations read: others may hold what JSON does not have. Of a row without a conversation the
    names alone, for the error that tells them."""
    if not any(column in row for column in HOLDS_ROW):
        return dict.fromkeys(row)
    return {column: row[column] for column in READ if column in row}


def downloaded_rows(
    source: DatasetSource,
    wanted: int | None,
    folder: Path | None,
    report: Callable[[str], None],
    read: Callable[[str, Any], Row],
) -> Iterator[tuple[str, Row | Malformed]]:
    """(origin, what `read` makes of origin and row) of the rows that the source's `convert` lets through, up to the `wanted`-th
    that can be read, or all.

    They are taken from the copy in `folder` that an earlier call made of so many, or of all, else streamed, and copied once
    all have come. So a set is what it was when first read, on every process and in every run; report: told of the copy.
    folder None: no copy. Raises UserError for what cannot be loaded, or copied.
    """
    if folder is None:
        yield from first_readable(_converted(source, report), read, wanted)
        return
    copy, whole = source.copy(folder, wanted), source.copy(folder, None)
    kept = next((path for path in (copy, whole) if path.is_file()), None)
    if kept:
        report(f"{source.source}: read from {kept}; delete it to download the rows anew")
        yield from first_readable(_copied(kept), read, wanted)
        return
    with beside(copy) as temporary:
        partial = temporary / copy.name
        with partial.open("w", encoding="utf-8") as lines:
            yield from first_readable(_written(_converted(source, report), lines), read, wanted)
        publish(partial, copy)


def _written(rows: Iterable[tuple[str, Any]], lines: TextIO) -> Iterator[tuple[str, Any]]:
    for origin, row in rows:
        lines.write(_line(origin, row))
        yield origin, row


def _copied(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                origin, row, *flaw = parse_json(line)
                row = Malformed(*flaw) if flaw else row
            except (ValueError, TypeError) as error:
                raise UserError(
                    f"{path}:{number}: damaged ({shown(line)}); delete it to download the rows anew"
                ) from error
            yield origin, row


def _line(origin: str, row: dict | Malformed) -> str:
    if isinstance(row, Malformed):  # it may be too deep to be written
        return json.dumps([origin, None, row.reason, row.detail]) + "\n"
    try:
        return json.dumps([origin, row]) + "\n"
    except TypeError:
        for column, value in row.items():
            try:
                json.dumps(value)
            except TypeError as error:
                raise UserError(f"{origin}: column {column}: {error}; make it text, or take it out") from error
        raise


def _converted(source: DatasetSource, report: Callable[[str], None]) -> Iterator[tuple[str, Any]]:
    """Numbered from 1 as they stand in the dataset; those left out are counted."""
    left_out = 0
    try:
        for number, row in enumerate(_streamed(source, report), 1):
            plain = plain_row(row)
            converted = plain if isinstance(plain, Malformed) else source.convert(plain)
            if converted is None:
                left_out += 1
            else:
                yield f"{source.source} row {number}", converted
    finally:  # also where no more are wanted
        if left_out:
            report(f"{source.source}: {left_out:,} rows without a question or an answer are left out")


def _streamed(source: DatasetSource, report: Callable[[str], None]) -> Iterator[dict]:
    # Here, because they take a second to import and most data are files.
    from datasets import disable_progress_bars, load_dataset
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HTTPError  # of whichever HTTP library this version has

    disable_progress_bars()  # they garble a log; the rows are counted where they are read
    try:
        if "/" in source.dataset and not Path(source.dataset).is_dir():
            require_hub()
        with waiting(report, f"{source.source}: opening it"):
            rows = iter(
                load_dataset(
                    source.dataset,
                    source.config,
                    split=source.split,
                    data_files={source.split: list(source.files)} if source.files else None,
                    revision=source.revision,
                    streaming=True,
                )
            )
            first = list(islice(rows, 1))
        yield from chain(first, rows)
    # The library has tried again by itself, for minutes, where trying again can help. ValueError: unknown names and splits.
    except (OSError, ValueError, RuntimeError, DatasetsError, HTTPError) as error:
        absent = "" if source.source.startswith("preset:") else "no file or folder here, and as a dataset id it "
        raise UserError(
            f"{source.source}: {absent}cannot be read ({type(error).__name__}: {error}); mend the name or the network, or "
            f"download the files of huggingface.co/datasets/{source.dataset} by hand and name those"
        ) from error


def plain_row(row: dict) -> dict | Malformed:
    """A row of Arrow's without the nulls: it gives every row every key of the column, and a template would see them as
    present. Malformed where it is nested too deep."""
    if is_too_deep(row):
        return Malformed(f"nested deeper than {DEEPEST} levels")
    return _without_nulls(row)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
