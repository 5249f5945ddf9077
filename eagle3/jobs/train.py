"""Carry out a training run from its recipe: gather the inputs, train, export the draft, judge it."""

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3.console import Console, waiting
from eagle3.draft.interchange import export_draft, load_weights, read_exported, shard, whole_tensors
from eagle3.draft.model import Eagle3Draft
from eagle3.durable import writing
from eagle3.errors import SharedUserError, UserError
from eagle3.jobs.derived import config_of, shape_draft
from eagle3.jobs.description import describe_run
from eagle3.jobs.evaluate import held_out_prompts, judge, judgement_record, texts_of
from eagle3.jobs.gate import Gate, require_servers_named
from eagle3.jobs.job import Job, choose_draft, find_target, gather_inputs, input_digests
from eagle3.jobs.plan import memory_plan
from eagle3.jobs.supply import HiddenStateSupply, hidden_state_supply
from eagle3.kernels.choice import Choice, choose_kernels
from eagle3.kernels.proof import KernelDemand
from eagle3.objective.model import DraftObjective, MicroBatch, micro_batch
from eagle3.parallel.sequence import SequenceSharding
from eagle3.parallel.sizes import check_sizes, read_job_size
from eagle3.parallel.topology import Topology, agreed, gathered, node_name
from eagle3.parallel.watchdog import Watchdog
from eagle3.patches import NormLimit
from eagle3.preflight.folders import checkpoint_bytes, free_bytes, judge_space
from eagle3.preflight.start import require_sound_start
from eagle3.recipe.schema import Recipe
from eagle3.states.loader import StreamLoader
from eagle3.states.store.files import open_files
from eagle3.targets.logits import TargetHead
from eagle3.targets.sglang.draft_check import NotChecked, NotInstalled, check_export
from eagle3.targets.transformers import TransformersTarget
from eagle3.text.vocabulary import load_vocabulary, save_vocabulary
from eagle3.training.checkpoint import Checkpoints, written_otherwise
from eagle3.training.deepspeed_file import deepspeed_config
from eagle3.training.engine import full_weights, start_engine, warmup_cosine
from eagle3.training.run_folder import Resume, RunFolder
from eagle3.training.stopping import StopSignals
from eagle3.training.tracking import memory_gib, require_account
from eagle3.training.trainer import Course, Trainer
from eagle3.training.watched import watched

Finish = Callable[[Path, Console], None]


