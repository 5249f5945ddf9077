"""Estimates the memory that a training step needs on each rank, from shapes alone.

The estimates follow the code's own allocations and block sizes (objective/recompute.py, attention/,
objective/distill.py). Memory is added up for each phase that may be the peak, and the largest sum counts.
tests/planning/test_planner.py compares the sums with bytes counted in real steps.
"""

import math
from collections import Counter

from eagle3.attention.cuda import heads_at_once
from eagle3.attention.schedule import BAND_ROWS, KEY_BLOCK, QUERY_BLOCK
from eagle3.objective.distill import loss_row_bytes, rows_at_once
from eagle3.objective.recompute import chunk_token_bytes
from eagle3.planning.step import Planned, RankShare

# Kind of data -> bytes, in one phase of a step.
Bytes = Counter[str]
INDEX = 8  # bytes per row number, token id or position


def step_bytes(planned: Planned, share: RankShare) -> Bytes:
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


def rank_bytes(planned: Planned, share: RankShare) -> Bytes:
    """Memory of the engine and a step together, or of the optimiser's update after it. `total()` must fit, along with
    the device's own overhead."""
    rank = _Rank(planned, share)
    return max(*rank.phases(), rank.updating(), key=Counter.total) + engine_bytes(planned)


def host_bytes(planned: Planned, share: RankShare) -> int:
    """Bytes of pinned host memory for one stream. (torch rounds each of the two parts up to a power of two.)"""
    if planned.residence == "device":
        return 0
    return share.rows * planned.draft.aux_width * planned.itemsize + share.teacher * planned.teacher_bytes


