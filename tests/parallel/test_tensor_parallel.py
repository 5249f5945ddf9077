"""Two and four tensor-parallel ranks distil as one process does, and split a draft's weights and put them together
again.

The references do not depend on the ranks: distil on one process (which tests/objective/test_distill.py compares with
dense softmaxes), and the exported tensors, cut here by hand.
"""

import pytest
import torch
from distill_cases import HIDDEN, STEPS, WEIGHTS
from processes import kept
from tensor_parallel_worker import DRAFTS, DTYPES, WORLDS, case_names, compare, exported_draft, make_case, run_draft
from tiny_run import run_script
from torch import Tensor

from eagle3.draft.interchange import exported_tensors
from eagle3.objective.distill import loss_row_bytes, rows_at_once

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
CASES = [(dtype, name) for dtype in DTYPES for name in case_names(dtype)]
every_world = pytest.mark.parametrize("world", WORLDS, ids="tensor {}".format)
every_case = pytest.mark.parametrize(("dtype", "name"), CASES, ids=lambda value: str(value))
every_draft = pytest.mark.parametrize("name", DRAFTS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Computed(dict[int, list[dict]]):
    """What each rank computed, by world and rank."""

    def of(self, world: int, name: str, dtype: torch.dtype) -> list:
        """What each rank computed for one case or draft."""
        return [rank[name, dtype] for rank in self[world]]

    def __repr__(self) -> str:  # a failing test prints its arguments, and these are a thousand tensors
        return "Computed"


@pytest.fixture(scope="module")
def computed(tmp_path_factory) -> Computed:
    folder = tmp_path_factory.mktemp("tensor_parallel")
    run_script("tests/support/tensor_parallel_worker.py", folder)
    return Computed({world: kept(folder, f"tensor {world}") for world in WORLDS})


def _close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether all entries are within the tolerance, relative to the largest entry; exactly, if that is 0."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    difference, scale = (actual - expected).abs(), expected.abs()
    return not actual.numel() or bool(difference.max() <= TOLERANCE[dtype] * scale.max())


@every_world
@every_case
def test_sums_surrogate_and_gradients_are_those_of_one_process(computed, topology, world, dtype, name):
    """Compares the sums step by step, the gradient of the outputs (whole on every rank) and that of the head (by
    rows)."""
    expected = compare(make_case(name, dtype)._replace(fused=False), topology.tensor)
    assert expected["collectives"] == 0
    ranks = computed.of(world, name, dtype)
    for rank in ranks:
        assert all(_close(rank[part], expected[part], dtype) for part in ("surrogate", "d_outputs", "sampled"))
        assert torch.allclose(rank["sums"][:2], expected["sums"][:2], rtol=TOLERANCE[dtype], atol=0)
        assert torch.equal(rank["sums"][2], expected["sums"][2])
    assert {len(rank["d_head"]) for rank in ranks} == {len(expected["d_head"]) // world}
    assert _close(torch.cat([rank["d_head"] for rank in ranks]), expected["d_head"], dtype)


@every_world
@every_case
def test_every_rank_has_the_same_bits_and_without_autograd_the_same_sums(computed, world, dtype, name):
    first, *others = computed.of(world, name, dtype)
    assert torch.equal(first["sums_alone"], first["sums"])
    for other in others:
        for part in first.keys() - {"d_head"}:
            assert torch.equal(other[part], first[part]), part


def test_the_cases_hold_what_they_are_named_for():
    for dtype, name in CASES:
        rows = make_case(name, dtype).rows
        teacher = rows.teacher
        if name in WEIGHTS:
            assert (rows.query_of == -1).any() and (teacher.best == -1).any()
            assert ((rows.query_of >= 0) & (teacher.best == -1)).any()
        if name == "several blocks":
            assert blocks_of_several(1) > blocks_of_several(2) > 1
        if name == "logits that overflow exp":
            assert (rows.outputs @ rows.head.T).max().exp().isinf()
    nonzero = {name: tuple(bool(weight.any()) for weight in make_case(name, torch.float64).weights) for name in WEIGHTS}
    assert nonzero == {"cross-entropy": (True, False), "overlap": (False, True), "both": (True, True)}


def blocks_of_several(world: int) -> int:
    """How many blocks the case of several blocks has on each rank."""
    case = make_case("several blocks", torch.float64)
    rows = rows_at_once(case.block_bytes, loss_row_bytes(STEPS, len(case.rows.head) // world, HIDDEN, torch.float64))
    return -(-len(case.rows.teacher.best) // rows)


@every_world
@every_dtype
def test_of_equal_logits_the_lowest_id_wins_on_whichever_rank_it_is(computed, world, dtype):
    """The teacher's best is the lowest of the tied ids at step 0, a different one at step 1, and each of them once at
    step 2."""
    rows = make_case("ties", dtype).rows
    logits = torch.einsum("kqh,vh->kqv", rows.outputs, rows.head)[0]
    assert torch.equal((logits == logits.amax(-1, keepdim=True)).sum(-1), torch.tensor([3, 2, 2, 8]))
    for rank in computed.of(world, "ties", dtype):
        assert rank["sums"][2].tolist() == [4.0, 0.0, 4.0]


@every_world
def test_a_block_takes_two_all_reduces_three_with_overlap_and_a_call_two_more_and_one_a_step(computed, world):
    """Per block: MAX and SUM of the softmaxes, and one more for the overlap's gradient. Per call: best ids, sums, and
    each step's gradient."""

    def collectives(name):
        return {int(rank["collectives"]) for rank in computed.of(world, name, torch.float64)}

    assert collectives("cross-entropy") == {2 + 2 + STEPS}
    assert collectives("both") == {3 + 2 + STEPS}
    assert collectives("several blocks") == {3 * blocks_of_several(world) + 2 + STEPS}
    assert collectives("no teacher rows") == {0}


# parameters by how a rank's part comes from the exported tensors, each with those it is made of
CUT = {
    "rows": {
        "layer.self_attention.linear_q.weight": ["midlayer.self_attn.q_proj.weight"],
        "layer.self_attention.linear_k.weight": ["midlayer.self_attn.k_proj.weight"],
        "layer.self_attention.linear_v.weight": ["midlayer.self_attn.v_proj.weight"],
        "layer.mlp.linear_fc1.weight": ["midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"],
        "lm_head.weight": ["lm_head.weight"],
        "embedding.weight": ["embed_tokens.weight"],
    },
    "columns": {
        "layer.self_attention.linear_proj.weight": ["midlayer.self_attn.o_proj.weight"],
        "layer.mlp.linear_fc2.weight": ["midlayer.mlp.down_proj.weight"],
    },
    "not at all": {
        "fc.weight": ["fc.weight"],
        "norm.weight": ["norm.weight"],
        "layer.hidden_norm.weight": ["midlayer.hidden_norm.weight"],
    },
}


def _part(whole: Tensor, how: str, rank: int, world: int) -> Tensor:
    if how == "not at all":
        return whole
    if how == "columns":
        return _part(whole.T, "rows", rank, world).T
    size = len(whole) // world
    return whole[rank * size : (rank + 1) * size]


@every_world
@every_dtype
@every_draft
def test_each_rank_loads_its_part_and_padding_is_zero(computed, world, dtype, name):
    weights = dict(exported_draft(name, dtype).weights)
    embedding = weights["embed_tokens.weight"]
    missing = -len(embedding) % world
    assert bool(missing) == (name != "even vocabulary")
    weights["embed_tokens.weight"] = torch.cat((embedding, torch.zeros(missing, 16, dtype=dtype)))
    for rank, tensors in enumerate(computed.of(world, name, dtype)):
        for how, parameters in CUT.items():
            for parameter, sources in parameters.items():
                expected = torch.cat([_part(weights[source], how, rank, world) for source in sources])
                assert torch.equal(tensors["part"][parameter], expected), parameter
        assert torch.equal(tensors["part of lm_head"][""], tensors["part"]["lm_head.weight"])


@every_world
@every_dtype
@every_draft
def test_whole_tensors_gives_back_what_was_loaded_on_every_rank(computed, world, dtype, name):
    """Bit for bit, with gate and up in their places and the embedding without its padding."""
    weights = exported_draft(name, dtype).weights
    for tensors in computed.of(world, name, dtype):
        exported = exported_tensors(tensors["whole"])
        assert exported.keys() == weights.keys()
        assert [key for key, tensor in exported.items() if not torch.equal(tensor, weights[key])] == []


@every_world
@every_dtype
@every_draft
def test_the_cut_modules_compute_what_the_whole_ones_do_and_so_do_their_gradients(
    computed, topology, world, dtype, name
):
    expected = run_draft(name, dtype, topology)
    assert expected["gradient"].keys() == {
        "layer.mlp.linear_fc1.weight",
        "layer.mlp.linear_fc2.weight",
        "layer.self_attention.linear_proj.weight",
    }
    for tensors in computed.of(world, name, dtype):
        for kind in ("output", "gradient"):
            wrong = [key for key, each in expected[kind].items() if not _close(tensors[kind][key], each, dtype)]
            assert tensors[kind].keys() == expected[kind].keys() and wrong == []


def test_a_misshapen_tensor_is_refused_with_whole_shapes_on_every_rank(computed):
    for ranks in computed.values():
        for refusal in (rank["refusal"] for rank in ranks):
            assert "midlayer.mlp.gate_proj.weight" in refusal and "[26, 16]" in refusal and "[24, 16]" in refusal
