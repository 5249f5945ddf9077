"""What every job checks in its first second: its processes run the same thing and can write their run folder."""

from pathlib import Path

import torch.distributed as dist

from eagle3.errors import SharedUserError
from eagle3.parallel.topology import gathered
from eagle3.preflight.cluster import Finding, in_one_line, join
from eagle3.preflight.machine import check_open_files
from eagle3.preflight.places import check_shared, free_bytes, judge_space
from eagle3.preflight.sameness import PACKAGES, compare, own_traits


def require_sound_start(recipe: str, deepspeed: str, output_dir: Path, packages: tuple[str, ...] = ()) -> None:
    """Checks the start of a job, after start_distributed. Collective, with a few exchanges of small objects. Raises
    SharedUserError on every rank at the first check that fails:
    - versions, code, recipe and DeepSpeed file are the same on all ranks;
    - enough files may be open (the soft limit is raised if possible);
    - every node sees the place of the run folder and may write there.

    launchers/doctor.py checks more, and takes longer.

    recipe: resolved, as YAML (dump_recipe).
    deepspeed: the text of its file.
    packages: packages whose versions count in addition to the usual ones.
    """
    cluster = join(gathered, dist.get_rank())
    for name, traits in own_traits(recipe, deepspeed, (*PACKAGES, *packages)).items():
        _require(compare(cluster, name, traits))
    _require(check_open_files(cluster))
    _require(check_shared(cluster, "output.dir", output_dir))


def require_room(output_dir: Path, checkpoint: int) -> None:
    """Raises SharedUserError if there is no room for one checkpoint of that many bytes (places.checkpoint_bytes).
    Called by all ranks, which see the same file system."""
    try:
        free = free_bytes(output_dir)
    except OSError as error:
        raise SharedUserError(f"{output_dir}: {in_one_line(error)}; fix output.dir") from error
    _require(judge_space(output_dir, free, checkpoint, "a checkpoint"))


def _require(finding: Finding) -> None:
    if finding.state == "failed":
        raise SharedUserError(f"{finding.name}: {finding.found}; {finding.remedy}")
