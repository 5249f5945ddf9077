"""Do the nodes see the same files, and have checkpoints room and a fast enough way to the disk."""

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from eagle3.console import data_size
from eagle3.draft.config import DraftConfig
from eagle3.durable import flush
from eagle3.planning.step import Weights
from eagle3.preflight.cluster import Cluster, Finding, Trouble, owners, troubled

PATIENCE = 10.0  # seconds in which a file of another node must appear; network file systems remember folders for some
PROBE_BYTES = 128 * 2**20
LEAST_WRITE_SPEED = 20e6  # bytes a second of a node: a checkpoint of an 8B target's draft, 6 GB, takes 5 minutes
ABSENT = "absent"


class Marker(NamedTuple):
    """A file that proves a shared folder. name: also its content. above: how many folders above the one in question,
    which may not be there yet."""

    name: str
    above: int

    def path(self, folder: Path) -> Path:
        """Where this node has it."""
        own = folder.expanduser().absolute()
        return [own, *own.parents][self.above] / self.name


def check_shared(cluster: Cluster, key: str, folder: Path, patience: float = PATIENCE) -> Finding:
    """Collective. A file that the first rank writes into `folder`, or where it will be made, must be seen by every node
    with its content, and the node must be allowed to write there. key: the recipe's. folder: as each node understands
    it (~, and what it is relative to, are a node's own)."""
    with ExitStack() as left:
        leave = partial(left.enter_context, _marker(folder))
        marker = cluster.ask(leave if cluster.rank == 0 else None, Marker._make)[0]
        if isinstance(marker, Trouble):
            return _unwritable(cluster, key, folder, [0], marker.reason)
        seen = cluster.ask_leaders(lambda: _await_marker(folder, marker, patience))
    if reasons := troubled(seen):
        return _unwritable(cluster, key, folder, [*reasons], next(iter(reasons.values())))
    lacking = [rank for rank, why in seen.items() if why]
    if not lacking:
        told = "is writable" if len(cluster.ranks) == 1 else f"is shared by {len(cluster.ranks)} nodes"
        return Finding(key, "ok", f"the place of {folder} {told}")
    return Finding(
        key,
        "failed",
        f"{folder}: {seen[lacking[0]]} on {cluster.where(lacking)}",
        f"set {key} to a folder of a file system that every node mounts, and may write",
    )


def _unwritable(cluster: Cluster, key: str, folder: Path, leaders: list[int], reason: str) -> Finding:
    return Finding(
        key,
        "failed",
        f"{folder}: cannot be written on {cluster.where(leaders)} ({reason})",
        f"set {key} to a place that this user may write on every node",
    )


def check_cache(cluster: Cluster, key: str, folder: Path, patience: float = PATIENCE) -> Finding:
    """Collective. Every node must be able to write there; that it is the same folder everywhere only saves work."""

    def write() -> None:
        with _marker(folder):
            pass

    if reasons := troubled(cluster.ask_leaders(write)):
        return _unwritable(cluster, key, folder, [*reasons], next(iter(reasons.values())))
    if len(cluster.ranks) == 1:
        return Finding(key, "ok", f"{folder} is writable")
    shared = check_shared(cluster, key, folder, patience).state == "ok"
    told = "shared: one node's preparation serves all" if shared else "not shared: each node prepares its own copy"
    return Finding(key, "ok" if shared else "note", f"{folder} is writable, and {told}")


def check_inputs(cluster: Cluster, inputs: dict[str, str]) -> Finding:
    """Collective. What is only read must be there on every node, with the same names and sizes. inputs: recipe key ->
    path; one that exists nowhere and does not look like a path is taken for a hub id or a word of the recipe's."""
    listings = cluster.ask_leaders(lambda: {key: _listing(Path(path).expanduser()) for key, path in inputs.items()})
    if reasons := troubled(listings):
        return Finding(
            "inputs",
            "failed",
            f"{cluster.where([*reasons])}: {next(iter(reasons.values()))}",
            "make them readable for this user on every node",
        )
    local = []
    for key, path in inputs.items():
        having = owners((rank, listed[key]) for rank, listed in listings.items())
        if [*having] == [ABSENT] and not path.startswith(("/", ".", "~")) and path.count("/") < 2:
            continue
        local.append(key)
        if len(having) > 1 or ABSENT in having:
            found = "; ".join(f"{what} on {cluster.where(ranks)}" for what, ranks in having.items())
            return Finding(
                "inputs",
                "failed",
                f"{key} {path}: {found}",
                "copy it to every node, or name a place that every node mounts",
            )
    told = f"{', '.join(local)}: the same on every node" if local else "none of them is a local file"
    target = inputs.get("model.target", "demo")
    if target != "demo" and "model.target" not in local:
        told += f"; model.target {target}: no folder here, so taken for a hub id"
    return Finding("inputs", "ok", told)


def _listing(path: Path) -> str:
    """A file's size; a folder's number of files and their bytes, and a digest of their names and sizes."""
    if path.is_file():
        return f"{path.stat().st_size} bytes"
    if not path.is_dir():
        return ABSENT
    files = sorted(
        (os.path.relpath(os.path.join(folder, name), path), os.stat(os.path.join(folder, name)).st_size)
        for folder, _, names in os.walk(path)
        for name in names
    )
    digest = hashlib.sha256(repr(files).encode()).hexdigest()[:12]
    return f"{len(files)} files, {sum(size for _, size in files)} bytes ({digest})"


