"""Checks that every job makes in its first second: its processes run the same thing and can write to the run folder."""

from pathlib import Path

import torch.distributed as dist

from eagle3.parallel.topology import gathered
from eagle3.preflight.cluster import join
from eagle3.preflight.machine import check_open_files
from eagle3.preflight.places import check_shared, free_bytes, judge_space
from eagle3.preflight.sameness import compare, own_traits
from eagle3.recipe.schema import Recipe


def require_sound_start(recipe: Recipe, deepspeed: Path) -> None:
    """Checks that a job has started properly; call it after start_distributed. Collective, with a few exchanges of
    small objects. Raises SharedUserError on every rank unless:
    - versions, code, recipe and DeepSpeed file are the same on all ranks;
    - enough files can be open (raises the soft limit if possible);
    - every node sees the run folder's location and can write there.

    launchers/doctor.py checks more, but takes longer.
    """
    cluster = join(gathered, dist.get_rank())
    for name, traits in own_traits(recipe, deepspeed).items():
        compare(cluster, name, traits)
    check_open_files(cluster)
    check_shared(cluster, "output.dir", recipe.output.dir)


def require_room(output_dir: Path, checkpoint: int) -> None:
    """Raises SharedUserError if the disk has no room for one checkpoint of `checkpoint` bytes (see
    places.checkpoint_bytes). Call it on all ranks, which see the same file system."""
    judge_space(output_dir, free_bytes(output_dir), checkpoint, "a checkpoint")
