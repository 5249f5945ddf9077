"""Will it fit: what a training step holds on each rank, computes and sends, from shapes alone.

Memory follows the code's own allocations and block sizes (objective/recompute.py, attention/, objective/distill.py). The step is followed through the phases in which it may hold most; the largest counts.
tests/planning/test_planner.py holds the sums to bytes counted in real steps.
"""

import math
from collections import Counter

from eagle3.attention.schedule import KEY_BLOCK, QUERY_BLOCK
from eagle3.objective.distill import loss_row_bytes, loss_rows
from eagle3.objective.recompute import chunk_token_bytes, chunk_tokens
from eagle3.planning.step import Planned, Share

# What takes memory -> bytes, in the phase of a step that holds most.
Bytes = Counter[str]
INDEX = 8  # bytes of a row number, token id or position


def step_bytes(planned: Planned, share: Share) -> Bytes:
    """What a rank holds at most between the begin of a forward pass and the end of its backward pass."""
    return max(_phases(planned, share), key=Counter.total)


def engine_bytes(planned: Planned) -> Bytes:
    """What DeepSpeed ZeRO-2 holds beside the draft's own weights: fp32 masters and AdamW's two moments and the reduced
    gradients, dealt to data and sequence ranks; buckets for gradients under way."""
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
    """All of it: the step on top of the engine. `total()` is what has to fit, beside the device's own overhead."""
    return step_bytes(planned, share) + engine_bytes(planned)


def host_bytes(planned: Planned, share: Share) -> int:
    """What waits pinned on the host for one stream (torch rounds each of the two up to a power of two)."""
    if planned.residence == "device":
        return 0
    return 3 * share.rows * planned.draft.target_hidden_size * planned.itemsize + share.teacher * planned.teacher_bytes


def _phases(planned: Planned, share: Share) -> list[Bytes]:
    """What a rank holds in each phase of a step that may be the largest."""
    held = _held(planned, share)
    if planned.memory.recompute == "none":
        held += _kept_entry(planned, share)
        backwards = (_plainly(planned, share, k) for k in range(planned.steps))
        return [held + _distilling(planned, share), *(held + backward for backward in backwards)]
    backward = (_finishing, _attending, _projecting)
    return [
        held + _distilling(planned, share),
        *(held + phase(planned, share, k) for k in range(planned.steps) for phase in backward),
        held + _homing(planned, share),
        held + _entering(planned, share),
    ]


def _held(planned: Planned, share: Share) -> Bytes:
    """From the begin of the step to its end."""
    draft, size, steps = planned.draft, planned.itemsize, planned.steps
    group = planned.sizes.ulysses
    index = 3 * share.keys + (2 + 2 * steps + 2 * group) * share.queries + group * planned.sizes.ring * share.keys
    streamed = planned.residence == "host"
    chunk = min(share.rows, chunk_tokens(draft, planned.sizes.tensor, planned.dtype, planned.memory.block_bytes))
    aux, logits = 2 * chunk if streamed else share.rows, planned.logit_bytes is not None
    last = 0 if streamed and not logits else share.teacher
    if streamed:  # two blocks of the loss; of hidden states they are not worth counting
        last = min(
            last, 2 * loss_rows(steps, planned.columns, draft.hidden_size, planned.dtype, planned.memory.block_bytes)
        )
    return Counter(
        {
            "weights": (planned.weights.trained + planned.weights.embedding) * size,
            "teacher head": 0 if logits else planned.columns * draft.target_hidden_size * size,
            "hidden states": 3 * aux * draft.target_hidden_size * size + last * planned.teacher_bytes,
            "indices": INDEX * index + share.teacher * (9 * steps + INDEX + planned.exact),
            "keys": _shared_keys(planned, share) * size,
        }
    )


def _shared_keys(planned: Planned, share: Share) -> int:
    """Numbers in the K_0, V_0 that this rank sees: its own, and with `gather` everyone's (its own twice)."""
    ring = planned.sizes.ring
    copies = 1 if ring == 1 else 1 + ring if planned.ring_mode == "gather" else 2
    return 2 * share.keys * planned.shared_width * copies


def _key_gradient(planned: Planned, share: Share) -> int:
    """Bytes of the sum of their gradient, and for `p2p` what is under way of it."""
    shares = 1 if planned.sizes.ring == 1 else planned.sizes.ring if planned.ring_mode == "gather" else 4
    return 2 * share.keys * planned.shared_width * shares * planned.exact


