"""The quickstart's text: conversations about the standard library."""

import ast
import inspect
import shutil

import pytest

from eagle3.text.standard_library import MOST_CHARACTERS, SOURCES, _definitions


@pytest.fixture(scope="module")
def conversations():
    return SOURCES["standard_library"]()


def _code(talk):
    blocks = [turn["content"] for turn in talk["messages"] if "```python\n" in turn["content"]]
    return [block.split("```python\n")[1].removesuffix("\n```") for block in blocks]


def test_there_is_enough_text_to_train_on_and_a_second_call_gives_the_same(conversations):
    assert SOURCES["standard_library"]() == conversations
    assert sum(len(turn["content"]) for talk in conversations for turn in talk["messages"]) > 2_000_000
    assert sum(len(talk["messages"]) == 4 for talk in conversations) > 500


def test_no_question_and_no_code_comes_twice(conversations):
    questions = [talk["messages"][0]["content"] for talk in conversations]
    names = [question.split("`")[1] for question in questions]
    codes = [code for talk in conversations for code in _code(talk)]
    assert len(set(names)) == len(names) == len(conversations)
    assert len(set(codes)) == len(codes)


def test_turns_alternate_from_user_to_assistant_and_fit_a_short_context(conversations):
    for talk in conversations:
        roles = [turn["role"] for turn in talk["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) and roles
        assert all(turn["content"].strip() for turn in talk["messages"])
        assert sum(len(turn["content"]) for turn in talk["messages"]) <= MOST_CHARACTERS


def test_shown_code_is_one_whole_definition(conversations):
    for code in (code for talk in conversations for code in _code(talk)):
        (definition,) = ast.parse(code).body
        assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        assert 3 <= len(code.splitlines()) <= 60


def test_the_code_shown_for_a_name_is_that_name_s_source(conversations):
    shown = {talk["messages"][0]["content"].split("`")[1]: _code(talk) for talk in conversations}
    (code,) = shown["shutil._basename"]
    assert code == inspect.getsource(shutil._basename).rstrip()


def test_definitions_are_found_under_conditions_and_in_classes_but_not_in_functions(tmp_path):
    path = tmp_path / "mill.py"
    path.write_text(
        '"""Grinds."""\n'
        "try:\n    import stone\nexcept ImportError:\n    def grind(corn):\n        def inner():\n            pass\n"
        "            return 1\n        return inner()\n"
        "class Mill:\n    @property\n    @staticmethod\n    def sails():\n        'How many.'\n        return 4\n"
        "def short(): return 1\n"
    )
    definitions = {name: texts for name, *texts in _definitions("mill", path.read_text())}
    assert list(definitions) == ["mill", "mill.grind", "mill.Mill", "mill.Mill.sails"]
    assert definitions["mill"] == ["", "Grinds."]
    code, docstring = definitions["mill.Mill.sails"]
    assert code.startswith("@property\n@staticmethod\ndef sails():\n    'How") and docstring == "How many."


@pytest.mark.parametrize("content", [b"def broken(:\n", b"name = '\xff'\n", b"x = 1\0\n"])
def test_a_file_that_does_not_parse_is_skipped(tmp_path, monkeypatch, content):
    (tmp_path / "odd.py").write_bytes(b'"""Grinds."""\n' + content)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert SOURCES["standard_library"]() == []
