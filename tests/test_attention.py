"""Block attention, its merging, and the attention of a TTT step against plain softmax with autograd in fp64."""

import pytest
import torch
from torch import Tensor

from eagle3.attention.block import (
    BlockOutput,
    _plain_backward,
    _plain_forward,
    block_attention,
    block_attention_backward,
    merge_blocks,
)
from eagle3.attention.ttt import schedule_prefix, ttt_attention

SCALE = 0.37
# heads, kv heads, head dim
HEADS = [(4, 4, 8), (4, 2, 8), (6, 2, 5), (4, 1, 16), (1, 1, 3)]
every_grouping = pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
# visibility, queries, keys
SHAPES = [("full", 5, 9), ("full", 33, 1), ("full", 1, 70), ("causal", 1, 1), ("causal", 67, 67), ("masked", 7, 40)]
every_shape = pytest.mark.parametrize(("visibility", "queries", "keys"), SHAPES)


def _normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def _block(visibility, queries, keys, heads, kv_heads, dim, dtype=torch.float64):
    """q, k, v, upstream gradient, mask or None, and the mask as plain softmax needs it."""
    generator = torch.Generator().manual_seed(queries * 100 + keys + heads)
    q, grad = (_normal(generator, queries, heads, dim, dtype=dtype) for _ in range(2))
    k, v = (_normal(generator, keys, kv_heads, dim, dtype=dtype) for _ in range(2))
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if visibility == "causal":
        seen = seen.tril()
    if visibility == "masked":
        seen = torch.rand(queries, keys, generator=generator) < 0.4
        seen[torch.arange(queries), torch.randint(keys, (queries,), generator=generator)] = True
    return q, k, v, grad, seen if visibility == "masked" else None, seen


