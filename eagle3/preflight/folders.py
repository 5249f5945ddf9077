"""Checks that a job's nodes see the same folders and inputs, can write there, and have room for checkpoints."""

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch

from eagle3.console import data_size
from eagle3.draft.config import DraftConfig
from eagle3.planning.step import Weights
from eagle3.preflight.cluster import Cluster, Finding, Flaw, owners
from eagle3.recipe.schema import Recipe

PATIENCE = 10.0  # seconds within which another node's file must appear; network file systems cache directories
ABSENT = "absent"


def check_shared(cluster: Cluster, key: str, folder: Path, patience: float = PATIENCE) -> Finding:
    """Checks that the nodes share `folder`: every node sees a file that the first rank writes into it (or where it will
    be created), with the right content, and can write there itself. Collective.

    key: the recipe key that names the folder.
    folder: each node resolves it by itself (~ and the working directory may differ between nodes).
    """
    remedy = f"set {key} to a folder on a file system that every node mounts and can write to"
    with ExitStack() as left:
        marker = cluster.ask(key, lambda: left.enter_context(_marker(folder)), remedy, [0])[0]
        cluster.ask(key, lambda: _await_marker(folder, *marker, patience), remedy, cluster.leaders)
    verdict = "is writable" if len(cluster.ranks) == 1 else f"is shared by {len(cluster.ranks)} nodes"
    return Finding(key, "ok", f"the place of {folder} {verdict}")


def check_cache(cluster: Cluster, key: str, folder: Path) -> Finding:
    """Checks that every node can write to the folder. They need not share it; sharing only saves work. Collective."""
    remedy = f"set {key} to a place that this user can write to on every node"

    def write() -> None:
        with _marker(folder):
            pass

    cluster.ask(key, write, remedy, cluster.leaders)
    return Finding(key, "ok", f"{folder} is writable")


def check_inputs(cluster: Cluster, inputs: dict[str, str]) -> Finding:
    """Checks that the files that a run reads are on every node, with the same names and sizes. Collective.

    inputs: recipe key -> path. A value that exists on no node and does not look like a path is taken for a hub id or a
        keyword of the recipe.
    """

    def listings() -> dict[str, str]:
        return {key: _listing(Path(path).expanduser()) for key, path in inputs.items()}

    listed = cluster.ask("inputs", listings, "make them readable for this user on every node", cluster.leaders)
    local = []
    for key, path in inputs.items():
        holders = owners((rank, each[key]) for rank, each in listed.items())
        if [*holders] == [ABSENT] and not path.startswith(("/", ".", "~")) and path.count("/") < 2:
            continue
        local.append(key)
        if len(holders) > 1 or ABSENT in holders:
            differences = "; ".join(f"{listing} on {cluster.where(ranks)}" for listing, ranks in holders.items())
            raise Flaw(
                "inputs",
                f"{key} {path}: {differences}",
                "copy it to every node, or name a place that all mount",
            )
    detail = f"{', '.join(local)}: the same on every node" if local else "none of them is a local file"
    return Finding("inputs", "ok", detail)


def _listing(path: Path) -> str:
    """Describes a file by its size, and a folder by the number and total size of its files and a digest of their names
    and sizes."""
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


def checkpoint_bytes(recipe: Recipe, draft: DraftConfig) -> int:
    """Bytes of one checkpoint, with all tensor-parallel ranks: the trained weights in their own dtype, and AdamW's fp32
    masters and two moments. (The frozen embedding is not written.)"""
    tensor, itemsize = recipe.parallelism.tensor, getattr(torch, recipe.training.dtype).itemsize
    return Weights.of(draft, tensor).trained * tensor * (itemsize + 12)


def free_bytes(folder: Path) -> int:
    """Free bytes on the file system where `folder` is or will be. Does not see quotas."""
    return shutil.disk_usage(_existing_parent(folder)).free


def judge_space(folder: Path, free: int, needed: int, content: str) -> Finding:
    detail = f"{folder}: {data_size(free)} free, {data_size(needed)} for {content}"
    if free < needed:
        raise Flaw(
            "disk space", detail, "free some, set output.dir to a larger place, or lower training.keep_checkpoints"
        )
    return Finding("disk space", "ok", detail)


def check_space(cluster: Cluster, folder: Path, checkpoint: int | None, count: int) -> Finding:
    """Checks that checkpoints fit on the disk. Collective. checkpoint: bytes per checkpoint, None if unknown. count:
    how many exist at a time."""
    remedy = "set output.dir to another place"
    least = min(cluster.ask("disk space", lambda: free_bytes(folder), remedy, cluster.leaders).values())
    if checkpoint is None:
        return Finding("disk space", "note", f"{folder}: {data_size(least)} free; a checkpoint's size is not known yet")
    return judge_space(folder, least, count * checkpoint, f"{count} checkpoints")


def _existing_parent(folder: Path) -> Path:
    """The folder itself or, if it does not exist yet, the nearest one above it. Raises OSError if a file is in the
    way."""
    nearest = next(path for path in _and_above(folder) if path.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a file is in the way", str(nearest))
    return nearest


def _and_above(folder: Path) -> list[Path]:
    """The folder as this node resolves it, and those above it, nearest first."""
    own = folder.expanduser().absolute()
    return [own, *own.parents]


@contextmanager
def _marker(folder: Path) -> Iterator[tuple[str, int]]:
    """Inside the block, there is a file in `folder`, or in the nearest existing folder above it, that contains its own
    name. Yields the file's name and how many levels above `folder` it is."""
    place = _existing_parent(folder)
    with NamedTemporaryFile("w", prefix=".preflight-", dir=place, encoding="utf-8") as file:
        name = Path(file.name).name
        file.write(name)
        file.flush()
        os.fsync(file.fileno())
        yield name, _and_above(folder).index(place)


def _await_marker(folder: Path, name: str, above: int, patience: float) -> None:
    """Waits for the marker that a different node leaves. Raises OSError unless it appears with the right content, and
    this node can write beside it. patience: in seconds."""
    path = _and_above(folder)[above] / name
    if not path.parent.is_dir():
        raise OSError(f"no folder {path.parent}")
    until = time.monotonic() + patience
    while True:
        os.listdir(path.parent)  # makes a network file system refresh its cached listing
        with suppress(FileNotFoundError):
            if path.read_text(encoding="utf-8") == name:
                break
        if time.monotonic() > until:
            raise OSError(f"{path.parent} is not the first node's folder of this name, whose new file does not appear")
        time.sleep(0.1)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OSError(f"{path.parent} is not writable")
