"""One training run from its recipe: gather, train, export, judge."""

import datetime
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from eagle3.attention.cuda import take_installed_flash
from eagle3.console import Console, waiting
from eagle3.draft.interchange import export_draft, shard, whole_tensors
from eagle3.draft.model import Eagle3Draft
from eagle3.durable import writing
from eagle3.errors import SharedUserError
from eagle3.evaluation.export_check import NotChecked, NotInstalled, check_export
from eagle3.evaluation.judge import choose_prompts, longest_prompt
from eagle3.jobs.description import describe_run
from eagle3.jobs.draft import build_draft
from eagle3.jobs.evaluate import judge
from eagle3.jobs.job import Job, choose_draft, find_target, gather_inputs
from eagle3.jobs.provenance import input_digests, require_fitting_settings, require_fitting_store
from eagle3.jobs.supply import HiddenStateSupply, hidden_state_supply
from eagle3.objective.model import BatchMaker, DraftObjective, MemoryPlan
from eagle3.parallel.sequence import SequenceSharding
from eagle3.parallel.topology import Topology, agreed, node_name
from eagle3.parallel.watchdog import Watchdog
from eagle3.patches import NormLimit
from eagle3.preflight.inputs import require_trainable
from eagle3.preflight.places import checkpoint_bytes
from eagle3.preflight.start import require_room, require_sound_start
from eagle3.recipe.loading import dump_recipe
from eagle3.recipe.schema import Recipe
from eagle3.states.loader import StreamLoader
from eagle3.targets.transformers import TransformersTarget
from eagle3.text.vocabulary import save_vocabulary
from eagle3.training.checkpoint import Checkpoints, written_otherwise
from eagle3.training.engine import deepspeed_config, full_weights, gradient_scale, scheduler, start_engine
from eagle3.training.run_folder import Resume, RunFolder
from eagle3.training.stopping import RunStopped, StopSignals
from eagle3.training.tracking import memory_gib, require_account
from eagle3.training.trainer import Trainer
from eagle3.training.watched import watched

SHARDING = ("ulysses", "ring", "layout", "query_selection")
Answer = TypeVar("Answer")
Finish = Callable[[Path, Console], None]
PATIENCE = datetime.timedelta(minutes=30)  # of collectives, as torch's own


@dataclass(frozen=True)
class _Run:
    """One run in these processes: what is not of its job."""

    deepspeed_file: Path
    topology: Topology
    folder: RunFolder
    console: Console
    watchdog: Watchdog

    def on_first(self, work: Callable[[], Answer]) -> Answer | None:
        """Collective. Work of the first rank alone; what it refuses, every rank raises."""
        return agreed(work if self.topology.is_first else None)


class _Start(NamedTuple):
    """continues: from a checkpoint, where there is one. identity: of the run, see RunFolder."""

    continues: bool
    identity: str


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
            run = _Run(deepspeed_file, topology, folder, console, watchdog)
            return _train(recipe, run, resume, stop, finish)
        except RunStopped as stopped:
            if not stopped.together:
                raise
            ended = stopped
    raise ended  # after the watchdog saw this rank leave as it should


def _train(recipe: Recipe, run: _Run, resume: Resume, stop: StopSignals, finish: Finish) -> bool:
    require_trainable(recipe)
    engine_config = deepspeed_config(run.deepspeed_file, recipe.training, run.topology.data.size())
    start = _enter(recipe, run, resume)
    job = _resolve(recipe, run, start)
    with hidden_state_supply(job, run.topology, run.console) as supply:
        memory_before = memory_gib(run.topology.device)
        draft = build_draft(job, supply.head, run.topology)
        trainer = _trainer(job, run, start, supply, draft, engine_config)
        run.on_first(lambda: _begin(job, run, start, trainer.steps, memory_before))
        if run.topology.device.type == "cuda":
            run.console(f"attention: {take_installed_flash(run.topology.device)} kernels")
        with run.watchdog.watching():
            trainer.run(start.continues, stop)
        _export(job, run, trainer.load_best(), draft)
    run.console.result(f"exported draft: {run.folder.export}")

    def judged() -> bool:
        try:
            return _judge(job, run, supply.target)
        finally:
            finish(run.folder.path, run.console)
            run.watchdog.first_is_done()

    # The others wait, for a Slurm job ends soon after the first of its ranks, and are told what the first one refuses.
    if not run.topology.is_first:
        run.watchdog.await_first()
    return run.on_first(judged) is not False


