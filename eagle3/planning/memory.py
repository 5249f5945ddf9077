"""Will it fit? What a training step holds on each rank, derived from shapes alone.

Memory follows the code's own allocations and block sizes (objective/recompute.py, attention/, objective/distill.py).
Each phase in which the step may hold most is added up, and the largest counts. tests/planning/test_planner.py compares
the sums with bytes counted in real steps.
"""

import math
from collections import Counter
from dataclasses import dataclass

from eagle3.attention.schedule import KEY_BLOCK, QUERY_BLOCK
from eagle3.objective.distill import loss_row_bytes, loss_rows
from eagle3.objective.recompute import chunk_token_bytes, chunk_tokens
from eagle3.planning.step import Planned, Share

# What takes memory -> bytes, in the phase of a step that holds most.
Bytes = Counter[str]
INDEX = 8  # bytes of a row number, token id or position


def step_bytes(planned: Planned, share: Share) -> Bytes:
    """The most that a rank holds at any time between the start of a forward pass and the end of its backward pass."""
    return max(_Rank(planned, share).phases(), key=Counter.total)


def engine_bytes(planned: Planned) -> Bytes:
    """What DeepSpeed's ZeRO holds besides the draft's own weights: fp32 masters, AdamW's two moments and the reduced
    gradients, divided among data and sequence ranks; and buckets for gradients in flight."""
    trained = planned.weights.trained
    part = math.ceil(trained / (planned.sizes.data * planned.sizes.sequence))
    return Counter(
        {
            "optimiser": 12 * part,
            "gradients": planned.itemsize * (part if planned.zero_stage == 2 else trained),
            "buffers": planned.bucket * planned.itemsize,
        }
    )


def rank_bytes(planned: Planned, share: Share) -> Bytes:
    """The step on top of the engine. `total()` has to fit, beside the device's own overhead."""
    return step_bytes(planned, share) + engine_bytes(planned)


def host_bytes(planned: Planned, share: Share) -> int:
    """Pinned host memory for one stream. (torch rounds each of the two parts up to a power of two.)"""
    if planned.residence == "device":
        return 0
    return 3 * share.rows * planned.draft.target_hidden_size * planned.itemsize + share.teacher * planned.teacher_bytes


