"""One training run from its recipe: gather, train, export, judge."""

import datetime
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist

from eagle3.attention.cuda import take_installed_flash
from eagle3.console import Console, waiting
from eagle3.data.vocabulary import save_vocabulary
from eagle3.durable import writing
from eagle3.evaluation.export_check import NotChecked, NotInstalled, check_export
from eagle3.evaluation.judge import choose_prompts, longest_prompt
from eagle3.parallel.topology import Topology, agreed, node_name
from eagle3.parallel.watchdog import Watchdog
from eagle3.preflight.inputs import require_trainable
from eagle3.preflight.places import checkpoint_bytes
from eagle3.preflight.start import require_room, require_sound_start
from eagle3.recipe import Recipe, dump_recipe
from eagle3.target.transformers import TransformersTarget
from eagle3.training.description import describe_run
from eagle3.training.engine import deepspeed_config
from eagle3.training.job import (
    Job,
    build_draft,
    choose_draft,
    gather_inputs,
    input_digests,
    require_fitting_store,
)
from eagle3.training.judging import judge
from eagle3.training.run_folder import Resume, RunFolder
from eagle3.training.stopping import RunStopped, StopSignals
from eagle3.training.supply import hidden_state_supply
from eagle3.training.tracking import memory_gib, require_account
from eagle3.training.trainer import prepare_trainer
from eagle3.training.watched import watched

Finish = Callable[[Path, Console], None]
PATIENCE = datetime.timedelta(minutes=30)  # of collectives, as torch's own


def train(
    recipe: Recipe,
    deepspeed_file: Path,
    topology: Topology,
    resume: Resume = Resume.NO,
    stop: StopSignals | None = None,
    console: Console | None = None,
    finish: Finish = lambda folder, console: None,
) -> bool:
    """Run the whole recipe; every rank calls it. Returns False where speculative decoding was not lossless.

    finish: called with the run's folder, on the first rank, when the draft is exported, and judged or refused by its judge.
    Everything lands in `recipe.output.dir` (see RunFolder), which no other run enters meanwhile. Raises UserError for what
    the user can fix, RunStopped where one of the signals that `stop` notes ends the run before its end; where a rank dies
    or hangs, the watchdog says so and ends the process.
    """
    console = console or Console(topology.is_first)
    folder, stop = RunFolder(recipe.output.dir), stop or StopSignals()
    with (
        closing(folder),
        watched(
            topology,
            console,
            hang_minutes=recipe.training.hang_minutes,
            patience=PATIENCE,
            advice="continue with --resume auto",
            less_memory="launchers/plan.py says what fits: more sequence ranks, memory.recompute, memory.block_mib, a "
            "shorter data.max_length",
        ) as watchdog,
    ):
        try:
            return _train(recipe, folder, deepspeed_file, topology, resume, console, watchdog, stop, finish)
        except RunStopped as stopped:
            if not stopped.together:
                raise
            ended = stopped
    raise ended  # after the watchdog saw this rank leave as it should


