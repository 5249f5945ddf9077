"""Block attention, the merging of blocks, and a TTT step's attention, compared with plain softmax and autograd in
fp64."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from live_bytes import LargestTensor
from torch import Tensor

from eagle3.attention.block import CPU, PLAIN, BlockOutput, merge_blocks
from eagle3.attention.plain import Scoring, plain_attention, plain_attention_backward
from eagle3.attention.ring import RingMode
from eagle3.attention.schedule import schedule_prefix
from eagle3.attention.ttt import KeyValue, TTTAttention

SCALE = 0.37
# heads, kv heads, head dim
HEADS = [(4, 4, 8), (4, 2, 8), (6, 2, 5), (4, 1, 16), (1, 1, 3)]
every_grouping = pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
# visibility, queries, keys
SHAPES = [("full", 5, 9), ("full", 33, 1), ("full", 1, 70), ("causal", 1, 1), ("causal", 67, 67), ("masked", 7, 40)]
every_shape = pytest.mark.parametrize(("visibility", "queries", "keys"), SHAPES)


def _normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def _close(actual, expected, tolerance):
    scale = expected.abs().max().clamp(min=1e-30)
    return actual.shape == expected.shape and float((actual.double() - expected).abs().max() / scale) < tolerance


# One block ------------------------------------------------------------------------------------------------------------


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


def _softmax_attention(q, k, v, seen, softcap=None):
    """out [Q, heads, d] and lse [Q, heads], head by head."""
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T * SCALE
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, float("-inf"))
        outs.append(scores.softmax(-1) @ v[:, head // group])
        lses.append(scores.logsumexp(-1))
    return torch.stack(outs, 1), torch.stack(lses, 1)


kernel_or_plain = pytest.mark.parametrize("kernel", [CPU, PLAIN], ids=lambda kernel: kernel.name)


@every_grouping
@every_shape
@kernel_or_plain
def test_a_block_equals_softmax_and_its_gradients_equal_autograd(
    kernel, visibility, queries, keys, heads, kv_heads, dim
):
    q, k, v, grad, visible, seen = _block(visibility, queries, keys, heads, kv_heads, dim)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    expected, expected_lse = _softmax_attention(*leaves, seen)
    gradients = torch.autograd.grad(expected, leaves, grad)
    out, lse = kernel.forward(q, k, v, Scoring(SCALE, visibility, visible))
    assert _close(out, expected, 1e-13) and _close(lse, expected_lse, 1e-13)
    actual = kernel.backward(grad, q, k, v, out, lse, Scoring(SCALE, visibility, visible))
    for part, gradient in zip(actual, gradients, strict=True):
        # where a query sees only one key, the gradient of the scores is pure rounding
        assert part.shape == gradient.shape and (part - gradient).abs().max() < 1e-12


@every_grouping
@every_shape
def test_a_softcap_changes_scaled_scores_before_the_softmax(visibility, queries, keys, heads, kv_heads, dim):
    q, k, v, _, visible, seen = _block(visibility, queries, keys, heads, kv_heads, dim)
    actual = plain_attention(q, k, v, Scoring(SCALE, visibility, visible, 0.8))
    for part, expected in zip(actual, _softmax_attention(q, k, v, seen, 0.8), strict=True):
        assert _close(part, expected, 1e-13)


half_precision = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def _rounding(dtype):
    """The relative error of rounding once: half the distance between neighbouring numbers."""
    return torch.finfo(dtype).eps / 2


def _rounded_once(actual, expected, dtype, noise=1e-5):
    return actual.dtype == dtype and bool(
        ((actual - expected).abs() <= _rounding(dtype) * expected.abs() + noise).all()
    )


@half_precision
@kernel_or_plain
@pytest.mark.parametrize(("visibility", "queries", "keys"), [*SHAPES, ("causal", 400, 400), ("full", 300, 500)])
def test_a_block_in_half_precision_is_fp32_arithmetic_rounded_once(visibility, queries, keys, kernel, dtype):
    q, k, v, grad, visible, seen = _block(visibility, queries, keys, 4, 2, 8, dtype)
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected, expected_lse = _softmax_attention(*leaves, seen)
    gradients = torch.autograd.grad(expected, leaves, grad.double())
    out, lse = kernel.forward(q, k, v, Scoring(SCALE, visibility, visible))
    assert _rounded_once(out, expected, dtype) and lse.dtype == torch.float32 and _close(lse, expected_lse, 1e-5)
    # fed with the exact out, because a rounded one would show in sum(grad * out)
    actual = kernel.backward(grad, q, k, v, expected.detach(), lse, Scoring(SCALE, visibility, visible))
    for part, gradient in zip(actual, gradients, strict=True):
        assert _rounded_once(part, gradient, dtype, noise=2e-5)


@every_shape
@pytest.mark.parametrize("chunk_bytes", [1, 700, 6000])
def test_the_plain_path_gives_the_same_in_chunks_of_any_size(chunk_bytes, visibility, queries, keys):
    q, k, v, grad, visible, _ = _block(visibility, queries, keys, 6, 2, 5)
    block, chunked = Scoring(SCALE, visibility, visible), {"chunk_bytes": chunk_bytes}
    softened = block._replace(softcap=0.8)
    whole, capped = (plain_attention(q, k, v, each) for each in (block, softened))
    gradients = plain_attention_backward(grad, q, k, v, *whole, block)
    actual = (
        *plain_attention(q, k, v, block, **chunked),
        *plain_attention(q, k, v, softened, **chunked),
        *plain_attention_backward(grad, q, k, v, *whole, block, **chunked),
    )
    for part, expected in zip(actual, (*whole, *capped, *gradients), strict=True):
        assert (part - expected).abs().max() < 1e-13


@pytest.mark.parametrize("visibility", ["full", "causal", "masked"])
def test_the_plain_path_holds_no_more_scores_than_its_chunk(visibility):
    q, k, v, grad, visible, _ = _block(visibility, 512, 512, 4, 2, 8, torch.bfloat16)
    limit, whole = 2**18, 4 * 512 * 512 * 4  # bytes; the keys in fp32 are smaller than the limit, all scores are not
    with LargestTensor() as largest:
        out, lse = plain_attention(q, k, v, Scoring(SCALE, visibility, visible), chunk_bytes=limit)
        plain_attention_backward(grad, q, k, v, out, lse, Scoring(SCALE, visibility, visible), limit)
    assert limit / 2 < 4 * largest.elements <= limit < whole


# Blocks merged --------------------------------------------------------------------------------------------------------


@every_grouping
def test_merged_parts_of_the_keys_equal_one_block_forward_and_backward(heads, kv_heads, dim):
    """Each part's backward with the merged out and lse is its exact share: dq adds up, dk and dv lie side by side."""
    q, k, v, grad, _, _ = _block("full", 6, 31, heads, kv_heads, dim)
    whole = CPU.forward(q, k, v, Scoring(SCALE, "full"))
    parts = [slice(0, 1), slice(1, 17), slice(17, 31)]
    outputs = [CPU.forward(q, k[part], v[part], Scoring(SCALE, "full")) for part in parts]
    for order in ((0, 1, 2), (2, 0, 1)):
        merged = outputs[order[0]]
        for index in order[1:]:
            merged = merge_blocks(merged, outputs[index])
        assert _close(merged.out, whole.out, 1e-13) and _close(merged.lse, whole.lse, 1e-13)
    expected = CPU.backward(grad, q, k, v, *whole, Scoring(SCALE, "full"))
    shares = [CPU.backward(grad, q, k[part], v[part], *merged, Scoring(SCALE, "full")) for part in parts]
    dq, dk, dv = zip(*shares, strict=True)
    for actual, exact in zip((sum(dq), torch.cat(dk), torch.cat(dv)), expected, strict=True):
        assert _close(actual, exact, 1e-12)


