"""Set up the judging of an exported draft from a recipe: prompts, target and engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3.console import Console, counted, waiting
from eagle3.draft.config import DraftConfig, draft_digest
from eagle3.draft.interchange import ExportedDraft, read_exported
from eagle3.durable import sealed
from eagle3.errors import UserError, first_sentence
from eagle3.evaluation.acceptance import Decoding
from eagle3.evaluation.context_results import BestRate, ContextJudgement
from eagle3.evaluation.drafter import check_belongs
from eagle3.evaluation.prompts import (
    choose_prompts,
    longest_prompt,
    prompts_by_context,
    read_prompts,
)
from eagle3.evaluation.results import Conditions, CountedConversation, Judgement, as_json, over_sets
from eagle3.evaluation.sglang_judge import DraftTree, judge_by_sglang
from eagle3.evaluation.speculative import judge_by_context, judge_export
from eagle3.jobs.job import Inputs, KnownTarget, choices_of, start_target
from eagle3.jobs.sglang_engine import engine_options
from eagle3.parallel.topology import Topology
from eagle3.planning.costs import MeasuredCosts, SheetCosts
from eagle3.planning.gpus import DEFAULT_GPU, GPUS
from eagle3.planning.payoff import ESTIMATED, PayOff, surface
from eagle3.recipe.schema import Recipe
from eagle3.targets.facts import read_facts, require_no_state
from eagle3.targets.sglang.draft_check import require_known
from eagle3.targets.sglang.version import require_captured, why_not_served
from eagle3.targets.transformers import TransformersTarget
from eagle3.text.vocabulary import DraftVocabulary

BATCHES = (1, 4, 16, 64)  # conversations at a time, for which an estimate is made
CPU_KV_TOKENS = 4096  # for a server on a CPU, on top of its needs: SGLang insists on more than one request's tokens


def decoding_of(recipe: Recipe) -> Decoding:
    """Greedy decoding by the recipe's evaluation section, with the draft's own window."""
    return Decoding(recipe.evaluation.draft_tokens, recipe.evaluation.new_tokens)


def judge(
    inputs: Inputs,
    target: TransformersTarget | None,
    exported: Path,
    topology: Topology,
    console: Console,
    files: Mapping[str, Path] | None = None,
    decoding: Decoding | None = None,
    tree: DraftTree | None = None,
) -> Judgement:
    """Judge an exported draft by the recipe's evaluation section, and print the result.

    target: the target, if it is loaded already
    files: the file of each prompt set, by name (see read_prompts); None for held-out conversations
    decoding: None to decode greedily with the recipe's settings
    tree: None to decode with transformers; otherwise SGLang decodes, always greedily: a server with the draft, and one
        without it

    Raises UserError for anything that the user can fix, including too little memory.
    """
    decoding = decoding or decoding_of(inputs.known.recipe)
    prompts, sets = prompts_to_judge(inputs, files, tree.room if tree else decoding.draft_tokens)
    conversations = counted(len(prompts), "prompt" if files else "held-out conversation")
    if tree is not None:
        console(f"decoding {conversations} by SGLang")
        decoded, same_load, conditions = _serve(inputs.known, exported, tree, decoding, prompts, console)
        judgement = Judgement.over(
            decoded,
            conditions.seed,
            **vars(conditions),
            same_load=same_load,
            sets=over_sets(sets, decoded, conditions.seed, console),
        )
    else:
        try:
            target = target or target_of(inputs.known, read_exported(exported), topology, console)
            console(f"decoding {conversations} speculatively")
            judgement = judge_export(
                exported,
                target,
                prompts,
                topology.modules_alone,
                inputs.known.tokenizer,
                decoding,
                seed=inputs.known.recipe.training.seed,
                report=console,
                sets=sets,
            )
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"evaluation: out of memory on {topology.device} ({first_sentence(error)}); the draft in {exported} is "
                "complete: judge it with launchers/evaluate.py, which has the device to itself, with shorter --prompts "
                "if need be"
            ) from error
    for line in judgement.lines():
        console.result(line)
    return judgement


def judge_contexts(
    inputs: Inputs,
    exported: Path,
    topology: Topology,
    console: Console,
    files: Mapping[str, Path] | None = None,
    decoding: Decoding | None = None,
    tree: DraftTree | None = None,
    *,
    contexts: Sequence[int] | None,
    per_context: int,
    windows: Sequence[int] = (),
    best: bool = False,
    gpu: str = DEFAULT_GPU,
) -> ContextJudgement:
    """Like `judge`, but by context length, and without printing the result. A held-out sample is cut where an answer
    continues, and the prompts of all sets are taken as they are (see prompts_by_context).

    tree: None to decode with transformers; otherwise SGLang decodes greedily, as in `judge`, and `best` is False
    contexts: lengths in tokens, ascending; None for 512, 1024, ... as far as texts reach
    per_context: the most prompts of each length
    windows: numbers of keys, to judge the draft with as well
    best: whether to decode once more, with the best number of draft tokens at each context
    gpu: a name in planning/gpus.py, for the estimate of what the draft is worth
    """
    decoding, most = decoding or decoding_of(inputs.known.recipe), inputs.known.config.max_position_embeddings
    if contexts is not None and contexts[-1] > most:
        raise UserError(f"--contexts: {contexts[-1]} is beyond the target's context of {most}; name smaller ones")
    room = (tree or DraftTree.of(decoding.draft_tokens, 1, None)).room  # for a chain the same by both engines
    longest = longest_prompt(most, decoding.new_tokens, room)
    if files:
        prompts, _ = prompts_to_judge(inputs, files, room)
        texts = [(prompt, np.array([len(prompt)])) for prompt in prompts]
    else:
        texts = [(sample.ids, np.flatnonzero(sample.loss_mask)) for sample in inputs.held_out]
    buckets = prompts_by_context(texts, contexts, per_context, longest, console)
    draft = read_exported(exported)
    target = target_of(inputs.known, draft, topology, console) if tree is None else None

    def judge_with(decoding: Decoding, buckets: Mapping[int, Sequence[Tensor]]) -> ContextJudgement:
        if target is not None:
            return judge_by_context(exported, target, buckets, topology.modules_alone, decoding, console)
        prompts = [*chain(*buckets.values())]
        console(f"decoding {counted(len(prompts), 'prompt')} of {counted(len(buckets), 'context')} by SGLang")
        served, _, conditions = _serve(inputs.known, exported, tree, decoding, prompts, console)
        conversations = iter(served)
        decoded = {context: [*islice(conversations, len(its))] for context, its in buckets.items()}
        return ContextJudgement.over(decoded, conditions, decoding.new_tokens, console)

    judgements = []
    for window in (decoding.window, *windows):
        windowed = replace(decoding, window=window)
        judgement = with_pay_offs(judge_with(windowed, buckets), inputs.known, draft.config, gpu, console)
        if best:
            judgement = replace(judgement, best=best_rates(judgement, windowed, buckets, judge_with))
        judgements.append(judgement)
    first, *others = judgements
    return replace(first, other_windows=others)


def best_rates(
    judgement: ContextJudgement,
    decoding: Decoding,
    buckets: Mapping[int, Sequence[Tensor]],
    judge_with: Callable[[Decoding, Mapping[int, Sequence[Tensor]]], ContextJudgement],
) -> list[BestRate]:
    """Decode each context's prompts with the number of draft tokens that the measured costs promise most of. decoding:
    of the judgement"""
    judged = {each.context: each for each in judgement.contexts if each.timing}
    best = judgement.pay_off[0].best if judged else []
    choices = {cell.context: cell.drafts if cell.speed_up > 1 else 0 for cell in best if cell.context in judged}
    plain = {context: 1 / each.timing.plain for context, each in judged.items()}
    # rates by number of draft tokens, then by context; 0: without a draft
    unchanged = {0: plain, decoding.draft_tokens: {context: each.rate for context, each in judged.items()}}
    rates = {context: unchanged[drafts][context] for context, drafts in choices.items() if drafts in unchanged}
    for drafts in {*choices.values()} - unchanged.keys():
        chosen = {context: prompts for context, prompts in buckets.items() if choices.get(context) == drafts}
        again = judge_with(replace(decoding, draft_tokens=drafts), chosen)
        rates |= {each.context: each.rate for each in again.contexts if each.timing}
    return [
        BestRate(context, choices[context], rates[context], judged[context].rate, plain[context])
        for context in sorted(rates)
    ]


def with_pay_offs(
    judgement: ContextJudgement, known: KnownTarget, draft: DraftConfig, gpu: str, console: Console
) -> ContextJudgement:
    """The judgement, and what it makes the draft worth: by the times that were measured, if any were, and by a data
    sheet, if target and draft are served on such GPUs. A judgement of trees stays as it is, because what other trees
    accept does not follow."""
    if judgement.topk > 1:
        return judgement
    pay_offs, window = [], judgement.window
    other = judgement.other_window and f", {judgement.other_window}"
    timings = [each.timing for each in judgement.contexts if each.timing]
    if timings:
        clock = "seconds" if torch.cuda.is_available() else "processor seconds"
        measured = surface(MeasuredCosts(timings, window), judgement.shares, (1,))
        pay_offs.append(PayOff(f"measured here in {clock}{other}", measured))
    try:
        estimate = estimated_pay_off(judgement.shares, known, replace(draft, window=window), gpu)
        pay_offs.append(replace(estimate, source=estimate.source + other))
    except UserError as error:  # what was judged must not be lost
        console.warn(f"no speed-up is estimated for {gpu}: {error}")
    return replace(judgement, pay_off=pay_offs, refusal=why_not_served(draft))


def estimated_pay_off(
    shares: Mapping[int, Sequence[float]], known: KnownTarget, draft: DraftConfig, gpu: str
) -> PayOff:
    """What a draft is worth on the fewest such GPUs that hold the target's weights. shares: as for `surface`. Raises
    UserError for a target whose config does not say its size."""
    sheet, model = GPUS[gpu], known.recipe.model
    facts = read_facts(known.target, model.revision, model.trust_model_code)
    gpus = facts.engine_gpus(sheet.memory * sheet.for_weights)
    costs = SheetCosts(facts, draft, sheet, gpus)
    cells = surface(costs, shares, BATCHES, costs.fits)
    if not cells:
        raise UserError(f"--gpu {gpu}: {gpus} of them hold no conversation of these contexts beside the weights")
    return PayOff(f"{ESTIMATED} for {gpus} x {gpu.upper()} by data sheet, not measured", cells)


def judgement_record(
    kind: str, result: Any, known: KnownTarget, exported: Path, texts: str, draft: str | None = None
) -> dict[str, Any]:
    """The sealed content of a result file, which says what was judged, so that nobody takes it for another draft's. The
    target's path is reduced to its last part. kind: evaluation, by_context or diagnosis. result: as for as_json. draft:
    the hub id, if it has one."""
    target = known.recipe.model.target
    name = Path(target).name if Path(target).expanduser().is_dir() else target
    judged = {
        "draft": draft or str(exported),
        "draft_digest": draft_digest(exported),
        "target": f"{name} ({known.fingerprint[:8]})",
        "target_digest": known.fingerprint,
        "texts": texts,
    }
    return sealed(as_json(result) | judged, kind)


def texts_of(inputs: Inputs, files: Mapping[str, Path]) -> str:
    """The texts of a judgement in words: the prompt sets' files, without their paths, or the held-out samples."""
    own = f"{len(inputs.held_out):,} held-out samples of {int(inputs.held_out.lengths.sum()):,} tokens"
    return ", ".join(file.name for file in files.values()) or own


