"""Judge an exported draft by real speculative decoding: acceptance length, speed, and whether the output stays the
same.

Decodes with transformers (the default, needs nothing else) or with a real SGLang server, on a recipe's held-out
conversations or on prompts from a file. With --by-context, reports acceptance by the length of the context before the
answer. Exit code 1 if the output differs from plain greedy decoding.
"""

import argparse
import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from eagle3.command_line import RecipeParser, from_to, slow_imports
from eagle3.console import Console, is_first_rank, tell, waiting
from eagle3.draft.config import draft_digest, read_draft_config
from eagle3.errors import UserError, run_command
from eagle3.jobs.gate import require_chain
from eagle3.planning.gpus import DEFAULT_GPU, GPUS
from eagle3.preflight.inputs import prompt_files, require_export, require_inputs, require_result_place, write_result
from eagle3.recipe.loading import load_recipe
from eagle3.recipe.schema import MOST_KEYS, Recipe
from eagle3.targets.sglang.asking import require_sglang

MOST_SEED = 2**63
# Options that --check needs, and those that only --by-context uses.
WITH_CHECK = ("check", "draft", "quiet", "recipe", "named", "words", "overrides")
OF_CONTEXTS = ("contexts", "per_context", "windows", "best", "gpu")


def main() -> int:
    options = parse()
    recipe = load_recipe(options.recipe, options.overrides)
    draft = options.draft or recipe.output.dir / "export"
    if options.check:
        return check_with_sglang(draft, options.quiet)
    out = options.out or draft.parent / ("by_context.json" if options.by_context else "evaluation.json")
    files = prompt_files(options.prompts)
    check(options, recipe, draft)
    tree = tree_of(options, recipe) if options.engine == "sglang" else None
    require_inputs(recipe)
    require_result_place(out)
    digest = draft_digest(draft)
    console = Console(is_first_rank(), options.quiet)
    console(f"recipe: {options.recipe}; draft: {draft}")
    warn_of_another_target(recipe, draft, console)
    if options.window is None:
        warn_of_another_window(recipe, draft, console)
    with waiting(console, "loading PyTorch and transformers"), slow_imports(options.quiet):
        from eagle3.draft.interchange import read_exported
        from eagle3.jobs.evaluate import decoding_of, judge, judge_contexts, judgement_record, texts_of
        from eagle3.jobs.job import find_target, gather_inputs
        from eagle3.parallel.topology import start_distributed, stop_distributed

    for doubt in read_exported(draft).doubts:
        console.warn(doubt)
    topology = start_distributed()
    inputs = gather_inputs(find_target(recipe, topology.device, console, make=False), console, judging=True)
    seed = recipe.training.seed % MOST_SEED if options.seed is None else options.seed
    decoding = replace(decoding_of(recipe), temperature=options.temperature, seed=seed, window=options.window)
    if options.by_context:
        asked = {name: getattr(options, name) for name in OF_CONTEXTS}
        result = judge_contexts(inputs, draft, topology, console, files, decoding, tree, **asked)
        kind, lines = "by_context", result.lines()
    else:
        result = judge(inputs, None, draft, topology, console, files, decoding, tree)
        kind, lines = "evaluation", result.table()
    for line in lines if topology.is_first else ():
        tell(line)
    unchanged = False
    with suppress(FileNotFoundError):  # while it is being exported
        unchanged = draft_digest(draft) == digest
    if not unchanged:  # the result would be beside the new draft, and be taken for that one's
        raise UserError(
            f"{draft}: exported again while it was being judged, so the result is for a draft that is gone; judge again"
        )
    write_result(out, judgement_record(kind, result, inputs.known, draft, texts_of(inputs, files)), console)
    stop_distributed()
    return 1 if result.lossless is False else 0


def parse() -> argparse.Namespace:
    parser = RecipeParser(__doc__)
    parser.add_argument("--draft", type=Path, help="folder of the exported draft (default: output.dir/export)")
    parser.add_argument(
        "--engine",
        choices=("transformers", "sglang"),
        default="transformers",
        help="what decodes: transformers (default), or sglang, as in serving",
    )
    parser.add_argument(
        "--prompts",
        metavar="[NAME=]FILE",
        action="append",
        default=[],
        help="JSON, JSONL or parquet file of conversations, or .txt with one question per line (default: held-out "
        "conversations); give it several times to judge on several prompt sets, each of which gets its own figures",
    )
    parser.add_argument(
        "--temperature",
        type=from_to(0.0),
        default=0.0,
        help="of sampling, by lossless rejection; 0 (default) is greedy",
    )
    parser.add_argument(
        "--seed",
        type=from_to(0, MOST_SEED - 1),
        help="of sampling and of the intervals (default: training.seed)",
    )
    add_context_options(parser)
    parser.add_argument(
        "--window",
        type=from_to(1, MOST_KEYS),
        help="keys that the draft's queries see (default: as trained; any draft may be judged with one)",
    )
    parser.add_argument("--topk", type=from_to(1), default=1, help="branches of the draft tree; 1 (default) is a chain")
    parser.add_argument(
        "--tree-tokens", type=int, help="tokens of one verification, SGLang's speculative-num-draft-tokens"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="file for the result as JSON (default: evaluation.json or by_context.json beside --draft)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="only load the draft in SGLang's own class, which must take every tensor (train.py --check is for the "
        "recipe, before training)",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="print only the result: its figures, and where it was written"
    )
    options = parser.parse()
    for name, value in vars(options).items():
        given, option = value != parser.get_default(name), f"--{name.replace('_', '-')}"
        if given and options.check and name not in WITH_CHECK:
            raise UserError(f"{option}: has no use with --check, which only loads the draft; leave it out")
        if given and name in OF_CONTEXTS and not options.by_context:
            raise UserError(f"{option}: is for --by-context; give that too, or leave this out")
    return options


