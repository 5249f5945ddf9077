"""Checks that every node is fit for the job: GPUs and open files."""

import resource
from typing import NamedTuple

import torch

from eagle3.preflight.cluster import Cluster, Finding, owners, troubled

# A rank opens sockets to all others, its shards, and pipes to its workers: hundreds on one node, thousands on many.
LEAST_OPEN_FILES = 4096


class GpuSeen(NamedTuple):
    """One rank's GPU."""

    name: str
    free: int  # bytes; `total` likewise
    total: int


def check_gpus(cluster: Cluster, device: torch.device) -> Finding:
    """Checks that all ranks have the same GPUs. Collective. (That each has one to itself, NCCL checks.)"""

    def look() -> GpuSeen:
        return GpuSeen(torch.cuda.get_device_name(device), *torch.cuda.mem_get_info(device))

    gpus = cluster.ask(look if device.type == "cuda" else None, GpuSeen._make)
    if not gpus:
        return Finding("gpus", "note", "none: this is a CPU job, for tests and demonstrations")
    if len(gpus) < len(cluster.nodes):
        without = [rank for rank in range(len(cluster.nodes)) if rank not in gpus]
        return Finding(
            "gpus",
            "failed",
            f"no GPU for {cluster.named(without)}",
            "look at nvidia-smi and CUDA_VISIBLE_DEVICES there",
        )
    if reasons := troubled(gpus):
        rank, reason = next(iter(reasons.items()))
        return Finding("gpus", "failed", f"{cluster.named([rank])}: {reason}", "look at nvidia-smi there")
    kinds = owners((rank, gpu.name) for rank, gpu in gpus.items())
    if len(kinds) > 1:
        return Finding(
            "gpus",
            "failed",
            "; ".join(f"{kind} on {cluster.named(ranks)}" for kind, ranks in kinds.items()),
            "use nodes with the same GPUs: the slowest one sets the pace of all",
        )
    free, rank = min((gpu.free, rank) for rank, gpu in gpus.items())
    return Finding(
        "gpus",
        "ok",
        f"{len(gpus)} x {next(iter(kinds))} on {len(cluster.ranks)} node(s); least free memory {free / 2**30:.1f} of "
        f"{gpus[rank].total / 2**30:.1f} GiB ({cluster.named([rank])})",
    )


def open_files() -> int:
    """The number of files that this process may have open. Raises the soft limit to LEAST_OPEN_FILES if the hard limit
    allows; only an administrator can raise the hard limit. (Shells often start with a soft limit of 1024 and a hard
    limit of a million.)"""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = LEAST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, LEAST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return LEAST_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def check_open_files(cluster: Cluster) -> Finding:
    """Checks that every rank may have enough files open. Collective."""
    least, low = min(owners(cluster.ask(open_files).items()).items())
    if least >= LEAST_OPEN_FILES:
        return Finding("open files", "ok", f"{least} allowed")
    return Finding(
        "open files",
        "failed",
        f"{least} allowed on {cluster.named(low)}, {LEAST_OPEN_FILES} needed",
        f"run ulimit -n {LEAST_OPEN_FILES} before the start; if that is refused, set LimitNOFILE= of the service, "
        "/etc/security/limits.conf, or --ulimit nofile= of the container",
    )
