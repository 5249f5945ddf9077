"""The loss's Triton kernels, in Triton's interpreter on the CPU (see conftest.py), compared with the definition in
fp64."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from distill_cases import HIDDEN, STEPS, random_rows
from distill_cases import WEIGHTS as WEIGHTS_OF_STEPS
from limits import HANG_SECONDS
from live_bytes import LiveBytes
from places import SUPPORT
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle3.objective import fused
from eagle3.objective.distill import distill, loss_row_bytes
from eagle3.objective.softmaxes import PLAIN

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is off where SGLang is installed"
)
EPS = torch.finfo(torch.float32).eps
WEIGHTS = {"kl": (0.7, 0.0), "acceptance": (0.4, -0.9)}


def block(steps: int, rows: int, columns: int, size: float, seed: int) -> tuple[torch.Tensor, ...]:
    """Logits of the draft and of the teacher, of about `size` and close to each other, and the full vocabulary's lse,
    slightly larger than theirs."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(rows, columns, generator=generator) * size
    draft = teacher + torch.randn(steps, rows, columns, generator=generator)
    return draft, teacher, teacher.logsumexp(-1) + torch.rand(rows, generator=generator)


def factors(counted, weights):
    """[2, K, m]: each step's weights, 0 where a row is not counted."""
    return torch.tensor(weights).t()[..., None] * counted


def definition(logits, counted, weights):
    """Cross-entropy, acceptance rate and gradient, in fp64 and by autograd."""
    draft, teacher, lse = (tensor.double() for tensor in logits)
    draft.requires_grad_()
    log_p, q, f = draft.log_softmax(-1), teacher.softmax(-1), (teacher - lse[:, None]).exp()
    cross_entropy, overlap = -(q * log_p).sum(-1), torch.minimum(log_p.exp(), f).sum(-1)
    factors = torch.tensor(weights, dtype=torch.float64)
    loss = (counted * (factors[:, :1] * cross_entropy + factors[:, 1:] * overlap)).sum()
    return cross_entropy.detach(), overlap.detach(), torch.autograd.grad(loss, draft)[0]


@pytest.mark.parametrize("loss", WEIGHTS)
@pytest.mark.parametrize("size", [0.1, 3.0, 40.0])
@pytest.mark.parametrize(("steps", "rows", "columns"), [(1, 3, 5), (4, 2, 1024), (7, 3, 2500)])
def test_the_kernels_equal_the_definition_within_the_rounding_of_their_logits(
    topology, steps, rows, columns, size, loss
):
    logits = block(steps, rows, columns, size, steps)
    counted = torch.arange(steps * rows).view(steps, rows) % 3 > 0
    weights = [tuple(0.8**step * weight for weight in WEIGHTS[loss]) for step in range(steps)]
    cross_entropy, overlap, gradient = definition(logits, counted, weights)
    softmaxes = fused.FusedSoftmaxes(*logits, topology.alone)
    actual_overlap, actual_gradient = softmaxes.finish(factors(counted, weights), loss == "acceptance", torch.float32)
    # A logit of size x is only known to x eps, and so is the exponential of its difference from the peak.
    tolerance = 4 * EPS * float(logits[0].abs().max() + 8)
    assert torch.equal(softmaxes.best, logits[0].argmax(-1))
    assert (softmaxes.cross_entropy - cross_entropy).abs().max() <= tolerance * max(1.0, float(cross_entropy.max()))
    assert (actual_overlap - overlap).abs().max() <= tolerance
    assert (actual_gradient - gradient).abs().max() <= tolerance
    assert not actual_gradient[~counted].any()
    overlap, nothing = softmaxes.finish(None, False, torch.float32)
    assert nothing is None and torch.equal(overlap, actual_overlap)


def test_of_equal_logits_the_first_counts_and_a_gradient_in_half_precision_is_off_by_its_last_place(topology):
    """The interpreter cuts digits off where a GPU rounds."""
    logits = block(2, 3, 1500, 3.0, 2)
    logits[0][:, :, [700, 1400]] = 50.0
    counted, weights = torch.ones(2, 3, dtype=torch.bool), [(1.0, 0.0)] * 2
    softmaxes = fused.FusedSoftmaxes(*logits, topology.alone)
    assert bool((softmaxes.best == 700).all())
    exact = softmaxes.finish(factors(counted, weights), False, torch.float32)[1]
    half = softmaxes.finish(factors(counted, weights), False, torch.bfloat16)[1]
    assert half.dtype == torch.bfloat16 and bool(((half - exact).abs() <= 2**-7 * exact.abs()).all())


