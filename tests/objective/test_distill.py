"""Blockwise distillation compared with dense softmaxes and autograd, and its memory."""

import pytest
import torch
from distill_cases import HIDDEN, STEPS, WEIGHTS, random_rows

from eagle3.objective.distill import StepSums, Teacher, distill, loss_row_bytes, rows_at_once


def _dense(outputs, head, teacher, query_of):
    """StepSums, computed for one (step, row) after another from dense rows of the vocabulary."""
    z = teacher.last @ teacher.head.T
    q, q_full = z.softmax(-1), (z - teacher.logsumexp[:, None]).exp()
    sums = [[], [], []]
    for step in range(STEPS):
        rows = (query_of[step] >= 0).nonzero().flatten()
        counted = rows[teacher.best[rows] >= 0]
        logits = outputs[step, query_of[step, counted]] @ head.T
        sums[0].append(-(q[counted] * logits.log_softmax(-1)).sum())
        sums[1].append(torch.minimum(q_full[counted], logits.softmax(-1)).sum())
        best = (outputs[step, query_of[step, rows]] @ head.T).argmax(-1)
        sums[2].append((best == teacher.best[rows]).sum().double())
    return StepSums(*(torch.stack(column) for column in sums))


every_weight = pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
VOCABULARY = 50
SIXTEEN_ROWS = 16 * loss_row_bytes(STEPS, VOCABULARY, HIDDEN, torch.float64)
# teacher rows, queries, bytes of a block
SIZES = {
    "one block": (20, 25, 2 * SIXTEEN_ROWS),
    "even blocks": (32, 20, SIXTEEN_ROWS),
    "uneven blocks": (37, 40, SIXTEEN_ROWS),
    "a block a row": (21, 25, 1),
}


@every_weight
@pytest.mark.parametrize(("rows", "queries", "block_bytes"), SIZES.values(), ids=SIZES)
def test_sums_and_gradients_equal_dense_softmaxes(topology, rows, queries, block_bytes, weights):
    case = random_rows(rows, queries, VOCABULARY)
    outputs, head, *_ = case
    expected = _dense(*case)
    surrogate = (weights[0] * expected.cross_entropy + weights[1] * expected.overlap).sum()
    gradients = torch.autograd.grad(surrogate, (outputs, head))
    distilled = distill(*case, weights, topology.tensor, block_bytes=block_bytes)
    assert torch.equal(distilled.sums.correct, expected.correct) and expected.correct.min() > 0
    assert torch.allclose(distilled.sums.cross_entropy, expected.cross_entropy, rtol=1e-12)
    assert torch.allclose(distilled.sums.overlap, expected.overlap, rtol=1e-12)
    assert torch.allclose(distilled.surrogate, surrogate, rtol=1e-12)
    scale = 3.0  # of the upstream gradient, as accumulation or data parallelism would have it
    for actual, gradient in zip(
        torch.autograd.grad(distilled.surrogate * scale, (outputs, head)), gradients, strict=True
    ):
        assert actual.shape == gradient.shape
        assert (actual - scale * gradient).abs().max() < 1e-11 * scale * gradient.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision_stays_within_its_rounding_of_fp64(topology, dtype):
    case = random_rows(40, 30, 64, dtype, seed=2)
    outputs, head, teacher, query_of = case
    exact = Teacher(teacher.last.double(), teacher.head.double(), teacher.best, teacher.logsumexp.double())
    leaves = [tensor.detach().double().requires_grad_() for tensor in (outputs, head)]
    expected = _dense(*leaves, exact, query_of)
    weights = WEIGHTS["cross-entropy"]
    gradients = torch.autograd.grad((weights[0] * expected.cross_entropy).sum(), leaves)
    distilled = distill(*case, weights, topology.tensor)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert distilled.sums.cross_entropy.dtype == torch.float64
    assert torch.allclose(distilled.sums.cross_entropy, expected.cross_entropy, rtol=tolerance)
    for actual, gradient in zip(torch.autograd.grad(distilled.surrogate, (outputs, head)), gradients, strict=True):
        assert actual.dtype == dtype and (actual.double() - gradient).abs().max() < tolerance * gradient.abs().max()


def test_rows_without_a_query_change_nothing(topology):
    """Whatever the teacher says at these rows, even if its probabilities overflow."""
    outputs, head, teacher, query_of = random_rows(12, 8, 20, seed=3)
    query_of[:, [2, 5]] = -1
    nobody = (query_of < 0).all(0)
    other = Teacher(
        torch.where(nobody[:, None], 1e6, teacher.last),
        teacher.head,
        torch.where(nobody, 3, teacher.best),
        teacher.logsumexp,
    )
    distilled = [distill(outputs, head, each, query_of, WEIGHTS["both"], topology.tensor) for each in (teacher, other)]
    assert all(torch.equal(a, b) for a, b in zip(distilled[0].sums, distilled[1].sums, strict=True))
    gradients = [torch.autograd.grad(each.surrogate, (outputs, head)) for each in distilled]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(("rows", "queries", "block_bytes"), SIZES.values(), ids=SIZES)
def test_the_chance_that_sampling_wrote_a_token_by_accepting_it_equals_dense_softmaxes(
    topology, rows, queries, block_bytes
):
    """Only where nothing is differentiated; the sums are the same."""
    case = random_rows(rows, queries, VOCABULARY, seed=6)
    outputs, head, teacher, query_of = case
    differentiated = distill(*case, WEIGHTS["both"], topology.tensor, block_bytes=block_bytes)
    with torch.no_grad():
        alone = distill(*case, WEIGHTS["both"], topology.tensor, block_bytes=block_bytes)
        assert all(torch.equal(a, b) for a, b in zip(alone.sums, differentiated.sums, strict=True))
        assert differentiated.sampled is None and not alone.surrogate.requires_grad
        f = (teacher.last @ teacher.head.T - teacher.logsumexp[:, None]).exp()
        p = (outputs[torch.arange(STEPS)[:, None], query_of] @ head.T).softmax(-1)
    assert bool((teacher.written < 0).any()) and bool((teacher.written >= 0).any())
    for step in range(STEPS):
        for row in (query_of[step] >= 0).nonzero().flatten().tolist():
            token = int(teacher.written[row])
            expected = min(1.0, float(p[step, row, token] / f[row, token])) if token >= 0 else 0.0
            assert float(alone.sampled[step, row]) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [100, 32_000, 151_936])
def test_a_block_takes_as_many_rows_as_its_budget_holds_and_one_at_least(vocabulary, dtype):
    each = loss_row_bytes(7, vocabulary, 64, dtype)
    rows = rows_at_once(2**26, each)
    assert rows * each <= 2**26 < (rows + 1) * each
    assert rows_at_once(1, each) == 1


def test_gradients_are_handed_out_once(topology):
    """Gradients are scaled in place, so a second backward pass must not scale them again."""
    surrogate = distill(*random_rows(8, 9, VOCABULARY), WEIGHTS["both"], topology.tensor).surrogate
    (2 * surrogate).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (2 * surrogate).backward()
