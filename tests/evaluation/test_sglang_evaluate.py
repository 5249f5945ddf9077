"""evaluate.py with SGLang: a file's prompts, a tree of drafts, acceptance by context, the results on disk."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from jobs import inputs_of
from sglang_cpu.environment import sglang_environment
from sglang_cpu.targets import make_target
from tiny_draft import export_trained
from tiny_run import finish, launch, write_recipe

from eagle3.console import Console
from eagle3.evaluation.prompts import read_prompts
from eagle3.evaluation.results import as_json
from eagle3.evaluation.speculative import plain_decoding
from eagle3.jobs.evaluate import judge_contexts
from eagle3.recipe.loading import load_recipe
from eagle3.targets.checkpoint import load_tokenizer
from eagle3.targets.transformers import load_target

pytestmark = pytest.mark.sglang

STEPS, TOPK, TREE_TOKENS, NEW_TOKENS = 3, 2, 8, 40  # further than the draft was taught


@dataclass(frozen=True)
class Case:
    """A draft in folder/export that learnt the target's answers to the prompts."""

    folder: Path
    recipe: Path
    files: dict[str, Path]  # a prompt set of one prompt, and one of the others
    answers: list[list[int]]  # the target's, to prompts of 4, 5, 6 and 7 tokens

    def evaluate(self, *arguments: str | int) -> str:
        """Let the launcher judge by SGLang. Returns what it prints."""
        command = [sys.executable, "launchers/evaluate.py", "--recipe", self.recipe, "--engine", "sglang"]
        command += [word for file in self.files.values() for word in ("--prompts", file)]
        command += ["--draft", self.folder / "export", *arguments]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in sglang_environment().items():
                patch.setenv(name, value)
            return finish(launch(*map(str, command)))


@pytest.fixture(scope="module")
def case(topology, tmp_path_factory):
    """The tokenizer has no chat template, so the prompts are texts."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("judged")
    target, prompts = folder / "target", folder / "prompts.jsonl"
    make_target("llama", target)
    generator = torch.Generator().manual_seed(5)
    # the tokenizer would find t1, a special token, in t10
    words = [[f"t{word}" for word in torch.randint(40, 100, (4 + i,), generator=generator)] for i in range(4)]
    prompts.write_text("".join(json.dumps({"text": " ".join(text)}) + "\n" for text in words))
    ids = read_prompts(prompts, load_tokenizer(target), None, longest=100)
    loaded = load_target(target, dtype="float32")
    export_trained(folder / "export", loaded, ids, topology)
    recipe = write_recipe(
        folder,
        target,
        model={"draft": {"vocab_size": 64}},
        data={"train": [str(prompts)], "held_out_fraction": 0},
        evaluation={"draft_tokens": STEPS, "new_tokens": NEW_TOKENS},
    )
    lines = prompts.read_text().splitlines(keepends=True)
    files = {name: folder / f"{name}.jsonl" for name in ("few", "many")}
    files["few"].write_text("".join(lines[:1]))
    files["many"].write_text("".join(lines[1:]))
    return Case(folder, recipe, files, [plain_decoding(loaded, each, new_tokens=NEW_TOKENS).tokens for each in ids])


def test_a_tree_is_lossless_and_its_figures_are_written(case):
    output = case.evaluate("--topk", TOPK, "--tree-tokens", TREE_TOKENS)
    result = json.loads((case.folder / "evaluation.json").read_text())
    settings = {"engine": "sglang", "engine_version": "0.5.23", "topk": TOPK, "tree_tokens": TREE_TOKENS}
    assert {name: result[name] for name in settings} == settings
    assert result["conversations"] == result["identical"] == 4 and result["lossless"]
    put_out = sum(map(len, case.answers))
    assert result["new_tokens"] == put_out
    assert result["verifications"] < put_out - 4, "some drafts must be accepted for this to tell"
    shares = result["position_acceptance"]
    assert len(shares) == STEPS and 1 >= shares[0] >= shares[1] >= shares[2] > 0 and shares[2] < 1
    assert f"acceptance length {result['acceptance_length']:.2f}" in output and "tokens/s" in output
    sets = result["sets"]
    assert [(each["name"], each["conversations"], each["identical"]) for each in sets] == [
        ("few", 1, 1),
        ("many", 3, 3),
    ]
    assert [pair for each in sets for pair in each["of_each"]] == result["of_each"]
    for figure in ("verifications", "yielded", "new_tokens"):
        assert sum(each[figure] for each in sets) == result[figure]
    assert [sum(column) for column in zip(*(each["accepted"] for each in sets), strict=True)] == result["accepted"]
    assert result["same_load"] and "same load" not in output


def without_times(judged: dict) -> dict:
    """SGLang does not tell the seconds of each phase, so it has the estimate alone."""
    times = ("timing", "seconds_speculative", "seconds_plain", "speed")
    contexts = [{name: value for name, value in each.items() if name not in times} for each in judged["contexts"]]
    return judged | {"contexts": contexts, "pay_off": judged["pay_off"][-1:]}


def test_both_engines_give_the_same_by_context(case, topology):
    """SGLang would count on after an EOS, but no answer ends with one."""
    assert {len(answer) for answer in case.answers} == {NEW_TOKENS}
    output = case.evaluate("--by-context", "--contexts", "4,8,16")
    served = without_times(json.loads((case.folder / "by_context.json").read_text()))
    quiet = Console(speaks=False)
    inputs, asked = inputs_of(load_recipe(case.recipe), topology.device, quiet), {"contexts": [4, 8, 16]}
    own = judge_contexts(inputs, case.folder / "export", topology, quiet, case.files, **asked, per_context=8)
    own_result = without_times(as_json(own))
    assert (served["engine"], served["engine_version"]) == ("sglang", "0.5.23")
    what_was_judged = {"draft", "draft_digest", "target", "target_digest", "texts"}
    for name in own_result.keys() - {"engine", "engine_version"} - what_was_judged:
        assert served[name] == own_result[name], name
    assert ([each["conversations"] for each in served["contexts"]], served["left_out"]) == ([1, 3], [16])
    assert all(1 < each["acceptance_length"] < 1 + STEPS for each in served["contexts"])
    assert "context 16: left out, no text is of that length" in output
    for line in replace(own, pay_off=[]).lines():
        assert line in output
    assert "speed-up with the best number of draft tokens (in brackets), estimated for 1 x H100 by data sheet" in output
