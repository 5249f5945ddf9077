"""The job as its preflight sees it: which rank is on which node, and answers that come from all of them or are named
as missing, whatever state the job's collectives are in."""

import datetime
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from eagle3.errors import SharedUserError
from eagle3.parallel.topology import node_name

Gather = Callable[[Any], list[Any]]
Value = TypeVar("Value")
SHOWN = 4  # nodes or ranks named in one line


class Finding(NamedTuple):
    """What a check found. A note is for a person to judge; a failure has a remedy."""

    name: str
    state: Literal["ok", "failed", "note"]
    found: str
    remedy: str = ""


class Trouble(NamedTuple):
    """What kept a rank from its answer."""

    reason: str


@dataclass(frozen=True)
class Cluster:
    """rank: this process's. nodes: the node of every rank. gather: a collective that gives each rank the values of all,
    in their order, as JSON keeps them: a tuple may come back as a list."""

    rank: int
    nodes: tuple[str, ...]
    gather: Gather

    @property
    def leaders(self) -> list[int]:
        """The first rank of each node."""
        return [self.nodes.index(node) for node in self.ranks]

    @property
    def ranks(self) -> dict[str, list[int]]:
        """Of each node."""
        return owners(enumerate(self.nodes))

    def ask(self, work: Callable[[], Any] | None, kind: Callable[[Any], Any] = lambda value: value) -> dict[int, Any]:
        """Collective: what `work` returned on each rank that has some. A Trouble stands for an answer that the system,
        the GPU or a collective refused, so that no rank waits for one that failed. kind: makes the answer of what JSON
        keeps of it; by default it stays that."""
        try:
            answer = None if work is None else {"answer": work()}
        except (OSError, torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError) as error:
            answer = {"trouble": in_one_line(error)}
        return {
            rank: Trouble(each["trouble"]) if "trouble" in each else kind(each["answer"])
            for rank, each in enumerate(self.gather(answer))
            if each is not None
        }

    def ask_leaders(self, work: Callable[[], Any]) -> dict[int, Any]:
        """Collective: `work` on the first rank of each node."""
        return self.ask(work if self.rank in self.leaders else None)

    def named(self, ranks: Sequence[int]) -> str:
        """`node a`, `nodes a, b`, or `rank 3 on a` for a part of a node's ranks."""
        whole = [node for node, all_of_it in self.ranks.items() if set(all_of_it) <= set(ranks)]
        parts = [f"rank {rank} on {self.nodes[rank]}" for rank in ranks if self.nodes[rank] not in whole]
        if len(whole) == len(self.ranks) > 1:
            return "every node"
        places = [*whole, *parts]
        more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
        prefix = "" if not whole else "node " if len(whole) == 1 else "nodes "
        return prefix + ", ".join(places[:SHOWN]) + more

    def where(self, leaders: Sequence[int]) -> str:
        """The nodes that these ranks lead, for what is asked once a node."""
        return self.named([rank for leader in leaders for rank in self.ranks[self.nodes[leader]]])


def owners(values: Iterable[tuple[int, Value]]) -> dict[Value, list[int]]:
    """Of (rank, what it has): which ranks have the same."""
    found: dict[Value, list[int]] = {}
    for rank, value in values:
        found.setdefault(value, []).append(rank)
    return found


def troubled(answers: dict[int, Any]) -> dict[int, str]:
    """The reasons of ranks that could not answer."""
    return {rank: answer.reason for rank, answer in answers.items() if isinstance(answer, Trouble)}


class StoreGather:
    """A gather through the job's key-value store, which takes a TCP connection of each rank to the first one: it works
    where NCCL or Gloo do not, and tells who is missing. Values are JSON: whoever reaches that connection may write
    there, and a pickle runs code."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self.store, self.rank, self.world, self.rounds = store, rank, world, itertools.count()

    def __call__(self, value: Any) -> list[Any]:
        """Raises SharedUserError where a rank does not come within the store's timeout, or what came is no JSON."""
        name = f"round {next(self.rounds)}"
        self.store.set(f"{name} of {self.rank}", json.dumps(value))
        try:
            if self.rank == 0:
                values = self.store.multi_get([f"{name} of {rank}" for rank in range(self.world)])
                self.store.set(name, json.dumps([json.loads(each) for each in values]))
            return json.loads(self.store.get(name))
        except (ValueError, RecursionError) as error:
            raise SharedUserError(
                "job: its store holds what none of its processes wrote; start it where nobody else reaches its network"
            ) from error
        except dist.DistError as error:
            silent = "another process"
            if self.rank == 0:
                missing = [rank for rank in range(self.world) if not self.store.check([f"{name} of {rank}"])]
                silent = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing[: 2 * SHOWN]))}"
            raise SharedUserError(
                f"job: {silent} did not answer within {self.store.timeout.total_seconds():.0f} s; look at what it "
                "printed, and at its node"
            ) from error

    def leave(self) -> None:
        """Collective. The first rank, which holds the store, goes last."""
        self(None)
        if self.rank:
            self.store.set(f"rank {self.rank} leaves", b"")
        else:
            self.store.wait([f"rank {rank} leaves" for rank in range(1, self.world)])


def store_gather(timeout: datetime.timedelta) -> StoreGather:
    """Over the store by which this job's process group was formed. timeout: what one rank may be later than another."""
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    return StoreGather(dist.PrefixStore("preflight", store), rank, world)


def join(gather: Gather, rank: int) -> Cluster:
    """Collective: find out who is where."""
    return Cluster(rank, tuple(gather(node_name())), gather)


def in_one_line(error: Exception) -> str:
    """What the operating system or a library says, without its traces."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0]
