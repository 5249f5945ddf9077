"""Loads streams on several ranks, all cases in one launch, and keeps what each rank got for
tests/states/test_loader.py.

python tests/support/loader_worker.py FOLDER    with `target` and the stores of `store_of` in it
"""

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from processes import fork_ranks, keep
from torch import Tensor

from eagle3.errors import SharedUserError
from eagle3.parallel.sequence import Reach, SequencePlan, SequenceSharding, Stream
from eagle3.parallel.topology import Topology, require_agreement, start_distributed, stop_distributed
from eagle3.states.loader import DrawnSample, LiveSource, StoredSource, StreamLoader
from eagle3.states.rows import Rows
from eagle3.states.store.reader import HiddenStateStore
from eagle3.targets.transformers import TransformersTarget, load_target
from eagle3.text.samples import SampleSet

STEPS = 3
PROVENANCE = {"target": "tiny"}
LENGTHS = [97, 3, 41, 1, 66, 18, 41, 120, 9, 30]
ONE_TOKEN, UNSUPERVISED = 3, 4  # places in LENGTHS: the document of one token, and one without supervision


@dataclass(frozen=True)
class Case:
    """documents: places in LENGTHS of one optimiser step's samples; None for all. dtype: of the target and the store.
    Ranks of `world` that the layout does not use are data-parallel."""

    name: str
    world: int
    tensor: int = 1
    ulysses: int = 1
    ring: int = 1
    accumulation: int = 1
    documents: tuple[int, ...] | None = None
    dtype: str = "float32"
    layout: str = "zigzag"

    @property
    def sharding(self) -> SequenceSharding:
        return SequenceSharding(self.ulysses, self.ring, self.layout, query_block=8)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.tensor, self.ulysses, self.ring

    def sequence_rank(self, rank: int) -> int:
        """Ranks are ordered tensor, sequence, data, fastest first."""
        return rank // self.tensor % (self.ulysses * self.ring)


CASES = [
    Case("ring", 2, ring=2),
    Case("ulysses in bfloat16", 2, ulysses=2, dtype="bfloat16", layout="contiguous"),
    Case("tensor", 2, tensor=2, accumulation=2),
    Case("tensor and ulysses", 4, tensor=2, ulysses=2, accumulation=2),
    Case("tensor and ulysses in bfloat16", 4, tensor=2, ulysses=2, dtype="bfloat16"),
    Case("ring and data", 4, ring=2, accumulation=2, layout="contiguous"),
    Case("ulysses and ring", 4, ulysses=2, ring=2),
    Case("tensor and data", 4, tensor=2),
    Case("data", 4, accumulation=2),
    Case("one document", 4, ulysses=2, ring=2, documents=(7,)),
    Case("one token", 4, tensor=2, ring=2, documents=(ONE_TOKEN,)),
    Case("one document, two data ranks", 4, ring=2, documents=(0,)),
    Case("nothing supervised", 4, tensor=2, ring=2, documents=(UNSUPERVISED,)),
    Case("nothing supervised in a stream", 4, ulysses=2, documents=(0, UNSUPERVISED)),
]


def encoded_documents() -> list[tuple[Tensor, Tensor]]:
    """(ids, loss mask) of each document. Masks select answers after a prompt, single rows, everything, or nothing."""
    generator = torch.Generator().manual_seed(11)
    documents = []
    for place, length in enumerate(LENGTHS):
        ids = torch.randint(2, 290, (length,), generator=generator)
        share = 0.0 if place == UNSUPERVISED else [0.5, 0.1, 1.0][place % 3]
        mask = torch.rand(length, generator=generator) < share
        if place == 0:
            mask = torch.arange(length) >= 60
        documents.append((ids, mask))
    return documents


def sample_set(order: Sequence[int]) -> SampleSet:
    documents = encoded_documents()
    return SampleSet.pack([tuple(part.numpy() for part in documents[place]) for place in order])


def batch_of(case: Case) -> list[DrawnSample]:
    """The case's documents, as places among all documents sorted by id, no matter in which order a rank reads them."""
    ids = [sample.id for sample in sample_set(range(len(LENGTHS)))]
    return [DrawnSample(sorted(ids).index(ids[place]), 0) for place in case.documents or range(len(LENGTHS))]


def store_of(folder: Path, dtype: str, codec: str) -> Path:
    return folder / f"store-{dtype}-{codec}"


