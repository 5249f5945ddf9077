"""Access to a store's files: memory-mapped in a local folder, or through fsspec at any URL that it can read."""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from fsspec.core import url_to_fs

from eagle3.errors import UserError, in_one_line

TOO_SHORT = "is shorter than its index says"
REPAIR = "run capture.py --repair, which captures again what is lost"
Flaw = Literal["damaged", "out of range", "foreign", "mislabelled", "duplicate", "missing"]


class DamagedStore(UserError):
    """Raised if a store has lost bytes, holds bytes that differ from what was written, shards of another store, or
    values that no target computes.

    where: file or sample
    flaw: what is wrong with it
    """

    def __init__(self, where: str, flaw: str, kind: Flaw = "damaged", remedy: str = REPAIR) -> None:
        super().__init__(f"{where}: {flaw}; {remedy}")
        self.where, self.flaw, self.kind = where, flaw, kind


class ByteRange(NamedTuple):
    """Bytes [start, stop) of a file."""

    name: str
    start: int
    stop: int


def is_url(path: str) -> bool:
    return "://" in path


class LocalFiles:
    """Memory-mapped files: reading a range copies nothing and touches only its pages."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.where = folder, str(folder)

    def names(self) -> set[str]:
        """The names of all files. Empty if the folder does not exist."""
        try:
            return set(os.listdir(self.folder))
        except FileNotFoundError:
            return set()

    def read(self, name: str) -> bytes:
        """The contents of a whole file."""
        return (self.folder / name).read_bytes()

    def fetch(self, ranges: Sequence[ByteRange]) -> list[memoryview]:
        """The bytes of these ranges. The files stay mapped as long as somebody holds them."""
        maps = {name: self._map(name) for name in {byte_range.name for byte_range in ranges}}
        for byte_range in ranges:
            if byte_range.stop > len(maps[byte_range.name]):
                raise DamagedStore(str(self.folder / byte_range.name), TOO_SHORT)
            page = byte_range.start // mmap.PAGESIZE * mmap.PAGESIZE
            if byte_range.stop > page:  # request all pages before waiting for the first
                maps[byte_range.name].madvise(mmap.MADV_WILLNEED, page, byte_range.stop - page)
        return [memoryview(maps[byte_range.name])[byte_range.start : byte_range.stop] for byte_range in ranges]

    def _map(self, name: str) -> mmap.mmap:
        """A memory map of the file as it is now: to touch a mapped page that a file has lost would kill the process."""
        path = self.folder / name
        try:
            with path.open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise DamagedStore(str(path), "is missing") from error
        except ValueError as error:  # an empty file cannot be mapped
            raise DamagedStore(str(path), TOO_SHORT) from error


class RemoteFiles:
    """Files read through fsspec, with any installed protocol. All ranges of a call are requested at once if the
    protocol supports that."""

    def __init__(self, url: str) -> None:
        self.where = url.rstrip("/")
        try:
            self.files, root = url_to_fs(url)
        except (ValueError, ImportError, OSError) as error:
            raise UserError(
                f"{url}: cannot be opened ({in_one_line(error)}); fix hidden_states.path, or install the package of "
                f"protocol {url.split('://')[0]!r}"
            ) from error
        self.root = root.rstrip("/")

    def names(self) -> set[str]:
        """The names of all files. Empty if there is no folder."""
        try:
            entries = self.files.ls(self.root, detail=True)
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise _unreadable(self.where, error) from error
        return {entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry["type"] == "file"}

    def read(self, name: str) -> bytes:
        """The contents of a whole file."""
        try:
            return self.files.cat_file(f"{self.root}/{name}")
        except OSError as error:
            raise _unreadable(self.where, error) from error

    def fetch(self, ranges: Sequence[ByteRange]) -> list[memoryview]:
        """The bytes of these ranges."""
        paths = [f"{self.root}/{each.name}" for each in ranges]
        starts, stops = [each.start for each in ranges], [each.stop for each in ranges]
        try:
            blocks = self.files.cat_ranges(paths, starts, stops, on_error="raise")
        except (OSError, ValueError) as error:  # ValueError: a web server that serves no ranges
            raise _unreadable(self.where, error) from error
        for (name, start, stop), data in zip(ranges, blocks, strict=True):
            if len(data) < stop - start:
                raise DamagedStore(f"{self.where}/{name}", TOO_SHORT)
            if len(data) > stop - start:
                raise UserError(
                    f"{self.where}/{name}: gave {len(data)} bytes where {stop - start} were asked for; name a server "
                    "that serves ranges in hidden_states.path"
                )
        return [memoryview(data) for data in blocks]


# Both classes read files that no longer change, and threads may share an object of either. If a local file is missing,
# or any is too short, they raise DamagedStore, because capturing again fixes that. If it cannot be read here and now,
# they raise OSError or a different UserError, because it must not be captured again.
StoreFiles = LocalFiles | RemoteFiles


def open_files(path: str) -> StoreFiles:
    """Open the files at a local path or a URL. Raises UserError for a URL that fsspec cannot open."""
    return RemoteFiles(path) if is_url(path) else LocalFiles(Path(path))


def _unreadable(url: str, error: Exception) -> UserError:
    return UserError(
        f"{url}: cannot be read ({in_one_line(error)}); check the connection, your access and hidden_states.path"
    )