def test_merging_is_exact_where_one_part_outweighs_the_other_by_any_factor():
    a = BlockOutput(torch.full((1, 1, 2), 3.0), torch.tensor([[-400.0]]))
    b = BlockOutput(torch.full((1, 1, 2), 5.0), torch.tensor([[400.0]]))
    nothing = BlockOutput(torch.zeros(1, 1, 2), torch.tensor([[float("-inf")]]))
    for merged, expected in ((merge_blocks(a, b), b), (merge_blocks(b, a), b), (merge_blocks(nothing, a), a)):
        assert torch.equal(merged.out, expected.out) and torch.equal(merged.lse, expected.lse)


# A TTT step -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Step k on a stream: the document of each row; the rows of queries [Q] and keys [S], with -1 for pads; their
    tensors.

    q, grad [Q, heads, d]; prefix: K_0, V_0 [S, kv_heads, d]; own: K_1..K_k, then V_1..V_k, each [Q, kv_heads, d].
    """

    documents: Tensor
    query_rows: Tensor
    key_rows: Tensor
    q: Tensor
    prefix: KeyValue
    own: tuple[Tensor, ...]
    grad: Tensor
    window: int | None = None

    @property
    def k(self) -> int:
        return len(self.own) // 2

    @property
    def pairs(self) -> list[KeyValue]:
        """(K_i, V_i) for i = 1..k."""
        return [KeyValue(*pair) for pair in zip(self.own[: self.k], self.own[self.k :], strict=True)]

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return (self.q, *self.prefix, *self.own)

    def holding(self, leaves: Sequence[Tensor]) -> "Step":
        """The same step on other tensors, in the order of `leaves`."""
        q, key, value, *own = leaves
        return replace(self, q=q, prefix=KeyValue(key, value), own=tuple(own))

    def position(self, rows: Tensor) -> Tensor:
        """Each row's position in its document. A pad gets that of row 0."""
        firsts = torch.searchsorted(self.documents, self.documents)
        return (torch.arange(len(firsts)) - firsts)[rows.clamp(min=0)]

    def run(self, topology, block: int, mode: RingMode = "gather") -> Tensor:
        attention = TTTAttention.over(topology.alone, topology.alone, SCALE, mode)
        positions = self.position(self.query_rows)
        # a window counts from t + k, a schedule from the row t
        window = None if self.window is None else self.window - self.k
        schedule = schedule_prefix(self.query_rows, positions, self.key_rows, block=block, window=window)
        return attention(self.q, attention.start(self.prefix).shared, (schedule,), self.pairs)

    def defined(self) -> Tensor:
        """The definition: one softmax over the visible prefix and own keys, head by head; 0 for a row that sees
        none."""
        at, of = self.position(self.query_rows) + self.k, self.position(self.key_rows)
        seen = self.documents[self.query_rows][:, None] == self.documents[self.key_rows]
        seen &= (self.query_rows[:, None] >= 0) & (self.key_rows >= 0) & (self.key_rows <= self.query_rows[:, None])
        if self.window is not None:
            seen &= at[:, None] - of < self.window
        rows = torch.arange(len(seen)) if self.own else seen.any(1).nonzero().flatten()
        heads, group = [], self.q.shape[1] // self.prefix.key.shape[1]
        for head in range(self.q.shape[1]):
            q, shared = self.q[rows, head], head // group
            prefix = (q @ self.prefix.key[:, shared].T).masked_fill(~seen[rows], float("-inf"))
            own = [(q * pair.key[rows, shared]).sum(-1, keepdim=True) for pair in self.pairs]
            p = (SCALE * torch.cat([prefix, *own], -1)).softmax(-1)
            out = p[:, : len(of)] @ self.prefix.value[:, shared]
            for i, pair in enumerate(self.pairs):
                out = out + p[:, len(of) + i, None] * pair.value[rows, shared]
            heads.append(out)
        return torch.zeros_like(self.q).index_copy(0, rows, torch.stack(heads, 1))


