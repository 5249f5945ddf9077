"""Train an EAGLE3 draft from a recipe, export it, and judge it by real speculative decoding."""

import argparse
from pathlib import Path

from eagle3.errors import run_command
from eagle3.recipe import dump_recipe, load_recipe

ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.yaml", help="the YAML to train")
    parser.add_argument("--deepspeed", type=Path, default=ROOT / "ds_configs" / "zero2.json", help="the DeepSpeed file")
    parser.add_argument("--resume", action="store_true", help="continue from the newest whole checkpoint in output.dir")
    parser.add_argument("--print-recipe", action="store_true", help="show the recipe with every default and stop")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change single keys of the recipe")
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, options.overrides)
    if options.print_recipe:
        print(dump_recipe(recipe), end="")
        return 0
    # Imported only now: they take seconds, and a mistake in the recipe should be told at once.
    from eagle3.parallel.topology import start_distributed, stop_distributed
    from eagle3.training.run import train

    parallelism = recipe.parallelism
    topology = start_distributed(parallelism.tensor, parallelism.ulysses, parallelism.ring)
    lossless = train(recipe, options.deepspeed, topology, options.resume)
    stop_distributed()
    return 0 if lossless else 1


if __name__ == "__main__":
    run_command(main)
