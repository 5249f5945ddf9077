"""Set up the diagnosis of a draft from a recipe: prompts, target, and the texts that the target writes."""

from pathlib import Path

from eagle3.console import Console, Progress
from eagle3.draft.interchange import read_exported
from eagle3.evaluation.diagnosis import Diagnosis, diagnose
from eagle3.evaluation.drafter import check_belongs
from eagle3.evaluation.teacher_forced import WrittenText, written_text
from eagle3.jobs.evaluate import prompts_to_judge, target_of
from eagle3.jobs.job import Inputs
from eagle3.parallel.topology import Topology
from eagle3.targets.transformers import TransformersTarget


def diagnose_draft(
    inputs: Inputs, folder: Path, topology: Topology, console: Console, prompts_file: Path | None = None
) -> Diagnosis:
    """Diagnose the draft in a folder on the recipe's held-out conversations, or on prompts from a file. Raises
    UserError for anything that the user can fix."""
    exported, evaluation = read_exported(folder), inputs.recipe.evaluation
    check_belongs(exported.config, folder, inputs.config.vocab_size, inputs.config.hidden_size)
    prompts = prompts_to_judge(inputs, prompts_file, evaluation.draft_tokens)
    target = target_of(inputs, folder, topology, console)
    layers = exported.config.aux_layers or target.aux_layers
    if layers != target.aux_layers:
        target = TransformersTarget(target.model, aux_layers=layers, prefill_tokens=target.prefill_tokens)
    texts: list[WrittenText] = []
    progress = Progress(console, "the target writes", len(prompts), "texts")
    for prompt in prompts:
        texts.append(written_text(target, prompt, evaluation.new_tokens))
        progress.at(len(texts))
    return diagnose(exported, target, texts, topology.modules_alone, evaluation.draft_tokens, console)
