"""A training step to be planned: its draft and settings, and a rank's share of its stream, as shapes alone."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from eagle3.attention.ring import RingMode
from eagle3.draft.config import DraftConfig
from eagle3.objective.model import MemoryPlan
from eagle3.objective.unroll import Residence
from eagle3.parallel.dealing import QuerySelection
from eagle3.parallel.sequence import SequencePlan, Stream


class Sizes(NamedTuple):
    """tensor, ulysses, ring: of the groups that share a stream. data: ranks with other streams."""

    tensor: int = 1
    ulysses: int = 1
    ring: int = 1
    data: int = 1

    @property
    def sequence(self) -> int:
        return self.ulysses * self.ring

    @property
    def ranks(self) -> int:
        return self.tensor * self.sequence * self.data


class Share(NamedTuple):
    """What one rank has of a stream: keys, queries and teacher rows, rows whose auxiliary states it reads. longest: tokens
    of the longest document. pairs: visible keys of all queries of the stream."""

    keys: int
    queries: int
    teacher: int
    rows: int
    longest: int
    pairs: int

    @classmethod
    def of(cls, plan: SequencePlan, stream: Stream) -> "Share":
        """The share that a plan names of its stream."""
        sees = stream.position[plan.queries[plan.queries >= 0]] + 1
        sees = sees if plan.window is None else sees.clamp(max=plan.window)
        longest = int(stream.position.max()) + 1
        return cls(len(plan.keys), len(plan.queries), len(plan.teacher), len(plan.rows), longest, int(sees.sum()))

    @classmethod
    def expected(
        cls,
        tokens: int,
        supervised: float,
        sizes: Sizes,
        documents: int = 1,
        window: int | None = None,
        spans: int = 1,
        query_selection: QuerySelection = "supervised",
    ) -> "Share":
        """Of equal documents of `tokens` tokens together, the last `supervised` share of each of which counts. window: of
        keys that a query sees. spans: runs of a document's supervised tokens, each of which needs a window's keys before it.
        query_selection: which rows are unrolled."""
        longest, teacher = math.ceil(tokens / documents), math.ceil(tokens * supervised / sizes.sequence)
        if query_selection == "all":
            supervised, spans = 1.0, 1
        counting, reach = longest * supervised, longest if window is None else min(window, longest)
        begun = max(0.0, counting - (longest - reach))  # queries whose window the document's start cuts off
        pairs = round(documents * (counting * reach - begun**2 / 2))
        queries, keys = tokens * supervised, min(tokens, documents * (counting + spans * reach))
        mine, shared = math.ceil(queries / sizes.sequence), math.ceil(keys / sizes.sequence)
        # rows that are a rank's keys and its queries at once, on the first Ulysses rank, which has the fewest such
        both = max(0, queries - (sizes.ulysses - 1) * (keys - queries)) / sizes.sequence / sizes.ring
        return cls(shared, mine, teacher, round(shared + mine - both), longest, pairs)


@dataclass(frozen=True)
class Planned:
    """A training step to be planned. steps: K. dtype: of the draft. ring_mode, memory, residence: as in training. device:
    on CPUs norms are several operations, each of which keeps its result where nothing is recomputed. bucket: numbers in
    DeepSpeed's buckets for gradients under way, all of them together; zero_stage: 2 deals gradients too, 1 does not.
    logit_bytes: of one of the teacher's logits, where these are kept and not last hidden states. query_selection: as in
    training, all rows or the supervised ones."""

    draft: DraftConfig
    steps: int
    dtype: torch.dtype
    sizes: Sizes = Sizes()
    ring_mode: RingMode = "gather"
    memory: MemoryPlan = MemoryPlan()
    residence: Residence = "device"
    device: Literal["cuda", "cpu"] = "cuda"
    bucket: int = 100_000_000
    zero_stage: int = 2
    logit_bytes: int | None = None
    query_selection: QuerySelection = "supervised"

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def exact(self) -> int:
        """Bytes of a number in sums."""
        return max(4, self.dtype.itemsize)

    @property
    def widens(self) -> bool:
        """True where operations of half precision are done in fp32 copies."""
        return self.device == "cpu" and self.itemsize < 4

    @property
    def teacher_bytes(self) -> int:
        """Of what a tensor-parallel rank has of a teacher row."""
        if self.logit_bytes is None:
            return self.draft.target_hidden_size * self.itemsize
        return self.draft.draft_vocab_size // self.sizes.tensor * self.logit_bytes

    @property
    def query_width(self) -> int:
        """Numbers of one query, all heads of a tensor-parallel rank."""
        return self.draft.num_attention_heads // self.sizes.tensor * self.draft.head_dim

    @property
    def key_width(self) -> int:
        """Numbers of one key (or value)."""
        return self.draft.num_key_value_heads // self.sizes.tensor * self.draft.head_dim

    @property
    def shared_width(self) -> int:
        """Of one shared key on one Ulysses rank, times the Ulysses degree: heads that do not divide are replicated."""
        heads = self.draft.num_key_value_heads // self.sizes.tensor
        return math.lcm(heads, self.sizes.ulysses) * self.draft.head_dim


@dataclass(frozen=True)
class Weights:
    """Numbers of weights on one tensor-parallel rank, by who uses them: the entry (fc) alone, projections of every step,
    what follows attention, lm_head, and the frozen embedding."""

    entry: int
    project: int
    finish: int
    head: int
    embedding: int

    @classmethod
    def of(cls, draft: DraftConfig, tensor: int) -> "Weights":
        hidden, wide = draft.hidden_size, draft.target_hidden_size
        heads = (draft.num_attention_heads + 2 * draft.num_key_value_heads) * draft.head_dim // tensor
        return cls(
            entry=3 * wide * hidden + (3 * wide if draft.fc_norm else 0),
            project=2 * hidden * heads + 2 * hidden,
            finish=hidden * draft.num_attention_heads * draft.head_dim // tensor
            + 3 * hidden * draft.intermediate_size // tensor
            + hidden,
            head=hidden * draft.draft_vocab_size // tensor + hidden,
            embedding=-(-draft.vocab_size // tensor) * hidden,
        )

    @property
    def trained(self) -> int:
        return self.entry + self.project + self.finish + self.head
