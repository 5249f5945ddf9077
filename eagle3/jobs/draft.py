"""The draft that a job trains, with the weights that it begins with."""

import torch

from eagle3.draft.interchange import load_weights, read_exported, shard
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import SharedUserError, UserError
from eagle3.jobs.job import Job
from eagle3.parallel.topology import Topology
from eagle3.targets.interface import TargetHead


def build_draft(job: Job, head: TargetHead, topology: Topology) -> Eagle3Draft:
    """The draft with seeded weights or those of the warm start, and the target's embedding."""
    recipe = job.recipe
    torch.manual_seed(recipe.training.seed)
    draft = Eagle3Draft(job.shape, topology.modules, torch.float32)
    hidden = draft.draft_config.hidden_size
    if head.embedding.shape[1] != hidden:
        raise UserError(
            f"recipe: model.draft.hidden_size is {hidden} but the target's embedding has {head.embedding.shape[1]}; "
            "the draft uses that embedding: leave hidden_size out"
        )
    with torch.no_grad():
        draft.embedding.weight.copy_(shard(head.embedding, draft.embedding.weight, topology.tensor))
        if recipe.model.draft.lm_head == "target":
            if head.head is None:
                raise SharedUserError(
                    "model.draft.lm_head: 'target', but this target's lm_head is no plain matrix that a draft could begin "
                    "with (quantised, or with a bias); set model.draft.lm_head=random"
                )
            rows = head.head[job.vocabulary.target_ids.to(head.head.device)]
            draft.lm_head.weight.copy_(shard(rows, draft.lm_head.weight, topology.tensor))
    if recipe.model.draft.init_from is not None:
        exported = read_exported(recipe.model.draft.init_from)
        if exported.config.window is not None and draft.draft_config.window is None:
            raise UserError(
                f"{exported.origin}: has a window of {exported.config.window} keys, this run's draft full attention; set "
                "model.draft.window to that, or to another number"
            )
        different = draft.draft_config.different_sizes(exported.config)
        if different:
            name = different[0]
            remedy = f"set model.draft.config to {exported.origin}/config.json"
            if getattr(recipe.model.draft, name, None) is not None:
                remedy = f"leave out model.draft.{name}"
            if name in ("hidden_size", "target_hidden_size", "vocab_size"):
                remedy = "name the export of a draft for this target"
            raise UserError(
                f"{exported.origin}: {name} is {getattr(exported.config, name)!r}, this run's draft has "
                f"{getattr(draft.draft_config, name)!r}; {remedy}, or train without init_from"
            )
        load_weights(draft, exported, topology.tensor)
    return draft
