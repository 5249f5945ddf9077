"""What SGLang's own code says, as JSON in the last line. Its import takes long, so one process answers for many drafts
or architectures.

python tests/support/sglang_says.py drafts FOLDER...       exit code and line of the check of each draft
python tests/support/sglang_says.py rotations FOLDER...    its rotation table beside training's, for config.json files
python tests/support/sglang_says.py layers ARCHITECTURE... the layers whose outputs it captures for a draft that names
none, 0-based, of a target of LAYERS layers
"""

import json
import sys
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.runtime_context import get_parallel

from eagle3.draft.config import read_draft_config
from eagle3.draft.rope import RotaryEmbedding
from eagle3.errors import UserError
from eagle3.targets.sglang.draft_check import check_draft, rotation_apart, start_runtime

LAYERS = 48
ONE_RANK = SimpleNamespace(is_last_rank=True)
# The class of the language part, to which a multimodal class hands the question on.
LANGUAGE = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Llama4ForConditionalGeneration": "LlamaForCausalLM",
}


def checked(folder: Path) -> tuple[int, str]:
    try:
        return 0, check_draft(folder)
    except UserError as mistake:
        return 2, str(mistake)


def rotated(folder: Path) -> dict[str, Any]:
    """How far apart the tables are. And at the last position: how many numbers differ in any bit, and how far ours are
    from fp64. For a plain rope, fp64 computes the frequencies too; otherwise it uses the same ones."""
    draft = read_draft_config(folder / "config.json")
    rope = draft.to_json("float32")["rope_parameters"]
    width, positions = draft.head_dim, draft.max_position_embeddings
    table = get_rope(width, width, positions, rope["rope_theta"], rope_scaling=dict(rope)).cos_sin_cache
    ours, exact = (
        torch.cat((rotation.cos, rotation.sin), -1)[0, 0]
        for rotation in (
            RotaryEmbedding(draft).at(torch.tensor([len(table) - 1]), dtype) for dtype in (torch.float32, torch.float64)
        )
    )
    differing, error = int((ours != table[-1].float()).sum()), float((ours.double() - exact).abs().max())
    return {"apart": rotation_apart(draft, table), "differing": differing, "error": error}


def captured(architecture: str) -> list[int]:
    """Runs the class's method on an object that has what the method reads, and no weights."""
    from sglang.srt.models.registry import ModelRegistry  # imports every model

    decoder = SimpleNamespace(layers=[SimpleNamespace() for _ in range(LAYERS)], layers_to_capture=None)
    decoder.set_eagle3_layers_to_capture = lambda layers: setattr(decoder, "layers_to_capture", layers)
    config = SimpleNamespace(num_hidden_layers=LAYERS)
    config.text_config = config

    def instance(of: str) -> Any:
        model = SimpleNamespace(config=config, model=decoder, pp_group=ONE_RANK)
        method = ModelRegistry.models[of].set_eagle3_layers_to_capture
        model.set_eagle3_layers_to_capture = MethodType(method, model)
        model.language_model = instance(LANGUAGE[of]) if of in LANGUAGE else decoder
        return model

    instance(architecture).set_eagle3_layers_to_capture()
    return [layer - 1 for layer in decoder.layers_to_capture]  # it captures what a layer takes as input


if __name__ == "__main__":
    _, what, *words = sys.argv
    if what == "layers":
        with get_parallel().override(pp_group=ONE_RANK):
            said = {name: captured(name) for name in words}
    else:
        start_runtime(Path(words[0]))
        say = {"drafts": checked, "rotations": rotated}[what]
        said = {folder.name: say(folder) for folder in map(Path, words)}
    print(json.dumps(said))
