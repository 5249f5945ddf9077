"""Tokenise and mask a recipe's data, report what was kept and dropped, and show samples with supervised tokens."""

import sys

from eagle3.command_line import RecipeParser, from_to, slow_imports
from eagle3.console import Console, counted, shows_colours, tell, waiting
from eagle3.errors import run_command
from eagle3.preflight.inputs import require_inputs
from eagle3.recipe.loading import load_recipe


def main() -> None:
    parser = RecipeParser(__doc__)
    parser.add_argument(
        "--preview", type=from_to(0), default=0, metavar="N", help="print N samples, supervised tokens marked"
    )
    parser.add_argument(
        "--quiet", action="store_true", help="print only the counts, the vocabulary's coverage, previews and warnings"
    )
    options = parser.parse()
    recipe = load_recipe(options.recipe, options.overrides)
    console = Console(speaks=True, quiet=options.quiet)
    console(f"recipe: {options.recipe}")
    require_inputs(recipe, weights=False)
    with waiting(console, "loading PyTorch and transformers"), slow_imports(options.quiet):
        import torch

        from eagle3.jobs.derived import vocabulary_size
        from eagle3.jobs.job import find_target, gather_inputs
        from eagle3.text.prepare import preview
        from eagle3.text.vocabulary import choose_vocabulary

    inputs = gather_inputs(
        find_target(recipe, torch.device("cuda" if torch.cuda.is_available() else "cpu"), console), console
    )
    dropped = sum(sum(each.dropped.values()) for each in (inputs.train_summary, inputs.held_out_summary) if each)
    console.result(
        f"{counted(len(inputs.train), 'training sample')}, {len(inputs.held_out):,} held out"
        + (f"; {counted(dropped, 'row')} dropped" if dropped else "")
    )
    size = vocabulary_size(recipe.model.draft, inputs.known.config.vocab_size)
    vocabulary, share = choose_vocabulary(inputs.train, inputs.known.config.vocab_size, size, console)
    console.result(f"a draft vocabulary of {vocabulary.size} covers {share:.2%} of the supervised tokens")
    for index in range(min(options.preview, len(inputs.train))):
        sample = inputs.train[index]
        tell(f"--- sample {sample.id}: {len(sample.ids)} tokens, {int(sample.loss_mask.sum())} supervised")
        print(preview(sample, inputs.known.tokenizer, color=shows_colours(sys.stdout)))


if __name__ == "__main__":
    run_command(main)
