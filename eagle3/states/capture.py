"""Fill a hidden-state store: form batches of samples, check that they fit on the disk, and capture them."""

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import NamedTuple, Protocol

from eagle3.console import Progress, Say, data_size
from eagle3.errors import UserError
from eagle3.states.rows import KeptRows, Rows, Target, length_buckets
from eagle3.states.store.shard import Encoding, taught_rows
from eagle3.states.store.writer import StoreWriter
from eagle3.text.samples import Sample, SampleSet

# Bytes per token for its id, argmax, logsumexp and loss mask.
TOKEN_BYTES = 13
# Batches are formed within groups of consecutive samples. A group has about this many batches' tokens. With chat
# data (1,100 tokens per sample, 8,192 per batch), groups of 16 batches leave 6% padding, groups of 4 leave 15%, and
# groups of 64 leave 2%. When data is added, only the last group changes.
ROUND_BATCHES = 16


class Wanted(NamedTuple):
    """A sample to capture. Its tokens are not in memory until `load`."""

    samples: SampleSet  # the set that it is in
    place: int  # its index in the set
    tokens: int  # its length

    def load(self) -> Sample:
        return self.samples[self.place]


class ArrivingTarget(Protocol):
    """A target that prefills documents in its own order, some rows at a time, possibly on several ranks."""

    def arriving(self, documents: Iterable[Sample]) -> Iterator[tuple[int, Iterator[Rows | KeptRows | None]]]:
        """Yield (index of a document, iterator over consecutive parts of its rows) as documents arrive. A part has all
        rows, or those that training reads. Ranks other than the first get the same number of parts, all of them
        None."""


def wanted_samples(sets: Iterable[SampleSet]) -> dict[str, Wanted]:
    """Collect the samples of all sets by id, without duplicates and without loading them."""
    by_id: dict[str, Wanted] = {}
    for samples in sets:
        for place, (sample_id, tokens) in enumerate(zip(samples.sample_ids, samples.lengths.tolist(), strict=True)):
            by_id.setdefault(sample_id, Wanted(samples, place, tokens))
    return by_id


def token_bytes(encoding: Encoding, taught_share: float = 1.0, seen_share: float = 1.0) -> float:
    """Average number of bytes per token in a store; an estimate for `lossless`.

    taught_share: share of tokens that have last hidden states
    seen_share: share of tokens that have auxiliary hidden states
    """
    return TOKEN_BYTES + seen_share * encoding.expected_bytes("aux") + taught_share * encoding.expected_bytes("last")


def disk_need(samples: Collection[Wanted], encoding: Encoding) -> int:
    """Bytes that these samples take up in a store, without shard headers and indexes."""
    sets = {id(sample.samples): sample.samples for sample in samples}
    counts = {set_id: sample_set.count(taught_rows, encoding.reach.rows) for set_id, sample_set in sets.items()}
    shares = ((sample.tokens, counts[id(sample.samples)][sample.place] / sample.tokens) for sample in samples)
    return round(sum(tokens * token_bytes(encoding, *token_shares) for tokens, token_shares in shares))


def require_disk(folder: Path, samples: Sequence[Wanted], encoding: Encoding) -> str:
    """Check that the disk can hold the samples. Returns a text that says how much they take and how much is free.
    Raises UserError if the disk cannot hold them."""
    need, free = disk_need(samples, encoding), shutil.disk_usage(folder).free
    prefix = "about " if encoding.codec == "lossless" else ""
    if need > free:
        codec_hint = " hidden_states.codec to lossless or fp8," if encoding.codec == "none" else ""
        raise UserError(
            f"{folder}: {len(samples):,} samples take {prefix}{data_size(need)} more, but the disk has only "
            f"{data_size(free)} free; set{codec_hint} hidden_states.path to another disk, or data.max_samples"
        )
    return f"{prefix}{data_size(need)} to write, {data_size(free)} free"


