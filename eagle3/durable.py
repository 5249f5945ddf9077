"""Files that a kill or a full disk leaves either whole or absent, locks that a kill releases, and digests that reveal
changes: of files, and of the JSON records that carry one."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, Literal

from safetensors import SafetensorError

from eagle3.console import memory_size
from eagle3.errors import NO_SPACE, UserError
from eagle3.parsing import parse_json

KEY, DIGEST = "sealed_as", "digest"
# Exceptions that reading a record that is damaged, missing, or another's may raise.
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def lock(file: BinaryIO) -> Literal["held", "taken", "unknown"]:
    """Locks a file (flock) for as long as it is open and this process lives. Never waits for a lock that another
    process holds. Without locks in the file system, nobody can tell that a file is abandoned, and its writer may go
    on."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "taken"
    except OSError:
        return "unknown"
    return "held"


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Wraps code that writes `path`, and raises UserError if writing fails.

    remedy: begins with "free space", which is replaced if the cause is not a lack of space.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        place = next(place for place in (path, *path.absolute().parents) if os.path.exists(place))
        if getattr(error, "errno", NO_SPACE[0]) in NO_SPACE:
            reason += f"; {memory_size(shutil.disk_usage(place).free)} are free"
        else:
            remedy = remedy.replace("free space", "make it writable for this user", 1)
        raise UserError(f"{path}: cannot be written ({reason}); {remedy}") from error


def require_access(path: Path) -> None:
    """Raises OSError, with path and reason, if the file is there but cannot be opened: safetensors calls that
    missing."""
    with suppress(FileNotFoundError):
        path.open("rb").close()


def file_digest(path: Path) -> str:
    """SHA-256 of a file, as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str, private: bool = False) -> None:
    """Replaces the content of `path` with `text`. A kill or a full disk leaves either the old file or the new one.
    private: only the owner may read the file."""
    write_bytes(path, text.encode("utf-8"), private)


def write_bytes(path: Path, content: bytes, private: bool = False, aside: bool = False) -> Path | None:
    """Like `write_text`, for bytes. aside: once they are on disk, move an existing file aside and return its new
    path."""
    moved = None
    with _unfinished(path) as partial:
        with partial.open("wb") as file:
            if private:
                os.fchmod(file.fileno(), 0o600)  # before the file has any content
            file.write(content)
        if aside and path.exists():
            flush(partial)  # before the old file loses its name
            moved = move_aside(path)
        publish(partial, path)
    return moved


def create_text(path: Path, text: str) -> None:
    """Writes `text` unless `path` exists. If several processes try at once, one wins. A kill leaves a whole file or
    none."""
    with _unfinished(path) as partial:
        partial.write_text(text, encoding="utf-8")
        flush(partial)
        with suppress(FileExistsError):
            os.link(partial, path)
    flush(path.parent)


@contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """A name beside `path` that no other process uses: .NAME. and 8 hex digits. If the block leaves a file there, it is
    removed."""
    partial = path.with_name(f".{path.name}.{token_hex(4)}")
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def publish(partial: Path, path: Path) -> None:
    """Gives a finished file or folder its final name, once its bytes are on disk. When this returns, the name is on
    disk too."""
    flush(partial)
    partial.replace(path)
    flush(path.parent)


def move_aside(path: Path, name: Path | None = None) -> Path:
    """Renames a file or folder from an earlier run to the first free name: run -> run.1, result.json -> result.1.json.
    name: path from which to derive the new name instead."""
    name = name or path
    stem, suffix = (name.name, "") if path.is_dir() else (name.stem, name.suffix)
    number = 1
    while (aside := name.with_name(f"{stem}.{number}{suffix}")).exists():
        number += 1
    path.rename(aside)
    return aside


def flush(path: Path) -> None:
    """Calls fsync on a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Sealed records -------------------------------------------------------------------------------------------------------


def sealed(record: dict[str, Any], key: str) -> dict[str, Any]:
    """The record, with its key and digest."""
    whole = {**record, KEY: key}
    return {**whole, DIGEST: _digest(whole)}


def unsealed(record: dict[str, Any], key: str) -> dict[str, Any]:
    """A record as it was before it was sealed. Raises one of DAMAGE if it is not that one."""
    whole = {name: value for name, value in record.items() if name != DIGEST}
    if record.get(DIGEST) != _digest(whole):
        raise ValueError("its digest does not fit")
    if whole.pop(KEY, None) != key:
        raise ValueError(f"it is that of {record.get(KEY)}")
    return whole


def read_sealed(path: Path, key: str) -> dict[str, Any]:
    """The record in a file. Raises one of DAMAGE like `unsealed`."""
    return unsealed(parse_json(path.read_text(encoding="utf-8")), key)


def _digest(record: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(record))  # as it is read back, with lists for tuples and texts for keys
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]
