"""A teacher given as logits, compared with the same teacher given as hidden states, and both with the definition."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from definition import Loss, define
from jobs import job_of
from places import ZERO2
from processes import kept
from teacher_logits_worker import LAYOUTS, STEPS, Run, execute, on_two_ranks, runs
from tiny_run import metrics, run_script, write_recipe
from training_path import Trained
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from eagle3.errors import UserError
from eagle3.jobs.derived import store_encoding
from eagle3.jobs.job import Job, provenance, start_target, store_provenance
from eagle3.jobs.supply import ShareCourse
from eagle3.jobs.train import train
from eagle3.objective.distill import Teacher
from eagle3.parallel.topology import Topology
from eagle3.recipe.loading import load_recipe
from eagle3.recipe.schema import Recipe
from eagle3.states.capture import capture, disk_need, wanted_samples
from eagle3.states.store.check import check_store
from eagle3.states.store.reader import HiddenStateStore
from eagle3.states.store.shard import taught_rows
from eagle3.states.store.writer import StoreWriter
from eagle3.targets.logits import LogitTransform
from eagle3.targets.transformers import TransformersTarget

COMPUTED = ("loss", "step_losses", "accuracy", "acceptance_rate", "gradient_norm", "tokens")
SHORT = {"ttt_steps": 3, "global_batch_size": 4, "max_steps": 4, "learning_rate": 2e-3, "checkpoint_every": 10}
LOGITS = "target.teacher=logits"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, topology) -> Callable[[str, Run], Trained]:
    """trained(layout, run): what a run computed."""
    folder = tmp_path_factory.mktemp("teacher")
    run_script("tests/support/teacher_logits_worker.py", folder)
    first = {layout: kept(folder, layout)[0] for layout in LAYOUTS}
    return lambda layout, run: execute(run, topology) if layout == "alone" else first[layout][run.name]


def rounding_of_logits(run: Run) -> float:
    """How far a logit may move if its sum of Ht fp32 products is taken in a different order: by Ht roundings of the sum
    of the products' magnitudes, in either direction. The transform after the head multiplies this by its slope, which
    is at most `scale`."""
    case = run.case
    last = torch.cat([document.last for document in case.documents]).double()
    magnitude = (last.abs() @ case.target_head.double().abs().T).max()
    return float(case.scale * 2 * last.shape[1] * torch.finfo(torch.float32).eps / 2 * magnitude)


def runs_of(*dtypes_and_kinds: tuple[torch.dtype, str]):
    """Parametrises a test by layouts and runs."""
    chosen = [run for run in runs() if (run.dtype, run.kind) in dtypes_and_kinds]
    return pytest.mark.parametrize(
        ("layout", "run"),
        [(layout, run) for layout in ("alone", *LAYOUTS) for run in chosen if layout == "alone" or on_two_ranks(run)],
        ids=lambda each: getattr(each, "name", each),
    )


@runs_of((torch.float64, "hidden"), (torch.float64, "logits"))
def test_either_teacher_gives_the_loss_and_gradients_of_the_definition(layout, run: Run, trained):
    defined, actual = define(run.case, STEPS, Loss(run.loss)), trained(layout, run)
    numbers = vars(actual.metrics)
    assert numbers["loss"] == pytest.approx(float(defined.loss), rel=1e-10)
    assert numbers["acceptance_rate"] == pytest.approx(defined.acceptance.tolist(), rel=1e-10)
    assert numbers["accuracy"] == pytest.approx(defined.accuracy.tolist(), rel=1e-10)
    assert actual.gradients.keys() == defined.gradients.keys()
    for name, expected in defined.gradients.items():
        assert (actual.gradients[name] - expected).abs().max() <= 1e-10 * expected.abs().max(), name


@runs_of((torch.float32, "logits"))
def test_in_fp32_both_teachers_differ_by_the_rounding_of_logits(layout, run: Run, trained):
    """If logits move by x, a probability changes by 2x of itself, and so do the terms of losses and gradients."""
    hidden, logits = (trained(layout, replace(run, kind=kind)) for kind in ("hidden", "logits"))
    numbers, expected_numbers = vars(logits.metrics), vars(hidden.metrics)
    tolerance = 2 * rounding_of_logits(run)
    assert tolerance < 1e-4
    assert numbers["counted"] == expected_numbers["counted"] > 0
    assert numbers["accuracy"] == expected_numbers["accuracy"]
    for name in ("loss", "step_losses", "acceptance_rate"):
        assert numbers[name] == pytest.approx(expected_numbers[name], rel=tolerance), name
    norms = []
    for gradients in (hidden.gradients, logits.gradients):
        norms.append(torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm())
    assert float(norms[1] / norms[0]) == pytest.approx(1, abs=tolerance)
    for name, expected in hidden.gradients.items():
        assert (logits.gradients[name] - expected).abs().max() <= tolerance * expected.abs().max(), name


def test_a_transform_that_is_forgotten_is_seen(trained):
    """Otherwise the tests of transforms would show nothing."""
    losses = {run.transform: float(trained("alone", run).metrics.loss) for run in runs()[::4]}
    values = sorted(losses.values())
    assert len(losses) == 4 and min(b - a for a, b in zip(values, values[1:], strict=False)) > 1e-3


def test_logits_that_wait_are_not_overwritten():
    """The loss overwrites a block of the teacher's logits, but the next step, and a second pass for the sums, read them
    again."""
    rows = torch.randn(4, 6)
    teacher = Teacher(rows, None, torch.zeros(4, dtype=torch.int64), torch.zeros(4), LogitTransform(2.0, 1.0))
    before = rows.clone()
    block = teacher.logits(slice(1, 3), torch.float32)
    assert torch.equal(block, before[1:3])  # logits are as the model made them, whatever it does
    block.zero_()
    assert torch.equal(rows, before)


def test_a_transform_scales_and_then_caps():
    logits = torch.tensor([[-100.0, -1.0, 0.0, 2.0]], dtype=torch.float64)
    expected = 5 * torch.tanh(0.5 * logits / 5)
    assert torch.allclose(LogitTransform(0.5, 5.0).apply(logits.clone()), expected, rtol=1e-15)
    assert torch.equal(LogitTransform().apply(logits.clone()), logits)


# Whole runs.


def capture_logits(recipe: Recipe, topology: Topology) -> tuple[Job, TransformersTarget]:
    """Captures as capture.py does, in one process."""
    job = job_of(recipe, topology)
    running = start_target(job.known, topology.device, job.vocabulary)
    encoding = store_encoding(job.recipe, job.shape)
    samples = list(wanted_samples((job.inputs.train, job.inputs.held_out)).values())
    with StoreWriter(recipe.hidden_states.path, provenance(job), encoding) as writer:
        capture(running, [samples], writer, ShareCourse(len(samples), sum(one.tokens for one in samples), print, print))
    if encoding.codec == "none":
        written = sum(path.stat().st_size for path in Path(recipe.hidden_states.path).glob("*.safetensors"))
        assert disk_need(samples, encoding) == pytest.approx(written, rel=0.1)
    ids = [sample_id for part in (job.inputs.train, job.inputs.held_out) for sample_id in part.sample_ids]
    findings = check_store(recipe.hidden_states.path, store_provenance(job), ids, lambda count, shards: None)
    assert findings.problems == [] and findings.samples == len(samples)
    return job, running


def assert_same_course(one: Path, other: Path, tolerance: float) -> None:
    for kind in ("train", "held_out"):
        records = metrics(one, kind), metrics(other, kind)
        assert len(records[0]) == len(records[1]) > 0
        for a, b in zip(*records, strict=True):
            for name in COMPUTED:
                if name in a:
                    left, right = (torch.tensor(each[name], dtype=torch.float64) for each in (a, b))
                    assert torch.allclose(left, right, rtol=tolerance, atol=tolerance * 1e-2), (a["step"], name)


def test_runs_with_a_teacher_of_logits_follow_one_of_hidden_states(tmp_path, target, topology):
    """Checked live, from a store, and on two ranks, to the rounding that test_training.py allows between layouts."""
    recipe = str(write_recipe(tmp_path, target, training=SHORT))
    assert train(load_recipe(recipe), ZERO2, topology)
    stored = [LOGITS, f"hidden_states.path={tmp_path / 'store'}", "hidden_states.mode=stored"]
    capture_logits(load_recipe(recipe, stored), topology)
    alone = {"live": [LOGITS], "stored": stored}
    for name, overrides in alone.items():
        assert train(load_recipe(recipe, [*overrides, f"output.dir={tmp_path / name}"]), ZERO2, topology)
    together = {
        "tensor": f"2:parallelism.tensor=2,memory.inputs=host,{','.join(stored)}",
        "ulysses": f"2:parallelism.ulysses=2,{LOGITS}",
    }
    jobs = [f"{run},output.dir={tmp_path / name}" for name, run in together.items()]
    run_script("tests/support/training_worker.py", recipe, *jobs)
    for name in (*alone, *together):
        assert_same_course(tmp_path / "run", tmp_path / name, 1e-5)
    assert_same_course(tmp_path / "live", tmp_path / "stored", 1e-6)


@pytest.mark.parametrize("codec", ["lossless", "fp8"])
def test_no_codec_rounds_logits_to_8_bits(tmp_path, target, topology, codec):
    if codec == "lossless":
        pytest.importorskip("blosc2")
    path = write_recipe(tmp_path, target, training=SHORT)
    overrides = [LOGITS, f"hidden_states.path={tmp_path / 'store'}", f"hidden_states.codec={codec}"]
    job, running = capture_logits(load_recipe(path, [*overrides, "hidden_states.mode=stored"]), topology)
    store = HiddenStateStore.open(str(tmp_path / "store"), store_provenance(job))
    for one in wanted_samples((job.inputs.held_out,)).values():
        sample = one.load()
        teacher = taught_rows(sample.loss_mask).nonzero().flatten()
        (rows,) = store.read([sample], [(torch.arange(0), teacher)])
        (states,) = running.prefill([sample.ids])
        assert rows.teacher.values.shape == (len(teacher), job.vocabulary.size)
        # the same document alone and in a batch differs by fp32 rounding
        assert torch.allclose(rows.teacher.values, states.teacher.values[teacher], rtol=1e-5, atol=1e-5)


def test_a_store_of_logits_serves_its_draft_vocabulary_and_its_teacher_alone(tmp_path, target, topology):
    path = write_recipe(tmp_path, target, training=SHORT)
    stored = [f"hidden_states.path={tmp_path / 'store'}", "hidden_states.mode=stored"]
    capture_logits(load_recipe(path, [*stored, LOGITS]), topology)
    with pytest.raises(UserError, match="captured with teacher='logits', this run has None"):
        train(load_recipe(path, stored), ZERO2, topology)
    with pytest.raises(UserError, match="captured with teacher_vocabulary='[0-9a-f]{32}', this run has '[0-9a-f]{32}'"):
        train(load_recipe(path, [*stored, LOGITS, "model.draft.vocab_size=150"]), ZERO2, topology)


class BiasedHead(LlamaForCausalLM):
    """A model whose lm_head has a bias, and whose code changes logits without a sign of it in the config."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, *arguments, **keywords):
        output = super().forward(*arguments, **keywords)
        output.logits = output.logits.sign() * output.logits.abs().sqrt()
        return output