def _train(
    recipe: Recipe,
    folder: RunFolder,
    deepspeed_file: Path,
    topology: Topology,
    resume: Resume,
    console: Console,
    watchdog: Watchdog,
    stop: StopSignals,
    finish: Finish,
) -> bool:
    require_trainable(recipe)
    engine_config = deepspeed_config(deepspeed_file, recipe.training, topology.data.size())
    found = [agreed((lambda: _enter(folder, recipe, resume, console)) if topology.is_first else None)]
    dist.broadcast_object_list(found)
    continues, identity = found[0]
    packages = ("sglang",) if recipe.target.backend == "sglang" else ()
    require_sound_start(dump_recipe(recipe), deepspeed_file.read_text(encoding="utf-8"), folder.path, packages)
    if recipe.hidden_states.mode == "stored":
        agreed((lambda: require_fitting_store(recipe)) if topology.is_first else None)
    inputs = gather_inputs(recipe, topology.device, console)
    # What can be refused is refused now, not when a target has been loaded or hours have gone by.
    wanted = recipe.evaluation
    if wanted.conversations:
        longest = longest_prompt(inputs.config.max_position_embeddings, wanted.new_tokens, wanted.draft_tokens)
        choose_prompts(inputs.held_out, wanted.conversations, longest)
    digests = input_digests(inputs)
    if continues:
        agreed((lambda: folder.require_same_inputs(digests, console.warn)) if topology.is_first else None)
    job = choose_draft(inputs, console)
    sizes, shape = recipe.parallelism, job.shape
    shape.check_parallel(sizes.tensor, sizes.ulysses)
    shape.check_context(int(job.train.lengths.max()))
    if shape.aux_layers and shape.aux_layers[-1] == job.config.num_hidden_layers - 1 > 2:
        console.warn(
            f"model.aux_layers: {list(shape.aux_layers)} has the output of the target's last layer, which SGLang does not capture, so "
            "it will not serve this draft; name lower layers to serve it there"
        )
    itemsize = getattr(torch, recipe.training.dtype).itemsize
    require_room(folder.path, checkpoint_bytes(shape, sizes.tensor, itemsize))
    with hidden_state_supply(job, topology, console) as supply:
        memory_before = memory_gib(topology.device)
        draft = build_draft(job, supply.head, topology)
        trainer = prepare_trainer(
            job,
            engine_config,
            topology,
            folder,
            console,
            watchdog,
            resume=continues,
            identity=identity,
            supply=supply,
            draft=draft,
        )

        def begin() -> None:
            folder.begin(recipe, continues, identity, digests, console)
            with writing(folder.vocabulary, "free space, or set output.dir to another place"):
                save_vocabulary(job.vocabulary, folder.vocabulary)
            try:
                described = describe_run(
                    job,
                    deepspeed_file,
                    device=topology.device,
                    steps=trainer.steps,
                    continues=continues,
                    memory_before=memory_before,
                )
                folder.write_run(described)
            except Exception as error:  # of use to the report alone: no reason for a run not to start
                console.warn(f"{folder.run}: not written, so the report will lack it ({error!r})")

        agreed(begin if topology.is_first else None)
        if topology.device.type == "cuda":
            console(f"attention: {take_installed_flash(topology.device)} kernels")
        with watchdog.watching():
            trainer.run(continues, stop)
        exported = trainer.export()
    console.result(f"exported draft: {exported}")

    def judged() -> bool:
        try:
            return _judge(job, supply.target, folder, topology, console)
        finally:
            finish(folder.path, console)
            watchdog.first_is_done()

    # The others wait, for a Slurm job ends soon after the first of its ranks, and are told what the first one refuses.
    if not topology.is_first:
        watchdog.await_first()
    return agreed(judged if topology.is_first else None) is not False


def _enter(folder: RunFolder, recipe: Recipe, resume: Resume, console: Console) -> tuple[bool, str]:
    """Claim the folder; whether the run continues the one that is in there, and its identity."""
    folder.check(recipe, resume)  # before anything is written
    require_account(recipe.tracking.wandb_project)
    folder.hold(node_name(), console.warn)
    continues = folder.check(recipe, resume)  # another run may have ended meanwhile
    return continues, folder.identify(continues)


def _judge(
    job: Job,
    target: TransformersTarget | None,
    folder: RunFolder,
    topology: Topology,
    console: Console,
) -> bool:
    """Whether speculative decoding with the export was lossless, as far as the recipe wants to know."""
    if job.recipe.output.check_export:
        _check(folder.export, console)
    if not job.recipe.evaluation.conversations:
        return True
    judgement = judge(job, target, folder.export, topology, console)
    folder.require_held()
    folder.write_evaluation(judgement.as_dict())
    return judgement.trained.lossless


def _check(exported: Path, console: Console) -> None:
    """Raises UserError where SGLang would not serve the export right; the files stay."""
    try:
        with waiting(console, "asking SGLang whether it takes the export"):
            said = check_export(exported)
        console(f"export check: {said}")
    except NotInstalled:
        console("export check: not made, because SGLang is not installed (launchers/evaluate.py --check makes it)")
    except NotChecked as reason:
        console.warn(str(reason))