def _equals_definition(step: Step, out: Tensor, tolerance: float) -> bool:
    """Whether the output, and the gradients of q, K_0, V_0 and every own key and value, equal the definition's."""
    leaves = [leaf.detach().double().requires_grad_() for leaf in step.leaves]
    expected = step.holding(leaves).defined()
    exact = (expected, *torch.autograd.grad(expected, leaves, step.grad.double()))
    actual = (out, *torch.autograd.grad(out, step.leaves, step.grad))
    assert all(part.dtype == step.q.dtype for part in actual)
    return all(_close(*pair, tolerance) for pair in zip(actual, exact, strict=True))


# documents, query rows, key rows
Rows = tuple[Tensor, Tensor, Tensor]


def _random_rows(seed: int) -> Rows:
    """Three documents with random queries. The keys include the queries' own rows; pads are at both ends."""
    generator = torch.Generator().manual_seed(seed)
    documents = torch.repeat_interleave(torch.arange(3), torch.randint(1, 15, (3,), generator=generator))
    query = torch.rand(len(documents), generator=generator) < 0.6
    key = query | (torch.rand(len(documents), generator=generator) < 0.8)
    pad = torch.tensor([-1, -1])
    return documents, torch.cat((query.nonzero().flatten(), pad)), torch.cat((key.nonzero().flatten(), pad[:1]))


