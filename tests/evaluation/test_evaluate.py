"""The prompts that a draft is judged on, trees of drafts, and what evaluate.py refuses before anything is loaded."""

import gzip
import json
import re
import runpy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from places import LAUNCHERS, ROOT
from tiny_draft import counted
from tiny_run import write_recipe
from transformers import AutoTokenizer

from eagle3.console import Console, Warned
from eagle3.errors import UserError
from eagle3.evaluation.acceptance import Decoding
from eagle3.evaluation.prompts import read_prompts
from eagle3.evaluation.results import (
    Conditions,
    CountedConversation,
    Judgement,
    SetAcceptance,
    SpeculativeResult,
    as_json,
    over_sets,
)
from eagle3.evaluation.sglang_judge import DraftTree, TimedAnswer, count_conversation
from eagle3.preflight.inputs import prompt_files
from eagle3.recipe.loading import dump_recipe, load_recipe
from eagle3.regeneration.turns import Generation, plan_of
from eagle3.targets.sglang.asking import Generated
from eagle3.targets.sglang.draft_check import NotInstalled, check_export
from eagle3.text.conversations import read_conversations

TURNS = [
    {"role": "user", "content": "Who sat on the mat?"},
    {"role": "assistant", "content": "The cat."},
    {"role": "user", "content": "And why?"},
    {"role": "assistant", "content": "Nobody could say."},
]
PROMPT = (
    "<|im_start|>user\nWho sat on the mat?<|im_end|>\n<|im_start|>assistant\nThe cat.<|im_end|>\n"
    "<|im_start|>user\nAnd why?<|im_end|>\n<|im_start|>assistant\n"
)


def read(tmp_path, tokenizer, name: str, text: str, longest: int = 200, template: str | None = None) -> list[list[int]]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return [prompt.tolist() for prompt in read_prompts(path, tokenizer, template, longest)]


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_prompt_is_all_before_the_last_answer(tmp_path, tokenizer):
    for turns in (TURNS, TURNS[:3]):  # with an answer, and without
        rows = json.dumps({"messages": turns})
        assert read(tmp_path, tokenizer, "a.jsonl", rows) == [ids(tokenizer, PROMPT)]
    shared = [{"from": "human", "value": "And why?"}, {"from": "gpt", "value": "So early."}]
    prompt = "<|im_start|>user\nAnd why?<|im_end|>\n<|im_start|>assistant\n"
    assert read(tmp_path, tokenizer, "a.json", json.dumps([{"conversations": shared}])) == [ids(tokenizer, prompt)]


def test_a_text_is_continued_and_a_line_is_a_question(tmp_path, tokenizer):
    rows = "".join(json.dumps({"text": text}) + "\n" for text in ("The cat sat", "and rain fell"))
    expected = [ids(tokenizer, text) for text in ("The cat sat", "and rain fell")]
    assert read(tmp_path, tokenizer, "a.jsonl", rows) == expected
    prompt = "<|im_start|>user\nAnd why?<|im_end|>\n<|im_start|>assistant\n"
    assert read(tmp_path, tokenizer, "a.txt", "\nAnd why?  \n\nAnd why?") == [ids(tokenizer, prompt)] * 2


def test_a_template_given_replaces_the_tokenizers(tmp_path, tokenizer):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert read(tmp_path, tokenizer, "a.txt", "And why?", template=template) == [ids(tokenizer, "And why?")]


