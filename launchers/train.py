"""Train an EAGLE3 draft from a recipe, export it, and judge it by real speculative decoding."""

import argparse
import itertools
import math
import os
import shlex
import signal
import sys
from pathlib import Path

from eagle3.command_line import RecipeParser, from_to, slow_imports
from eagle3.console import Console, is_first_rank, tell, waiting
from eagle3.errors import UserError, run_command
from eagle3.jobs.gate import Gate
from eagle3.parallel.sizes import check_sizes, launched, read_job_size
from eagle3.preflight.inputs import require_inputs, require_servers
from eagle3.recipe.loading import dump_recipe, load_recipe
from eagle3.recipe.schema import Recipe
from eagle3.training.claim import holder_of
from eagle3.training.deepspeed_file import ZERO2, read_deepspeed_file
from eagle3.training.run_folder import RunFolder
from eagle3.training.stopping import RunStopped, StopSignals


def main() -> int:
    parser = RecipeParser(__doc__)
    parser.add_argument("--deepspeed", type=Path, default=ZERO2, help="the DeepSpeed file")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="yes",
        default="no",
        choices=("auto", "yes", "no"),
        metavar="auto",
        help="continue from the newest whole checkpoint in output.dir; with auto, begin a run if output.dir holds none",
    )
    parser.add_argument(
        "--stop-code", type=from_to(0, 255), default=0, help="exit code if SIGTERM or SIGUSR1 ended the run early"
    )
    parser.add_argument(
        "--check",
        metavar="NxP",
        help="before training: check recipe, DeepSpeed file and layout for N nodes of P processes, and stop "
        "(evaluate.py --check is for the draft, after it)",
    )
    parser.add_argument(
        "--print-recipe",
        action="store_true",
        help="show the recipe with every default, passwords in URLs included, and stop",
    )
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="print only results (the exported draft, its judgement) and warnings; `deepspeed --quiet` silences "
        "the launcher itself",
    )
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    options = parser.parse(resume_apart(sys.argv[1:]))
    if options.check:
        # report its mistakes first, because --check may have swallowed a word that is now missing elsewhere
        read_job_size(options.check)
    recipe = load_recipe(options.recipe, options.overrides)
    if not options.named:
        recipe = for_all_ranks(recipe, options)
    if options.print_recipe:
        print(dump_recipe(recipe), end="")
        return 0
    by_itself = "RANK" not in os.environ
    with StopSignals() as stop:
        try:
            return run(recipe, options, stop)
        except RunStopped as stopped:
            if is_first_rank():
                tell(f"{stopped}; continue with {own_command() if by_itself else 'the same command and --resume auto'}")
            asked = options.stop_code if stopped.number != signal.SIGINT else 0
            return asked or stopped.exit_code


def resume_apart(words: list[str]) -> list[str]:
    """The command line with a value added to each bare `--resume`. (A word after `--resume` is its value only if it is
    `auto`; otherwise it is a recipe or an override.)"""
    pairs = list(itertools.pairwise([*words, None]))
    for word, next_word in pairs:
        if word != "--resume" or next_word in (None, "auto"):
            continue
        if Path(next_word).is_dir() or (next_word.isalpha() and not Path(next_word).exists()):
            raise UserError(
                f"--resume {next_word}: takes no name or folder; write --resume to continue the run in output.dir from "
                "its newest checkpoint, or --resume auto to continue where there is one"
            )
    return ["--resume=yes" if word == "--resume" and next_word != "auto" else word for word, next_word in pairs]


def for_all_ranks(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    """The default recipe, which is meant for two cores, with a global batch that divides evenly among this job's
    data-parallel ranks."""
    sizes, batch = recipe.parallelism, recipe.training.global_batch_size
    streams = ranks_of(options) // (sizes.tensor * sizes.ulysses * sizes.ring) * recipe.training.accumulation
    explicit = any(word.startswith("training.global_batch_size=") for word in options.overrides)
    if explicit or not streams or batch % streams == 0:
        return recipe
    raised = -(-batch // streams) * streams
    if is_first_rank() and not options.print_recipe:
        tell(
            f"{options.recipe}: training.global_batch_size raised from {batch} to {raised}, for {streams} streams per "
            "step"
        )
    return load_recipe(options.recipe, [*options.overrides, f"training.global_batch_size={raised}"])


def ranks_of(options: argparse.Namespace) -> int:
    """Number of processes in this job or, with --check, in the job to check."""
    return math.prod(read_job_size(options.check)) if options.check else launched("WORLD_SIZE", 1)


def own_command() -> str:
    """The command line that continues this run."""
    words = [word for word in resume_apart(sys.argv) if word not in ("auto", "--resume") and "--resume=" not in word]
    return shlex.join(["python", *words, "--resume", "auto"])


def run(recipe: Recipe, options: argparse.Namespace, stop: StopSignals) -> int:
    console, resume = Console(is_first_rank(), options.quiet), options.resume
    parallelism = recipe.parallelism
    data = check_sizes("parallelism", parallelism.tensor, parallelism.ulysses, parallelism.ring, ranks_of(options))
    read_deepspeed_file(options.deepspeed, recipe.training, data)
    gate = Gate(recipe, console.warn, training=True)
    gate.know()
    folder = RunFolder(recipe.output.dir)
    continues = False
    if is_first_rank():
        require_inputs(recipe)
        continues = folder.check(recipe, resume)
        if recipe.hidden_states.mode == "live" and not options.check:  # with --check, servers may start with the job
            require_servers(recipe.target.servers)
    if not options.check:
        console(f"recipe: {options.recipe}; output.dir: {recipe.output.dir}")
    with waiting(console, "loading PyTorch and DeepSpeed"), slow_imports(options.quiet):
        from eagle3.jobs.train import check_layout, train
        from eagle3.parallel.topology import start_distributed, stop_distributed
        from eagle3.reporting.report import write_up

    if options.check:
        layout = check_layout(gate, options.deepspeed, options.check)
        if holder := holder_of(folder.path):  # no error: the job being checked may start after that run has ended
            gate.warn(
                f"{folder.path}: another run writes this folder ({holder}); until it ends, a second one is refused"
            )
        if not options.quiet:
            tell(f"{layout}; {'continues' if continues else 'begins'} {recipe.output.dir}")
        return 0
    topology = start_distributed(parallelism.tensor, parallelism.ulysses, parallelism.ring)
    try:
        lossless = train(recipe, options.deepspeed, topology, resume, stop, console, finish=write_up)
    except RunStopped as stopped:
        if stopped.together:
            stop_distributed()
        raise
    stop_distributed()
    return 0 if lossless else 1


if __name__ == "__main__":
    run_command(
        main,
        notice="nobody reads the output any more, so this ended here; a run that had begun continues with --resume",
    )
