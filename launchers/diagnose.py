"""Say why a draft accepts so little: which single change to it, or to what it reads, would raise its acceptance.

Works for any EAGLE3 draft, whoever trained it. The recipe names its target and the texts. Exit code 1 if a change
explains the draft's acceptance.
"""

import json
from pathlib import Path

from eagle3.command_line import RecipeParser, slow_imports
from eagle3.console import Console, is_first_rank, waiting
from eagle3.durable import replace_text, writing
from eagle3.errors import run_command
from eagle3.preflight.inputs import require_export, require_inputs, require_weights
from eagle3.recipe.loading import load_recipe

ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = RecipeParser(__doc__, ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("--draft", type=Path, help="folder of the draft (default: output.dir/export)")
    parser.add_argument("--prompts", type=Path, help="as for evaluate.py (default: held-out conversations)")
    parser.add_argument("--out", type=Path, help="file for the result as JSON (default: diagnosis.json beside --draft)")
    parser.add_argument("--quiet", action="store_true", help="print only the result")
    options = parser.parse()
    recipe = load_recipe(options.recipe, options.overrides)
    draft = options.draft or recipe.output.dir / "export"
    out = options.out or draft.parent / "diagnosis.json"
    require_export(draft)
    require_inputs(recipe)
    require_weights(recipe.model.target)
    console = Console(is_first_rank(), options.quiet)
    console(f"recipe: {options.recipe}; draft: {draft}")
    with waiting(console, "loading PyTorch and transformers"), slow_imports(options.quiet):
        from eagle3.jobs.diagnose import diagnose_draft
        from eagle3.jobs.job import find_target, gather_inputs
        from eagle3.parallel.topology import start_distributed, stop_distributed

    topology = start_distributed()
    inputs = gather_inputs(find_target(recipe, topology.device, console, make=False), console, judging=True)
    diagnosis = diagnose_draft(inputs, draft, topology, console, options.prompts)
    for line in diagnosis.lines():
        console.result(line)
    with writing(out, "free space, or name another file with --out"):
        replace_text(out, json.dumps(diagnosis.as_dict() | {"draft": str(draft)}, indent=2) + "\n")
    console.result(f"written to {out}")
    stop_distributed()
    return 1 if diagnosis.explanations else 0


if __name__ == "__main__":
    run_command(main)
