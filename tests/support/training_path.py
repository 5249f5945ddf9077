"""Runs a case of tests/support/definition.py through training's code, in one process or as one rank of many."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from definition import Case, Document
from torch import Tensor

from eagle3.draft.interchange import ExportedDraft, exported_tensors, load_weights, whole_tensors
from eagle3.draft.model import Eagle3Draft
from eagle3.objective.distill import StepWeights
from eagle3.objective.losses import BatchCounts, LossConfig, Metrics, batch_metrics, batch_sum, step_weights
from eagle3.objective.model import DraftObjective, MicroBatch, micro_batch
from eagle3.objective.recompute import MemoryPlan
from eagle3.objective.streaming import Residence
from eagle3.parallel.sequence import Reach, SequenceSharding, Stream, plan_sequence
from eagle3.parallel.topology import Topology
from eagle3.states.rows import DraftLogits, LastHidden, Rows
from eagle3.targets.logits import LogitTransform, summarize_teacher
from eagle3.text.vocabulary import DraftVocabulary

ALONE = SequenceSharding()
TeacherKind = Literal["hidden", "logits"]


@dataclass(frozen=True)
class Trained:
    """What training computed for a case, whole on every rank: metrics, counts and gradients by exported name.
    replicas_differ: how far tensor-parallel ranks differ in the gradients of weights that all of them hold."""

    metrics: Metrics
    counts: BatchCounts
    gradients: dict[str, Tensor]
    replicas_differ: float


def load_draft(case: Case, topology: Topology, dtype: torch.dtype) -> Eagle3Draft:
    draft = Eagle3Draft(case.config, topology.modules, dtype)
    load_weights(draft, ExportedDraft(case.config, case.weights, case.d2t, case.t2d, "case"), topology.tensor)
    return draft


def stream_batch(
    case: Case,
    documents: Sequence[Document],
    steps: int,
    dtype: torch.dtype,
    topology: Topology,
    sharding: SequenceSharding = ALONE,
    residence: Residence = "device",
    teacher_kind: TeacherKind = "hidden",
    by_sample: bool = False,
) -> MicroBatch:
    """This rank's part of one packed stream. teacher_kind: how the teacher's rows are given."""
    stream = Stream.pack([each.ids for each in documents], [each.loss_mask for each in documents], case.rows)
    plan = plan_sequence(stream, Reach(steps, case.config.window), sharding, topology.sequence.rank())
    aux, last = (torch.cat([getattr(each, name) for each in documents]) for name in ("aux", "last"))
    exact = torch.promote_types(dtype, torch.float32)  # as in a capture, whatever dtype the draft trains in
    taught, transform = last[plan.teacher], LogitTransform(case.scale, case.cap)
    teacher = summarize_teacher(taught.to(exact), case.target_head.to(exact), transform=transform)
    ranks, rank = topology.tensor.size(), topology.tensor.rank()
    logits, width = teacher_kind == "logits", case.config.draft_vocab_size // ranks
    teacher_rows = (
        DraftLogits(case.teacher_logits(taught.to(exact))[:, case.t2d], *teacher)
        if logits
        else LastHidden(taught, *teacher)
    )
    return micro_batch(
        stream,
        plan,
        Rows(aux[plan.rows], teacher_rows),
        DraftVocabulary(case.d2t, case.t2d).draft_ids,
        None if logits else case.target_head[case.t2d].chunk(ranks)[rank].to(dtype),
        dtype,
        transform,
        slice(rank * width, (rank + 1) * width),
        by_sample,
    ).to(topology.device, residence)


def batch_weights(
    objective: DraftObjective, batches: Sequence[MicroBatch], config: LossConfig, topology: Topology
) -> tuple[BatchCounts, StepWeights]:
    """Counts over the global batch, and the weights that follow from them."""
    counts, sums = batch_sum([batch.counts(topology.sequence) for batch in batches], topology), None
    if config.needs_sums:
        zeros = torch.zeros(len(counts.counted), dtype=torch.float64)
        with torch.no_grad():
            sums = batch_sum([objective(batch, StepWeights(zeros, zeros)).sums for batch in batches], topology)
    return counts, step_weights(config, counts, sums)


def train_case(
    case: Case,
    topology: Topology,
    dtype: torch.dtype,
    steps: int,
    config: LossConfig,
    streams: Sequence[Sequence[Document]] | None = None,
    sharding: SequenceSharding = ALONE,
    ring_mode: str = "gather",
    memory: MemoryPlan = MemoryPlan(),
    residence: Residence = "device",
    teacher_kind: TeacherKind = "hidden",
) -> Trained:
    """Trains on one global batch, packed into one stream or into `streams`, which go to the data-parallel ranks in
    order."""
    draft = load_draft(case, topology, dtype)
    objective = DraftObjective(draft, topology, ring_mode, memory)
    streams, by_sample = streams or [case.documents], config.normalization == "samples"
    each = len(streams) // topology.data.size()
    mine = streams[topology.data.rank() * each :][:each]
    batches = [
        stream_batch(case, documents, steps, dtype, topology, sharding, residence, teacher_kind, by_sample)
        for documents in mine
    ]
    counts, weights = batch_weights(objective, batches, config, topology)
    distilled = [objective(batch, weights) for batch in batches]
    for part in distilled:
        part.surrogate.backward()
    trained = {name: parameter for name, parameter in draft.named_parameters() if parameter.requires_grad}
    assert draft.embedding.weight.grad is None
    assert [name for name, parameter in trained.items() if parameter.grad is None] == []
    gradients = {name: parameter.grad for name, parameter in trained.items()}
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=topology.batch)
    return Trained(
        metrics=batch_metrics(config, batch_sum([part.sums for part in distilled], topology), counts),
        counts=counts,
        gradients=exported_tensors(whole_tensors(gradients, draft, topology.tensor)),
        replicas_differ=replicas_differ(draft, gradients, topology),
    )


def replicas_differ(draft: Eagle3Draft, gradients: dict[str, Tensor], topology: Topology) -> float:
    """Largest difference between tensor-parallel ranks in a gradient that all of them hold, relative to its largest
    entry."""
    worst = 0.0
    for name, parameter in draft.named_parameters():
        if name in gradients and not getattr(parameter, "tensor_model_parallel", False):
            high, low = gradients[name].clone(), gradients[name].clone()
            dist.all_reduce(high, dist.ReduceOp.MAX, group=topology.tensor)
            dist.all_reduce(low, dist.ReduceOp.MIN, group=topology.tensor)
            worst = max(worst, float((high - low).max() / high.abs().max().clamp(min=1e-30)))
    return worst
