"""Chooses a job's kernels. On CUDA each candidate has to prove itself on the GPU at hand before it is trusted, and the
fastest right one is used. On a CPU the choice is fixed."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from eagle3.attention.block import BlockKernels, block_candidates, own_candidates
from eagle3.attention.cuda import has_flash4
from eagle3.console import Console
from eagle3.draft.pointwise import pointwise_candidates
from eagle3.durable import lock
from eagle3.errors import SharedUserError
from eagle3.kernels.cases import prove_blocks, prove_loss, prove_own, prove_pointwise
from eagle3.kernels.proof import KernelDemand, KernelVerdict
from eagle3.objective.distill import loss_candidates
from eagle3.objective.model import Kernels
from eagle3.parallel.topology import Topology, gathered

OWN, POINTWISE, LOSS = "own", "pointwise", "loss"
OTHERS = (OWN, POINTWISE, LOSS)
OPTIONAL = ("banded", "windowed")  # kinds of block that can be cut into others
FLASH4_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE"
NONE_RIGHT = "free memory of the GPU, update torch and the driver, or use another GPU"  # remedy

# By kind of block, and for `OTHERS`: the kernels that may be used, the usual ones first; the verdicts on them; and the
# names of those that are used.
Candidates = Mapping[str, Sequence[Any]]
Table = Mapping[str, Sequence[KernelVerdict]]
Names = Mapping[str, str | None]


def candidates_for(demand: KernelDemand, device: torch.device, pinned: str = "auto") -> Candidates:
    """pinned: name of the kernel to use for all that it can compute. Raises SharedUserError if that is nothing."""
    candidates: dict[str, list[Any]] = {
        **block_candidates(device, demand.dtype, demand.head_dim),
        OWN: own_candidates(device, demand.dtype) if demand.steps > 1 else [],
        POINTWISE: pointwise_candidates(device, demand.dtype) if demand.steps else [],
        LOSS: loss_candidates(device, demand.dtype) if demand.columns else [],
    }
    if demand.window is None:
        candidates["windowed"] = []
    return candidates if pinned == "auto" else _pinned(candidates, pinned)


def _pinned(candidates: Candidates, name: str) -> Candidates:
    of_name = {kind: [each for each in kernels if each.name == name] for kind, kernels in candidates.items()}
    if not any(of_name.values()):
        known = {each.name for kind, kernels in candidates.items() if kind not in OTHERS for each in kernels}
        raise SharedUserError(
            f"training.kernels: {name!r} does not run on this device, or not in this training.dtype, or not with "
            f"this head_dim, or is not installed; set it to {', '.join(sorted(known - {'cpu'}))} or auto"
        )
    # What the kernel cannot compute is left to the usual ones; bands are cut into blocks that it may compute.
    return {kind: of_name[kind] or ([] if kind in OPTIONAL else each) for kind, each in candidates.items()}


@torch.enable_grad()
def prove(candidates: Candidates, demand: KernelDemand, topology: Topology, timed: bool) -> Table:
    """Verdicts on all of them, from this rank alone."""
    provers = {kind: partial(prove_blocks, kind) for kind in candidates}
    provers |= {OWN: prove_own, POINTWISE: prove_pointwise, LOSS: partial(prove_loss, group=topology.alone)}
    return {
        kind: provers[kind](kernels, demand, topology.device, timed) if kernels else []
        for kind, kernels in candidates.items()
    }


@dataclass(frozen=True)
class Choice:
    """The kernels that a job uses, and the verdicts on all candidates (none on a CPU, where the choice is fixed)."""

    kernels: Kernels
    names: Names
    table: Table

    @property
    def line(self) -> str:
        """For example `attention: flash (full, causal), efficient (masked), fused (own); pointwise: fused; loss: fused`
        (without a draft, the first part)."""
        kinds: dict[str, list[str]] = {}
        for kind, name in self.names.items():
            if kind not in (POINTWISE, LOSS) and name is not None:
                kinds.setdefault(name, []).append(kind)
        attention = ", ".join(f"{name} ({', '.join(of)})" for name, of in kinds.items())
        return f"attention: {attention}" + "".join(
            f"; {kind}: {self.names[kind]}" for kind in (POINTWISE, LOSS) if self.names[kind]
        )

    @property
    def warnings(self) -> list[str]:
        """A line for each kernel that is wrong and therefore not used."""
        wrong = ((kind, each) for kind, verdicts in self.table.items() for each in verdicts if not each.right)
        return [f"kernel {each.kernel} is not used for {described(kind)}: {each.reason}" for kind, each in wrong]

    def tell(self, console: Console, whose: str = "") -> None:
        """Says what was chosen, if anything was tried, and warns of what is wrong. whose: a prefix."""
        for warning in self.warnings:
            console.warn(whose + warning)
        if self.table:
            console(f"{whose}kernels, each held to the definition on this GPU: {self.line}")


def choose_kernels(
    demand: KernelDemand,
    topology: Topology,
    cache: Path | None = None,
    pinned: str = "auto",
    before: Names | None = None,
    among: dist.ProcessGroup | None = None,
) -> Choice:
    """The kernels of a job. Collective over `among` (by default, the job). On CUDA all candidates are proven first.
    Ranks that disagree use what is right on all of them.

    cache: a folder for FlashAttention 4's compiled kernels.
    pinned: see candidates_for.
    before: the kernels that the job used before it was resumed. They are used again if they are still right.

    Raises SharedUserError if no kernel is right for something that the job needs.
    """
    device = topology.device
    candidates = candidates_for(demand, device, pinned)
    if device.type != "cuda":
        names = {kind: kernels[0].name if kernels else None for kind, kernels in candidates.items()}
        return Choice(_named(candidates, names), names, {})
    if cache and has_flash4(device):
        _keep_compiled(cache / "flash4")
    table = prove(candidates, demand, topology, timed=True)
    return pick(candidates, agreement(gathered(table, among)), before)


def _keep_compiled(folder: Path) -> None:
    """Lets FlashAttention 4, which is imported later, keep its compiled kernels in a folder, if it can lock files."""
    with suppress(OSError):  # otherwise they are compiled anew
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            if lock(file) == "held":
                os.environ.setdefault(f"{FLASH4_CACHE}_ENABLED", "1")
                os.environ.setdefault(f"{FLASH4_CACHE}_DIR", str(folder))


def agreement(tables: Sequence[Table]) -> Table:
    """One table from those of all ranks, of the kernels that all of them have. A kernel is as wrong, and as slow, as on
    the worst rank."""
    by_name = {
        kind: [[each for table in tables for each in table[kind] if each.kernel == of.kernel] for of in verdicts]
        for kind, verdicts in tables[0].items()
    }
    return {kind: [_worst(each) for each in of if len(each) == len(tables)] for kind, of in by_name.items()}


def _worst(verdicts: Sequence[KernelVerdict]) -> KernelVerdict:
    rank, worst = max(enumerate(verdicts), key=lambda pair: (not pair[1].right, pair[1].error))
    wrong = sum(not each.right for each in verdicts)
    if 0 < wrong < len(verdicts):
        where = f"on rank {rank} (wrong on {wrong} of {len(verdicts)})"
        return worst._replace(reason=f"{worst.reason} {where}", seconds=None)
    seconds = [each.seconds for each in verdicts if each.seconds is not None]
    return worst._replace(seconds=max(seconds, default=None))


def pick(candidates: Candidates, table: Table, before: Names | None = None) -> Choice:
    """The fastest of the right kernels (without times, the first). Raises SharedUserError if there are none."""
    names = {}
    for kind, verdicts in table.items():
        best = fastest(verdicts)
        if best is None and verdicts and kind not in OPTIONAL:
            reasons = "; ".join(f"{each.kernel}: {each.reason}" for each in verdicts)
            raise SharedUserError(
                f"kernels: none computes {described(kind)} rightly on this machine ({reasons}); {NONE_RIGHT}"
            )
        earlier = (before or {}).get(kind)
        kept = any(each.right and each.kernel == earlier for each in verdicts)
        names[kind] = earlier if kept else best and best.kernel
    return Choice(_named(candidates, names), names, table)


def _named(candidates: Candidates, names: Names) -> Kernels:
    by_name = {kind: {each.name: each for each in kernels} for kind, kernels in candidates.items()}
    found = {kind: by_name[kind].get(name) for kind, name in names.items()}
    others = [found.pop(kind) for kind in OTHERS]
    return Kernels(BlockKernels(**found), *others)


def fastest(verdicts: Sequence[KernelVerdict]) -> KernelVerdict | None:
    """The fastest of the right ones (without times, the first); None if none is right."""
    return min((each for each in verdicts if each.right), key=lambda each: each.seconds or 0.0, default=None)


def changes(before: Names, now: Names) -> str:
    """What is different, in words; empty if nothing is."""
    kinds = [kind for kind, name in now.items() if kind in before and before[kind] != name]
    return ", ".join(f"{described(kind)}: {before[kind] or 'none'}, now {now[kind] or 'none'}" for kind in kinds)


def described(kind: str) -> str:
    return {LOSS: "the loss", OWN: "own keys", POINTWISE: "position-wise work"}.get(kind, f"{kind} blocks of attention")


def parsed(values: dict[str, list[list[Any]]]) -> Table:
    """A table from JSON."""
    return {kind: [KernelVerdict(*verdict) for verdict in verdicts] for kind, verdicts in values.items()}
