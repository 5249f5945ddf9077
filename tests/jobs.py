"""What a recipe comes to, for tests that start below the launchers."""

from eagle3.jobs.job import Job, choose_draft, gather_inputs
from eagle3.parallel.topology import Topology
from eagle3.recipe.schema import Recipe


def job_of(recipe: Recipe, topology: Topology) -> Job:
    """As training and capture make it."""
    return choose_draft(gather_inputs(recipe, topology.device, print), print)