@dataclass
class _Run:
    """Everything that belongs to this run rather than to its job."""

    deepspeed_file: Path
    topology: Topology
    folder: RunFolder
    console: Console
    watchdog: Watchdog
    # Both are known once the folder is claimed:
    continues: bool = False  # whether the run resumes from a checkpoint
    identity: str = ""  # id of the run, see RunFolder

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Do this work on the first rank only. If it raises UserError, so does every rank. Collective."""
        return agreed(work, self.topology.is_first)


def train(
    recipe: Recipe,
    deepspeed_file: Path,
    topology: Topology,
    resume: Resume = "no",
    stop: StopSignals | None = None,
    console: Console | None = None,
    finish: Finish = lambda folder, console: None,
) -> bool:
    """Run the whole recipe. Every rank calls it. Returns False if speculative decoding was not lossless.

    finish: called on the first rank with the run's folder after export and judging, even if judging failed

    Everything is written to `recipe.output.dir` (see RunFolder), which no other run can use meanwhile. If a rank dies
    or hangs, the watchdog reports it and ends the process. Raises UserError for anything that the user can fix, and
    RunStopped if a signal in `stop` ends the run early.
    """
    console = console or Console(topology.is_first)
    folder, stop = RunFolder(recipe.output.dir), stop or StopSignals()
    with (
        closing(folder),
        watched(
            topology,
            hang_minutes=recipe.training.hang_minutes,
            advice="continue with --resume auto",
            less_memory="launchers/plan.py says what fits: more sequence ranks, memory.recompute, memory.block_mib, a "
            "shorter data.max_length",
        ) as watchdog,
    ):
        run = _Run(deepspeed_file, topology, folder, console, watchdog)
        gate = Gate(recipe, console.warn, training=True)
        gate.know()
        require_servers_named(recipe)
        engine_config = deepspeed_config(deepspeed_file, recipe.training, topology.data.size())
        _enter(recipe, run, resume)
        job = _resolve(gate, run)
        choice = _choose_kernels(job, run)
        with hidden_state_supply(job, topology, console) as supply:
            memory_before = memory_gib(topology.device)
            draft = _build_draft(job, supply.head, topology)
            trainer = _trainer(job, run, supply, draft, engine_config, choice)
            run.on_first(lambda: _begin(job, run, trainer, memory_before))
            with watchdog.watching():
                trainer.run(run.continues, stop)
            _export(job, run, trainer.load_best(), draft)
        console.result(f"exported draft: {folder.export}")
        # The other ranks wait, because a Slurm job ends soon after any rank exits. They raise whatever the first rank
        # raises.
        return run.on_first(lambda: _judge(job, run, supply.target, finish)) is not False


def _enter(recipe: Recipe, run: _Run, resume: Resume) -> None:
    """Claim the run folder, and check that all ranks run the same thing."""
    folder, console = run.folder, run.console

    def claim() -> tuple[bool, str]:
        folder.check(recipe, resume)  # before writing anything
        require_account(recipe.tracking.wandb_project)
        folder.hold(node_name(), console.warn)
        continues = folder.check(recipe, resume)  # checked again, because another run may have ended in the meantime
        return continues, folder.identify(continues)

    run.continues, run.identity = gathered(run.on_first(claim))[0]
    require_sound_start(recipe, run.deepspeed_file)


def _resolve(gate: Gate, run: _Run) -> Job:
    """Resolve the job. What can be refused without the target's weights is refused here, before hours have passed."""
    recipe, console = gate.recipe, run.console
    if recipe.hidden_states.mode == "stored":
        run.on_first(lambda: gate.know(store=open_files(recipe.hidden_states.path)))
    known = find_target(recipe, run.topology.device, console)
    gate.know(config=known.config)
    run.on_first(lambda: gate.know(known=known))
    if recipe.model.draft.vocabulary is None and recipe.model.draft.init_from is None:
        gate.know(draft=shape_draft(recipe, known.config))  # the data choose which tokens it has, not how many
    inputs = gather_inputs(known, console)
    if recipe.evaluation.conversations:
        held_out_prompts(inputs, recipe.evaluation.draft_tokens)
    if run.continues:
        run.on_first(lambda: run.folder.require_same_inputs(input_digests(inputs)))
    job = choose_draft(inputs, console)
    gate.know(draft=job.shape, longest=job.inputs.longest)
    folder = run.folder.path  # which all ranks see
    judge_space(folder, free_bytes(folder), checkpoint_bytes(recipe, job.shape), "a checkpoint")
    return job


def _choose_kernels(job: Job, run: _Run) -> Choice:
    """Choose the kernels of attention, position-wise work and loss, on CUDA by trying them on this GPU. Collective."""
    training, sizes, topology = job.recipe.training, job.recipe.parallelism, run.topology
    demand = KernelDemand.of(job.shape, sizes.tensor, sizes.ulysses, getattr(torch, training.dtype), training.ttt_steps)
    before = gathered(run.folder.kernels_before() if topology.is_first and run.continues else None)[0]
    with waiting(run.console, "proving kernels on this GPU"):
        choice = choose_kernels(demand, topology, job.recipe.data.cache_dir.expanduser(), training.kernels, before)
    choice.tell(run.console)
    return choice


def _build_draft(job: Job, head: TargetHead, topology: Topology) -> Eagle3Draft:
    """Build the draft, with the target's embedding, and with seeded weights or the warm start's."""
    settings = job.recipe.model.draft
    torch.manual_seed(job.recipe.training.seed)
    draft = Eagle3Draft(job.shape, topology.modules, torch.float32)
    with torch.no_grad():
        draft.embedding.weight.copy_(shard(head.embedding, draft.embedding.weight, topology.tensor))
        if settings.lm_head == "target":
            if head.head is None:
                raise SharedUserError(
                    "model.draft.lm_head: 'target', but this target's lm_head is not a plain matrix that a draft "
                    "could start from (quantised, or with a bias); set model.draft.lm_head=random"
                )
            draft.lm_head.weight.copy_(shard(_drafted_rows(job, head), draft.lm_head.weight, topology.tensor))
    if settings.init_from is not None:
        load_weights(draft, read_exported(settings.init_from), topology.tensor)
    return draft