@pytest.fixture
def strange_target(target, monkeypatch) -> Path:
    """The tiny target with such a head, as transformers would load it."""
    torch.manual_seed(6)
    plain = LlamaForCausalLM.from_pretrained(target)
    strange = BiasedHead(plain.config)
    strange.load_state_dict(plain.state_dict(), strict=False)
    folder = Path(target).parent / "strange"
    shutil.copytree(target, folder, dirs_exist_ok=True)
    strange.save_pretrained(folder)
    monkeypatch.setitem(AutoModelForCausalLM._model_mapping._extra_content, LlamaConfig, BiasedHead)
    return folder


def test_a_draft_is_trained_for_a_head_that_training_cannot_load(tmp_path, strange_target, topology):
    recipe = write_recipe(tmp_path, strange_target, training=SHORT)
    with pytest.raises(UserError, match="lm_head is a Linear with a bias, .*; set target.teacher=logits"):
        train(load_recipe(recipe), ZERO2, topology)
    with pytest.raises(UserError, match="model.draft.lm_head: 'target', .*; set model.draft.lm_head=random"):
        train(load_recipe(recipe, [LOGITS]), ZERO2, topology)
    random = [LOGITS, "model.draft.lm_head=random"]
    assert train(load_recipe(recipe, [*random, f"output.dir={tmp_path / 'live'}"]), ZERO2, topology)
    stored = [*random, f"hidden_states.path={tmp_path / 'store'}", "hidden_states.mode=stored"]
    capture_logits(load_recipe(recipe, stored), topology)
    assert train(load_recipe(recipe, [*stored, f"output.dir={tmp_path / 'stored'}"]), ZERO2, topology)
    assert_same_course(tmp_path / "live", tmp_path / "stored", 1e-6)
    steps = metrics(tmp_path / "live")
    assert steps[-1]["loss"] < steps[0]["loss"]
