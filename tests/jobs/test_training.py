"""Whole runs of a tiny target: live and stored, one process and two, killed and resumed."""

import json
import math
import os
import shutil
import signal
import sys

import pytest
import torch
from places import ZERO2
from processes import free_port
from published_drafts import deepspec, rewritten
from safetensors.torch import load, load_file
from tiny_run import capture, deepspeed, finish, launch, metrics, run_script, write_recipe
from transformers import AutoConfig

from eagle3.draft.derivation import derive_draft
from eagle3.draft.interchange import export_draft, read_exported
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import UserError
from eagle3.jobs.train import train
from eagle3.recipe.loading import load_recipe
from eagle3.training.checkpoint import Checkpoints
from eagle3.training.stopping import RunStopped, StopSignals

HELD_OUT = ("loss", "step_losses", "accuracy", "acceptance_rate", "tokens")
COMPUTED = (*HELD_OUT, "gradient_norm", "learning_rate")


def assert_same_course(one, other, tolerance):
    """Asserts that all computed numbers of every step agree to a relative tolerance, plus a hundredth of it in absolute
    terms."""
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        for name in COMPUTED if "gradient_norm" in a else HELD_OUT:
            left, right = torch.tensor(a[name]).double(), torch.tensor(b[name]).double()
            assert torch.allclose(left, right, rtol=tolerance, atol=tolerance * 1e-2), (a["step"], name, left, right)


def computed(folder, kind):
    """The computed numbers of a run's records of this kind."""
    return [{name: record[name] for name in COMPUTED if name in record} for record in metrics(folder, kind)]


def test_stored_training_follows_live_training_and_compressed_is_bit_identical(tmp_path, target, topology):
    recipe = write_recipe(tmp_path, target)
    train(load_recipe(recipe), ZERO2, topology)
    stored = ["hidden_states.mode=stored", f"hidden_states.path={tmp_path / 'store'}", f"output.dir={tmp_path / 'two'}"]
    capture(recipe, *stored)
    train(load_recipe(recipe, stored), ZERO2, topology)
    assert_same_course(metrics(tmp_path / "run"), metrics(tmp_path / "two"), 1e-5)
    assert_same_course(metrics(tmp_path / "run", "held_out"), metrics(tmp_path / "two", "held_out"), 1e-5)

    lossless = [*stored[:1], f"hidden_states.path={tmp_path / 'small'}", "hidden_states.codec=lossless"]
    capture(recipe, *lossless)
    train(load_recipe(recipe, [*lossless, f"output.dir={tmp_path / 'four'}"]), ZERO2, topology)
    for kind in ("train", "held_out"):
        two, four = (computed(tmp_path / run, kind) for run in ("two", "four"))
        assert two == four and len(two) > 1

    shard = sorted((tmp_path / "store").glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(UserError, match=f"{shard.name}.*capture.py --repair"):
        train(load_recipe(recipe, [*stored[:2], f"output.dir={tmp_path / 'three'}"]), ZERO2, topology)
    assert not (tmp_path / "three").exists()


def test_training_under_a_window_from_the_rows_that_it_sees_is_bit_identical(tmp_path, target, topology):
    """Live training agrees with it, and the store is refused for training that needs more rows."""
    recipe, window = write_recipe(tmp_path, target), "model.draft.window=6"
    for name, chosen in (("full", []), ("windowed", [window])):
        path = f"hidden_states.path={tmp_path / name}"
        capture(recipe, path, *chosen)
        stored = ["hidden_states.mode=stored", path, window, f"output.dir={tmp_path / f'from {name}'}"]
        train(load_recipe(recipe, stored), ZERO2, topology)
    train(load_recipe(recipe, [window]), ZERO2, topology)
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).iterdir()) for name in ("windowed", "full")]
    assert sizes[0] < 0.9 * sizes[1]
    for kind in ("train", "held_out"):
        full, windowed, live = (computed(tmp_path / run, kind) for run in ("from full", "from windowed", "run"))
        assert full == windowed and len(full) > 1
        for a, b in zip(windowed, live, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    config = json.loads((tmp_path / "from windowed" / "export" / "config.json").read_text(encoding="utf-8"))
    assert (config["sliding_window"], config["layer_types"]) == (6, ["sliding_attention"])
    for more in ("model.draft.window=null", "model.draft.window=7", "parallelism.query_selection=all"):
        with pytest.raises(UserError, match="has the rows of a window of 6 keys and 3 TTT steps, this run needs"):
            train(load_recipe(recipe, [*stored[:-1], more, f"output.dir={tmp_path / 'more'}"]), ZERO2, topology)


@pytest.mark.slow
def test_spans_are_drawn_anew_live_and_from_whole_samples_and_stay_in_a_store_of_their_own(tmp_path, target, topology):
    """A store of whole samples gives what live training does. A store that was captured with spans does so in the first
    epoch."""
    recipe, window = write_recipe(tmp_path, target), "model.draft.window=6"
    spans = [window, "training.max_steps=14", "data.spans={length: 3, per_document: 2}"]
    train(load_recipe(recipe, spans), ZERO2, topology)
    for name, chosen in (("whole", [window]), ("spans", spans)):
        path = f"hidden_states.path={tmp_path / name}"
        capture(recipe, path, *chosen)
        assert "nothing wrong" in capture(recipe, path, *chosen, "--verify")
        stored = ["hidden_states.mode=stored", path, f"output.dir={tmp_path / f'from {name}'}"]
        train(load_recipe(recipe, [*stored, *spans]), ZERO2, topology)
    others = [*stored[:2], window, "data.spans={length: 4, per_document: 2}", f"output.dir={tmp_path / 'x'}"]
    message = (
        "captured with data.spans={length: 3, per_document: 2} and data.seed=0; this run has data.spans={length: 4"
    )
    with pytest.raises(UserError, match=message):
        train(load_recipe(recipe, others), ZERO2, topology)
    live, whole, spanned = (metrics(tmp_path / run) for run in ("run", "from whole", "from spans"))
    assert_same_course(live, whole, 1e-5)
    assert_same_course(live[:7], spanned[:7], 1e-5)
    assert live[-1]["loss"] != pytest.approx(spanned[-1]["loss"], rel=1e-4), "fourteen steps are more than an epoch"


def test_a_signal_during_the_last_checkpoint_ends_the_run_before_its_export(tmp_path, target, topology, monkeypatch):
    """And a trace is whole that has fewer steps than were asked for."""

    def save(checkpoints, engine, step, *arguments):
        saved(checkpoints, engine, step, *arguments)
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    saved, short = Checkpoints.save, ["training.max_steps=3", "training.profile={start: 2, steps: 9}"]
    recipe = load_recipe(write_recipe(tmp_path, target), short)
    with StopSignals() as stop, monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", save)
        with pytest.raises(RunStopped, match="SIGTERM after step 3 of 3: checkpoint written"):
            train(recipe, ZERO2, topology, stop=stop)
    assert not (tmp_path / "run" / "export").exists()
    train(recipe, ZERO2, topology)
    assert json.loads(next((tmp_path / "run" / "profile").glob("trace-rank*.json")).read_text())["traceEvents"]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["kl", "lk_alpha", "lk_lambda"])
