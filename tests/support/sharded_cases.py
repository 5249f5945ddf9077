"""The cases of tests/parallel/test_sharded.py: every layout once, and enough others that every pair of two axes' values
occurs."""

import itertools
import random
from dataclasses import dataclass, fields
from typing import Any

from definition import Case, Document, random_case

from eagle3.objective.losses import LossConfig
from eagle3.objective.recompute import MemoryPlan
from eagle3.parallel.sequence import SequenceSharding

AXES = {
    "tensor": (1, 2),
    "ulysses": (1, 2, 4),
    "ring": (1, 2, 4),
    "data": (1, 2),
    "ring_mode": ("gather", "p2p"),
    "layout": ("zigzag", "contiguous"),
    "kv_heads": (2, 1, 8),
    "window": (None, 5, 12),
    "streams": ("packed", "one long", "shorter than K", "mostly unsupervised", "unequal"),
    "query_selection": ("supervised", "all"),
    "accumulation": (1, 2),
    "loss": ("kl", "lk_lambda", "lk_alpha"),
    "recompute": ("full", "none", "attention_kept"),
    "rows": ("served", "reference"),
    "normalization": ("counted", "samples"),
    "states": (3, 1, 5),
    "heads": ("plain", "normed and biased"),
}
STEPS, HEADS, MOST_PROCESSES = 5, 8, 8
# tensor, Ulysses, ring, data: the smallest layout with every kind of group, although it exceeds MOST_PROCESSES
LARGEST = (2, 2, 2, 2)


@dataclass(frozen=True)
class Sharded:
    """One case: sizes of the groups, and the axes above."""

    tensor: int
    ulysses: int
    ring: int
    data: int
    ring_mode: str = "gather"
    layout: str = "zigzag"
    kv_heads: int = 2
    window: int | None = None
    streams: str = "packed"
    query_selection: str = "supervised"
    accumulation: int = 1
    loss: str = "kl"
    recompute: str = "full"
    rows: str = "served"
    normalization: str = "counted"
    states: int = 3
    heads: str = "plain"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.tensor, self.ulysses, self.ring, self.data

    @property
    def world(self) -> int:
        return self.tensor * self.ulysses * self.ring * self.data

    @property
    def name(self) -> str:
        sizes = f"tp{self.tensor}-u{self.ulysses}-r{self.ring}-dp{self.data}"
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)[4:] if getattr(self, f.name) != f.default]
        return " ".join([sizes, *changed])

    @property
    def possible(self) -> bool:
        """Whether there are few enough processes, and enough key/value heads for the tensor-parallel ranks."""
        return self.world <= MOST_PROCESSES and self.kv_heads % self.tensor == 0

    @property
    def sharding(self) -> SequenceSharding:
        return SequenceSharding(self.ulysses, self.ring, self.layout, self.query_selection, query_block=4)

    @property
    def memory(self) -> MemoryPlan:
        """A plan with chunks of about 16 tokens and loss blocks of a few rows."""
        return MemoryPlan(self.recompute, block_bytes=60_000)

    @property
    def config(self) -> LossConfig:
        return LossConfig(self.loss, normalization=self.normalization, kl_scale=0.7)

    def case(self) -> Case:
        masks = [mask for stream in self._masks() for mask in stream]
        sizes = {"hidden_size": 32, "target_hidden_size": 20, "vocab_size": 41, "draft_vocab_size": 36}
        heads = {"num_attention_heads": HEADS, "num_key_value_heads": self.kv_heads, "window": self.window}
        heads |= dict.fromkeys(("qk_norm", "attention_bias"), self.heads != "plain")
        states = {"fc_norm": True, "num_aux_hidden_states": self.states}
        return random_case(masks, seed=1, rows=self.rows, **sizes, **heads, **states)

    def dealt(self, case: Case) -> list[list[Document]]:
        """The case's documents by stream; there are data x accumulation streams."""
        documents = iter(case.documents)
        return [[next(documents) for _ in stream] for stream in self._masks()]

    def _masks(self) -> list[list[list[int]]]:
        """For each stream, the loss masks of its documents."""
        count = self.data * self.accumulation
        if self.streams == "packed":
            return [[[0] * (5 + i) + [1] * 8, [1] * 4, [0] * 9 + [1] * 2 + [0] * 3, [0, 1] * 5] for i in range(count)]
        if self.streams == "one long":
            return [[[0] * 90 + [1] * 30 + [0] * (3 + i)] for i in range(count)]
        if self.streams == "shorter than K":
            return [[[1], [1, 1], [0, 1], [1, 1, 1], [1, 0, 0, 1], [0, 1, 1, 1], [1] * (2 + i)] for i in range(count)]
        if self.streams == "mostly unsupervised":  # one query block: most ranks have none
            return [[[0] * 40 + [1, 1, 1, 1, 0], [0] * 20] if i == 0 else [[0] * 30] for i in range(count)]
        assert self.streams == "unequal"
        return [[[0] * 3 + [1] * (6 + 23 * i), [1] * (1 + 7 * i)] for i in range(count)]


def base_cases() -> list[Sharded]:
    """Every layout of 2, 4 or 8 processes once, and one of 16. The other axes have their first values."""
    sizes = itertools.product(*(AXES[name] for name in ("tensor", "ulysses", "ring", "data")))
    return [
        case for case in (Sharded(*each) for each in sizes) if 1 < case.world <= MOST_PROCESSES or case.sizes == LARGEST
    ]


def covering_cases(seed: int = 0, tries: int = 60) -> list[Sharded]:
    """Cases in which every possible pair of two axes' values occurs. Each is the best of several random ones."""
    source, cases = random.Random(seed), []
    missing = possible_pairs()
    while missing:
        drawn = [_draw(source, source.choice(sorted(missing, key=repr))) for _ in range(tries)]
        best = max(drawn, key=lambda case: len(pairs_of(case) & missing))
        cases.append(best)
        missing -= pairs_of(best)
    return cases


# Two axes, each with a value, in the order of AXES.
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def possible_pairs() -> set[Pair]:
    axes = [[(name, value) for value in values] for name, values in AXES.items()]
    pairs = (pair for one, other in itertools.combinations(axes, 2) for pair in itertools.product(one, other))
    return {
        pair for pair in pairs if Sharded(**({"tensor": 1, "ulysses": 1, "ring": 1, "data": 1} | dict(pair))).possible
    }


def pairs_of(case: Sharded) -> set[Pair]:
    return set(itertools.combinations([(name, getattr(case, name)) for name in AXES], 2))


def _draw(source: random.Random, pair: Pair) -> Sharded:
    while True:
        case = Sharded(**({name: source.choice(values) for name, values in AXES.items()} | dict(pair)))
        if case.possible and case.world > 1:
            return case
