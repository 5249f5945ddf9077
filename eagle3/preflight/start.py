"""What every job proves in its first second: that its processes run the same thing and can write their run folder."""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from eagle3.errors import SharedUserError
from eagle3.preflight.cluster import Finding, in_one_line, join
from eagle3.preflight.machine import check_open_files
from eagle3.preflight.places import check_shared, free_bytes, judge_space
from eagle3.preflight.sameness import PACKAGES, compare, own_traits


def require_sound_start(recipe: str, deepspeed: str, output_dir: Path, packages: tuple[str, ...] = ()) -> None:
    """Collective, after start_distributed, with a few small exchanges of objects. Raises SharedUserError on every rank at
    the first of these that fails: versions, code, recipe and DeepSpeed file are the same on all ranks; files enough may
    be open (the soft limit is raised where it can be); every node sees, and may write, the place of the run folder.

    recipe: resolved, as YAML (dump_recipe). deepspeed: the text of its file. packages: whose versions count beside
    the usual ones. launchers/doctor.py makes more checks, and takes longer.
    """
    cluster = join(_gather, dist.get_rank())
    for name, traits in own_traits(recipe, deepspeed, (*PACKAGES, *packages)).items():
        _require(compare(cluster, name, traits))
    _require(check_open_files(cluster))
    _require(check_shared(cluster, "output.dir", output_dir))


def require_room(output_dir: Path, checkpoint: int) -> None:
    """Raises SharedUserError where one checkpoint of so many bytes (places.checkpoint_bytes) has no room. All ranks
    call it: it is one file system."""
    try:
        free = free_bytes(output_dir)
    except OSError as error:
        raise SharedUserError(f"{output_dir}: {in_one_line(error)}; mend output.dir") from error
    _require(judge_space(output_dir, free, checkpoint, "a checkpoint"))


def _require(finding: Finding) -> None:
    if finding.state == "failed":
        raise SharedUserError(f"{finding.name}: {finding.found}; {finding.remedy}")


def _gather(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
