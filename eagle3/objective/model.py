"""What the engine trains: the draft with its unroll and distillation, from one stream to a loss."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eagle3.attention.ring import RingMode
from eagle3.attention.ttt import TTTAttention
from eagle3.draft.model import Eagle3Draft
from eagle3.objective.blocks import BLOCK_BYTES, chunk_tokens
from eagle3.objective.distill import Distilled, Teacher, distill
from eagle3.objective.losses import StepWeights
from eagle3.objective.recompute import Recompute
from eagle3.objective.streaming import StreamedRows
from eagle3.objective.unroll import Residence, UnrollInputs, unroll, unroll_inputs
from eagle3.parallel.sequence import SequencePlan, Stream
from eagle3.parallel.topology import Topology
from eagle3.target.interface import LogitTransform


@dataclass(frozen=True)
class MicroBatch:
    """This rank's part of one stream, cut by its plan, with its hidden states, on the draft's device.

    query_of, supervised [K, M] and teacher are the SequencePlan's, in the order of its teacher rows. tokens: of the
    whole stream.
    """

    inputs: UnrollInputs
    teacher: Teacher
    query_of: Tensor
    supervised: Tensor
    tokens: int

    def counted(self) -> Tensor:
        """[K] int64: supervised positions whose teacher token is in the draft vocabulary."""
        return (self.supervised & (self.teacher.best >= 0)).sum(1).cpu()


def micro_batch(
    stream: Stream,
    plan: SequencePlan,
    *,
    aux: Tensor,
    last: Tensor,
    argmax: Tensor,
    logsumexp: Tensor,
    teacher_head: Tensor | None,
    draft_id: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    residence: Residence = "device",
    transform: LogitTransform | None = None,
    columns: slice = slice(None),
) -> MicroBatch:
    """Join a plan with its rows: aux [rows, 3Ht] at plan.rows; last, argmax and logsumexp [M] at plan.teacher.

    teacher_head [Vd/tp, Ht], transform (None: none): of the target's head, where last [M, Ht] are hidden states. No head
    where last [M, Vd] are logits, of which this rank takes `columns`, in the number format that they come in. draft_id [V]
    int64: the draft id of each target token, -1 outside the draft vocabulary. residence: where aux and last wait until
    they are needed.
    """
    steps = plan.query_of.shape[0]
    last = last[:, columns].contiguous() if teacher_head is None else last.to(dtype)
    teacher = Teacher(
        last=last.to(device) if residence == "device" else StreamedRows(last, device),
        head=teacher_head,
        best=draft_id[argmax.to(draft_id.device)].to(device),
        logsumexp=logsumexp.to(device),
        transform=transform or LogitTransform(),
    )
    return MicroBatch(
        inputs=unroll_inputs(stream, plan, steps, aux.to(dtype), device, residence=residence),
        teacher=teacher,
        query_of=plan.query_of.to(device),
        supervised=plan.supervised.to(device),
        tokens=stream.tokens,
    )


@dataclass(frozen=True)
class MemoryPlan:
    """What a step keeps and how much it works on at once. recompute: see Step; block_bytes: of the loss's blocks and of
    the chunks of position-wise work."""

    recompute: Recompute = "none"
    block_bytes: int = BLOCK_BYTES


class DraftObjective(nn.Module):
    """The draft and its training objective as one module, so that an engine's forward is one stream's loss.

    Every rank of a stream's tensor and sequence groups calls it with its own part.
    """

    def __init__(
        self,
        draft: Eagle3Draft,
        topology: Topology,
        ring_mode: RingMode = "gather",
        memory: MemoryPlan = MemoryPlan(),
    ) -> None:
        super().__init__()
        self.draft, self.tensor, self.memory = draft, topology.tensor, memory
        self.chunk = chunk_tokens(draft.draft_config, self.tensor.size(), draft.fc.weight.dtype, memory.block_bytes)
        self.attention = TTTAttention.over(topology.ulysses, topology.ring, draft.scale, ring_mode, chunk=self.chunk)

    def forward(self, batch: MicroBatch, weights: StepWeights) -> Distilled:
        outputs = unroll(self.draft, self.attention, batch.inputs, self.memory.recompute, self.chunk)
        return self.distilled(outputs, batch, weights)

    def distilled(self, outputs: Sequence[Tensor], batch: MicroBatch, weights: StepWeights) -> Distilled:
        """What follows the unroll, whose outputs of the K steps are `outputs`."""
        return distill(
            outputs,
            self.draft.lm_head.weight,
            batch.teacher,
            batch.query_of,
            batch.supervised,
            weights.cross_entropy,
            weights.overlap,
            self.tensor,
            self.draft.output_norm,
            self.memory.block_bytes,
        )
