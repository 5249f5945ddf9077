"""Estimates the memory that a training step needs on each rank, from shapes alone.

The estimates follow the code's own allocations and block sizes (objective/recompute.py, attention/,
objective/distill.py). Memory is added up for each phase that may be the peak, and the largest sum counts.
tests/planning/test_planner.py compares the sums with bytes counted in real steps.
"""

import math
from collections import Counter
from dataclasses import dataclass

from eagle3.attention.cuda import heads_at_once
from eagle3.attention.schedule import BAND_ROWS, KEY_BLOCK, QUERY_BLOCK
from eagle3.objective.distill import loss_row_bytes, loss_rows
from eagle3.objective.recompute import chunk_token_bytes, chunk_tokens
from eagle3.planning.step import Planned, Share

# Kind of data -> bytes, in one phase of a step.
Bytes = Counter[str]
INDEX = 8  # bytes per row number, token id or position


def step_bytes(planned: Planned, share: Share) -> Bytes:
    """Peak memory of a rank between the start of a forward pass and the end of its backward pass."""
    return max(_Rank(planned, share).phases(), key=Counter.total)


def engine_bytes(planned: Planned) -> Bytes:
    """Memory of DeepSpeed's ZeRO, apart from the draft's own weights: fp32 masters, AdamW's two moments and the reduced
    gradients, divided among data and sequence ranks, plus buckets for gradients in flight."""
    trained, part = planned.weights.trained, _optimised(planned)
    return Counter(
        {
            "optimiser": 12 * part,
            "gradients": planned.itemsize * (part if planned.zero_stage == 2 else trained),
            "buffers": planned.bucket * planned.itemsize,
        }
    )


def _optimised(planned: Planned) -> int:
    """Weights whose optimiser one rank holds: they are divided among data and sequence ranks."""
    return math.ceil(planned.weights.trained / (planned.sizes.data * planned.sizes.sequence))


def rank_bytes(planned: Planned, share: Share) -> Bytes:
    """Memory of the engine and a step together, or of the optimiser's update after it. `total()` must fit, along with
    the device's own overhead."""
    rank = _Rank(planned, share)
    return max(step_bytes(planned, share), rank.updating(), key=Counter.total) + engine_bytes(planned)


def host_bytes(planned: Planned, share: Share) -> int:
    """Bytes of pinned host memory for one stream. (torch rounds each of the two parts up to a power of two.)"""
    if planned.residence == "device":
        return 0
    return share.rows * planned.draft.aux_width * planned.itemsize + share.teacher * planned.teacher_bytes