class ShareCourse:
    """Progress of this process's share. Prints it, and tells the watchdog what the process is doing.

    samples: number of samples that go through the target
    tokens: number of tokens to write
    at: called with a description of what the process is about to do
    """

    def __init__(self, samples: int, tokens: int, say: Say, at: Callable[[str], None]) -> None:
        self.progress = Progress(say, "capturing this share", tokens, "tokens")
        self.samples, self.at, self.count, self.place = samples, at, 0, ""

    def begin(self, samples: int) -> None:
        """The capturing thread starts on the next `samples` samples."""
        self.place = f"capturing sample {self.count + 1} of {self.samples}"
        self.count += samples
        self.at(self.place)

    def advance(self, tokens: int) -> None:
        """`tokens` more tokens have been captured; 0 if another rank writes them."""
        self.progress.advance(tokens)
        self.at(self.place)  # repeated, so that a long sample in progress does not look like a hang


def prefill_batches(samples: dict[str, Wanted], prefill_tokens: int) -> list[list[str]]:
    """Form the batches that `capture` prefills. Returns each batch's sample ids. Samples longer than `prefill_tokens`
    are in no batch.

    The last bits of a sample's hidden states depend on its batch: on the batch's size, its longest sample and the
    sample's place in it. Batches are therefore formed from all samples of the recipe, in the data's order, regardless
    of which ones are stored already and which process captures them.
    """
    batches, group_tokens = [], ROUND_BATCHES * prefill_tokens
    short = {sample_id: sample for sample_id, sample in samples.items() if sample.tokens <= prefill_tokens}
    for _, in_set in groupby(short, key=lambda sample_id: id(short[sample_id].samples)):
        in_order = list(in_set)
        ends = accumulate(short[sample_id].tokens for sample_id in in_order)
        for _, group in groupby(zip(in_order, ends, strict=True), key=lambda member: member[1] // group_tokens):
            members = [sample_id for sample_id, _ in group]
            buckets = length_buckets([short[sample_id].tokens for sample_id in members], prefill_tokens)
            batches += [[members[index] for index in bucket] for bucket in buckets]
    return batches


def capture(target: Target, batches: Iterable[Sequence[Wanted]], writer: StoreWriter, course: ShareCourse) -> None:
    """Prefill each batch as a whole. The samples that the store lacks are written while the next batch is prefilled."""

    def write(batch: Sequence[Sample], rows: Sequence[Rows]) -> None:
        for sample, sample_rows in zip(batch, rows, strict=True):
            if writer.add(sample.id, sample.ids, sample.loss_mask, sample_rows):
                course.advance(len(sample.ids))

    with ThreadPoolExecutor(1, thread_name_prefix="write") as background:
        writing = background.submit(write, [], [])
        for batch in batches:
            course.begin(len(batch))
            samples = [item.load() for item in batch]
            rows = target.prefill([sample.ids for sample in samples])
            writing.result()
            writing = background.submit(write, samples, rows)
        writing.result()


def capture_arriving(
    target: ArrivingTarget, samples: Sequence[Wanted], writer: StoreWriter, course: ShareCourse
) -> None:
    """Capture samples in the order in which the target delivers them. All ranks that share `target` call this with the
    same samples. Rows that the target hands to this rank are written as they arrive."""
    in_flight: dict[int, Sample] = {}

    def documents() -> Iterator[Sample]:
        for place, item in enumerate(samples):
            in_flight[place] = item.load()
            yield in_flight[place]

    for place, parts in target.arriving(documents()):
        course.begin(1)
        sample = in_flight.pop(place)
        own_parts = _followed(parts, course)
        first_part = next(own_parts, None)
        if first_part is not None:
            writer.add(sample.id, sample.ids, sample.loss_mask, chain([first_part], own_parts))


def _followed(parts: Iterable[Rows | KeptRows | None], course: ShareCourse) -> Iterator[Rows | KeptRows]:
    """Yield the parts that were handed to this rank, and report the progress of all parts."""
    for part in parts:
        if part is not None:
            yield part
        course.advance(0 if part is None else part.tokens)
