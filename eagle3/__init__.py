"""Trains EAGLE3 drafts on long contexts, exactly."""

import warnings

# Megatron-core warns at import that it falls back to plain torch, which is the only part of it that this project uses.
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
# DeepSpeed 0.19.8 gathers by a name that torch 2.13 has replaced; this project's code does not, and the call is the
# same.
warnings.filterwarnings(
    "ignore", message="`torch.distributed.all_gather_into_tensor` is deprecated", category=FutureWarning
)