def test_two_processes_and_accumulation_follow_one_process(tmp_path, target, topology, loss):
    recipe = str(write_recipe(tmp_path, target, training={**SHORT, "loss": loss}))
    train(load_recipe(recipe), ZERO2, topology)
    if loss == "kl":
        split = deepspeed(2)
    elif loss == "lk_alpha":
        ranks = ("--nproc-per-node=2", f"--master-port={free_port()}")
        split = (sys.executable, "-m", "torch.distributed.run", *ranks)
    else:
        split = (sys.executable,)
    accumulation = "training.accumulation=2"
    output = f"output.dir={tmp_path / 'two'}"
    finish(launch(*split, "launchers/train.py", "--deepspeed", str(ZERO2), "--recipe", recipe, accumulation, output))
    assert_same_course(metrics(tmp_path / "run"), metrics(tmp_path / "two"), 1e-5)


@pytest.mark.slow
def test_sequence_and_tensor_parallel_runs_follow_one_process(tmp_path, target, topology):
    """Covers live hidden states, accumulation, held-out measurements and the exported draft, and a run resumed
    half-way."""
    training = {**SHORT, "accumulation": 2, "checkpoint_every": 2}
    recipe = str(write_recipe(tmp_path, target, training=training, evaluation={"conversations": 2, "every": 2}))
    assert train(load_recipe(recipe), ZERO2, topology)
    runs = {
        "ulysses": "2:parallelism.ulysses=2",
        "ring": "2:parallelism.ring=2,parallelism.ring_mode=p2p",
        "tensor": "2:parallelism.tensor=2",
        "all": "8:parallelism.tensor=2,parallelism.ulysses=2,parallelism.ring=2,training.loss=kl",
    }
    jobs = [f"{run},output.dir={tmp_path / name}" for name, run in runs.items()]
    run_script("tests/support/training_worker.py", recipe, *jobs)
    expected = load_file(tmp_path / "run" / "export" / "model.safetensors")
    for name in runs:
        assert_same_course(metrics(tmp_path / "run"), metrics(tmp_path / name), 1e-5)
        for record in metrics(tmp_path / name, "held_out"):  # all of these samples lie in the shortest context
            assert record["acceptance_by_context"] == [pytest.approx(record["acceptance_length"], rel=1e-12)]
            assert record["contexts"] == [512] and len(record["verifications_by_context"]) == 1
        exported = load_file(tmp_path / name / "export" / "model.safetensors")
        assert exported.keys() == expected.keys()
        assert all(torch.allclose(exported[key], expected[key], rtol=1e-4, atol=1e-4) for key in expected)
        results = [json.loads((tmp_path / each / "evaluation.json").read_text()) for each in ("run", name)]
        assert results[0]["acceptance_length"] == pytest.approx(results[1]["acceptance_length"], rel=0.1)

    shutil.rmtree(tmp_path / "tensor" / "checkpoints" / "step-00000004")
    before = load((tmp_path / "tensor" / "export" / "model.safetensors").read_bytes())
    output = run_script("tests/support/training_worker.py", recipe, jobs[2].replace("2:", "2+resume:"))
    assert "resumed after step 2" in output
    assert [record["step"] for record in metrics(tmp_path / "tensor")] == [1, 2, 3, 4]
    resumed = load_file(tmp_path / "tensor" / "export" / "model.safetensors")
    assert all(torch.equal(resumed[key], before[key]) for key in resumed)


