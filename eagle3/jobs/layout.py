"""What a job of so many nodes and processes would be, said before it takes any: the recipe's layout, and where ranks lie."""

from pathlib import Path

import torch

from eagle3.errors import UserError
from eagle3.jobs.job import Prospect, find_target
from eagle3.jobs.provenance import require_fitting_settings, require_fitting_store
from eagle3.parallel.sizes import check_sizes, read_job_size
from eagle3.recipe.schema import Recipe
from eagle3.training.engine import deepspeed_config


def check_layout(recipe: Recipe, deepspeed_file: Path, job: str) -> str:
    """The layout in a line. job: `NxP`, N nodes of P processes each. Raises UserError where the recipe does not fit it, or
    would send what belongs inside a node between nodes."""
    nodes, processes = read_job_size(job)
    sizes = recipe.parallelism
    check_sizes("parallelism", sizes.tensor, sizes.ulysses, sizes.ring, nodes * processes)
    inside = sizes.tensor * sizes.ulysses
    if nodes > 1 and processes % inside:
        raise UserError(
            f"parallelism: tensor {sizes.tensor} x ulysses {sizes.ulysses} would cross nodes of {processes} processes; let "
            f"their product divide {processes}, and use parallelism.ring between nodes"
        )
    data = nodes * processes // (inside * sizes.ring)
    config = deepspeed_config(deepspeed_file, recipe.training, data)
    _check_heads(recipe)
    if recipe.hidden_states.mode == "stored":
        require_fitting_settings(recipe)
        if Path(recipe.model.target).is_dir():
            require_fitting_store(find_target(recipe, torch.device("cpu"), say=lambda line: None))
    crosses = "crosses nodes" if nodes > 1 and inside * sizes.ring > processes else "inside a node"
    job = f"{nodes} node{'s' * (nodes > 1)} of {processes} process{'es' * (processes > 1)}"
    return (
        f"{job}: tensor {sizes.tensor} x ulysses {sizes.ulysses} inside a node, ring {sizes.ring} {crosses}, data {data}; "
        f"{recipe.training.global_batch_size} samples a step, {config['train_micro_batch_size_per_gpu']} in each of {data} x "
        f"{recipe.training.accumulation} streams"
    )


def _check_heads(recipe: Recipe) -> None:
    """Raises UserError where tensor or ulysses do not divide the draft's heads. A hub id is left to the job, whose nodes may
    have what this one cannot reach."""
    if recipe.model.target != "demo" and not Path(recipe.model.target).is_dir():
        return
    Prospect.of(recipe).shape.check_parallel(recipe.parallelism.tensor, recipe.parallelism.ulysses)
