"""Compares SGLang's rotation table with training's, for the drafts of several config.json files. Started by a test."""

import json
import sys
from pathlib import Path

import torch
from sglang.srt.layers.rotary_embedding import get_rope

from eagle3.draft.config import DraftConfig, read_draft_config
from eagle3.draft.rope import RotaryEmbedding
from eagle3.targets.sglang.draft_check import rotation_apart, start_runtime


def main(folders: list[Path]) -> None:
    start_runtime(folders[0])
    results = {}
    for folder in folders:
        draft = read_draft_config(folder / "config.json")
        rope = draft.to_json("float32")["rope_parameters"]
        width, positions = draft.head_dim, draft.max_position_embeddings
        table = get_rope(width, width, positions, rope["rope_theta"], rope_scaling=dict(rope)).cos_sin_cache
        results[folder.name] = {"apart": rotation_apart(draft, table), **at_the_last(draft, table)}
    print(json.dumps(results))


def at_the_last(draft: DraftConfig, table: torch.Tensor) -> dict[str, float]:
    """At the last position: how many numbers differ from SGLang's in any bit, and how far ours are from fp64. For a
    plain rope, fp64 computes the frequencies too; otherwise it uses the same ones."""
    last = torch.tensor([len(table) - 1])
    ours, exact = (
        torch.cat((rotation.cos, rotation.sin), -1)[0, 0]
        for rotation in (RotaryEmbedding(draft).at(last, dtype) for dtype in (torch.float32, torch.float64))
    )
    return {"differing": int((ours != table[-1].float()).sum()), "error": float((ours.double() - exact).abs().max())}


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
