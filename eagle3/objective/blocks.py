"""How much of a stream is worked on at once: sizes from shapes and a budget in bytes, so that every rank and every run
takes the same ones, and the planner knows them."""

import torch

from eagle3.draft.config import DraftConfig

# What one block of the loss, and one chunk of position-wise work, may hold unless told otherwise.
BLOCK_BYTES = 2**30


def loss_row_bytes(steps: int, columns: int, hidden: int, dtype: torch.dtype) -> int:
    """What `distill` holds for one teacher row: K rows of draft logits in fp32 at least (and once more in `dtype`, to be
    multiplied), five more of that width; K hidden states with their norms (in fp32) and gradients."""
    exact = max(dtype.itemsize, 4)
    logits = steps * (exact + (dtype.itemsize if dtype.itemsize < exact else 0)) + 5 * exact
    return columns * logits + steps * hidden * (4 * dtype.itemsize + 2 * exact)


def loss_rows(steps: int, columns: int, hidden: int, dtype: torch.dtype, block_bytes: int) -> int:
    """Teacher rows of one block of `distill`, for lm_head columns [columns, hidden] of one tensor-parallel rank."""
    return max(1, block_bytes // loss_row_bytes(steps, columns, hidden, dtype))


def chunk_token_bytes(config: DraftConfig, tensor: int, dtype: torch.dtype) -> int:
    """What a chunk holds for one token while it is recomputed and differentiated, in its widest part: what follows
    attention. The MLP's gate and up, their activation and product, with gradients; six hidden states, two in fp32."""
    wide = 6 * config.intermediate_size // tensor + 4 * config.hidden_size
    return dtype.itemsize * wide + 2 * max(4, dtype.itemsize) * config.hidden_size


def chunk_tokens(config: DraftConfig, tensor: int, dtype: torch.dtype, block_bytes: int) -> int:
    """Tokens of one chunk of position-wise work."""
    return max(1, block_bytes // chunk_token_bytes(config, tensor, dtype))
