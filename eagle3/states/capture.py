"""Fill a hidden-state store: which samples a process captures, how much disk they take, and the capture itself."""

import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from eagle3.console import data_size
from eagle3.errors import UserError
from eagle3.states.rows import Rows, Target, length_buckets
from eagle3.states.store.shard import Encoding, taught_rows
from eagle3.states.store.writer import StoreWriter
from eagle3.text.samples import Sample, SampleSet

# Bytes of a token's ids, argmax, logsumexp and loss mask.
TOKEN_BYTES = 13
# Batches are formed from neighbours in the data, this many batches' tokens at a time. With chat data (1,100 tokens a
# sample, batches of 8,192), 6% is padding then; 4 batches leave 15%, and 64 leave 2%. When data is added, only the last
# of these groups changes.
ROUND_BATCHES = 16


class Wanted(NamedTuple):
    """Sample `place` of a set, to be captured."""

    samples: SampleSet
    place: int
    tokens: int

    def load(self) -> Sample:
        return self.samples[self.place]


class ArrivingTarget(Protocol):
    """Prefills documents in its own order, some rows at a time, possibly on several ranks together."""

    def arriving(self, documents: Iterable[Tensor]) -> Iterator[tuple[int, Iterator[Rows | None]]]:
        """(place of a document, iterator over consecutive parts of its rows) as documents arrive. Ranks other than the
        first get as many parts, all None."""


def wanted_samples(sets: Iterable[SampleSet]) -> dict[str, Wanted]:
    """The samples of all sets by id, without duplicates. Nothing is loaded."""
    by_id: dict[str, Wanted] = {}
    for samples in sets:
        for place, (sample_id, tokens) in enumerate(zip(samples.sample_ids, samples.lengths.tolist(), strict=True)):
            by_id.setdefault(sample_id, Wanted(samples, place, tokens))
    return by_id


def token_bytes(encoding: Encoding, taught_share: float = 1.0, seen_share: float = 1.0) -> float:
    """Average bytes of a token in a store; an estimate for `lossless`. taught_share, seen_share: of tokens with
    last hidden states, and with auxiliary ones."""
    return TOKEN_BYTES + seen_share * encoding.expected_bytes("aux") + taught_share * encoding.expected_bytes("last")


def disk_need(samples: Collection[Wanted], encoding: Encoding) -> int:
    """Bytes that these samples take in a store, apart from shard headers and indexes."""
    sets = {id(sample.samples): sample.samples for sample in samples}
    counts = {set_id: sample_set.count(taught_rows, encoding.seen_rows) for set_id, sample_set in sets.items()}
    shares = ((sample.tokens, counts[id(sample.samples)][sample.place] / sample.tokens) for sample in samples)
    return round(sum(tokens * token_bytes(encoding, *token_shares) for tokens, token_shares in shares))


def require_disk(folder: Path, samples: Sequence[Wanted], encoding: Encoding) -> str:
    """What the samples take and what is free, in words. Raises UserError if the disk cannot hold them."""
    need, free = disk_need(samples, encoding), shutil.disk_usage(folder).free
    prefix = "about " if encoding.codec == "lossless" else ""
    if need > free:
        codec_hint = " hidden_states.codec to lossless or fp8," if encoding.codec == "none" else ""
        raise UserError(
            f"{folder}: {len(samples):,} samples take {prefix}{data_size(need)} more, but the disk has only "
            f"{data_size(free)} free; set{codec_hint} hidden_states.path to another disk, or data.max_samples"
        )
    return f"{prefix}{data_size(need)} to write, {data_size(free)} free"


class Course(Protocol):
    """Is notified of a capture's progress."""

    def begin(self, samples: int) -> None:
        """The capturing thread starts on the next `samples` samples."""

    def advance(self, tokens: int) -> None:
        """This many more tokens are captured; 0 if another rank writes them."""


def prefill_batches(samples: dict[str, Wanted], prefill_tokens: int) -> list[list[str]]:
    """Sample ids of each batch, as `capture` takes them. Samples longer than `prefill_tokens` are in none.

    The last bits of a sample's hidden states depend on its batch: the batch's size, its longest sample, the sample's
    place. So batches are formed from all samples of the recipe, in the data's order, whether they are stored or not and
    whoever captures them.
    """
    batches = []
    short = {sample_id: sample for sample_id, sample in samples.items() if sample.tokens <= prefill_tokens}
    for members in _rounds(short, ROUND_BATCHES * prefill_tokens):
        buckets = length_buckets([short[sample_id].tokens for sample_id in members], prefill_tokens)
        batches += [[members[index] for index in bucket] for bucket in buckets]
    return batches


def capture(target: Target, batches: Iterable[Sequence[Wanted]], writer: StoreWriter, course: Course) -> None:
    """Prefill each batch as a whole, and write what the store lacks of it while the next one is prefilled."""

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


def capture_arriving(target: ArrivingTarget, samples: Sequence[Wanted], writer: StoreWriter, course: Course) -> None:
    """Write samples in the order in which the target delivers them. Ranks that share `target` call it with the same
    samples. What the target hands to this rank goes to disk as it comes."""
    in_flight: dict[int, Sample] = {}

    def documents() -> Iterator[Tensor]:
        for place, item in enumerate(samples):
            in_flight[place] = item.load()
            yield in_flight[place].ids

    for place, parts in target.arriving(documents()):
        course.begin(1)
        sample = in_flight.pop(place)
        own_parts = _followed(parts, course)
        first_part = next(own_parts, None)
        if first_part is not None:
            writer.add(sample.id, sample.ids, sample.loss_mask, chain([first_part], own_parts))


def _followed(parts: Iterable[Rows | None], course: Course) -> Iterator[Rows]:
    """The parts that came to this rank."""
    for part in parts:
        if part is not None:
            yield part
        course.advance(0 if part is None else len(part.aux))


def _rounds(samples: dict[str, Wanted], budget: int) -> Iterator[list[str]]:
    """Ids of consecutive samples of one set with at most `budget` tokens together, or of a single longer one."""
    members: list[str] = []
    tokens, current_set = 0, None
    for sample_id, sample in samples.items():
        if members and (tokens + sample.tokens > budget or sample.samples is not current_set):
            yield members
            members, tokens = [], 0
        members.append(sample_id)
        tokens, current_set = tokens + sample.tokens, sample.samples
    if members:
        yield members
