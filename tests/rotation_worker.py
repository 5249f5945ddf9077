"""Compares SGLang's table of a draft's rotation with training's, of several config.json. Started by a test."""

import json
import sys
from pathlib import Path

from sglang.srt.layers.rotary_embedding import get_rope

from eagle3.draft.config import read_draft_config
from eagle3.target.sglang.draft_check import rotation_apart, start_runtime


def main(folders: list[Path]) -> None:
    start_runtime(folders[0])
    said = {}
    for folder in folders:
        draft = read_draft_config(folder / "config.json")
        rope = draft.to_json("float32")["rope_parameters"]
        width, positions = draft.head_dim, draft.max_position_embeddings
        table = get_rope(width, width, positions, rope["rope_theta"], rope_scaling=dict(rope)).cos_sin_cache
        said[folder.name] = rotation_apart(draft, table)
    print(json.dumps(said))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
