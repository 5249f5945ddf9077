"""The model card beside the exported draft: metadata that hubs read, the run's numbers, and nothing of the user's
machine."""

import json
import shlex

import pytest
import yaml
from huggingface_hub import ModelCard
from report_case import RECIPE, SETS, change, evaluation, started, write_json, write_run

from eagle3.reporting.markdown import one_line, summary
from eagle3.reporting.record import read_run
from eagle3.reporting.report import NotWritten, write_card


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "mine", steps=8)


def card(run):
    write_card(run.path)
    return run.card.read_text(encoding="utf-8")


def command(text, start):
    """The words of the command that begins with `start`, as a shell splits them."""
    begin = text.index(start)
    fence = text[:begin].splitlines()[-1]
    return shlex.split(text[begin:].partition(f"\n{fence}\n")[0].replace("\\\n", ""))


def test_the_metadata_is_what_a_hub_reads(run):
    data = ModelCard(card(run)).data
    assert data.base_model == "acme/tiny-8B"
    assert {"eagle3", "speculative-decoding"} <= set(data.tags)
    assert data.datasets == ["HuggingFaceH4/ultrachat_200k"]
    assert (data.library_name, data.pipeline_tag, data.license) == ("sglang", "text-generation", "other")
    assert "licence is not chosen yet" in run.card.read_text(encoding="utf-8").splitlines()[1]


