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

from fsspec.core import url_to_fs

from eagle3.errors import UserError

# Maps held at a time: each takes address space and one of the kernel's 65,530 mappings, no memory and no open file.
MOST_MAPS = 1024
TOO_SHORT = "is shorter than its index says"


class DamagedStore(UserError):
    """Bytes that a store has lost, or that are not what was written. where: file or sample; flaw: what is wrong."""

    kind = "damaged"
    remedy = "run capture.py --repair, which captures anew what is lost"

    def __init__(self, where: str, flaw: str) -> None:
        super().__init__(f"{where}: {flaw}; {self.remedy}")
        self.flaw = flaw


class ForeignShards(DamagedStore):
    """Shards that were captured under another provenance than the store.json beside them describes."""

    kind = "foreign"
    remedy = "restore what was replaced, or run capture.py --repair, which deletes them and captures their samples anew"


class Range(NamedTuple):
    """Bytes [start, stop) of a file."""

    name: str
    start: int
    stop: int


class StoreFiles(Protocol):
    """Reads files that nobody changes any more; threads may share it. What is not there or too short raises DamagedStore,
    what cannot be read here and now another UserError: the one is mended by capturing again, the other must not be."""

    where: str

    def sizes(self) -> dict[str, int | None]:
        """Bytes of every file, by name; None where the protocol does not tell. Empty where there is no such folder."""

    def read(self, names: Sequence[str]) -> list[bytes]:
        """Whole files."""

    def fetch(self, ranges: Sequence[Range]) -> list[memoryview]:
        """Those bytes."""


def no_store(where: str) -> UserError:
    return UserError(
        f"{where}: no hidden-state store here; run capture.py, fix hidden_states.path, or run the "
        "target while training: hidden_states.mode=live"
    )


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

    def sizes(self) -> dict[str, int | None]:
        sizes: dict[str, int | None] = {}
        if not self.folder.exists():
            return sizes
        try:
            for entry in os.scandir(self.folder):
                with suppress(FileNotFoundError):  # a writer's temporary file, gone since
                    if entry.is_file():
                        sizes[entry.name] = entry.stat().st_size
                    elif entry.is_dir() and entry.name.endswith((".safetensors", ".json")):
                        raise UserError(
                            f"{entry.path}: is a folder in the place of a file of the store; move it away, and run "
                            "capture.py --repair"
                        )
        except OSError as error:
            raise UserError(
                f"{self.folder}: cannot be listed ({error.strerror}); name the store's folder in hidden_states.path"
            ) from error
        return sizes

    def read(self, names: Sequence[str]) -> list[bytes]:
        try:
            return [(self.folder / name).read_bytes() for name in names]
        except OSError as error:
            raise _unreadable_here(error.filename, error) from error

    def fetch(self, ranges: Sequence[Range]) -> list[memoryview]:
        with self._lock:
            maps = {name: self._map(name) for name in {wanted.name for wanted in ranges}}
        for wanted in ranges:
            if wanted.stop > len(maps[wanted.name]):
                raise DamagedStore(str(self.folder / wanted.name), TOO_SHORT)
            page = wanted.start // mmap.PAGESIZE * mmap.PAGESIZE
            if wanted.stop > page:  # all of them are on their way before the first is looked at
                maps[wanted.name].madvise(mmap.MADV_WILLNEED, page, wanted.stop - page)
        return [memoryview(maps[wanted.name])[wanted.start : wanted.stop] for wanted in ranges]

    def forget(self, name: str) -> None:
        """Hold nothing of a file any more."""
        with self._lock:
            self._maps.pop(name, None)

    def _map(self, name: str) -> mmap.mmap:
        """Size is compared each time: touching a mapped page that a file has lost kills the process."""
        path = self.folder / name
        try:
            size = path.stat().st_size
            if size and name not in self._maps:  # an empty file cannot be mapped
                with path.open("rb") as file:
                    self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise DamagedStore(str(path), "is missing") from error
        except OSError as error:
            raise _unreadable_here(str(path), error) from error
        if not size or size < len(self._maps[name]):
            raise DamagedStore(str(path), TOO_SHORT)
        self._maps.move_to_end(name)
        while len(self._maps) > MOST_MAPS:
            self._maps.popitem(last=False)
        return self._maps[name]


class RemoteFiles:
    """By fsspec, all ranges of a call at once where the protocol can; a URL may name any that is installed."""

    def __init__(self, url: str) -> None:
        self.where = url.rstrip("/")
        try:
            self.files, root = url_to_fs(url)
        except (ValueError, ImportError, OSError) as error:
            raise UserError(
                f"{url}: cannot be opened ({first_words(error)}); mend hidden_states.path, or install the package of "
                f"protocol {url.split('://')[0]!r}"
            ) from error
        self.root = root.rstrip("/")

    def sizes(self) -> dict[str, int | None]:
        try:
            found = self.files.ls(self.root, detail=True)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise _unreadable_there(self.where, error) from error
        return {one["name"].rstrip("/").rsplit("/", 1)[-1]: one["size"] for one in found if one["type"] == "file"}

    def read(self, names: Sequence[str]) -> list[bytes]:
        if not names:
            return []
        paths = [f"{self.root}/{name}" for name in names]
        try:
            found = self.files.cat(paths, recursive=False)
        except OSError as error:
            raise _unreadable_there(self.where, error) from error
        return [found[path] for path in paths] if isinstance(found, dict) else [found]

    def fetch(self, ranges: Sequence[Range]) -> list[memoryview]:
        runs = _merged(ranges)
        if not runs:
            return []
        try:
            found = self.files.cat_ranges(
                [f"{self.root}/{run.name}" for run in runs],
                [run.start for run in runs],
                [run.stop for run in runs],
                on_error="raise",
            )
        except (OSError, ValueError) as error:  # ValueError: a web server that serves no ranges
            raise _unreadable_there(self.where, error) from error
        for run, data in zip(runs, found, strict=True):
            if len(data) != run.stop - run.start:
                raise UserError(
                    f"{self.where}/{run.name}: gave {len(data)} bytes where {run.stop - run.start} were asked for; it is "
                    "cut (run capture.py --repair where it lies), or its server does not serve ranges"
                )
        starts = [(run.name, run.start) for run in runs]
        pieces = []
        for wanted in ranges:
            place = bisect_right(starts, (wanted.name, wanted.start)) - 1
            begin = wanted.start - runs[place].start
            pieces.append(memoryview(found[place])[begin : begin + wanted.stop - wanted.start])
        return pieces


def _merged(ranges: Sequence[Range]) -> list[Range]:
    """Sorted, and those that touch in one: a request costs more than its bytes."""
    runs: list[Range] = []
    for name, start, stop in sorted(ranges):
        if runs and runs[-1].name == name and start <= runs[-1].stop:
            runs[-1] = Range(name, runs[-1].start, max(stop, runs[-1].stop))
        else:
            runs.append(Range(name, start, stop))
    return runs


def first_words(error: Exception) -> str:
    """Of a message that may be long."""
    return f"{error!s:.200}".partition("\n")[0] or type(error).__name__


def _unreadable_here(path: str, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be read ({error.strerror or error}); mend its rights or its disk")


def _unreadable_there(url: str, error: Exception) -> UserError:
    return UserError(
        f"{url}: cannot be read ({first_words(error)}); check the connection, your access and hidden_states.path"
    )