def _drafted_rows(job: Job, head: TargetHead) -> Tensor:
    """The rows of the target's lm_head that belong to the draft vocabulary."""
    return head.head[job.vocabulary.target_ids.to(head.head.device)]


def _trainer(
    job: Job,
    run: _Run,
    supply: HiddenStateSupply,
    draft: Eagle3Draft,
    engine_config: dict[str, Any],
    choice: Choice,
) -> Trainer:
    """Assemble the trainer: engine, loaders, checkpoints."""
    recipe, topology, console, (train, held_out) = job.recipe, run.topology, run.console, supply.samples
    training, sizes = recipe.training, recipe.parallelism
    steps = training.max_steps or math.ceil(training.epochs * len(train) / training.global_batch_size)
    if training.profile and training.profile.start > steps:
        raise SharedUserError(
            f"training.profile.start: {training.profile.start}, but this run ends at step {steps}; name an earlier "
            "step, or leave training.profile out"
        )
    if training.global_batch_size > len(train):
        console.warn(
            f"training.global_batch_size: {training.global_batch_size:,} samples a step, but there are only "
            f"{len(train):,}: a step takes some of them more than once; lower it"
        )
    if run.continues and written_otherwise(run.folder.checkpoints, dist.get_world_size(), topology.tensor.size()):
        engine_config = engine_config | {"checkpoint": {**engine_config.get("checkpoint", {}), "load_universal": True}}
    memory = memory_plan(recipe.memory, topology.device.type)
    engine = start_engine(
        DraftObjective(draft, topology, sizes.ring_mode, memory, choice.kernels),
        topology,
        engine_config,
        warmup_cosine(steps, training.warmup_fraction, training.final_learning_rate_fraction),
    )
    make = _batch_maker(job, supply, draft, topology)
    place = {
        "reach": draft.reach(training.ttt_steps),
        "sharding": SequenceSharding(sizes.ulysses, sizes.ring, sizes.layout, sizes.query_selection),
        "data": topology.data,
        "sequence": topology.sequence,
        "spans": supply.spans,
    }
    return Trainer(
        recipe=recipe,
        topology=topology,
        folder=run.folder,
        engine=engine,
        norms=NormLimit(engine, training.skip_above_norm),
        train_loader=StreamLoader(train, supply.source, make, rule=training.rows, **place),
        # on the rows that an engine uses, whichever are trained
        held_out_loader=StreamLoader(held_out, supply.held_out_source, make, rule="served", **place),
        checkpoints=Checkpoints(run.folder.checkpoints, training.keep_checkpoints, run.identity, console.warn, console),
        console=console,
        watchdog=run.watchdog,
        steps=steps,
        course=Course(kernels=dict(choice.names)),
    )


def _batch_maker(job: Job, supply: HiddenStateSupply, draft: Eagle3Draft, topology: Topology) -> partial[MicroBatch]:
    own, rank, teacher_head = draft.lm_head.weight, topology.tensor.rank(), None
    if job.recipe.target.teacher == "hidden":  # otherwise the teacher provides logits
        teacher_head = shard(_drafted_rows(job, supply.head), own, topology.tensor).to(topology.device, own.dtype)
    return partial(
        micro_batch,
        draft_id=job.vocabulary.draft_ids,
        head=teacher_head,
        dtype=own.dtype,
        transform=supply.head.transform,
        columns=slice(rank * len(own), (rank + 1) * len(own)),
        by_sample=job.recipe.training.normalization == "samples",
    )