def _kept(planned: Planned, share: Share, first: int, last: int) -> int:
    """Bytes that steps first..last have kept for their backward pass: own keys and values, and what depends on the
    mode."""
    draft, size, queries = planned.draft, planned.itemsize, share.queries
    own = 2 * planned.key_width * size * queries
    attention = queries * (
        planned.query_width * size + draft.num_attention_heads // planned.sizes.tensor * planned.exact
    )
    per_step = queries * draft.hidden_size * size
    total = 0
    for k in range(first, last + 1):
        total += per_step + (own if k else 0)
        if planned.memory.recompute != "full":  # q, out and what own keys turned it into
            total += (3 if k else 2) * attention
        if planned.memory.recompute == "none":
            wide = 5 * draft.intermediate_size // planned.sizes.tensor + 4 * draft.hidden_size + draft.head_dim
            total += queries * (size * wide + _norm_bytes(planned, 3, 2, 1))
    return total


def _norm_bytes(planned: Planned, states: int, learned: int, results: int) -> int:
    """What norms of `states` hidden states (`learned` of which have a gradient) keep for their backward pass, beside the
    input, when `results` of their outputs are kept. On CPUs a norm is several operations, in fp32 at least."""
    width, size, exact = planned.draft.hidden_size, planned.itemsize, planned.exact
    widened = (states if size == exact else states + learned) if planned.device == "cpu" else 0
    return width * (results * size + exact * widened)


def _distilling(planned: Planned, share: Share) -> Bytes:
    """At the end of the forward pass: all steps' outputs, their gradients, a block of the loss."""
    draft, size = planned.draft, planned.itemsize
    outputs = share.queries * draft.hidden_size * size
    rows = loss_rows(planned.steps, planned.columns, draft.hidden_size, planned.dtype, planned.memory.block_bytes)
    block = min(rows, share.teacher) * loss_row_bytes(planned.steps, planned.columns, draft.hidden_size, planned.dtype)
    head = planned.columns * draft.hidden_size
    return Counter(
        {
            "queries": _kept(planned, share, 0, planned.steps - 1) + (1 + planned.steps) * outputs,
            "gradients": head * (planned.exact + (size if size < planned.exact else 0)),
            "loss block": block,
            "indices": INDEX * planned.steps * share.teacher,
        }
    )


def _backward_base(planned: Planned, share: Share, step: int) -> Bytes:
    """In step `step`'s backward pass: what it and earlier steps kept, gradients of their outputs, of own keys (twice:
    those of later steps are added to its own) and of weights."""
    draft, size = planned.draft, planned.itemsize
    hidden = share.queries * draft.hidden_size * size
    own = 2 * planned.key_width * size * share.queries
    later = step < planned.steps - 1
    return Counter(
        {
            "queries": _kept(planned, share, 0, step) + (step + 1) * hidden + (step * own if later else 0),
            "gradients": (planned.weights.head + (planned.weights.project + planned.weights.finish if later else 0))
            * size,
        }
    )


def _parts(planned: Planned, rows: int, weights: int, wide: bool = True) -> Bytes:
    """A chunk of position-wise work, and the gradients of its weights: the chunk's and, of several, their sum. wide: with
    the MLP."""
    each = chunk_token_bytes(planned.draft, planned.sizes.tensor, planned.dtype)
    if not wide:
        each = 10 * planned.draft.hidden_size * planned.itemsize + _norm_bytes(planned, 2, 1, 2)
    chunk = chunk_tokens(planned.draft, planned.sizes.tensor, planned.dtype, planned.memory.block_bytes)
    several = planned.exact if rows > chunk else 0
    return Counter({"chunks": min(rows, chunk) * each, "gradients": weights * (planned.itemsize + several)})


def _rebuilt_attention(planned: Planned, share: Share, step: int) -> int:
    """q, out and the merged output that full recompute has made again."""
    rebuilt = (3 if step else 2) if planned.memory.recompute == "full" else 0
    return rebuilt * share.queries * planned.query_width * planned.itemsize


