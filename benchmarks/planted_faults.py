"""Plants known faults in small drafts, and asks the diagnosis of each draft what is wrong with it.

    python benchmarks/planted_faults.py train            trains 20 sound drafts for two targets (about 25 minutes)
    python benchmarks/planted_faults.py table            diagnoses all of them, and all with a fault
    python benchmarks/planted_faults.py table --json     the same as one JSON document

Two cores are enough. The targets are the quickstart's and a deeper, narrower one, both trained on first use.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from eagle3.errors import UserError, run_command

ROOT = Path(__file__).parent.parent
TARGETS = {
    "quickstart": (),
    "deeper": (
        *("model.demo.layers=8", "model.demo.hidden_size=160", "model.demo.intermediate_size=400"),
        *("model.demo.heads=5", "model.demo.key_value_heads=5", "model.demo.seed=1", "model.demo.answers=2000"),
    ),
}
HIDDEN = {"quickstart": 192, "deeper": 160}
# The drafts of each target. `square` has a square head, which can be transposed unnoticed.
DRAFTS = {
    "plain": (),
    "another seed": ("training.seed=1", "data.seed=1"),
    "half the vocabulary": ("model.draft.vocab_size=512",),
    "square": ("model.draft.vocab_size={hidden}",),
    "window 8": ("model.draft.window=8",),
    "window 32": ("model.draft.window=32",),
    "theta 1e6": ("model.draft.rope_parameters={{rope_type: default, rope_theta: 1000000.0}}",),
    "yarn": (
        "model.draft.rope_parameters={{rope_type: yarn, rope_theta: 10000.0, factor: 4.0, "
        "original_max_position_embeddings: 128}}",
    ),
    "fc_norm": ("model.draft.fc_norm=true",),
    "norm_output": ("model.draft.norm_output=true",),
}
SHORT = (
    *("training.max_steps=300", "evaluation.every=300", "training.checkpoint_every=300"),
    *("evaluation.conversations=0", "output.check_export=false"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "table"))
    parser.add_argument("--folder", type=Path, default=Path("runs/planted-faults"))
    parser.add_argument("--json", action="store_true", help="table: print one JSON document")
    options = parser.parse_args()
    if options.what == "train":
        for name in DRAFTS:
            for target in TARGETS:
                train(options.folder, target, name)
        return 0
    return 0


def export_of(folder: Path, target: str, name: str) -> Path:
    return folder / f"{target}, {name}".replace(", ", "-").replace(" ", "-") / "export"


def recipe_of(folder: Path, target: str, name: str) -> list[str]:
    """Arguments of a launcher for this draft."""
    keys = (key.format(hidden=HIDDEN[target]) for key in (*TARGETS[target], *DRAFTS[name], *SHORT))
    return [str(ROOT / "recipes" / "quickstart.yaml"), *keys, f"output.dir={export_of(folder, target, name).parent}"]


def train(folder: Path, target: str, name: str) -> None:
    if not (export_of(folder, target, name) / "config.json").exists():
        words = [sys.executable, str(ROOT / "launchers" / "train.py"), *recipe_of(folder, target, name), "--quiet"]
        if subprocess.run(words).returncode:
            raise UserError(f"train.py ended with an error for {target}, {name}; what it said stands above")


if __name__ == "__main__":
    run_command(main)
