"""Where a store's files lie: a folder on this machine, memory-mapped, or any URL that fsspec can read."""

import mmap
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import fsspec
from fsspec.core import url_to_fs

from eagle3.errors import UserError

# Maps held at a time: each takes address space and one of the kernel's 65,530 mappings, no memory and no open file.
MOST_MAPS = 1024


class Range(NamedTuple):
    """Bytes [start, stop) of a file."""

    name: str
    start: int
    stop: int


class StoreFiles(Protocol):
    """Reads files that nobody changes any more; threads may share it."""

    where: str

    def sizes(self) -> dict[str, int | None]:
        """Bytes of every file, by name; None where the protocol does not tell. Empty where there is no such folder."""
        ...

    def read(self, names: Sequence[str]) -> list[bytes]:
        """Whole files. Raises UserError where one cannot be read."""
        ...

    def fetch(self, ranges: Sequence[Range]) -> list[memoryview]:
        """Those bytes. Raises UserError where a file is gone or too short."""
        ...


def is_url(path: str) -> bool:
    return "://" in path


def open_files(path: str) -> StoreFiles:
    """Raises UserError for a URL that fsspec cannot open."""
    return RemoteFiles(path) if is_url(path) else LocalFiles(Path(path))


class LocalFiles:
    """Memory-mapped: a range costs no system call and no copy, and nothing but its pages is read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.where = folder, str(folder)
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._lock = threading.Lock()

    def sizes(self) -> dict[str, int]:
        sizes: dict[str, int | None] = {}
        for entry in os.scandir(self.folder) if self.folder.is_dir() else ():
            with suppress(FileNotFoundError):  # a writer's temporary file, gone since
                if entry.is_file():
                    sizes[entry.name] = entry.stat().st_size
        return sizes

    def read(self, names: Sequence[str]) -> list[bytes]:
        try:
            return [(self.folder / name).read_bytes() for name in names]
        except OSError as error:
            raise UserError(
                f"{error.filename}: cannot be read ({error.strerror}); mend its rights or its disk"
            ) from error

    def fetch(self, ranges: Sequence[Range]) -> list[memoryview]:
        with self._lock:
            maps = {name: self._map(name) for name in {wanted.name for wanted in ranges}}
        for wanted in ranges:
            if wanted.stop > len(maps[wanted.name]):
                raise _too_short(f"{self.folder / wanted.name}")
            page = wanted.start // mmap.PAGESIZE * mmap.PAGESIZE
            if wanted.stop > page:  # all of them are on their way before the first is looked at
                maps[wanted.name].madvise(mmap.MADV_WILLNEED, page, wanted.stop - page)
        return [memoryview(maps[wanted.name])[wanted.start : wanted.stop] for wanted in ranges]

    def _map(self, name: str) -> mmap.mmap:
        """Size is compared each time: touching a mapped page that a file has lost kills the process."""
        path = self.folder / name
        try:
            size = path.stat().st_size
            if name not in self._maps:
                with path.open("rb") as file:
                    self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise UserError(f"{path}: cannot be read ({error}); run capture.py --repair") from error
        if size < len(self._maps[name]):
            raise _too_short(str(path))
        self._maps.move_to_end(name)
        while len(self._maps) > MOST_MAPS:
            self._maps.popitem(last=False)
        return self._maps[name]


class RemoteFiles:
    """By fsspec, all ranges of a call at once where the protocol can; a URL may name any that is installed."""

    def __init__(self, url: str) -> None:
        self.where = url
        try:
            self.files, self.root = url_to_fs(url)
        except (ValueError, ImportError, OSError) as error:
            known = f"protocol {url.split('://')[0]!r} of {len(fsspec.available_protocols())} known ones"
            raise UserError(
                f"{url}: cannot be opened ({error}; {known}); mend hidden_states.path, or install the protocol's package"
            ) from error

    def sizes(self) -> dict[str, int | None]:
        try:
            found = self.files.ls(self.root, detail=True)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise UserError(f"{self.where}: cannot be listed ({error}); mend hidden_states.path") from error
        return {one["name"].rstrip("/").rsplit("/", 1)[-1]: one["size"] for one in found if one["type"] == "file"}

    def read(self, names: Sequence[str]) -> list[bytes]:
        if not names:
            return []
        paths = [self._path(name) for name in names]
        try:
            found = self.files.cat(paths, recursive=False)
        except OSError as error:
            raise _unreadable(self.where, error) from error
        return [found[path] for path in paths] if isinstance(found, dict) else [found]

    def fetch(self, ranges: Sequence[Range]) -> list[memoryview]:
        runs = _merged(ranges)
        if not runs:
            return []
        try:
            found = self.files.cat_ranges(
                [self._path(run.name) for run in runs],
                [run.start for run in runs],
                [run.stop for run in runs],
                on_error="raise",
            )
        except (OSError, ValueError) as error:  # ValueError: a web server that serves no ranges
            raise _unreadable(self.where, error) from error
        for run, data in zip(runs, found, strict=True):
            if len(data) != run.stop - run.start:
                raise UserError(
                    f"{self.where}/{run.name}: gave {len(data)} bytes where {run.stop - run.start} were asked for; it is cut "
                    "(run capture.py --repair where it lies), or its server does not serve ranges"
                )
        starts = [(run.name, run.start) for run in runs]
        pieces = []
        for wanted in ranges:
            place = bisect_right(starts, (wanted.name, wanted.start)) - 1
            begin = wanted.start - runs[place].start
            pieces.append(memoryview(found[place])[begin : begin + wanted.stop - wanted.start])
        return pieces

    def _path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"


def _merged(ranges: Sequence[Range]) -> list[Range]:
    """Sorted, and those that touch in one: a request costs more than its bytes."""
    runs: list[Range] = []
    for name, start, stop in sorted(ranges):
        if runs and runs[-1].name == name and start <= runs[-1].stop:
            runs[-1] = Range(name, runs[-1].start, max(stop, runs[-1].stop))
        else:
            runs.append(Range(name, start, stop))
    return runs


def _unreadable(url: str, error: OSError) -> UserError:
    return UserError(f"{url}: cannot be read ({error}); check the connection, your access and hidden_states.path")


def _too_short(path: str) -> UserError:
    return UserError(f"{path}: is shorter than its index says; run capture.py --repair")
