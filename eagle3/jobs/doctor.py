"""What doctor.py finds out about a job's GPUs and kernels, and whether they compute what the golden cases say."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from eagle3.attention.cuda import FLASH4_CAPABILITY, has_flash4
from eagle3.draft.config import DraftConfig
from eagle3.errors import UserError
from eagle3.jobs.derived import config_of, shape_draft
from eagle3.jobs.gate import require_divisible
from eagle3.jobs.verify import NOT_IN_BFLOAT16, read_case, read_tensors, relative_errors, run_case, tolerance
from eagle3.kernels.choice import (
    NONE_RIGHT,
    OPTIONAL,
    Table,
    agreement,
    candidates_for,
    described,
    fastest,
    parsed,
    prove,
)
from eagle3.kernels.proof import KernelDemand, raised
from eagle3.parallel.sequence import SequenceSharding
from eagle3.parallel.topology import Topology, start_distributed
from eagle3.preflight.cluster import Cluster, Finding, Flaw, owners
from eagle3.preflight.folders import checkpoint_bytes
from eagle3.recipe.schema import Parallelism, Recipe

FLASH4_ADVICE = 'not installed; up to twice as fast as 2: pip install -e ".[flash4]" -c constraints/cuda.txt'


def check_golden(cluster: Cluster, folder: Path, deepspeed_file: Path, sizes: Parallelism) -> Iterator[Finding]:
    """A finding for fp32 and one for bf16: the golden cases in the folder, through the engine in this layout.
    Collective."""
    cases = sorted(path.parent.name for path in folder.glob("*/expected.safetensors"))
    if not cases or any(each != cases for each in cluster.gather(cases)):
        yield Finding("golden cases", "note", f"not run, because {folder} is not on every node")
        return
    try:
        topology = start_distributed(sizes.tensor, sizes.ulysses, sizes.ring)
    except UserError as error:  # as on every rank
        raise Flaw("golden cases", str(error), "change parallelism, or start as many processes") from error
    for dtype in (torch.float32, torch.bfloat16):
        name = f"golden cases in {str(dtype).removeprefix('torch.')}"
        left_out = NOT_IN_BFLOAT16 if dtype == torch.bfloat16 else ()
        try:
            shares = {
                case: _share_of_bound(folder / case, topology, dtype, deepspeed_file, sizes)
                for case in cases
                if case not in left_out
            }
        except UserError as error:  # as on every rank: the cases' heads cannot be divided like this
            yield Finding(name, "note", f"not run in this layout ({error})")
            return
        except Exception as error:  # by a kernel, a driver, a link
            raise Flaw(name, raised(error), "look at the kernels above, and at nvidia-smi") from error
        found = ", ".join(f"{case} {share:.1%}" for case, share in shares.items())
        yield _judged(name, f"errors in this layout, of what is allowed: {found}", max(shares.values()), dtype)


def _judged(name: str, found: str, worst: float, dtype: torch.dtype) -> Finding:
    """In bfloat16 rounding alone takes nine tenths of what is allowed, so a little more is left for a person to
    judge."""
    if worst <= 1:
        return Finding(name, "ok", found)
    if dtype == torch.bfloat16 and worst <= 1.5:
        return Finding(name, "note", f"{found}; rounding the weights alone takes up to 90%")
    return Finding(name, "failed", found, "do not train here; launchers/verify.py tells which tensors are wrong")


def _share_of_bound(
    case: Path, topology: Topology, dtype: torch.dtype, deepspeed_file: Path, sizes: Parallelism
) -> float:
    """The largest error of a golden case's tensors, as a share of what is allowed."""
    expected, sharding = read_tensors(case / "expected.safetensors"), SequenceSharding(sizes.ulysses, sizes.ring)
    steps = len(expected["ploss"])
    actual = run_case(read_case(case), topology, steps, dtype, deepspeed_file, sharding, sizes.ring_mode)
    return max(error / tolerance(name, dtype) for name, error in relative_errors(actual, expected).items())


def checkpoint_of(recipe: Recipe) -> int | None:
    """Bytes of one checkpoint of this recipe; None if the target's config is not available (yet)."""
    draft = _draft(recipe)
    return draft and checkpoint_bytes(recipe, draft)


def check_gpus(cluster: Cluster, device: torch.device) -> Finding:
    """Checks that all ranks have the same GPUs. Collective. (That each has one to itself, NCCL checks.)"""

    def look() -> tuple[str, int, int] | None:
        if device.type != "cuda":
            return None
        return torch.cuda.get_device_name(device), *torch.cuda.mem_get_info(device)

    gpus = cluster.ask("gpus", look, "look at nvidia-smi there")
    if not any(gpus.values()):
        return Finding("gpus", "note", "none: this is a CPU job, for tests and demonstrations")
    if without := [rank for rank, gpu in gpus.items() if gpu is None]:
        raise Flaw("gpus", f"no GPU for {cluster.named(without)}", "look at nvidia-smi and CUDA_VISIBLE_DEVICES there")
    kinds = owners((rank, name) for rank, (name, _, _) in gpus.items())
    if len(kinds) > 1:
        raise Flaw(
            "gpus",
            "; ".join(f"{kind} on {cluster.named(ranks)}" for kind, ranks in kinds.items()),
            "use nodes with the same GPUs: the slowest one sets the pace of all",
        )
    free, total, rank = min((free, total, rank) for rank, (_, free, total) in gpus.items())
    return Finding(
        "gpus",
        "ok",
        f"{len(gpus)} x {next(iter(kinds))} on {len(cluster.ranks)} node(s); least free memory {free / 2**30:.1f} of "
        f"{total / 2**30:.1f} GiB ({cluster.named([rank])})",
    )


def check_kernels(cluster: Cluster, topology: Topology, recipe: Recipe) -> Iterator[Finding]:
    """A finding for each kind of attention's blocks, for position-wise work and for the loss: every kernel's error and
    time, and which one training will use. Collective."""
    sizes = cluster.ask("kernels", lambda: _demanded(recipe), "change parallelism", [0])[0]
    if sizes is None:
        yield Finding("kernels", "note", "not tried, because the target's config is not available (yet)")
        return
    demand, device = KernelDemand(**sizes, dtype=getattr(torch, recipe.training.dtype)), topology.device
    timed = device.type == "cuda"

    def proven_here() -> Table:
        candidates = candidates_for(demand, device, recipe.training.kernels)
        return prove(candidates, demand, topology, timed)

    proven = cluster.ask("kernels", proven_here, "set training.kernels to auto, and look at nvidia-smi there")
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
    except (UserError, OSError):
        return None  # training will report the reason in full
