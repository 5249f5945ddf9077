"""Distils, and loads and gathers weights, in tensor-parallel groups, for tests/parallel/test_tensor_parallel.py."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from definition import random_case
from distill_cases import HIDDEN, STEPS, WEIGHTS, Rows, random_rows
from processes import compute
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor.debug import CommDebugMode

from eagle3.draft.interchange import ExportedDraft, load_weights, shard, whole_tensors
from eagle3.draft.model import DraftPass, Eagle3Draft
from eagle3.errors import UserError
from eagle3.objective.distill import BLOCK_BYTES, StepWeights, Teacher, distill, loss_row_bytes
from eagle3.objective.fused import FUSED
from eagle3.parallel.topology import Topology

WORLDS = (2, 4)
DTYPES = (torch.float64, torch.float32)
SIXTEEN_ROWS = 16 * loss_row_bytes(STEPS, 64, HIDDEN, torch.float64)  # for one process
UPSTREAM = 3.0  # gradient of the surrogate, as accumulation or data parallelism would have it
# Neither 29 nor 9 rows can be divided by 2 or 4: 29 rows lack one and three, and of 9 the last of four ranks has none.
DRAFTS = {
    "odd vocabulary": {"vocab_size": 29, "fc_norm": True},
    "a rank of padding": {"vocab_size": 9},
    "even vocabulary": {"vocab_size": 32},
}


class Case(NamedTuple):
    """A call of distill."""

    rows: Rows
    weights: StepWeights
    block_bytes: int = BLOCK_BYTES  # of distill's blocks
    fused: bool = False  # by the Triton kernels, which on a CPU Triton's interpreter runs


def case_names(dtype: torch.dtype) -> list[str]:
    """The cases for a dtype. Only fp64 has the smaller blocks, and overflowing logits within the tolerance; only fp32
    has kernels."""
    names = [*WEIGHTS, "ties", "no teacher rows", "nothing supervised"]
    if dtype == torch.float64:
        return [*names, "several blocks", "logits that overflow exp"]
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # see conftest.py
    return [*names, *(f"fused {name}" for name in ("both", "ties", "no teacher rows") if interpreted)]


def make_case(name: str, dtype: torch.dtype) -> Case:
    if name == "fused both":  # few rows, since the interpreter is slow
        return Case(random_rows(11, 9, 24, dtype), WEIGHTS["both"], fused=True)
    if name.startswith("fused "):
        return make_case(name.removeprefix("fused "), dtype)._replace(fused=True)
    weights = WEIGHTS.get(name, WEIGHTS["both"])
    if name == "ties":
        return Case(_ties(dtype), weights)
    sizes = {"no teacher rows": (0, 5, 24), "several blocks": (40, 50, 64)}
    rows = random_rows(*sizes.get(name, (37, 29, 24)), dtype)
    if name == "nothing supervised":
        rows = rows._replace(query_of=torch.full_like(rows.query_of, -1))
    if name == "logits that overflow exp":
        rows = rows._replace(outputs=(400 * rows.outputs).detach().requires_grad_())
    block_bytes = SIXTEEN_ROWS if name == "several blocks" else BLOCK_BYTES
    return Case(rows, weights, block_bytes)


def _ties(dtype: torch.dtype) -> Rows:
    """Small whole numbers, so that equal logits are equal bits. Four queries have their largest logits at the draft ids
    (1, 3, 6), (5, 7), (0, 2) and everywhere. The teacher's best is one of a query's ids: at step 0 the lowest, at step
    1 a different one, at step 2 any."""
    best, queries = [1, 3, 6, 5, 7, 0, 2, *range(8)], [0, 0, 0, 1, 1, 2, 2, *[3] * 8]
    lowest = torch.tensor([each in (0, 3, 5, 7) for each in range(len(best))])
    outputs = torch.eye(4, 8).repeat(STEPS, 1, 1)
    head = torch.zeros(8, 8)
    head[[1, 3, 6], 0] = head[[5, 7], 1] = head[[0, 2], 2] = 4
    teacher = Teacher(
        last=torch.eye(len(best), 6).to(dtype),
        head=(torch.arange(48).reshape(8, 6) % 5 / 4).to(dtype),
        best=torch.tensor(best),
        logsumexp=torch.full((len(best),), 4.0, dtype=dtype),
    )
    return Rows(
        outputs.to(dtype).requires_grad_(),
        head.to(dtype).requires_grad_(),
        teacher,
        torch.tensor(queries).where(torch.stack((lowest, ~lowest, torch.ones_like(lowest))), -1),
    )


def compare(case: Case, group: ProcessGroup) -> dict[str, Tensor]:
    """What distill gives with this rank's rows of both heads. sums [3, K]; gradients are under UPSTREAM; sums_alone and
    sampled are without autograd."""
    rows, teacher = case.rows, case.rows.teacher
    head, teacher_head = (each.detach().chunk(group.size())[group.rank()] for each in (rows.head, teacher.head))
    part = rows._replace(head=head.requires_grad_(), teacher=replace(teacher, head=teacher_head))
    how = {"block_bytes": case.block_bytes, "kernel": FUSED if case.fused else None}
    with CommDebugMode() as collectives:
        distilled = distill(*part, case.weights, group, **how)
    d_outputs, d_head = torch.autograd.grad(UPSTREAM * distilled.surrogate, (part.outputs, part.head))
    with torch.no_grad():
        alone = distill(*part, case.weights, group, **how)
    return {
        "surrogate": distilled.surrogate.detach(),
        "sums": torch.stack(distilled.sums),
        "d_outputs": d_outputs,
        "d_head": d_head,
        "sums_alone": torch.stack(alone.sums),
        "sampled": torch.zeros(0) if alone.sampled is None else alone.sampled,
        "collectives": torch.tensor(collectives.get_total_counts()),
    }


def exported_draft(name: str, dtype: torch.dtype) -> ExportedDraft:
    """Random weights of the whole draft under exported names."""
    sizes = {"target_hidden_size": 20, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6}
    case = random_case([[1]], seed=7, **sizes | DRAFTS[name], draft_vocab_size=8)
    weights = {weight: tensor.to(dtype) for weight, tensor in case.weights.items()}
    return ExportedDraft(case.config, weights, case.d2t, case.t2d, "the draft")


def run_draft(name: str, dtype: torch.dtype, topology: Topology) -> dict[str, dict[str, Tensor]]:
    """A loaded draft's parts, whole weights and whole gradients by parameter name, and what its sharded modules
    compute."""
    exported = exported_draft(name, dtype)
    config = exported.config
    draft = Eagle3Draft(config, topology.modules, dtype)
    load_weights(draft, exported, topology.tensor)
    generator = torch.Generator().manual_seed(8)
    x, attended = (torch.randn(5, width, generator=generator).to(dtype) for width in (16, 8 * 6))
    heads = attended.unflatten(-1, (topology.tensor.size(), -1, config.head_dim))[:, topology.tensor.rank()]
    at_work = DraftPass(draft)
    outputs = {
        "embedding": draft.embedding(torch.arange(config.vocab_size)),
        "mlp": at_work.mlp(x),
        "attention output": at_work.output(heads),
    }
    (outputs["mlp"].square().sum() + outputs["attention output"].square().sum()).backward()
    weights = dict(draft.named_parameters())
    gradients = {key: parameter.grad for key, parameter in weights.items() if parameter.grad is not None}
    kinds = {
        "output": outputs,
        "part": weights,
        "part of lm_head": {"": shard(exported.weights["lm_head.weight"], draft.lm_head.weight, topology.tensor)},
        "whole": whole_tensors(weights, draft, topology.tensor),
        "gradient": whole_tensors(gradients, draft, topology.tensor),
    }
    return {kind: {key: tensor.detach() for key, tensor in tensors.items()} for kind, tensors in kinds.items()}


def refusal(topology: Topology) -> str:
    """The message for an exported draft whose shape differs from the draft here."""
    exported = exported_draft("odd vocabulary", torch.float32)
    draft = Eagle3Draft(exported.config, topology.modules, torch.float32)
    exported.weights["midlayer.mlp.gate_proj.weight"] = torch.zeros(26, 16)
    try:
        load_weights(draft, exported, topology.tensor)
    except UserError as error:
        return str(error)
    return "nothing"


def work(topology: Topology) -> dict:
    results = {"refusal": refusal(topology)}
    for dtype in DTYPES:
        for name in case_names(dtype):
            results[name, dtype] = compare(make_case(name, dtype), topology.tensor)
        results |= {(name, dtype): run_draft(name, dtype, topology) for name in DRAFTS}
    return results


if __name__ == "__main__":
    for world in WORLDS:
        compute(Path(sys.argv[1]), f"tensor {world}", world, (world,), work)