@dataclass(frozen=True)
class _Rank:
    """What one rank holds in each phase of a step; all numbers are bytes."""

    planned: Planned
    share: Share

    @property
    def hidden(self) -> int:
        """One hidden state for every query."""
        return self.share.queries * self.planned.draft.hidden_size * self.planned.itemsize

    @property
    def attention(self) -> int:
        """q of one step, or attention's output of the same size."""
        return self.share.queries * self.planned.query_width * self.planned.itemsize

    @property
    def own(self) -> int:
        """Own keys and values of one step."""
        return 2 * self.share.queries * self.planned.key_width * self.planned.itemsize

    @property
    def home(self) -> int:
        """K_0, V_0 of this rank's keys."""
        return 2 * self.share.keys * self.planned.key_width * self.planned.itemsize

    @property
    def key_gradient(self) -> int:
        """The summed gradient of the K_0, V_0 that this rank sees and, for `p2p`, the parts of it in flight."""
        ring = self.planned.sizes.ring
        shares = 1 if ring == 1 else ring if self.planned.ring_mode == "gather" else 4
        return 2 * self.share.keys * self.planned.shared_width * shares * self.planned.exact

    def phases(self) -> list[Bytes]:
        """The phases of a step that may be the largest."""
        base, steps = self.persistent(), range(self.planned.steps)
        if self.planned.memory.recompute == "none":
            base += self.entry_activations()
            return [base + self.distilling(), *(base + self.plainly(step) for step in steps)]
        backward = (self.finishing, self.attending, self.projecting)
        parts = (
            self.distilling(),
            *(phase(step) for step in steps for phase in backward),
            self.homing(),
            self.entering(),
        )
        return [base + part for part in parts]

    def persistent(self) -> Bytes:
        """What is held from the start of the step to its end."""
        planned, share, draft, steps = self.planned, self.share, self.planned.draft, self.planned.steps
        ulysses, ring, streamed = planned.sizes.ulysses, planned.sizes.ring, planned.residence == "host"
        index = 3 * share.keys + (2 + 2 * steps + 2 * ulysses) * share.queries + ulysses * ring * share.keys
        chunk = min(share.rows, chunk_tokens(draft, planned.sizes.tensor, planned.dtype, planned.memory.block_bytes))
        aux, logits = 2 * chunk if streamed else share.rows, planned.logit_bytes is not None
        last = 0 if streamed and not logits else share.teacher
        if streamed:  # two blocks of the loss; blocks of hidden states are too small to count
            last = min(last, 2 * self.loss_rows())
        # everyone's, and this rank's own once more
        copies = 1 if ring == 1 else 1 + ring if planned.ring_mode == "gather" else 2
        return Counter(
            {
                "weights": (planned.weights.trained + planned.weights.embedding) * planned.itemsize,
                "teacher head": 0 if logits else planned.columns * draft.target_hidden_size * planned.itemsize,
                "hidden states": 3 * aux * draft.target_hidden_size * planned.itemsize + last * planned.teacher_bytes,
                "indices": INDEX * index + share.teacher * (9 * steps + INDEX + planned.exact),
                "keys": 2 * share.keys * planned.shared_width * copies * planned.itemsize,
            }
        )

    def loss_rows(self) -> int:
        """Teacher rows in one block of the loss."""
        planned, hidden = self.planned, self.planned.draft.hidden_size
        return loss_rows(planned.steps, planned.columns, hidden, planned.dtype, planned.memory.block_bytes)

    def activations(self, steps: int) -> int:
        """What the first `steps` steps have saved for their backward pass: own keys and values, and whatever
        `recompute` saves."""
        planned, draft, tensor = self.planned, self.planned.draft, self.planned.sizes.tensor
        total = steps * self.hidden + (steps - 1) * self.own
        if planned.memory.recompute != "full":  # q, out and, except in the first step, out merged with own keys
            lse = self.share.queries * (draft.num_attention_heads // tensor) * planned.exact
            total += (3 * steps - 1) * (self.attention + lse)
        if planned.memory.recompute == "none":
            wide = 5 * draft.intermediate_size // tensor + 4 * draft.hidden_size + draft.head_dim
            total += steps * self.share.queries * (planned.itemsize * wide + self.norm(3, 2, 1))
        return total

    def norm(self, states: int, trainable: int, results: int) -> int:
        """Bytes per row that norms save for their backward pass, besides their input. On CPUs a norm is several
        operations, in fp32 or wider.

        states: hidden states that are normed.
        trainable: how many of them need a gradient.
        results: how many of the outputs are saved.
        """
        size, exact = self.planned.itemsize, self.planned.exact
        widened = (states if size == exact else states + trainable) if self.planned.device == "cpu" else 0
        return self.planned.draft.hidden_size * (results * size + exact * widened)

    def distilling(self) -> Bytes:
        """At the end of the forward pass: all steps' outputs, their gradients, one block of the loss."""
        planned, width, steps, size = (
            self.planned,
            self.planned.draft.hidden_size,
            self.planned.steps,
            self.planned.itemsize,
        )
        row = loss_row_bytes(steps, planned.columns, width, planned.dtype)
        return Counter(
            {
                "queries": self.activations(steps) + (1 + steps) * self.hidden,
                "gradients": planned.columns * width * (planned.exact + (size if size < planned.exact else 0)),
                "loss block": min(self.loss_rows(), self.share.teacher) * row,
                "indices": INDEX * steps * self.share.teacher,
            }
        )

    def backward(self, step: int) -> Bytes:
        """During the backward pass of step `step`: what this step and earlier ones saved, and the gradients of their
        outputs, of own keys (twice: those of later steps are added to its own) and of weights."""
        weights, later = self.planned.weights, step < self.planned.steps - 1
        gradients = weights.head + (weights.project + weights.finish if later else 0)
        activations = self.activations(step + 1) + (step + 1) * self.hidden + (step * self.own if later else 0)
        return Counter({"queries": activations, "gradients": gradients * self.planned.itemsize})

    def parts(self, rows: int, weights: int, wide: bool = True) -> Bytes:
        """One chunk of position-wise work and the gradients of its weights: the chunk's own and, with several chunks,
        their sum. wide: whether the chunk includes the MLP."""
        planned, tensor = self.planned, self.planned.sizes.tensor
        each = chunk_token_bytes(planned.draft, tensor, planned.dtype)
        if not wide:
            each = 10 * planned.draft.hidden_size * planned.itemsize + self.norm(2, 1, 2)
        chunk = chunk_tokens(planned.draft, tensor, planned.dtype, planned.memory.block_bytes)
        several = planned.exact if rows > chunk else 0
        return Counter({"chunks": min(rows, chunk) * each, "gradients": weights * (planned.itemsize + several)})

    def rebuilt(self, step: int) -> int:
        """What `full` recomputes and then holds: q, out and the merged output."""
        return (3 if step else 2) * self.attention if self.planned.memory.recompute == "full" else 0

    def freed(self, step: int, attended: bool) -> int:
        """What autograd has released of a step that it holds as several nodes: the gradient of its output and the
        merged attention; once `attended`, q and out as well. (A step that is recomputed whole is a single node.)"""
        tensors = (2 if attended else 0) + (1 if step else 0)
        return 0 if self.planned.memory.recompute == "full" else tensors * self.attention + self.hidden

    def finishing(self, step: int) -> Bytes:
        outputs = Counter({"queries": self.hidden + self.attention + self.rebuilt(step)})
        return self.backward(step) + outputs + self.parts(self.share.queries, self.planned.weights.finish)

    def attending(self, step: int) -> Bytes:
        """While attending, at the moment when the gradient of the queries is complete."""
        planned, draft, size, exact = self.planned, self.planned.draft, self.planned.itemsize, self.planned.exact
        # Gradients of the merged output (already released if only autograd held it), of out, and q's from either.
        upstream = (3 if planned.memory.recompute == "full" else 2) if step else 1
        gradients = self.share.queries * planned.query_width * (exact + (size if size < exact else 0))
        tile = min(KEY_BLOCK, self.share.longest), min(QUERY_BLOCK, self.share.queries)
        widths = (draft.num_key_value_heads, draft.num_attention_heads)
        # Gradients of a block's keys, values and queries; in half precision a CPU holds fp32 copies of all of them.
        working = sum(n * w for n, w in zip(tile, widths, strict=True)) * exact * (4 if planned.widens else 2)
        states = self.hidden + upstream * self.attention + gradients + step * self.own
        return self.backward(step) + Counter(
            {
                "queries": states + self.rebuilt(step) - self.freed(step, attended=False),
                "keys": self.key_gradient,
                "gradients": planned.weights.finish * size,
                "attention block": working * draft.head_dim // planned.sizes.tensor // planned.sizes.ulysses,
            }
        )

    def projecting(self, step: int) -> Bytes:
        states = 2 * self.hidden + self.attention + step * self.own - self.freed(step, attended=True)
        weights, size = self.planned.weights, self.planned.itemsize
        extra = Counter({"queries": states, "keys": self.key_gradient, "gradients": weights.finish * size})
        return self.backward(step) + extra + self.parts(self.share.queries, weights.project, wide=False)

    def homing(self) -> Bytes:
        """After the last step: the gradients of K_0, V_0 return to their ranks, in the dtype of the keys; all others
        are complete."""
        return self.entered() + Counter({"keys": self.home + self.key_gradient})

    def entering(self) -> Bytes:
        """At the very end: chunks of the work that produced K_0, V_0 and the queries' first states."""
        parts = self.parts(self.share.rows, self.planned.weights.entry, wide=False)
        return self.entered() + Counter({"keys": 2 * self.home}) + parts

    def entered(self) -> Bytes:
        weights = self.planned.weights
        gradients = (weights.head + weights.project + weights.finish) * self.planned.itemsize
        return Counter({"queries": self.hidden, "gradients": gradients})

    def entry_activations(self) -> Bytes:
        """Without recomputation: the keys' fused states and the input of their projections."""
        states = 3 * self.planned.draft.hidden_size * self.planned.itemsize
        return Counter({"queries": self.share.keys * (states + self.norm(2, 1, 0))})

    def plainly(self, step: int) -> Bytes:
        """Without recomputation: a gradient of the MLP's width on top of what was saved."""
        planned, size = self.planned, self.planned.itemsize
        mlp = self.share.queries * size * planned.draft.intermediate_size // planned.sizes.tensor
        extra = {"queries": mlp, "keys": self.key_gradient, "gradients": planned.weights.finish * size}
        return self.backward(step) + Counter(extra)