def _enter(recipe: Recipe, run: _Run, resume: Resume) -> _Start:
    """Claim the folder, and see that all ranks run the same thing."""
    folder, console = run.folder, run.console

    def claim() -> _Start:
        folder.check(recipe, resume)  # before anything is written
        require_account(recipe.tracking.wandb_project)
        folder.hold(node_name(), console.warn)
        continues = folder.check(recipe, resume)  # another run may have ended meanwhile
        return _Start(continues, folder.identify(continues))

    start = [run.on_first(claim)]
    dist.broadcast_object_list(start)
    packages = ("sglang",) if recipe.target.backend == "sglang" else ()
    deepspeed_text = run.deepspeed_file.read_text(encoding="utf-8")
    require_sound_start(dump_recipe(recipe), deepspeed_text, folder.path, packages)
    return start[0]


def _resolve(recipe: Recipe, run: _Run, start: _Start) -> Job:
    """What can be refused is refused here, not when a target has been loaded or hours have gone by."""
    console, evaluation, sizes = run.console, recipe.evaluation, recipe.parallelism
    stored = recipe.hidden_states.mode == "stored"
    if stored:
        run.on_first(lambda: require_fitting_settings(recipe))
    known = find_target(recipe, run.topology.device, console)
    if stored:
        run.on_first(lambda: require_fitting_store(known))
    inputs = gather_inputs(known, console)
    if evaluation.conversations:
        longest = longest_prompt(inputs.config.max_position_embeddings, evaluation.new_tokens, evaluation.draft_tokens)
        choose_prompts(inputs.held_out, evaluation.conversations, longest)
    if start.continues:
        run.on_first(lambda: run.folder.require_same_inputs(input_digests(inputs), console.warn))
    job = choose_draft(inputs, console)
    job.shape.check_parallel(sizes.tensor, sizes.ulysses)
    job.shape.check_context(int(job.train.lengths.max()))
    layers = job.shape.aux_layers
    if layers and layers[-1] == job.config.num_hidden_layers - 1 > 2:
        console.warn(
            f"model.aux_layers: {list(layers)} has the output of the target's last layer, which SGLang does not capture, so "
            "it will not serve this draft; name lower layers to serve it there"
        )
    itemsize = getattr(torch, recipe.training.dtype).itemsize
    require_room(run.folder.path, checkpoint_bytes(job.shape, sizes.tensor, itemsize))
    return job


def _trainer(
    job: Job, run: _Run, start: _Start, supply: HiddenStateSupply, draft: Eagle3Draft, engine_config: dict[str, Any]
) -> Trainer:
    """Put a run together: engine, loaders, checkpoints."""
    recipe, topology, console, (train, held_out) = job.recipe, run.topology, run.console, supply.samples
    training, parallelism = recipe.training, recipe.parallelism
    steps = training.max_steps or math.ceil(training.epochs * len(train) / training.global_batch_size)
    if training.profile and training.profile.start > steps:
        raise SharedUserError(
            f"training.profile.start: {training.profile.start}, but this run ends at step {steps}; name an earlier step, or leave "
            "training.profile out"
        )
    if training.global_batch_size > len(train):
        console.warn(
            f"training.global_batch_size: {training.global_batch_size:,} samples a step, of {len(train):,} that there are: a step "
            "takes some of them again and again; lower it"
        )
    memory = MemoryPlan(recipe.memory.recompute, recipe.memory.block_mib * 2**20)
    if start.continues and written_otherwise(run.folder.checkpoints, dist.get_world_size(), topology.tensor.size()):
        universal = {**engine_config.get("checkpoint", {}), "load_universal": True}
        engine_config = engine_config | {"checkpoint": universal}
    rates = scheduler(steps, training.warmup_fraction, training.final_learning_rate_fraction)
    objective = DraftObjective(draft, topology, parallelism.ring_mode, memory)
    engine = start_engine(objective, topology, engine_config, rates)
    place = {
        "steps": training.ttt_steps,
        "sharding": SequenceSharding(*(getattr(parallelism, name) for name in SHARDING)),
        "data": topology.data,
        "sequence": topology.sequence,
        "window": draft.draft_config.window,
        "spans": supply.spans,
    }
    return Trainer(
        recipe=recipe,
        topology=topology,
        folder=run.folder,
        engine=engine,
        norms=NormLimit(engine, training.skip_above_norm),
        gradient_scale=gradient_scale(topology.data.size(), training.accumulation),
        batch_maker=_batch_maker(job, supply, draft, topology),
        train_loader=StreamLoader(train, supply.source, **place),
        held_out_loader=StreamLoader(held_out, supply.held_out_source, **place),
        checkpoints=Checkpoints(
            run.folder.checkpoints, training.keep_checkpoints, start.identity, console.warn, console
        ),
        console=console,
        watchdog=run.watchdog,
        steps=steps,
    )


