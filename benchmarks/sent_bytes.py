"""Bytes that a rank sends in one step of sequence-parallel training, counted at the collectives."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3.planning.step import Phase, Traffic

KINDS = ("Ulysses K0,V0", "Ulysses q,out", "Ulysses lse", "ring K0,V0", "tensor")


class SentBytes(TorchDispatchMode):
    """Counts what this rank sends in the collectives inside the context, no matter which code runs them: all of
    torch.distributed's collectives go through torch's dispatcher.

    In a group of G ranks, a rank sends (G-1)/G of its input to an all-to-all or reduce-scatter, G-1 times its share in
    an all-gather, and 2 (G-1)/G of its buffer in an all-reduce (a reduce-scatter and an all-gather of the buffer).
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