@dataclass(frozen=True)
class _Rank:
    """Memory of one rank in each phase of a step, in bytes."""

    planned: Planned
    share: Share

    @property
    def hidden(self) -> int:
        """One hidden state for every query."""
        return self.share.queries * self.planned.draft.hidden_size * self.planned.itemsize

    @property
    def attention(self) -> int:
        """One step's q, or attention's output, which has the same size."""
        return self.share.queries * self.planned.query_width * self.planned.itemsize

    @property
    def attended(self) -> int:
        """Tensors that attention keeps from one step: q and the output and, under Ulysses, a second q, split by
        heads."""
        return (3 if self.planned.sizes.ulysses > 1 else 2) * self.attention

    @property
    def own(self) -> int:
        """One step's own keys and values."""
        return 2 * self.share.queries * self.planned.key_width * self.planned.itemsize

    @property
    def home(self) -> int:
        """K_0, V_0 of this rank's keys."""
        return 2 * self.share.keys * self.planned.key_width * self.planned.itemsize

    @property
    def key_gradient(self) -> int:
        """The summed gradient of the K_0, V_0 that this rank sees and, for `p2p`, the parts of it that are in
        flight."""
        ring = self.planned.sizes.ring
        shares = 1 if ring == 1 else ring if self.planned.ring_mode == "gather" else 4
        return 2 * self.share.keys * self.planned.shared_width * shares * self.planned.exact

    def phases(self) -> list[Bytes]:
        """The phases of a step that may be the peak."""
        base, steps = self.persistent(), range(self.planned.steps)
        if self.planned.memory.recompute == "none":
            base += self.entry_activations()
            phases = (phase(step) for step in steps for phase in (self.plainly, self.attending))
            return [base + self.distilling(), *(base + phase for phase in phases)]
        backward = (self.finishing, self.attending, self.projecting)
        parts = (
            self.distilling(),
            *(phase(step) for step in steps for phase in backward),
            self.homing(),
            self.entering(),
        )
        return [base + part for part in parts]

    def persistent(self) -> Bytes:
        """Memory that is held for the whole step."""
        planned, share, draft, steps = self.planned, self.share, self.planned.draft, self.planned.steps
        ulysses, ring, streamed = planned.sizes.ulysses, planned.sizes.ring, planned.residence == "host"
        index = 3 * share.keys + (2 + 2 * steps + 2 * ulysses) * share.queries + ulysses * ring * share.keys
        chunk = min(share.rows, chunk_tokens(draft, planned.sizes.tensor, planned.dtype, planned.memory.block_bytes))
        aux, logits = 2 * chunk if streamed else share.rows, planned.logit_bytes is not None
        last = 0 if streamed and not logits else share.teacher
        if streamed:  # two blocks of the loss; blocks of hidden states are negligible
            last = min(last, 2 * self.loss_rows())
        # `gather`: the keys of all ring ranks, and this rank's own a second time
        copies = 1 if ring == 1 else 1 + ring if planned.ring_mode == "gather" else 2
        return Counter(
            {
                "weights": (planned.weights.trained + planned.weights.embedding) * planned.itemsize,
                "projections": planned.weights.project * planned.itemsize,  # the weights of q, k and v as one
                "teacher head": 0 if logits else planned.columns * draft.target_hidden_size * planned.itemsize,
                "hidden states": aux * draft.aux_width * planned.itemsize + last * planned.teacher_bytes,
                "indices": INDEX * index + share.teacher * (9 * steps + 2 * INDEX + planned.exact),
                "keys": 2 * share.keys * planned.shared_width * copies * planned.itemsize,
            }
        )

    def updating(self) -> Bytes:
        """What is held while the optimiser updates the weights: their gradients in fp32 and, by torch's AdamW, which
        runs on a CPU, two more tensors of this size."""
        held = {name: size for name, size in self.persistent().items() if name not in ("keys", "projections")}
        return Counter(held | {"update": 4 * _optimised(self.planned) * (3 if self.planned.device == "cpu" else 1)})

    def loss_rows(self) -> int:
        """Teacher rows in one block of the loss."""
        return loss_rows(self.planned.memory.block_bytes, self.loss_row_bytes())

    def loss_row_bytes(self) -> int:
        planned, hidden = self.planned, self.planned.draft.hidden_size
        return loss_row_bytes(planned.steps, planned.columns, hidden, planned.dtype, planned.device != "cuda")

    def activations(self, steps: int) -> int:
        """Tensors that the first `steps` steps have saved for their backward pass: own keys and values, and everything
        that `recompute` does not recompute."""
        planned, draft, tensor = self.planned, self.planned.draft, self.planned.sizes.tensor
        total = steps * self.hidden + (steps - 1) * self.own
        if planned.memory.recompute != "full":
            lse = self.share.queries * (draft.num_attention_heads // tensor) * planned.exact
            total += steps * (self.attended + lse)
        if planned.memory.recompute == "none":
            wide = planned.itemsize * (3 * draft.intermediate_size // tensor + draft.hidden_size)
            total += steps * self.share.queries * (wide + planned.exact * draft.head_dim + self.norm(2, 2, 2))
            if draft.qk_norm:
                heads = planned.query_width + planned.key_width
                total += steps * self.share.queries * self.norm(1, 1, 1, width=heads)
        return total

    def norm(self, states: int, trainable: int, results: int, width: int | None = None) -> int:
        """Bytes per row that norms save for their backward pass, apart from their input. On a CPU a norm is several
        operations, in fp32 or wider.

        states: hidden states that are normed.
        trainable: how many of them need a gradient.
        results: how many of the outputs are saved.
        width: of a state; default: the draft's hidden size.
        """
        size, exact = self.planned.itemsize, self.planned.exact
        widened = (states if size == exact else states + trainable) if self.planned.device == "cpu" else 0
        return (width or self.planned.draft.hidden_size) * (results * size + exact * widened)

    def distilling(self) -> Bytes:
        """Memory at the end of the forward pass: all steps' outputs, their gradients, and one block of the loss."""
        planned, width, steps, size = (
            self.planned,
            self.planned.draft.hidden_size,
            self.planned.steps,
            self.planned.itemsize,
        )
        # the head's gradient of one block, before it is added, which CUDA does in place
        product = size if size < planned.exact and planned.device != "cuda" else 0
        return Counter(
            {
                "queries": self.activations(steps) + (1 + steps) * self.hidden,
                "gradients": planned.columns * width * (planned.exact + product),
                "loss block": min(self.loss_rows(), self.share.teacher) * self.loss_row_bytes(),
                "indices": INDEX * steps * self.share.teacher,
            }
        )

    def backward(self, step: int) -> Bytes:
        """Memory during the backward pass of `step`: everything that this step and earlier ones saved, and the
        gradients of their outputs, of own keys (twice, because those of later steps are added to this step's), of
        weights and of embedded tokens that all steps share."""
        weights, later = self.planned.weights, step < self.planned.steps - 1
        gradients = weights.head * self.planned.itemsize
        gradients += (weights.project + weights.finish) * self.summed if later else 0
        activations = self.activations(step + 1) + (step + 1) * self.hidden + (step * self.own if later else 0)
        tokens = self.embedded * self.planned.exact if later and self.planned.memory.recompute == "none" else 0
        return Counter({"queries": activations, "gradients": gradients, "tokens": tokens})

    @property
    def summed(self) -> int:
        """Bytes of a number in the gradient of a weight that all steps share."""
        return self.planned.itemsize if self.planned.memory.recompute == "none" else self.planned.exact

    def begun(self, step: int, weights: int) -> int:
        """What the gradients of these weights add to `backward`: the last step's work, the first in this pass, makes
        them."""
        return weights * self.summed if step == self.planned.steps - 1 else 0

    def parts(self, rows: int, wide: bool = True) -> int:
        """Memory of one chunk of position-wise work. wide: whether the work includes the MLP."""
        planned, tensor = self.planned, self.planned.sizes.tensor
        each = chunk_token_bytes(planned.draft, tensor, planned.dtype)
        if not wide:
            each = 10 * planned.draft.hidden_size * planned.itemsize + self.norm(2, 1, 2)
        chunk = chunk_tokens(planned.draft, tensor, planned.dtype, planned.memory.block_bytes)
        return min(rows, chunk) * each

    def rebuilt(self) -> int:
        """Tensors that `full` recomputes and then holds."""
        return self.attended if self.planned.memory.recompute == "full" else 0

    def freed(self, attended: bool) -> int:
        """Memory that autograd has released if it holds a step as several nodes: the gradient of the step's output, the
        MLP's activations if they were saved, and, once `attended`, everything that attention kept. (A step that is
        recomputed whole is a single node.)"""
        if self.planned.memory.recompute == "full":
            return 0
        planned, mlp = self.planned, 0
        if planned.memory.recompute == "none":
            mlp = 3 * self.share.queries * planned.draft.intermediate_size * planned.itemsize // planned.sizes.tensor
        return mlp + self.hidden + (self.attended if attended else 0)

    def finishing(self, step: int) -> Bytes:
        return self.backward(step) + Counter(
            {
                "queries": self.hidden + self.attention + self.rebuilt(),
                "gradients": self.begun(step, self.planned.weights.finish),
                "chunks": self.parts(self.share.queries),
            }
        )

    def attending(self, step: int) -> Bytes:
        """Memory during attention, when the gradient of the queries is complete."""
        planned, draft, size, exact = self.planned, self.planned.draft, self.planned.itemsize, self.planned.exact
        sizes = planned.sizes
        # Gradients of the output, and of q through own keys.
        upstream = 2 if step else 1
        # q's gradient through the prefix and, in step 0, its rounded copy.
        gradients = self.share.queries * planned.query_width * (exact + (size if size < exact and not step else 0))
        tile = min(KEY_BLOCK, self.share.longest), min(QUERY_BLOCK, self.share.queries)
        widths = (draft.num_key_value_heads, draft.num_attention_heads)
        # Gradients of a block's keys, values and queries; in half precision a CPU holds fp32 copies of all of them.
        working = sum(n * w for n, w in zip(tile, widths, strict=True)) * exact * (4 if planned.widens else 2)
        split = sizes.tensor * sizes.ulysses
        if planned.device == "cuda" and size < exact and sizes.ring == 1:
            # One block of all queries and keys (unless it is too long), a few heads at a time, and the kernel's own
            # memory.
            queries, keys = self.share.queries * sizes.ulysses, self.share.longest
            if queries + keys > 2 * BAND_ROWS:
                queries, keys = min(queries, BAND_ROWS), min(keys, BAND_ROWS)
            group = widths[1] // widths[0]
            heads = min(max(1, widths[0] // split), heads_at_once(queries, keys, group, draft.head_dim))
            working, split = heads * ((2 * keys + group * queries) * size + 4 * group * (queries + keys)), 1
        states = self.hidden + upstream * self.attention + gradients + step * self.own
        return self.backward(step) + Counter(
            {
                "queries": states + self.rebuilt() - self.freed(attended=False),
                "keys": self.key_gradient,
                "gradients": self.begun(step, planned.weights.finish),
                "attention block": working * draft.head_dim // split,
            }
        )

    def projecting(self, step: int) -> Bytes:
        states = 2 * self.hidden + self.attention + step * self.own - self.freed(attended=True)
        weights = self.planned.weights
        return self.backward(step) + Counter(
            {
                "queries": states,
                "keys": self.key_gradient,
                "gradients": self.begun(step, weights.project + weights.finish),
                "chunks": self.parts(self.share.queries, wide=False),
            }
        )

    def homing(self) -> Bytes:
        """Memory after the last step, when the gradients of K_0, V_0 return to their ranks in the keys' dtype, and all
        other gradients are complete."""
        return self.entered() + Counter({"keys": self.home + self.key_gradient})

    def entering(self) -> Bytes:
        """Memory at the very end: chunks of the work that produced K_0, V_0 and the queries' first states."""
        fc, chunks = self.planned.weights.entry, self.parts(self.share.rows, wide=False)
        return self.entered() + Counter(
            {"keys": 2 * self.home, "chunks": chunks, "gradients": fc * (self.planned.itemsize + self.planned.exact)}
        )

    def entered(self) -> Bytes:
        weights = self.planned.weights
        gradients = weights.head * self.planned.itemsize + (weights.project + weights.finish) * self.summed
        return Counter({"queries": self.hidden, "gradients": gradients})

    @property
    def tokens(self) -> int:
        """Different tokens that follow the rank's rows."""
        return min(self.share.tokens, self.planned.draft.vocab_size)

    @property
    def embedded(self) -> int:
        """Numbers in what those tokens add to keys and values, and some of them to queries."""
        queried = min(self.tokens, self.share.queries)
        return queried * self.planned.query_width + 2 * self.tokens * self.planned.key_width

    def entry_activations(self) -> Bytes:
        """What is saved without recomputation: the keys' fused states and the input of their projections; tokens'
        embeddings, normed as well, and their projections."""
        states = 2 * self.planned.draft.hidden_size * self.planned.itemsize
        tokens = self.tokens * (states + self.norm(1, 0, 0)) + self.embedded * self.planned.exact
        return Counter({"queries": self.share.keys * (states + self.norm(1, 1, 0)), "tokens": tokens})

    def plainly(self, step: int) -> Bytes:
        """Memory in a step's backward pass without recomputation: on top of everything saved, gradients of three times
        the MLP's width."""
        planned = self.planned
        mlp = 3 * self.share.queries * planned.itemsize * planned.draft.intermediate_size // planned.sizes.tensor
        gradients = self.begun(step, planned.weights.finish)
        return self.backward(step) + Counter({"queries": mlp, "keys": self.key_gradient, "gradients": gradients})
