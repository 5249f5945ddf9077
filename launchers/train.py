"""Train an EAGLE3 draft from a recipe, export it, and judge it by real speculative decoding."""

import argparse
from pathlib import Path

from eagle3.errors import run_command
from eagle3.parallel.topology import start_distributed, stop_distributed
from eagle3.recipe import dump_recipe, load_recipe
from eagle3.training.assemble import build_draft, gather_materials, judge, open_source, pick_vocabulary
from eagle3.training.engine import deepspeed_config
from eagle3.training.run_folder import RunFolder
from eagle3.training.tracking import Console
from eagle3.training.trainer import prepare_trainer

ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.yaml", help="the YAML to train")
    parser.add_argument("--deepspeed", type=Path, default=ROOT / "ds_configs" / "zero2.json", help="the DeepSpeed file")
    parser.add_argument("--resume", action="store_true", help="continue from the newest whole checkpoint in output.dir")
    parser.add_argument("--print-recipe", action="store_true", help="show the recipe with every default and stop")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change single keys of the recipe")
    options = parser.parse_args()
    recipe = load_recipe(options.recipe, options.overrides)
    if options.print_recipe:
        print(dump_recipe(recipe), end="")
        return 0
    topology = start_distributed()
    console, folder = Console(topology.is_first), RunFolder(recipe.output.dir)
    engine_config = deepspeed_config(options.deepspeed, recipe.training, topology.data.size())
    if options.resume and topology.is_first:
        folder.reopen(recipe)

    materials = gather_materials(recipe, topology.device, console)
    supply = open_source(recipe, materials, topology.device)
    vocabulary = pick_vocabulary(recipe, materials, len(supply.head.head), console)
    draft = build_draft(recipe, materials, vocabulary, supply.head, topology)
    if not options.resume and topology.is_first:
        folder.begin(recipe, console)
    trainer = prepare_trainer(
        recipe,
        engine_config,
        topology,
        folder,
        console,
        train=materials.train,
        held_out=materials.held_out,
        source=supply.source,
        head=supply.head,
        draft=draft,
        vocabulary=vocabulary,
    )
    trainer.run(options.resume)
    exported = trainer.export()
    console(f"exported draft: {exported}")
    lossless = True
    if recipe.evaluation.conversations and topology.is_first:
        judgement = judge(recipe, materials, supply.target, exported, topology, console)
        folder.write_evaluation(judgement.as_dict())
        lossless = judgement.trained.lossless
    stop_distributed()
    return 0 if lossless else 1


if __name__ == "__main__":
    run_command(main)
