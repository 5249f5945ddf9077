"""A fault that is planted in a draft is named first, and a sound draft is left in peace."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from test_speculative import DRAFT_TOKENS, NEW_TOKENS, as_target, export_trained, random_prompts, tiny_llama

from eagle3.draft.interchange import EMBEDDING, ExportedDraft, read_exported
from eagle3.evaluation.diagnosis import Diagnosis, diagnose
from eagle3.evaluation.teacher_forced import WrittenText, written_text

Planted = tuple[ExportedDraft, Sequence[WrittenText]]


@pytest.fixture(scope="module")
def sound(topology, tmp_path_factory):
    """A draft, its target, and texts."""
    folder, target, prompts = tmp_path_factory.mktemp("draft") / "export", as_target(tiny_llama()), random_prompts(16)
    export_trained(folder, target, prompts, topology)
    return read_exported(folder), target, [written_text(target, prompt, NEW_TOKENS) for prompt in prompts]


def diagnosed(draft: ExportedDraft, target, texts: Sequence[WrittenText], topology) -> Diagnosis:
    return diagnose(draft, target, texts, topology.modules_alone, DRAFT_TOKENS, lambda line: None)


def other_theta(draft: ExportedDraft, texts: Sequence[WrittenText], _target) -> Planted:
    rope = {**draft.config.rope_parameters, "rope_theta": 30.0}
    return replace(draft, config=replace(draft.config, rope_parameters=rope)), texts


def ids_as_offsets(draft: ExportedDraft, texts: Sequence[WrittenText], _target) -> Planted:
    return replace(draft, d2t=draft.d2t + torch.arange(len(draft.d2t))), texts


def other_embedding(draft: ExportedDraft, texts: Sequence[WrittenText], target) -> Planted:
    rolled = target.weights().embedding.roll(1, 0).contiguous()
    return replace(draft, weights=draft.weights | {EMBEDDING: rolled}), texts


def reversed_layers(draft: ExportedDraft, texts: Sequence[WrittenText], _target) -> Planted:
    return draft, [text._replace(aux=torch.cat(text.aux.chunk(3, -1)[::-1], -1)) for text in texts]


def rows_late(draft: ExportedDraft, texts: Sequence[WrittenText], _target) -> Planted:
    return draft, [text._replace(aux=text.aux.roll(1, 0)) for text in texts]


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (other_theta, "rope_theta 10,000, not 30"),
        (ids_as_offsets, "d2t read as ids"),
        (other_embedding, "the target's embedding"),
        (reversed_layers, "auxiliary layers in reverse order"),
        (rows_late, "hidden states one row late"),
    ],
)
def test_a_planted_fault_is_named_first(sound, topology, plant: Callable[..., Planted], named):
    draft, target, texts = sound
    healthy = diagnosed(draft, target, texts, topology).accepted
    faulty, seen = plant(draft, texts, target)
    diagnosis = diagnosed(faulty, target, seen, topology)
    assert diagnosis.explanations and diagnosis.explanations[0].name == named, diagnosis.findings[:3]
    assert diagnosis.explanations[0].accepted == pytest.approx(healthy, abs=0.05) and diagnosis.accepted < healthy


def test_a_sound_draft_has_no_fault(sound, topology):
    diagnosis = diagnosed(*sound, topology)
    assert diagnosis.explanations == [] and diagnosis.accepted > 0.3 and len(diagnosis.findings) > 8