class CountingTarget(TransformersTarget):
    """Remembers what it prefilled."""

    prefilled: list[list[int]]

    def prefill(self, documents: Sequence[Tensor]) -> list[Rows]:
        self.prefilled += [document.tolist() for document in documents]
        return super().prefill(documents)


def run(folder: Path, world: int) -> None:
    models = {dtype: load_target(folder / "target", dtype=dtype).model for dtype in ("float32", "bfloat16")}

    def load(case: Case, topology: Topology) -> dict:
        """The same step four times: live with each document prefilled alone, live in batches, and from two stores."""
        order = random.Random(dist.get_rank()).sample(range(len(LENGTHS)), len(LENGTHS))
        alone, batched = (
            CountingTarget(models[case.dtype], aux_layers=None, prefill_tokens=tokens) for tokens in (1, 256)
        )
        alone.prefilled, batched.prefilled = [], []
        stores = {}
        for codec in ("none", "lossless"):
            needed = {**PROVENANCE, "codec": codec, "dtype": case.dtype}
            stores[codec] = HiddenStateStore.open(str(store_of(folder, case.dtype, codec)), needed)
        sources = {"stored": StoredSource(stores["none"]), "lossless": StoredSource(stores["lossless"])}
        for name, target in (("alone", alone), ("batched", batched)):
            sources[name] = LiveSource(target, topology.stream, topology.device)
        place = {"sharding": case.sharding, "data": topology.data, "sequence": topology.sequence}
        results = {}
        for name, source in sources.items():
            samples = sample_set(order).sorted_by_id()  # every rank reads the samples in a different order
            loader = StreamLoader(samples, source, rows_alone, reach=Reach(STEPS), rule="reference", **place)
            if name == "lossless":
                loader.read_ahead(batch_of(case), case.accumulation)
            results[name] = loader.load(batch_of(case), case.accumulation)
        assert alone.prefilled == batched.prefilled
        return results | {"prefilled": alone.prefilled}

    cases = [case for case in CASES if case.world == world]
    for sizes in dict.fromkeys(case.sizes for case in cases):  # form groups once per layout
        topology = start_distributed(*sizes)
        for case in cases:
            if case.sizes == sizes:
                keep(load(case, topology), folder, case.name)
    if world == 4:
        topology = start_distributed(tensor=2)
        keep(agree(topology), folder, "agreement")
    stop_distributed()


def rows_alone(stream: Stream, plan: SequencePlan, rows: Rows) -> Rows:
    """What a loader makes of a stream here."""
    return rows


def agree(topology: Topology) -> dict[str, str | None]:
    """What require_agreement says; None if it says nothing."""
    rank = dist.get_rank()
    order = random.Random(rank).sample(range(len(LENGTHS)), len(LENGTHS))
    whole, batch = sample_set(order), [DrawnSample(index, 0) for index in range(len(LENGTHS))]
    other_mask = SampleSet.pack([(ids.numpy(), mask.numpy() ^ (len(ids) == 9)) for ids, mask in encoded_documents()])

    def complaint(identity: bytes) -> str | None:
        try:
            require_agreement("samples", identity, "prepare again")
        except SharedUserError as mistake:
            return str(mistake)
        return None

    def order_of(samples: SampleSet, batch: list[DrawnSample] = batch[:4]) -> bytes:
        place = {"rule": "served", "sharding": SequenceSharding(), "data": topology.data, "sequence": topology.sequence}
        return StreamLoader(samples.sorted_by_id(), None, rows_alone, reach=Reach(STEPS), **place).order_identity(batch)

    checks: dict[str, Callable[[], str | None]] = {
        "same order": lambda: complaint(order_of(whole)),
        "another mask on rank 3": lambda: complaint(order_of(other_mask if rank == 3 else whole)),
        "rank 0 has one sample fewer": lambda: complaint(order_of(sample_set(order[1:]) if rank == 0 else whole)),
        "another batch on ranks 1 and 3": lambda: complaint(order_of(whole, [DrawnSample(rank % 2, 0)])),
        "everyone differs": lambda: complaint(bytes([rank])),
    }
    return {name: check() for name, check in checks.items()}


if __name__ == "__main__":
    for world in (2, 4):
        fork_ranks(world, partial(run, Path(sys.argv[1]), world))
