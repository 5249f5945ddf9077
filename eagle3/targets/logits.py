"""A target's logits: the head that makes them of hidden states, what is done to them, and what is kept of them to teach."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.errors import UserError

# Rows whose logits of the full vocabulary exist at a time.
BLOCK_ROWS = 512


def check_tokens(ids: Tensor, number: int, limit: int) -> None:
    """UserError for document `number` without tokens, or with a token id outside the embedding, of `limit` rows."""
    if ids.numel() == 0:
        raise UserError(f"target: document {number} has no tokens; leave it out")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= limit:
        raise UserError(
            f"target: document {number} has token id {low if low < 0 else high}, outside the vocabulary of "
            f"{limit}; tokenise with this target's own tokenizer"
        )


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its logits after the lm_head: times `scale`, then softly capped at +-`cap`. The order is that of
    the families that do both."""

    scale: float = 1.0
    cap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """In place."""
        if self.scale != 1:
            logits.mul_(self.scale)
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits


@dataclass(frozen=True)
class TargetHead:
    """The target's frozen embedding [V, Ht] and lm_head [V, Ht]; one and the same tensor where the target ties them.

    head: None where it is no plain matrix (quantised, biased), so that only the model itself can make logits; it then has
    as many tokens as the embedding. transform: what becomes of head @ hidden state.
    """

    embedding: Tensor
    head: Tensor | None
    transform: LogitTransform = LogitTransform()

    @property
    def vocab_size(self) -> int:
        return len(self.embedding if self.head is None else self.head)

    @property
    def hidden_size(self) -> int:
        """Ht."""
        return (self.embedding if self.head is None else self.head).shape[1]


class TeacherSummary(NamedTuple):
    """Per row: argmax [N] int64 and logsumexp [N] fp32 (fp64 for fp64 inputs) over the full vocabulary."""

    argmax: Tensor
    logsumexp: Tensor


@torch.no_grad()
def summarize_teacher(
    last: Tensor, head: Tensor, block_rows: int = BLOCK_ROWS, transform: LogitTransform = LogitTransform()
) -> TeacherSummary:
    """Argmax and logsumexp of `transform(last @ head.T)` for last [N, Ht] and head [V, Ht], `block_rows` rows at a time.

    Logits are fp32 even for bf16 inputs (fp64 for fp64 ones) and exist for one block only; ties go to the lowest id.
    """
    accumulate = torch.float64 if last.dtype == torch.float64 else torch.float32
    # Half-precision products are exact in fp32, so a tensor-core matmul that returns its fp32 sums equals an fp32 one at
    # a fraction of the time. torch has it on CUDA only; elsewhere the head is widened, once for all blocks.
    half_matmul = last.is_cuda and last.dtype == head.dtype and last.dtype in (torch.bfloat16, torch.float16)
    weight = (head if half_matmul else head.to(accumulate)).T
    blocks = []
    for rows in last.split(block_rows):
        product = torch.mm(rows, weight, out_dtype=torch.float32) if half_matmul else rows.to(accumulate) @ weight
        logits = transform.apply(product)
        blocks.append(TeacherSummary(logits.argmax(-1), logits.logsumexp(-1)))
    return TeacherSummary(*map(torch.cat, zip(*blocks, strict=True)))
