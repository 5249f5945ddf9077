"""Set up the diagnosis of a draft: prompts, target, the texts that the target writes, and these in other forms."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from eagle3.console import Console, Progress
from eagle3.draft.config import DraftConfig
from eagle3.draft.derivation import check_aux_layers, default_aux_layers
from eagle3.draft.interchange import ExportedDraft, read_exported
from eagle3.draft.rope_parameters import rope_parameters
from eagle3.errors import UserError, first_sentence
from eagle3.evaluation.acceptance import Decoding
from eagle3.evaluation.context_results import ContextJudgement
from eagle3.evaluation.diagnosis import Diagnosis, diagnose, measuring
from eagle3.evaluation.drafter import check_belongs, draft_of
from eagle3.evaluation.known_faults import Change, DraftReading, Surroundings, layers_to_keep
from eagle3.evaluation.results import Conditions, SpeculativeResult
from eagle3.evaluation.speculative import DecodedConversation, decode_conversations, plain_decoding
from eagle3.evaluation.teacher_forced import WrittenText, read_text
from eagle3.jobs.evaluate import decoding_of, prompts_of, target_of, with_pay_offs
from eagle3.jobs.job import KnownTarget
from eagle3.objective.chains import contexts_up_to
from eagle3.parallel.topology import Topology
from eagle3.targets.transformers import TransformersTarget

# The precision to try beside the one that the target is in.
OTHER_DTYPE = {torch.float32: "bfloat16", torch.bfloat16: "float32", torch.float16: "float32"}
FEW = 8  # prompts
EASIER = 0.2  # texts in another form may differ by so much in acceptance, whatever the draft was trained on
SPACES = {ord("\u0120"): " ", ord("\u2581"): " ", ord("\u010a"): "\n"}  # how tokenizers write blanks in tokens


@dataclass(frozen=True, kw_only=True)
class DiagnosedDraft(Diagnosis):
    """A diagnosis, and how the draft does in decoding."""

    decoded: SpeculativeResult
    by_context: ContextJudgement

    def lines(self) -> list[str]:
        decoded = self.decoded
        averages = (
            f"{decoded.acceptance_length:.2f} tokens a verification, {decoded.mean_acceptance_length:.2f} as the mean "
            "over conversations"
        )
        compared = "" if decoded.lossless else f"; {decoded.mismatches} texts DIFFER from plain decoding"
        return [f"by decoding: {averages}{compared}", *super().lines(), *self.by_context.lines()]


def in_other_form(known: KnownTarget, file: Path) -> list[Tensor]:
    """The prompts of a file in the other form (see read_prompts); empty if they have none: there is no chat template,
    or a prompt becomes too long, or empty."""
    try:
        return prompts_of(known, file, known.recipe.evaluation.draft_tokens, other_form=True)
    except UserError:
        return []


def diagnose_draft(
    known: KnownTarget,
    folder: Path,
    prompts: Sequence[Tensor],
    others: Sequence[Tensor],
    topology: Topology,
    console: Console,
    gpu: str,
) -> DiagnosedDraft:
    """Diagnose the draft in a folder. Raises UserError for anything that the user can fix.

    prompts, others: int64 [P] each; the others are the same in the other form
    gpu: as for judge_contexts
    """
    exported, config = read_exported(folder), known.config
    if len(prompts) < 2:
        raise UserError(
            "prompts: there is one, which shows no interval; give 16, with --prompts or by holding more samples out"
        )
    if len(prompts) < FEW:
        console.warn(f"prompts: {len(prompts)} make wide intervals, in which faults can hide; give 16")
    check_belongs(exported.config, folder, config.vocab_size, config.hidden_size)
    count = config.num_hidden_layers
    layers = check_aux_layers(exported.config.aux_layers or default_aux_layers(count, config.model_type), count)
    if exported.config.aux_layers is None:
        console.warn(f"{folder}: its config.json names no auxiliary layers; EAGLE3's own are taken, {list(layers)}")
    exported = replace(exported, config=replace(exported.config, aux_layers=layers))
    target = target_of(known, exported, topology, console, aux_layers=layers)
    decoded, texts = _write(target, exported, prompts, decoding_of(known.recipe), topology, console)
    by_context = _by_context(known, exported.config, prompts, decoded, gpu, console)
    read = []
    if others:
        read.append(
            Change(
                "the prompts in their other form",
                "the draft was trained on prompts with the chat template where these have none, or without where these "
                "have one: give it what it was trained on (data.chat_template, messages in place of text)",
                {"texts": _read(target, others, _answers(target, others, known.recipe.evaluation.new_tokens, console))},
                EASIER,
            )
        )
    head = target.head
    del target  # before it is loaded again
    read += _in_another_precision(known, exported, head.embedding.dtype, texts, topology, console)
    diagnosis = diagnose(
        DraftReading(exported, texts),
        Surroundings(head.embedding.cpu(), _rope_of(known, exported.config), read),
        lambda token: str(known.tokenizer.convert_ids_to_tokens(token)).translate(SPACES),
        measuring(head, topology.modules_alone, known.recipe.evaluation.draft_tokens),
        known.recipe.evaluation.draft_tokens,
        console,
    )
    own = vars(diagnosis) | {"notes": [*exported.doubts, *diagnosis.notes]}
    return DiagnosedDraft(**own, decoded=SpeculativeResult.over(decoded), by_context=by_context)


def _write(
    target: TransformersTarget,
    exported: ExportedDraft,
    prompts: Sequence[Tensor],
    decoding: Decoding,
    topology: Topology,
    console: Console,
) -> tuple[list[DecodedConversation], list[WrittenText]]:
    """Let target and draft answer the prompts. Returns how that went, and the texts."""
    draft = draft_of(exported, target.head, topology.modules_alone)
    decoded = decode_conversations(target, *draft, prompts, decoding, report=console)
    return decoded, _read(target, prompts, [each.output.tokens for each in decoded])


def _by_context(
    known: KnownTarget,
    draft: DraftConfig,
    prompts: Sequence[Tensor],
    decoded: Sequence[DecodedConversation],
    gpu: str,
    console: Console,
) -> ContextJudgement:
    """How the draft does by the length of its prompts, and what it is worth there. The last context is that of the
    longest prompt, which may be far below the next one."""
    longest = max(map(len, prompts))
    contexts = [*contexts_up_to(longest)[:-1], longest]
    groups: dict[int, list[DecodedConversation]] = {context: [] for context in contexts}
    for prompt, conversation in zip(prompts, decoded, strict=True):
        groups[contexts[bisect_left(contexts, len(prompt))]].append(conversation)
    decoding = decoding_of(known.recipe)
    judgement = ContextJudgement.over(
        {context: group for context, group in groups.items() if group},
        Conditions.of("transformers", decoding, draft.window),
        decoding.new_tokens,
        console,
    )
    return with_pay_offs(judgement, known, draft, gpu, console)


def _answers(
    target: TransformersTarget, prompts: Sequence[Tensor], new_tokens: int, console: Console
) -> list[list[int]]:
    progress, answers = Progress(console, "answering the prompts in their other form", len(prompts), "prompts"), []
    for prompt in prompts:
        answers.append(plain_decoding(target, prompt, new_tokens=new_tokens).tokens)
        progress.at(len(answers))
    return answers


def _read(target: TransformersTarget, prompts: Sequence[Tensor], answers: Sequence[list[int]]) -> list[WrittenText]:
    """Let the target read its answers after their prompts."""
    keep = layers_to_keep(target.aux_layers, len(target.layers))
    return [
        read_text(target, torch.cat((prompt, torch.tensor(answer))), len(prompt), keep)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def _in_another_precision(
    known: KnownTarget,
    exported: ExportedDraft,
    dtype: torch.dtype,
    texts: Sequence[WrittenText],
    topology: Topology,
    console: Console,
) -> list[Change]:
    """The same texts, read by the target in another precision; none if it cannot be loaded so."""
    other = OTHER_DTYPE.get(dtype)
    if other is None:
        return []
    try:
        target = target_of(known, exported, topology, console, aux_layers=exported.config.aux_layers, dtype=other)
        prompts, answers = zip(*(text.ids.tensor_split([text.prompt]) for text in texts), strict=True)
        read = _read(target, prompts, [answer.tolist() for answer in answers])
    except (UserError, torch.OutOfMemoryError) as error:
        console(f"the target in {other} was not tried ({first_sentence(error)})")
        return []
    return [
        Change(
            f"the target in {other}",
            f"set model.target_dtype={other}, and serve the target in that precision",
            {"texts": read},
        )
    ]


def _rope_of(known: KnownTarget, draft: DraftConfig) -> dict[str, Any]:
    """The target's rope parameters; empty if the draft cannot have them."""
    rope = rope_parameters(known.config.to_dict())
    try:
        replace(draft, rope_parameters=rope)
    except UserError:
        return {}
    return rope
