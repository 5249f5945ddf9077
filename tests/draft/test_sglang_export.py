"""What SGLang's own draft class says about sound and spoilt exports."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import drafts
import pytest
import torch
from limits import HANG_SECONDS
from places import ROOT, ZERO2
from safetensors.torch import load_file, save_file
from sglang_case import cpu_environment, in_sglang
from test_rope import ROPES
from tiny_run import make_target, write_recipe
from torch import Tensor

from eagle3.draft.config import DraftConfig
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import UserError
from eagle3.jobs.train import train
from eagle3.recipe.loading import load_recipe
from eagle3.targets.sglang.draft_check import NotChecked, check_export

pytestmark = pytest.mark.sglang

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
VOCABULARY, DRAFT_VOCABULARY = 300, 200  # neither is a multiple of SGLang's padding


@pytest.fixture(scope="module", autouse=True)
def sglang_on_cpu():
    with cpu_environment():
        yield


def export(folder: Path, topology, *, with_embedding: bool = False, **changes) -> Path:
    """A draft with random weights, as a run exports it."""
    config = DraftConfig(
        **{**SIZES, "draft_vocab_size": DRAFT_VOCABULARY, "aux_layers": (1, 2, 3), **changes},
        target_hidden_size=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
    )
    draft = Eagle3Draft(config, topology.modules_alone, torch.float32)
    places = torch.arange(config.draft_vocab_size)
    drafted = places + (places > 50) * 90 * (config.draft_vocab_size < VOCABULARY)
    t2d = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, drafted, True)
    return drafts.export(folder, draft, t2d, torch.bfloat16, with_embedding)


def spoilt(whole: Path, name: str, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of an export with other tensors."""
    folder = whole.parent / name
    shutil.copytree(whole, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def shifted(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"][-1] += 1


def not_a_number(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"][3, 5] = float("nan")


SPOILT: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "missing": (lambda t: t.pop("norm.weight"), "SGLang's model.norm.weight"),
    "missing_part": (lambda t: t.pop("midlayer.self_attn.k_proj.weight"), "self_attn.qkv_proj.weight"),
    "unknown": (renamed("midlayer.hidden_norm.weight", "midlayer.hidden_nrom.weight"), "midlayer.hidden_nrom.weight"),
    "another": (lambda t: t.update({"midlayer.self_attn.sinks": torch.ones(4)}), "midlayer.self_attn.sinks"),
    "misshapen": (lambda t: t.update({"fc.weight": t["fc.weight"][:, :64].clone()}), "fc.weight [32, 64]"),
    "turned": (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T.contiguous()}), "lm_head.weight [32, 200]"),
    "not_a_number": (not_a_number, "fc.weight has values that are not finite"),
    "no_d2t": (lambda t: t.pop("d2t"), "d2t is missing"),
    "short_t2d": (lambda t: t.update({"t2d": t["t2d"][:-1].clone()}), "t2d 299 entries"),
    "other_d2t": (shifted, "t2d does not mark the tokens that d2t names"),
}


@pytest.fixture(scope="module")
def verdicts(topology, tmp_path_factory) -> dict[str, tuple[int, str]]:
    """The check's exit code and line, by the folder's name."""
    work = tmp_path_factory.mktemp("exports")
    whole = export(work / "whole", topology)
    folders = [
        whole,
        export(work / "with_embedding", topology, with_embedding=True),
        export(work / "eagle31", topology, fc_norm=True, norm_output=True),
        export(work / "five_layers", topology, aux_layers=(0, 1, 2, 4, 5), draft_vocab_size=VOCABULARY),
        *(spoilt(whole, name, change) for name, (change, _) in SPOILT.items()),
    ]
    folders += [export(work / f"rope {name}", topology, rope_parameters=rope) for name, rope in ROPES.items()]
    unknown = shutil.copytree(work / "rope yarn with attention_factor", work / "rope of one reader")
    values = json.loads((unknown / "config.json").read_text())
    for rope in (values["rope_parameters"], values["rope_scaling"]):
        del rope["attn_factor"]  # SGLang knows no attention_factor
    (unknown / "config.json").write_text(json.dumps(values))
    folders.append(unknown)
    other = shutil.copytree(whole, work / "other_class")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    return in_sglang("tests/support/sglang_says.py", "drafts", *folders, other)


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("whole", "all 15 tensors, with the embedding of the target"),
        ("with_embedding", "all 16 tensors, with the embedding of the export"),
        ("eagle31", "all 18 tensors (EAGLE3.1: fc_norm, norm_output), with the embedding of the target"),
        ("five_layers", "all 15 tensors, with the embedding of the target"),  # and with the whole vocabulary
    ],
)
def test_an_export_is_taken_whole(verdicts, name, taken):
    assert verdicts[name] == [0, f"SGLang 0.5.23 takes {taken}"]


@pytest.mark.parametrize("changes", [{"aux_layers": (2,)}, {"qk_norm": True}, {"attention_bias": True}], ids=str)
def test_what_sglang_would_compute_otherwise_is_said_before_it_is_asked(topology, tmp_path, changes):
    with pytest.raises(NotChecked, match="SGLang does not know .*; serve it with vLLM"):
        check_export(export(tmp_path / "draft", topology, **changes))


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_tensor_is_named(verdicts, name):
    code, line = verdicts[name]
    assert code == 2 and SPOILT[name][1] in line and "; export the draft again" in line


@pytest.mark.parametrize("name", ROPES)
def test_sglang_rotates_as_training_does(verdicts, name):
    assert verdicts[f"rope {name}"][0] == 0, verdicts[f"rope {name}"][1]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("rope of one reader", ("SGLang rotates by other angles than training", "model.draft.rope_parameters")),
        ("other_class", ("architectures is ['LlamaForCausalLM']",)),
    ],
)
def test_a_config_that_sglang_reads_otherwise_is_refused(verdicts, name, parts):
    code, line = verdicts[name]
    assert code == 2 and all(part in line for part in parts), line


def test_the_launcher_says_one_line(topology, tmp_path):
    command = [sys.executable, "launchers/evaluate.py", "--check", "--draft"]
    bad = spoilt(export(tmp_path / "whole", topology), "bad", renamed("norm.weight", "nrom.weight"))
    for folder, code in ((tmp_path / "whole", 0), (bad, 2)):
        run = subprocess.run([*command, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)
        assert run.returncode == code, run.stderr
        lines = (run.stderr if code else run.stdout).splitlines()
        assert [line for line in lines if str(folder) in line] == lines[-1:]
        assert ("takes all 15 tensors" if code == 0 else "nrom.weight") in lines[-1]


def test_training_checks_what_it_exports(topology, tmp_path, capsys):
    recipe = write_recipe(tmp_path, make_target(tmp_path / "target"), training={"max_steps": 1})
    train(load_recipe(recipe), ZERO2, topology)
    assert "export check: SGLang 0.5.23 takes all 15 tensors" in capsys.readouterr().out


def test_an_sglang_that_does_not_start_says_nothing_of_the_draft(topology, tmp_path, monkeypatch):
    """This is not the UserError for a bad draft, since nothing is known about the draft."""
    whole = export(tmp_path / "whole", topology)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text("import sys\nsys.modules['sglang.srt'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    with pytest.raises(NotChecked, match="SGLang does not start here") as refusal:
        check_export(whole)
    assert isinstance(refusal.value, UserError)