def test_what_the_documentation_converts_are_prompts_of_the_published_questions(tmp_path, tokenizer, monkeypatch):
    """Of each published format, lines as it has them. A document of 24 words loses its middle."""
    monkeypatch.chdir(tmp_path)
    words = " ".join(f"{letter}{letter}" for letter in "abcdefghijklmnopqrstuvwx")
    published = {
        "question.jsonl": {"question_id": 81, "category": "writing", "turns": ["Who sat?", "And\u2028why?"]},
        "test.jsonl": {"question": "Two and two?", "answer": "4\n#### 4"},
        "HumanEval.jsonl": {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": ""},
        "gov_report.jsonl": {"input": "", "context": words, "answers": [""], "length": 24, "dataset": "gov_report"},
        "longbook_qa_eng.jsonl": {"id": 0, "context": "It fell.", "input": "What?", "answer": ["Rain"], "options": []},
    }
    for name, row in published.items():
        Path(name).write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    Path("HumanEval.jsonl.gz").write_bytes(gzip.compress(Path("HumanEval.jsonl").read_bytes()))
    Path("test.jsonl").write_text(Path("test.jsonl").read_text() * 33)
    Path("dataset2prompt.json").write_text(json.dumps({"gov_report": "Report: {context} Summary:"}))
    document = (ROOT / "docs" / "evaluating.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", document, re.DOTALL | re.MULTILINE))
    for name, value in (("Qwen/Qwen3-8B", tokenizer.name_or_path), ("30_000", "20")):
        assert code.count(name) == 1
        code = code.replace(name, value)
    exec(code, {})

    def asked(name: str) -> list[str]:
        """What the user says last in each prompt."""
        prompts = (tokenizer.decode(prompt) for prompt in read_prompts(Path(name), tokenizer, None, 500))
        return [prompt.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0] for prompt in prompts]

    assert asked("mt-bench.jsonl") == ["Who sat?"] and asked("gsm8k.jsonl") == ["Two and two?"] * 3
    assert asked("humaneval.jsonl") == ["def f():\n"]
    (report,) = asked("gov-report.jsonl")
    ids = tokenizer(f"Report: {words} Summary:", add_special_tokens=False)["input_ids"]
    assert len(ids) > 20 and report == tokenizer.decode(ids[:10]) + tokenizer.decode(ids[-10:])
    assert asked("longbook-qa.jsonl") == ["It fell.\n\nWhat?"]
    assert asked("both-turns.jsonl") == ["And\u2028why?"]
    (conversation,) = read_conversations(["both-turns.jsonl"])
    assert plan_of(conversation, Generation("m", "all", "keep", "drop", 100)).asked == {1, 3}, "both answers"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "a.jsonl: holds no rows"),
        ("a.txt", "\n \n", "a.txt: holds no lines"),
        ("a.jsonl", '{"messages": [{"role": "assistant", "content": "So."}]}', "a.jsonl:1: asks nothing"),
        ("a.jsonl", '{"text": ""}', "a.jsonl:1: the prompt has no tokens"),
        ("a.jsonl", json.dumps({"text": "rain fell " * 60}), "at most 50 leave room"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused_in_one_line(tmp_path, tokenizer, name, text, message):
    with pytest.raises(UserError) as refusal:
        read(tmp_path, tokenizer, name, text, longest=50)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_conversation_without_a_template_is_refused(tmp_path, tokenizer):
    bare = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    bare.chat_template = None
    with pytest.raises(UserError, match="tokenizer.chat_template is not set and no .*; name a template with data"):
        read(tmp_path, bare, "a.txt", "And why?")
    assert read(tmp_path, bare, "a.jsonl", '{"text": "And why?"}') == [ids(bare, "And why?")]


def test_a_tree_has_what_its_steps_can_open():
    assert DraftTree.of(4, 1, None) == DraftTree.of(4, 1, 5) == (4, 1, 5)
    assert DraftTree.of(3, 4, None) == (3, 4, 13)
    assert DraftTree.of(2, 3, 13) == (2, 3, 13)  # 3 nodes after the root, 9 after those
    for steps, topk, tokens in ((2, 3, 14), (3, 2, 1), (3, 1, 5)):
        with pytest.raises(UserError):
            DraftTree.of(steps, topk, tokens)


def served(histogram: list[int], tokens: int, stopped: bool) -> CountedConversation:
    kind = "stop" if stopped else "length"
    answers = [Generated.model_construct(tokens=[7] * tokens, ended_by=kind, histogram=its) for its in (histogram, [])]
    return count_conversation(TimedAnswer(answers[0], 1.0), TimedAnswer(answers[1], 2.0), "identical", steps=3)


def test_verifications_are_counted_in_full_up_to_an_eos():
    """Of 8 tokens, 1 comes from the prefill and 7 from verifications. The first answer's last verification reached one
    token too far, the second's ended early."""
    cut, ended = served([1, 0, 1, 1], 8, False), served([1, 0, 0, 2], 8, True)
    alone = SpeculativeResult.over([cut])
    assert (alone.verifications, alone.yielded, alone.accepted) == (3, 1 + 3 + 4, [2, 2, 1])
    both = SpeculativeResult.over([cut, ended])
    assert (both.verifications, both.yielded, both.accepted) == (6, 8 + 7, [4, 4, 3])
    assert both.new_tokens == both.plain_tokens == 16 and both.identical == 2
    assert (both.seconds_speculative, both.seconds_plain) == (2.0, 4.0)
    at_once = served([], 1, True)  # the prefill's token is an EOS
    assert (at_once.verifications, at_once.yielded, at_once.accepted) == (0, 0, [0, 0, 0])
    short = served([3, 0, 0, 0], 4, False)  # none accepted: a third of the verifications, half of the conversations
    both = SpeculativeResult.over([cut, short])
    assert both.acceptance_length == (8 + 3) / 6
    assert both.mean_acceptance_length == (8 / 3 + 1) / 2 == as_json(both)["mean_acceptance_length"]


def judged(decoded: list[CountedConversation], **others) -> Judgement:
    """As SGLang judges chains of so many drafts."""
    conditions = Conditions.of("transformers", Decoding(len(decoded[0].accepted), 64), None)
    conditions = replace(conditions, engine="sglang", engine_version="0.5.23")
    return Judgement.over(decoded, **vars(conditions), **others)


def test_what_people_read_names_engine_and_speed_and_its_counts_add_up():
    judgement = judged([counted(0, 2, 3), counted(0, 0, 0)])
    lines = judgement.lines()
    assert lines[0].startswith("acceptance length 1.83 (")
    assert lines[-2] == "11 tokens from 6 verifications, and 2 from the prefills: 13 put out"
    assert "6.5 tokens/s, 3.2 without the draft: 2.00 times as fast (by sglang 0.5.23" in lines[-1]
    assert not any("untrained" in line for line in lines)
    cut = replace(judgement, new_tokens=12).lines()
    assert "2 from the prefills, less 1 beyond the answers' length: 12 put out" in cut[-2]
    document = json.loads(json.dumps(as_json(judgement)))
    assert document["engine"] == "sglang" and document["speed"] == {"speculative": 6.5, "plain": 3.25}
    assert document["same_load"] and "same load" not in lines[-1]
    apart = replace(judgement, same_load=False)
    assert not as_json(apart)["same_load"] and "not measured under the same load" in apart.lines()[-1]


def test_a_sets_figures_are_those_of_its_own_conversations():
    """By hand: `chat` yields 8 tokens in 3 verifications and 3 in 3, `code` 16 in 4, and `void` ends at once."""
    chat, code = [counted(0, 2, 3), counted(0, 0, 0)], [counted(3, 3, 3, 3, verdict="tie")]
    conversations, warned = [*chat, counted(), *code], []
    sets = over_sets({"chat": 2, "void": 1, "code": 1}, conversations, 0, warned.append)
    assert [each.name for each in sets] == ["chat", "code"] and isinstance(warned[0], Warned)
    assert warned[0].startswith("prompt set void: left out, the target ends all its conversations with their first")
    first, second = map(as_json, sets)
    assert (first["name"], first["conversations"], first["verifications"]) == ("chat", 2, 6)
    assert first["acceptance_length"] == (8 + 3) / 6 and first["mean_acceptance_length"] == (8 / 3 + 3 / 3) / 2
    assert first["position_acceptance"] == [2 / 6, 2 / 6, 1 / 6]
    assert first["conditional_acceptance"] == [2 / 6, 1, 1 / 2]
    assert first["interval"] == [3 / 3, 8 / 3], "two conversations span it"
    assert first["position_intervals"] == [[0, 2 / 3], [0, 2 / 3], [0, 1 / 3]]
    # 9 and 4 tokens, in a second each with the draft, and two without
    assert first["speed"] == {"speculative": 13 / 2, "plain": 13 / 4} and first["identical"] == 2
    assert (second["acceptance_length"], second["interval"], second["ties"]) == (4.0, None, 1)
    assert second["of_each"] == [[16, 4]] and second["lossless"]
    pooled = SpeculativeResult.over(conversations)
    assert pooled.yielded == first["yielded"] + second["yielded"] and pooled.conversations == 4


def test_the_table_of_sets_is_aligned_and_fits_80_columns():
    many = [counted(*[0] * 120, *[1] * 30, *[2] * 20, *[3] * 99)] * 80
    decoded = {"mt-bench": many, "long-documents": [counted(0, 0, 0), counted(*[0] * 5, verdict="tie")]}
    sets = [SetAcceptance.over(its_own, name=name) for name, its_own in decoded.items()]
    judgement = judged(many, sets=sets)
    title, head, *rows, by_position, positions, first, second = judgement.table()
    assert title == "acceptance length by prompt set (mean: over conversations)"
    assert head.split() == ["set", "conv.", "verified", "length", "95%", "interval", "mean", "speed", "output"]
    assert rows[0].split() == ["mt-bench", "80", "21520", "2.36", "2.36", "to", "2.36", "2.36", "2.00x", "equal"]
    assert rows[1].split()[-3:] == ["2.00x", "1", "tied"] and by_position == "accepted by draft position"
    assert positions.split() == ["set", "1", "2", "3"] and second.split() == ["long-documents", *["0.00"] * 3]
    assert len({len(line) for line in (head, *rows)}) == len({len(line) for line in (positions, first, second)}) == 1
    assert max(map(len, judgement.table())) <= 80
    assert replace(judgement, sets=sets[:1]).table() == []
    assert [each["name"] for each in as_json(judgement)["sets"]] == [*decoded]


def make_export(run: Path) -> None:
    """Make as much of an export as a launcher looks at before it loads anything."""
    (run / "export").mkdir(parents=True)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 300}
    shape |= {"layer_types": ["sliding_attention"], "sliding_window": 6}
    (run / "export" / "config.json").write_text(json.dumps(shape))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vllm"], "--engine: invalid choice: 'vllm'"),
        (["--topk", "2"], "use --engine sglang"),
        (["--topk", "0"], "--topk: 0 is out of range; give 1 or more"),
        (["--tree-tokens", "5"], "use --engine sglang"),
        (["--prompts", "mt=/nowhere.jsonl"], "--prompts mt=/nowhere.jsonl: no such file; name a .jsonl"),
        (["--prompts", f"mt={__file__}"], f"--prompts mt={__file__}: is not a file of such a kind"),
        (["--draft", "/nowhere"], "/nowhere: no exported draft here"),
        (["--window", "3"], "--window 3: a window of 3 keys cannot hold a chain of 4 (evaluation.draft_tokens)"),
        (["--window", "0"], "--window: 0 is out of range; give 1 to 1,000,000,000;"),
        (["--window", "9" * 24], "is out of range; give 1 to 1,000,000,000;"),
        (["evaluation.draft_tokens=7"], "config.json: a window of 6 keys cannot hold a chain of 7"),
        (["evaluation.conversations=0"], "evaluation.conversations is 0"),
        (["--by-context", "--contexts", "0"], "--contexts: 0: name numbers in ascending order, as in 512"),
        (["--by-context", "--contexts", "64,32"], "--contexts: 64,32: name numbers"),
        (["--by-context", "--contexts", "64,64"], "--contexts: 64,64: name numbers"),
        (["--by-context", "--contexts", "512,1k"], "--contexts: 512,1k: name numbers"),
        (["--by-context", "--per-context", "0"], "--per-context: 0 is out of range; give 1 or more"),
        (["--contexts", "64"], "--contexts: is for --by-context"),
        (["--windows", "64"], "--windows: is for --by-context"),
        (["--gpu", "h200"], "--gpu: is for --by-context"),
        (["--by-context", "--windows", "64,2"], "--windows: 64,2: name numbers in ascending order"),
        (["--by-context", "--windows", "3"], "--windows 3: a window of 3 keys"),
        (["--by-context", "--window", "8", "--windows", "8,9"], "--windows: the draft is judged with 8 anyway"),
        (["--best"], "--best: is for --by-context"),
        (["--by-context", "--best", "--engine", "sglang"], "--best: needs measured times"),
        (["--temperature", "-1"], "--temperature: -1 is out of range; give 0.0 or more"),
        (["--temperature", "nan"], "--temperature: nan is out of range"),
        (["--temperature", "inf"], "--temperature: inf is out of range"),
        (["--seed", "-1"], "--seed: -1 is out of range; give 0 to 9,223"),
        (["--by-context", "--gpu", "l4"], "argument --gpu: invalid choice: 'l4' (choose from"),
        (["--temperature", "1", "--engine", "sglang"], "--temperature 1: SGLang is judged greedily only"),
    ],
)
def test_evaluate_refuses_at_once(refused, tmp_path, target, arguments, message):
    recipe = write_recipe(tmp_path, target, evaluation={"conversations": 2})
    make_export(tmp_path / "run")
    assert message in refused("evaluate.py", "--recipe", recipe, *arguments)