def _begin(job: Job, run: _Run, trainer: Trainer, memory_before: float) -> None:
    """Write the run's inputs and settings to its folder."""
    folder = run.folder
    folder.begin(job.recipe, run.continues, run.identity, input_digests(job.inputs), run.console)
    with writing(folder.vocabulary, "free space, or set output.dir to another place"):
        save_vocabulary(job.vocabulary, folder.vocabulary)
    try:
        folder.write_run(
            describe_run(
                job,
                run.deepspeed_file,
                device=run.topology.device,
                steps=trainer.steps,
                continues=run.continues,
                memory_before=memory_before,
                kernels=trainer.course.kernels,
            )
        )
    except Exception as error:  # only the report needs it, so it is no reason to refuse to start
        run.console.warn(f"{folder.run}: not written, so the report will lack it ({error!r})")


def _export(job: Job, run: _Run, step: int, draft: Eagle3Draft) -> None:
    """Export the draft for serving engines, with the weights of `step`. Collective."""
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


def _judge(job: Job, run: _Run, target: TransformersTarget | None, finish: Finish) -> bool:
    """Check and judge the export as the recipe says. Returns whether speculative decoding was lossless.
    Raises UserError if SGLang would not serve the export correctly; the files stay."""
    folder, console = run.folder, run.console
    try:
        if job.recipe.output.check_export:
            try:
                with waiting(console, "asking SGLang whether it takes the export"):
                    console(f"export check: {check_export(folder.export)}")
            except NotInstalled:
                console("export check: not made: SGLang is not installed (launchers/evaluate.py --check makes it)")
            except NotChecked as reason:
                console.warn(str(reason))
        if not job.recipe.evaluation.conversations:
            return True
        judgement = judge(job.inputs, target, folder.export, run.topology, console)
        folder.claim.require()
        folder.write_evaluation(
            judgement_record("evaluation", judgement, job.known, folder.export, texts_of(job.inputs, {}))
        )
        return judgement.lossless
    finally:
        finish(folder.path, console)


# The check before a job ------------------------------------------------------------------------------------------


def check_layout(gate: Gate, deepspeed_file: Path, job: str) -> str:
    """Describe the layout of the gate's recipe on this job in one line. Warns of what may stop the job, or could not be
    checked. Raises UserError if the recipe does not fit the job.

    job: `NxP`, i.e. N nodes with P processes each
    """
    recipe, warn = gate.recipe, gate.warn
    (nodes, processes), sizes = read_job_size(job), recipe.parallelism
    data = check_sizes("parallelism", sizes.tensor, sizes.ulysses, sizes.ring, nodes * processes)
    gate.know(nodes=nodes, processes=processes)
    samples = deepspeed_config(deepspeed_file, recipe.training, data)["train_micro_batch_size_per_gpu"]
    if recipe.hidden_states.mode == "stored":
        gate.know(store=open_files(recipe.hidden_states.path))
    try:
        config = config_of(recipe)
    except UserError as mistake:
        if Path(recipe.model.target).is_dir():
            raise
        # The job's nodes may reach the hub.
        warn(f"the target was not read, so neither the draft nor its layout was checked against it ({mistake})")
    else:
        gate.know(config=config)
        shape = shape_draft(recipe, config)
        gate.know(draft=shape)
        if recipe.model.draft.vocabulary:
            load_vocabulary(recipe.model.draft.vocabulary, config.vocab_size)
        if recipe.data.max_length > shape.max_position_embeddings:
            warn(
                f"data.max_length: {recipe.data.max_length}, but the draft only reaches "
                f"{shape.max_position_embeddings} (max_position_embeddings): a sample that is longer ends the job"
            )
        if recipe.hidden_states.mode == "stored" and Path(recipe.model.target).is_dir():
            gate.know(known=find_target(recipe, torch.device("cpu"), say=lambda line: None))
    whole = processes % (sizes.tensor * sizes.ulysses * sizes.ring) == 0
    crosses = "inside a node" if nodes == 1 or whole else "crosses nodes"
    return (
        f"{nodes} node{'s' * (nodes > 1)} of {processes} process{'es' * (processes > 1)}: tensor {sizes.tensor} x "
        f"ulysses {sizes.ulysses} inside a node, ring {sizes.ring} {crosses}, data {data}; "
        f"{recipe.training.global_batch_size} samples a step, {samples} in each of {data} x "
        f"{recipe.training.accumulation} streams"
    )
