"""Judge an exported draft by real speculative decoding: acceptance length, speed, and whether the output stays the same.

By transformers (the default, needs nothing else) or by a real SGLang server, on a recipe's held-out conversations or on
prompts of a file. Exit code 1 where the output differs from plain greedy decoding.
"""

import argparse
import json
from pathlib import Path

from eagle3.durable import move_aside, write_text
from eagle3.errors import UserError, run_command
from eagle3.recipe import Recipe, load_recipe

ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("--draft", type=Path, help="folder of the exported draft (default: output.dir/export)")
    parser.add_argument(
        "--engine", default="transformers", help="who decodes: transformers (default), or sglang, as in serving"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        help="JSON, JSONL or parquet file of conversations, or .txt with a question a line (default: held-out conversations)",
    )
    parser.add_argument("--topk", type=int, default=1, help="branches of the draft tree; 1 (default) is a chain")
    parser.add_argument(
        "--tree-tokens", type=int, help="tokens of one verification, SGLang's speculative-num-draft-tokens"
    )
    parser.add_argument(
        "--out", type=Path, help="file for the result as JSON (default: evaluation.json beside --draft)"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change single keys of the recipe")
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, options.overrides)
    draft = options.draft or recipe.output.dir / "export"
    check(options, recipe, draft)
    # Imported only now: they take seconds, and a mistake in the recipe should be told at once.
    from eagle3.parallel.topology import start_distributed, stop_distributed
    from eagle3.training.assemble import gather_materials
    from eagle3.training.judging import judge, judge_served
    from eagle3.training.tracking import Console

    topology = start_distributed()
    console = Console(topology.is_first)
    materials = gather_materials(recipe, topology.device, console)
    if options.engine == "sglang":
        judgement = judge_served(recipe, materials, draft, tree_of(options, recipe), console, options.prompts)
    else:
        judgement = judge(recipe, materials, None, draft, topology, console, options.prompts)
    out = options.out or draft.parent / "evaluation.json"
    if out.exists():
        console(f"{out} held an earlier result: moved to {move_aside(out)}")
    write_text(out, json.dumps(judgement.as_dict(), indent=2) + "\n")
    console(f"written to {out}")
    stop_distributed()
    return 0 if judgement.trained.lossless else 1


def check(options: argparse.Namespace, recipe: Recipe, draft: Path) -> None:
    """Raises UserError for what can be refused before anything is loaded."""
    if options.engine not in ("transformers", "sglang"):
        raise UserError(f"--engine {options.engine}: there is none of that name; use transformers or sglang")
    if options.prompts is None and not recipe.evaluation.conversations:
        raise UserError("recipe: evaluation.conversations is 0, so there is nothing to judge; set it to 16, say")
    if options.prompts is not None and not options.prompts.is_file():
        raise UserError(f"--prompts {options.prompts}: no such file; name a .jsonl, .json, .parquet or .txt file")
    if not (draft / "config.json").is_file():
        raise UserError(f"{draft}: no exported draft here; train first, or name one with --draft")
    if options.engine == "transformers" and (options.topk, options.tree_tokens) != (1, None):
        raise UserError(
            "--topk, --tree-tokens: transformers drafts a chain of evaluation.draft_tokens, no tree; use --engine sglang, or "
            "leave them out"
        )
    if options.engine == "sglang":
        from eagle3.target.sglang.server import require_sglang

        require_sglang()
        tree_of(options, recipe)


def tree_of(options: argparse.Namespace, recipe: Recipe):
    """The DraftTree asked for; UserError where there is no such tree."""
    from eagle3.evaluation.serving import DraftTree

    return DraftTree.of(recipe.evaluation.draft_tokens, options.topk, options.tree_tokens)


if __name__ == "__main__":
    run_command(main)
