"""The file that answers are appended to, row by row: whole after a kill, of one writer, of one set of settings."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from eagle3.durable import write_text
from eagle3.errors import UserError
from eagle3.parsing import parse_json
from eagle3.states.store.shard import hold

SYNC_SECONDS = 5.0


class AnswerFile:
    """`path` (rows) and the folder `path`.record: settings.json, left_out.jsonl and summary.json. The folder's name keeps
    them from being read as data where a whole folder is.

    A row is given to the system at once, so that a killed process loses none, and forced to the disk every few seconds.
    answered: ids of the rows; left_out: id -> (reason, detail) of what gave no row. Raises UserError where another process
    writes, where the file was made with other settings, and where it holds something else.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        _require_writable(path)
        self.path, self.record = path, path.with_name(path.name + ".record")
        try:
            self.rows = path.open("a+b")
        except OSError as error:
            raise UserError(f"--out: {path}: cannot be written ({error.strerror}); name another file") from error
        try:
            self._open(dict(settings))
        except BaseException:
            self.rows.close()
            raise
        self.synced = time.monotonic()

    def _open(self, settings: dict[str, Any]) -> None:
        if not hold(self.rows):
            raise UserError(f"--out: {self.path}: another process writes it; wait for it, or name another file")
        path = self.record / "settings.json"
        if self.rows.seek(0, os.SEEK_END) and not path.exists():
            raise UserError(f"--out: {self.path}: has rows, but no {path} says how they came; name another file")
        try:
            self.record.mkdir(exist_ok=True)
            other = (self.record / "left_out.jsonl").open("a+b")
        except OSError as error:
            raise UserError(f"--out: {error.filename}: cannot be made ({error.strerror}); name another file") from error
        with other:
            self.left_out = dict(_rows(other, Path(other.name), _left_out))
            self.answered = {name for name, _ in _rows(self.rows, self.path, _answered)}
            if self.answered or self.left_out:
                self._require(settings)
            write_text(path, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")
        self.other = (self.record / "left_out.jsonl").open("ab")

    def _require(self, settings: dict[str, Any]) -> None:
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

    def leave_out(self, name: str, origin: str, reason: str, detail: str) -> None:
        _append(self.other, {"id": name, "origin": origin, "reason": reason, "detail": detail})
        self.left_out[name] = (reason, detail)

    def summarise(self, summary: Mapping[str, Any]) -> Path:
        """Write summary.json; its path."""
        path = self.record / "summary.json"
        write_text(path, json.dumps(dict(summary), indent=1, ensure_ascii=False) + "\n")
        return path

    def sync(self) -> None:
        for file in (self.rows, self.other):
            os.fsync(file.fileno())
        self.synced = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sync()
        self.other.close()
        self.rows.close()


def _require_writable(path: Path) -> None:
    if path.suffix != ".jsonl":
        raise UserError(f"--out: {path}: has to end in .jsonl, by which it is read as data; rename it")
    if path.is_dir():
        raise UserError(f"--out: {path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise UserError(f"--out: {path}: there is no folder {path.parent}; make it, or mend the path")


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)


def _append(file: BinaryIO, row: dict) -> None:
    file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    file.flush()


def _rows(file: BinaryIO, path: Path, read: Callable[[dict], tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """What `read` makes of each row; a last line that a kill tore is then cut off."""
    file.seek(0)
    end = 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            break
        end += len(line)
        try:
            yield read(parse_json(line))
        except (ValueError, TypeError, LookupError) as error:
            raise UserError(
                f"{path}:{number}: is no row of regenerate.py; mend the line or name another --out"
            ) from error
    file.truncate(end)


def _answered(row: dict) -> tuple[str, None]:
    return row["id"], None


def _left_out(row: dict) -> tuple[str, tuple[str, str]]:
    return row["id"], (row["reason"], row["detail"])
