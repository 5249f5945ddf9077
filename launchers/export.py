"""Ask SGLang's own draft class whether it takes an exported draft whole: every tensor read, every weight filled.

Needs SGLang installed, but neither a GPU nor the target. Every training run does the same after its export.
"""

from pathlib import Path

from eagle3.command_line import RecipeParser
from eagle3.console import Console, tell, waiting
from eagle3.errors import UserError, run_command
from eagle3.preflight.inputs import require_export
from eagle3.recipe import load_recipe

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = RecipeParser(__doc__, ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("--draft", type=Path, help="folder of the exported draft (default: output.dir/export)")
    parser.add_argument(
        "--check",
        action="store_true",
        help="load the draft in SGLang's own class, which must take it whole (train.py --check is for the recipe, before "
        "training)",
    )
    parser.add_argument("--quiet", action="store_true", help="print only the result")
    options = parser.parse()
    draft = options.draft or load_recipe(options.recipe, options.overrides).output.dir / "export"
    require_export(draft)
    if not options.check:
        raise UserError(f"{draft}: say what to do with it: --check")
    # Imported only now: they take seconds, and a mistake should be told at once.
    from eagle3.draft.interchange import read_exported
    from eagle3.evaluation.export_check import check_export

    read_exported(draft)
    with waiting(Console(speaks=True, quiet=options.quiet), "asking SGLang"):
        said = check_export(draft)
    tell(f"{draft}: {said}")


if __name__ == "__main__":
    run_command(main)
