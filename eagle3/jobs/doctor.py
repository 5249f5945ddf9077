"""What doctor.py finds out about a job's draft: whether its kernels agree with the definition, and how large a
checkpoint is."""

from collections.abc import Iterator
from dataclasses import asdict

import torch

from eagle3.attention.cuda import FLASH4_CAPABILITY, has_flash4
from eagle3.draft.config import DraftConfig
from eagle3.errors import UserError
from eagle3.jobs.derived import config_of, shape_draft
from eagle3.jobs.gate import require_divisible
from eagle3.kernels.choice import (
    NONE_RIGHT,
    OPTIONAL,
    Candidates,
    Table,
    agreement,
    described,
    fastest,
    parsed,
)
from eagle3.kernels.proof import KernelDemand
from eagle3.parallel.topology import Topology
from eagle3.preflight.cluster import Cluster, Finding
from eagle3.preflight.places import checkpoint_bytes
from eagle3.recipe.schema import Recipe

FLASH4_ADVICE = 'not installed; up to twice as fast as 2: pip install -e ".[flash4]" -c constraints/cuda.txt'


def checkpoint_of(recipe: Recipe) -> int | None:
    """Bytes of one checkpoint of this recipe; None if the target's config is not available (yet)."""
    draft = _draft(recipe)
    return draft and checkpoint_bytes(draft, recipe.parallelism.tensor, getattr(torch, recipe.training.dtype).itemsize)


def check_kernels(cluster: Cluster, topology: Topology, recipe: Recipe) -> Iterator[Finding]:
    """A finding for each kind of attention's blocks, for position-wise work and for the loss: every kernel's error and
    time, and which one training will use. Collective."""
    sizes = cluster.ask("kernels", lambda: _demanded(recipe), "change parallelism", [0])[0]
    if sizes is None:
        yield Finding("kernels", "note", "not tried, because the target's config is not available (yet)")
        return
    demand, device = KernelDemand(**sizes, dtype=getattr(torch, recipe.training.dtype)), topology.device
    timed = device.type == "cuda"

    def prove() -> Table:
        candidates = Candidates.of(demand, device, recipe.training.kernels)
        return candidates.prove(demand, topology.alone, device, timed)

    proven = cluster.ask("kernels", prove, "set training.kernels to auto, and look at nvidia-smi there")
    for kind, verdicts in agreement([*map(parsed, proven.values())]).items():
        if not verdicts:
            continue  # blocks of this kind are cut into others
        name, right = f"kernels for {described(kind)}", [each for each in verdicts if each.right]
        used, failed = fastest(verdicts), not right and kind not in OPTIONAL
        lines = [each.described + (", used" if each is used else "") for each in verdicts]
        state = "failed" if failed else "ok" if len(right) == len(verdicts) else "note"
        yield Finding(name, state, "; ".join(lines), NONE_RIGHT if failed else "")
    if timed and torch.cuda.get_device_capability(device) >= FLASH4_CAPABILITY and not has_flash4(device):
        yield Finding("FlashAttention 4", "note", FLASH4_ADVICE)


def _demanded(recipe: Recipe) -> dict[str, int | None] | None:
    """The fields of a KernelDemand that are JSON values. None if the target's config is not available (yet). Raises
    UserError if this draft cannot be divided so."""
    draft, parallelism = _draft(recipe), recipe.parallelism
    if draft is None:
        return None
    require_divisible(draft, parallelism.tensor, parallelism.ulysses)
    demand = KernelDemand.of(draft, parallelism.tensor, parallelism.ulysses, torch.float32, recipe.training.ttt_steps)
    return {name: value for name, value in asdict(demand).items() if name != "dtype"}


def _draft(recipe: Recipe) -> DraftConfig | None:
    try:
        return shape_draft(recipe, config_of(recipe))
    except UserError:
        return None  # training will report the reason in full
