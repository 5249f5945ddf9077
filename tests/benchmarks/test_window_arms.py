"""The experiment of docs/windows-experiment.md: its texts, and how its results are compared."""

import json

import arm_runs
import copying
import pytest
import window_arms

from eagle3.demo.target import byte_level_tokenizer
from eagle3.text.standard_library import standard_library_text


@pytest.fixture(scope="module")
def writer():
    files = standard_library_text("files")[1][:12]
    return copying.Writer(files, byte_level_tokenizer(files, 1024, 4096), seed=0)


def test_conversations_have_at_most_the_wanted_tokens_and_every_answer_follows_from_a_list_before(writer):
    answers = 0
    for tokens in (512, 2048):
        turns, lists = writer.turns(tokens), {}
        assert tokens - 400 < len(copying.encoded(writer.tokenizer, turns)) <= tokens
        for turn in turns:
            if turn.user.startswith("list "):
                name, _, words = turn.user.removeprefix("list ").partition(":")
                lists[name] = words.split()
            elif turn.user.startswith("repeat "):
                name, _, edit = turn.user.removeprefix("repeat list ").partition(" with ")
                new, _, old = edit.partition(" for ")
                assert turn.assistant.split() == [new if edit and word == old else word for word in lists.pop(name)]
                answers += 1
    assert answers > 3


@pytest.mark.parametrize("kind", copying.KINDS)
def test_a_prompt_begins_with_the_list_that_it_wants_and_fills_its_context(writer, kind):
    turns, shown = writer.prompt(1024, kind)
    assert turns[0] == shown.shown()
    assert (f"repeat list {shown.name}" in turns[-1].user) == (kind != "code")
    before = copying.encoded(writer.tokenizer, [*turns[:-1], turns[-1]._replace(assistant="")])
    assert 512 < len(before) <= 1024  # where evaluate.py --by-context counts it


def test_results_are_compared_over_shared_prompts_and_only_seeds_that_all_arms_have(tmp_path):
    """Each context has three prompts, one of each kind; for lists, one arm accepts twice as much as the other."""
    arms = [arm_runs.Arm("full, whole", "whole", ()), arm_runs.Arm("window 32", "whole", (), (None, 31))]
    tokens = {"full, whole": [8, 6, 5], "window 32": [4, 3, 5], "window 32; window 31 at serving": [4, 3, 5]}
    for arm in arms:
        for seed in (0, 1, 2):
            arm.run_folder(tmp_path, seed).mkdir()
            (arm.run_folder(tmp_path, seed) / "cost.json").write_text('{"processor_seconds": 1.5}')
            for window in arm.judged:
                if (seed, window) != (2, 31):  # not judged yet
                    of_each = [[count * (1 + seed), 2] for count in tokens[arm.served(window)]]
                    arm.result(tmp_path, seed, window).write_text(
                        json.dumps({"contexts": [{"context": 512, "of_each": of_each}], "processor_seconds": 2.0})
                    )
    results = arm_runs.read_results(arms, tmp_path)
    assert [*results] == [*tokens]
    assert all(arm["seeds"] == [0, 1] and arm["training_seconds"] == [1.5, 1.5] for arm in results.values())
    assert results["full, whole"]["counts"] == [[[[8, 2], [6, 2], [5, 2]]], [[[16, 2], [12, 2], [10, 2]]]]

    lists = arm_runs.Resampled({name: window_arms.of_kinds(arm, [0, 1]) for name, arm in results.items()})
    assert lists.of("full, whole", 512)[0] == (8 + 6 + 16 + 12) / 8
    assert arm_runs.interval(lists.of("window 32", 512) / lists.of("full, whole", 512)) == [0.5, 0.5, 0.5]
    code = arm_runs.Resampled({name: window_arms.of_kinds(arm, [2]) for name, arm in results.items()})
    assert arm_runs.interval(code.of("window 32", 512) / code.of("full, whole", 512)) == [1.0, 1.0, 1.0]
