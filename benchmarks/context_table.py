"""The planner's table for docs/memory.md: what the drafts of known targets need on 8 GPUs, by context length.

    python benchmarks/context_table.py [--gpus 8] [--gpu-memory 80]

Nothing is measured here: every number is the planner's. The drafts have the shapes of their targets (from config.json),
as they do unless a recipe says otherwise. The exception is DeepSeek-V3, whose attention no draft copies: its draft has
the shape that SpecForge publishes in configs/deepseek-v3-671b-eagle3.json.
"""

import argparse

import torch

from eagle3.draft.config import DraftConfig
from eagle3.errors import run_command
from eagle3.objective.recompute import MemoryPlan
from eagle3.planning.fitting import RESERVED, PlannedStream, best_layout, longest_context
from eagle3.planning.step import Planned, Sizes

STEPS, DRAFT_VOCABULARY = 7, 32000
CONTEXTS = {"32k": 2**15, "128k": 2**17, "512k": 2**19, "1M": 2**20}
# hidden, MLP, heads, key/value heads, head dimension, vocabulary
SHAPES = {
    "Llama-3.1-8B": (4096, 14336, 32, 8, 128, 128256),
    "Llama-3.3-70B": (8192, 28672, 64, 8, 128, 128256),
    "Qwen3-235B-A22B": (4096, 12288, 64, 4, 128, 151936),
    "Qwen3-Coder-480B-A35B": (6144, 8192, 96, 8, 128, 151936),
    "DeepSeek-V3": (7168, 40960, 56, 8, 128, 129280),
    "gpt-oss-120b": (2880, 2880, 64, 8, 64, 201088),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--gpu-memory", type=float, default=80, help="GB of each")
    options = parser.parse_args()
    usable = options.gpu_memory * 1e9 * (1 - RESERVED)
    print("| target | supervised | " + " | ".join(CONTEXTS) + " | longest |")
    print("| --- " * (3 + len(CONTEXTS)) + "|")
    for target, shape in SHAPES.items():
        for supervised in (1.0, 0.05):
            planned = Planned(draft(*shape), STEPS, torch.bfloat16, memory=MemoryPlan("full"))
            cells = [cell(planned, options.gpus, tokens, supervised, usable) for tokens in CONTEXTS.values()]
            print(
                f"| {target} | {supervised:.0%} | {' | '.join(cells)} | "
                f"{longest(planned, options.gpus, supervised, usable)} |"
            )


def draft(hidden: int, mlp: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int) -> DraftConfig:
    return DraftConfig(
        hidden_size=hidden,
        target_hidden_size=hidden,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        draft_vocab_size=DRAFT_VOCABULARY,
        max_position_embeddings=2**20,
    )


def cell(planned: Planned, gpus: int, tokens: int, supervised: float, usable: float) -> str:
    """Gigabytes per rank under the layout that takes the least GPU time, and that layout."""
    stream = PlannedStream(tokens, 1, supervised)
    fitted = best_layout(planned, gpus, lambda sizes: stream, usable)
    if fitted is None:
        return "does not fit"
    best = fitted.planned
    sizes = best.sizes
    names = [f"u{sizes.ulysses}"] * (sizes.ulysses > 1) + [f"r{sizes.ring}"] * (sizes.ring > 1)
    recompute = {"none": "none", "attention_kept": "kept", "full": "full"}[best.memory.recompute]
    host = ", host" * (best.residence == "host")
    return f"{stream.needs(best) / 1e9:.0f} ({'-'.join(names) or 'one GPU'}, {recompute}{host})"


def longest(planned: Planned, gpus: int, supervised: float, usable: float) -> str:
    """Tokens of the longest document on all GPUs, with full recompute and the inputs on the host."""
    ulysses = max(u for u in (1, 2, 4, 8) if gpus % u == 0 and planned.draft.num_attention_heads % u == 0)
    sizes = Sizes(1, ulysses, gpus // ulysses)
    planned = Planned(planned.draft, planned.steps, planned.dtype, sizes, "p2p", planned.memory, "host")
    return f"{longest_context(planned, lambda tokens: PlannedStream(tokens, 1, supervised), usable) / 1e6:.1f}M"


if __name__ == "__main__":
    run_command(main)
