"""Rows that cannot be read are listed together with their places, or are left out, counted and otherwise without
effect."""

import functools
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs import inputs_of
from places import ROOT
from prepare_cases import OPTIONS, byte_tokenizer, jsonl, prepare, prepared, turns
from tiny_run import conversations, make_target, write_recipe

from eagle3.console import Warned
from eagle3.errors import SharedUserError, UserError
from eagle3.evaluation.prompts import read_prompts
from eagle3.parallel.topology import agreed
from eagle3.recipe.loading import load_recipe
from eagle3.text import rows
from eagle3.text.conversations import read_conversations
from eagle3.text.rows import MalformedRows
from eagle3.text.template import Choices


def talk(number: int) -> str:
    return json.dumps({"messages": turns(f"{number}?", f"{number}.")})


# Each row with its reason and a part of the message about it.
BROKEN = [
    (b"{'text': 'x'}", "not valid JSON", "Expecting property name enclosed in double quotes: line 1 column 2"),
    (b'{"text": "x', "not valid JSON", "Unterminated string starting at: line 1 column 10"),
    (b'{"text": "\xe9"}', "not UTF-8 text", "byte 0xe9 in position 10"),
    (b"[" * 900 + b"]" * 900, "not valid JSON", "nested deeper than 100 levels"),
    (b"1" * 5000, "not valid JSON", "a whole number of 5,000 digits"),
    (b"[1]", "the row: not an object", "the row is [1]"),
    (b'{"prompt": "x"}', "none of the forms that are read", "the keys ['prompt']"),
    (b'{"messages": "x"}', "messages: not a list", "messages is 'x'"),
    (b'{"messages": [{"role": "robot", "content": "x"}]}', "unknown role", "messages[0]: unknown role 'robot'"),
    (b'{"text": 5}', "text: not a string", "text is 5"),
    (b'{"messages": [{"role": "user"}]}', "a message without content", "messages[0]: no content"),
    (b'{"messages": [], "tools": "{"}', "tools: not valid JSON", "tools '{'"),
]
REASONS = Counter(reason for _, reason, _ in BROKEN)


@pytest.fixture
def mixed(tmp_path):
    """A file in which a blank line, a readable row and a broken one alternate, and the lines of the broken ones."""
    lines, places = [], []
    for number, (row, _, _) in enumerate(BROKEN):
        lines += [b"  " if number % 2 else b"", talk(number).encode(), row]
        places.append(len(lines))
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"\n".join(lines))  # the last line, which is broken, has no end
    return path, places


def lines_of(call, *arguments, **options) -> list[str]:
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    lines = str(caught.value).split("\n")
    assert all(line.strip().isprintable() and len(line) < 1300 for line in lines)
    return [line.strip() for line in lines]


def test_the_refusal_counts_the_reasons_and_names_the_first_ten_and_the_remedy(mixed):
    path, places = mixed
    refused = MalformedRows(setting="data.malformed=drop")
    account, *rows, remedy = lines_of(read_conversations, [str(path)], malformed=refused)
    assert account.startswith(f"{path}: 12 of 24 rows read are malformed (4: not valid JSON, ")
    assert all(f"{count}: {reason}" in account for reason, count in REASONS.items())
    assert account.endswith("; the first 10 are") and len(rows) == 10
    for line, place, (_, _, text) in zip(rows, places, BROKEN, strict=False):
        assert line.startswith(f"{path}:{place}: ") and text in line, line
    assert remedy == "fix them, or leave malformed rows out with data.malformed=drop"


def test_all_lines_of_a_refusal_reach_every_rank_and_the_terminal(mixed):
    expected = lines_of(read_conversations, [str(mixed[0])])
    with pytest.raises(SharedUserError) as caught:
        agreed(lambda: read_conversations([str(mixed[0])]))
    assert str(caught.value).split("\n  ") == expected
    code = "from eagle3.errors import run_command as r; from eagle3.text.conversations import *; "
    code += f"r(lambda: read_conversations([{str(mixed[0])!r}]))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "") and run.stderr == "error: " + "\n  ".join(expected) + "\n"


def test_what_is_dropped_is_counted_and_the_rest_is_as_without_it(mixed):
    path, places = mixed
    dropped = MalformedRows(drop=True)
    conversations = read_conversations([str(path)], malformed=dropped)
    assert [row.messages for row in conversations] == [tuple(turns(f"{n}?", f"{n}.")) for n in range(len(BROKEN))]
    assert [row.origin for row in conversations] == [f"{path}:{place - 1}" for place in places]
    assert dropped.counts == REASONS and dropped.examples["not UTF-8 text"] == f"{path}:{places[2]}"


def test_a_limit_counts_the_rows_that_can_be_read_and_nothing_behind_them_is_looked_at(mixed):
    path, _ = mixed
    dropped = MalformedRows(drop=True)
    assert len(read_conversations([str(path)], 3, malformed=dropped)) == 3
    assert dropped.counts.total() == 2
    assert len(read_conversations([str(path)], 1)) == 1  # the broken rows stand behind it
    assert "2 of 5 rows read" in lines_of(read_conversations, [str(path)], 3)[0]