def test_a_prompt_set_is_called_as_the_user_says_or_as_its_file_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mt.jsonl", "gsm.txt", "a=b.jsonl", "b.jsonl"):
        Path(name).write_text("")
    files = {"mt-bench": Path("mt.jsonl"), "gsm": Path("gsm.txt")}
    assert prompt_files(["mt-bench=mt.jsonl", "gsm.txt"]) == files and list(prompt_files([])) == []
    assert prompt_files(["a=b.jsonl"]) == {"a=b": Path("a=b.jsonl")}, "a file as it stands"
    assert prompt_files(["c=a=b.jsonl"]) == {"c": Path("a=b.jsonl")}
    Path("a=b.jsonl").unlink()
    assert prompt_files(["a=b.jsonl"]) == {"a": Path("b.jsonl")}
    with pytest.raises(UserError, match=r"=b.jsonl: mt.jsonl is called 'mt' too; .* --prompts NAME=b.jsonl$"):
        prompt_files(["mt.jsonl", "mt=b.jsonl"])


def test_what_is_no_draft_is_not_checked(refused, tmp_path, target):
    check = "evaluate.py", "--check", "--draft"
    assert "no exported draft here" in refused(*check, tmp_path)
    make_export(tmp_path)
    message = refused(*check, tmp_path)
    assert f"{tmp_path}: is a run's folder; its draft is in there: --draft {tmp_path / 'export'}" in message
    assert f"{target}/config.json: has 5 layers, but an EAGLE3 draft has one" in refused(*check, target)
    assert "--tree-tokens: has no use with --check" in refused(*check, tmp_path, "--tree-tokens", 4)


