"""The module that the engine trains: the draft with its unroll and distillation, from one stream to a loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eagle3.attention.block import BlockKernels, OwnKernel
from eagle3.attention.ring import RingMode
from eagle3.attention.ttt import TTTAttention
from eagle3.draft.model import Eagle3Draft
from eagle3.draft.pointwise import Pointwise
from eagle3.objective.distill import Distilled, StepWeights, Teacher, distill, rows_at_once
from eagle3.objective.losses import BatchCounts
from eagle3.objective.recompute import MemoryPlan, chunk_token_bytes
from eagle3.objective.softmaxes import LossKernel
from eagle3.objective.streaming import Residence, StreamedRows
from eagle3.objective.unroll import UnrollInputs, unroll, unroll_inputs
from eagle3.parallel.sequence import SequencePlan, Stream
from eagle3.parallel.topology import Topology
from eagle3.states.rows import DraftLogits, Rows
from eagle3.targets.logits import LogitTransform
from eagle3.tensors import pinned, send


@dataclass(frozen=True)
class MicroBatch:
    """This rank's part of one stream, cut by its plan, with its hidden states."""

    inputs: UnrollInputs
    teacher: Teacher
    query_of: Tensor  # [K, M], from the SequencePlan; M are its teacher rows, as in `teacher`
    tokens: int  # of the whole stream
    samples: Tensor  # [K] int64: those of the whole stream that have supervised positions
    # [K, M] fp64: of a position in the mean over its sample's; None: each position counts alike in the global batch
    shares: Tensor | None = None

    def map(
        self, change: Callable[[Tensor], Tensor], change_rows: Callable[[Tensor], Tensor | StreamedRows]
    ) -> "MicroBatch":
        """Applies `change_rows` to frozen rows (auxiliary states, the teacher's values), and `change` to the rest of
        what `to` moves."""
        return replace(
            self,
            inputs=self.inputs.map(change, change_rows),
            teacher=self.teacher.map(change, change_rows),
            query_of=change(self.query_of),
            shares=None if self.shares is None else change(self.shares),
        )

    def to(self, device: torch.device, residence: Residence = "device") -> "MicroBatch":
        """The batch for a draft on `device`, with frozen rows where `residence` says."""
        to_device = partial(send, device=device)
        return self.map(to_device, to_device if residence == "device" else partial(StreamedRows, device=device))

    def counts(self, sequence: dist.ProcessGroup | None = None) -> BatchCounts:
        """This rank's. The first one of the stream's `sequence` group counts what belongs to the whole stream. None:
        this rank is alone."""
        supervised, whole = self.query_of >= 0, not (sequence and sequence.rank())
        counted, tokens = supervised & (self.teacher.best >= 0), torch.full_like(self.samples, whole * self.tokens)
        return BatchCounts(counted.sum(1).cpu(), supervised.sum(1).cpu(), whole * self.samples, tokens)


def micro_batch(
    stream: Stream,
    plan: SequencePlan,
    rows: Rows,
    draft_id: Tensor,
    head: Tensor | None,
    dtype: torch.dtype,
    transform: LogitTransform | None = None,
    columns: slice | None = None,
    by_sample: bool = False,
) -> MicroBatch:
    """Builds a micro-batch for a draft of this dtype, on the host, in pinned memory if there is a GPU.

    rows: aux at plan.rows, teacher at plan.teacher, on the host or, as from a target that runs there, on the draft's
        device; logits keep the dtype that they come in.
    draft_id: [V] int64, draft id of each target token, -1 outside the draft vocabulary.
    head: [Vd/tp, Ht], this rank's part of the target's lm_head rows of the draft vocabulary; None if the teacher is
        given by logits.
    transform: applied to what `head` yields.
    columns: this rank's columns of a teacher's logits; None: all.
    by_sample: whether the loss is a mean over samples.
    """
    values = rows.teacher.values
    if isinstance(rows.teacher, DraftLogits):
        values, head = values[:, columns or slice(None)].contiguous(), None
    else:
        values = values.to(dtype)
    positions = stream.positions(len(plan.query_of))
    return MicroBatch(
        inputs=unroll_inputs(stream, plan, rows.aux.to(dtype)),
        teacher=Teacher(
            last=values,
            head=head,
            best=draft_id[rows.teacher.argmax.to(draft_id.device)],
            logsumexp=rows.teacher.logsumexp,
            transform=transform or LogitTransform(),
            written=draft_id[stream.tokens_after(plan.teacher, 1).to(draft_id.device)],
        ),
        query_of=plan.query_of,
        tokens=stream.tokens,
        samples=(positions > 0).sum(1),
        shares=1 / positions.clamp(min=1).double()[:, stream.document[plan.teacher]] if by_sample else None,
    ).map(pinned, pinned)


@dataclass(frozen=True)
class Kernels:
    """What computes attention, position-wise work and loss; None: whatever is usual on the device."""

    blocks: BlockKernels | None = None
    own: OwnKernel | None = None
    pointwise: Pointwise | None = None
    loss: LossKernel | None = None


class DraftObjective(nn.Module):
    """The draft and its training objective in one module, so that an engine's forward is one stream's loss.

    Every rank of a stream's tensor and sequence groups calls it with its own part.
    """

    def __init__(
        self,
        draft: Eagle3Draft,
        topology: Topology,
        ring_mode: RingMode = "gather",
        memory: MemoryPlan = MemoryPlan(),
        kernels: Kernels = Kernels(),
    ) -> None:
        super().__init__()
        self.draft, self.tensor, self.memory, self.pointwise = draft, topology.tensor, memory, kernels.pointwise
        self.loss_kernel = kernels.loss
        each = chunk_token_bytes(draft.draft_config, self.tensor.size(), draft.fc.weight.dtype)
        self.chunk = rows_at_once(memory.block_bytes, each)
        self.attention = TTTAttention.over(
            topology.ulysses, topology.ring, draft.scale, ring_mode, kernels.blocks, kernels.own
        )

    def forward(self, batch: MicroBatch, weights: StepWeights) -> Distilled:
        outputs = unroll(self.draft, self.attention, batch.inputs, self.memory.recompute, self.chunk, self.pointwise)
        return self.distilled(outputs, batch, weights)

    def distilled(self, outputs: Sequence[Tensor], batch: MicroBatch, weights: StepWeights) -> Distilled:
        """The distillation, given the unroll's `outputs` of the K steps."""
        return distill(
            outputs,
            self.draft.lm_head.weight,
            batch.teacher,
            batch.query_of,
            weights,
            self.tensor,
            self.draft.output_norm,
            batch.shares,
            self.memory.block_bytes,
            self.loss_kernel,
        )
