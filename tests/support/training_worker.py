"""Runs one recipe several times on several ranks, and does to the run folders in between what tests ask for.

python tests/support/training_worker.py RECIPE (PROCESSES[+resume]:OVERRIDE,... | cut:RUN,STEP | copy:RUN,COPY) ...

cut: as if the run had been killed right after its checkpoint of STEP.
"""

import shutil
import sys
from functools import partial
from pathlib import Path

from places import ZERO2
from processes import fork_ranks

from eagle3.jobs.train import train
from eagle3.parallel.topology import start_distributed, stop_distributed
from eagle3.recipe.loading import load_recipe


def run(recipe_file: str, overrides: list[str], resume: str) -> None:
    recipe = load_recipe(recipe_file, overrides)
    sizes = recipe.parallelism
    topology = start_distributed(sizes.tensor, sizes.ulysses, sizes.ring)
    assert train(recipe, ZERO2, topology, resume)
    stop_distributed()


def cut(folder: str, step: str) -> None:
    for checkpoint in Path(folder, "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > int(step):
            shutil.rmtree(checkpoint)
    shutil.rmtree(Path(folder, "export"))


if __name__ == "__main__":
    for job in sys.argv[2:]:
        processes, _, overrides = job.partition(":")
        if processes in ("cut", "copy"):
            {"cut": cut, "copy": shutil.copytree}[processes](*overrides.split(","))
            continue
        count, _, resume = processes.partition("+")
        fork_ranks(int(count), partial(run, sys.argv[1], overrides.split(","), "yes" if resume else "no"))
