"""Find out, before spending GPU time, whether a recipe fits, how to make it fit, and what a step costs.

Memory follows the code's own allocations; times and utilisation are assumptions, and are printed as such.
"""

import json
from pathlib import Path

from eagle3.command_line import RecipeParser, from_to, slow_imports
from eagle3.console import GREEN, RED, Console, tell
from eagle3.errors import SharedUserError, run_command
from eagle3.jobs.gate import Gate
from eagle3.parallel.sizes import check_sizes, stream_samples
from eagle3.recipe.loading import load_recipe
from eagle3.training.deepspeed_file import ZERO2

MOST_TOKENS = 10**9  # of one document
MOST_GB = 2000.0  # more than any GPU has, but less than one GPU's memory written in MiB


def main() -> int:
    parser = RecipeParser(__doc__)
    parser.add_argument("--deepspeed", type=Path, default=ZERO2, help="the DeepSpeed file")
    parser.add_argument("--gpus", type=from_to(1), default=8, help="in the whole job (default 8)")
    parser.add_argument("--gpu-memory", type=gigabytes, default=80.0, metavar="GB", help="of each (default 80)")
    parser.add_argument(
        "--context",
        type=from_to(2, MOST_TOKENS),
        help="tokens of one document in a stream of its own (default: the recipe's)",
    )
    parser.add_argument(
        "--supervised",
        type=from_to(1 / MOST_TOKENS, 1.0),
        default=1.0,
        help="share of the tokens that count (default 1)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse()
    if options.context and round(options.context * options.supervised) < 1:
        raise SharedUserError(f"--supervised {options.supervised}: leaves less than one token; give a larger share")
    recipe = load_recipe(options.recipe, options.overrides)
    gate, sizes = Gate(recipe, Console(True).warn, training=True), recipe.parallelism
    data = check_sizes(f"--gpus {options.gpus}: parallelism", sizes.tensor, sizes.ulysses, sizes.ring, options.gpus)
    if options.context is None:
        stream_samples(recipe.training.global_batch_size, data, recipe.training.accumulation)
    # Silently, because DeepSpeed logs to stdout that there is no GPU, and --json prints there.
    with slow_imports(quiet=True):
        from eagle3.jobs.derived import config_of, shape_draft
        from eagle3.jobs.plan import DOES_NOT_FIT, FITS, plan, plan_text, planned_step

    config = config_of(recipe)
    gate.know(config=config)
    draft = shape_draft(recipe, config)
    gate.know(draft=draft)
    planned = planned_step(recipe, draft, options.gpus, options.deepspeed, packed=options.context is None)
    report = plan(recipe, planned, options.gpu_memory * 1e9, options.context, options.supervised)
    if options.json:
        print(json.dumps(report, indent=1))
        return 0 if report["fits"] else 1
    colours = {FITS: GREEN, DOES_NOT_FIT: RED}
    for line in plan_text(report).split("\n"):
        if line in colours:
            tell("", lead=line, colour=colours[line])
        else:
            tell(line)
    return 0 if report["fits"] else 1


def gigabytes(text: str) -> float:
    return from_to(1e-3, MOST_GB)(text.upper().removesuffix("GB"))


if __name__ == "__main__":
    run_command(main)
