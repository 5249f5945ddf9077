"""The dense baseline of benchmarks/step_time.py is the definition: what training is timed against computes the same."""

import dense
import pytest
import torch
from definition import Loss, define, random_case
from training_path import load_draft, stream_batch, train_case

from eagle3.draft.interchange import exported_tensors
from eagle3.objective.losses import LossConfig
from eagle3.parallel.sequence import Stream, plan_sequence

STEPS = 4
MASKS = {
    "everything": [1] * 19,
    "one span": [0] * 9 + [1] * 4 + [0] * 8,
    "turns": [0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1, 0, 0, 1],
    "shorter than the steps": [1, 1, 1],
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_baseline_gives_the_loss_and_gradients_of_the_definition_and_of_training(topology, mask):
    case = random_case([mask], seed=3)
    (document,) = case.documents
    stream = Stream.pack([document.ids], [document.loss_mask])
    draft = load_draft(case, topology, torch.float64)
    batch = stream_batch(case, case.documents, STEPS, torch.float64, topology)
    inputs = dense.dense_inputs(stream, plan_sequence(stream, STEPS), batch)
    named = dict(draft.named_parameters())
    found = dense.dense_loss(exported_tensors(named), case.config, inputs, STEPS)
    found.loss.backward()
    gradients = exported_tensors({name: weight.grad for name, weight in named.items() if weight.grad is not None})

    defined = define(case, STEPS, Loss())
    trained = train_case(case, topology, torch.float64, STEPS, LossConfig())
    assert float(found.loss) == pytest.approx(float(defined.loss), rel=1e-10)
    assert float(found.loss) == pytest.approx(trained.metrics.loss, rel=1e-10)
    assert torch.equal(found.correct, defined.correct)
    torch.testing.assert_close(found.overlap / defined.counted.clamp(min=1), defined.acceptance, rtol=1e-10, atol=0)
    assert gradients.keys() == defined.gradients.keys() == trained.gradients.keys()
    for name, wanted in defined.gradients.items():
        for other in (wanted, trained.gradients[name]):
            assert (gradients[name] - other).abs().max() <= 1e-10 * wanted.abs().max(), name
