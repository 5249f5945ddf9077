"""Whether this machine computes what the definition says: golden cases through the training code, and what doctor.py
finds out about a job's GPUs and kernels."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from eagle3.attention.cuda import FLASH4_CAPABILITY, has_flash4
from eagle3.attention.ring import RingMode
from eagle3.draft.config import DraftConfig
from eagle3.draft.interchange import ExportedDraft, exported_tensors, load_weights, read_exported, shard, whole_tensors
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import UserError
from eagle3.jobs.derived import config_of, shape_draft
from eagle3.jobs.gate import require_divisible
from eagle3.kernels.choice import (
    NONE_RIGHT,
    OPTIONAL,
    Table,
    agreement,
    candidates_for,
    choose_kernels,
    described,
    fastest,
    parsed,
    prove,
)
from eagle3.kernels.proof import KernelDemand, raised
from eagle3.objective.losses import LossConfig, batch_metrics, batch_sum, step_weights
from eagle3.objective.model import DraftObjective, MicroBatch, micro_batch
from eagle3.objective.recompute import MemoryPlan
from eagle3.parallel.sequence import Reach, Rule, SequenceSharding, Stream, plan_sequence
from eagle3.parallel.topology import Topology, start_distributed
from eagle3.preflight.cluster import Cluster, Finding, Flaw, owners
from eagle3.preflight.start import checkpoint_bytes
from eagle3.recipe.schema import Parallelism, Recipe, Training
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
FLASH4_ADVICE = 'not installed; up to twice as fast as 2: pip install -e ".[flash4]" -c constraints/cuda.txt'
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


def check_golden(cluster: Cluster, folder: Path, deepspeed_file: Path, sizes: Parallelism) -> Iterator[Finding]:
    """A finding for fp32 and one for bf16: the golden cases in the folder, through the engine in this layout.
    Collective."""
    cases = sorted(path.parent.name for path in folder.glob("*/expected.safetensors"))
    if not cases or any(each != cases for each in cluster.gather(cases)):
        yield Finding("golden cases", "note", f"not run, because {folder} is not on every node")
        return
    try:
        topology = start_distributed(sizes.tensor, sizes.ulysses, sizes.ring)
    except UserError as error:  # as on every rank
        raise Flaw("golden cases", str(error), "change parallelism, or start as many processes") from error
    for dtype in (torch.float32, torch.bfloat16):
        name = f"golden cases in {str(dtype).removeprefix('torch.')}"
        left_out = NOT_IN_BFLOAT16 if dtype == torch.bfloat16 else ()
        try:
            shares = {
                case: _share_of_bound(folder / case, topology, dtype, deepspeed_file, sizes)
                for case in cases
                if case not in left_out
            }
        except UserError as error:  # as on every rank: the cases' heads cannot be divided like this
            yield Finding(name, "note", f"not run in this layout ({error})")
            return
        except Exception as error:  # by a kernel, a driver, a link
            raise Flaw(name, raised(error), "look at the kernels above, and at nvidia-smi") from error
        found = ", ".join(f"{case} {share:.1%}" for case, share in shares.items())
        yield _judged(name, f"errors in this layout, of what is allowed: {found}", max(shares.values()), dtype)


def _judged(name: str, found: str, worst: float, dtype: torch.dtype) -> Finding:
    """In bfloat16 rounding alone takes nine tenths of what is allowed, so a little more is left for a person to
    judge."""
    if worst <= 1:
        return Finding(name, "ok", found)
    if dtype == torch.bfloat16 and worst <= 1.5:
        return Finding(name, "note", f"{found}; rounding the weights alone takes up to 90%")
    return Finding(name, "failed", found, "do not train here; launchers/verify.py tells which tensors are wrong")


def _share_of_bound(
    case: Path, topology: Topology, dtype: torch.dtype, deepspeed_file: Path, sizes: Parallelism
) -> float:
    """The largest error of a golden case's tensors, as a share of what is allowed."""
    expected, sharding = read_tensors(case / "expected.safetensors"), SequenceSharding(sizes.ulysses, sizes.ring)
    steps = len(expected["ploss"])
    actual = run_case(read_case(case), topology, steps, dtype, deepspeed_file, sharding, sizes.ring_mode)
    return max(error / tolerance(name, dtype) for name, error in relative_errors(actual, expected).items())


