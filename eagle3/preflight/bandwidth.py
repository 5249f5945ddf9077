"""Measures the speed of all-reduces inside nodes, between nodes, and over all ranks, and checks the sums."""

import datetime
import statistics
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from eagle3.preflight.cluster import Cluster, Finding

CUDA_BYTES, CPU_BYTES = 256 * 2**20, 8 * 2**20  # large enough for latency not to matter
WARM_UPS, REPETITIONS = 2, 5
PATIENCE = datetime.timedelta(seconds=60)  # for one all-reduce, which takes milliseconds
PATTERN = 1021  # a prime, so that a shift by any power of two is noticed

# The numbers below come from data sheets, in GB/s in one direction; this project has not measured them. NCCL reaches
# more than half of them. An eighth of such a number separates two cases: traffic on a detour (a slower link, host
# memory, TCP instead of RDMA) stays below, and traffic on a busy network stays above.
FAR_BELOW = 1 / 8
NVLINK = {"A100-SXM": 300.0, "H100 80GB HBM3": 450.0, "H200": 450.0, "B200": 900.0}
WITHOUT_NVLINK = ("NVL", "PCIe")  # variants of these cards: pairs may have a bridge, but no whole node does
PCIE = 32.0  # generation 4, 16 lanes: in any server, a GPU reaches its neighbours at least this fast
ETHERNET = 8.0  # assumed if no InfiniBand or RoCE port is up; an eighth of it is 80% of a 10 Gb/s line
REMEDY = (
    "run again with NCCL_DEBUG=INFO and read which transport it takes; NCCL_SOCKET_IFNAME names the network interface, "
    "NCCL_IB_HCA the InfiniBand cards (ibstat), nvidia-smi topo -m the links inside a node"
)


def check_all_reduce(cluster: Cluster, device: torch.device, timeout: datetime.timedelta) -> Iterator[Finding]:
    """Checks all-reduces inside nodes, between nodes, and over all ranks. Collective. timeout: for the groups formed
    here; must be longer than PATIENCE, so that a rank can report what went wrong."""
    if len(cluster.nodes) == 1:
        yield Finding("all-reduce", "note", "one process, nothing to add up")
        return
    inside = [ranks for ranks in cluster.ranks.values() if len(ranks) > 1]
    between = [cluster.leaders] if len(cluster.ranks) > 1 else []
    circles = (
        ("all-reduce inside a node", inside),
        ("all-reduce between nodes", between),
        ("all-reduce of all", [[*range(len(cluster.nodes))]] if inside and between else []),
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    for label, rings in circles:
        if not rings:
            continue
        groups = [dist.new_group(ranks, timeout=timeout) for ranks in rings]  # every rank must form all groups
        mine = [group for ranks, group in zip(rings, groups, strict=True) if cluster.rank in ranks]
        measured = cluster.ask(label, lambda mine=mine: measure(*mine, device), REMEDY, [*chain(*rings)])
        ports = 0.0 if "inside" in label else max(cluster.gather(port_speed()))
        spec = None if name is None else link_speed(name) if "inside" in label else ports or ETHERNET
        yield judge_reduction(cluster, label, measured, spec)


def measure(group: dist.ProcessGroup, device: torch.device) -> tuple[float, bool]:
    """Times all-reduces in a group. Returns their bus bandwidth in GB/s (2 (n - 1) / n * bytes / seconds / 1e9), and
    whether every sum was exact. Raises dist.DistError if one does not finish."""
    count, size = (CUDA_BYTES if device.type == "cuda" else CPU_BYTES) // 4, group.size()
    # Whole numbers, whose fp32 sums are exact in any order as long as they stay below 2^24 (up to 4,800 ranks).
    pattern = (torch.arange(count, device=device) % PATTERN).float()
    mine, expected = pattern + group.rank(), pattern * size + size * (size - 1) // 2
    total, seconds, exact = torch.empty_like(mine), [], True
    for _ in range(WARM_UPS + REPETITIONS):
        total.copy_(mine)
        _finish(device)
        start = time.perf_counter()
        dist.all_reduce(total, group=group, async_op=True).wait(PATIENCE)
        _finish(device)
        seconds.append(time.perf_counter() - start)
        exact = torch.equal(total, expected) and exact
    traffic = 2 * (size - 1) / size * 4 * count
    return traffic / statistics.median(seconds[WARM_UPS:]) / 1e9, exact


def judge_reduction(cluster: Cluster, name: str, results: dict[int, tuple[float, bool]], spec: float | None) -> Finding:
    """Judges what `measure` returned. spec: the link's GB/s by data sheet; None: the speed is not judged, as on
    CPUs."""
    if wrong := [rank for rank, (_, exact) in results.items() if not exact]:
        return Finding(
            name,
            "failed",
            f"the sum is wrong on {cluster.named(wrong)}: a GPU or a link corrupts data",
            "take the node out of the job, and look at dmesg and nvidia-smi -q there",
        )
    speed, rank = min((speed, rank) for rank, (speed, _) in results.items())
    if spec is None or speed >= spec * FAR_BELOW:
        detail = f"{speed:.2f} GB/s of bus bandwidth (least: {cluster.named([rank])}), the sums are exact"
        return Finding(name, "note" if spec is None else "ok", detail)
    detail = f"{speed:.2f} GB/s of bus bandwidth on {cluster.named([rank])}, far below the {spec:.0f} of a data sheet"
    return Finding(name, "failed", detail, REMEDY)


def link_speed(gpu: str) -> float:
    """GB/s from such a GPU to the others in its node, by data sheet."""
    if any(mark in gpu.replace("NVLink", "") for mark in WITHOUT_NVLINK):
        return PCIE
    return next((speed for mark, speed in NVLINK.items() if mark in gpu), PCIE)


def port_speed(root: Path = Path("/sys/class/infiniband")) -> float:
    """GB/s of this machine's fastest InfiniBand or RoCE port that is up, as the kernel reports it ("400 Gb/sec (4X
    NDR)"); 0 if there is none."""
    speeds = (
        float(rate.read_text(encoding="utf-8").split()[0]) / 8
        for rate in root.glob("*/ports/*/rate")
        if "ACTIVE" in (rate.parent / "state").read_text(encoding="utf-8")
    )
    return max(speeds, default=0.0)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
