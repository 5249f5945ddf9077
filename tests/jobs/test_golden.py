"""The golden cases through the training code: they pass in every number format, and a wrong number does not pass."""

import pytest
import torch
from places import GOLDEN, ZERO2
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_run import deepspeed, finish, launch, run_script

from eagle3.errors import UserError
from eagle3.jobs.verify import read_case, read_tensors, relative_errors, run_case, tolerance

CASES = ("dense", "ragged", "windowed", "served")
GRADIENT = "grad.midlayer.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def outcomes(topology):
    """(case, dtype) -> what run_case gave, each run once."""
    torch.set_num_threads(1)
    return {
        (case, dtype): run_case(read_case(GOLDEN / case), topology, 7, dtype, ZERO2)
        for case in CASES
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    }


def beyond(actual, expected, dtype):
    """The names whose error is not allowed in `dtype`."""
    errors = relative_errors(actual, expected)
    return {name for name, error in errors.items() if not error <= tolerance(name, dtype)}


def link_case(folder, expected):
    """The ragged case in `folder`, with different expectations."""
    folder.mkdir()
    for name in ("config.json", "draft.safetensors", "inputs.safetensors"):
        (folder / name).symlink_to(GOLDEN / "ragged" / name)
    save_file(expected, folder / "expected.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_loss_steps_and_every_gradient_are_the_golden_ones(outcomes, case, dtype):
    """In bf16 single gradients of `windowed` are worth nothing: see BFLOAT16_GRADIENTS. fp64 comes as close as the
    expectations allow, which are stored in fp32: rounding to fp32 costs 6e-8. A cast to fp32 in the computation would
    show."""
    actual, expected = outcomes[case, dtype], read_tensors(GOLDEN / case / "expected.safetensors")
    assert actual.keys() == expected.keys()
    noisy = (case, dtype) == ("windowed", torch.bfloat16)
    assert {name for name in beyond(actual, expected, dtype) if not (noisy and name.startswith("grad."))} == set()
    if dtype == torch.float64:
        errors = relative_errors(actual, expected)
        assert max(errors.values()) < 2e-7, errors
    # Counts do not depend on the draft, and therefore not on rounding.
    for name in ("acc_denom", "position_count"):
        assert torch.equal(actual[name].double(), expected[name].double()), name


@pytest.mark.parametrize("name", ["loss", "ploss", "acceptance_rate", "position_count", GRADIENT, "grad.fc.weight"])
def test_a_single_entry_wrong_by_thirty_millionths_is_found(outcomes, name):
    """The error is three times what fp32 is allowed, in the largest entry. Checked in the two precise formats."""
    expected = read_tensors(GOLDEN / "ragged" / "expected.safetensors")
    wrong = expected[name].double().clone()
    wrong.view(-1)[wrong.abs().argmax()] *= 1 + 3e-5
    for dtype in (torch.float64, torch.float32):
        assert beyond(outcomes["ragged", dtype], expected | {name: wrong}, dtype) == {name}


def test_gradients_of_twice_the_size_are_found_by_their_norm_too(outcomes):
    """As when gradients are summed over two ranks instead of averaged."""
    expected = read_tensors(GOLDEN / "ragged" / "expected.safetensors")
    gradients = {name for name in expected if name.startswith("grad.")}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        actual = outcomes["ragged", dtype]
        doubled = {name: tensor * 2 if name in gradients else tensor for name, tensor in actual.items()}
        assert beyond(doubled, expected, dtype) == gradients | {"gradient norm"}
        assert relative_errors(doubled, expected)["gradient norm"] == pytest.approx(1, abs=tolerance("loss", dtype))


def test_a_gradient_that_is_absent_misshapen_or_not_finite_is_found(outcomes):
    actual = outcomes["ragged", torch.float32]
    expected = read_tensors(GOLDEN / "ragged" / "expected.safetensors")
    hole = actual[GRADIENT].clone()
    hole[0, 0] = torch.nan
    for wrong in (
        {name: tensor for name, tensor in actual.items() if name != GRADIENT},
        actual | {GRADIENT: actual[GRADIENT].T},
        actual | {GRADIENT: hole},
    ):
        assert GRADIENT in beyond(wrong, expected, torch.bfloat16)


def test_two_processes_under_deepspeed_pass_and_write_every_tensor(tmp_path):
    output = finish(launch(*deepspeed(2), "launchers/verify.py", "tests/golden/ragged", "--out", str(tmp_path / "out")))
    assert "tests/golden/ragged: passed" in output
    with safe_open(GOLDEN / "ragged" / "expected.safetensors", "pt") as expected:
        written = load_file(tmp_path / "out" / "actual.safetensors")
        assert written.keys() == set(expected.keys())
        assert all(list(written[name].shape) == expected.get_slice(name).get_shape() for name in written)


def test_a_damaged_expectation_makes_verify_fail_and_name_it(tmp_path):
    expected = read_tensors(GOLDEN / "ragged" / "expected.safetensors")
    expected[GRADIENT] = expected[GRADIENT] * (1 + 3e-5)
    case = link_case(tmp_path / "case", expected)
    output = run_script("launchers/verify.py", case, code=1)
    assert f"{case}: failed" in output
    assert [line.split()[0] for line in output.splitlines() if "BEYOND" in line] == [GRADIENT]
    assert (case / "actual.safetensors").is_file()


@pytest.mark.parametrize("option", ["--tp", "--ulysses", "--ring"])
def test_sizes_that_the_job_cannot_have_are_refused_in_one_line(launcher, topology, option):
    code, _, stderr = launcher("verify.py", GOLDEN / "ragged", option, 2)
    assert (
        code == 2
        and stderr.count("\n") == 1
        and stderr.startswith("error: --tp, --ulysses, --ring: ")
        and "start 2" in stderr
    )


@pytest.mark.parametrize("name", ["config.json", "draft.safetensors", "inputs.safetensors"])
def test_a_case_names_the_file_that_is_missing_or_damaged(tmp_path, name):
    case = link_case(tmp_path / "case", {})
    (case / name).unlink()
    with pytest.raises(UserError, match=f"{case / name}: .*[Nn]o such file.*; name"):
        read_case(case)
    (case / name).write_bytes(b"\x10" * 40)
    with pytest.raises(UserError, match=f"{case / name}: "):
        read_case(case)
