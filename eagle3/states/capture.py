"""Fills a hidden-state store: which samples a process captures, what that takes on the disk, and the work itself."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from eagle3.console import data_size
from eagle3.errors import UserError
from eagle3.states.batches import length_buckets
from eagle3.states.rows import Rows, Target
from eagle3.states.store.shard import Encoding, taught_rows
from eagle3.states.store.writer import StoreWriter
from eagle3.text.samples import Sample, SampleSet

# ids, argmax, logsumexp and loss mask of a token.
TOKEN_BYTES = 13
# Batches are made of neighbours in the data, so many batches' tokens at a time: of chat data (1,100 tokens a sample, batches
# of 8,192) 6% are then padding, where 4 leave 15% and 64 leave 2%; more data changes the last of these runs alone.
ROUND_BATCHES = 16


class Wanted(NamedTuple):
    """Sample `place` of a set."""

    samples: SampleSet
    place: int
    tokens: int

    def load(self) -> Sample:
        return self.samples[self.place]


class ArrivingTarget(Protocol):
    """Prefills documents in an order of its own, some rows at a time, maybe on several ranks together."""

    def arriving(self, documents: Iterable[Tensor]) -> Iterator[tuple[int, Iterator[Rows | None]]]:
        """The place of a document and consecutive rows of it, together the document; None as many times on ranks other than
        the first."""


def wanted_samples(sets: Iterable[SampleSet]) -> dict[str, Wanted]:
    """The samples of all sets by id, each once; nothing is loaded."""
    wanted: dict[str, Wanted] = {}
    for samples in sets:
        for place, (sample_id, tokens) in enumerate(zip(samples.sample_ids, samples.lengths.tolist(), strict=True)):
            wanted.setdefault(sample_id, Wanted(samples, place, tokens))
    return wanted


def token_bytes(encoding: Encoding, taught: float = 1.0, seen: float = 1.0) -> float:
    """What a token takes in a store, where a share `taught` of them have last hidden states and a share `seen` auxiliary ones;
    for `lossless` an estimate."""
    return TOKEN_BYTES + seen * encoding.expected_bytes("aux") + taught * encoding.expected_bytes("last")


def disk_need(samples: Iterable[Wanted], encoding: Encoding) -> int:
    """Bytes of these samples in a store, but for shards' headers and indexes."""
    counted: dict[int, np.ndarray] = {}
    need = 0.0
    for one in samples:
        if id(one.samples) not in counted:
            counted[id(one.samples)] = one.samples.count(taught_rows, encoding.seen_rows)
        taught, seen = counted[id(one.samples)][one.place] / one.tokens
        need += one.tokens * token_bytes(encoding, taught, seen)
    return round(need)


def require_disk(folder: Path, samples: Sequence[Wanted], encoding: Encoding) -> str:
    """What the samples take and what is free, in words. Raises UserError where the disk cannot hold them."""
    need, free = disk_need(samples, encoding), shutil.disk_usage(folder).free
    about = "about " if encoding.codec == "lossless" else ""
    if need > free:
        smaller = " hidden_states.codec to lossless or fp8," if encoding.codec == "none" else ""
        raise UserError(
            f"{folder}: {len(samples):,} samples take {about}{data_size(need)} more, the disk has {data_size(free)}; set{smaller} "
            "hidden_states.path to another disk, or data.max_samples"
        )
    return f"{about}{data_size(need)} to write, {data_size(free)} free"


class Course(Protocol):
    """Learns how far a capture is."""

    def begin(self, samples: int) -> None:
        """The capturing thread goes on to the next `samples`."""

    def advance(self, tokens: int) -> None:
        """So many more tokens are captured; 0 where another rank writes them."""


def prefill_batches(wanted: dict[str, Wanted], prefill_tokens: int) -> list[list[str]]:
    """Ids of the samples of each batch, as `capture` takes them; a sample longer than `prefill_tokens` is not in any.

    The last bits of a sample's hidden states depend on the batch that it is prefilled in: its size, its longest sample, the
    places in it. So batches are made from all samples of the recipe, in the data's order, whether they are stored or not and
    whoever captures them.
    """
    batches = []
    short = {sample_id: one for sample_id, one in wanted.items() if one.tokens <= prefill_tokens}
    for members in _rounds(short, ROUND_BATCHES * prefill_tokens):
        buckets = length_buckets([short[sample_id].tokens for sample_id in members], prefill_tokens)
        batches += [[members[place] for place in bucket] for bucket in buckets]
    return batches


def capture(target: Target, batches: Iterable[Sequence[Wanted]], writer: StoreWriter, course: Course) -> None:
    """Prefill each batch whole and write what the store lacks of it, while the next one is prefilled."""

    def write(batch: Sequence[Sample], rows: Sequence[Rows]) -> None:
        for sample, of_sample in zip(batch, rows, strict=True):
            if writer.add(sample.id, sample.ids, sample.loss_mask, of_sample):
                course.advance(len(sample.ids))

    with ThreadPoolExecutor(1, thread_name_prefix="write") as background:
        writing = background.submit(write, [], [])
        for batch in batches:
            course.begin(len(batch))
            loaded = [one.load() for one in batch]
            rows = target.prefill([sample.ids for sample in loaded])
            writing.result()
            writing = background.submit(write, loaded, rows)
        writing.result()


def capture_arriving(target: ArrivingTarget, samples: Sequence[Wanted], writer: StoreWriter, course: Course) -> None:
    """Write samples in the order in which the target has them; the ranks that share `target` call it with the same samples.
    What the target hands this rank goes to the disk as it comes."""
    loaded: dict[int, Sample] = {}

    def documents() -> Iterator[Tensor]:
        for place, one in enumerate(samples):
            loaded[place] = one.load()
            yield loaded[place].ids

    for place, parts in target.arriving(documents()):
        course.begin(1)
        sample = loaded.pop(place)
        handed = _followed(parts, course)
        first = next(handed, None)
        if first is not None:
            writer.add(sample.id, sample.ids, sample.loss_mask, chain([first], handed))


def _followed(parts: Iterable[Rows | None], course: Course) -> Iterator[Rows]:
    """Those that came to this rank."""
    for part in parts:
        if part is not None:
            yield part
        course.advance(0 if part is None else len(part.aux))


def _rounds(samples: dict[str, Wanted], budget: int) -> Iterator[list[str]]:
    """Ids of consecutive samples of one set with at most `budget` tokens together, or of one that is longer."""
    members: list[str] = []
    tokens, samples_of = 0, None
    for sample_id, one in samples.items():
        if members and (tokens + one.tokens > budget or one.samples is not samples_of):
            yield members
            members, tokens = [], 0
        members.append(sample_id)
        tokens, samples_of = tokens + one.tokens, one.samples
    if members:
        yield members
