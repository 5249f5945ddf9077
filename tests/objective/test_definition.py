"""The training code, which packs and selects rows, compared with the dense definition: loss, metrics and every
gradient."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from definition import Case, Defined, Document, Loss, define, random_case
from places import GOLDEN
from safetensors.torch import load_file
from torch import Tensor
from training_path import Trained, train_case

from eagle3.draft.config import DraftConfig
from eagle3.objective.losses import LossConfig
from eagle3.objective.recompute import MemoryPlan
from eagle3.parallel.topology import Topology

# Tolerances relative to a tensor's largest entry.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
KL = LossConfig()
# Chunks of about 7 tokens and loss blocks of 2 rows for the drafts here.
IN_PIECES = MemoryPlan("full", 18_000)
UNEQUAL = ([0] * 5 + [1] * 8, [1] * 4, [0] * 9 + [1] * 2 + [0] * 3, [0, 1] * 5)

every_loss = pytest.mark.parametrize("loss", ["kl", "lk_alpha", "lk_lambda"])
every_normalization = pytest.mark.parametrize("normalization", ["counted", "tokens", "samples"])


def _errors(trained: Trained, defined: Defined) -> dict[str, float]:
    """Largest difference of each quantity, relative to its largest entry (absolute if all its entries are 0)."""
    metrics = {"loss": "loss", "step_losses": "step_losses", "accuracy": "accuracy", "acceptance_rate": "acceptance"}
    pairs = {
        name: (torch.tensor(getattr(trained.metrics, name), dtype=torch.float64), getattr(defined, of))
        for name, of in metrics.items()
    }
    pairs["gradient norm"] = _norm(trained.gradients), _norm(defined.gradients)
    pairs |= {name: (trained.gradients[name], expected) for name, expected in defined.gradients.items()}
    errors = {}
    for name, (actual, expected) in pairs.items():
        assert actual.shape == expected.shape and bool(actual.isfinite().all()), name
        scale = float(expected.abs().max())
        errors[name] = float((actual.double() - expected).abs().max()) / (scale or 1.0)
    return errors


def _norm(gradients: dict[str, Tensor]) -> Tensor:
    return torch.stack([gradient.double().square().sum() for gradient in gradients.values()]).sum().sqrt()


def _check(
    case: Case,
    topology: Topology,
    steps: int = 7,
    config: LossConfig = KL,
    streams: Sequence[Sequence[Document]] | None = None,
) -> Trained:
    """Assert that training equals the definition by both rules, in fp64 and fp32, and in fp64 also if whole steps are
    recomputed in small pieces. Returns what training computed by the reference's in fp64 without recomputation."""
    _check_rule(replace(case, rows="served"), topology, steps, config, streams)
    return _check_rule(case, topology, steps, config, streams)


def _check_rule(case, topology, steps, config, streams) -> Trained:
    tokens = sum(len(document.ids) for document in case.documents)
    divide_by = tokens if config.normalization == "tokens" else None
    constants = config.step_decay, config.kl_scale, config.kl_decay
    defined = define(case, steps, Loss(config.name, divide_by, *constants, config.normalization == "samples"))
    runs = [*((dtype, MemoryPlan()) for dtype in TOLERANCES), (torch.float64, IN_PIECES)]
    results = {run: train_case(case, topology, run[0], steps, config, streams, memory=run[1]) for run in runs}
    for (dtype, memory), trained in results.items():
        assert set(trained.gradients) == set(defined.gradients)
        assert torch.equal(trained.counts.counted, defined.counted)
        assert torch.equal(trained.counts.supervised, defined.supervised)
        assert torch.equal(trained.counts.samples, defined.samples)
        wrong = {name: error for name, error in _errors(trained, defined).items() if error > TOLERANCES[dtype]}
        assert wrong == {}, (dtype, memory)
    return results[torch.float64, MemoryPlan()]


