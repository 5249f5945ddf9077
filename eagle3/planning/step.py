"""A training step to be planned: its draft and settings, a rank's share of its stream, and from these shapes alone what it computes
and sends: FLOPs, bytes between ranks, and the time they take."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from eagle3.attention.ring import RingMode
from eagle3.draft.config import DraftConfig
from eagle3.objective.model import MemoryPlan
from eagle3.objective.unroll import Residence
from eagle3.parallel.sequence import QuerySelection, SequencePlan, Stream

Phase = Literal["forward", "backward"]
# (what is sent, phase) -> bytes
Traffic = Counter[tuple[str, Phase]]


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
    def weights(self) -> "Weights":
        """Of a tensor-parallel rank."""
        return Weights.of(self.draft, self.sizes.tensor)

    @property
    def columns(self) -> int:
        """Tokens of the draft vocabulary that a tensor-parallel rank has."""
        return self.draft.draft_vocab_size // self.sizes.tensor

    @property
    def teacher_bytes(self) -> int:
        """Of what a tensor-parallel rank has of a teacher row."""
        if self.logit_bytes is None:
            return self.draft.target_hidden_size * self.itemsize
        return self.columns * self.logit_bytes

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


class Flops(NamedTuple):
    """Of one rank and step. model: forward and backward once, what utilisation is counted by. executed: with what is
    computed again."""

    model: float
    executed: float


def step_flops(planned: Planned, share: Share) -> Flops:
    """Two FLOPs a multiplication and addition of matrix products; a backward pass takes twice its forward, attention's
    two and a half times. Attention's pairs are those of the whole stream, dealt evenly to its ranks."""
    draft, sizes, steps = planned.draft, planned.sizes, planned.steps
    hidden, wide, columns = draft.hidden_size, draft.target_hidden_size, planned.columns
    fc = share.rows * 2 * 3 * wide * hidden
    keys = 2 * 2 * hidden * 2 * planned.key_width
    project = share.queries * (steps * 2 * 2 * hidden * planned.query_width + (steps - 1) * keys)
    finish = share.queries * steps * 2 * hidden * (planned.query_width + 3 * draft.intermediate_size // sizes.tensor)
    attention = steps * 4 * planned.query_width * share.pairs / sizes.sequence
    loss = share.teacher * steps * 2 * hidden * columns
    teacher = share.teacher * 2 * wide * columns if planned.logit_bytes is None else 0
    linear = fc + share.keys * keys + project + finish
    model = 3 * (linear + loss) + 3.5 * attention + teacher - fc  # aux has no gradient
    again = {"none": 0, "attention_kept": linear, "full": linear + project + attention}
    return Flops(model, model + again[planned.memory.recompute])


def sent_bytes(planned: Planned, share: Share) -> Traffic:
    """What a rank sends in one step (pads included). A rank of G sends (G-1)/G of an all-to-all's input and of a
    reduce-scatter's, its share G-1 times in an all-gather, 2 (G-1)/G of an all-reduce's buffer.

    Ulysses trades K_0, V_0 once, and q, output and lse in every step (lse not in step 0, which has no own keys to
    merge). The ring's `gather` sends K_0, V_0 once and their gradient, in fp32, back once; `p2p` sends them in every
    step's forward and again in its backward, in which the gradient goes one hop further, home. Steps that are
    recomputed send again, in the backward pass, what they sent in the forward pass.
    """
    size, exact, steps, sizes = planned.itemsize, planned.exact, planned.steps, planned.sizes
    prefix = 2 * share.keys * planned.shared_width  # numbers in a rank's K_0, V_0
    away, hops = (sizes.ulysses - 1) / sizes.ulysses, sizes.ring - 1
    if planned.ring_mode == "gather":
        around, ring_again = (hops * prefix * size, hops * prefix * exact), 0
    else:
        back = hops * size + (sizes.ring * exact if sizes.ring > 1 else 0)
        around = (steps * hops * prefix * size, steps * back * prefix)
        ring_again = around[0]
    heads = planned.draft.num_attention_heads // sizes.tensor
    queries = 2 * steps * away * share.queries * planned.query_width * size
    lse = (steps - 1) * away * share.queries * heads * exact
    by_kind = {
        "Ulysses K0,V0": (away * prefix * size, away * prefix * size, 0),
        "Ulysses q,out": (queries, queries, queries),
        "Ulysses lse": (lse, lse, lse),
        "ring K0,V0": (*around, ring_again),
        "tensor": _tensor_bytes(planned, share),
    }
    full = planned.memory.recompute == "full"
    sent: Traffic = Counter()
    for kind, (forward, backward, again) in by_kind.items():
        sent[kind, "forward"], sent[kind, "backward"] = forward, backward + (again if full else 0)
    return sent


def _tensor_bytes(planned: Planned, share: Share) -> tuple[float, float, float]:
    """Forward: embeddings, and each step's outputs of attention and MLP; then the distillation's maxima and sums of
    K draft columns and the teacher's, best ids, sums, and the gradient of all outputs, which it makes in the forward
    pass (with the norm's). Backward: the gradients of what enters q, k, v (each by itself; K_0, V_0 have the keys' rows)
    and the MLP; recomputed chunks repeat their forward, and whole steps that of their projections once more."""
    hidden, size, exact, steps = planned.draft.hidden_size, planned.itemsize, planned.exact, planned.steps
    keys, queries, teacher = share.keys, share.queries, share.teacher
    unrolled = (keys + 3 * steps * queries) * hidden * size
    distilled = 2 * (steps + 1) * teacher * exact + steps * (teacher + 3) * 8 + steps * queries * hidden * size
    if not planned.draft.norm_output:
        distilled += hidden * exact
    entering = (steps * queries * 2 + 2 * (keys + (steps - 1) * queries) * 2 + steps * queries) * hidden * size
    if planned.memory.recompute != "none":
        entering += unrolled
    again = steps * queries * hidden * size
    reduced = 2 * (planned.sizes.tensor - 1) / planned.sizes.tensor
    return reduced * (unrolled + (distilled if teacher else 0)), reduced * entering, reduced * again


@dataclass(frozen=True)
class Machine:
    """What step times are estimated with. flops: peak of a GPU; utilisation: of it that executed matrix products reach;
    near, far: bytes a second that a rank sends inside its node, and out of it. Data sheet numbers but for utilisation,
    which is an assumption."""

    flops: float = 989e12
    utilisation: float = 0.5
    near: float = 450e9
    far: float = 50e9
    node: int = 8


def step_seconds(planned: Planned, share: Share, machine: Machine = Machine()) -> float:
    """Of one stream's forward and backward pass, nothing overlapped; without loading and the optimiser."""
    inside = planned.sizes.tensor * planned.sizes.sequence <= machine.node
    sent = sent_bytes(planned, share)
    ring = sum(number for (kind, _), number in sent.items() if kind.startswith("ring"))
    computed = step_flops(planned, share).executed / (machine.flops * machine.utilisation)
    return computed + (sent.total() - ring) / machine.near + ring / (machine.near if inside else machine.far)