def _freed(planned: Planned, share: Share, step: int, attended: bool) -> int:
    """What autograd has let go of a step that it holds in several nodes: the gradient of its output and the merged
    attention; once `attended`, q and out as well. (A step recomputed whole is one node.)"""
    if planned.memory.recompute == "full":
        return 0
    tensors = (2 if attended else 0) + (1 if step else 0)
    return share.queries * planned.itemsize * (tensors * planned.query_width + planned.draft.hidden_size)


def _finishing(planned: Planned, share: Share, step: int) -> Bytes:
    made = share.queries * (planned.draft.hidden_size + planned.query_width) * planned.itemsize
    made += _rebuilt_attention(planned, share, step)
    return (
        _backward_base(planned, share, step)
        + Counter({"queries": made})
        + _parts(planned, share.queries, planned.weights.finish)
    )


def _attending(planned: Planned, share: Share, step: int) -> Bytes:
    """When the gradient of the queries is complete."""
    draft, size, exact = planned.draft, planned.itemsize, planned.exact
    one = share.queries * planned.query_width
    own = 2 * planned.key_width * size * share.queries * step
    # gradients of the merged output (gone already where autograd alone holds it), of out, and q's from either
    upstream = (3 if planned.memory.recompute == "full" else 2) if step else 1
    attention = one * size * upstream + one * (exact + (size if size < exact else 0))
    tile = min(KEY_BLOCK, share.longest), min(QUERY_BLOCK, share.queries)
    widths = (draft.num_key_value_heads, draft.num_attention_heads)
    # gradients of a block's keys, values and queries; in half precision a CPU has fp32 copies of all
    working = sum(n * w for n, w in zip(tile, widths, strict=True)) * exact * (4 if planned.widens else 2)
    return _backward_base(planned, share, step) + Counter(
        {
            "queries": share.queries * draft.hidden_size * size
            + attention
            + own
            + _rebuilt_attention(planned, share, step)
            - _freed(planned, share, step, attended=False),
            "keys": _key_gradient(planned, share),
            "gradients": planned.weights.finish * size,
            "attention block": working * draft.head_dim // planned.sizes.tensor // planned.sizes.ulysses,
        }
    )


def _projecting(planned: Planned, share: Share, step: int) -> Bytes:
    draft, size = planned.draft, planned.itemsize
    own = 2 * planned.key_width * size * share.queries * step
    made = share.queries * (2 * draft.hidden_size + planned.query_width) * size + own
    made -= _freed(planned, share, step, attended=True)
    held = Counter({"queries": made, "keys": _key_gradient(planned, share), "gradients": planned.weights.finish * size})
    return (
        _backward_base(planned, share, step)
        + held
        + _parts(planned, share.queries, planned.weights.project, wide=False)
    )


def _homing(planned: Planned, share: Share) -> Bytes:
    """After the last step: the gradients of K_0, V_0 go home, in the keys' number format; all others are there."""
    return _entered(planned, share) + Counter({"keys": _home(planned, share) + _key_gradient(planned, share)})


def _entering(planned: Planned, share: Share) -> Bytes:
    """At the very end: chunks of what became K_0, V_0 and the queries' first states."""
    parts = _parts(planned, share.rows, planned.weights.entry, wide=False)
    return _entered(planned, share) + Counter({"keys": 2 * _home(planned, share)}) + parts


def _home(planned: Planned, share: Share) -> int:
    return 2 * share.keys * planned.key_width * planned.itemsize


def _entered(planned: Planned, share: Share) -> Bytes:
    made, size = planned.weights.head + planned.weights.project + planned.weights.finish, planned.itemsize
    return Counter({"queries": share.queries * planned.draft.hidden_size * size, "gradients": made * size})


def _kept_entry(planned: Planned, share: Share) -> Bytes:
    """Where nothing is recomputed: the keys' fused states and the input of their projections."""
    states = 3 * planned.draft.hidden_size * planned.itemsize
    return Counter({"queries": share.keys * (states + _norm_bytes(planned, 2, 1, 0))})


def _plainly(planned: Planned, share: Share, step: int) -> Bytes:
    """With nothing recomputed: a gradient of the MLP's width beside what was kept."""
    made = share.queries * planned.itemsize * planned.draft.intermediate_size // planned.sizes.tensor
    held = {
        "queries": made,
        "keys": _key_gradient(planned, share),
        "gradients": planned.weights.finish * planned.itemsize,
    }
    return _backward_base(planned, share, step) + Counter(held)