def _step(rows, k, window=None, heads=4, kv_heads=2, dim=5, dtype=torch.float64) -> Step:
    generator, (queries, keys) = torch.Generator().manual_seed(k), (len(each) for each in rows[1:])
    shapes = [(queries, heads, dim), *[(keys, kv_heads, dim)] * 2, *[(queries, kv_heads, dim)] * (2 * k)]
    q, key, value, *own = (_normal(generator, *shape, dtype=dtype).requires_grad_() for shape in shapes)
    grad = _normal(generator, *shapes[0], dtype=dtype)
    return Step(*rows, q, KeyValue(key, value), tuple(own), grad, window)


@pytest.mark.parametrize("mode", ["gather", "p2p"])
@pytest.mark.parametrize("window", [None, 4, 9])
@pytest.mark.parametrize("k", range(4))
def test_a_step_equals_one_softmax_over_prefix_and_own_keys(topology, k, window, mode):
    for seed in range(4):
        step = _step(_random_rows(seed), k, window)
        assert _equals_definition(step, step.run(topology, block=3, mode=mode), 1e-12)


@pytest.mark.parametrize("block", [1, 2, 8, 512])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_a_step_equals_the_definition_whatever_block_and_heads(topology, heads, kv_heads, dim, block):
    step = _step(_random_rows(7), 2, 6, heads, kv_heads, dim)
    assert _equals_definition(step, step.run(topology, block), 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)], ids=["fp32", "bf16"])
def test_a_step_in_lower_precision_stays_within_its_rounding(topology, dtype, tolerance):
    for seed in range(5):
        for k, window in ((0, None), (0, 4), (1, 4), (3, None)):
            step = _step(_random_rows(seed), k, window, dtype=dtype)
            assert _equals_definition(step, step.run(topology, block=3), tolerance)


def test_a_pad_gives_zero_and_nothing_depends_on_what_pads_hold(topology):
    """At step 0. From step 1 on, a query pad has its own keys, and nothing reads its output."""
    step = _step(_random_rows(2), 0)
    pads = step.query_rows < 0, step.key_rows < 0, step.key_rows < 0
    grad = step.grad.masked_fill(pads[0][:, None, None], 0)
    out = step.run(topology, block=3)
    results = out, *torch.autograd.grad(out, step.leaves, grad)
    assert not any(result[pad].any() for result, pad in zip(results, (pads[0], *pads), strict=False))

    filled = [leaf.detach().clone() for leaf in step.leaves]
    for leaf, pad in zip(filled, pads, strict=False):
        leaf[pad] = 1e4
    leaves = [leaf.requires_grad_() for leaf in filled]
    out = step.holding(leaves).run(topology, block=3)
    for result, same in zip(results, (out, *torch.autograd.grad(out, leaves, grad)), strict=True):
        assert bool(result.isfinite().all()) and torch.equal(result, same)


@pytest.mark.parametrize("mode", ["gather", "p2p"])
@pytest.mark.parametrize("k", [0, 2])
def test_a_rank_with_nothing_but_pads_gives_finite_outputs_and_zero_gradients(topology, k, mode):
    documents, query_rows, key_rows = _random_rows(2)
    for keys in (key_rows, torch.full_like(key_rows, -1)):
        step = _step((documents, torch.full_like(query_rows, -1), keys), k)
        out = step.run(topology, block=3, mode=mode)
        gradients = torch.autograd.grad(out, step.leaves, torch.zeros_like(step.grad))
        assert bool(out.isfinite().all()) and not any(gradient.any() for gradient in gradients)
