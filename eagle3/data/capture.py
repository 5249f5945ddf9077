"""Fills a hidden-state store: which samples a process captures, what that takes on the disk, and the work itself."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from eagle3.data.samples import Sample, SampleSet
from eagle3.data.store.codecs import expected_bytes
from eagle3.data.store.shard import Encoding
from eagle3.data.store.writer import StoreWriter
from eagle3.errors import UserError
from eagle3.target.interface import HiddenStates, Target

# ids, argmax, logsumexp and loss mask of a token.
TOKEN_BYTES = 13
# A round's tokens, in prefill batches: enough to put samples of equal length together, few enough to hold.
ROUND_BATCHES = 4


class Wanted(NamedTuple):
    """Sample `place` of a set. taught: rows whose last hidden state is stored."""

    samples: SampleSet
    place: int
    tokens: int
    taught: int

    def load(self) -> Sample:
        return self.samples[self.place]


class LongTarget(Protocol):
    """Prefills one document chunk by chunk, maybe on several ranks together."""

    def chunks(self, document: Tensor) -> Iterator[HiddenStates | None]:
        """Consecutive rows, together the document; None as many times on ranks other than the first."""
        ...


class ArrivingTarget(Protocol):
    """Prefills documents in an order of its own."""

    def arriving(self, documents: Iterable[Tensor]) -> Iterator[tuple[int, Iterator[HiddenStates]]]:
        """The place of a document and consecutive rows of it, together the document."""
        ...


def wanted_samples(sets: Iterable[SampleSet]) -> dict[str, Wanted]:
    """The samples of all sets by id, each once; nothing is loaded."""
    wanted: dict[str, Wanted] = {}
    for samples in sets:
        sizes = zip(samples.sample_ids, samples.lengths.tolist(), samples.taught.tolist(), strict=True)
        for place, (sample_id, tokens, taught) in enumerate(sizes):
            wanted.setdefault(sample_id, Wanted(samples, place, tokens, taught))
    return wanted


def token_bytes(encoding: Encoding, taught: float = 1.0) -> float:
    """What a token takes in a store, where a share `taught` of them have last hidden states; for `lossless` an estimate."""
    dtype, hidden = encoding.number_format, encoding.hidden_size
    aux, last = (
        expected_bytes(encoding.codec_of(name), dtype, encoding.width(name), hidden) for name in ("aux", "last")
    )
    return TOKEN_BYTES + aux + taught * last


def disk_need(samples: Iterable[Wanted], encoding: Encoding) -> int:
    """Bytes of these samples in a store, but for shards' headers and indexes."""
    return round(sum(one.tokens * token_bytes(encoding, one.taught / one.tokens) for one in samples))


def require_disk(folder: Path, samples: Sequence[Wanted], encoding: Encoding) -> str:
    """What the samples take and what is free, in words. Raises UserError where the disk cannot hold them."""
    need, free = disk_need(samples, encoding), shutil.disk_usage(folder).free
    about = "about " if encoding.codec == "lossless" else ""
    if need > free:
        smaller = " hidden_states.codec to lossless or fp8," if encoding.codec == "none" else ""
        raise UserError(
            f"{folder}: {len(samples):,} samples take {about}{_gib(need)} more, the disk has {_gib(free)}; set{smaller} "
            "hidden_states.path to another disk, or data.max_samples"
        )
    return f"{about}{_gib(need)} to write, {_gib(free)} free"


def capture(
    target: Target, samples: Sequence[Wanted], prefill_tokens: int, writer: StoreWriter, captured: Callable[[int], None]
) -> None:
    """Prefill samples in batches of `prefill_tokens` and write them; one round is written while the next is prefilled.
    captured: told the tokens of each round that is written."""

    def write(round_samples: Sequence[Sample], states: Sequence[HiddenStates]) -> None:
        for sample, of_sample in zip(round_samples, states, strict=True):
            writer.add(sample.id, sample.ids, sample.loss_mask, of_sample)
        captured(sum(len(sample.ids) for sample in round_samples))

    with ThreadPoolExecutor(1, thread_name_prefix="write") as background:
        writing: Future[None] | None = None
        for members in _rounds(samples, ROUND_BATCHES * prefill_tokens):
            loaded = [one.load() for one in members]
            states = target.prefill([sample.ids for sample in loaded])
            if writing:
                writing.result()
            writing = background.submit(write, loaded, states)
        if writing:
            writing.result()


def capture_long(
    target: LongTarget, samples: Sequence[Wanted], writer: StoreWriter, captured: Callable[[int], None]
) -> None:
    """Prefill samples one after another, chunk by chunk; the ranks that share `target` call it with the same samples.
    What the target hands this rank goes to the disk as it comes. captured: told the tokens of each chunk."""
    for one in samples:
        sample = one.load()
        handed = (part for part in target.chunks(sample.ids) if part is not None)
        first = next(handed, None)
        if first is not None:
            writer.add(sample.id, sample.ids, sample.loss_mask, _telling(chain([first], handed), captured))


def capture_arriving(
    target: ArrivingTarget, samples: Sequence[Wanted], writer: StoreWriter, captured: Callable[[int], None]
) -> None:
    """Write samples in the order in which the target has them. captured: told the tokens of what is written."""
    loaded: dict[int, Sample] = {}

    def documents() -> Iterator[Tensor]:
        for place, one in enumerate(samples):
            loaded[place] = one.load()
            yield loaded[place].ids

    for place, parts in target.arriving(documents()):
        sample = loaded.pop(place)
        writer.add(sample.id, sample.ids, sample.loss_mask, _telling(parts, captured))


def _telling(parts: Iterable[HiddenStates], captured: Callable[[int], None]) -> Iterator[HiddenStates]:
    for part in parts:
        yield part
        captured(len(part.last))


def _rounds(samples: Sequence[Wanted], budget: int) -> Iterator[list[Wanted]]:
    """Consecutive samples of at most `budget` tokens together, or one that is longer."""
    members: list[Wanted] = []
    for one in samples:
        if members and sum(member.tokens for member in members) + one.tokens > budget:
            yield members
            members = []
        members.append(one)
    if members:
        yield members


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**28 else f"{size / 2**20:,.1f} MiB"
