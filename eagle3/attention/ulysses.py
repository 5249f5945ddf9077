"""Ulysses: ranks trade tokens for heads by DeepSpeed's all-to-all. The one file that imports it."""

import math
from dataclasses import dataclass

from deepspeed.sequence.layer import _SeqAllToAll
from torch import Tensor
from torch.distributed import ProcessGroup

# DeepSpeed's layout is [tokens, batch, heads, width].
TOKENS, BATCH, HEADS = 0, 1, 2


@dataclass(frozen=True)
class Ulysses:
    """The exchange in one Ulysses group of U ranks; differentiable, and nothing at all for U = 1."""

    group: ProcessGroup

    def to_heads(self, x: Tensor) -> Tensor:
        """[tokens, heads, width] of this rank's tokens -> [U * tokens, heads / U, width] of this rank's heads, the
        tokens in the order of the ranks. heads must be a multiple of U (uneven ones would hang in the collective)."""
        assert x.shape[1] % self.group.size() == 0, f"{x.shape[1]} heads over {self.group.size()} Ulysses ranks"
        return self._exchange(x, HEADS, TOKENS)

    def to_tokens(self, x: Tensor) -> Tensor:
        """The way back: [U * tokens, heads / U, width] -> [tokens, heads, width]."""
        return self._exchange(x, TOKENS, HEADS)

    def replicate(self, x: Tensor) -> Tensor:
        """Key/value heads [tokens, kv_heads, width], each repeated so that their number is a multiple of U and a rank's
        query heads find theirs on it. Autograd sums the copies' gradients."""
        kv_heads = x.shape[1]
        return x.repeat_interleave(self.group.size() // math.gcd(self.group.size(), kv_heads), 1)

    def _exchange(self, x: Tensor, scatter: int, gather: int) -> Tensor:
        if self.group.size() == 1:
            return x
        return _SeqAllToAll.apply(self.group, x[:, None].contiguous(), scatter, gather, BATCH)[:, 0]
