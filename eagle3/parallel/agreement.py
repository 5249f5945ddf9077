"""Proof that ranks which must hold the same thing do, before they train on it for days."""

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from eagle3.errors import SharedUserError


def require_agreement(what: str, identity: bytes, device: torch.device, remedy: str) -> None:
    """Raise SharedUserError on every rank of the job, which all call this, unless `identity` is the same on all.

    device: where the job's backend exchanges tensors. The line names the ranks that differ from most (of two, the higher),
    and those that they differ from.
    """
    mine = torch.frombuffer(bytearray(hashlib.sha256(identity).digest()), dtype=torch.int64).to(device)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    digests = [tuple(digest) for digest in torch.stack(everyones).tolist()]
    (common, _), *others = Counter(digests).most_common()
    if others:
        differing = [rank for rank, digest in enumerate(digests) if digest != common]
        usual = [rank for rank, digest in enumerate(digests) if digest == common]
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
