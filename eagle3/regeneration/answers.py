"""The file that answers are appended to, row by row: whole after a kill, of one writer, of one set of settings."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from eagle3.durable import write_text
from eagle3.errors import UserError
from eagle3.parsing import parse_json
from eagle3.regeneration.turns import LeftOut, Plan
from eagle3.states.store.shard import hold

SYNC_SECONDS = 5.0


class AnswerFile(AbstractContextManager):
    """`path` (rows) and the folder `path`.record: settings.json, left_out.jsonl and summary.json. The folder's name keeps
    them from being read as data where a whole folder is.

    A row is given to the system at once, so that a killed process loses none, and forced to the disk every few seconds.
    answered: ids of the rows; left_out: id -> why it gave no row. Raises UserError where another process
    writes, where the file was made with other settings, and where it holds something else.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        _require_writable(path)
        self.path, self.record = path, path.with_name(path.name + ".record")
        made = self.record / "settings.json"
        with ExitStack() as opened:
            self.rows = opened.enter_context(_open(path, "written"))
            if not hold(self.rows):
                raise UserError(f"--out: {path}: another process writes it; wait for it, or name another file")
            if self.rows.seek(0, os.SEEK_END) and not made.exists():
                raise UserError(f"--out: {path}: has rows, but no {made} says how they came; name another file")
            self.other = opened.enter_context(_open(self.record / "left_out.jsonl", "made"))
            found = _rows(self.other, Path(self.other.name), "id", "reason", "detail")
            self.left_out = {name: LeftOut(reason, detail) for name, reason, detail in found}
            self.answered = {name for [name] in _rows(self.rows, path, "id")}
            if self.answered or self.left_out:
                self._require(settings)
            self._write("settings.json", settings)
            self.files = opened.pop_all()
        self.synced = time.monotonic()

    def _require(self, settings: Mapping[str, Any]) -> None:
        """UserError unless the file was made with these settings."""
        path = self.record / "settings.json"
        try:
            before = dict(parse_json(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path}: cannot be read ({error}); restore it, or name another --out") from error
        for name in sorted({*before, *settings}):
            if before.get(name) != settings.get(name):
                raise UserError(
                    f"--out: {self.path}: was made with {name} {_shown(before.get(name))}, now it is "
                    f"{_shown(settings.get(name))}; give that again, or name another file"
                )

    def add(self, row: dict) -> None:
        _append(self.rows, row)
        self.answered.add(row["id"])
        if time.monotonic() - self.synced > SYNC_SECONDS:
            self.sync()

    def leave_out(self, plan: Plan, reason: LeftOut) -> None:
        _append(self.other, {"id": plan.id, "origin": plan.origin, "reason": reason.reason, "detail": reason.detail})
        self.left_out[plan.id] = reason

    def summarise(self, summary: Mapping[str, Any]) -> Path:
        """Write summary.json; its path."""
        return self._write("summary.json", summary)

    def _write(self, name: str, value: Mapping[str, Any]) -> Path:
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


def _require_writable(path: Path) -> None:
    for wrong, what in (
        (path.suffix != ".jsonl", "has to end in .jsonl, by which it is read as data; rename it"),
        (path.is_dir(), "is a folder; name a file in it"),
        (not path.parent.is_dir(), f"there is no folder {path.parent}; make it, or mend the path"),
    ):
        if wrong:
            raise UserError(f"--out: {path}: {what}")


def _open(path: Path, done: str) -> BinaryIO:
    """To read and to append."""
    try:
        path.parent.mkdir(exist_ok=True)
        return path.open("a+b")
    except OSError as error:
        raise UserError(f"--out: {error.filename}: cannot be {done} ({error.strerror}); name another file") from error


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)


def _append(file: BinaryIO, row: dict) -> None:
    file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    file.flush()


def _rows(file: BinaryIO, path: Path, *keys: str) -> Iterator[list[str]]:
    """What stands under these keys in each row; a last line that a kill tore is then cut off."""
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
                f"{path}:{number}: is no row of regenerate.py; mend the line or name another --out"
            ) from error
    file.truncate(end)
