"""Trains EAGLE3 drafts on long contexts, exactly."""

import warnings

# Megatron-core warns at import that it falls back to plain torch, but its plain torch code is all this project uses.
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
# DeepSpeed 0.19.8 gathers with a function that torch 2.13 has renamed. The behaviour is the same, and this project's
# own code uses the new name.
warnings.filterwarnings(
    "ignore", message="`torch.distributed.all_gather_into_tensor` is deprecated", category=FutureWarning
)
# The schedule advances even if the first step is skipped (`training.skip_above_norm`), which is meant.
warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
