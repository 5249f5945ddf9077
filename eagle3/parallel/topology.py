"""The process groups that Megatron-core builds and modules receive, the adapter that passes them to DeepSpeed, and
ways for ranks to agree."""

import datetime
import hashlib
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from eagle3.errors import SharedUserError, UserError, mistake_of
from eagle3.parallel.sizes import check_sizes, launched
from eagle3.patches import set_timeout, without_compiled_collective

# How long a job's processes wait for one another before there is a watchdog. They can start minutes apart if nodes read
# their packages from one busy disk.
FORMING = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class Topology:
    """The process groups of this rank. Ranks are ordered tensor, Ulysses, ring, data, the fastest-changing first."""

    tensor: dist.ProcessGroup  # ranks that share each layer's weights
    ulysses: dist.ProcessGroup  # neighbours in `sequence`, which exchange heads for tokens
    ring: dist.ProcessGroup  # ranks in `sequence` that exchange keys and values
    sequence: dist.ProcessGroup  # ulysses x ring: ranks that share a stream
    data: dist.ProcessGroup  # ranks with the same part of different streams
    batch: dist.ProcessGroup  # data x sequence: ranks over which gradients and counts are summed
    stream: dist.ProcessGroup  # tensor x sequence: all ranks that work on the same stream
    alone: dist.ProcessGroup  # this rank by itself
    device: torch.device

    @property
    def modules(self) -> ProcessGroupCollection:
        """The groups in the form that Megatron-core's modules expect."""
        return ProcessGroupCollection(tp=self.tensor, cp=self.sequence)

    @property
    def modules_alone(self) -> ProcessGroupCollection:
        """The groups for a module that is whole on this rank and independent of the other ranks."""
        return ProcessGroupCollection(tp=self.alone, cp=self.alone)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and prints."""
        return dist.get_rank() == 0


class DeepSpeedGroups:
    """Implements DeepSpeed's `mpu` interface with the groups of a Topology.

    With it, ZeRO-2 sums gradients over the sequence ranks and averages them over the data ranks. DeepSpeed's two other
    ways to pass groups (`mesh_param`, `sequence_parallel_size`) omit the sum over sequence ranks.
    """

    def __init__(self, topology: Topology) -> None:
        roles = {
            "model_parallel": topology.tensor,
            "tensor_model_parallel": topology.tensor,
            "data_parallel": topology.data,
            "sequence_parallel": topology.sequence,
            "sequence_data_parallel": topology.batch,
        }
        for role, group in roles.items():
            setattr(self, f"get_{role}_group", lambda group=group: group)
            setattr(self, f"get_{role}_world_size", lambda group=group: group.size())
            setattr(self, f"get_{role}_rank", lambda group=group: group.rank())


def start_distributed(
    tensor: int = 1,
    ulysses: int = 1,
    ring: int = 1,
    timeout: datetime.timedelta = FORMING,
) -> Topology:
    """Joins the job that `deepspeed` or `torchrun` started, or becomes a job with one process, and forms the groups.

    A second call in the same job forms the groups anew. Raises UserError if another process does not join or
    ends meanwhile, and if the sizes do not fit the job.

    tensor, ulysses, ring: sizes of these groups; the job is data-parallel beyond them.
    timeout: how long to wait for the other processes, and in a collective outside of `patient`.
    """
    _require_launch()
    check_sizes("parallelism", tensor, ulysses, ring, launched("WORLD_SIZE", 1))
    device = _own_device()
    with meeting():
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            if launched("WORLD_SIZE", 1) == 1:  # no port that others could reach: the store is in its own memory
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
            deepspeed.init_distributed(
                dist_backend=backend,
                auto_mpi_discovery=False,
                verbose=False,
                timeout=timeout,
            )
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            context_parallel_size=ulysses * ring,
            hierarchical_context_parallel_sizes=[ulysses, ring] if ulysses > 1 and ring > 1 else None,
            distributed_timeout_minutes=timeout.total_seconds() / 60,
            create_gloo_process_groups=False,
        )
    sequence = parallel_state.get_context_parallel_group()
    alone = dist.new_group([dist.get_rank()], timeout=timeout, use_local_synchronization=True)
    if ulysses > 1 and ring > 1:
        inner, outer = parallel_state.get_hierarchical_context_parallel_groups()
    else:
        inner, outer = (sequence if size > 1 else alone for size in (ulysses, ring))
    return Topology(
        tensor=parallel_state.get_tensor_model_parallel_group(),
        ulysses=inner,
        ring=outer,
        sequence=sequence,
        data=parallel_state.get_data_parallel_group(),
        batch=parallel_state.get_data_parallel_group(with_context_parallel=True),
        stream=parallel_state.get_tensor_and_context_parallel_group(),
        alone=alone,
        device=device,
    )


def job_store(timeout: datetime.timedelta) -> dist.Store:
    """A connection to the key-value store of the job, which is kept by the first rank or by the launcher. A job of one
    process gets a store of its own."""
    if dist.get_world_size() == 1:
        return dist.HashStore()
    return dist.TCPStore(os.environ["MASTER_ADDR"], launched("MASTER_PORT", 0), is_master=False, timeout=timeout)


def _require_launch() -> None:
    """Sets what a launcher sets, in a plain program. Raises UserError if only some of it is set, or wrongly."""
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # nothing listens there
    if missing := [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise SharedUserError(
            f"launcher: RANK is set, but not {', '.join(missing)}; start with deepspeed or torchrun, which set all of "
            "them, or unset RANK"
        )
    rank, world, port = map(launched, ("RANK", "WORLD_SIZE", "MASTER_PORT"), (0, 0, 0))
    if rank >= world or not 0 < port < 1 << 16:
        raise SharedUserError(
            f"launcher: RANK={rank} of WORLD_SIZE={world} with MASTER_PORT={port} cannot be; start with deepspeed or "
            "torchrun, which set them, or unset RANK"
        )


def _own_device() -> torch.device:
    """This process's GPU, or the CPU with this process's share of the cores. Raises UserError if the node has more
    processes than GPUs."""
    beside = launched("LOCAL_WORLD_SIZE", launched("LOCAL_SIZE", 1))
    if not torch.cuda.is_available():
        without_compiled_collective()
        torch.set_num_threads(max(1, usable_cores() // beside))
        return torch.device("cpu")
    local = launched("LOCAL_RANK", 0)
    if max(beside, local + 1) > torch.cuda.device_count():
        raise SharedUserError(
            f"launcher: {beside} processes on a node of {torch.cuda.device_count()} GPUs; start at most one per GPU"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


@contextmanager
def meeting() -> Iterator[None]:
    """Wraps a job's first exchanges. If a process never joins, the error on the others becomes a message to the user.
    Ctrl-C ends the process at once, since torch waits where Python's handlers do not run."""
    handler = signal.getsignal(signal.SIGINT)
    if handler != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    except RuntimeError as error:
        if not is_broken(error):
            raise
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(
            f"launcher: this process cannot meet the others at {address} ({str(error).splitlines()[0]}); check whether "
            "another process ended before and what it printed, and whether all nodes can reach that address; if "
            "another job holds that port, pass --master_port to deepspeed"
        ) from error
    finally:
        signal.signal(signal.SIGINT, handler)