def _softmax_attention(q, k, v, seen):
    """out [Q, heads, d] and lse [Q, heads], head by head."""
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for head in range(q.shape[1]):
        scores = (q[:, head] @ k[:, head // group].T * SCALE).masked_fill(~seen, float("-inf"))
        outs.append(scores.softmax(-1) @ v[:, head // group])
        lses.append(scores.logsumexp(-1))
    return torch.stack(outs, 1), torch.stack(lses, 1)


def _close(found, wanted, tolerance):
    scale = wanted.abs().max().clamp(min=1e-30)
    return found.shape == wanted.shape and float((found.double() - wanted).abs().max() / scale) < tolerance


@every_grouping
@every_shape
def test_a_block_equals_softmax_and_its_gradients_equal_autograd(visibility, queries, keys, heads, kv_heads, dim):
    q, k, v, grad, visible, seen = _block(visibility, queries, keys, heads, kv_heads, dim)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    expected, expected_lse = _softmax_attention(*leaves, seen)
    gradients = torch.autograd.grad(expected, leaves, grad)
    out, lse = block_attention(q, k, v, SCALE, visibility, visible)
    assert _close(out, expected, 1e-13) and _close(lse, expected_lse, 1e-13)
    found = block_attention_backward(grad, q, k, v, out, lse, SCALE, visibility, visible)
    for part, wanted in zip(found, gradients, strict=True):
        # where a query sees one key alone the gradient of the scores is nothing but rounding
        assert part.shape == wanted.shape and (part - wanted).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@every_grouping
@every_shape
def test_the_plain_path_equals_the_kernel_path(visibility, queries, keys, heads, kv_heads, dim, dtype):
    q, k, v, grad, visible, _ = _block(visibility, queries, keys, heads, kv_heads, dim, dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    kernel = block_attention(q, k, v, SCALE, visibility, visible)
    plain = _plain_forward(q, k, v, SCALE, visibility, visible)
    back = (grad, q, k, v, *kernel, SCALE, visibility, visible)
    pairs = [
        *zip(kernel, plain, strict=True),
        *zip(block_attention_backward(*back), _plain_backward(*back), strict=True),
    ]
    for found, wanted in pairs:
        assert found.shape == wanted.shape and found.dtype == wanted.dtype == dtype
        assert (found - wanted).abs().max() < tolerance


@every_shape
def test_a_bfloat16_block_is_fp32_arithmetic_on_rounded_inputs(visibility, queries, keys):
    q, k, v, grad, visible, seen = _block(visibility, queries, keys, 4, 2, 8, torch.bfloat16)
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected, expected_lse = _softmax_attention(*leaves, seen)
    gradients = torch.autograd.grad(expected, leaves, grad.double())
    out, lse = block_attention(q, k, v, SCALE, visibility, visible)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert _close(out, expected, 2**-8) and _close(lse, expected_lse, 1e-5)
    # fed with the exact out, whose rounding would otherwise show in sum(grad * out)
    found = block_attention_backward(grad, q, k, v, expected.detach(), lse, SCALE, visibility, visible)
    for part, wanted in zip(found, gradients, strict=True):
        assert (
            part.dtype == torch.bfloat16 and (part.double() - wanted).abs().max() <= 2**-8 * wanted.abs().max() + 1e-5
        )


@every_grouping
def test_merged_parts_of_the_keys_equal_one_block_forward_and_backward(heads, kv_heads, dim):
    """Each part's backward with the merged out and lse is its exact share: dq adds up, dk and dv lie side by side."""
    q, k, v, grad, _, _ = _block("full", 6, 31, heads, kv_heads, dim)
    whole = block_attention(q, k, v, SCALE, "full")
    parts = [slice(0, 1), slice(1, 17), slice(17, 31)]
    outputs = [block_attention(q, k[part], v[part], SCALE, "full") for part in parts]
    for order in ((0, 1, 2), (2, 0, 1)):
        merged = outputs[order[0]]
        for index in order[1:]:
            merged = merge_blocks(merged, outputs[index])
        assert _close(merged.out, whole.out, 1e-13) and _close(merged.lse, whole.lse, 1e-13)
    expected = block_attention_backward(grad, q, k, v, *whole, SCALE, "full")
    found = [block_attention_backward(grad, q, k[part], v[part], *merged, SCALE, "full") for part in parts]
    assert _close(sum(each.q for each in found), expected.q, 1e-12)
    assert _close(torch.cat([each.k for each in found]), expected.k, 1e-12)
    assert _close(torch.cat([each.v for each in found]), expected.v, 1e-12)


def test_merging_is_exact_where_one_part_outweighs_the_other_by_any_factor():
    a = BlockOutput(torch.full((1, 1, 2), 3.0), torch.tensor([[-400.0]]))
    b = BlockOutput(torch.full((1, 1, 2), 5.0), torch.tensor([[400.0]]))
    nothing = BlockOutput(torch.zeros(1, 1, 2), torch.tensor([[float("-inf")]]))
    for merged, wanted in ((merge_blocks(a, b), b), (merge_blocks(b, a), b), (merge_blocks(nothing, a), a)):
        assert torch.equal(merged.out, wanted.out) and torch.equal(merged.lse, wanted.lse)


# A stream of four documents: rows that exist as keys, and those of them that are queries.
DOCUMENTS = torch.tensor([0] * 11 + [1] * 1 + [2] * 7 + [3] * 20)
KEY_ROWS = torch.tensor([row for row in range(39) if row not in (9, 10, 17, 18)])
QUERY_ROWS = torch.tensor([0, 2, 3, 4, 8, 11, 12, 16, *range(20, 29), 31, 32, 38])


def _ttt_inputs(steps, heads, kv_heads, dim, queries=20, keys=35):
    generator = torch.Generator().manual_seed(5)
    q, prefix = _normal(generator, queries, heads, dim), [_normal(generator, keys, kv_heads, dim) for _ in range(2)]
    own = [_normal(generator, queries, kv_heads, dim) for _ in range(2 * steps)]
    return [tensor.requires_grad_() for tensor in (q, *prefix, *own)], _normal(generator, queries, heads, dim)


def _run_ttt(tensors, schedule):
    q, prefix_key, prefix_value, *own = tensors
    steps = len(own) // 2
    return ttt_attention(q, prefix_key, prefix_value, tuple(own[:steps]), tuple(own[steps:]), schedule, SCALE)


def _dense_ttt(tensors, seen):
    """The definition: one softmax over the seen prefix and the query's own rows of K_1..K_k."""
    q, prefix_key, prefix_value, *own = tensors
    steps, group = len(own) // 2, q.shape[1] // prefix_key.shape[1]
    heads = []
    for head in range(q.shape[1]):
        shared = head // group
        prefix = (q[:, head] @ prefix_key[:, shared].T * SCALE).masked_fill(~seen, float("-inf"))
        mine = [(q[:, head] * key[:, shared]).sum(-1, keepdim=True) * SCALE for key in own[:steps]]
        p = torch.cat([prefix, *mine], -1).softmax(-1)
        out = p[:, : seen.shape[1]] @ prefix_value[:, shared]
        for step, value in enumerate(own[steps:]):
            out = out + p[:, seen.shape[1] + step, None] * value[:, shared]
        heads.append(out)
    return torch.stack(heads, 1)


def _schedule(block, query_rows=QUERY_ROWS, key_rows=KEY_ROWS):
    return schedule_prefix(query_rows, key_rows, DOCUMENTS[query_rows], DOCUMENTS[key_rows], block)


def _seen(query_rows=QUERY_ROWS, key_rows=KEY_ROWS):
    same = DOCUMENTS[query_rows][:, None] == DOCUMENTS[key_rows][None]
    return same & (key_rows[None] <= query_rows[:, None])


@pytest.mark.parametrize("block", [1, 2, 3, 8, 512])
def test_a_schedule_shows_every_query_the_keys_of_its_document_up_to_itself_once(block):
    shown = torch.zeros(len(QUERY_ROWS), len(KEY_ROWS), dtype=torch.long)
    schedule = _schedule(block)
    for piece in schedule.pieces:
        part = shown[piece.queries, piece.keys]
        assert part.numel() and part.shape[0] <= block
        if piece.visibility == "causal":
            assert part.shape[0] == part.shape[1]
            part += torch.ones_like(part).tril()
        else:
            part += 1 if piece.visibility == "full" else schedule.visible(piece).long()
    assert torch.equal(shown, _seen().long())


@pytest.mark.parametrize("block", [1, 2, 3, 8, 512])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS[1:4])
def test_attention_of_a_step_equals_the_dense_definition_whatever_the_block(block, steps, heads, kv_heads, dim):
    """Output, and the gradients of q, K_0, V_0 and every own key and value."""
    tensors, grad = _ttt_inputs(steps, heads, kv_heads, dim)
    expected = _dense_ttt(tensors, _seen())
    wanted = torch.autograd.grad(expected, tensors, grad)
    out = _run_ttt(tensors, _schedule(block))
    assert _close(out, expected, 1e-13)
    for found, gradient in zip(torch.autograd.grad(out, tensors, grad), wanted, strict=True):
        assert _close(found, gradient, 1e-12)


def test_consecutive_rows_of_one_long_document_equal_the_dense_definition():
    """More queries than one block of the size that training uses, all dense: no piece needs a mask."""
    rows, documents = torch.arange(1100), torch.zeros(1100, dtype=torch.long)
    schedule = schedule_prefix(rows[30:], rows, documents[30:], documents)
    assert [piece.visibility for piece in schedule.pieces] == ["full", "causal"] * 3
    tensors, grad = _ttt_inputs(1, 2, 1, 4, queries=1070, keys=1100)
    expected = _dense_ttt(tensors, rows[None] <= rows[30:, None])
    wanted = torch.autograd.grad(expected, tensors, grad)
    out = _run_ttt(tensors, schedule)
    assert _close(out, expected, 1e-13)
    for found, gradient in zip(torch.autograd.grad(out, tensors, grad), wanted, strict=True):
        assert _close(found, gradient, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_in_lower_precision_stays_within_its_rounding(dtype):
    tensors, grad = _ttt_inputs(3, 4, 2, 8)
    rounded = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    exact = [tensor.detach().double().requires_grad_() for tensor in rounded]
    expected, out = _dense_ttt(exact, _seen()), _run_ttt(rounded, _schedule(3))
    tolerance = 2e-6 if dtype == torch.float32 else 2**-7
    assert out.dtype == dtype and _close(out, expected, tolerance)
    wanted = torch.autograd.grad(expected, exact, grad.to(dtype).double())
    for found, gradient in zip(torch.autograd.grad(out, rounded, grad.to(dtype)), wanted, strict=True):
        assert found.dtype == dtype and _close(found, gradient, 2 * tolerance)


@pytest.mark.parametrize("steps", [0, 2])
def test_gradcheck_passes_on_a_tiny_case(steps):
    """Against finite differences, which know nothing of softmax."""
    query_rows, key_rows = torch.tensor([1, 3, 11, 12, 14]), torch.tensor([0, 1, 2, 3, 11, 12, 13, 14])
    tensors, _ = _ttt_inputs(steps, 2, 1, 2, queries=5, keys=8)
    assert torch.autograd.gradcheck(lambda *inputs: _run_ttt(inputs, _schedule(2, query_rows, key_rows)), tensors)


def test_a_key_that_no_query_sees_gets_a_zero_gradient():
    query_rows = QUERY_ROWS[QUERY_ROWS < 32]
    tensors, grad = _ttt_inputs(1, 4, 2, 8, queries=len(query_rows))
    _run_ttt(tensors, _schedule(4, query_rows)).backward(grad)
    unseen = ~_seen(query_rows).any(0)
    assert unseen.any() and not tensors[1].grad[unseen].any() and not tensors[2].grad[unseen].any()
    assert tensors[1].grad[~unseen].abs().amax((1, 2)).min() > 0
