"""Our attention over a Ulysses group beside DeepSpeed's own DistributedAttention, forward and backward."""

import torch
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor, nn

from eagle3.attention.schedule import schedule_prefix
from eagle3.attention.ttt import KeyValue, TTTAttention
from eagle3.parallel.topology import Topology

TOKENS, HEADS, DIM, SCALE = 24, 8, 6, 0.4


class CausalSoftmax(nn.Module):
    """The local attention that DistributedAttention is given: [tokens, 1, heads, d], all tokens of this rank's
    heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * SCALE
        unseen = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
        return torch.einsum("bhqk,kbhd->qbhd", scores.masked_fill(unseen, float("-inf")).softmax(-1), v).contiguous()


def differences(topology: Topology, kv_heads: int) -> dict[str, float]:
    """Largest difference on this rank of output and gradients of q, k, v, in fp64."""
    generator = torch.Generator().manual_seed(kv_heads)
    size, rank = topology.ulysses.size(), topology.ulysses.rank()
    shapes = ((HEADS, DIM), (kv_heads, DIM), (kv_heads, DIM), (HEADS, DIM))
    mine = [torch.randn(TOKENS, *shape, generator=generator, dtype=torch.float64).chunk(size)[rank] for shape in shapes]
    *inputs, upstream = (tensor.contiguous() for tensor in mine)

    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    rows = torch.arange(TOKENS)
    attention = TTTAttention.over(topology.ulysses, topology.alone, SCALE)
    shared = attention.start(KeyValue(ours[1], ours[2])).shared
    out = attention(ours[0], shared, (schedule_prefix(rows, rows, rows, block=5),))
    out.backward(upstream)

    theirs = [tensor.clone()[:, None].requires_grad_() for tensor in inputs]
    deepspeed = DistributedAttention(CausalSoftmax(), topology.ulysses, scatter_idx=2, gather_idx=0)
    reference = deepspeed(*theirs, 1)
    reference.backward(upstream[:, None])
    pairs = {"out": (out, reference[:, 0])}
    pairs |= {name: (a.grad, b.grad[:, 0]) for name, a, b in zip("qkv", ours, theirs, strict=True)}
    return {name: float((a - b).abs().max()) for name, (a, b) in pairs.items()}
