"""One training step on a synthetic stream under any layout, for the other benchmarks to measure."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from eagle3.attention.ring import RingMode
from eagle3.draft.config import DraftConfig
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import UserError
from eagle3.jobs.gate import require_divisible
from eagle3.objective.distill import StepWeights
from eagle3.objective.losses import BatchCounts, LossConfig, batch_metrics, batch_sum, step_weights
from eagle3.objective.model import DraftObjective, MicroBatch, micro_batch
from eagle3.objective.recompute import MemoryPlan
from eagle3.objective.streaming import Residence
from eagle3.parallel.sequence import Reach, SequencePlan, SequenceSharding, Stream, plan_sequence
from eagle3.parallel.topology import Topology, start_distributed
from eagle3.planning.step import Planned, Sizes
from eagle3.states.rows import LastHidden, Rows
from eagle3.targets.logits import summarize_teacher

# A document as runs of tokens: (length, are they supervised?).
Runs = Sequence[tuple[int, bool]]
VOCABULARY = 64


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups, and the number of key/value heads if it is not the draft's own."""

    name: str = "one process"
    tensor: int = 1
    ulysses: int = 1
    ring: int = 1
    mode: RingMode = "gather"
    kv_heads: int | None = None

    @classmethod
    def parse(cls, name: str) -> "Layout":
        """Parse sizes joined by dashes, as in `u2`, `r4-p2p`, `tp2-u2`, `u2-r2-gather`, `u4-kv2`. Raises UserError."""
        sizes = {"tp": "tensor", "u": "ulysses", "r": "ring", "kv": "kv_heads"}
        values: dict[str, Any] = {}
        for part in name.split("-"):
            match = re.fullmatch(r"(tp|u|r|kv)([1-9]\d*)|gather|p2p", part)
            if not match:
                raise UserError(
                    f"layout: {name!r} has {part!r}; write for example u2, r4-p2p, tp2-u2 or u2-r2-gather-kv2"
                )
            values |= {sizes[match[1]]: int(match[2])} if match[1] else {"mode": part}
        return cls(name, **values)

    @property
    def ranks(self) -> int:
        return self.tensor * self.ulysses * self.ring

    def planned(self, config: DraftConfig, steps: int, dtype: torch.dtype, memory: MemoryPlan) -> Planned:
        """A step under this layout, as the planner describes it."""
        sizes = Sizes(self.tensor, self.ulysses, self.ring)
        return Planned(config, steps, dtype, sizes, self.mode, memory, device="cpu")

    def draft(self, config: DraftConfig) -> DraftConfig:
        """The draft with this layout's key/value heads. Raises UserError if the groups cannot share it."""
        config = replace(config, num_key_value_heads=self.kv_heads or config.num_key_value_heads)
        require_divisible(config, self.tensor, self.ulysses)
        return config

    def start(self) -> Topology:
        """Form the groups, with one thread per rank, so that layouts can be compared."""
        topology = start_distributed(self.tensor, self.ulysses, self.ring)
        torch.set_num_threads(1)
        return topology


class Prepared(NamedTuple):
    """Everything that a step needs. `plan` and `batch` are this rank's, `counts` the whole stream's."""

    objective: DraftObjective
    batch: MicroBatch
    weights: StepWeights
    counts: BatchCounts
    plan: SequencePlan


class Step(NamedTuple):
    """The outcome of one forward and backward pass."""

    seconds: float  # until the last rank has finished
    # Processor time of the rank that takes most: how long the step would last if each rank had a core and never waited.
    cpu_seconds: float
    loss: float  # of the whole stream


def draft_config(heads: int, kv_heads: int, head_dim: int) -> DraftConfig:
    hidden = heads * head_dim
    return DraftConfig(
        hidden_size=hidden,
        target_hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=VOCABULARY,
        draft_vocab_size=VOCABULARY,
        max_position_embeddings=2**20,
    )


