"""Find out, before spending GPU time, whether a recipe fits, how to make it fit, and what a step costs.

Memory follows the code's own allocations; times and utilisation are assumptions, and are printed as such.
"""

import argparse
import json
from pathlib import Path

from eagle3.command_line import RecipeParser, slow_imports
from eagle3.console import GREEN, RED, tell
from eagle3.errors import SharedUserError, run_command
from eagle3.parallel.sizes import check_sizes, stream_samples
from eagle3.recipe.loading import load_recipe

ROOT = Path(__file__).parent.parent
MOST_GB = 2000  # more than any GPU has, but less than one GPU's memory written in MiB


def main() -> int:
    parser = RecipeParser(__doc__, ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("--deepspeed", type=Path, default=ROOT / "ds_configs" / "zero2.json", help="the DeepSpeed file")
    parser.add_argument("--gpus", type=int, default=8, help="in the whole job (default 8)")
    parser.add_argument("--gpu-memory", type=gigabytes, default=80.0, metavar="GB", help="of each (default 80)")
    parser.add_argument(
        "--context", type=int, help="tokens of one document in a stream of its own (default: the recipe's)"
    )
    parser.add_argument("--supervised", type=float, default=1.0, help="share of the tokens that count (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse()
    check(options)
    recipe = load_recipe(options.recipe, options.overrides)
    sizes = recipe.parallelism
    data = check_sizes(f"--gpus {options.gpus}: parallelism", sizes.tensor, sizes.ulysses, sizes.ring, options.gpus)
    if options.context is None:
        stream_samples(recipe.training.global_batch_size, data, recipe.training.accumulation)
    # Silently, because DeepSpeed logs to stdout that there is no GPU, and --json prints there.
    with slow_imports(quiet=True):
        from eagle3.jobs.derived import config_of, shape_draft
        from eagle3.jobs.plan import DOES_NOT_FIT, FITS, plan, plan_text, planned_step

    draft = shape_draft(recipe, config_of(recipe))
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
    return float(text.upper().removesuffix("GB"))


def check(options: argparse.Namespace) -> None:
    share = "a share above 0, at most 1"
    if options.supervised > 1 and (options.context or 0) > options.supervised:
        share += (
            f"; {options.supervised:,.0f} of {options.context:,} tokens are {options.supervised / options.context:.3g}"
        )
    for name, fine, remedy in (
        ("gpus", options.gpus >= 1, "a number of GPUs, 1 or more"),
        ("gpu_memory", 0 < options.gpu_memory <= MOST_GB, f"GB of one GPU, for example 80, {MOST_GB:,} at most"),
        ("context", options.context is None or 2 <= options.context <= 10**9, "tokens, 2 to a billion"),
        ("supervised", 0 < options.supervised <= 1, share),
        ("supervised", round((options.context or 10**9) * options.supervised) >= 1, "a share of at least one token"),
    ):
        if not fine:
            option = "--" + name.replace("_", "-")
            raise SharedUserError(f"{option} {getattr(options, name)}: does not make sense; give {remedy}")


if __name__ == "__main__":
    run_command(main)
