"""Datasets named by id or by a preset's short name (presets.yaml): where they are, and how rows become conversations.

Only the rows that are needed are streamed, and a copy on disk ensures that they are downloaded only once.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

import yaml

from eagle3.console import Say, waiting
from eagle3.errors import UserError
from eagle3.hub import require_hub
from eagle3.text.cache import found, replacing_folder
from eagle3.text.rows import MalformedRow, Row, first_readable, without_nulls

# owner/name, or the bare name of an early hub dataset; optionally followed by a split and a revision.
DATASET = re.compile(r"(?P<id>[\w-][\w.-]*(/[\w-][\w.-]*)?)(:(?P<split>\w+))?(@(?P<revision>[\w./-]+))?")
PRESET = re.compile(r"preset:(?P<name>[^:@]*)(?P<held_out>:held_out)?(@(?P<revision>.+))?")
ROWS = "rows.jsonl"  # of a copy: [origin, row]
HOLDS_ROW = ("messages", "conversations", "text", "instruction")  # a row has one of these
READ = (*HOLDS_ROW, "input", "output", "history", "system", "tools")  # the columns read from a row


@dataclass(frozen=True)
class Dataset:
    """Rows of one split of a dataset, as presets.yaml or an id describes it, and how they become those that
    conversations.py reads."""

    source: str  # as the user named it
    path: str  # hub id, folder, or a reader of the library ("json", "parquet")
    split: str = "train"
    held_out: str | None = None  # name of the held-out split
    revision: str | None = None
    config: str | None = None
    files: tuple[str, ...] = ()  # () for those that the dataset itself names
    # Either the column with whole conversations, in OpenAI's or ShareGPT's form:
    chat: str | None = None
    # or, for single questions, the columns of the question (those with text, joined by blank lines) and of the answer;
    # if there is neither, rows have one of the forms already.
    questions: tuple[str, ...] = ()
    answer: str | None = None

    @property
    def columns(self) -> str:
        """What is read of a row, in words."""
        question = f"{' + '.join(self.questions)} → {self.answer}"
        return self.chat or (question if self.answer else ", ".join(READ))

    def convert(self, row: dict) -> dict | None:
        """A row in a form that conversations.py reads, without other columns, which may hold values that JSON cannot
        represent. Returns None if a question, an answer or a message's text is missing, or if a message is not an
        object."""
        if self.chat:
            messages = row.get(self.chat)
            whole = isinstance(messages, list) and all(
                isinstance(message, dict) and message.get("content", message.get("value")) is not None
                for message in messages
            )
            return {self.chat: messages} if messages and whole else None
        if self.answer:
            question = "\n\n".join(row[column] for column in self.questions if row.get(column))
            turns = {"user": question, "assistant": row.get(self.answer)}
            messages = [{"role": role, "content": content} for role, content in turns.items() if content]
            return {"messages": messages} if len(messages) == 2 else None
        if not any(column in row for column in HOLDS_ROW):
            return dict.fromkeys(row)  # its column names, for the error message
        return {column: row[column] for column in READ if column in row}

    def copy(self, folder: Path, limit: int | None) -> Path:
        """The folder for the local copy of the first `limit` rows, or of all rows."""
        parts = [self.source, self.path, self.config, self.split, self.files, self.revision, self.columns, limit]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return folder / f"{re.sub(r'[^a-zA-Z0-9]+', '-', self.source)}-{digest[:16]}"


@cache
def presets() -> dict[str, Dataset]:
    """All presets by name."""
    facts = yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8"))
    return {name: Dataset(f"preset:{name}", **fields) for name, fields in facts.items()}


def dataset_named(source: str) -> Dataset | None:
    """The dataset of `owner/name`, `owner/name:split`, `owner/name@revision` or `owner/name:split@revision`, or of
    `preset:NAME` or `preset:NAME:held_out`, each optionally with `@REVISION`; None for a text that is no dataset id.
    Raises UserError for an unknown preset."""
    if not source.startswith("preset:"):
        parts = DATASET.fullmatch(source)
        return parts and Dataset(source, parts["id"], parts["split"] or "train", revision=parts["revision"])
    parts = PRESET.fullmatch(source)
    preset = presets().get(parts["name"]) if parts else None
    if preset is None:
        raise UserError(
            f"{source}: no such preset; write preset:NAME, preset:NAME:held_out or ...@revision, with one of the names "
            f"{', '.join(sorted(presets()))}"
        )
    split = preset.held_out if parts["held_out"] else preset.split
    if split is None:
        raise UserError(
            f"{source}: this set has no held-out split; leave data.held_out out, and data.held_out_fraction is held out"
        )
    return replace(preset, source=source, split=split, revision=parts["revision"])


def downloaded_rows(
    dataset: Dataset,
    limit: int | None,
    folder: Path | None,
    report: Say,
    parse: Callable[[str, Any], Row],
) -> Iterator[tuple[str, Row | MalformedRow]]:
    """Yield (origin, result of `parse`) for the rows that the dataset's `convert` keeps, up to the `limit`-th readable
    one, or for all if `limit` is None.

    Rows come from a copy in `folder` if an earlier call for the same number of rows, or for all rows, has written one,
    and it is intact. Otherwise they are streamed, and a copy is published once all have arrived. Every process and run
    therefore sees the dataset as it was when it was first read.

    folder: None for no copy
    report: gets a line when a copy is used, and a warning if one is not intact

    Raises UserError if rows cannot be loaded or copied.
    """
    if folder is None:
        yield from first_readable(_converted(dataset, report), parse, limit)
        return
    copies = [dataset.copy(folder, count) for count in dict.fromkeys((limit, None))]
    copy = next((copy for copy in copies if found(copy, f"{dataset.source}: the copy", report)), None)
    if copy is None:
        with replacing_folder(copies[0]) as unfinished, (unfinished / ROWS).open("w", encoding="utf-8") as lines:
            yield from first_readable(_written(_converted(dataset, report), lines), parse, limit)
        return
    report(f"{dataset.source}: read from {copy}; delete it to download the rows anew")
    with (copy / ROWS).open(encoding="utf-8") as lines:
        yield from first_readable(map(json.loads, lines), parse, limit)


def _written(rows: Iterable[tuple[str, Any]], lines: TextIO) -> Iterator[tuple[str, Any]]:
    for origin, row in rows:
        try:
            lines.write(json.dumps([origin, row]) + "\n")
        except TypeError as error:
            raise UserError(f"{origin}: {error}; make it text, or take it out") from error
        yield origin, row


def _converted(dataset: Dataset, report: Say) -> Iterator[tuple[str, Any]]:
    """Yield (origin, converted row), numbered from 1 as in the dataset. Reports how many rows were left out."""
    left_out = 0
    try:
        for number, row in enumerate(_streamed(dataset, report), 1):
            try:
                whole = without_nulls(row)
            except ValueError as error:  # nested too deep; a text in its place is malformed, too
                conversation = str(error)
            else:
                conversation = dataset.convert(whole)
            if conversation is None:
                left_out += 1
            else:
                yield f"{dataset.source} row {number}", conversation
    finally:  # also if the caller wants no more rows
        if left_out:
            report(f"{dataset.source}: {left_out:,} rows without a question or an answer are left out")


def _streamed(dataset: Dataset, report: Say) -> Iterator[dict]:
    # Imported here because importing them takes a second, and most data comes from files.
    from datasets import disable_progress_bars, load_dataset
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HTTPError  # that of the HTTP library that this version uses

    disable_progress_bars()  # they garble logs, and the reader of the rows shows its own progress
    try:
        if "/" in dataset.path and not Path(dataset.path).is_dir():
            require_hub()
        with waiting(report, f"{dataset.source}: opening it"):
            rows = iter(
                load_dataset(
                    dataset.path,
                    dataset.config,
                    split=dataset.split,
                    data_files={dataset.split: list(dataset.files)} if dataset.files else None,
                    revision=dataset.revision,
                    streaming=True,
                )
            )
            first_rows = list(islice(rows, 1))
        yield from chain(first_rows, rows)
    # Not retried, because the library has already done so for minutes. ValueError: an unknown name or split.
    except (OSError, ValueError, RuntimeError, DatasetsError, HTTPError) as error:
        hint = "" if dataset.source.startswith("preset:") else "no file or folder here, and as a dataset id it "
        raise UserError(
            f"{dataset.source}: {hint}cannot be read ({type(error).__name__}: {error}); fix the name or the network, "
            f"or download the files of huggingface.co/datasets/{dataset.path} by hand and name those"
        ) from error
