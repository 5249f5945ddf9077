"""What recomputation and streaming keep in memory, and that they change nothing. (test_definition.py checks that the
gradients are right.)"""

import dataclasses

import pytest
import torch
from definition import random_case
from layouts import Layout, draft_config, pack, prepare
from live_bytes import LargestTensor, LiveBytes, device_tensors
from training_path import stream_batch, train_case

from eagle3.draft.model import DraftPass
from eagle3.objective.losses import LossConfig
from eagle3.objective.recompute import MemoryPlan
from eagle3.objective.streaming import StreamedRows
from eagle3.objective.unroll import unroll

MASKS = ([0] * 30 + [1] * 20, [0, 1] * 12, [1] * 9)
KL = LossConfig()


@pytest.mark.parametrize("recompute", ["none", "attention_kept", "full"])
def test_inputs_that_wait_on_the_host_give_the_same_bits(topology, recompute):
    case, memory, gradients = random_case(MASKS, seed=1), MemoryPlan(recompute, 10_000), []
    for residence in ("device", "host"):
        batch = stream_batch(case, case.documents, 4, torch.float32, topology, residence=residence)
        streamed = {isinstance(rows, StreamedRows) for rows in (batch.inputs.aux, batch.teacher.last)}
        assert streamed == {residence == "host"}
        trained = train_case(case, topology, torch.float32, 4, KL, memory=memory, residence=residence)
        gradients.append(trained.gradients)
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


def test_rows_are_streamed_in_any_slices_and_again():
    tensor = torch.arange(20.0).reshape(10, 2)
    rows = StreamedRows(tensor, torch.device("cpu"))
    for _ in range(2):
        assert torch.equal(torch.cat([rows[slice(start, start + 4)] for start in (0, 4, 8)]), tensor)
    assert len(rows) == 10


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("full", 2)])
def test_the_embeddings_part_of_a_projection_is_computed_once_for_each_token_where_steps_are_saved(
    topology, monkeypatch, recompute, times
):
    case, rows, embedded = random_case(MASKS, seed=1), [], DraftPass.embedded
    monkeypatch.setattr(DraftPass, "embedded", lambda self, x, of: (rows.append(len(x)), embedded(self, x, of))[1])
    train_case(case, topology, torch.float32, 4, KL, memory=MemoryPlan(recompute))
    batch = stream_batch(case, case.documents, 4, torch.float32, topology)
    each = batch.inputs.query_tokens.numel() + len(batch.inputs.key_tokens)  # what the steps and the prefix meet
    different = len(torch.cat([document.ids for document in case.documents]).unique())
    assert sum(rows) <= different + 1 if recompute == "none" else sum(rows) >= times * each


def test_many_chunks_in_bfloat16_round_the_weights_gradients_as_one_chunk_does(topology):
    """Chunks are added up in fp32. In bfloat16, sixty additions would lose two more digits than a single rounding."""
    case = random_case(MASKS, seed=2)
    whole, pieces = (
        train_case(case, topology, torch.bfloat16, 1, KL, memory=MemoryPlan("full", block)).gradients
        for block in (2**20, 1)
    )
    for name, gradient in whole.items():
        assert (pieces[name] - gradient).norm() <= 2**-7 * gradient.norm(), name


def test_kept_bytes_of_a_supervised_token_are_a_hidden_state_and_own_keys_a_step(topology):
    """With full recompute, the unroll's graph holds only the inputs of steps, K_0 and V_0, and own keys and values."""
    draft_shape = dataclasses.replace(draft_config(4, 2, 16), intermediate_size=256)
    per_token = {}
    for recompute in ("full", "attention_kept", "none"):
        peaks = []
        for count in (256, 512):
            prepared = prepare(pack([[(128, True)]] * (count // 128)), draft_shape, 5, Layout(), topology)
            objective, inputs = prepared.objective, prepared.batch.inputs
            with LiveBytes([*device_tensors(inputs), *objective.parameters()]) as bytes_:
                outputs = unroll(objective.draft, objective.attention, inputs, recompute, chunk=32)
            peaks.append(bytes_.live - bytes_.existing)
            del outputs
        per_token[recompute] = (peaks[1] - peaks[0]) / (2 * 127)  # a document's last token is no query
    hidden, own, keys = 64, 2 * 2 * 16, 2 * 2 * 16
    # inputs of 5 steps and the last output, own keys and values of the 3 steps that a later one sees, K_0 and V_0, and
    # positions of 8 bytes
    assert per_token["full"] == pytest.approx(4 * (6 * hidden + 3 * own + keys) + 5 * 8, rel=0.02)
    assert per_token["attention_kept"] > per_token["full"] + 4 * 5 * 2 * 64
    assert per_token["none"] > per_token["attention_kept"] + 4 * 5 * 4 * 256


@pytest.mark.parametrize("recompute", ["none", "attention_kept", "full"])
def test_no_step_in_any_mode_makes_a_tensor_of_tokens_by_vocabulary(topology, recompute):
    tokens, vocabulary, memory = 600, 700, MemoryPlan(recompute, 2**20)
    draft = dataclasses.replace(draft_config(4, 2, 8), vocab_size=vocabulary, draft_vocab_size=vocabulary)
    prepared = prepare(pack([[(100, True)]] * (tokens // 100), vocabulary), draft, 7, Layout(), topology, memory=memory)
    with LargestTensor() as largest:
        prepared.objective(prepared.batch, prepared.weights).surrogate.backward()
    assert 7 * 16 * vocabulary < largest.elements < 0.5 * tokens * vocabulary  # the largest is a block of the loss
