"""Reading conversations: every form and source, and one clear line for every mistake."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_cases import jsonl, turns

from eagle3.errors import UserError
from eagle3.text.conversations import Conversation, iterate_conversations, read_conversations

OPENAI = {"messages": turns("Hi", "Yes")}
EXPECTED = tuple(turns("Hi", "Yes"))


@pytest.fixture
def only(tmp_path) -> Callable[[object], Conversation]:
    """The conversation of a row."""
    return lambda row: read_conversations([jsonl(tmp_path / "a.jsonl", row)])[0]


@pytest.fixture
def as_read(only) -> Callable[[dict], dict]:
    """A message of a row as it is read."""
    return lambda message: only({"messages": [message]}).messages[0]


def test_every_file_kind_gives_the_same_conversations_and_names_their_origin(tmp_path):
    jsonl(tmp_path / "a.jsonl", OPENAI, OPENAI)
    (tmp_path / "b.json").write_text(json.dumps([OPENAI, OPENAI], indent=2))
    jsonl(tmp_path / "c.json", OPENAI, OPENAI)
    pq.write_table(pa.Table.from_pylist([OPENAI, OPENAI]), tmp_path / "d.parquet")
    for name, indent in ("e.jsonl", None), ("f.jsonl", 1):  # a list, whatever its file is called
        (tmp_path / name).write_text("\n " + json.dumps([OPENAI, OPENAI], indent=indent))
    (tmp_path / "notes.txt").write_text("not data")
    conversations = read_conversations([str(tmp_path)])
    assert [conversation.messages for conversation in conversations] == [EXPECTED] * 12
    origins = ["a.jsonl:1", "a.jsonl:2", "b.json row 1", "b.json row 2", "c.json:1", "c.json:2"]
    origins += [f"{name} row {number}" for name in ("d.parquet", "e.jsonl", "f.jsonl") for number in (1, 2)]
    assert [Path(conversation.origin).name for conversation in conversations] == origins
    lines = str(tmp_path / "a.jsonl")
    assert read_conversations([lines, str(tmp_path)], limit=3) == read_conversations([lines, lines])[:3]


def test_an_alpaca_row_is_a_question_and_its_answer(only):
    row = {"instruction": "Hi", "input": "", "output": "Yes", "text": "### Instruction: Hi ### Response: Yes"}
    assert only(row).messages == EXPECTED
    row = {"instruction": "Add", "input": "1 1", "output": "2", "system": "Be brief."}
    contents = [message["content"] for message in only(row).messages]
    assert contents == ["Be brief.", "Add\n\n1 1", "2"]
    for change, reason in ({"output": 2}, "output is 2, not a string"), ({"history": [["a", "b"]]}, "history: earlier"):
        with pytest.raises(UserError, match=reason):
            only(row | change)


def test_sharegpt_names_become_openai_roles(only):
    names = ["human", "gpt", "observation", "gpt", "user", "assistant"]
    row = {"conversations": [{"from": name, "value": name.upper()} for name in names], "system": "Be kind."}
    messages = only(row).messages
    roles = ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert [message["role"] for message in messages] == roles
    assert [message["content"] for message in messages] == ["Be kind.", *(name.upper() for name in names)]


def test_text_parts_are_joined_and_further_keys_kept(only):
    call = {"type": "function", "function": {"name": "add", "arguments": '{"b": 1, "a": 2}'}}
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
            {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": [call]},
        ],
        "tools": json.dumps([{"name": "add"}]),
    }
    conversation = only(row)
    parsed = {"type": "function", "function": {"name": "add", "arguments": {"b": 1, "a": 2}}}
    assert conversation.messages == (
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [parsed]},
    )
    assert conversation.tools == [{"type": "function", "function": {"name": "add"}}]


def test_thoughts_have_one_name_whatever_the_data_call_them(as_read):
    answer = {"role": "assistant", "content": "Rome."}
    for names in (["reasoning_content"], ["reasoning"], ["thinking"], ["reasoning", "reasoning_content"]):
        assert as_read(answer | dict.fromkeys(names, "Italy")) == {**answer, "reasoning_content": "Italy"}
    assert as_read(answer | {"reasoning": None, "reasoning_content": ""}) == answer
    thought = {"role": "assistant", "content": "", "reasoning_content": "Italy"}
    assert as_read({"role": "assistant", "thinking": "Italy"}) == thought


def test_calls_and_schemas_have_openais_form_whatever_form_they_came_in(only, as_read):
    text, empty = '{"b": 1, "a": [2]}', {"role": "assistant", "content": ""}
    expected = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"b": 1, "a": [2]}}}
    for call in (
        {"type": "function", "id": "c1", "function": {"name": "add", "arguments": text}},
        expected,
        {"id": "c1", "name": "add", "arguments": text},
    ):
        for calls in ([call], json.dumps([call])):
            assert as_read({"role": "assistant", "tool_calls": calls}) == {**empty, "tool_calls": [expected]}
    now = as_read({"role": "assistant", "tool_calls": [{"name": "now", "arguments": ""}]})
    assert now["tool_calls"] == [{"type": "function", "function": {"name": "now", "arguments": {}}}]
    assert as_read({**empty, "tool_calls": []}) == empty
    schema = {"name": "add", "parameters": {"type": "object"}}
    whole = {"type": "function", "function": schema}
    for tools in ([schema], [whole], [{"type": "function", **schema}], [json.dumps(whole)], json.dumps([schema])):
        assert only({**OPENAI, "tools": tools}).tools == [whole]
    for other in ({"type": "web_search"}, {"type": "web_search_2", "name": "search"}):  # no function: as it is
        assert only({**OPENAI, "tools": [other, schema]}).tools == [other, whole]
    for tools in ([], "", None):
        assert only({**OPENAI, "tools": tools}).tools is None


def test_conversations_can_be_read_one_by_one(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", OPENAI, "no row")
    reading = iterate_conversations([path])
    assert next(reading).messages == EXPECTED  # before the second row is looked at
    with pytest.raises(UserError, match="a.jsonl:2: the row is 'no row'"):
        next(reading)


def test_messages_of_differing_keys_keep_their_own_in_parquet(tmp_path):
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    rows = [
        {"messages": [{"role": "user", "content": "Hi", "name": "Ann"}]},
        {"messages": [{"role": "assistant", "content": "Yes", "tool_calls": [call]}]},
        {"text": "plain"},
    ]
    rows = [{"messages": None, "text": None, **row} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second, third = read_conversations([str(tmp_path / "a.parquet")])
    assert first.messages == ({"role": "user", "content": "Hi", "name": "Ann"},)
    assert set(second.messages[0]) == {"role", "content", "tool_calls"}
    assert (third.messages, third.text) == (None, "plain")


def test_the_standard_library_is_a_source():
    conversations = read_conversations(["standard_library"], limit=2)
    assert [len(conversation.messages) >= 2 for conversation in conversations] == [True, True]


def answer(**keys: object) -> dict:
    return {"messages": [{"role": "assistant", **keys}]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], r"a.jsonl row 1: the row is 1, not an object"),
        ({"messages": ["Hi"]}, r"a.jsonl:1: messages\[0\]: message is 'Hi', not an object"),
        ({"conversations": [{"from": 3, "value": "x"}]}, r"conversations\[0\]: unknown role 3"),
        ({"messages": [{"role": "user", "content": 5}]}, "content .* is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content .*image_url.* is not text"),
        (answer(tool_calls=[{"name": "f", "arguments": "{"}]), "arguments '{' is not valid JSON"),
        ({"messages": [], "tools": 5}, "tools is 5, not a list"),
        (answer(thinking={"a": 1}), r"messages\[0\]: thinking is {'a': 1}, not a string"),
        (answer(thinking="a", reasoning="b"), r"\[0\]: reasoning and thinking differ, .* can be used; fix the row$"),
        (answer(tool_calls=[{"id": "c1"}]), "{'id': 'c1'} names no function"),
        (answer(tool_calls=[{"function": {}}]), r"a.jsonl:1: messages\[0\]: tool_calls: .* names no function"),
        (answer(tool_calls={"a": 1}), "tool_calls is {'a': 1}, not a list"),
    ],
)
def test_a_row_of_another_form_is_named_with_its_value(only, row, message):
    with pytest.raises(UserError, match=message):
        only(row)


def test_a_source_that_is_not_there_or_holds_no_files_is_named_with_the_remedy(tmp_path):
    for missing in (str(tmp_path / "absent.jsonl"), "absent.jsonl", "./absent"):
        with pytest.raises(UserError, match="no such file or folder .* fix data.train or data.held_out"):
            read_conversations([missing])
    with pytest.raises(UserError, match="holds no .json, .jsonl, .parquet file; convert"):
        read_conversations([str(tmp_path)])