def test_rows_of_every_kind_of_file_are_named_by_their_place(tmp_path):
    broken = '{"text": }'
    (tmp_path / "a.jsonl").write_text(f"\ufeff\r\n{talk(1)}\r\n\r\n{broken}\r\n", encoding="utf-8", newline="")
    (tmp_path / "b.json").write_text(f"[\n{talk(2)}, [\n1,\n2],\n{talk(3)}\n]\n")
    (tmp_path / "c.json").write_text(f"{talk(4)}\n\n{broken}\n")
    (tmp_path / "d.json").write_text(f"{broken}\n{talk(5)}\n")
    rows = [{"text": text} for text in ("x", None, "y")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "f.parquet")
    places, texts = pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")
    strings = pa.Array.from_buffers(pa.string(), 2, [None, places, texts])
    pq.write_table(pa.table({"text": strings}), tmp_path / "g.parquet")
    account, *lines, _ = lines_of(read_conversations, [str(tmp_path)])
    assert "6 of 14 rows" in account
    places = ["a.jsonl:4", "b.json row 2", "c.json:3", "d.json:1", "f.parquet row 2", "g.parquet row 2"]
    assert [line.removeprefix(f"{tmp_path}/").partition(": ")[0] for line in lines] == places
    assert "the row is [1, 2]" in lines[1]
    assert len(read_conversations([str(tmp_path)], malformed=MalformedRows(drop=True))) == 8


def test_rows_that_are_too_large_to_be_read_are_malformed(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MOST_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([talk(1), json.dumps({"text": "x" * 5000}), talk(2), json.dumps({"text": "x" * 5000})]))
    dropped = MalformedRows(drop=True)
    assert len(read_conversations([str(path)], malformed=dropped)) == 2
    assert dropped.counts == {"a line of 1,000 bytes or more": 2}
    lines = lines_of(read_conversations, [str(path)])[1:-1]
    assert [line.split(": ")[0] for line in lines] == [f"{path}:2", f"{path}:4"]


def test_a_row_of_a_dataset_that_is_nested_too_deep_is_malformed(monkeypatch):
    deep = functools.reduce(lambda inner, _: {"a": inner}, range(120), 1)
    loaded = [json.loads(talk(1)), json.loads(talk(2)) | {"origin": deep}, json.loads(talk(3))]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: iter(loaded))
    monkeypatch.setattr("eagle3.text.datasets.require_hub", lambda: None)
    dropped = MalformedRows(drop=True)
    assert len(read_conversations(["ann/talks"], malformed=dropped)) == 2 and dropped.counts.total() == 1


def test_a_source_of_another_form_is_given_up_after_ten_rows_and_others_are_still_looked_at(tmp_path):
    other, good, mixed = (tmp_path / f"{name}.jsonl" for name in ("other", "good", "mixed"))
    other.write_text('{"prompt": "x"}\n' * 50)
    good.write_text(talk(1))
    mixed.write_text(talk(1) + "\n[2]")
    account, *rows, _ = lines_of(read_conversations, [str(other), str(good), str(mixed), "nobody/would-be-downloaded"])
    assert account.startswith(f"{other}, ") and "11 of 13 rows read are malformed" in account and len(rows) == 10


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"\n", "holds no rows"),
        ("a.json", b"[]", "holds no rows"),
        ("a.csv", b"a,b", "is no .json, .jsonl, .parquet file"),
        ("a.parquet", b"PAR1", "not a readable parquet file"),
        ("a.json", b'[\n{"text": "x"},\n{"text": }]', "not valid JSON (Expecting value: line 3 column 10"),
        ("a.json", b'[{"text": "\xe9"}, {"text": "b"}]', "not UTF-8 text ('utf-8' codec can't decode byte 0xe9"),
        ("a.jsonl", b'{"prompt": 1}\n{}\n{"text": 1}', "no row can be read (2: none of the forms that are read, 1: "),
        ("a.jsonl", "Grüße".encode("utf-16"), "no row can be read (1: not UTF-8 text)"),
    ],
)
def test_what_is_no_matter_of_rows_is_refused_whatever_is_dropped(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "good.jsonl").write_text(talk(1))
    dropped = MalformedRows(drop=True, setting="data.malformed=drop")
    [line] = lines_of(read_conversations, [str(tmp_path / "good.jsonl"), str(tmp_path / name)], malformed=dropped)
    assert line.startswith(f"{tmp_path / name}: ") and message in line, line


def test_prompts_are_never_dropped_and_all_their_mistakes_are_told(mixed):
    account, *rows, remedy = lines_of(read_prompts, mixed[0], byte_tokenizer(), OPTIONS["chat_template"], 99)
    assert len(rows) == 10 and remedy == "fix them"


