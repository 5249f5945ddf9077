"""Datasets named by id or by a preset's short name (presets.yaml): where they are, and how rows become conversations.

Only the rows that are needed are streamed, and a copy on disk ensures that they are downloaded only once.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

import yaml
from pydantic import TypeAdapter

from eagle3.console import waiting
from eagle3.errors import UserError
from eagle3.hub import require_hub
from eagle3.parsing import parse_json
from eagle3.text.cache import found, replacing_folder
from eagle3.text.rows import MalformedRow, Row, first_readable, plain_row

# owner/name, or the bare name of an early hub dataset; optionally followed by a split and a revision.
DATASET = re.compile(r"(?P<id>[\w-][\w.-]*(/[\w-][\w.-]*)?)(:(?P<split>\w+))?(@(?P<revision>[\w./-]+))?")
# The same with a slice in the notation of the `datasets` library: `owner/name:train[:10]`.
SLICE = re.compile(DATASET.pattern + r"\[.*\].*")
PRESET = re.compile(r"preset:[^:@]*(?P<held_out>:held_out)?(@(?P<revision>.+))?")
ROWS = "rows.jsonl"  # of a copy: [origin, row], or [origin, null, reason, detail] of a malformed row
HOLDS_ROW = ("messages", "conversations", "text", "instruction")  # a row has one of these
READ = (*HOLDS_ROW, "input", "output", "history", "system", "tools")  # the columns read from a row


@dataclass(frozen=True)
class DatasetSource:
    """Rows of one split of a dataset."""

    source: str  # as the user named it
    dataset: str  # hub id, folder, or a reader of the library ("json", "parquet")
    convert: Callable[[dict], dict | None]  # to a form that conversations.py reads; None leaves the row out
    columns: str  # what `convert` reads, in words; a copy of other columns is not reused
    # As in `datasets.load_dataset`:
    split: str = "train"
    config: str | None = None
    files: tuple[str, ...] = ()  # () for those that the dataset itself names
    revision: str | None = None

    def copy(self, folder: Path, limit: int | None) -> Path:
        """The folder for the local copy of the first `limit` rows, or of all rows."""
        parts = [self.source, self.dataset, self.config, self.split, self.files, self.revision, self.columns, limit]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return folder / f"{re.sub(r'[^a-zA-Z0-9]+', '-', self.source)}-{digest[:16]}"


def source_of_id(source: str) -> DatasetSource | None:
    """The source named by `owner/name`, `owner/name:split`, `owner/name@revision` or `owner/name:split@revision`; None
    for a text that is no dataset id."""
    parts = DATASET.fullmatch(source)
    return parts and DatasetSource(
        source,
        parts["id"],
        split=parts["split"] or "train",
        revision=parts["revision"],
        convert=read_columns,
        columns=", ".join(READ),
    )


def read_columns(row: dict) -> dict:
    """Keep only the columns that conversations need, since others may hold values that JSON cannot represent. A row
    without a conversation keeps only its column names, for the error message."""
    if not any(column in row for column in HOLDS_ROW):
        return dict.fromkeys(row)
    return {column: row[column] for column in READ if column in row}


def downloaded_rows(
    source: DatasetSource,
    limit: int | None,
    folder: Path | None,
    report: Callable[[str], None],
    parse: Callable[[str, Any], Row],
) -> Iterator[tuple[str, Row | MalformedRow]]:
    """Yield (origin, result of `parse`) for the rows that the source's `convert` keeps, up to the `limit`-th readable
    one, or for all if `limit` is None.

    Rows come from a copy in `folder` if an earlier call for the same number of rows, or for all rows, has written one,
    and it is intact. Otherwise they are streamed, and a copy is published once all have arrived. Every process and run
    therefore sees the dataset as it was when it was first read.

    folder: None for no copy
    report: gets a line when a copy is used, and a warning if one is not intact

    Raises UserError if rows cannot be loaded or copied.
    """
    if folder is None:
        yield from first_readable(_converted(source, report), parse, limit)
        return
    copies = [source.copy(folder, count) for count in dict.fromkeys((limit, None))]
    copy = next((copy for copy in copies if found(copy, f"{source.source}: the copy", report)), None)
    if copy is None:
        with replacing_folder(copies[0]) as unfinished, (unfinished / ROWS).open("w", encoding="utf-8") as lines:
            yield from first_readable(_written(_converted(source, report), lines), parse, limit)
        return
    report(f"{source.source}: read from {copy}; delete it to download the rows anew")
    with (copy / ROWS).open(encoding="utf-8") as lines:
        copied = ((origin, MalformedRow(*flaw) if flaw else row) for origin, row, *flaw in map(parse_json, lines))
        yield from first_readable(copied, parse, limit)


def _written(rows: Iterable[tuple[str, Any]], lines: TextIO) -> Iterator[tuple[str, Any]]:
    for origin, row in rows:
        lines.write(_line(origin, row))
        yield origin, row


def _line(origin: str, row: dict | MalformedRow) -> str:
    if isinstance(row, MalformedRow):  # the row may be nested too deeply for JSON
        return json.dumps([origin, None, row.reason, row.detail]) + "\n"
    for column, value in row.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise UserError(f"{origin}: column {column}: {error}; make it text, or take it out") from error
    return json.dumps([origin, row]) + "\n"


def _converted(source: DatasetSource, report: Callable[[str], None]) -> Iterator[tuple[str, Any]]:
    """Yield (origin, converted row), numbered from 1 as in the dataset. Reports how many rows were left out."""
    left_out = 0
    try:
        for number, row in enumerate(_streamed(source, report), 1):
            plain = plain_row(row)
            conversation = plain if isinstance(plain, MalformedRow) else source.convert(plain)
            if conversation is None:
                left_out += 1
            else:
                yield f"{source.source} row {number}", conversation
    finally:  # also if the caller wants no more rows
        if left_out:
            report(f"{source.source}: {left_out:,} rows without a question or an answer are left out")


def _streamed(source: DatasetSource, report: Callable[[str], None]) -> Iterator[dict]:
    # Imported here because importing them takes a second, and most data comes from files.
    from datasets import disable_progress_bars, load_dataset
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HTTPError  # that of the HTTP library that this version uses

    disable_progress_bars()  # they garble logs, and the reader of the rows shows its own progress
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
            first_rows = list(islice(rows, 1))
        yield from chain(first_rows, rows)
    # Not retried, because the library has already done so for minutes. ValueError: an unknown name or split.
    except (OSError, ValueError, RuntimeError, DatasetsError, HTTPError) as error:
        hint = "" if source.source.startswith("preset:") else "no file or folder here, and as a dataset id it "
        raise UserError(
            f"{source.source}: {hint}cannot be read ({type(error).__name__}: {error}); fix the name or the network, "
            f"or download the files of huggingface.co/datasets/{source.dataset} by hand and name those"
        ) from error


# Presets -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset:
    """A hub dataset with a short name."""

    dataset: str
    licence: str  # as the dataset's page states it
    note: str
    size: str  # number of conversations in `train`
    train: str = "train"  # name of the split
    held_out: str | None = None  # name of the split
    config: str | None = None
    files: tuple[str, ...] = ()
    # Either the column with whole conversations, in OpenAI's or ShareGPT's form:
    chat: str | None = None
    # or, for single questions, the columns of the question (those with text, joined by blank lines) and of the answer:
    questions: tuple[str, ...] = ()
    answer: str = ""
    unverified: str = ""  # which of these facts no public source confirms

    @property
    def columns(self) -> str:
        return self.chat or f"{' + '.join(self.questions)} → {self.answer}"


@cache
def presets() -> dict[str, Preset]:
    """All presets by name."""
    return TypeAdapter(dict[str, Preset]).validate_python(
        yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8"))
    )


def preset_source(source: str) -> DatasetSource:
    """The source named by `preset:NAME` or `preset:NAME:held_out`, each optionally with `@REVISION`. Raises UserError
    for an unknown name or part."""
    known_presets, name = presets(), re.split("[:@]", source)[1]
    if name not in known_presets:
        suggestion = difflib.get_close_matches(name, known_presets, n=1, cutoff=0.0)[0]
        raise UserError(
            f"{source}: there is no preset of that name; did you mean preset:{suggestion}? There are "
            f"{', '.join(sorted(known_presets))}"
        )
    preset, parts = known_presets[name], PRESET.fullmatch(source)
    if parts is None:
        raise UserError(
            f"{source}: not the form of a preset; write preset:{name}, preset:{name}:held_out or ...@revision"
        )
    if parts["held_out"] and preset.held_out is None:
        raise UserError(
            f"{source}: this set has no held-out split; leave data.held_out out, and data.held_out_fraction is held out"
        )
    return DatasetSource(
        source,
        preset.dataset,
        split=preset.held_out if parts["held_out"] else preset.train,
        config=preset.config,
        files=preset.files,
        revision=parts["revision"],
        convert=partial(as_conversation, preset),
        columns=preset.columns,
    )


def as_conversation(preset: Preset, row: dict) -> dict | None:
    """Convert a row of the dataset to a form that conversations.py reads, without other columns. Returns None if a
    question, an answer or a message's text is missing, or if a message is not an object."""
    if preset.chat:
        messages = row.get(preset.chat)
        whole = isinstance(messages, list) and all(
            isinstance(message, dict) and message.get("content", message.get("value")) is not None
            for message in messages
        )
        return {preset.chat: messages} if messages and whole else None
    question = "\n\n".join(row[column] for column in preset.questions if row.get(column))
    answer = row.get(preset.answer)
    if not question or not answer:
        return None
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
