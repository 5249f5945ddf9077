"""Faults that are planted in a draft are named in turn, and sound drafts are left in peace; diagnose.py names one in a
draft from a hub id, and refuses what it cannot diagnose."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from planted_faults import PLANTS, SEVERAL, plant_all
from published_drafts import LAYOUTS, rewritten
from safetensors.torch import load_file, save_file
from test_teacher_forced import written_text
from tiny_draft import DRAFT_TOKENS, NEW_TOKENS, as_target, export_trained, random_prompts, tiny_llama
from tiny_run import conversations, make_target, run_script
from transformers import AutoTokenizer

from eagle3.draft.config import draft_digest
from eagle3.draft.interchange import EMBEDDING, read_exported
from eagle3.durable import unsealed
from eagle3.errors import UserError
from eagle3.evaluation.diagnosis import Diagnosis, Measured, diagnose, evidence_of, measuring
from eagle3.evaluation.known_faults import HEAD, DraftReading, Surroundings, layers_to_keep
from eagle3.evaluation.prompts import read_prompts
from eagle3.evaluation.teacher_forced import ForcedDrafts, WrittenText
from eagle3.parallel.topology import usable_cores
from eagle3.targets.transformers import load_target

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


# The launcher

ID, REVISION = "someone/draft", "0" * 40


@pytest.fixture(scope="module")
def case(tmp_path_factory, topology):
    """A folder with `target`, `prompts.jsonl`, and a hub's cache `hub` with a draft that has the wrong embedding."""
    torch.set_num_threads(1)  # as in every test; `topology` has just set the machine's number
    folder = tmp_path_factory.mktemp("diagnosed")
    target_folder, prompts = make_target(folder / "target"), folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in conversations(6)))
    target = load_target(target_folder, dtype="float32")
    cached = folder / "hub" / f"models--{ID.replace('/', '--')}"
    export = cached / "snapshots" / REVISION
    export.parent.mkdir(parents=True)
    texts = read_prompts(prompts, AutoTokenizer.from_pretrained(target_folder), None, 200)
    export_trained(export, target, texts, topology, updates=150)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(REVISION)
    tensors = load_file(export / "model.safetensors")
    wrong = target.head.embedding.roll(1, 0).contiguous().clone()
    save_file(tensors | {EMBEDDING: wrong}, export / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_draft_from_the_hub_is_diagnosed_with_its_target_and_a_file_of_prompts(case, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(case / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(usable_cores()))  # leaves it one of them
    words = ["--draft", ID, "--target", str(case / "target"), "--prompts", str(case / "prompts.jsonl")]
    keys = ["model.target_dtype=float32", "evaluation.new_tokens=24", "evaluation.draft_tokens=3"]
    out = case / "diagnosis.json"
    output = run_script("launchers/diagnose.py", *words, *keys, "--out", str(out), code=1)
    assert "fault 1: with the target's embedding, " in output and f"leave {EMBEDDING} out of its weights" in output
    assert "tokens a verification, " in output and "as the mean over conversations" in output
    for grouping in ("context", "token", "entropy of the target"):
        assert f"first drafts accepted by {grouping}: " in output
    assert "acceptance length by context (greedy, 24 new tokens)" in output
    assert "estimated for 1 x H100 by data sheet, not measured" in output and output.count("drafting pays ") == 2
    result = json.loads(out.read_text())
    assert [each["conversations"] for each in result["by_context"]["contexts"]] == [6]
    assert unsealed(result, "diagnosis")["draft_digest"] == draft_digest(next((case / "hub").glob("*/snapshots/*")))
    assert result["draft"] == ID and result["decoded"]["lossless"] and len(result["faults"]) == 1
    assert result["faults"][0]["explains"] and result["texts"] == "prompts.jsonl"
    assert "prompts: 6 make wide intervals" in output
    tried = {each["name"] for each in result["tried"]}
    assert {"the prompts in their other form", "the target in bfloat16"} <= tried
    assert torch.tensor(result["evidence"]["by_position"]).shape == (3,)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "somewhere/model"], "--target: needs texts; name a file of conversations or questions"),
        (["--target", "a/b", "--prompts", "p.jsonl"], "--target: needs a draft beside it; name its folder or hub id"),
        (["--prompts", "p.jsonl"], "--prompts p.jsonl: no such file; name a .jsonl"),
        (["evaluation.new_tokens=5"], "evaluation.new_tokens: 5 tokens hold no chain of 4"),
        (["--out", "."], "--out .: exists, but is not a file"),
        (["--out", "none/d.json"], "--out none/d.json: there is no folder none"),
        (["--draft", "./nothing"], "draft './nothing': no such folder; train first"),
        (["--prompts", "a.txt", "--prompts", "b.txt"], "--prompts b.txt: takes one file, and a.txt is given too"),
        (["--gpu", "l4"], "argument --gpu: invalid choice: 'l4' (choose from"),
        (["evaluation.conversations=0", "--draft", "a/b"], "recipe: evaluation.conversations is 0"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused_before_anything_loads(refused, words, message):
    assert message in refused("diagnose.py", *words)


def test_a_diagnosis_goes_beside_the_draft_that_it_is_of(refused, tmp_path):
    """Not into the folder that the command runs in. What is there already shows which place was meant."""
    (tmp_path / "export").mkdir()
    (tmp_path / "diagnosis.json").write_text("[]")
    message = refused("diagnose.py", "--draft", tmp_path / "export")
    assert f"{tmp_path}/diagnosis.json: holds something other than an evaluation" in message