@pytest.mark.parametrize("name", ["dense", "ragged", "windowed", "served"])
def test_the_definition_reproduces_the_golden_case(name):
    """The golden gradients are stored in fp32."""
    config = DraftConfig.from_json(json.loads((GOLDEN / name / "config.json").read_text()), name)
    files = ("draft", "inputs", "expected")
    weights, inputs, expected = (load_file(GOLDEN / name / f"{file}.safetensors") for file in files)
    t2d = weights.pop("t2d")
    rows = [(row, real.bool()) for row, real in enumerate(inputs["attention_mask"])]
    names = ("input_ids", "loss_mask", "aux_hidden_state", "hidden_state")
    documents = tuple(Document(*(inputs[name][row][real] for name in names)) for row, real in rows)
    rows = "served" if name == "served" else "reference"
    case = Case(config, weights, t2d, inputs["lm_head_weight"], documents, rows=rows)
    assert torch.equal(weights.pop("d2t"), case.d2t)
    defined = define(case, 7, Loss(divide_by=inputs["attention_mask"].numel()))
    assert torch.allclose(defined.loss, expected["loss"], rtol=1e-13)
    assert torch.allclose(defined.step_losses, expected["ploss"], rtol=1e-13)
    assert torch.allclose(defined.acceptance, expected["acceptance_rate"], rtol=1e-13)
    assert torch.equal(defined.correct, expected["acc_correct"])
    assert torch.equal(defined.supervised.double(), expected["acc_denom"])
    assert torch.equal(defined.counted.double(), expected["position_count"])
    assert {f"grad.{name}" for name in defined.gradients} == {name for name in expected if name.startswith("grad.")}
    for weight, gradient in defined.gradients.items():
        golden = expected[f"grad.{weight}"]
        assert (gradient - golden).abs().max() < 1e-7 * golden.abs().max(), weight


GAPS = ([0] * 12 + [1] * 3 + [0] * 11 + [1] + [0] * 9 + [1] * 6 + [0] * 10, [1, *[0] * 8, 1, 0], [0] * 4)
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("masks", "changes"),
    [
        pytest.param(UNEQUAL, {}, id="documents of unequal length"),
        pytest.param(GAPS, {}, id="gaps between supervised spans"),
        pytest.param(UNEQUAL, {"num_key_value_heads": 1}, id="one key/value head"),
        pytest.param(UNEQUAL, {"num_key_value_heads": 4}, id="as many key/value heads as query heads"),
        pytest.param(UNEQUAL, {"head_dim": 6}, id="a head dimension apart from the hidden size"),
        pytest.param(UNEQUAL, {"target_hidden_size": 20}, id="a target wider than the draft"),
        pytest.param(UNEQUAL, {"fc_norm": True, "rms_norm_eps": 0.5}, id="an epsilon that matters"),
        pytest.param(([0] * 40 + [1] * 24,), {"rope_parameters": YARN, "head_dim": 8}, id="scaled frequencies"),
    ],
)
def test_packed_documents_equal_the_definition_whatever_the_drafts_shape(topology, masks, changes):
    _check(random_case(masks, seed=5, **changes), topology)


def test_documents_shorter_than_the_unroll_equal_the_definition(topology):
    masks = ([1], [1, 1], [0, 1], [1, 1, 1], [1, 0, 0, 1, 1, 0], [1, 1], [1])
    trained = _check(random_case(masks, seed=1), topology)
    assert trained.counts.supervised.tolist() == [7, 3, 2, 2, 1, 0, 0]


@pytest.mark.parametrize("masks", [([0] * 6, [0] * 3), ([1],), ([0, 0, 1], [1], [0, 1])], ids=["none", "one", "last"])
@every_loss
def test_a_batch_without_supervision_has_zero_loss_and_zero_gradients(topology, masks, loss):
    """A document's last token has no successor, so supervising only that token is no supervision."""
    trained = _check(random_case(masks, seed=2), topology, config=LossConfig(loss))
    assert trained.counts.supervised.tolist() == trained.counts.counted.tolist() == [0] * 7
    assert trained.metrics.loss == 0 and trained.metrics.step_losses == [0] * 7
    assert trained.metrics.accuracy == trained.metrics.acceptance_rate == [0] * 7
    assert all(not gradient.any() for gradient in trained.gradients.values())  # NaN would count as true