class _Rank:
    """Memory of one rank in each phase of a step, in bytes."""

    def __init__(self, planned: Planned, share: RankShare) -> None:
        self.planned, self.share = planned, share
        draft, sizes, size, exact = planned.draft, planned.sizes, planned.itemsize, planned.exact
        # Short names for what many phases depend on:
        self.size, self.exact, self.weights, self.recompute = size, exact, planned.weights, planned.memory.recompute
        self.chunk_row = chunk_token_bytes(draft, sizes.tensor, planned.dtype)
        self.block_rows = rows_at_once(planned.memory.block_bytes, self.chunk_row)
        # One hidden state for every query.
        self.hidden = share.queries * draft.hidden_size * size
        # One step's q, or attention's output, which has the same size.
        self.attention = share.queries * planned.query_width * size
        # Tensors that attention keeps from one step: q and the output and, under Ulysses, a second q, split by heads.
        self.attended = (3 if sizes.ulysses > 1 else 2) * self.attention
        # What `full` recomputes of them and then holds.
        self.rebuilt = self.attended if self.recompute == "full" else 0
        # One step's own keys and values.
        self.own = 2 * share.queries * planned.key_width * size
        # K_0, V_0 of this rank's keys.
        self.home = 2 * share.keys * planned.key_width * size
        # The summed gradient of the K_0, V_0 that this rank sees and, for `p2p`, the parts of it that are in flight.
        shares = 1 if sizes.ring == 1 else sizes.ring if planned.ring_mode == "gather" else 4
        self.key_gradient = 2 * share.keys * planned.shared_width * shares * exact
        # The three wide tensors of one step's MLP.
        self.mlp = 3 * share.queries * draft.intermediate_size * size // sizes.tensor
        # Bytes of a number in the gradient of a weight that all steps share.
        self.summed = size if self.recompute == "none" else exact
        # Different tokens that follow the rank's rows; and numbers in what they add to keys and values, and some of
        # them to queries.
        self.tokens = min(share.tokens, draft.vocab_size)
        queried = min(self.tokens, share.queries)
        self.embedded = queried * planned.query_width + 2 * self.tokens * planned.key_width
        # A teacher row in the loss, and such rows in one block of it.
        self.loss_row = loss_row_bytes(
            planned.steps, planned.columns, draft.hidden_size, planned.dtype, planned.device != "cuda"
        )
        self.loss_rows = rows_at_once(planned.memory.block_bytes, self.loss_row)

    def phases(self) -> list[Bytes]:
        """The phases of a step that may be the peak."""
        base, steps = self.persistent(), range(self.planned.steps)
        if self.recompute == "none":
            parts = (
                self.distilling(),
                *(phase(step) for step in steps for phase in (self.plainly, self.attending)),
            )
            return [base + self.entry_activations() + part for part in parts]
        parts = (
            self.distilling(),
            *(phase(step) for step in steps for phase in (self.finishing, self.attending, self.projecting)),
            self.homing(),
            self.entering(),
        )
        return [base + part for part in parts]

    def persistent(self) -> Bytes:
        """Memory that is held for the whole step."""
        planned, share, draft, steps = self.planned, self.share, self.planned.draft, self.planned.steps
        ulysses, ring, streamed = planned.sizes.ulysses, planned.sizes.ring, planned.residence == "host"
        index = 3 * share.keys + (2 + 2 * steps + 2 * ulysses) * share.queries + ulysses * ring * share.keys
        aux = 2 * min(share.rows, self.block_rows) if streamed else share.rows
        logits = planned.logit_bytes is not None
        last = 0 if streamed and not logits else share.teacher
        if streamed:  # two blocks of the loss; blocks of hidden states are negligible
            last = min(last, 2 * self.loss_rows)
        # `gather`: the keys of all ring ranks, and this rank's own a second time
        copies = 1 if ring == 1 else 1 + ring if planned.ring_mode == "gather" else 2
        return Counter(
            {
                "weights": (self.weights.trained + self.weights.embedding) * self.size,
                "projections": self.weights.project * self.size,  # the weights of q, k and v as one
                "teacher head": 0 if logits else planned.columns * draft.target_hidden_size * self.size,
                "hidden states": aux * draft.aux_width * self.size + last * planned.teacher_bytes,
                "indices": INDEX * index + share.teacher * (9 * steps + 2 * INDEX + self.exact),
                "keys": 2 * share.keys * planned.shared_width * copies * self.size,
            }
        )

    def updating(self) -> Bytes:
        """What is held while the optimiser updates the weights: their gradients in fp32 and, by torch's AdamW, which
        runs on a CPU, two more tensors of this size."""
        held = {name: size for name, size in self.persistent().items() if name not in ("keys", "projections")}
        return Counter(held | {"update": 4 * _optimised(self.planned) * (3 if self.planned.device == "cpu" else 1)})

    def activations(self, steps: int) -> int:
        """Tensors that the first `steps` steps have saved for their backward pass: own keys and values, and everything
        that `recompute` does not recompute."""
        draft, tensor = self.planned.draft, self.planned.sizes.tensor
        total = steps * self.hidden + (steps - 1) * self.own
        if self.recompute != "full":
            lse = self.share.queries * (draft.num_attention_heads // tensor) * self.exact
            total += steps * (self.attended + lse)
        if self.recompute == "none":
            wide = self.size * (3 * draft.intermediate_size // tensor + draft.hidden_size)
            total += steps * self.share.queries * (wide + self.exact * draft.head_dim + self.norm(2, 2, 2))
            if draft.qk_norm:
                heads = self.planned.query_width + self.planned.key_width
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
        widened = (states if self.size == self.exact else states + trainable) if self.planned.device == "cpu" else 0
        return (width or self.planned.draft.hidden_size) * (results * self.size + self.exact * widened)

    def distilling(self) -> Bytes:
        """Memory at the end of the forward pass: all steps' outputs, their gradients, and one block of the loss."""
        planned, steps = self.planned, self.planned.steps
        # the head's gradient of one block, before it is added, which CUDA does in place
        product = self.size if self.size < self.exact and planned.device != "cuda" else 0
        return Counter(
            {
                "queries": self.activations(steps) + (1 + steps) * self.hidden,
                "gradients": planned.columns * planned.draft.hidden_size * (self.exact + product),
                "loss block": min(self.loss_rows, self.share.teacher) * self.loss_row,
                "indices": INDEX * steps * self.share.teacher,
            }
        )

    def backward(self, step: int, weights: int = 0) -> Bytes:
        """Memory during the backward pass of `step`: everything that this step and earlier ones saved, and the
        gradients of their outputs, of own keys (twice, because those of later steps are added to this step's), of
        weights and of embedded tokens that all steps share. weights: those whose gradients the last step, the first in
        this pass, has begun."""
        later = step < self.planned.steps - 1
        begun = self.weights.project + self.weights.finish if later else weights
        activations = self.activations(step + 1) + (step + 1) * self.hidden + (step * self.own if later else 0)
        return Counter(
            {
                "queries": activations,
                "gradients": self.weights.head * self.size + begun * self.summed,
                "tokens": self.embedded * self.exact if later and self.recompute == "none" else 0,
            }
        )

    def parts(self, rows: int, wide: bool = True) -> int:
        """Memory of one chunk of position-wise work. wide: whether the work includes the MLP."""
        each = self.chunk_row if wide else 10 * self.planned.draft.hidden_size * self.size + self.norm(2, 1, 2)
        return min(rows, self.block_rows) * each

    def freed(self, attended: bool) -> int:
        """Memory that autograd has released if it holds a step as several nodes: the gradient of the step's output, the
        MLP's activations if they were saved, and, once `attended`, everything that attention kept. (A step that is
        recomputed whole is a single node.)"""
        if self.recompute == "full":
            return 0
        return self.hidden + (self.mlp if self.recompute == "none" else 0) + (self.attended if attended else 0)

    def finishing(self, step: int) -> Bytes:
        return self.backward(step, self.weights.finish) + Counter(
            {
                "queries": self.hidden + self.attention + self.rebuilt,
                "chunks": self.parts(self.share.queries),
            }
        )

    def attending(self, step: int) -> Bytes:
        """Memory during attention, when the gradient of the queries is complete."""
        planned, draft, sizes, size, exact = self.planned, self.planned.draft, self.planned.sizes, self.size, self.exact
        # Gradients of the output, and of q through own keys.
        upstream = 2 if step else 1
        # q's gradient through the prefix and, in step 0, its rounded copy.
        gradients = self.share.queries * planned.query_width * (exact + (size if size < exact and not step else 0))
        tile = min(KEY_BLOCK, self.share.longest), min(QUERY_BLOCK, self.share.queries)
        widths = (draft.num_key_value_heads, draft.num_attention_heads)
        # Gradients of a block's keys, values and queries; in half precision a CPU holds fp32 copies of all of them.
        copies = 4 if size < exact and planned.device == "cpu" else 2
        working = sum(n * w for n, w in zip(tile, widths, strict=True)) * exact * copies
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
        return self.backward(step, self.weights.finish) + Counter(
            {
                "queries": states + self.rebuilt - self.freed(attended=False),
                "keys": self.key_gradient,
                "attention block": working * draft.head_dim // split,
            }
        )

    def projecting(self, step: int) -> Bytes:
        return self.backward(step, self.weights.project + self.weights.finish) + Counter(
            {
                "queries": 2 * self.hidden + self.attention + step * self.own - self.freed(attended=True),
                "keys": self.key_gradient,
                "chunks": self.parts(self.share.queries, wide=False),
            }
        )

    def homing(self) -> Bytes:
        """Memory after the last step, when the gradients of K_0, V_0 return to their ranks in the keys' dtype, and all
        other gradients are complete."""
        gradients = self.weights.head * self.size + (self.weights.project + self.weights.finish) * self.summed
        return Counter({"queries": self.hidden, "gradients": gradients, "keys": self.home + self.key_gradient})

    def entering(self) -> Bytes:
        """Memory at the very end: chunks of the work that produced K_0, V_0 and the queries' first states."""
        return self.homing() + Counter(
            {
                "keys": self.home - self.key_gradient,
                "chunks": self.parts(self.share.rows, wide=False),
                "gradients": self.weights.entry * (self.size + self.exact),
            }
        )

    def entry_activations(self) -> Bytes:
        """What is saved without recomputation: the keys' fused states and the input of their projections; tokens'
        embeddings, normed as well, and their projections."""
        states = 2 * self.planned.draft.hidden_size * self.size
        tokens = self.tokens * (states + self.norm(1, 0, 0)) + self.embedded * self.exact
        return Counter({"queries": self.share.keys * (states + self.norm(1, 1, 0)), "tokens": tokens})

    def plainly(self, step: int) -> Bytes:
        """Memory in a step's backward pass without recomputation: on top of everything saved, gradients of three times
        the MLP's width."""
        return self.backward(step, self.weights.finish) + Counter({"queries": self.mlp, "keys": self.key_gradient})
