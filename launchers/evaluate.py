"""Judge an exported draft by real speculative decoding: acceptance length, speed, and whether the output stays the
same.

Decodes with transformers (the default, needs nothing else) or with a real SGLang server, on a recipe's held-out
conversations or on prompts from a file. With --by-context, reports acceptance by the length of the context before the
answer. Exit code 1 if the output differs from plain greedy decoding.
"""

import argparse
import math
import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from eagle3.command_line import RecipeParser, slow_imports
from eagle3.console import Console, is_first_rank, tell, waiting
from eagle3.draft.config import DraftConfig, draft_digest, read_draft_config
from eagle3.errors import UserError, run_command
from eagle3.planning.gpus import DEFAULT_GPU, GPUS, gpu_named
from eagle3.preflight.inputs import prompt_files, require_export, require_inputs, require_weights
from eagle3.preflight.result_file import require_result_place, write_result
from eagle3.recipe.loading import load_recipe
from eagle3.recipe.schema import MOST_KEYS, Recipe

ROOT = Path(__file__).parent.parent
PER_CONTEXT = 8


def main() -> int:
    options = parse()
    recipe = load_recipe(options.recipe, options.overrides)
    draft = options.draft or recipe.output.dir / "export"
    if options.check:
        return check_with_sglang(draft, options.quiet)
    out = options.out or draft.parent / ("by_context.json" if options.by_context else "evaluation.json")
    check(options, recipe, draft)
    require_inputs(recipe)
    require_weights(recipe.model.target)
    require_result_place(out)
    digest = draft_digest(draft)
    console = Console(is_first_rank(), options.quiet)
    console(f"recipe: {options.recipe}; draft: {draft}")
    warn_of_another_target(recipe, draft, console)
    if options.window is None:
        warn_of_another_window(recipe, draft, console)
    with waiting(console, "loading PyTorch and transformers"), slow_imports(options.quiet):
        from eagle3.draft.interchange import read_exported
        from eagle3.evaluation.acceptance import Sampling
        from eagle3.jobs.evaluate import decoding_of, judge, judge_contexts, judgement_record, texts_of
        from eagle3.jobs.job import find_target, gather_inputs
        from eagle3.parallel.topology import start_distributed, stop_distributed

    for doubt in read_exported(draft).doubts:
        console.warn(doubt)
    topology = start_distributed()
    inputs = gather_inputs(find_target(recipe, topology.device, console, make=False), console, judging=True)
    files, seed = prompt_files(options.prompts), seed_of(options, recipe)
    decoding = decoding_of(recipe, Sampling(options.temperature, seed), options.window)
    tree = tree_of(options, recipe) if options.engine == "sglang" else None
    if options.by_context:
        by_context = judge_contexts(inputs, draft, by_context_of(options), topology, console, files, decoding, tree)
        if topology.is_first:
            for line in by_context.lines():
                tell(line)
        kind, lossless, result = "by_context", by_context.lossless, by_context.as_dict()
    else:
        judgement = judge(inputs, None, draft, topology, console, files, decoding, tree)
        if topology.is_first:
            for line in judgement.table():
                tell(line)
        kind, lossless, result = "evaluation", judgement.trained.lossless, judgement.as_dict()
    # A run may have exported a new draft meanwhile, and the result beside it would be taken for the new draft's.
    if digest_now(draft) != digest:
        raise UserError(
            f"{draft}: exported again while it was being judged, so the result is for a draft that is gone; judge again"
        )
    write_result(out, judgement_record(kind, result, inputs.known, draft, texts_of(inputs, files)), console)
    stop_distributed()
    return 1 if lossless is False else 0


def parse() -> argparse.Namespace:
    parser = RecipeParser(__doc__, ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("--draft", type=Path, help="folder of the exported draft (default: output.dir/export)")
    parser.add_argument(
        "--engine", default="transformers", help="what decodes: transformers (default), or sglang, as in serving"
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
        "--temperature", type=float, default=0.0, help="of sampling, by lossless rejection; 0 (default) is greedy"
    )
    parser.add_argument("--seed", type=int, help="of sampling and of the intervals (default: training.seed)")
    add_context_options(parser)
    parser.add_argument(
        "--window",
        type=int,
        help="keys that the draft's queries see (default: as trained; any draft may be judged with one)",
    )
    parser.add_argument("--topk", type=int, default=1, help="branches of the draft tree; 1 (default) is a chain")
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
    used = {"check", "draft", "quiet", "recipe", "named", "words", "overrides"}
    others = [name for name, value in vars(options).items() if name not in used and value != parser.get_default(name)]
    if options.check and others:
        raise UserError(
            f"--{others[0].replace('_', '-')}: has no use with --check, which only loads the draft; leave it out"
        )
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
        help="these lengths in tokens, ascending (default: 512, 1024, ... as far as texts and target reach)",
    )
    parser.add_argument("--per-context", type=int, help=f"prompts of each length (default: {PER_CONTEXT})")
    parser.add_argument(
        "--windows", metavar="N,N,...", help="--by-context: judge with each of these windows (in keys), too"
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="--by-context: decode once more with the best number of draft tokens at each context",
    )
    parser.add_argument(
        "--gpu",
        help=f"--by-context: GPU to estimate the speed-up for, by its data sheet: {', '.join(GPUS)} "
        f"(default: {DEFAULT_GPU})",
    )


def check_with_sglang(draft: Path, quiet: bool) -> int:
    """Checks the draft with SGLang, which must be installed. Needs neither a GPU nor the target. Raises UserError if
    SGLang's class does not load the whole draft."""
    require_export(draft)
    from eagle3.draft.interchange import read_exported
    from eagle3.evaluation.export_check import check_export

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


