"""Drafts with random weights, exported as a run exports them."""

from pathlib import Path

import torch
from torch import Tensor

from eagle3.draft.interchange import export_draft
from eagle3.draft.model import Eagle3Draft


def export(
    folder: Path,
    draft: Eagle3Draft,
    t2d: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    with_embedding: bool = True,
) -> Path:
    """Exports the draft and returns the folder. t2d: its vocabulary; None for the target's first tokens."""
    config = draft.draft_config
    if t2d is None:
        t2d = torch.arange(config.vocab_size) < config.draft_vocab_size
    d2t = t2d.nonzero().flatten() - torch.arange(config.draft_vocab_size)
    weights = dict(draft.named_parameters())
    export_draft(folder, draft, weights, d2t=d2t, t2d=t2d, dtype=dtype, with_embedding=with_embedding)
    return folder