def test_the_serving_commands_name_target_draft_and_context(run):
    change(run.by_context, pay_off=[])  # so the number of draft tokens is the recipe's
    text = card(run)
    sglang = command(text, "python -m sglang.launch_server")
    options = dict(zip(sglang[3::2], sglang[4::2], strict=True))
    assert options == {
        "--model-path": "acme/tiny-8B",
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": "DRAFT",
        "--speculative-num-steps": "4",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "5",
        "--context-length": "8192",
    }
    vllm = command(text, "vllm serve")
    assert vllm[2] == "acme/tiny-8B" and vllm[-2:] == ["--max-model-len", "8192"]
    assert json.loads(vllm[4]) == {"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 4}
    assert "was not run in vLLM" in text and "- sglang\n" in text and "- vllm\n" not in text, "nor claimed in a tag"


def test_the_card_says_what_the_draft_is_worth_and_serves_it_so(run):
    text = card(run)
    estimated = text.partition("Speed-up with the best number of draft tokens (in brackets), estimated for 2 x h100")[2]
    assert "| context | batch 1 | batch 4 |\n|---:|---|---|\n| 512 | 2.00 (2) | 1.00 (1) |" in estimated
    assert "| 8,192 | 1.25 (1) | 0.50 (1) |" in estimated
    assert "By this, drafting pays at all judged contexts (batch 1), nowhere (batch 4)." in estimated
    assert "measured here in processor seconds:" in text
    # One draft token gains 1.6 and 1.25, two 2 and 1; a batch of 4 loses by both.
    sglang = command(text, "python -m sglang.launch_server")
    assert sglang[sglang.index("--speculative-num-steps") + 1] == "2"
    assert sglang[sglang.index("--speculative-adaptive-config") + 1] == "adaptive.json"
    assert '`adaptive.json` holds `{"1": {"candidate_steps": [2]}, "4": {"candidate_steps": [0]}}`.' in text
    vllm = json.loads(command(text, "vllm serve")[4])
    assert vllm["num_speculative_tokens"] == 2
    assert vllm["num_speculative_tokens_per_batch_size"] == [[1, 3, 2], [4, 4, 0]]
    table = text.partition("The number of draft tokens is the one with the highest mean speed-up")[2]
    assert "estimated for 2 x h100 by data sheet" in table
    assert "| 1 to 3 | 2 | 1.50 | up to about 8,192 tokens |\n| 4 and more | none | 0.75 with 1 | nowhere |" in table
    assert "does not pay:" not in text


def test_the_card_names_windows_that_were_judged_and_serves_the_drafts_own(run):
    """A window of 64 gains nothing by either number of draft tokens, and is not what the draft is served with."""
    judged = json.loads(run.by_context.read_text(encoding="utf-8"))
    lossy = [
        {
            "source": f"{each['source']}, with a window of 64 keys",
            "cells": [cell | {"break_even": 9.0} for cell in each["cells"]],
        }
        for each in judged["pay_off"]
    ]
    windowed = judged | {"window": 64, "trained_window": None, "pay_off": lossy}
    change(run.by_context, other_windows=[windowed])
    text = card(run)
    assert "4 drafted tokens, greedy, with a window of 64 keys):" in text
    assert "estimated for 2 x h100 by data sheet, with a window of 64 keys:" in text
    sglang = command(text, "python -m sglang.launch_server")
    assert sglang[sglang.index("--speculative-num-steps") + 1] == "2"
    change(run.by_context, **windowed | {"other_windows": []})
    assert "with a window of 64 keys):" in card(run) and "highest mean speed-up" not in card(run)
    change(run.by_context, window=None, trained_window=None)
    assert "by this, serve the target without the draft." in card(run)


def test_the_card_has_the_runs_results_and_their_conditions(run):
    text = card(run)
    for part in (
        "Acceptance length 2.77",
        "| 0.78 | 0.53 | 0.31 | 0.15 |",
        "transformers 5.19.0, 4 drafted tokens, greedy",
        "24 conversations",
        "except 1 where the target's best logits tie",
        "| 8k | 2.70 | 2.60 to 2.80 | 8 | 300 |",
        "98.70% of the supervised ones",
        "yarn x4",
        "| steps | 8 |",
        "| samples a step | 8 |",
        "By context (transformers 5.19.0, 4 drafted tokens, greedy)",
        "tensor 1 x ulysses 2 x ring 2 x data 2",
    ):
        assert part in text, part
    change(run.by_context, topk=2, tree_tokens=8)
    assert "By context (transformers 5.19.0, trees of 8 tokens, 2 branches a node, greedy)" in card(run)


def test_a_card_has_a_row_for_each_prompt_set_and_none_without(run):
    assert "prompt set" not in card(run)
    change(run.evaluation, sets=SETS)
    text = card(run)
    assert "| mt-bench | 2.90 | 2.80 to 3.00 | 2.92 | 80 | 900 | 1.50 |" in text
    assert "| a \\| b | 2.10 | – | 2.10 | 1 | 30 | 1.50 |" in text, "one without an interval"


def test_a_windowed_draft_trained_on_spans_says_so_and_how_engines_learn_of_the_window(run):
    assert "keys" not in card(run) and "learnt from" not in card(run)
    change(run.export / "config.json", sliding_window=128, layer_types=["sliding_attention"])
    spans = {"data": RECIPE["data"] | {"spans": {"length": 512, "per_document": 4}}}
    run.recipe.write_text(yaml.safe_dump(RECIPE | spans), encoding="utf-8")
    text = card(run)
    assert "| attention | the last 128 keys, a query's own included" in text
    assert "| learnt from | 4 random spans of 512 supervised tokens, where it has more |" in text
    sglang = command(text, "python -m sglang.launch_server")
    assert sglang[sglang.index("--speculative-draft-window-size") + 1] == "127"
    assert "SGLang reads that only from the flag" in text and "4 random spans of 512" in summary(read_run(run.path))


def test_sampled_and_differing_outputs_are_not_called_equal(run):
    write_json(run.evaluation, evaluation() | {"temperature": 0.8, "compared": False})
    assert "at temperature 0.8" in card(run) and "not compared" in card(run)
    write_json(run.evaluation, evaluation() | {"mismatches": 3})
    assert "DIFFERED from plain decoding in 3 conversations" in card(run)


def test_no_path_of_the_machine_is_told(run):
    recipe = RECIPE | {"model": {"target": "/home/ann/secret/my-model"}}
    run.recipe.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    change(run.run, target=started()["target"] | {"hub_id": None})
    text = card(run)
    assert "/home" not in text and "ann" not in text.split() and "secret" not in text and str(run.path) not in text
    assert "my-model" in text and "own.jsonl" in text
    assert ModelCard(text).data.base_model is None
    assert command(text, "vllm serve")[2] == "TARGET" and "`TARGET`" in text


HOSTILE_NAMES = [
    "x](javascript:alert(1))",
    "<script>alert(1)</script>",
    "a|b|c",
    "a\n# Heading\n\n* item",
    "a\r\n---\r\nlicense: mit\r\n---\r\n",
    'a"\nlicense: x',
    "`code` ```\n````",
    "![i](https://host/i.png) &lt; *b* __c__ ~~d~~ $e$",
    "a' --trust-remote-code; rm -rf $(pwd) --b",
    "&#60;b&#62; \\<b\\>",
    "a\u202eb\u2028# c\x1b[31m",
]


def structure(text):
    """The Markdown's blocks, and everything but text inside lines."""
    blocks = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    inline = [child for block in blocks for child in block.children or [] if not child.type.startswith("text")]
    return [block.type for block in blocks], [(each.type, each.attrs) for each in inline]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
@pytest.mark.parametrize("known", ["by the hub", "as a folder"])
def test_no_name_that_others_chose_is_more_than_text_in_a_card(run, name, known):
    def of(name):
        recipe = RECIPE | {"model": {"target": f"/home/ann/{name.replace('/', '')}"}}
        recipe["data"] = RECIPE["data"] | {"train": [f"/data/{name.replace('/', '')}"]}
        run.recipe.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        change(
            run.run,
            target=started()["target"] | {"hub_id": name if known == "by the hub" else None, "architecture": name},
            data=started()["data"] | {"datasets": [name]},
            versions={"torch": name},
        )
        change(run.evaluation, engine=name, engine_version=name)
        return card(run)

    harmless, text = of("a name"), of(name)
    data = ModelCard(text).data
    assert (data.license, data.datasets) == ("other", [one_line(name)])
    assert data.base_model == (one_line(name) if known == "by the hub" else None)
    assert structure(text.partition("\n---\n")[2]) == structure(harmless.partition("\n---\n")[2])
    served = command(text, "vllm serve")[2]
    assert served == (one_line(name) if known == "by the hub" else "TARGET")
    assert all(each.isprintable() or each == "\n" for each in text)


def test_a_card_is_made_of_what_the_folder_has(run):
    for path in (run.run, run.evaluation, run.by_context, run.metrics):
        path.unlink()
    text = card(run)
    assert "was not measured" in text and "--context-length 8192" in text and "None" not in text
    assert "| steps |" not in text
    run.recipe.unlink()
    write_run(run.path / "other")
    run.metrics.write_bytes((run.path / "other" / "metrics.jsonl").read_bytes())
    text = card(run)
    assert "None" not in text and "unknown, " not in text and "| TTT steps |" not in text
    assert ModelCard(text).data.license == "other"


def test_without_an_export_there_is_no_card(run):
    (run.export / "config.json").unlink()
    assert write_card(run.path) is None and not run.card.exists()


def test_a_card_is_written_anew_until_somebody_edits_it(run):
    before = card(run)
    change(run.evaluation, yielded=3210)
    after = card(run)
    assert "3.21" in after and "3.21" not in before
    edited = after.replace("license: other", "license: mit")
    run.card.write_text(edited, encoding="utf-8")
    with pytest.raises(NotWritten, match="changed by hand"):
        write_card(run.path)
    assert run.card.read_text(encoding="utf-8") == edited


def test_what_was_not_measured_is_said(run):
    beyond, unmeasured = "tokens; beyond that", "Acceptance at long contexts was not measured"
    text = card(run)
    assert f"longer than 8,192 {beyond} nothing is known of it" in text and unmeasured not in text
    data = started()["data"]
    change(run.run, data=data | {"train": data["train"] | {"longest": 512}})
    assert f"longer than 512 {beyond} only the table by context shows how it does" in card(run)
    run.evaluation.unlink()
    assert "Real speculative decoding was measured by context only" in card(run)
    run.by_context.unlink()
    assert unmeasured in card(run)
