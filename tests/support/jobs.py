"""Resolves recipes for tests that start below the launchers."""

import torch

from eagle3.jobs.job import Inputs, Job, Say, choose_draft, find_target, gather_inputs
from eagle3.parallel.topology import Topology
from eagle3.recipe.schema import Recipe


def job_of(recipe: Recipe, topology: Topology) -> Job:
    """The job, as training and capture resolve it."""
    return choose_draft(inputs_of(recipe, topology.device), print)


def inputs_of(recipe: Recipe, device: torch.device, say: Say = print, judging: bool = False) -> Inputs:
    """The inputs, as launchers gather them."""
    return gather_inputs(find_target(recipe, device, say, make=not judging), say, judging=judging)
