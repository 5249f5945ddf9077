"""One training run from its recipe: gather, train, export, judge."""

from pathlib import Path

import torch.distributed as dist

from eagle3.attention.cuda import take_installed_flash
from eagle3.data.vocabulary import save_vocabulary
from eagle3.evaluation.export_check import NotChecked, NotInstalled, check_export
from eagle3.evaluation.judge import choose_prompts
from eagle3.parallel.topology import Topology, agreed
from eagle3.recipe import Recipe
from eagle3.training.assemble import build_draft, config_of, draft_config, gather_materials, pick_vocabulary
from eagle3.training.engine import deepspeed_config
from eagle3.training.judging import judge
from eagle3.training.run_folder import RunFolder
from eagle3.training.supply import hidden_state_supply
from eagle3.training.tracking import Console
from eagle3.training.trainer import prepare_trainer


def train(recipe: Recipe, deepspeed_file: Path, topology: Topology, resume: bool = False) -> bool:
    """Run the whole recipe; every rank calls it. Returns False where speculative decoding was not lossless.

    Everything lands in `recipe.output.dir` (see RunFolder). Raises UserError for what the user can mend.
    """
    console, folder = Console(topology.is_first), RunFolder(recipe.output.dir)
    engine_config = deepspeed_config(deepspeed_file, recipe.training, topology.data.size())
    agreed((lambda: folder.check(recipe, resume)) if topology.is_first else None)
    materials = gather_materials(recipe, topology.device, console)
    # What can be refused is refused now, not when a target has been loaded or hours have gone by.
    wanted, config = recipe.evaluation, config_of(recipe, materials)
    if wanted.conversations:
        longest = config.max_position_embeddings - wanted.new_tokens - wanted.draft_tokens
        choose_prompts(materials.held_out, wanted.conversations, longest)
    vocabulary = pick_vocabulary(recipe, materials, config.vocab_size, console)
    sizes = recipe.parallelism
    draft_config(recipe, materials, vocabulary).check_parallel(sizes.tensor, sizes.ulysses)
    with hidden_state_supply(recipe, materials, vocabulary, topology, console) as supply:
        draft = build_draft(recipe, materials, vocabulary, supply.head, topology)
        trainer = prepare_trainer(
            recipe,
            engine_config,
            topology,
            folder,
            console,
            train=materials.train,
            held_out=materials.held_out,
            source=supply.source,
            held_out_source=supply.held_out,
            head=supply.head,
            draft=draft,
            vocabulary=vocabulary,
        )
        if topology.is_first:
            folder.begin(recipe, resume, console)
            save_vocabulary(vocabulary, folder.vocabulary)
        dist.barrier()
        if topology.device.type == "cuda":
            console(f"attention: {take_installed_flash(topology.device)} kernels")
        trainer.run(resume)
        exported = trainer.export()
    console(f"exported draft: {exported}")
    if topology.is_first and recipe.output.check_export:
        _check(exported, console)
    if not recipe.evaluation.conversations or not topology.is_first:
        return True
    judgement = judge(recipe, materials, supply.target, exported, topology, console)
    folder.write_evaluation(judgement.as_dict())
    return judgement.trained.lossless


def _check(exported: Path, console: Console) -> None:
    """Raises UserError where SGLang would not serve the export right; the files stay."""
    try:
        console(f"export check: {check_export(exported)}")
    except NotInstalled:
        console("export check: not made, for SGLang is not installed here (launchers/export.py --check makes it)")
    except NotChecked as reason:
        console.warn(str(reason))