def add_context_options(parser: RecipeParser) -> None:
    parser.add_argument(
        "--by-context",
        action="store_true",
        help="report acceptance by context length, measured on prompts of up to that many tokens",
    )
    parser.add_argument(
        "--contexts",
        metavar="N,N,...",
        type=ascending,
        help="these lengths in tokens, ascending (default: 512, 1024, ... as far as texts and target reach)",
    )
    parser.add_argument(
        "--per-context", type=from_to(1), default=8, help="prompts of each length (default: %(default)s)"
    )
    parser.add_argument(
        "--windows",
        metavar="N,N,...",
        type=ascending,
        default=[],
        help="--by-context: judge with each of these windows (in keys), too",
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="--by-context: decode once more with the best number of draft tokens at each context",
    )
    parser.add_argument(
        "--gpu",
        type=str.lower,
        choices=GPUS,
        default=DEFAULT_GPU,
        help="--by-context: GPU to estimate the speed-up for, by its data sheet (default: %(default)s)",
    )


def ascending(text: str) -> list[int]:
    """The numbers in an option such as 512,1024,2048."""
    fields = text.split(",")
    numbers = [int(field) for field in fields if re.fullmatch(r" *\d{1,9} *", field)]
    if len(numbers) != len(fields) or numbers[0] < 1 or numbers != sorted(set(numbers)):
        raise argparse.ArgumentTypeError(f"{text:.40}: name numbers in ascending order, as in 512,1024,2048")
    return numbers


def check_with_sglang(draft: Path, quiet: bool) -> int:
    """Checks the draft with SGLang, which must be installed. Needs neither a GPU nor the target. Raises UserError if
    SGLang's class does not load the whole draft."""
    require_export(draft)
    from eagle3.draft.interchange import read_exported
    from eagle3.targets.sglang.draft_check import check_export

    read_exported(draft)
    with waiting(Console(speaks=True, quiet=quiet), "asking SGLang"):
        message = check_export(draft)
    tell(f"{draft}: {message}")
    return 0


def warn_of_another_window(recipe: Recipe, draft: Path, console: Console) -> None:
    """Warns if the recipe's window differs from the draft's own, which is the one that is judged."""
    window, own = recipe.model.draft.window, read_draft_config(draft / "config.json").window
    if window not in (None, own):
        trained = "full attention" if own is None else f"a window of {own}"
        console.warn(
            f"model.draft.window: {window}, but {draft} was trained with {trained} and is judged with that; --window "
            f"{window} judges it with the recipe's"
        )


def warn_of_another_target(recipe: Recipe, draft: Path, console: Console) -> None:
    """Warns if the run that exported the draft had a different target, according to the recipe beside the draft."""
    file = draft.parent / "recipe.yaml"
    if not file.is_file():
        return
    with suppress(UserError):  # the recipe is from a different version, so nothing is known
        trained, judged = load_recipe(file).model.target, recipe.model.target
        if trained != judged and not (os.path.isdir(judged) and os.path.realpath(trained) == os.path.realpath(judged)):
            console.warn(f"{draft}: was trained for the target {trained} ({file}), and is judged with {judged}")


def check(options: argparse.Namespace, recipe: Recipe, draft: Path) -> None:
    """Raises UserError for every mistake that can be found before anything is loaded."""
    if not options.prompts and not options.by_context and not recipe.evaluation.conversations:
        raise UserError(
            "recipe: evaluation.conversations is 0, so there is nothing to judge; set it to 16, for example, name "
            "--prompts, or judge --by-context"
        )
    config, origin = require_export(draft), str(draft / "config.json")
    if options.window is not None:
        config, origin = replace(config, window=options.window), f"--window {options.window}"
    require_chain(config, recipe.evaluation.draft_tokens, "evaluation.draft_tokens", origin)
    for window in options.windows:
        other = replace(config, window=window)
        require_chain(other, recipe.evaluation.draft_tokens, "evaluation.draft_tokens", f"--windows {window}")
    if config.window in options.windows:
        raise UserError(f"--windows: the draft is judged with {config.window} anyway; leave that out")
    if options.engine == "transformers":
        if (options.topk, options.tree_tokens) != (1, None):
            raise UserError(
                "--topk, --tree-tokens: transformers drafts a chain of evaluation.draft_tokens, not a tree; use "
                "--engine sglang, or leave them out"
            )
        return
    if options.temperature:
        raise UserError(
            f"--temperature {options.temperature:g}: SGLang is judged greedily only; leave it out, or use --engine "
            "transformers"
        )
    if options.best:
        raise UserError("--best: needs measured times, which SGLang does not tell; use --engine transformers")
    require_sglang("judge by transformers: --engine transformers", recipe.target.allow_untested)


def tree_of(options: argparse.Namespace, recipe: Recipe):
    """The DraftTree that the user asked for. Raises UserError if there is no such tree."""
    from eagle3.evaluation.sglang_judge import DraftTree

    return DraftTree.of(recipe.evaluation.draft_tokens, options.topk, options.tree_tokens)


if __name__ == "__main__":
    run_command(main)