def pack(documents: Sequence[Runs], vocabulary: int = VOCABULARY) -> Stream:
    """A stream of random tokens with the documents' loss masks."""
    generator = torch.Generator().manual_seed(0)
    masks = [torch.cat([torch.full((length,), supervised) for length, supervised in runs]) for runs in documents]
    return Stream.pack(
        [torch.randint(vocabulary, (len(mask),), generator=generator) for mask in masks], masks, "reference"
    )


def turns(tokens: int, prompt: int, answer: int) -> Runs:
    """A document in which prompts and answers of these lengths take turns."""
    rounds, rest = divmod(tokens, prompt + answer)
    return [(prompt, False), (answer, True)] * rounds + [(rest, False)]


def prepare(
    stream: Stream,
    config: DraftConfig,
    steps: int,
    layout: Layout,
    topology: Topology,
    dtype: torch.dtype = torch.float32,
    query_selection: str = "supervised",
    memory: MemoryPlan = MemoryPlan(),
    residence: Residence = "device",
) -> Prepared:
    """Prepare a step that has the same draft and the same random hidden states under every layout. The target's
    vocabulary begins with the draft's."""
    generator = torch.Generator().manual_seed(1)
    aux = torch.randn(stream.tokens, 3 * config.target_hidden_size, generator=generator)
    last = torch.randn(stream.tokens, config.target_hidden_size, generator=generator)
    head = torch.randn(config.vocab_size, config.target_hidden_size, generator=generator)
    sharding = SequenceSharding(layout.ulysses, layout.ring, query_selection=query_selection)
    plan = plan_sequence(stream, Reach(steps, config.window), sharding, topology.sequence.rank())
    rows = aux[plan.rows], last[plan.teacher]
    return prepare_rows(stream, plan, *rows, head, config, layout, topology, dtype, memory, residence)


def prepare_rows(
    stream: Stream,
    plan: SequencePlan,
    aux: torch.Tensor,
    last: torch.Tensor,
    head: torch.Tensor,
    config: DraftConfig,
    layout: Layout,
    topology: Topology,
    dtype: torch.dtype = torch.float32,
    memory: MemoryPlan = MemoryPlan(),
    residence: Residence = "device",
) -> Prepared:
    """Prepare a step from hidden states at the plan's own rows: aux [rows, 3Ht], last [teacher rows, Ht]. head: the
    target's, [V, Ht]."""
    size = config.draft_vocab_size
    torch.manual_seed(2)
    draft = Eagle3Draft(config, topology.modules, dtype)
    with torch.no_grad():
        for weight in draft.parameters():
            weight *= 4 if weight.dim() > 1 else 1  # away from the nearly uniform attention that a draft begins with
    own = head[:size].chunk(topology.tensor.size())[topology.tensor.rank()].to(topology.device, dtype, copy=True)
    draft_id = torch.where(torch.arange(config.vocab_size) < size, torch.arange(config.vocab_size), -1)
    rows = Rows(aux, LastHidden(last, *summarize_teacher(last, head)))
    batch = micro_batch(stream, plan, rows, draft_id, own, dtype).to(topology.device, residence)
    counts = batch_sum([batch.counts(topology.sequence)], topology)
    objective = DraftObjective(draft.to(topology.device), topology, layout.mode, memory)
    return Prepared(objective, batch, step_weights(LossConfig(), counts, None), counts, plan)


def run_step(prepared: Prepared, topology: Topology) -> Step:
    """Run forward and backward on the stream. Leaves this rank's gradients in the draft."""
    prepared.objective.zero_grad()
    dist.barrier(topology.stream)
    began, cpu_began = time.perf_counter(), time.process_time()
    distilled = prepared.objective(prepared.batch, prepared.weights)
    distilled.surrogate.backward()
    cpu_seconds = torch.tensor(time.process_time() - cpu_began, dtype=torch.float64, device=topology.device)
    dist.barrier(topology.stream)
    seconds = time.perf_counter() - began
    dist.all_reduce(cpu_seconds, dist.ReduceOp.MAX, topology.stream)
    metrics = batch_metrics(LossConfig(), batch_sum([distilled.sums], topology), prepared.counts)
    return Step(seconds, float(cpu_seconds), metrics.loss)
