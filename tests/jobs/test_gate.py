"""The gate: what does not fit together is refused as soon as it can be known, and by the rules that concern the job."""

from inspect import signature

import pytest
from places import RECIPES
from tiny_run import write_recipe

from eagle3.errors import UserError
from eagle3.jobs.derived import config_of, shape_draft
from eagle3.jobs.gate import OF_STATES, OF_TRAINING, Gate, require_servers_named
from eagle3.recipe.loading import load_recipe

FACTS = {"recipe", "warn", "nodes", "processes", "store", "config", "known", "draft", "longest"}


def test_every_rule_asks_for_facts_that_somebody_gives():
    assert {name for rule in (*OF_STATES, *OF_TRAINING) for name in signature(rule).parameters} == FACTS


def gate_of(*overrides: str, training: bool = True) -> Gate:
    return Gate(load_recipe(RECIPES / "quickstart.yaml", overrides), print, training=training)


def draft_of(gate: Gate) -> dict:
    config = config_of(gate.recipe)
    return {"config": config, "draft": shape_draft(gate.recipe, config)}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.draft.window=2"], r"^model.draft.window: a window of 2 keys .* chain of \d \(training.ttt_steps\)"),
        (
            ["model.draft.window=7", "evaluation.draft_tokens=8"],
            r"^model.draft.window: .* chain of 8 \(evaluation.draft_tokens\); .* a window of at least 8$",
        ),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_a_window_that_holds_no_chain_is_refused_once_the_draft_is_known(overrides, message, training):
    gate = gate_of(*overrides, training=training)
    gate.know()
    with pytest.raises(UserError, match=message):
        gate.know(**draft_of(gate))


def test_a_capture_is_not_asked_what_only_training_needs():
    contradiction = ("hidden_states.mode=live", "hidden_states.ulysses=2")
    gate_of(*contradiction, training=False).know()
    with pytest.raises(UserError, match="hidden_states.ulysses: 2, but live hidden states"):
        gate_of(*contradiction).know()


def test_a_plan_needs_no_servers_and_live_training_does():
    gate = gate_of("target.backend=sglang")
    gate.know()
    with pytest.raises(UserError, match="target.servers: live training with SGLang needs running servers; for each"):
        require_servers_named(gate.recipe)


def test_a_sample_beyond_the_drafts_positions_is_refused():
    gate = gate_of()
    facts = draft_of(gate)
    reach = facts["draft"].max_position_embeddings
    gate.know(**facts, longest=reach)
    other = gate_of()
    with pytest.raises(UserError, match=f"a sample has {reach + 1} tokens, but the draft only reaches {reach} "):
        other.know(**facts, longest=reach + 1)


def test_a_rule_waits_for_its_facts_and_is_applied_once(tmp_path, target):
    said: list[str] = []
    recipe = write_recipe(tmp_path, target)
    last = config_of(load_recipe(recipe)).num_hidden_layers - 1
    gate = Gate(load_recipe(recipe, [f"model.aux_layers=[0, 1, {last}]"]), said.append, training=True)
    facts = draft_of(gate)
    gate.know(draft=facts["draft"])
    assert not said
    gate.know(config=facts["config"])
    gate.know(longest=8)
    assert len(said) == 1
    assert said[0].startswith(f"model.aux_layers: [0, 1, {last}] has the output of the target's last layer")
