"""Say why a draft accepts so little: which change to it, or to what it reads, would raise its acceptance.

Works for any EAGLE3 draft, whoever trained it. Name the draft, its target and a file of prompts; or a recipe, which
names the target and, in its data, held-out conversations. Exit code 1 if a known fault explains the draft's acceptance.
"""

import argparse
import json
import os
from pathlib import Path

from eagle3.command_line import RecipeParser, slow_imports
from eagle3.console import Console, is_first_rank, waiting
from eagle3.errors import UserError, run_command
from eagle3.hub import draft_folder, require_folder
from eagle3.planning.gpus import DEFAULT_GPU, GPUS
from eagle3.preflight.inputs import (
    require_export,
    require_inputs,
    require_prompts_file,
    require_result_place,
    write_result,
)
from eagle3.recipe.loading import checked_recipe, load_recipe
from eagle3.recipe.schema import Recipe


def main() -> int:
    options = parse()
    recipe = recipe_of(options)
    name = options.draft or str(recipe.output.dir / "export")
    # beside the draft, as evaluate.py's results; a draft of the hub has no such place
    out = options.out or (Path(name).parent if Path(name).is_dir() else Path()) / "diagnosis.json"
    check(options, recipe, name, out)
    console = Console(is_first_rank(), options.quiet)
    with waiting(console, "loading PyTorch and transformers"), slow_imports(options.quiet):
        from eagle3.jobs.diagnose import diagnose_draft, in_other_form
        from eagle3.jobs.evaluate import held_out_prompts, judgement_record, prompts_of
        from eagle3.jobs.job import find_target, gather_inputs
        from eagle3.parallel.topology import start_distributed, stop_distributed

    topology = start_distributed()
    draft = draft_folder(name)
    console(f"draft: {draft}")
    known = find_target(recipe, topology.device, console, make=False)
    if options.prompts:
        prompts = prompts_of(known, options.prompts, recipe.evaluation.draft_tokens)
        others = in_other_form(known, options.prompts)
    else:
        inputs = gather_inputs(known, console, judging=True)
        prompts, others = held_out_prompts(inputs, recipe.evaluation.draft_tokens), []
    diagnosed = diagnose_draft(known, draft, prompts, others, topology, console, options.gpu)
    for line in diagnosed.lines():
        console.result(line)
    texts = "held-out conversations" if options.prompts is None else options.prompts.name
    record = judgement_record("diagnosis", diagnosed, known, draft, texts, name)
    write_result(out, record, console)
    stop_distributed()
    return 1 if diagnosed.faults else 0


def parse() -> argparse.Namespace:
    parser = RecipeParser(__doc__)
    parser.add_argument("--draft", help="folder or hub id of the draft (default: output.dir/export)")
    parser.add_argument("--target", help="folder or hub id of its target (default: the recipe's model.target)")
    parser.add_argument(
        "--prompts",
        type=Path,
        action=Once,
        help="a file as for evaluate.py (default: the recipe's held-out conversations)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="file for the result as JSON (default: diagnosis.json beside the draft's folder; for a draft of the hub, "
        "in this folder)",
    )
    parser.add_argument(
        "--gpu",
        type=str.lower,
        choices=GPUS,
        default=DEFAULT_GPU,
        help="GPU to estimate the speed-up for, by its data sheet (default: %(default)s)",
    )
    parser.add_argument("--quiet", action="store_true", help="print only the result")
    return parser.parse()


class Once(argparse.Action):
    """An option that argparse would take the last value of if it stood there twice."""

    def __call__(self, parser, options, value, name=None) -> None:
        if getattr(options, self.dest) is not None:
            raise UserError(
                f"{name} {value}: takes one file, and {getattr(options, self.dest)} is given too; merge them"
            )
        setattr(options, self.dest, value)


def recipe_of(options: argparse.Namespace) -> Recipe:
    """The recipe that the user named, with --target in it; without one, the defaults for that target."""
    if options.target is None:
        return load_recipe(options.recipe, options.overrides)
    if options.named:
        return load_recipe(options.recipe, [*options.overrides, f"model.target={json.dumps(options.target)}"])
    return checked_recipe({"model": {"target": options.target}}, "--target", options.overrides)


def check(options: argparse.Namespace, recipe: Recipe, draft: str, out: Path) -> None:
    """Raises UserError for every mistake that can be found before anything is loaded."""
    evaluation = recipe.evaluation
    if options.target and not options.prompts and not options.named:
        raise UserError(
            "--target: needs texts; name a file of conversations or questions with --prompts, or a recipe with data"
        )
    if not options.prompts and not evaluation.conversations:
        raise UserError("recipe: evaluation.conversations is 0; set it to 16, for example, or name --prompts")
    if options.target and not options.draft:
        raise UserError("--target: needs a draft beside it; name its folder or hub id with --draft")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("diagnose.py: runs in one process; start it with python")
    if options.prompts:
        require_prompts_file(options.prompts)
    if evaluation.new_tokens < evaluation.draft_tokens + 2:
        raise UserError(
            f"evaluation.new_tokens: {evaluation.new_tokens} tokens hold no chain of {evaluation.draft_tokens} "
            f"(evaluation.draft_tokens) after the first; set it to {evaluation.draft_tokens + 2} or more, better 64"
        )
    require_result_place(out)
    require_folder(draft, "draft", slashes=(1,), remedy="train first, or name a draft's folder or hub id with --draft")
    if Path(draft).is_dir():
        require_export(Path(draft))
    require_inputs(recipe)


if __name__ == "__main__":
    run_command(main)
