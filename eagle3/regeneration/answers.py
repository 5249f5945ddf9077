"""The file that answers are appended to. It survives a kill, and has one writer and one set of settings."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from eagle3.durable import lock, write_text, writing
from eagle3.errors import UserError, refuse
from eagle3.parsing import parse_json, read_json_object
from eagle3.regeneration.endpoint import LeftOut
from eagle3.regeneration.turns import Work

SYNC_SECONDS = 5.0


class AnswerFile(AbstractContextManager):
    """An answer file: rows in `path`, and a folder `path`.record with settings.json, left_out.jsonl and summary.json.

    The folder's name keeps its files from being read as data if someone names the whole parent folder. Each row is
    handed to the system immediately, so that a killed process loses none, and forced to disk every few seconds.

    done: why a conversation gave no row, by id; None if it gave one
    answered: number of rows

    Raises UserError if another process is writing, or if the file was made with other settings or holds something else.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        refuse(
            f"--out: {path}",
            (path.suffix != ".jsonl", "has to end in .jsonl to be read as data; rename it"),
            (path.is_dir(), "is a folder; name a file in it"),
            (not path.parent.is_dir(), f"there is no folder {path.parent}; create it, or fix the path"),
        )
        self.path, self.record = path, path.with_name(path.name + ".record")
        settings_path = self.record / "settings.json"
        with ExitStack() as stack:
            self.rows = stack.enter_context(_open(path))
            unknown = self.rows.seek(0, os.SEEK_END) and not settings_path.exists()
            refuse(
                f"--out: {path}",
                (lock(self.rows) == "taken", "another process writes it; wait for it, or name another file"),
                (unknown, f"has rows, but no {settings_path} says how they came; name another file"),
            )
            self.other = stack.enter_context(_open(self.record / "left_out.jsonl"))
            left_out = _rows(self.other, Path(self.other.name), "id", "reason", "detail")
            self.done: dict[str, LeftOut | None] = {name: LeftOut(*reason) for name, *reason in left_out}
            self.done |= {name: None for [name] in _rows(self.rows, path, "id")}
            self.answered = sum(reason is None for reason in self.done.values())
            if self.done:
                self._require(settings_path, settings)
            self.write_record("settings.json", settings)
            self.files = stack.pop_all()
        self.synced = time.monotonic()

    def _require(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Raises UserError unless the file was made with these settings, which are in `path`."""
        remedy = "restore it, or name another --out"
        previous = read_json_object(path, remedy, remedy)
        for name in sorted({*previous, *settings}):
            before, now = (
                "not set" if each.get(name) is None else json.dumps(each[name], ensure_ascii=False)
                for each in (previous, settings)
            )
            if before != now:
                raise UserError(
                    f"--out: {self.path}: was made with {name} {before}, but now it is {now}; use the former again, or "
                    "name another file"
                )

    def add(self, row: dict) -> None:
        _append(self.rows, row)
        self.done[row["id"]] = None
        self.answered += 1
        if time.monotonic() - self.synced > SYNC_SECONDS:
            self.sync()

    def leave_out(self, work: Work, reason: LeftOut) -> None:
        _append(self.other, {"id": work.id, "origin": work.origin, "reason": reason.reason, "detail": reason.detail})
        self.done[work.id] = reason

    def write_record(self, name: str, value: Mapping[str, Any]) -> Path:
        """Write settings.json or summary.json, and return its path."""
        path = self.record / name
        write_text(path, json.dumps(dict(value), indent=1, ensure_ascii=False) + "\n")
        return path

    def sync(self) -> None:
        for file in (self.rows, self.other):
            os.fsync(file.fileno())
        self.synced = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.sync()
        self.files.close()


def _open(path: Path) -> BinaryIO:
    """Open for reading and appending."""
    with writing(path, "free space, or name another file with --out"):
        path.parent.mkdir(exist_ok=True)
        return path.open("a+b")


def _append(file: BinaryIO, row: dict) -> None:
    file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    file.flush()


def _rows(file: BinaryIO, path: Path, *keys: str) -> Iterator[list[str]]:
    """Yield the values of these keys in each row. Then cut off a last line that a kill left incomplete."""
    file.seek(0)
    end = 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            break
        end += len(line)
        try:
            row = parse_json(line)
            yield [row[key] for key in keys]
        except (ValueError, TypeError, LookupError) as error:
            raise UserError(
                f"{path}:{number}: is not a row of regenerate.py; fix the line or name another --out"
            ) from error
    file.truncate(end)