@every_loss
def test_a_teacher_token_outside_the_draft_vocabulary_counts_for_the_accuracy_alone(topology, loss):
    case = random_case(([0, 1, 1, 1, 0], [1, 1]), seed=3, draft_vocab_size=2)
    best = torch.cat([(document.last[1:] @ case.target_head.T).argmax(-1) for document in case.documents])
    t2d = torch.zeros_like(case.t2d)
    t2d[[token for token in range(len(t2d)) if token not in best.tolist()][:2]] = True
    trained = _check(replace(case, t2d=t2d), topology, 3, LossConfig(loss))
    assert trained.counts.counted.tolist() == [0, 0, 0] and trained.counts.supervised.tolist() == [4, 3, 2]
    assert trained.metrics.loss == 0 and all(not gradient.any() for gradient in trained.gradients.values())


def test_a_step_that_counts_nothing_beside_steps_that_do_adds_zero(topology):
    trained = _check(random_case(([1, 1, 1], [1, 1, 0, 0, 0]), seed=4, draft_vocab_size=40), topology, 5)
    assert trained.counts.counted.tolist() == [4, 2, 0, 0, 0]


NORMS = ["fc_norm", "norm_output", "fc_norm norm_output", "norm_before_fc norm_before_residual"]
NORMS += ["norm_before_residual norm_output", "qk_norm", "attention_bias", "qk_norm attention_bias fc_norm"]


@pytest.mark.parametrize("names", NORMS)
def test_norms_and_biases_that_some_drafts_have_equal_the_definition(topology, names):
    changes = dict.fromkeys(names.split(), True)
    trained = _check(random_case(UNEQUAL, seed=9, target_hidden_size=12, **changes), topology)
    assert ("fc_norm.2.weight" in trained.gradients) == ("fc_norm" in changes)
    assert ("input_norm.weight" in trained.gradients) == ("norm_before_fc" in changes)
    assert ("midlayer.self_attn.q_norm.weight" in trained.gradients) == ("qk_norm" in changes)
    assert ("midlayer.self_attn.o_proj.bias" in trained.gradients) == ("attention_bias" in changes)


@pytest.mark.parametrize("steps", [1, 3])
def test_fewer_steps_equal_the_definition(topology, steps):
    _check(random_case(UNEQUAL, seed=12), topology, steps)


@pytest.mark.parametrize("size", [40, 3])
def test_draft_vocabularies_full_and_small_equal_the_definition(topology, size):
    trained = _check(random_case(UNEQUAL, seed=13, draft_vocab_size=size), topology)
    counted, supervised = int(trained.counts.counted[0]), int(trained.counts.supervised[0])
    assert counted == supervised if size == 40 else 0 < counted < supervised


@every_normalization
@every_loss
def test_every_loss_of_streams_equals_that_of_one_packed_stream_and_the_definition(topology, loss, normalization):
    """The second stream has no supervision at some steps, the third has none at all."""
    case = random_case((*UNEQUAL, [1, 1], [0] * 5), seed=15)
    split = (case.documents[:4], case.documents[4:5], case.documents[5:])
    config = LossConfig(loss, normalization=normalization, kl_scale=0.7)
    accumulated = _check(case, topology, config=config, streams=split)
    packed = train_case(case, topology, torch.float64, 7, config)
    for name, gradient in packed.gradients.items():
        assert (accumulated.gradients[name] - gradient).abs().max() <= 1e-12 * gradient.abs().max(), name


def test_the_order_of_packed_documents_does_not_matter(topology):
    case = random_case(UNEQUAL, seed=16)
    _check(case, topology, streams=[case.documents[::-1]])


@pytest.mark.parametrize("recompute", ["none", "attention_kept", "full"])
@pytest.mark.parametrize("block_bytes", [1, 40_000, 2**20])
def test_what_is_recomputed_in_pieces_of_any_size_equals_the_definition(topology, recompute, block_bytes):
    case = random_case(UNEQUAL, seed=18, fc_norm=True)
    defined = define(case, 4, Loss())
    memory = MemoryPlan(recompute, block_bytes)
    for dtype, tolerance in TOLERANCES.items():
        errors = _errors(train_case(case, topology, dtype, 4, KL, memory=memory), defined)
        assert {name: error for name, error in errors.items() if error > tolerance} == {}


def test_documents_of_several_query_blocks_equal_the_definition(topology):
    generator = torch.Generator().manual_seed(17)
    masks = ([0] * 100 + [1] * 1100, (torch.rand(700, generator=generator) < 0.2).tolist())
    _check(random_case(masks, seed=17), topology, steps=2)