def test_a_result_displaces_nothing_but_an_earlier_result(refused, tmp_path, target):
    recipe = write_recipe(tmp_path, target, evaluation={"conversations": 2})
    make_export(tmp_path / "run")
    for out, message in (
        (tmp_path, "exists, but is not a file"),
        ("/dev/null", "exists, but is not a file"),
        (recipe, "holds something other than an evaluation"),
        (tmp_path / "run" / "export" / "config.json", "holds something other than an evaluation"),
        (tmp_path / "none" / "x.json", f"there is no folder {tmp_path / 'none'}"),
        (recipe / "x.json", f"there is no folder {recipe}"),
    ):
        assert message in refused("evaluate.py", "--recipe", recipe, "--out", out)


def test_a_draft_of_a_run_with_another_target_is_judged_with_a_warning_that_names_both(tmp_path, target, capsys):
    warn = runpy.run_path(str(LAUNCHERS / "evaluate.py"))["warn_of_another_target"]
    path, draft, console = write_recipe(tmp_path, target), tmp_path / "run" / "export", Console(speaks=True)
    recipe = load_recipe(path)
    warn(recipe, draft, console)  # a draft without a run
    draft.mkdir(parents=True)
    beside = draft.parent / "recipe.yaml"
    for trained, warned in ((target, False), (tmp_path / "link", False), ("acme/other", True)):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(target)
        beside.write_text(dump_recipe(load_recipe(path, [f"model.target={trained}"])))
        warn(recipe, draft, console)
        line = f"warning: {draft}: was trained for the target acme/other ({beside}), and is judged with {target}\n"
        assert capsys.readouterr().err == (line if warned else "")
    beside.write_text("no: recipe")
    warn(recipe, draft, console)
    assert capsys.readouterr().err == ""


def test_a_window_that_the_recipe_names_and_the_draft_has_not_is_said(tmp_path, target, capsys):
    warn = runpy.run_path(str(LAUNCHERS / "evaluate.py"))["warn_of_another_window"]
    path, draft, console = write_recipe(tmp_path, target), tmp_path / "run" / "export", Console(speaks=True)
    make_export(tmp_path / "run")
    for window, warned in ((None, False), (6, False), (9, True)):
        warn(load_recipe(path, [f"model.draft.window={'null' if window is None else window}"]), draft, console)
        said = re.search("model.draft.window: 9, but .* a window of 6 and .*; --window 9", capsys.readouterr().err)
        assert bool(said) == warned


def test_without_sglang_nothing_is_checked_or_decoded(refused, tmp_path, target):
    if find_spec("sglang"):
        pytest.skip("SGLang is installed")
    recipe = write_recipe(tmp_path, target, evaluation={"conversations": 2})
    make_export(tmp_path / "run")
    with pytest.raises(NotInstalled, match="not checked: SGLang is not installed;"):
        check_export(tmp_path / "run" / "export")
    message = refused("evaluate.py", "--recipe", recipe, "--engine", "sglang")
    assert "SGLang is not installed: pip install -e" in message and "--engine transformers" in message
