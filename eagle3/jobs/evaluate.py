"""Set up the judging of an exported draft from a recipe: prompts, target and engine."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from eagle3.console import Console, counted, waiting
from eagle3.draft.interchange import ExportedDraft, read_exported
from eagle3.errors import UserError, first_sentence
from eagle3.evaluation.acceptance import GREEDY, Decoding, Sampling
from eagle3.evaluation.by_context import ContextJudgement, DecodedContext
from eagle3.evaluation.drafter import Window, check_belongs
from eagle3.evaluation.judge import Judgement, judge_by_context, judge_export
from eagle3.evaluation.prompts import choose_prompts, longest_prompt, prompt_contexts, read_prompts, sample_contexts
from eagle3.evaluation.sglang_judge import DraftTree, Logits, ServedResult, judge_by_sglang
from eagle3.evaluation.speculative import SpeculativeResult
from eagle3.jobs.job import Inputs, KnownTarget, choices_of, start_target
from eagle3.jobs.supply import engine_options
from eagle3.parallel.topology import Topology
from eagle3.recipe.schema import Recipe
from eagle3.targets.sglang.draft_check import require_known
from eagle3.targets.sglang.version import require_captured
from eagle3.targets.transformers import TransformersTarget
from eagle3.text.vocabulary import DraftVocabulary

CPU_KV_TOKENS = 4096  # for a server on a CPU, on top of its needs: SGLang insists on more than one request's tokens


def decoding_of(recipe: Recipe, sampling: Sampling = GREEDY, window: int | None = None) -> Decoding:
    """Decoding settings from the recipe's evaluation section. window: number of keys, overrides the draft's own
    window."""
    return Decoding(recipe.evaluation.draft_tokens, recipe.evaluation.new_tokens, sampling, window)


def judge(
    inputs: Inputs,
    target: TransformersTarget | None,
    exported: Path,
    topology: Topology,
    console: Console,
    prompts_file: Path | None = None,
    decoding: Decoding | None = None,
) -> Judgement:
    """Judge an exported draft with transformers, by the recipe's evaluation section, and print the result.

    target: the target, if it is loaded already
    prompts_file: see read_prompts; None for held-out conversations
    decoding: None to decode greedily with the recipe's settings

    Raises UserError for anything that the user can fix, including too little memory.
    """
    decoding = decoding or decoding_of(inputs.recipe)
    prompts = prompts_to_judge(inputs, prompts_file, decoding.draft_tokens)
    try:
        target = target or target_of(inputs, read_exported(exported), topology, console)
        console(f"decoding {len(prompts)} {'prompts' if prompts_file else 'held-out conversations'} speculatively")
        judgement = judge_export(
            exported,
            target,
            prompts,
            topology.modules_alone,
            inputs.tokenizer,
            decoding,
            seed=inputs.recipe.training.seed,
            report=console,
        )
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"evaluation: out of memory on {topology.device} ({first_sentence(error)}); the draft in {exported} is "
            "complete: judge it with launchers/evaluate.py, which has the device to itself, with shorter --prompts if "
            "need be"
        ) from error
    for line in judgement.lines():
        console.result(line)
    return judgement


def judge_contexts(
    inputs: Inputs,
    exported: Path,
    topology: Topology,
    console: Console,
    *,
    contexts: Sequence[int] | None,
    per_context: int,
    prompts_file: Path | None = None,
    decoding: Decoding | None = None,
    tree: DraftTree | None = None,
) -> ContextJudgement:
    """Like `judge`, but by context length, and without printing the result. Contexts come from sample_contexts or, with
    a prompts_file, from prompt_contexts.

    tree: None to decode with transformers; otherwise SGLang decodes greedily, as in `judge_served`
    """
    decoding, most = decoding or decoding_of(inputs.recipe), inputs.config.max_position_embeddings
    if contexts is not None and contexts[-1] > most:
        raise UserError(f"--contexts: {contexts[-1]} is beyond the target's context of {most}; name smaller ones")
    room = (tree or DraftTree.of(decoding.draft_tokens, 1, None)).room  # for a chain the same by both engines
    longest = longest_prompt(most, decoding.new_tokens, room)
    if prompts_file is None:
        buckets = sample_contexts(inputs.held_out, contexts, per_context, longest)
    else:
        prompts = read_prompts(prompts_file, inputs.tokenizer, inputs.chat_template, longest, choices_of(inputs.recipe))
        buckets = prompt_contexts(prompts, contexts, per_context, longest)
    if tree is not None:
        prompts = [prompt for bucket in buckets for prompt in bucket.prompts]
        console(f"decoding {counted(len(prompts), 'prompt')} of {counted(len(buckets), 'context')} by SGLang")
        served, window = _serve(inputs, exported, tree, decoding, prompts, console)
        conversations = iter(served.conversations)
        decoded = [DecodedContext(context, [*islice(conversations, len(its))]) for context, its in buckets]
        shape = {"topk": tree.topk, "tree_tokens": tree.tokens}
        return ContextJudgement.over(decoded, "sglang", decoding, console, **shape, window=window)
    target = target_of(inputs, read_exported(exported), topology, console)
    return judge_by_context(exported, target, buckets, topology.modules_alone, decoding, console)


def target_and_texts(inputs: Inputs, prompts_file: Path | None) -> dict[str, str]:
    """The target and texts of a judgement, so that comparisons notice if these differ. Paths are reduced to their last
    part."""
    model, samples = inputs.recipe.model, inputs.held_out
    name = Path(model.target).name if Path(model.target).expanduser().is_dir() else model.target
    own = f"{len(samples):,} held-out samples of {int(samples.lengths.sum()):,} tokens"
    return {
        "target": f"{name} ({inputs.fingerprint[:8]})",
        "texts": own if prompts_file is None else prompts_file.name,
    }


def judge_served(
    inputs: Inputs,
    exported: Path,
    tree: DraftTree,
    decoding: Decoding,
    console: Console,
    prompts_file: Path | None = None,
) -> Judgement:
    """Like `judge`, but SGLang decodes, always greedily: a server with the draft, and one without it."""
    prompts = prompts_to_judge(inputs, prompts_file, tree.room)
    console(f"decoding {len(prompts)} {'prompts' if prompts_file else 'held-out conversations'} by SGLang")
    served, window = _serve(inputs, exported, tree, decoding, prompts, console)
    judgement = Judgement(
        SpeculativeResult.over(served.conversations),
        None,
        "sglang",
        version("sglang"),
        tree.topk,
        tree.tokens,
        window=window,
        same_load=served.same_load,
    )
    for line in judgement.lines():
        console.result(line)
    return judgement


def _serve(
    inputs: Inputs,
    exported: Path,
    tree: DraftTree,
    decoding: Decoding,
    prompts: Sequence[Tensor],
    console: Console,
) -> tuple[ServedResult, Window]:
    """Let SGLang decode the prompts (int64 [P]). Returns also the draft's windows. Raises UserError if SGLang does not
    serve such a draft or target, or a server does not start or answer."""
    config, draft = inputs.config, read_exported(exported).config
    check_belongs(draft, exported, config.vocab_size, config.hidden_size)
    require_known(draft, exported)
    require_captured(draft.aux_layers or inputs.aux_layers, config.num_hidden_layers, config.model_type)
    window, options = Window(decoding.window or draft.window, draft.window), engine_options(inputs)
    if options.kv_tokens is None and not torch.cuda.is_available():  # otherwise SGLang takes nearly all memory
        most = max(map(len, prompts)) + decoding.new_tokens + tree.room
        options = replace(options, kv_tokens=2 * most + CPU_KV_TOKENS)
    served = judge_by_sglang(
        exported,
        options,
        prompts,
        tree=tree,
        new_tokens=decoding.new_tokens,
        logits=Logits(getattr(torch, options.dtype), config.num_hidden_layers, config.vocab_size),
        window=window.window,
        report=console,
    )
    return served, window


def target_of(
    known: KnownTarget,
    exported: ExportedDraft,
    topology: Topology,
    console: Console,
    *,
    aux_layers: Sequence[int] | None = None,
    dtype: str | None = None,
) -> TransformersTarget:
    """Load the target to judge with. aux_layers, dtype: None for the recipe's."""
    vocabulary = DraftVocabulary(d2t=exported.d2t, t2d=exported.t2d)
    with waiting(console, f"loading {known.target}" + (f" in {dtype}" if dtype else "")):
        return start_target(known, topology.device, vocabulary, aux_layers=aux_layers, dtype=dtype)


def prompts_to_judge(inputs: Inputs, file: Path | None, room: int) -> list[Tensor]:
    """Prompts from held-out conversations or from a file. Raises UserError if there are none.

    room: number of tokens that a prompt must leave free in the target's context, on top of the answer's
    """
    if file is not None:
        return prompts_of(inputs, file, room)
    return choose_prompts(inputs.held_out, inputs.recipe.evaluation.conversations, _longest(inputs, room))


def prompts_of(known: KnownTarget, file: Path, room: int, *, other_form: bool = False) -> list[Tensor]:
    """Prompts from a file. room: as for prompts_to_judge. other_form: as for read_prompts, which raises the errors."""
    return read_prompts(
        file,
        known.tokenizer,
        known.chat_template,
        _longest(known, room),
        choices_of(known.recipe),
        other_form=other_form,
    )


def _longest(known: KnownTarget, room: int) -> int:
    return longest_prompt(known.config.max_position_embeddings, known.recipe.evaluation.new_tokens, room)