def _serve(
    known: KnownTarget,
    exported: Path,
    tree: DraftTree,
    decoding: Decoding,
    prompts: Sequence[Tensor],
    console: Console,
) -> tuple[list[CountedConversation], bool, Conditions]:
    """Let SGLang decode the prompts (int64 [P]). Returns what judge_by_sglang returns, and the conditions. Raises
    UserError if SGLang does not serve such a draft or target, or a server does not start or answer."""
    config, draft = known.config, read_exported(exported).config
    check_belongs(draft, exported, config.vocab_size, config.hidden_size)
    require_known(draft, exported)
    require_captured(draft.aux_layers or known.aux_layers, config.num_hidden_layers, config.model_type)
    conditions = Conditions.of("sglang", decoding, draft.window, tree.topk, tree.tokens)
    options = engine_options(known)
    if options.kv_tokens is None and not torch.cuda.is_available():  # otherwise SGLang takes nearly all memory
        most = max(map(len, prompts)) + decoding.new_tokens + tree.room
        options = replace(options, kv_tokens=2 * most + CPU_KV_TOKENS)
    conversations, same_load = judge_by_sglang(
        exported,
        options,
        prompts,
        tree=tree,
        new_tokens=decoding.new_tokens,
        config=config,
        window=conditions.window,
        report=console,
    )
    return conversations, same_load, conditions


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
    require_no_state(known.target, known.config)
    vocabulary = DraftVocabulary(d2t=exported.d2t, t2d=exported.t2d)
    with waiting(console, f"loading {known.target}" + (f" in {dtype}" if dtype else "")):
        return start_target(known, topology.device, vocabulary, aux_layers=aux_layers, dtype=dtype)


def prompts_to_judge(
    inputs: Inputs, files: Mapping[str, Path] | None, room: int
) -> tuple[list[Tensor], dict[str, int]]:
    """The prompts of all prompt sets, one set after the other, and the number of prompts of each set, by its name.
    Without files, held-out conversations, which are no set. Raises UserError if there are none.

    room: number of tokens that a prompt must leave free in the target's context, on top of the answer's
    """
    if not files:
        return held_out_prompts(inputs, room), {}
    sets = {name: prompts_of(inputs.known, file, room) for name, file in files.items()}
    return [*chain(*sets.values())], {name: len(prompts) for name, prompts in sets.items()}


def held_out_prompts(inputs: Inputs, room: int) -> list[Tensor]:
    """Prompts from held-out conversations. Raises UserError if there are none. room: as for prompts_to_judge."""
    return choose_prompts(inputs.held_out, inputs.known.recipe.evaluation.conversations, _longest(inputs.known, room))


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
