"""Write five copies of an exported draft, each with a fault that is common among published ones:
python benchmarks/real_model/faults.py DRAFT OUT
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYERS = "eagle_aux_hidden_state_layer_ids"


def layers_one_too_high(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    for place in (config, config["eagle_config"]):
        place[LAYERS] = [layer + 1 for layer in place[LAYERS]]


def layers_reversed(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """As if training had joined the three layers' states in the other order."""
    weights["fc.weight"] = torch.cat(weights["fc.weight"].chunk(3, 1)[::-1], 1).contiguous()


def another_theta(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = config["rope_theta"] / 100


def ids_for_offsets(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """d2t counts twice what a reader of offsets adds."""
    weights["d2t"] += weights["d2t"].new_tensor(range(len(weights["d2t"])))


def norm_of_the_output(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    config["norm_output"] = not config["norm_output"]


FAULTS = (layers_one_too_high, layers_reversed, another_theta, ids_for_offsets, norm_of_the_output)


def main() -> None:
    draft, out = map(Path, sys.argv[1:])
    for fault in FAULTS:
        copy = out / fault.__name__.replace("_", "-")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(draft, copy)
        config, weights = json.loads((copy / "config.json").read_text()), load_file(copy / "model.safetensors")
        fault(config, weights)
        (copy / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(weights, copy / "model.safetensors")  # without the digest, as other trainers write drafts


if __name__ == "__main__":
    main()
