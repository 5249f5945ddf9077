"""Writes a store, alone or beside other writers; opened on an existing one, it goes on where the last one stopped."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from torch import Tensor

from eagle3.durable import create_text, write_text
from eagle3.errors import UserError
from eagle3.states.rows import Rows
from eagle3.states.store.files import LocalFiles, is_url
from eagle3.states.store.folder import (
    MANIFEST,
    WINDOW,
    Manifest,
    Provenance,
    read_headers,
    read_indexes,
    read_own_manifest,
)
from eagle3.states.store.shard import (
    SHARD_NAME,
    Encoding,
    ShardIndex,
    hold,
    is_index,
    remove_abandoned,
    shard_of,
    unfinished,
)
from eagle3.states.store.shard_writer import ShardWriter


class Part(NamedTuple):
    """Share `index` of `count`. Nobody needs to be asked."""

    index: int = 0
    count: int = 1

    def of(self, everything: Iterable[str] | Iterable[list[str]]) -> list:
        """This share of samples, by their ids, or of batches of them. Taking turns makes shares of equal size; in the order of
        the ids, which are hashes, they get as many long ones each, too."""
        return sorted(everything)[self.index :: self.count]

    def split(self, index: int, count: int) -> "Part":
        """Share `index` of `count` of this share."""
        return Part(self.index + self.count * index, self.count * count)


EVERYTHING = Part()
# Locked by who captures a part; never removed, since a lock on a file that others may replace excludes nobody.
LOCK = ".part-{}-of-{}.lock"


class StoreWriter(AbstractContextManager):
    """Writes captured samples.

    provenance: what the hidden states depend on (target, aux layers, tokenizer, ...), what `encoding` says excluded.
    record: what else is good to know, kept from the first writer. part: two writers of one part cannot live at a time;
    writers of different parts know nothing of each other. shard_tokens: a shard is closed when it has as many; a longer
    sample gets a shard of its own. report: receives a line about what has to be captured again or could not be checked.

    Leaving the `with` block normally publishes the last shard; an exception discards it. Raises UserError when another
    writer has the part, the existing store differs in provenance, or a shard is broken or another store's.
    """

    def __init__(
        self,
        path: str | Path,
        provenance: Provenance,
        encoding: Encoding,
        *,
        record: Provenance | None = None,
        part: Part = EVERYTHING,
        shard_tokens: int = 65536,
        threads: int = 4,
        report: Callable[[str], None] = print,
    ) -> None:
        if is_url(str(path)):
            raise UserError(
                f"hidden_states.path: {path}: a store is written to a folder; copy it to a URL when it is whole"
            )
        encoding.make_codec("aux")  # a package that is missing is told before anything is left in the folder
        self.folder, self.shard_tokens = Path(path), shard_tokens
        wanted = {**provenance, **{field: getattr(encoding, field) for field in ("codec", "dtype", *WINDOW)}}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / LOCK.format(part.index, part.count)).open("ab")
        except OSError as error:
            raise UserError(
                f"{path}: cannot be written ({error}); name another folder in hidden_states.path"
            ) from error
        if not hold(self._lock):
            self._lock.close()
            raise UserError(
                f"{path}: part {part.index}/{part.count} is being captured by another process; wait for it or stop it, or "
                "split the work with --part"
            )
        files = LocalFiles(self.folder)
        try:
            manifest = self._begin(files, Manifest(wanted, record or {}))
            self.known = self._recover(files, manifest, report)
        except UserError:
            self._lock.close()
            raise
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        # of a store that has more rows than are wanted, all samples have them
        self.encoding = replace(encoding, **{field: manifest.provenance.get(field) for field in WINDOW})
        self._token, self._number, self._provenance_digest = token_hex(4), 0, manifest.digest
        self._shard: ShardWriter | None = None

    def _begin(self, files: LocalFiles, manifest: Manifest) -> Manifest:
        """Say what the store is captured from, or find it said; what is said then. Raises UserError where that differs."""
        if any(map(SHARD_NAME.fullmatch, files.sizes())):
            return read_own_manifest(files, manifest.provenance)
        create_text(self.folder / MANIFEST, manifest.dump())
        try:
            return read_own_manifest(files, manifest.provenance)
        except UserError:
            if self._others_live():
                raise
            write_text(
                self.folder / MANIFEST, manifest.dump()
            )  # left by one who was refused, or gave up, before the first shard
            return manifest

    def _others_live(self) -> bool:
        for path in self.folder.glob(LOCK.format("*", "*")):
            with path.open("ab") as file:
                if not os.path.sameopenfile(file.fileno(), self._lock.fileno()) and not hold(file):
                    return True
        return False

    def _recover(self, files: LocalFiles, manifest: Manifest, report: Callable[[str], None]) -> set[str]:
        """Remove what dead writers left behind, forget samples whose shard is gone, return the ids that are stored. Shards of
        another store are refused."""
        sizes = files.sizes()
        for shard in unfinished(sizes):
            remove_abandoned(self.folder, shard)
        for name in filter(is_index, sizes):
            shard = self.folder / shard_of(name)
            if not shard.exists():
                lost = ShardIndex.parse(files.read([name])[0], name, files.where).samples
                (self.folder / name).unlink(missing_ok=True)
                report(f"{shard}: gone; its {len(lost)} samples will be captured again")
        indexes = read_indexes(files, manifest, report)
        for index in indexes:  # one by one: a folder's files are mapped, and mappings are limited
            read_headers(files, [index.shard], manifest.digest)
        return {entry.id for index in indexes for entry in index.samples}

    def add(self, sample_id: str, ids: Tensor, loss_mask: Tensor, rows: Rows | Iterable[Rows]) -> bool:
        """Take one sample: ids [T] int, loss_mask [T] bool, and the rows of those T tokens, on any device; or parts of
        them, consecutive rows each, which are written as they come.

        A known id is ignored: nothing is written or asked of `rows`, and False is returned. Raises UserError where the
        disk does not take it or a hidden state is not finite; the store is then as it was after the last shard.
        """
        if sample_id in self.known:
            return False
        if self._shard and self._shard.tokens + len(ids) > self.shard_tokens:
            self._publish()
        try:
            if self._shard is None:
                shard = f"shard-{self._token}-{self._number:05d}.safetensors"
                self._shard = ShardWriter(self.folder, shard, self.encoding, self._threads, self._provenance_digest)
            self._shard.add(sample_id, ids, loss_mask, [rows] if isinstance(rows, Rows) else rows)
        except OSError as error:
            raise self._unwritten(error) from error
        self.known.add(sample_id)
        return True

    def _publish(self) -> None:
        try:
            self._shard.publish()
        except OSError as error:
            raise self._unwritten(error) from error
        self._number += 1
        self._shard = None

    def _unwritten(self, error: OSError) -> UserError:
        return UserError(
            f"{self.folder}: cannot be written ({error}); free disk space and run capture.py again, which continues here"
        )

    def close(self) -> None:
        """Publish the samples that are not yet in a shard, and let others have the part."""
        if self._shard:
            self._publish()
        self.discard()

    def discard(self) -> None:
        """Forget the samples that are not yet in a shard, and let others have the part."""
        if self._shard:
            self._shard.discard()
        self._shard = None
        self._threads.shutdown()
        self._lock.close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.discard()
