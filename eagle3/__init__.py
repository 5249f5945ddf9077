"""Train EAGLE3 drafts on long contexts, exactly."""

import warnings

# Megatron-core says at import that it falls back to plain torch, which is the part of it that this project uses.
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