def digest_now(draft: Path) -> str | None:
    """The draft's digest; None while it is being exported."""
    with suppress(FileNotFoundError):
        return draft_digest(draft)
    return None


def check(options: argparse.Namespace, recipe: Recipe, draft: Path) -> None:
    """Raises UserError for every mistake that can be found before anything is loaded."""
    if options.engine not in ("transformers", "sglang"):
        raise UserError(f"--engine {options.engine}: no such engine; use transformers or sglang")
    check_sampling(options, recipe)
    check_contexts(options)
    if not options.prompts and not options.by_context and not recipe.evaluation.conversations:
        raise UserError(
            "recipe: evaluation.conversations is 0, so there is nothing to judge; set it to 16, for example, name "
            "--prompts, or judge --by-context"
        )
    prompt_files(options.prompts)
    config = require_export(draft)
    check_window("--window", options.window, recipe, config, draft)
    for window in windows_of(options):
        check_window("--windows", window, recipe, config, draft)
        if window == (options.window or config.window):
            raise UserError(f"--windows {options.windows}: the draft is judged with {window} anyway; leave that out")
    if options.engine == "transformers" and (options.topk, options.tree_tokens) != (1, None):
        raise UserError(
            "--topk, --tree-tokens: transformers drafts a chain of evaluation.draft_tokens, not a tree; use --engine "
            "sglang, or leave them out"
        )
    if options.engine == "sglang":
        from eagle3.targets.sglang.installed import require_sglang

        require_sglang("judge by transformers: --engine transformers", recipe.target.allow_untested)
        tree_of(options, recipe)


def check_window(option: str, window: int | None, recipe: Recipe, config: DraftConfig, draft: Path) -> None:
    if window is not None and not 1 <= window <= MOST_KEYS:
        raise UserError(f"{option} {window}: not a number of keys, 1 or more; leave it out for the draft's own")
    origin = str(draft / "config.json")
    if window is not None:
        config, origin = replace(config, window=window), f"{option} {window}"
    config.check_chain(recipe.evaluation.draft_tokens, "evaluation.draft_tokens", origin)


def check_sampling(options: argparse.Namespace, recipe: Recipe) -> None:
    if not (math.isfinite(options.temperature) and options.temperature >= 0):
        raise UserError(
            f"--temperature {options.temperature}: use 0 for greedy decoding, or a number above it, for example 0.7"
        )
    seed = seed_of(options, recipe)
    if not 0 <= seed < 2**63:
        raise UserError(f"--seed {seed}: use a number from 0 to 2^63 - 1")
    if options.engine == "sglang" and options.temperature:
        raise UserError(
            f"--temperature {options.temperature:g}: SGLang is judged greedily only; leave it out, or use --engine "
            "transformers"
        )


def seed_of(options: argparse.Namespace, recipe: Recipe) -> int:
    return recipe.training.seed if options.seed is None else options.seed


def check_contexts(options: argparse.Namespace) -> None:
    if not options.by_context:
        for name, value in (
            ("--contexts", options.contexts),
            ("--per-context", options.per_context),
            ("--windows", options.windows),
            ("--gpu", options.gpu),
        ):
            if value is not None:
                raise UserError(f"{name} {value}: is for --by-context; give that too, or leave this out")
    if options.per_context is not None and options.per_context < 1:
        raise UserError(
            f"--per-context {options.per_context}: a length has 1 prompt or more; leave it out for {PER_CONTEXT}"
        )
    if options.best and not options.by_context:
        raise UserError("--best: is for --by-context; give that too, or leave this out")
    if options.best and options.engine == "sglang":
        raise UserError("--best: needs measured times, which SGLang does not tell; use --engine transformers")
    contexts_of(options)
    gpu_named(options.gpu or DEFAULT_GPU)


def contexts_of(options: argparse.Namespace) -> list[int] | None:
    """The context lengths that the user asked for; None for the defaults. Raises UserError if they are not a list of
    ascending lengths."""
    return None if options.contexts is None else ascending("--contexts", options.contexts, "lengths in tokens")


def windows_of(options: argparse.Namespace) -> list[int]:
    """The other windows to judge with. Raises UserError like `contexts_of`."""
    return [] if options.windows is None else ascending("--windows", options.windows, "numbers of keys")


def ascending(option: str, text: str, what: str) -> list[int]:
    fields = text.split(",")
    numbers = [int(field) for field in fields if re.fullmatch(r" *\d{1,9} *", field)]
    if len(numbers) != len(fields) or numbers[0] < 1 or numbers != sorted(set(numbers)):
        raise UserError(f"{option} {text}: name {what}, ascending, as in 512,1024,2048")
    return numbers


def by_context_of(options: argparse.Namespace):
    """What the user asked to judge by context, as a ByContext."""
    from eagle3.jobs.evaluate import ByContext

    per_context, gpu = options.per_context or PER_CONTEXT, options.gpu or DEFAULT_GPU
    return ByContext(contexts_of(options), per_context, windows_of(options), options.best, gpu)


def tree_of(options: argparse.Namespace, recipe: Recipe):
    """The DraftTree that the user asked for. Raises UserError if there is no such tree."""
    from eagle3.evaluation.sglang_judge import DraftTree

    return DraftTree.of(recipe.evaluation.draft_tokens, options.topk, options.tree_tokens)


if __name__ == "__main__":
    run_command(main)