def _batch_maker(job: Job, supply: HiddenStateSupply, draft: Eagle3Draft, topology: Topology) -> BatchMaker:
    dtype, width, rank = draft.lm_head.weight.dtype, len(draft.lm_head.weight), topology.tensor.rank()
    teacher_head = None  # where the teacher gives logits
    if job.recipe.target.teacher == "hidden":
        head = supply.head.head
        rows = head[job.vocabulary.target_ids.to(head.device)]
        teacher_head = shard(rows, draft.lm_head.weight, topology.tensor).to(topology.device, dtype)
    return BatchMaker(
        job.vocabulary.draft_ids,
        teacher_head,
        dtype,
        topology.device,
        job.recipe.memory.inputs,
        supply.head.transform,
        slice(rank * width, (rank + 1) * width),
    )


def _begin(job: Job, run: _Run, start: _Start, steps: int, memory_before: float) -> None:
    """Write down what the run is made of."""
    folder = run.folder
    folder.begin(job.recipe, start.continues, start.identity, input_digests(job), run.console)
    with writing(folder.vocabulary, "free space, or set output.dir to another place"):
        save_vocabulary(job.vocabulary, folder.vocabulary)
    try:
        described = describe_run(
            job,
            run.deepspeed_file,
            device=run.topology.device,
            steps=steps,
            continues=start.continues,
            memory_before=memory_before,
        )
        folder.write_run(described)
    except Exception as error:  # of use to the report alone: no reason for a run not to start
        run.console.warn(f"{folder.run}: not written, so the report will lack it ({error!r})")


def _export(job: Job, run: _Run, step: int, draft: Eagle3Draft) -> None:
    """Collective. Write the draft, whose weights are of `step`, for serving engines."""
    output, folder = job.recipe.output, run.folder
    with waiting(run.console, "exporting the draft"):
        weights = full_weights(draft) | {"embedding.weight": draft.embedding.weight}
        weights = whole_tensors(weights, draft, run.topology.tensor)

        def write() -> None:
            folder.claim.require()
            with writing(folder.export, "free space and continue with --resume, which exports the draft"):
                export_draft(
                    folder.export,
                    draft,
                    weights,
                    d2t=job.vocabulary.d2t,
                    t2d=job.vocabulary.t2d,
                    dtype=getattr(torch, output.export_dtype),
                    with_embedding=output.export_embedding,
                )
                folder.note_export(step)

        run.on_first(write)


def _judge(job: Job, run: _Run, target: TransformersTarget | None) -> bool:
    """Whether speculative decoding with the export was lossless, as far as the recipe wants to know."""
    folder, console = run.folder, run.console
    if job.recipe.output.check_export:
        _check(folder.export, console)
    if not job.recipe.evaluation.conversations:
        return True
    judgement = judge(job, target, folder.export, run.topology, console)
    folder.claim.require()
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
