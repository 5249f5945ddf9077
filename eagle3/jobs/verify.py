"""Golden cases through the training code, which show whether this machine computes what the definition says."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from eagle3.attention.ring import RingMode
from eagle3.draft.interchange import ExportedDraft, exported_tensors, load_weights, read_exported, shard, whole_tensors
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import UserError
from eagle3.jobs.gate import require_divisible
from eagle3.kernels.choice import choose_kernels
from eagle3.kernels.proof import KernelDemand
from eagle3.objective.losses import LossConfig, batch_metrics, batch_sum, step_weights
from eagle3.objective.model import DraftObjective, MicroBatch, micro_batch
from eagle3.objective.recompute import MemoryPlan
from eagle3.parallel.sequence import Reach, Rule, SequenceSharding, Stream, plan_sequence
from eagle3.parallel.topology import Topology
from eagle3.recipe.schema import Training
from eagle3.states.rows import LastHidden, Rows
from eagle3.targets.logits import summarize_teacher
from eagle3.text.vocabulary import DraftVocabulary
from eagle3.training.deepspeed_file import deepspeed_config
from eagle3.training.engine import full_gradients, gradient_scale, start_engine

# Relative to the largest entry of the compared tensor. fp64 is no tighter because the reference gradients are fp32.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2}
# Even with fp64 arithmetic, rounding only the weights and inputs to bf16 changes single gradients by up to 4.4e-2 in
# `dense` and `ragged`, and by up to 7.5e-2 in `windowed`. So `windowed` cannot meet this tolerance in bf16.
BFLOAT16_GRADIENTS, NOT_IN_BFLOAT16 = 5e-2, ("windowed",)
INPUTS = ("input_ids", "loss_mask", "attention_mask", "aux_hidden_state", "hidden_state", "lm_head_weight")


@dataclass(frozen=True)
class GoldenCase:
    """A draft and a right-padded batch of B x T tokens."""

    draft: ExportedDraft  # draft.safetensors with config.json
    inputs: dict[str, Tensor]  # the tensors of inputs.safetensors
    rule: Rule  # which rows count: `rows` in the metadata of inputs.safetensors, or the reference's


def read_case(folder: Path) -> GoldenCase:
    """Read a golden case. Raises UserError naming the file that cannot be read."""
    path = folder / "inputs.safetensors"
    inputs = read_tensors(path)
    with safe_open(path, "pt") as file:
        rule = (file.metadata() or {}).get("rows", "reference")
    return GoldenCase(read_exported(folder, "draft.safetensors"), inputs, rule)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of a golden case. Raises UserError if it cannot be read."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error}); name a folder that holds a whole golden case") from error


def run_case(
    case: GoldenCase,
    topology: Topology,
    steps: int,
    dtype: torch.dtype,
    deepspeed_file: Path,
    sharding: SequenceSharding = SequenceSharding(),
    ring_mode: RingMode = "gather",
    memory: MemoryPlan = MemoryPlan(),
) -> dict[str, Tensor]:
    """Compute the case's losses, accuracies and gradients, under the keys of expected.safetensors, whole on every rank.

    The batch's documents are dealt to the data-parallel ranks and packed; each stream is spread over its sequence ranks
    according to `sharding`. The losses are divided by the padded batch's B*T. The DeepSpeed engine has no fp64, so fp64
    gradients are summed with plain collectives; other dtypes go through the engine. The kernels are chosen as in
    training, for the case's own sizes.

    Raises UserError if the draft cannot be divided among the ranks, or if no kernel is right.
    """
    require_divisible(case.draft.config, topology.tensor.size(), sharding.ulysses)
    draft = Eagle3Draft(case.draft.config, topology.modules, dtype)
    load_weights(draft, case.draft, topology.tensor)
    demand = KernelDemand.of(case.draft.config, topology.tensor.size(), sharding.ulysses, dtype, steps)
    kernels = choose_kernels(demand, topology).kernels
    objective = DraftObjective(draft, topology, ring_mode, memory, kernels).to(topology.device)
    batch = _micro_batch(case, topology, steps, sharding, draft.lm_head.weight)
    config, ranks = LossConfig(normalization="tokens"), topology.data.size()
    counts = batch_sum([batch.counts(topology.sequence)], topology)
    counts = counts._replace(tokens=torch.full_like(counts.tokens, case.inputs["attention_mask"].numel()))
    weights = step_weights(config, counts, None)
    if dtype == torch.float64:
        distilled = objective(batch, weights)
        distilled.surrogate.backward()
        gradients = {name: p.grad for name, p in draft.named_parameters() if p.requires_grad}
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=topology.batch)
    else:
        precision = "bfloat16" if dtype == torch.bfloat16 else "float32"
        training = Training(global_batch_size=ranks, gradient_clipping=0.0, dtype=precision)
        engine = start_engine(objective, topology, deepspeed_config(deepspeed_file, training, ranks))
        distilled = engine(batch, weights)
        engine.backward(distilled.surrogate * gradient_scale(ranks, accumulation=1))
        gradients = full_gradients(draft)
    metrics = batch_metrics(config, batch_sum([distilled.sums], topology), counts)
    accuracy, supervised = torch.tensor(metrics.accuracy, dtype=torch.float64), counts.supervised.double()
    actual = {
        "loss": torch.tensor([metrics.loss], dtype=torch.float64),
        "ploss": torch.tensor(metrics.step_losses, dtype=torch.float64),
        "acc_correct": accuracy * supervised.clamp(min=1),
        "acc_denom": supervised,
        "acceptance_rate": torch.tensor(metrics.acceptance_rate, dtype=torch.float64),
        "position_count": counts.counted.double(),
    }
    gradients = exported_tensors(whole_tensors(gradients, draft, topology.tensor))
    return actual | {f"grad.{name}": gradient.cpu().contiguous() for name, gradient in gradients.items()}


def tolerance(name: str, dtype: torch.dtype) -> float:
    """Largest relative error allowed in the tensor `name` (or in the gradients' joint norm) when computing in
    `dtype`."""
    if dtype == torch.bfloat16 and name == "acc_correct":
        return float("inf")  # it counts argmaxes, and jumps if two logits are closer than bf16 can resolve
    return BFLOAT16_GRADIENTS if dtype == torch.bfloat16 and name.startswith("grad.") else TOLERANCES[dtype]


def relative_errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest error in each expected tensor, relative to its largest entry, and that of the gradients' joint norm.

    A tensor that is missing, misshapen or not finite has an infinite error.
    """
    errors = dict.fromkeys(expected, float("inf"))
    for name, reference in expected.items():
        value, reference = actual.get(name), reference.double()
        if value is not None and value.shape == reference.shape and bool(value.isfinite().all()):
            errors[name] = float((value.double() - reference).abs().max() / reference.abs().max().clamp(min=1e-30))
    names = [name for name in expected if name.startswith("grad.")]
    if names and all(name in actual for name in names):
        norms = [sum(float(side[name].double().square().sum()) for name in names) ** 0.5 for side in (actual, expected)]
        errors["gradient norm"] = abs(norms[0] / norms[1] - 1)
    return errors


def _micro_batch(
    case: GoldenCase, topology: Topology, steps: int, sharding: SequenceSharding, lm_head: Tensor
) -> MicroBatch:
    """This rank's part of its stream. lm_head: the draft's lm_head, or this rank's part of it."""
    dtype, vocabulary = lm_head.dtype, DraftVocabulary(case.draft.d2t, case.draft.t2d)
    ids, loss_mask, real, aux, last, head = (case.inputs[name] for name in INPUTS)
    real, mine = real.bool(), range(topology.data.rank(), len(real), topology.data.size())
    if not mine:  # more ranks than documents: train on one unsupervised token
        mine, loss_mask, real = [0], torch.zeros_like(loss_mask), torch.zeros_like(real)
        real[0, 0] = True
    ids, loss_mask, aux, last = ([each[row][real[row]] for row in mine] for each in (ids, loss_mask, aux, last))
    stream, aux, last = Stream.pack(ids, loss_mask, case.rule), torch.cat(aux), torch.cat(last)
    plan = plan_sequence(stream, Reach(steps, case.draft.config.window), sharding, topology.sequence.rank())
    exact = torch.promote_types(dtype, torch.float32)  # as in a capture
    teacher = summarize_teacher(last[plan.teacher].to(exact), head.to(exact))
    rows = Rows(aux[plan.rows], LastHidden(last[plan.teacher], *teacher))
    draft_head = shard(head[vocabulary.target_ids], lm_head, topology.tensor).to(topology.device, dtype)
    return micro_batch(stream, plan, rows, vocabulary.draft_ids, draft_head, dtype).to(topology.device)