# What doctor.py finds out about GPUs and kernels ----------------------------------------------------------------------


def checkpoint_of(recipe: Recipe) -> int | None:
    """Bytes of one checkpoint of this recipe; None if the target's config is not available (yet)."""
    draft = _draft(recipe)
    return draft and checkpoint_bytes(recipe, draft)


def check_gpus(cluster: Cluster, device: torch.device) -> Finding:
    """Checks that all ranks have the same GPUs. Collective. (That each has one to itself, NCCL checks.)"""

    def look() -> tuple[str, int, int] | None:
        if device.type != "cuda":
            return None
        return torch.cuda.get_device_name(device), *torch.cuda.mem_get_info(device)

    gpus = cluster.ask("gpus", look, "look at nvidia-smi there")
    if not any(gpus.values()):
        return Finding("gpus", "note", "none: this is a CPU job, for tests and demonstrations")
    if without := [rank for rank, gpu in gpus.items() if gpu is None]:
        raise Flaw("gpus", f"no GPU for {cluster.named(without)}", "look at nvidia-smi and CUDA_VISIBLE_DEVICES there")
    kinds = owners((rank, name) for rank, (name, _, _) in gpus.items())
    if len(kinds) > 1:
        raise Flaw(
            "gpus",
            "; ".join(f"{kind} on {cluster.named(ranks)}" for kind, ranks in kinds.items()),
            "use nodes with the same GPUs: the slowest one sets the pace of all",
        )
    free, total, rank = min((free, total, rank) for rank, (_, free, total) in gpus.items())
    return Finding(
        "gpus",
        "ok",
        f"{len(gpus)} x {next(iter(kinds))} on {len(cluster.ranks)} node(s); least free memory {free / 2**30:.1f} of "
        f"{total / 2**30:.1f} GiB ({cluster.named([rank])})",
    )


def check_kernels(cluster: Cluster, topology: Topology, recipe: Recipe) -> Iterator[Finding]:
    """A finding for each kind of attention's blocks, for position-wise work and for the loss: every kernel's error and
    time, and which one training will use. Collective."""
    sizes = cluster.ask("kernels", lambda: _demanded(recipe), "change parallelism", [0])[0]
    if sizes is None:
        yield Finding("kernels", "note", "not tried, because the target's config is not available (yet)")
        return
    demand, device = KernelDemand(**sizes, dtype=getattr(torch, recipe.training.dtype)), topology.device
    timed = device.type == "cuda"

    def proven_here() -> Table:
        candidates = candidates_for(demand, device, recipe.training.kernels)
        return prove(candidates, demand, topology, timed)

    proven = cluster.ask("kernels", proven_here, "set training.kernels to auto, and look at nvidia-smi there")
    for kind, verdicts in agreement([*map(parsed, proven.values())]).items():
        if not verdicts:
            continue  # blocks of this kind are cut into others
        name, right = f"kernels for {described(kind)}", [each for each in verdicts if each.right]
        used, failed = fastest(verdicts), not right and kind not in OPTIONAL
        lines = [each.described + (", used" if each is used else "") for each in verdicts]
        state = "failed" if failed else "ok" if len(right) == len(verdicts) else "note"
        yield Finding(name, state, "; ".join(lines), NONE_RIGHT if failed else "")
    if timed and torch.cuda.get_device_capability(device) >= FLASH4_CAPABILITY and not has_flash4(device):
        yield Finding("FlashAttention 4", "note", FLASH4_ADVICE)


def _demanded(recipe: Recipe) -> dict[str, int | None] | None:
    """The fields of a KernelDemand that are JSON values. None if the target's config is not available (yet). Raises
    UserError if this draft cannot be divided so."""
    draft, parallelism = _draft(recipe), recipe.parallelism
    if draft is None:
        return None
    require_divisible(draft, parallelism.tensor, parallelism.ulysses)
    demand = KernelDemand.of(draft, parallelism.tensor, parallelism.ulysses, torch.float32, recipe.training.ttt_steps)
    return {name: value for name, value in asdict(demand).items() if name != "dtype"}


def _draft(recipe: Recipe) -> DraftConfig | None:
    try:
        return shape_draft(recipe, config_of(recipe))
    except UserError:
        return None  # training will report the reason in full