def checkpoint_bytes(draft: DraftConfig, tensor: int, itemsize: int) -> int:
    """Of one checkpoint: the trained weights as they are used, `itemsize` bytes each, and AdamW's fp32 masters and two
    moments, from all tensor-parallel ranks. (The frozen embedding is not written.)"""
    return Weights.of(draft, tensor).trained * tensor * (itemsize + 12)


def free_bytes(folder: Path) -> int:
    """Where `folder` is or will be. A quota of the file system's is not seen."""
    return shutil.disk_usage(_existing_parent(folder)).free


def judge_space(folder: Path, free: int, needed: int, what: str) -> Finding:
    takes = "takes" if what.startswith("a ") else "take"
    found = f"{folder}: {data_size(free)} free, {what} {takes} {data_size(needed)}"
    if free >= needed:
        return Finding("disk space", "ok", found)
    return Finding(
        "disk space",
        "failed",
        found,
        "free some, set output.dir to a larger place, or lower training.keep_checkpoints",
    )


def check_space(cluster: Cluster, folder: Path, checkpoint: int | None, kept: int) -> Finding:
    """Collective. checkpoint: bytes of one, None where they are not known. kept: checkpoints there at a time."""
    free = cluster.ask_leaders(lambda: free_bytes(folder))
    if reasons := troubled(free):
        return Finding("disk space", "failed", f"{folder}: {next(iter(reasons.values()))}", "mend output.dir")
    least = min(free.values())
    if checkpoint is None:
        return Finding("disk space", "note", f"{folder}: {data_size(least)} free; a checkpoint's size is not known yet")
    return judge_space(folder, least, kept * checkpoint, f"{kept} checkpoints")


def check_write_speed(cluster: Cluster, folder: Path, checkpoint: int | None) -> Finding:
    """Collective. All nodes at once, as they write a checkpoint: a file written and flushed to the disk by each."""
    speeds = cluster.ask_leaders(lambda: _write_speed(_existing_parent(folder)))
    if reasons := troubled(speeds):
        return _unwritable(cluster, "output.dir", folder, [*reasons], next(iter(reasons.values())))._replace(
            name="write speed"
        )
    slowest, rank = min((speed, rank) for rank, speed in speeds.items())
    found = f"{data_size(slowest)}/s from {cluster.where([rank])}"
    if len(speeds) > 1:
        found += f", the slowest of {len(speeds)}"
    if checkpoint:
        found += f": a checkpoint takes about {checkpoint / slowest / len(speeds):.1f} s"
    if slowest >= LEAST_WRITE_SPEED:
        return Finding("write speed", "ok", found)
    return Finding(
        "write speed",
        "failed",
        f"{found}; less than {data_size(LEAST_WRITE_SPEED)}/s",
        "set output.dir to a faster file system, or checkpoint less often (training.checkpoint_every)",
    )


def _existing_parent(folder: Path) -> Path:
    """The folder itself or, where it is yet to be made, the nearest one above it. Raises OSError where a file is in the
    way."""
    folder = folder.expanduser().absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a file is in the way", str(nearest))
    return nearest


@contextmanager
def _marker(folder: Path) -> Iterator[Marker]:
    """Inside, a file that holds its own name lies in `folder`, or where that will be made."""
    own = folder.expanduser().absolute()
    marker = Marker(_probe_name(), [own, *own.parents].index(_existing_parent(folder)))
    path = marker.path(folder)
    try:
        path.write_text(marker.name, encoding="utf-8")
        flush(path)
        yield marker
    finally:
        with suppress(OSError):  # it was never written
            path.unlink()


def _await_marker(folder: Path, marker: Marker, patience: float = PATIENCE) -> str:
    """Why the marker that another node left is not here with its content, or nothing may be written beside it; nothing
    where all is well. patience: seconds."""
    path = marker.path(folder)
    if not path.parent.is_dir():
        return f"no folder {path.parent}"
    until = time.monotonic() + patience
    while True:
        os.listdir(path.parent)  # asks a network file system anew
        with suppress(FileNotFoundError):
            if path.read_text(encoding="utf-8") == marker.name:
                break
        if time.monotonic() > until:
            return f"{path.parent} is not the first node's folder of this name, whose new file is not seen"
        time.sleep(0.1)
    return "" if os.access(path.parent, os.W_OK | os.X_OK) else f"{path.parent} may not be written"


def _probe_name() -> str:
    return f".preflight-{token_hex(16)}"


def _write_speed(place: Path) -> float:
    """Bytes a second. Of random bytes: some file systems compress."""
    probe, block = place / _probe_name(), os.urandom(2**22)
    try:
        began = time.perf_counter()
        with probe.open("wb") as file:
            for _ in range(PROBE_BYTES // len(block)):
                file.write(block)
        flush(probe)
        return PROBE_BYTES / (time.perf_counter() - began)
    finally:
        probe.unlink(missing_ok=True)
