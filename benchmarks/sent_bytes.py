"""Bytes that a rank sends in one step of sequence-parallel training: counted at the collectives, and as a formula."""

import math
from collections import Counter
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3.draft.config import DraftConfig

Phase = Literal["forward", "backward"]
# (what is sent, phase) -> bytes
Traffic = Counter[tuple[str, Phase]]
KINDS = ("Ulysses K0,V0", "Ulysses q,out", "Ulysses lse", "ring K0,V0", "tensor")


class SentBytes(TorchDispatchMode):
    """Counts what this rank sends in the collectives run inside the context, whoever calls them: all of
    torch.distributed's pass torch's dispatcher.

    A rank of G sends of an all-to-all's input what is not its own, (G-1)/G; its share G-1 times in an all-gather;
    (G-1)/G of a reduce-scatter's input; 2 (G-1)/G of an all-reduce's buffer (a reduce-scatter and an all-gather of it).
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.phase: Phase = "forward"
        self.sent: Traffic = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self._count(function.overloadpacket.__name__, args)
        return function(*args, **(kwargs or {}))

    def _count(self, collective: str, args: tuple) -> None:
        size = next(dist.ProcessGroup.unbox(arg).size() for arg in args if isinstance(arg, torch.ScriptObject))
        buffer = args[1] if isinstance(args[1], Tensor) else args[0][0]  # (output, input, ...) or ([tensor], ...)
        if collective == "alltoall_base_":  # its last dimension tells what it holds
            width = buffer.shape[-1]
            kind = {2 * self.head_dim: "Ulysses K0,V0", self.head_dim: "Ulysses q,out", 1: "Ulysses lse"}[width]
            share = (size - 1) / size
        else:
            kind, share = {
                "_allgather_base_": ("ring K0,V0", size - 1),
                "_reduce_scatter_base_": ("ring K0,V0", (size - 1) / size),
                "send": ("ring K0,V0", 1),
                "recv_": ("ring K0,V0", 0),
                "allreduce_": ("tensor", 2 * (size - 1) / size),
            }[collective]
        self.sent[kind, self.phase] += buffer.nbytes * share


def expected_bytes(
    config: DraftConfig,
    dtype: torch.dtype,
    steps: int,
    *,
    tensor: int,
    ulysses: int,
    ring: int,
    mode: Literal["gather", "p2p"],
    keys: int,
    queries: int,
    teacher: int,
) -> Traffic:
    """What follows from the algorithm for a rank with so many keys and queries (pads included) and teacher rows.

    Ulysses trades K_0, V_0 once, and q, output and lse in every step (lse not in step 0, which has no own keys to
    merge). The ring's `gather` sends K_0, V_0 once and their gradient, in fp32, back once; `p2p` sends them in every
    step's forward and again in its backward, in which the gradient goes one hop further, home.
    """
    size, exact = dtype.itemsize, max(dtype.itemsize, 4)
    heads, kv_heads = config.num_attention_heads // tensor, config.num_key_value_heads // tensor
    replicated = math.lcm(ulysses, kv_heads)
    prefix = 2 * keys * replicated * config.head_dim  # elements of a rank's K_0, V_0
    away, hops = (ulysses - 1) / ulysses, ring - 1
    if mode == "gather":
        around = (hops * prefix * size, hops * prefix * exact)
    else:
        back = hops * size + (ring * exact if ring > 1 else 0)
        around = (steps * hops * prefix * size, steps * back * prefix)
    by_kind = {
        "Ulysses K0,V0": (away * prefix * size,) * 2,
        "Ulysses q,out": (2 * steps * away * queries * heads * config.head_dim * size,) * 2,
        "Ulysses lse": ((steps - 1) * away * queries * heads * exact,) * 2,
        "ring K0,V0": around,
        "tensor": _tensor_parallel_bytes(config.hidden_size, size, exact, steps, tensor, keys, queries, teacher),
    }
    return Counter(
        {
            (kind, phase): sent
            for kind, both in by_kind.items()
            for phase, sent in zip(("forward", "backward"), both, strict=True)
        }
    )


def _tensor_parallel_bytes(
    hidden: int, size: int, exact: int, steps: int, tensor: int, keys: int, queries: int, teacher: int
) -> tuple[float, float]:
    """Forward: embeddings, and each step's outputs of attention and MLP; then the distillation's maxima and sums of
    K draft columns and the teacher's, best ids, sums, and the gradient of all outputs, which it makes in the forward
    pass. Backward: the gradients of what enters q, k, v (each by itself; K_0, V_0 have the keys' rows) and the MLP."""
    unrolled = (keys + 3 * steps * queries) * hidden * size
    distilled = 2 * (steps + 1) * teacher * exact + steps * (teacher + 3) * 8 + steps * queries * hidden * size
    entering = steps * queries * 2 + 2 * (keys + (steps - 1) * queries) * 2 + steps * queries
    reduced = 2 * (tensor - 1) / tensor
    return reduced * (unrolled + (distilled if teacher else 0)), reduced * entering * hidden * size
