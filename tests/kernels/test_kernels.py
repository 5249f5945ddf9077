"""Kernels are compared with the definition before use; wrong, slow and broken ones are found and named."""

import json
import os
from dataclasses import replace

import pytest
import torch
from cuda_operators import ByDefinition
from definition import small_config
from planted_kernels import ATTENTION_FAULTS, DEMAND, LOSS_FAULTS, OWN_FAULTS, POINTWISE_FAULTS, slow
from processes import kept
from tiny_run import run_script

from eagle3.attention import block
from eagle3.attention.block import PLAIN_OWN, block_candidates
from eagle3.attention.fused_own import FUSED_OWN
from eagle3.draft.fused_pointwise import FUSED_POINTWISE
from eagle3.draft.pointwise import PLAIN_POINTWISE
from eagle3.draft.rope import Rotation
from eagle3.errors import UserError
from eagle3.kernels import choice
from eagle3.kernels.cases import prove_own
from eagle3.kernels.choice import LOSS, OTHERS, OWN, POINTWISE, agreement, changes, choose_kernels, parsed, pick, prove
from eagle3.kernels.proof import KernelDemand, KernelVerdict
from eagle3.objective.fused import FUSED
from eagle3.objective.softmaxes import PLAIN

CPU = torch.device("cpu")
KINDS = ("full", "causal", "masked")
IN_TRITON = (torch.float32, torch.bfloat16, torch.float16)
every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)


def named(value) -> str:
    return getattr(value, "name", str(value))


def proved(topology, of, *kernels, **changes) -> list[KernelVerdict]:
    """The verdicts on kernels for a kind of block, for own keys, position-wise work or the loss."""
    return prove({of: kernels}, replace(DEMAND, **changes), topology, timed=False)[of]


