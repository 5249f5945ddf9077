"""Checks that every node is fit for the job: GPUs and open files."""

import resource

import torch

from eagle3.preflight.cluster import Cluster, Finding, Flaw, owners

# A rank opens sockets to all others, its shards, and pipes to its workers: hundreds on one node, thousands on many.
LEAST_OPEN_FILES = 4096


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
    least, low = min(owners(enumerate(cluster.gather(open_files()))).items())
    if least < LEAST_OPEN_FILES:
        raise Flaw(
            "open files",
            f"{least} allowed on {cluster.named(low)}, {LEAST_OPEN_FILES} needed",
            f"run ulimit -n {LEAST_OPEN_FILES} before the start; if that is refused, set LimitNOFILE= of the service, "
            "/etc/security/limits.conf, or --ulimit nofile= of the container",
        )
    return Finding("open files", "ok", f"{least} allowed")