def test_samples_are_those_of_the_readable_rows_and_the_account_counts_the_others(mixed, tmp_path):
    path, places = mixed
    tokenizer, options = byte_tokenizer(), {**OPTIONS, "cache_dir": tmp_path / "cache"}
    built = prepare([str(path)], tokenizer, malformed="drop", **options)
    clean = tmp_path / "clean.jsonl"
    clean.write_text("\n".join(map(talk, range(len(BROKEN)))))
    alone = prepare([str(clean)], tokenizer, **options)
    assert [sample.id for sample in built.samples] == [sample.id for sample in alone.samples]
    assert not alone.summary.cached  # a set made under the other choice is not used
    summary = built.summary
    assert (summary.rows, summary.kept) == (24, 12) and sum(summary.dropped.values()) == 12
    assert summary.dropped["malformed row (unknown role)"] == 1
    assert set(summary.kinds) == set(summary.dropped) and set(summary.kinds.values()) == {"malformed"}
    assert str(summary).endswith("; 12 dropped")
    reasons = summary.reasons()
    assert reasons[0] == f"4 dropped: malformed row (not valid JSON) (first {path}:{places[0]})"
    assert len(reasons) == len(REASONS) == 9
    many = replace(summary, dropped=dict.fromkeys("abcdefghijklm", 2), examples=dict.fromkeys("abcdefghijklm", "x:1"))
    rest = "6 for 3 other reasons, which a run lists in run.json and its report"
    assert many.reasons()[9:] == ["2 dropped: j (first x:1)", rest]
    assert lines_of(prepare, [str(path)], tokenizer, **options)[-1].endswith("data.malformed=drop")
    # The summary is about the rows of this call, even if the samples come from the cache.
    path.write_bytes(path.read_bytes() + b"\n[1]")
    cached = prepare([str(path)], tokenizer, malformed="drop", **options).summary
    assert cached.cached and cached.rows == 25 and cached.dropped["malformed row (the row: not an object)"] == 2
    unchanged = {name: count for name, count in cached.dropped.items() if "unknown role" in name}
    assert unchanged == {"malformed row (unknown role)": 1}


# Empty answers --------------------------------------------------------------------------------------------------------


def test_answers_without_text_are_counted_as_far_as_they_are_supervised(tmp_path):
    tokenizer, template = byte_tokenizer(), OPTIONS["chat_template"]
    answers = (("one", "so"), ("", "so"), (" \n ", "so"), ("</s>", "so"), ("two", ""))
    talks = [turns("Hi", first, "Hi", second) for first, second in answers]
    texts = [tokenizer.apply_chat_template(talk, chat_template=template, tokenize=False) for talk in talks[:2]]
    chats, rendered = [{"messages": talk} for talk in talks], [{"text": text} for text in texts]

    def counted(rows, **options):
        return prepared(tmp_path, tokenizer, *rows, **options).summary.empty_answers

    assert counted(chats) == 4 and counted(chats) == 4  # the second time from the cache
    assert counted(chats, choices=Choices(supervise="last_turn")) == 1
    assert counted(rendered, choices=Choices(text="rendered")) == 1
    assert counted(rendered) == 0  # plain text has no answers
    assert counted(chats, too_long="truncate", max_length=20) == 3  # the fifth conversation's is cut off


def test_a_recipe_hears_of_both(tmp_path, topology):
    target = make_target(tmp_path / "target")
    recipe = write_recipe(tmp_path, target)
    rows = conversations(12)
    rows[3]["messages"][1]["content"] = ""
    data = jsonl(tmp_path / "conversations.jsonl", *rows, [1])
    with pytest.raises(UserError, match=f"^{data}:13: the row is \\[1\\].*data.malformed=drop$"):
        inputs_of(load_recipe(recipe), topology.device, print)
    lines = []
    inputs = inputs_of(load_recipe(recipe, ["data.malformed=drop"]), topology.device, lines.append)
    assert len(inputs.train) + len(inputs.held_out) == 12
    assert any("12 of 13 samples" in line and line.endswith("; 1 dropped") for line in lines)
    assert f"training data: 1 dropped: malformed row (the row: not an object) (first {data}:13)" in lines
    assert Warned("training data: 1 answer is empty: only the end of the turn is supervised there") in lines


def test_a_judge_with_held_out_data_of_its_own_does_not_mind_malformed_training_rows(tmp_path, topology):
    path = write_recipe(tmp_path, make_target(tmp_path / "target"))
    held_out = (tmp_path / "conversations.jsonl").rename(tmp_path / "held_out.jsonl")
    (tmp_path / "conversations.jsonl").write_text("[1]\n")
    recipe = load_recipe(path, [f"data.held_out=[{held_out}]"])
    inputs = inputs_of(recipe, topology.device, print, judging=True)
    assert (len(inputs.train), len(inputs.held_out)) == (0, 40)