SHORT = {"ttt_steps": 3, "global_batch_size": 4, "max_steps": 4, "learning_rate": 2e-3, "checkpoint_every": 10}


def test_a_run_exports_a_draft_and_judges_it_with_its_target(tmp_path, target, topology):
    recipe = load_recipe(write_recipe(tmp_path, target, evaluation={"conversations": 3}))
    assert train(recipe, ZERO2, topology)
    run = tmp_path / "run"
    result = json.loads((run / "evaluation.json").read_text())
    assert result["lossless"] and result["identical"] + result["ties"] == result["conversations"] == 3
    assert math.isclose(result["acceptance_length"], 1 + sum(result["position_acceptance"]), rel_tol=0.2)
    assert (run / "recipe.yaml").exists() and load_file(run / "export" / "model.safetensors")["t2d"].sum() == 200

    warm = [f"model.draft.init_from={run / 'export'}", "training.learning_rate=1e-9", f"output.dir={tmp_path / 'warm'}"]
    train(load_recipe(tmp_path / "recipe.yaml", warm), ZERO2, topology)
    best = max(metrics(run, "held_out"), key=lambda record: record["acceptance_length"])
    assert math.isclose(metrics(tmp_path / "warm", "held_out")[0]["loss"], best["loss"], rel_tol=1e-5)

    narrowed = [*warm[:2], "model.draft.window=6", "training.max_steps=2", f"output.dir={tmp_path / 'narrowed'}"]
    train(load_recipe(tmp_path / "recipe.yaml", narrowed), ZERO2, topology)
    assert json.loads((tmp_path / "narrowed" / "export" / "config.json").read_text())["sliding_window"] == 6


def test_a_draft_in_another_trainers_form_is_trained_further_judged_and_exported(tmp_path, target, topology):
    """Deepspec's: four layers (of the target's five), the whole vocabulary, normed heads, here with biases too."""
    torch.manual_seed(1)
    shape = {"aux_layers": (0, 1, 3, 4), "qk_norm": True, "attention_bias": True}
    vocabulary = AutoConfig.from_pretrained(target).vocab_size
    config = derive_draft(AutoConfig.from_pretrained(target), draft_vocab_size=vocabulary, **shape)
    draft, first = Eagle3Draft(config, topology.modules_alone, torch.float32), tmp_path / "first"
    tables = {"d2t": torch.zeros(vocabulary, dtype=torch.int64), "t2d": torch.ones(vocabulary, dtype=torch.bool)}
    weights = dict(draft.named_parameters())
    export_draft(first, draft, weights, **tables, dtype=torch.float32, with_embedding=True)
    rewritten(first, deepspec)
    before = read_exported(first).weights
    given = {"config": str(first / "config.json"), "init_from": str(first)}
    rate = {**SHORT, "max_steps": 3, "learning_rate": 1e-3}
    recipe = write_recipe(tmp_path, target, model={"draft": given}, training=rate, evaluation={"conversations": 2})
    assert train(load_recipe(recipe), ZERO2, topology)
    export = read_exported(tmp_path / "run" / "export")
    assert export.config.qk_norm and export.config.attention_bias and export.config.aux_layers == (0, 1, 3, 4)
    assert export.weights.keys() == before.keys() - {"embed_tokens.weight"}  # which is the target's
    moved = {name: float((weight - before[name]).abs().max()) for name, weight in export.weights.items()}
    assert all(0 < move < 0.01 for move in moved.values()), moved
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["lossless"]


def test_a_second_run_moves_the_first_aside_and_a_profile_is_written_where_asked(tmp_path, target, topology):
    profiled = {**SHORT, "max_steps": 2, "profile": {"start": 2, "steps": 1}}
    recipe = load_recipe(write_recipe(tmp_path, target, training=profiled))
    train(recipe, ZERO2, topology)
    assert json.loads((tmp_path / "run" / "profile" / "trace-rank0.json").read_text())["traceEvents"]
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    train(recipe, ZERO2, topology)
    assert (tmp_path / "run.1" / "metrics.jsonl").read_bytes() == before
    assert len(metrics(tmp_path / "run")) == 2


def test_training_lowers_the_held_out_loss(tmp_path, target, topology):
    recipe = load_recipe(write_recipe(tmp_path, target, training={**SHORT, "max_steps": 40, "learning_rate": 1e-2}))
    train(recipe, ZERO2, topology)
    measured = [record["loss"] for record in metrics(tmp_path / "run", "held_out")]
    assert measured[-1] < metrics(tmp_path / "run")[0]["loss"] - 0.3
