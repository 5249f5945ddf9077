"""Samples that follow from a number, so that any process knows what a store should hold; and checks of stores."""

import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from limits import HANG_SECONDS

from eagle3.states.rows import LastHidden, Rows
from eagle3.states.store.check import Findings, check_store
from eagle3.states.store.files import DamagedStore, LocalFiles
from eagle3.states.store.reader import HiddenStateStore
from eagle3.states.store.shard import Encoding, ShardIndex, read_index, taught_rows
from eagle3.states.store.writer import StoreWriter
from eagle3.text.samples import Sample, sample_digest

FORK = multiprocessing.get_context("fork")
# Functions that access the disk, by the interpreter's names for them.
SYSTEM_CALLS = {"open", "write", "flush", "fsync", "replace", "rename", "link", "unlink", "mkdir", "truncate", "close"}
HIDDEN = 16
PROVENANCE = {"target": "a1b2", "aux_layers": [1, 3, 6], "tokenizer": "c3d4"}
PLAIN = Encoding("none", "float32", HIDDEN)


@cache
def sample_id(number: int, tokens: int | None = None) -> str:
    return sample(number, tokens)[0]


def sample(number: int, tokens: int | None = None, hidden: int = HIDDEN):
    """Id, token ids, loss mask, hidden states. As in data preparation, the id is the digest of token ids and loss
    mask."""
    generator = torch.Generator().manual_seed(number)
    tokens = tokens or int(torch.randint(1, 40, (), generator=generator))
    ids = torch.randint(150_000, (tokens,), generator=generator)
    loss_mask = torch.rand(tokens, generator=generator) < 0.4
    aux = torch.randn(tokens, 3 * hidden, generator=generator)
    teacher = LastHidden(
        torch.randn(tokens, hidden, generator=generator),
        argmax=torch.randint(150_000, (tokens,), generator=generator),
        logsumexp=torch.randn(tokens, generator=generator) * 20,
    )
    return sample_digest(ids.numpy(), loss_mask.numpy()).hex(), ids, loss_mask, Rows(aux, teacher)


def provenance_of(encoding: Encoding, **changes) -> dict:
    """The provenance of a store that `write` wrote."""
    return {**PROVENANCE, "codec": encoding.codec, "dtype": encoding.dtype, **encoding.reach._asdict(), **changes}


def write(path, numbers, encoding: Encoding = PLAIN, shard_tokens: int = 100, tokens=None, hidden=HIDDEN, **options):
    """Write these samples, with `tokens` and `hidden` as in `sample`."""
    with StoreWriter(path, PROVENANCE, encoding, shard_tokens=shard_tokens, **options) as writer:
        for number in numbers:
            writer.add(*sample(number, tokens, hidden))


def write_one(path, encoding: Encoding, sample_id: str, ids, loss_mask, rows) -> None:
    with StoreWriter(path, PROVENANCE, encoding) as writer:
        writer.add(sample_id, ids, loss_mask, rows)


def open_store(path, encoding: Encoding = PLAIN) -> HiddenStateStore:
    return HiddenStateStore.open(str(path), provenance_of(encoding))


def stored_tokens(store: HiddenStateStore, sample: str) -> Sample:
    return store.tokens_at([store.locations[sample]])[0]


def read_rows(store: HiddenStateStore, sample: str, aux: torch.Tensor, teacher: torch.Tensor) -> Rows:
    return store.read_at([store.locations[sample]], [(aux, teacher)])[0]


def read_whole(store: HiddenStateStore, number: int, tokens: int | None = None) -> Rows:
    loss_mask = stored_tokens(store, sample_id(number, tokens)).loss_mask
    teacher = taught_rows(loss_mask).nonzero().flatten()
    return read_rows(store, sample_id(number, tokens), torch.arange(len(loss_mask)), teacher)


def same_rows(one: Rows, other: Rows) -> bool:
    """Whether all rows are equal, bit for bit."""
    pairs = zip(one.named().values(), other.named().values(), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def assert_holds(path, numbers, encoding: Encoding = PLAIN) -> None:
    """Asserts that the store holds exactly these samples, each of them once and bit for bit."""
    store = open_store(path, encoding)
    assert sorted(store.locations) == sorted(map(sample_id, numbers))
    for number in numbers:
        _, ids, loss_mask, states = sample(number)
        taught = taught_rows(loss_mask)
        stored, dtype = read_whole(store, number), encoding.number_format
        assert stored.aux.dtype == stored.teacher.values.dtype == dtype
        teacher = replace(states.teacher[taught], values=states.teacher.values[taught].to(dtype))
        assert same_rows(stored, Rows(states.aux.to(dtype), teacher))
        tokens = stored_tokens(store, sample_id(number))
        assert torch.equal(tokens.ids, ids) and torch.equal(tokens.loss_mask, loss_mask)
    findings = check(path, numbers, encoding)
    assert findings.problems == [] and findings.samples == len(list(numbers))


def assert_continues(path, numbers, encoding: Encoding = PLAIN) -> None:
    """Asserts that a writer of these samples completes the store."""
    write(path, numbers, encoding)
    assert_holds(path, numbers, encoding)


def indexes(path: Path) -> list[ShardIndex]:
    """The readable indexes of a store's shards."""
    found = []
    for shard in sorted(path.glob("shard-*.safetensors")):
        with suppress(DamagedStore):
            found.append(read_index(LocalFiles(path), shard.name))
    return found


def stored_ids(path: Path) -> set[str]:
    """The samples that the shards in a folder list."""
    return {entry.id for index in indexes(path) for entry in index.samples}


def at_once(*works) -> list[int]:
    """Do all works at the same time, each in a process of its own. Returns their exit codes."""
    processes = [FORK.Process(target=work) for work in works]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANG_SECONDS)
    return [process.exitcode for process in processes]


def run(work, *arguments) -> int:
    """Run the work in a separate process. Returns its exit code."""
    return at_once(partial(work, *arguments))[0]


def killed_at_call(number: int, work, *arguments) -> None:
    """Do the work, but die by SIGKILL before the `number`-th call that accesses the disk."""
    seen = 0

    def watch(_frame, event, function) -> None:
        nonlocal seen
        if event == "c_call" and function.__name__ in SYSTEM_CALLS:
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(watch)
    work(*arguments)
    sys.setprofile(None)


def check(path, numbers, encoding: Encoding = PLAIN) -> Findings:
    return check_store(str(path), provenance_of(encoding), list(map(sample_id, numbers)), lambda line: None)
