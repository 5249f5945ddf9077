"""Write a recipe for a target from its config alone: draft, layouts, disk. Reads no weights and needs no GPU."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.command_line import Parser, slow_imports
from eagle3.console import Console, tell, waiting
from eagle3.durable import write_text, writing
from eagle3.errors import UserError, run_command
from eagle3.hub import require_folder
from eagle3.recipe.loading import checked_recipe, load_recipe
from eagle3.recipe.schema import Recipe
from eagle3.targets.sglang.asking import INSTALL, TESTED, is_installed
from eagle3.training.deepspeed_file import ZERO2

if TYPE_CHECKING:
    from eagle3.targets.facts import TargetFacts

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--target", help="hub id, or a folder with a config.json")
    parser.add_argument("--id", help="hub id to write as model.target in place of the folder that is read")
    parser.add_argument("--out", type=Path, help="the YAML to write (default: recipes/ and the target's name)")
    parser.add_argument("--deepspeed", type=Path, default=ZERO2, help="the DeepSpeed file")
    parser.add_argument("--refresh", type=Path, metavar="RECIPE", help="rewrite a recipe's closing comment")
    parser.add_argument("--quiet", action="store_true", help="print only the file written, and what to check in it")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="keys to write into a new recipe")
    options = parser.parse_intermixed_args()
    if bool(options.out or (options.target and not options.refresh)) == bool(options.refresh):
        raise UserError("new_recipe.py: name --target for a new recipe, or --refresh with a recipe")
    if options.refresh and (unused := ["--id"] * bool(options.id) + options.overrides):
        raise UserError(f"new_recipe.py: {unused[0]} is for a new recipe; leave it out, and edit the recipe itself")
    if options.refresh:
        refresh(options)
    else:
        write_new(options)


def write_new(options: argparse.Namespace) -> None:
    if not options.target:
        raise UserError("--out: names the recipe to write; name its target with --target")
    target = options.id or options.target
    out = options.out or ROOT / "recipes" / f"{Path(target).name.lower()}.yaml"
    if out.exists():
        raise UserError(f"{out}: already exists; name another file with --out, or --refresh it")
    if not out.parent.is_dir():
        raise UserError(f"{out}: there is no folder {out.parent}; create it, or name another file with --out")
    require_folder(options.target)
    with slow_imports(options.quiet):
        from eagle3.jobs.new_recipe import model_size, new_recipe_text
        from eagle3.targets.checkpoint import tokenizer_code
        from eagle3.targets.facts import read_facts
        from eagle3.targets.sglang.version import EAGLE3_TARGETS

    console = Console(speaks=True, quiet=options.quiet)
    model = checked_recipe({"model": {"target": target}}, "new recipe", options.overrides).model
    with waiting(console, f"reading {options.target}"):
        facts = read_facts(options.target, model.revision, model.trust_model_code)
        code = None if model.trust_remote_code else tokenizer_code(options.target, model.revision)
    is_served = facts.architecture in EAGLE3_TARGETS
    if not is_served and not facts.has_layers:
        raise UserError(
            f"target {target!r}: SGLang {TESTED} serves no EAGLE3 drafts for {facts.architecture}, and transformers' "
            "class has no list of decoder layers under get_decoder().layers, where hidden states are read; choose "
            "another target"
        )
    text = new_recipe_text(target, facts, options.deepspeed, console.warn, options.overrides, is_installed())
    with writing(out, "free space, or name another file with --out"):
        out.write_text(text, encoding="utf-8")
    recipe = load_recipe(out)  # check that the new recipe can be loaded
    tell(f"{out}: {facts.architecture}, {model_size(facts.parameters)}")
    tell_what_to_check(recipe, facts, is_served, code)
    if not options.quiet:
        tell(f"next: python launchers/prepare.py {out} --preview 2")


def tell_what_to_check(recipe: Recipe, facts: "TargetFacts", is_served: bool, code: str | None) -> None:
    """Tells what the user should know of a new recipe.

    is_served: whether SGLang serves drafts for its target
    code: the class of a tokenizer that is code, and may not run
    """
    import torch

    if facts.assumed:
        sizes = ", ".join(f"{name} {value:,}" for name, value in facts.assumed.items())
        tell(f"config.json does not give every size: transformers takes {sizes}; check that")
    if code:
        tell(f"its tokenizer is Python code ({code}): read it, and set model.trust_remote_code=tokenizer to let it run")
    if facts.quantised_head:
        tell("its lm_head is quantised: the recipe takes the target's own logits as teacher (target.teacher: logits)")
    if not is_served:
        tell(
            f"SGLang {TESTED}, the version known here, serves no EAGLE3 drafts for this architecture: transformers "
            "will capture"
        )
    elif not is_installed():
        if recipe.target.backend == "sglang":
            tell(f"SGLang, with which this recipe runs the target, is not installed: {INSTALL}")
        else:
            tell(
                "SGLang is not installed, so the recipe runs the target with transformers while training; with SGLang, "
                "set target.backend=sglang and hidden_states.mode=stored"
            )
    if recipe.training.dtype == "bfloat16" and not torch.cuda.is_available():
        tell(
            "training.dtype is bfloat16, for GPUs; this machine has none, and to train here add training.dtype=float32 "
            "model.target_dtype=float32: bfloat16 is several times slower on CPUs"
        )


def refresh(options: argparse.Namespace) -> None:
    recipe = load_recipe(options.refresh)
    with slow_imports(options.quiet):
        from eagle3.jobs.new_recipe import refreshed
        from eagle3.targets.facts import read_facts

    model = recipe.model
    facts = read_facts(options.target or model.target, model.revision, model.trust_model_code)
    text = options.refresh.read_text(encoding="utf-8")
    text = refreshed(text, recipe, facts, options.deepspeed, str(options.refresh))
    with writing(options.refresh, "free space"):
        write_text(options.refresh, text)
    tell(f"{options.refresh}: written again")


if __name__ == "__main__":
    run_command(main)
