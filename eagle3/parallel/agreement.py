"""Proof that ranks which must hold the same thing do, before they train on it for days."""

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from eagle3.errors import SharedUserError


def require_agreement(what: str, identity: bytes, group: ProcessGroup, device: torch.device, remedy: str) -> None:
    """Raise SharedUserError on every rank of the job, unless `identity` is the same on all ranks of each `group`.

    Every rank of the job calls this, with the group of its own in which it must agree (the whole job's, or one of
    several that do not overlap). All of them compare everything, so that all raise, and the first one, which speaks for
    the job, does too. device: where the job's backend exchanges tensors. The line names the global ranks that differ
    from most of their group (of two, the higher), and those that they differ from.
    """
    words = torch.frombuffer(bytearray(hashlib.sha256(identity).digest()), dtype=torch.int64)
    lowest = min(dist.get_process_group_ranks(group))  # tells one group from another
    mine = torch.cat((torch.tensor([lowest]), words)).to(device)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    groups: dict[int, dict[int, tuple[int, ...]]] = {}
    for rank, (lowest, *digest) in enumerate(torch.stack(everyones).tolist()):
        groups.setdefault(lowest, {})[rank] = tuple(digest)
    differing, usual = [], []
    for digests in groups.values():
        (common, _), *others = Counter(digests.values()).most_common()
        if others:
            differing += [rank for rank, digest in digests.items() if digest != common]
            usual += [rank for rank, digest in digests.items() if digest == common]
    if differing:
        raise SharedUserError(
            f"{what}: not the same on all ranks, {_named(differing)} {'differs' if len(differing) == 1 else 'differ'} "
            f"from {_named(usual)}; {remedy}"
        )


def _named(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-3, 8`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"