@every_dtype
@pytest.mark.parametrize(
    ("of", "kernels"),
    [
        *((kind, [block.CPU, block.PLAIN]) for kind in KINDS),
        *((OWN, [PLAIN_OWN]), (POINTWISE, [PLAIN_POINTWISE]), (LOSS, [PLAIN])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_cpus_kernel_and_plain_ones_are_right(topology, of, kernels, dtype):
    for verdict in proved(topology, of, *kernels, dtype=dtype):
        assert verdict.right and 0 < verdict.error <= 1, verdict


@pytest.mark.parametrize("kind", [*KINDS, "banded", "windowed"])
def test_the_calls_of_cudas_kernels_are_right_where_the_operators_are_what_they_say(topology, kind):
    kernels = block_candidates(torch.device("cuda"), torch.bfloat16, 16)[kind]
    with ByDefinition():
        verdicts = proved(topology, kind, *kernels)
    assert verdicts and all(verdict.right for verdict in verdicts), verdicts


interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is off, see conftest.py"
)


OF_OWN_KEYS = [
    {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "steps": steps}
    for heads, kv_heads, head_dim, steps in ((6, 2, 16, 3), (5, 1, 24, 8), (3, 3, 8, 2))
]
TRITON = [
    *((OWN, FUSED_OWN, {"dtype": dtype, **shape}) for dtype in IN_TRITON for shape in OF_OWN_KEYS),
    *((POINTWISE, FUSED_POINTWISE, {"dtype": dtype}) for dtype in IN_TRITON),
    (LOSS, FUSED, {}),
]


@interpreted
@pytest.mark.parametrize(("of", "kernel", "changes"), TRITON, ids=named)
def test_the_triton_kernels_are_right(topology, of, kernel, changes):
    (verdict,) = proved(topology, of, kernel, **changes)
    assert verdict.right and 0 < verdict.error <= 1, verdict


@interpreted
@pytest.mark.parametrize("heads", [(5,), (3, 3), (70, 8, 8)], ids=str)
def test_the_triton_kernel_cuts_and_rotates_whichever_parts_there_are(heads):
    """A row of the last has more than one program's pairs."""
    generator = torch.Generator().manual_seed(len(heads))
    angles = torch.randn(7, 1, 20, generator=generator)
    rotation, x = Rotation(angles.cos(), angles.sin()), torch.randn(7, sum(heads) * 40, generator=generator)
    parts, expected = (
        kernel.rotate(x, rotation, heads, torch.float32) for kernel in (FUSED_POINTWISE, PLAIN_POINTWISE)
    )
    back = (kernel.rotate_backward(expected, rotation) for kernel in (FUSED_POINTWISE, PLAIN_POINTWISE))
    for actual, right in (*zip(parts, expected, strict=True), tuple(back)):
        torch.testing.assert_close(actual, right, rtol=0, atol=1e-6 * float(x.abs().max()))
    torch.testing.assert_close(PLAIN_POINTWISE.rotate_backward(expected, rotation), x)  # a rotation's inverse


FAULTS = [
    *((torch.float32, of, *fault) for of in KINDS for fault in ATTENTION_FAULTS),
    *((torch.bfloat16, of, *fault) for of in KINDS for fault in ATTENTION_FAULTS),
    *((torch.float32, POINTWISE, *fault) for fault in POINTWISE_FAULTS),
    *((torch.float32, OWN, *fault) for fault in OWN_FAULTS),
    *((torch.float32, LOSS, *fault) for fault in LOSS_FAULTS),
]


@pytest.mark.parametrize(("dtype", "of", "fault", "reason"), FAULTS, ids=named)
def test_a_wrong_kernel_is_found_out_and_said_what_of(topology, dtype, of, fault, reason):
    (verdict,) = proved(topology, of, fault, dtype=dtype)
    assert not verdict.right and reason in verdict.reason and verdict.error > 1


def candidates(*attention, others=(PLAIN_OWN, PLAIN_POINTWISE, PLAIN)) -> dict:
    of_others = {kind: [kernel] if kernel else [] for kind, kernel in zip(OTHERS, others, strict=True)}
    return {**dict.fromkeys(KINDS, attention), "banded": [], "windowed": [], **of_others}


@pytest.fixture
def small_timing(monkeypatch):
    monkeypatch.setattr("eagle3.kernels.cases.TIMED_ROWS", 32)


def test_the_fastest_right_kernel_is_used_and_every_wrong_one_is_told(topology, small_timing):
    wrong, _ = ATTENTION_FAULTS[0]
    of = candidates(slow(block.CPU), wrong, block.PLAIN)
    choice = pick(of, prove(of, DEMAND, topology, timed=True))
    assert choice.names == {**dict.fromkeys((*KINDS, *OTHERS), "plain"), "banded": None, "windowed": None}
    assert choice.kernels.blocks.causal is block.PLAIN and choice.kernels.loss is PLAIN
    assert choice.line == "attention: plain (full, causal, masked, own); pointwise: plain; loss: plain"
    assert [warning.split(":")[0] for warning in choice.warnings] == [
        f"kernel {wrong.name} is not used for {kind} blocks of attention" for kind in KINDS
    ]
    assert "out is off by" in choice.warnings[0] and "bound 1.0e-04" in choice.warnings[0]


def test_a_resumed_job_keeps_a_kernel_that_is_still_right_and_says_what_has_changed(topology, small_timing):
    of = candidates(slow(block.CPU), block.PLAIN)
    table = prove(of, DEMAND, topology, timed=True)
    before = dict.fromkeys(KINDS, "slow") | dict.fromkeys(("banded", "windowed"))
    before |= {OWN: "plain", POINTWISE: "plain", LOSS: "fused"}
    kept = pick(of, table, before).names
    assert kept == before | {LOSS: "plain"}
    assert changes(before, kept) == "the loss: fused, now plain"
    assert changes(kept, kept) == changes({}, kept) == ""


def test_without_a_right_kernel_there_is_no_job(topology):
    (first, _), (second, _), *_ = ATTENTION_FAULTS
    of = candidates(first, second)
    with pytest.raises(UserError, match=f"none computes full blocks .*rightly.*{first.name}: .*{second.name}: "):
        pick(of, prove(of, DEMAND, topology, timed=False))


def test_a_target_without_a_loss_gets_kernels_for_its_attention_alone(topology, small_timing):
    demand = replace(DEMAND, steps=0, hidden=0, columns=0)
    assert choose_kernels(demand, topology).kernels.loss is None
    of = candidates(block.CPU, block.PLAIN, others=(None, None, None))
    with torch.no_grad():  # as a prefill runs
        choice = pick(of, prove(of, demand, topology, timed=True))
    assert choice.table[LOSS] == [] and choice.kernels.loss is None and "loss" not in choice.line


def test_what_is_wrong_on_one_rank_is_used_on_none(tmp_path):
    """Two processes, the second of which has a wrong kernel."""
    run_script("tests/support/planted_kernels.py", tmp_path)
    ranks = kept(tmp_path, "job")
    assert len(ranks) == 2
    for names, warnings in ranks:
        assert names == {**dict.fromkeys((*KINDS, *OTHERS), "plain"), "banded": None, "windowed": None}
        assert all("on rank 1 (wrong on 1 of 2)" in warning for warning in warnings) and len(warnings) == len(KINDS)


def test_of_ranks_that_agree_the_slowest_one_counts():
    tables = [
        {"full": [KernelVerdict("a", 0.1, "", seconds), KernelVerdict("b", 0.2, "", 2.0)]} for seconds in (1.0, 3.0)
    ]
    assert [verdict.seconds for verdict in agreement(tables)["full"]] == [3.0, 2.0]
    broken = [tables[0], {"full": [KernelVerdict("a", float("inf"), "raised"), KernelVerdict("b", 0.2, "", 2.0)]}]
    assert not agreement(broken)["full"][0].right
    lacking = [tables[0], {"full": tables[1]["full"][1:]}]  # a rank without the package
    assert [verdict.kernel for verdict in agreement(lacking)["full"]] == ["b"]
    assert parsed(json.loads(json.dumps(tables[0]))) == tables[0]


def test_on_a_cpu_the_choice_is_fixed_and_a_kernel_can_be_pinned(topology, tmp_path):
    def chosen(pinned):
        return choose_kernels(DEMAND, topology, tmp_path, pinned)

    fixed = chosen("auto")
    assert fixed.names["full"] == "cpu" and fixed.table == {} and not [*tmp_path.iterdir()]
    assert set(chosen("plain").names.values()) == {"plain", None}
    with pytest.raises(UserError, match="training.kernels: 'flash' does not run .* set it to plain or auto"):
        chosen("flash")


def test_a_pinned_kernel_computes_what_it_can_and_the_usual_ones_the_rest():
    blocks = block_candidates(torch.device("cuda"), torch.bfloat16, 16)
    of = choice._pinned({**blocks, OWN: [PLAIN_OWN], POINTWISE: [PLAIN_POINTWISE], LOSS: [PLAIN]}, "efficient")
    assert {kind: [each.name for each in kernels] for kind, kernels in of.items()} == {
        **dict.fromkeys(KINDS, ["efficient"]),
        **dict.fromkeys(("banded", "windowed"), []),
        **dict.fromkeys(OTHERS, ["plain"]),
    }


@pytest.mark.parametrize(
    ("tensor", "ulysses", "heads", "kv_heads"), [(1, 1, 8, 2), (2, 1, 4, 1), (1, 4, 2, 1), (2, 4, 1, 1)]
)
def test_a_demand_is_of_one_ranks_heads(tensor, ulysses, heads, kv_heads):
    shape = small_config(num_attention_heads=8, draft_vocab_size=40, window=9)
    demand = KernelDemand.of(shape, tensor, ulysses, torch.bfloat16, steps=5)
    assert (demand.heads, demand.kv_heads, demand.columns, demand.window) == (heads, kv_heads, 40 // tensor, 9)
    assert demand.own_heads == (8 // tensor, 2 // tensor)


def test_own_keys_are_tried_with_the_heads_that_they_have_under_ulysses():
    def doubled(prefix, q, own, scale):
        output = PLAIN_OWN.forward(prefix, q, own, scale)
        return output._replace(out=output.out * (2 if q.shape[1] > 4 * own[0].shape[1] else 1))

    dealt = replace(DEMAND, heads=2, kv_heads=1)
    wrong = PLAIN_OWN._replace(name="wrong in large groups", forward=doubled)
    (alone,), (undealt,) = (prove_own([wrong], each, CPU, False) for each in (dealt, replace(dealt, undealt=(16, 2))))
    assert alone.right and undealt.reason.startswith("out is off by")


def test_compiled_kernels_are_kept_where_files_can_be_made_and_locked(tmp_path, monkeypatch):
    names = [f"{choice.FLASH4_CACHE}_{name}" for name in ("ENABLED", "DIR")]
    for name in names:
        monkeypatch.setenv(name, "")  # whatever is set is taken back afterwards
        monkeypatch.delenv(name)
    (tmp_path / "file").touch()
    choice._keep_compiled(tmp_path / "file" / "flash4")
    assert not any(name in os.environ for name in names)
    choice._keep_compiled(tmp_path / "flash4")
    assert [os.environ[name] for name in names] == ["1", str(tmp_path / "flash4")]