@pytest.mark.parametrize("name", ["loss_statistics", "loss_overlap", "loss_gradient", "loss_gradient, with below"])
def test_an_operator_runs_without_data_and_keeps_to_its_schema(name):
    draft, teacher, lse = block(3, 4, 100, 1.0, 4)
    statistics = draft, teacher, torch.ones(4, 4), torch.ones(4, 4), lse
    inputs = {
        "loss_statistics": (draft, teacher),
        "loss_overlap": statistics,
        "loss_gradient": (*statistics, torch.ones(2, 3, 4), None, torch.bfloat16),
        "loss_gradient, with below": (*statistics, torch.ones(2, 3, 4), torch.zeros(3, 4), torch.bfloat16),
    }[name]
    name = name.partition(",")[0]
    torch.library.opcheck(getattr(fused, name), inputs, test_utils=("test_schema", "test_faketensor"))


def test_a_row_that_does_not_count_has_no_gradient_whatever_its_logits_are(topology):
    logits, counted = block(3, 4, 50, 3.0, 1), torch.ones(3, 4, dtype=torch.bool)
    draft, teacher, _ = logits
    teacher[1], draft[:, 2, 7], counted[:, 1:3] = float("nan"), float("inf"), False
    softmaxes = fused.FusedSoftmaxes(*logits, topology.alone)
    _, gradient = softmaxes.finish(factors(counted, [WEIGHTS["acceptance"]] * 3), True, torch.float32)
    assert not gradient[:, 1:3].any() and bool(gradient[:, [0, 3]].isfinite().all()) and gradient[:, [0, 3]].any()


@pytest.mark.parametrize("kernel", [PLAIN, fused.FUSED], ids=["plain", "fused"])
def test_a_block_takes_what_is_planned_for_it_and_not_much_less(topology, kernel):
    rows, columns = 16, 2000
    each = loss_row_bytes(STEPS, columns, HIDDEN, torch.float32, kernel.overwrites)
    case = random_rows(rows, rows, columns, torch.float32)
    inputs = case.outputs, case.head, case.teacher.last, case.teacher.head
    with LiveBytes(inputs) as live:
        distill(*case, WEIGHTS_OF_STEPS["both"], topology.tensor, block_bytes=rows * each, kernel=kernel)
    gradients = 4 * HIDDEN * (columns + STEPS * (rows + 1))
    assert 0.7 * rows * each < live.peak - live.existing - gradients <= rows * each


class _Large(TorchDispatchMode):
    """Counts the operators that read or write a tensor of at least `least` numbers."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.operators = least, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = (leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor))
        if not func.is_view and any(tensor.numel() >= self.least for tensor in tensors):
            self.operators[func.__name__] += 1
        return result


@pytest.mark.parametrize(("weights", "overlaps"), [("cross-entropy", 0), ("both", 1)])
def test_a_block_of_the_loss_passes_over_its_logits_in_a_handful_of_operators(topology, weights, overlaps):
    """Four products: the logits of draft and teacher, and the gradients of the outputs and of lm_head. Two or three
    passes of the kernels, and the gradient of lm_head set to 0 in the beginning and copied in the end."""
    case = random_rows(5, 4, 1500, torch.float32)
    with _Large(STEPS * 5 * 1500 // 4) as large:
        distill(*case, WEIGHTS_OF_STEPS[weights], topology.tensor, kernel=fused.FUSED)
    passes = {name: count for name, count in large.operators.items() if name.startswith(("loss", "mm", "addmm"))}
    assert passes == {
        "mm.default": 3,
        "addmm_.default": 1,
        "loss_statistics.default": 1,
        "loss_gradient.default": 1,
        **({"loss_overlap.default": 1} if overlaps else {}),
    }
    assert large.operators.total() - sum(passes.values()) <= 2, large.operators


def test_every_kernel_compiles_for_an_h100_without_spills_and_with_room_for_three_programs(tmp_path):
    """Where rows are aligned to 16 bytes, as those of a usual vocabulary are."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET")
    command = [sys.executable, str(SUPPORT / "compiled_kernels.py")]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=HANG_SECONDS).stdout
    kernels = json.loads(output)
    assert len(kernels) == 26
    for name, kernel in kernels.items():
        assert kernel["spilled"] == 0, name
        assert 3 * 32 * kernel["warps"] * kernel["registers"] <= 65_536, name  # registers of a multiprocessor
