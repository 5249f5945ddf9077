"""Describes a training step to plan (the draft, its settings, one rank's share of a stream), and derives the rank's
FLOPs, the bytes that it sends, and the time for both, from shapes alone."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from eagle3.attention.ring import RingMode
from eagle3.draft.config import DraftConfig
from eagle3.objective.recompute import MemoryPlan
from eagle3.objective.streaming import Residence
from eagle3.parallel.sequence import QuerySelection

Phase = Literal["forward", "backward"]
# (kind of data, phase) -> bytes sent.
Traffic = Counter[tuple[str, Phase]]


class Sizes(NamedTuple):
    """The parallel degrees of a job."""

    tensor: int = 1
    ulysses: int = 1
    ring: int = 1
    data: int = 1  # ranks with different streams; the ranks of the other three degrees share one stream

    @property
    def sequence(self) -> int:
        return self.ulysses * self.ring

    @property
    def ranks(self) -> int:
        return self.tensor * self.sequence * self.data


class RankShare(NamedTuple):
    """One rank's share of a stream, in rows."""

    keys: int
    queries: int
    teacher: int
    rows: int  # rows whose auxiliary states the rank reads
    longest: int  # length of the longest document in tokens
    pairs: int  # visible keys, summed over all queries of the whole stream
    tokens: int  # different tokens that follow its keys and queries


@dataclass(frozen=True)
class Planned:
    """A training step to plan."""

    draft: DraftConfig
    steps: int  # K
    dtype: torch.dtype  # number format of the draft
    sizes: Sizes = Sizes()
    ring_mode: RingMode = "gather"  # this and the next two are as in training
    memory: MemoryPlan = MemoryPlan()
    residence: Residence = "device"
    # On a CPU a norm is several operations, each of which saves its result unless it is recomputed.
    device: Literal["cuda", "cpu"] = "cuda"
    # Total size of DeepSpeed's buckets for gradients in flight, in numbers.
    bucket: int = 100_000_000
    # ZeRO stage 2 divides gradients among ranks, 1 does not.
    zero_stage: int = 2
    # Bytes per teacher logit; None if the teacher is given as last hidden states.
    logit_bytes: int | None = None
    # Which rows are unrolled, as in training.
    query_selection: QuerySelection = "supervised"

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def exact(self) -> int:
        """Bytes per number in sums, which are fp32 or wider."""
        return max(4, self.dtype.itemsize)

    @property
    def weights(self) -> "Weights":
        """The number of weights on one tensor-parallel rank."""
        return Weights.of(self.draft, self.sizes.tensor)

    @property
    def columns(self) -> int:
        """Number of draft vocabulary tokens on one tensor-parallel rank."""
        return self.draft.draft_vocab_size // self.sizes.tensor

    @property
    def teacher_bytes(self) -> int:
        """Bytes per teacher row on one tensor-parallel rank."""
        if self.logit_bytes is None:
            return self.draft.target_hidden_size * self.itemsize
        return self.columns * self.logit_bytes

    @property
    def query_width(self) -> int:
        """Numbers in one query, with all heads of one tensor-parallel rank."""
        return self.draft.num_attention_heads // self.sizes.tensor * self.draft.head_dim

    @property
    def key_width(self) -> int:
        """Numbers in one key (or value) on one tensor-parallel rank."""
        return self.draft.num_key_value_heads // self.sizes.tensor * self.draft.head_dim

    @property
    def shared_width(self) -> int:
        """Numbers in one shared key on one Ulysses rank, times the Ulysses degree. Heads that cannot be divided are
        replicated."""
        heads = self.draft.num_key_value_heads // self.sizes.tensor
        return math.lcm(heads, self.sizes.ulysses) * self.draft.head_dim