def is_broken(error: RuntimeError) -> bool:
    """Whether the error was caused by a process that ended or never joined. (Gloo raises a plain RuntimeError, which
    only its text identifies.)"""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


@contextmanager
def patient(topology: Topology, timeout: datetime.timedelta) -> Iterator[None]:
    """Inside the block, collectives wait for up to `timeout`. That lets a rank work alone for hours, while a
    watchdog sees which ranks die."""
    own = (part for part in vars(topology).values() if isinstance(part, dist.ProcessGroup))
    groups = {dist.group.WORLD, *own}
    set_timeout(groups, timeout)
    try:
        yield
    finally:
        set_timeout(groups, FORMING)


def stop_distributed() -> None:
    """Leaves the job together with the others. If a process left while others still talked to it, they would end with
    an error."""
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def every_core() -> Iterator[None]:
    """Inside the block, torch uses all cores, not just this process's share. Meant for work that the node's other
    processes wait for."""
    share = torch.get_num_threads()
    torch.set_num_threads(max(share, usable_cores()))
    try:
        yield
    finally:
        torch.set_num_threads(share)


def node_name() -> str:
    """The host's name, with Slurm's name for the node if that differs (several nodes may share a host)."""
    host, slurm = socket.gethostname(), os.environ.get("SLURMD_NODENAME", "")
    return host if slurm in ("", host, host.split(".")[0]) else f"{slurm}@{host}"


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The `value` of every rank, in rank order. Collective over the group (by default, the job)."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def agreed(work: Callable[[], Any], here: bool = True, group: dist.ProcessGroup | None = None) -> Any:
    """Calls `work` on the ranks that pass `here`, while the others wait. Returns the result, or None on the others.

    Collective over the group (by default, the job). A UserError on one rank, or a file that the system refuses it, is
    raised on all of them as a UserError, so that none is left waiting.
    """
    result = mistake = None
    try:
        result = work() if here else None
    except (UserError, OSError) as error:
        mistake = mistake_of(error).args
    if dist.is_initialized():
        mistake = next(filter(None, gathered(mistake, group)), None)
    if mistake:
        raise SharedUserError(*mistake)
    return result


def require_agreement(name: str, identity: bytes, remedy: str) -> None:
    """Raises SharedUserError on every rank of the job unless `identity` is the same on all. Collective.

    The message names the ranks that differ from the majority (with two ranks, the higher one).
    """
    digests = gathered(hashlib.sha256(identity).digest())
    (common, _), *others = Counter(digests).most_common()
    if others:
        differing = [str(rank) for rank, digest in enumerate(digests) if digest != common]
        ranks = f"rank {differing[0]} differs" if len(differing) == 1 else f"ranks {', '.join(differing)} differ"
        raise SharedUserError(f"{name}: not the same on all ranks, {ranks} from the others; {remedy}")
