"""Faults that are planted in a draft are named in turn, and sound drafts are left in peace."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from planted_faults import PLANTS, SEVERAL, plant_all
from published_drafts import LAYOUTS, rewritten
from test_teacher_forced import written_text
from tiny_draft import DRAFT_TOKENS, NEW_TOKENS, as_target, export_trained, random_prompts, tiny_llama

from eagle3.draft.interchange import read_exported
from eagle3.errors import UserError
from eagle3.evaluation.diagnosis import Diagnosis, Measured, diagnose, evidence_of, measuring
from eagle3.evaluation.known_faults import HEAD, DraftReading, Surroundings, layers_to_keep
from eagle3.evaluation.teacher_forced import ForcedDrafts, WrittenText

PROMPTS = 12
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


class Specimen(NamedTuple):
    """A sound draft, and what its diagnosis needs."""

    reading: DraftReading
    around: Surroundings
    measure: Callable[[DraftReading], Measured]

    def diagnosed(self, reading: DraftReading) -> Diagnosis:
        return diagnose(reading, self.around, chr, self.measure, DRAFT_TOKENS, lambda line: None)


def specimen(folder, topology, **shape) -> Specimen:
    torch.set_num_threads(1)  # as in every test; `topology` has just set the machine's number
    target, prompts = as_target(tiny_llama()), random_prompts(PROMPTS)
    export_trained(folder, target, prompts, topology, **shape)
    keep = layers_to_keep(target.aux_layers, len(target.layers))
    texts = [written_text(target, prompt, NEW_TOKENS, keep) for prompt in prompts]
    head = target.head
    return Specimen(
        DraftReading(read_exported(folder), texts),
        Surroundings(head.embedding, {}),
        measuring(head, topology.modules_alone, DRAFT_TOKENS),
    )


@pytest.fixture(scope="module")
def folder_of_sound(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("draft") / "export"


@pytest.fixture(scope="module")
def sound(topology, folder_of_sound) -> Specimen:
    return specimen(folder_of_sound, topology)


@pytest.mark.parametrize("fault", ["hidden states one row late", "another embedding", *list(SEVERAL)[:1]])
def test_planted_faults_are_named_and_their_changes_restore_the_draft(sound, fault):
    healthy = sound.measure(sound.reading).accepted
    plants = SEVERAL.get(fault) or (PLANTS[fault],)
    faulty, cures = plant_all(sound.reading, plants, sound.around)
    diagnosis = sound.diagnosed(faulty)
    named = [finding.name for finding in diagnosis.faults]
    assert len(named) == len(cures) and all(any(name.startswith(cure) for name in named) for cure in cures), named
    assert diagnosis.accepted_drafts < healthy == pytest.approx(diagnosis.faults[-1].accepted, abs=0.05)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_draft_in_every_published_form_is_diagnosed_as_what_it_is(sound, folder_of_sound, tmp_path, layout):
    """SafeAILab's form has the weights in fp16, and names no layers: diagnose.py takes EAGLE3's own."""
    own = sound.reading.exported
    read = read_exported(rewritten(shutil.copytree(folder_of_sound, tmp_path / "other"), layout))
    published = sound.reading._replace(
        exported=replace(read, config=replace(read.config, aux_layers=own.config.aux_layers))
    )
    assert sound.measure(published).accepted == pytest.approx(sound.measure(sound.reading).accepted, abs=0.02)
    faulty, (cure,) = plant_all(published, (PLANTS["hidden states one row late"],), sound.around)
    (fault,) = sound.diagnosed(faulty).faults
    assert fault.name.startswith(cure)


@pytest.mark.parametrize("shape", [{}, {"window": 16}, {"rope_parameters": YARN, "norm_output": True}], ids=str)
def test_a_sound_draft_has_no_fault(topology, tmp_path, shape):
    own = specimen(tmp_path / "export", topology, **shape)
    diagnosis = own.diagnosed(own.reading)
    assert not diagnosis.faults and diagnosis.accepted_drafts > 0.3 and len(diagnosis.tried) > 20
    assert diagnosis.lines()[0].startswith("the draft is sound" if diagnosis.evidence.sound else "no known")


def test_a_scaled_head_is_noted_because_only_sampling_suffers(sound):
    exported = sound.reading.exported
    weights = exported.weights | {HEAD: exported.weights[HEAD] * 16}
    (note,) = sound.diagnosed(sound.reading._replace(exported=replace(exported, weights=weights))).notes
    assert "multiplied by 0.0" in note and HEAD in note


def test_one_text_is_refused_because_it_shows_no_interval(sound):
    with pytest.raises(UserError, match="--prompts: 1 of 1 answers hold a chain of 3 tokens"):
        sound.diagnosed(sound.reading._replace(texts=sound.reading.texts[:1]))


def test_every_place_is_in_one_group_though_the_quarters_print_alike(sound):
    places = 126
    entropy = torch.linspace(0.25, 0.2501, places + 1)
    text = WrittenText(torch.arange(places + 1), 0, {}, entropy, torch.zeros(0), torch.zeros(0))
    forced = ForcedDrafts(torch.arange(places) % 2, torch.zeros(0))
    evidence = evidence_of([text], [forced], sound.reading.exported, chr, DRAFT_TOKENS)
    for groups in (evidence.by_context, evidence.by_token, evidence.by_entropy):
        assert sum(group.places for group in groups) == places
        assert sum(group.places * group.accepted for group in groups) == pytest.approx(places // 2)
