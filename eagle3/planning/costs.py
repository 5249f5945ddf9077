"""What a training step computes and sends, from shapes alone: FLOPs, bytes between ranks, and the time they take."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

from eagle3.planning.step import Planned, Share

Phase = Literal["forward", "backward"]
# (what is sent, phase) -> bytes
Traffic = Counter[tuple[str, Phase]]


class Flops(NamedTuple):
    """Of one rank and step. model: forward and backward once, what utilisation is counted by. executed: with what is
    computed again."""

    model: float
    executed: float


def step_flops(planned: Planned, share: Share) -> Flops:
    """Two FLOPs a multiplication and addition of matrix products; a backward pass takes twice its forward, attention's
    two and a half times. Attention's pairs are those of the whole stream, dealt evenly to its ranks."""
    draft, sizes, steps = planned.draft, planned.sizes, planned.steps
    hidden, wide, columns = draft.hidden_size, draft.target_hidden_size, draft.draft_vocab_size // sizes.tensor
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
    rest = sent.total() - ring
    computed = step_flops(planned, share).executed / (machine.flops * machine.utilisation)
    return computed + rest / machine.near + ring / (machine.near if inside else machine.far)