@dataclass(frozen=True)
class Weights:
    """Numbers of weights on one tensor-parallel rank, grouped by where they are used."""

    entry: int  # fc
    project: int  # q, k, v and their norms
    finish: int  # everything after attention
    head: int  # lm_head and its norm
    embedding: int  # frozen

    @classmethod
    def of(cls, draft: DraftConfig, tensor: int) -> "Weights":
        hidden, wide = draft.hidden_size, draft.aux_width
        heads = (draft.num_attention_heads + 2 * draft.num_key_value_heads) * draft.head_dim // tensor
        return cls(
            entry=wide * hidden + (wide if draft.fc_norm or draft.norm_before_fc else 0),
            project=2 * hidden * heads + 2 * hidden + 2 * draft.head_dim * draft.qk_norm + heads * draft.attention_bias,
            finish=hidden * draft.num_attention_heads * draft.head_dim // tensor
            + 3 * hidden * draft.intermediate_size // tensor
            + hidden * (1 + draft.attention_bias),
            head=hidden * draft.draft_vocab_size // tensor + hidden,
            embedding=-(-draft.vocab_size // tensor) * hidden,
        )

    @property
    def trained(self) -> int:
        return self.entry + self.project + self.finish + self.head


class Flops(NamedTuple):
    """One rank's FLOPs in one step."""

    model: float  # one forward and one backward pass; the basis for utilisation
    executed: float  # including recomputation


def step_flops(planned: Planned, share: RankShare) -> Flops:
    """Counts the FLOPs of matrix products, two per multiply-add. A backward pass costs twice as much as its forward
    pass; in attention, 2.5 times as much. The query-key pairs of the whole stream are divided evenly among its
    ranks."""
    draft, sizes, steps = planned.draft, planned.sizes, planned.steps
    hidden, wide, columns = draft.hidden_size, draft.target_hidden_size, planned.columns
    fc = share.rows * 2 * draft.aux_width * hidden
    keys = 2 * 2 * hidden * 2 * planned.key_width
    project = share.queries * (steps * 2 * 2 * hidden * planned.query_width + (steps - 1) * keys)
    finish = share.queries * steps * 2 * hidden * (planned.query_width + 3 * draft.intermediate_size // sizes.tensor)
    attention = steps * 4 * planned.query_width * share.pairs / sizes.sequence
    loss = share.teacher * steps * 2 * hidden * columns
    teacher = share.teacher * 2 * wide * columns if planned.logit_bytes is None else 0
    linear = fc + share.keys * keys + project + finish
    model = 3 * (linear + loss) + 3.5 * attention + teacher - fc  # fc's input needs no gradient
    again = {"none": 0, "attention_kept": linear, "full": linear + project + attention}
    return Flops(model, model + again[planned.memory.recompute])


def sent_bytes(planned: Planned, share: RankShare) -> Traffic:
    """Bytes that a rank sends in one step, including padding. In a group of G ranks, it sends (G-1)/G of its input to
    an all-to-all or reduce-scatter, G-1 times its share in an all-gather, and 2 (G-1)/G of its buffer in an all-reduce.

    - Ulysses exchanges K_0, V_0 once, and q, output and lse in every step. In the backward pass it exchanges the
      gradients of q and output, and the output and lse themselves.
    - The ring's `gather` sends K_0, V_0 once, and their gradient, in fp32, back once.
    - The ring's `p2p` sends K_0, V_0 in every step's forward and again in its backward, where the gradient travels one
      hop further, back to its own rank.
    - Recomputed steps repeat in the backward pass what they sent in the forward pass.
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
    queries = steps * away * share.queries * planned.query_width * size
    lse = steps * away * share.queries * heads * exact
    by_kind = {
        "Ulysses K0,V0": (away * prefix * size, away * prefix * size, 0),
        "Ulysses q,out": (2 * queries, 3 * queries, 2 * queries),
        "Ulysses lse": (lse, lse, lse),
        "ring K0,V0": (*around, ring_again),
        "tensor": _tensor_bytes(planned, share),
    }
    full = planned.memory.recompute == "full"
    sent: Traffic = Counter()
    for kind, (forward, backward, again) in by_kind.items():
        sent[kind, "forward"], sent[kind, "backward"] = forward, backward + (again if full else 0)
    return sent


def _tensor_bytes(planned: Planned, share: RankShare) -> tuple[float, float, float]:
    """Bytes sent within the tensor-parallel group: in the forward pass, in the backward pass, and again by steps that
    are recomputed whole.

    - Forward: embeddings, and each step's outputs of attention and MLP. Then the distillation's maxima and sums (over
      the draft's K steps and the teacher), best ids, sums, and the gradients of all outputs and of the norm, which the
      distillation computes in the forward pass.
    - Backward: the gradients of hidden states and embeddings before q, k and v (K_0, V_0 have the keys' rows; all steps
      share embeddings unless something is recomputed), and of the MLP's inputs. Recomputed chunks repeat their forward
      pass. Steps that are recomputed whole repeat the forward pass of their projections once more.
    """
    hidden, size, exact, steps = planned.draft.hidden_size, planned.itemsize, planned.exact, planned.steps
    keys, queries, teacher = share.keys, share.queries, share.teacher
    met = keys + steps * queries  # rows that attention's projections read
    embedded = share.tokens if planned.memory.recompute == "none" else met
    unrolled = (embedded + 2 * steps * queries) * hidden * size
    distilled = 2 * (steps + 1) * teacher * exact + steps * (teacher + 2) * 8 + steps * queries * hidden * size
    if not planned.draft.norm_output:
        distilled += hidden * exact
    entering = (met + embedded + steps * queries) * hidden * size
    if planned.memory.recompute != "none":
        entering += unrolled
    again = steps * queries * hidden * size
    reduced = 2 * (planned.sizes.tensor - 1) / planned.sizes.tensor
    return reduced * (unrolled + (distilled if teacher else 0)), reduced * entering, reduced * again


@dataclass(frozen=True)
class Machine:
    """Hardware numbers for estimating step times. They come from data sheets, except for `utilisation`, an
    assumption."""

    flops: float = 989e12  # a GPU's peak, per second
    utilisation: float = 0.5  # share of the peak that matrix products reach
    near: float = 450e9  # bytes per second that a rank sends inside its node
    far: float = 50e9  # bytes per second that a rank sends out of its node
    node: int = 8  # ranks in a node


MACHINE = Machine()


def step_seconds(planned: Planned, share: RankShare) -> float:
    """Seconds for one stream's forward and backward pass, without any overlap, and without loading and the
    optimiser."""
    inside = planned.sizes.tensor * planned.sizes.sequence <= MACHINE.node
    sent = sent_bytes(planned, share)
    ring = sum(number for (kind, _), number in sent.items() if kind.startswith("ring"))
    computed = step_flops(planned, share).executed / (MACHINE.flops * MACHINE.utilisation)
    return computed + (sent.total() - ring) / MACHINE.near + ring / (MACHINE.near if inside else MACHINE.far)
