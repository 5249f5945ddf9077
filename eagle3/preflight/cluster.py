"""The job as preflight checks see it: which rank is on which node, and a way to ask all ranks. Asking works whatever
state the job's collectives are in, and names the ranks that do not answer."""

import itertools
import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from eagle3.errors import SharedUserError, UserError, in_one_line

Gather = Callable[[Any], list[Any]]
Value = TypeVar("Value")
SHOWN = 4  # most nodes or ranks to name in one line


class Finding(NamedTuple):
    """The result of a check. A note is left for a person to judge; a failure comes with a remedy."""

    name: str
    state: Literal["ok", "failed", "note"]
    found: str
    remedy: str = ""


class Flaw(SharedUserError):
    """A check that failed. Every rank raises it."""

    def __init__(self, name: str, found: str, remedy: str) -> None:
        super().__init__(f"{name}: {found}; {remedy}")
        self.finding = Finding(name, "failed", found, remedy)


@dataclass(frozen=True)
class Cluster:
    """The ranks of a job, and a way to ask them."""

    rank: int  # rank of this process
    nodes: tuple[str, ...]  # node of every rank
    # A collective that returns the values of all ranks, in rank order, as JSON stores them (a tuple may become a list).
    gather: Gather

    @property
    def leaders(self) -> list[int]:
        """The first rank of each node."""
        return [self.nodes.index(node) for node in self.ranks]

    @property
    def ranks(self) -> dict[str, list[int]]:
        """The ranks of each node."""
        return owners(enumerate(self.nodes))

    def ask(
        self, name: str, work: Callable[[], Any], remedy: str, ranks: Collection[int] | None = None
    ) -> dict[int, Any]:
        """What `work` returns on these ranks (default: all), as JSON stores it. Collective. Raises Flaw on every rank,
        so that none waits for one that failed, if `work` raises UserError, or the operating system, the GPU or a
        collective fails, on one."""
        answer = None
        if ranks is None or self.rank in ranks:
            try:
                answer = {"answer": work()}
            except (OSError, UserError, torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError) as error:
                answer = {"trouble": in_one_line(error)}
        answers = {rank: each for rank, each in enumerate(self.gather(answer)) if each is not None}
        if troubles := {rank: each["trouble"] for rank, each in answers.items() if "trouble" in each}:
            where = self.where(troubles) if ranks == self.leaders else self.named(troubles)
            raise Flaw(name, f"{where}: {next(iter(troubles.values()))}", remedy)
        return {rank: each["answer"] for rank, each in answers.items()}

    def named(self, ranks: Collection[int]) -> str:
        """Names the ranks: `node a`, `nodes a, b`, or `rank 3 on a` for some of a node's ranks."""
        whole = [node for node, all_of_it in self.ranks.items() if set(all_of_it) <= set(ranks)]
        parts = [f"rank {rank} on {self.nodes[rank]}" for rank in ranks if self.nodes[rank] not in whole]
        if len(whole) == len(self.ranks) > 1:
            return "every node"
        places = [*whole, *parts]
        more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
        prefix = "" if not whole else "node " if len(whole) == 1 else "nodes "
        return prefix + ", ".join(places[:SHOWN]) + more

    def where(self, leaders: Collection[int]) -> str:
        """Names the nodes that these ranks lead, for questions asked once per node."""
        return self.named([rank for leader in leaders for rank in self.ranks[self.nodes[leader]]])


def owners(values: Iterable[tuple[int, Value]]) -> dict[Value, list[int]]:
    """Groups (rank, value) pairs into the ranks that have each value."""
    groups: dict[Value, list[int]] = {}
    for rank, value in values:
        groups.setdefault(value, []).append(rank)
    return groups


class StoreGather:
    """Gathers through the job's key-value store, over a TCP connection from each rank to the first. This works even if
    NCCL or Gloo does not, and shows which ranks are missing. Values are JSON, because anybody who can connect to the
    store can write to it, and a pickle would run code."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self.store, self.rank, self.world, self.rounds = store, rank, world, itertools.count()

    def __call__(self, value: Any) -> list[Any]:
        """Gathers `value` from every rank. Raises SharedUserError if a rank sends nothing within the store's timeout,
        or something that is not JSON."""
        name = f"round {next(self.rounds)}"
        self.store.set(f"{name} of {self.rank}", json.dumps(value))
        try:
            if self.rank == 0:
                values = self.store.multi_get([f"{name} of {rank}" for rank in range(self.world)])
                self.store.set(name, json.dumps([json.loads(each) for each in values]))
            return json.loads(self.store.get(name))
        except (ValueError, RecursionError) as error:
            raise SharedUserError(
                "job: its store holds what none of its processes wrote; start it where nobody else can reach its "
                "network"
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
        """Leaves the store. The first rank holds the store, so it leaves last. Collective."""
        self(None)
        if self.rank:
            self.store.set(f"rank {self.rank} leaves", b"")
        else:
            self.store.wait([f"rank {rank} leaves" for rank in range(1, self.world)])
