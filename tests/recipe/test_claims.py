"""recipes/claims.toml claims what the tests' own cases and committed results show, and no more: a family that is
removed from a test loses its claim."""

import json
from typing import Any, get_args

import pytest
import test_families
import test_family_masks
import test_recipes
import test_sglang_capture
import test_sglang_families
from claims import Claim
from family_targets import architecture
from places import ROOT
from sglang_cpu.targets import random_model

from eagle3.targets.sglang.version import EAGLE3_TARGETS


def cases_of(test: Any, argument: str) -> set[str]:
    """The values of one argument with which the test is run."""
    for mark in test.pytestmark:
        names, values = mark.args
        names = [names] if isinstance(names, str) else names
        if argument in names:
            return {getattr(value, "values", [value])[names.index(argument)] for value in values}
    raise AssertionError(f"{test.__name__} has no cases of {argument}")


@pytest.fixture(scope="module")
def shown() -> dict[Claim, set[str]]:
    """By claim, the recipes that have a test case for it. A case for an SGLang class counts for all recipes of that
    class."""
    every = cases_of(test_recipes.test_a_recipe_says_of_its_target_what_the_published_config_says, "name")
    origins = {recipe: test_recipes.origin_of(recipe) for recipe in every}
    written = cases_of(test_family_masks.test_mask_covers_exactly_what_the_target_generates, "recipe")
    masked = {recipe for recipe, masks in test_family_masks.MASKS.items() if masks.get("same_as", recipe) in written}
    taken = cases_of(test_sglang_families.test_the_draft_of_every_recipe_is_taken_whole, "recipe")
    captured = {
        type(random_model(family)).__name__
        for family in cases_of(
            test_sglang_capture.test_capture_equals_transformers_for_every_row_with_prefill_cut_and_whole, "family"
        )
    } | {
        architecture(recipe)
        for recipe in cases_of(test_sglang_families.test_captured_hidden_states_are_those_of_transformers, "recipe")
    }
    measured = json.loads((ROOT / "benchmarks" / "results" / "real_model_small.json").read_text(encoding="utf-8"))
    return {
        "config": {
            recipe
            for recipe, origin in origins.items()
            if origin["config"]["source"] and not origin["config"]["unverified"]
        },
        "chat_template": {recipe for recipe in masked & every if origins[recipe]["chat_template"]["source"]},
        "training": cases_of(test_families.test_the_recipe_captures_trains_and_exports, "family"),
        "serving": {recipe for recipe in taken if architecture(recipe) in EAGLE3_TARGETS}
        - {"gemma-3-27b"},  # SGLang feeds it states without the residual stream (docs/sglang.md)
        "capture": {recipe for recipe in every if architecture(recipe) in captured},
        "weights": {"smollm2-135m"} if measured["drafts"]["full"]["served"]["acceptance_length"] > 1.2 else set(),
    }


@pytest.mark.parametrize("recipe", test_recipes.RECIPES)
def test_a_recipe_claims_what_has_a_test_case_and_no_more(shown, recipe):
    assert shown.keys() == set(get_args(Claim))
    verified = test_recipes.CLAIMS[recipe].verified
    assert {claim: claim in verified for claim in shown} == {claim: recipe in those for claim, those in shown.items()}
