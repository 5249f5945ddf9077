"""Prints, for each architecture named on the command line, the layers that SGLang's own class captures for a draft
whose config names none: {architecture: layers, 0-based, whose outputs it takes}, for a target of LAYERS layers.

python tests/support/sglang_default_layers_worker.py ARCHITECTURE...
"""

import json
import sys
from types import MethodType, SimpleNamespace
from typing import Any

from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import get_parallel

LAYERS = 48
ONE_RANK = SimpleNamespace(is_last_rank=True)
# The class of the language part, to which a multimodal class hands the question on.
LANGUAGE = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Llama4ForConditionalGeneration": "LlamaForCausalLM",
}


def captured(architecture: str) -> list[int]:
    """Runs the class's method on an object that has what the method reads, and no weights."""
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
    with get_parallel().override(pp_group=ONE_RANK):
        print(json.dumps({name: captured(name) for name in sys.argv[1:]}))
