"""Judge an exported draft by real speculative decoding on a recipe's held-out conversations."""

import argparse
import json
from pathlib import Path

from eagle3.durable import move_aside, write_text
from eagle3.errors import UserError, run_command
from eagle3.recipe import load_recipe

ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("--draft", type=Path, help="folder of the exported draft (default: output.dir/export)")
    parser.add_argument(
        "--out", type=Path, help="file for the result as JSON (default: evaluation.json beside --draft)"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change single keys of the recipe")
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, options.overrides)
    if not recipe.evaluation.conversations:
        raise UserError("recipe: evaluation.conversations is 0, so there is nothing to judge; set it to 16, say")
    draft = options.draft or recipe.output.dir / "export"
    if not (draft / "config.json").is_file():
        raise UserError(f"{draft}: no exported draft here; train first, or name one with --draft")
    # Imported only now: they take seconds, and a mistake in the recipe should be told at once.
    from eagle3.parallel.topology import start_distributed, stop_distributed
    from eagle3.training.assemble import gather_materials, judge
    from eagle3.training.tracking import Console

    topology = start_distributed()
    console = Console(topology.is_first)
    materials = gather_materials(recipe, topology.device, console)
    judgement = judge(recipe, materials, None, draft, topology, console)
    out = options.out or draft.parent / "evaluation.json"
    if out.exists():
        console(f"{out} held an earlier result: moved to {move_aside(out)}")
    write_text(out, json.dumps(judgement.as_dict(), indent=2) + "\n")
    console(f"written to {out}")
    stop_distributed()
    return 0 if judgement.trained.lossless else 1


if __name__ == "__main__":
    run_command(main)
