"""Check a recipe's layout on the nodes and processes of a job."""

from pathlib import Path

import torch
from transformers import PretrainedConfig

from eagle3.console import Say
from eagle3.errors import UserError
from eagle3.jobs.derived import config_of, shape_draft
from eagle3.jobs.gate import Gate
from eagle3.jobs.job import find_target
from eagle3.parallel.sizes import check_sizes, read_job_size
from eagle3.recipe.schema import Recipe
from eagle3.states.store.files import open_files
from eagle3.training.deepspeed_file import deepspeed_config


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
    if config := _config_if_here(recipe, warn):
        gate.know(config=config)
        shape = shape_draft(recipe, config)
        gate.know(draft=shape)
        if recipe.data.max_length > shape.max_position_embeddings:
            warn(
                f"data.max_length: {recipe.data.max_length}, but the draft only reaches "
                f"{shape.max_position_embeddings} (max_position_embeddings): a sample that is longer ends the job"
            )
        if recipe.hidden_states.mode == "stored" and Path(recipe.model.target).is_dir():
            gate.know(known=find_target(recipe, torch.device("cpu"), say=lambda line: None))
    needed = sizes.tensor * sizes.ulysses * sizes.ring
    crosses = "crosses nodes" if nodes > 1 and processes % needed else "inside a node"
    return (
        f"{nodes} node{'s' * (nodes > 1)} of {processes} process{'es' * (processes > 1)}: tensor {sizes.tensor} x "
        f"ulysses {sizes.ulysses} inside a node, ring {sizes.ring} {crosses}, data {data}; "
        f"{recipe.training.global_batch_size} samples a step, {samples} in each of {data} x "
        f"{recipe.training.accumulation} streams"
    )


def _config_if_here(recipe: Recipe, warn: Say) -> PretrainedConfig | None:
    """The target's config. If a hub id cannot be read, warns and returns None: the job's nodes may have it."""
    try:
        return config_of(recipe)
    except UserError as mistake:
        if Path(recipe.model.target).is_dir():
            raise
        warn(f"the target was not read, so neither the draft nor its layout was checked against it ({mistake})")
        return None
