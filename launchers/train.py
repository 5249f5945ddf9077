"""Train an EAGLE3 draft from a recipe, export it, and judge it by real speculative decoding."""

import argparse
import os
from pathlib import Path

from eagle3.console import Console, silence_libraries, tell
from eagle3.errors import UserError, run_command
from eagle3.recipe import Recipe, dump_recipe, load_recipe
from eagle3.training.stopping import RunStopped, StopSignals

ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.yaml", help="the YAML to train")
    parser.add_argument("--deepspeed", type=Path, default=ROOT / "ds_configs" / "zero2.json", help="the DeepSpeed file")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="yes",
        default="no",
        metavar="auto",
        help="continue from the newest whole checkpoint in output.dir; with auto, begin where output.dir holds no run",
    )
    parser.add_argument(
        "--stop-code", type=int, default=0, help="exit code where SIGTERM or SIGUSR1 ended the run before its end"
    )
    parser.add_argument(
        "--check", metavar="NxP", help="check recipe, DeepSpeed file and layout for N nodes of P processes, and stop"
    )
    parser.add_argument(
        "--print-recipe",
        action="store_true",
        help="show the recipe with every default, passwords in URLs included, and stop",
    )
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="print only what came out (the exported draft, its judgement) and warnings; `deepspeed --quiet` silences "
        "the launcher itself",
    )
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change single keys of the recipe")
    options = parser.parse_intermixed_args()
    if "=" in options.resume:  # --resume and then an override
        options.overrides.insert(0, options.resume)
        options.resume = "yes"
    if options.resume not in ("yes", "no", "auto"):
        raise UserError(f"--resume {options.resume}: is neither --resume nor --resume auto; output.dir names the run")
    recipe = load_recipe(options.recipe, options.overrides)
    if options.print_recipe:
        print(dump_recipe(recipe), end="")
        return 0
    with StopSignals() as stop:
        try:
            return run(recipe, options, stop)
        except RunStopped as stopped:
            if os.environ.get("RANK", "0") == "0":
                tell(str(stopped))
            return options.stop_code or (0 if stopped.together else 128 + stopped.number)


def run(recipe: Recipe, options: argparse.Namespace, stop: StopSignals) -> int:
    if options.quiet:
        silence_libraries()
    # Imported only now: they take seconds, and a mistake in the recipe should be told at once.
    from eagle3.parallel.topology import FORMING, start_distributed, stop_distributed
    from eagle3.reporting.finish import write_up
    from eagle3.training.layout import check_layout
    from eagle3.training.run import train
    from eagle3.training.run_folder import Resume, RunFolder

    resume = Resume(options.resume)
    if options.check:
        layout = check_layout(recipe, options.deepspeed, options.check)
        folder = RunFolder(recipe.output.dir)
        continues = folder.check(recipe, resume)
        if holder := folder.holder():  # no mistake: the job that is checked may begin after that one's end
            Console(True).warn(
                f"{folder.path}: another run writes this folder ({holder}); until its end a second is refused"
            )
        if not options.quiet:
            tell(f"{layout}; {'continues' if continues else 'begins'} {recipe.output.dir}")
        return 0
    parallelism = recipe.parallelism
    topology = start_distributed(parallelism.tensor, parallelism.ulysses, parallelism.ring, timeout=FORMING)
    console = Console(topology.is_first, options.quiet)
    try:
        lossless = train(recipe, options.deepspeed, topology, resume, stop, console, finish=write_up)
    except RunStopped as stopped:
        if stopped.together:
            stop_distributed()
        raise
    stop_distributed()
    return 0 if lossless else 1


if __name__ == "__main__":
    run_command(main)
