"""Check a recipe's layout on the nodes and processes of a job."""

from pathlib import Path

import torch

from eagle3.errors import UserError
from eagle3.jobs.job import find_target
from eagle3.jobs.prospect import Prospect, config_of, require_judgeable
from eagle3.jobs.provenance import require_fitting_settings, require_fitting_store
from eagle3.parallel.sizes import check_sizes, read_job_size
from eagle3.recipe.schema import Recipe
from eagle3.training.deepspeed_file import deepspeed_config


def check_layout(recipe: Recipe, deepspeed_file: Path, job: str) -> str:
    """Describe the recipe's layout on this job in one line.

    job: `NxP`, i.e. N nodes with P processes each

    Raises UserError if the recipe does not fit the job, or if traffic that should stay inside a node would leave it.
    """
    (nodes, processes), sizes = read_job_size(job), recipe.parallelism
    data = check_sizes("parallelism", sizes.tensor, sizes.ulysses, sizes.ring, nodes * processes)
    inside = sizes.tensor * sizes.ulysses
    if nodes > 1 and processes % inside:
        raise UserError(
            f"parallelism: tensor {sizes.tensor} x ulysses {sizes.ulysses} would cross nodes of {processes} "
            f"processes; let their product divide {processes}, and use parallelism.ring between nodes"
        )
    samples = deepspeed_config(deepspeed_file, recipe.training, data)["train_micro_batch_size_per_gpu"]
    here = Path(recipe.model.target).is_dir()  # a hub id is left for the job to check: its nodes may have the files
    if here or recipe.model.target == "demo":
        config = config_of(recipe)
        Prospect.of(recipe, config).shape.check_parallel(sizes.tensor, sizes.ulysses)
        require_judgeable(recipe, config)
    if recipe.hidden_states.mode == "stored":
        require_fitting_settings(recipe)
        if here:
            require_fitting_store(find_target(recipe, torch.device("cpu"), say=lambda line: None))
    crosses = "crosses nodes" if nodes > 1 and inside * sizes.ring > processes else "inside a node"
    return (
        f"{nodes} node{'s' * (nodes > 1)} of {processes} process{'es' * (processes > 1)}: tensor {sizes.tensor} x "
        f"ulysses {sizes.ulysses} inside a node, ring {sizes.ring} {crosses}, data {data}; "
        f"{recipe.training.global_batch_size} samples a step, {samples} in each of {data} x "
        f"{recipe.training.accumulation} streams"
    )
