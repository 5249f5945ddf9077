"""What the engine trains: the draft with its unroll and distillation, from one stream to a loss."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eagle3.attention.ring import RingMode
from eagle3.attention.ttt import TTTAttention
from eagle3.draft.model import Eagle3Draft
from eagle3.objective.distill import Distilled, Teacher, distill
from eagle3.objective.losses import StepWeights
from eagle3.objective.unroll import UnrollInputs, unroll, unroll_inputs
from eagle3.parallel.sequence import SequencePlan, Stream
from eagle3.parallel.topology import Topology


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
    teacher_head: Tensor,
    draft_id: Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> MicroBatch:
    """Join a plan with its rows: aux [rows, 3Ht] at plan.rows; last [M, Ht], argmax and logsumexp [M] at plan.teacher.

    teacher_head [Vd, Ht]; draft_id [V] int64: the draft id of each target token, -1 outside the draft vocabulary.
    """
    steps = plan.query_of.shape[0]
    teacher = Teacher(
        last=last.to(device=device, dtype=dtype),
        head=teacher_head,
        best=draft_id[argmax.to(draft_id.device)].to(device),
        logsumexp=logsumexp.to(device),
    )
    return MicroBatch(
        inputs=unroll_inputs(stream, plan, steps, aux.to(dtype), device),
        teacher=teacher,
        query_of=plan.query_of.to(device),
        supervised=plan.supervised.to(device),
        tokens=stream.tokens,
    )


class DraftObjective(nn.Module):
    """The draft and its training objective as one module, so that an engine's forward is one stream's loss.

    Every rank of a stream's tensor and sequence groups calls it with its own part.
    """

    def __init__(self, draft: Eagle3Draft, topology: Topology, ring_mode: RingMode = "gather") -> None:
        super().__init__()
        self.draft, self.tensor = draft, topology.tensor
        self.attention = TTTAttention.over(topology.ulysses, topology.ring, draft.scale, ring_mode)

    def forward(self, batch: MicroBatch, weights: StepWeights) -> Distilled:
        outputs = unroll(self.draft, self.attention, batch.inputs)
        return distill(
            outputs,
            self.draft.lm_head.weight,
            batch.teacher,
            batch.query_of,
            batch.supervised,
            weights.cross_entropy.to(outputs.device),
            weights.overlap.to(outputs.device),
            self.tensor,
        )
