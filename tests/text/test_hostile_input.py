"""Whatever a stranger writes into a file is reported in one line: no traceback, no hang, no unbounded memory."""

import json
import multiprocessing
import os
import resource
import signal
import time
from functools import partial
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from limits import HANG_SECONDS
from prepare_cases import prepared
from report_case import write_run
from tiny_run import TEMPLATE, write_recipe

from eagle3.draft.config import read_draft_config
from eagle3.errors import UserError
from eagle3.evaluation.prompts import read_prompts
from eagle3.parsing import DEEPEST, parse_json
from eagle3.recipe.loading import load_recipe
from eagle3.regeneration.answers import AnswerFile
from eagle3.reporting.record import read_run
from eagle3.states.store.files import LocalFiles, open_files
from eagle3.states.store.folder import read_manifest
from eagle3.states.store.shard import DATA_START, HIDDEN, INDEX, NUMPY_TYPES, read_index
from eagle3.targets.checkpoint import target_config
from eagle3.text import encode
from eagle3.text import template as templates
from eagle3.text.chat import PRIVATE_USE, encode_conversation
from eagle3.text.conversations import Conversation, read_conversations
from eagle3.text.template import Unusable
from eagle3.training.deepspeed_file import deepspeed_config


def line_of(call, *arguments):
    """The one line with which the call refuses."""
    with pytest.raises(UserError) as caught:
        call(*arguments)
    line = str(caught.value)
    assert line and line.isprintable() and len(line) <= 1250, line[:2000]
    return line


# JSON -----------------------------------------------------------------------------------------------------------------

BOMBS = {
    "deep": "[" * 200_000,
    "deep objects": '{"a":' * 200_000,
    "nine hundred levels": "[" * 900 + "]" * 900,
    "digits": "1" * 5000,
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
@pytest.mark.parametrize("before", ["", '{"text": "[[[[\\"1111", "a": 2.5e3,\n "b": '])
def test_json_that_would_crash_python_is_refused_with_its_place(bomb, before):
    text = before + bomb + ("}" if before else "")
    with pytest.raises(json.JSONDecodeError, match="nested deeper than 100 levels|number of 5,000 digits") as caught:
        parse_json(text)
    assert caught.value.lineno == before.count("\n") + 1
    with pytest.raises(json.JSONDecodeError):
        parse_json(text.encode())


def test_json_within_the_limits_is_parsed_as_ever():
    deep = "[" * DEEPEST + "1" * 4000 + "]" * DEEPEST
    for text in (deep, '{"' + "[" * 1000 + '": ' + "1." + "1" * 5000 + "}", "[[]," * 99 + "0" + "]" * 99):
        assert parse_json(text) == json.loads(text)


def rows(path, text):
    path.write_text(f'{{"text": "fine"}}\n{text}\n', encoding="utf-8")
    return read_conversations([str(path)])


def row(arguments="{}", tool_calls=None, tools="[]"):
    calls = tool_calls or [{"function": {"name": "f", "arguments": arguments}}]
    return {"messages": [{"role": "assistant", "content": "", "tool_calls": calls}], "tools": tools}


def parquet(path, text):
    pq.write_table(pa.Table.from_pylist([row(), row(tools=text)]), path)
    return read_conversations([str(path)])


def of_a_run(path, text, name):
    run = write_run(path.parent / "run")
    (run.path / name).write_text(text + "\n{}" if name.endswith("l") else text, encoding="utf-8")
    return read_run(run.path)


def written(read):
    return lambda path, text: (path.write_text(text, encoding="utf-8"), read(path))


def answers(path, text):
    record = path.with_name(path.name + ".record")
    record.mkdir()
    (record / "settings.json").write_text(text, encoding="utf-8")
    path.write_text('{"id": "a"}\n', encoding="utf-8")
    AnswerFile(path, {})


def shard(path, text):
    """Read a shard that has this text as its index, and else only a header."""
    header = {name: {"data_offsets": [0, 0]} for name in (*HIDDEN, *NUMPY_TYPES)}
    header[INDEX] = {"data_offsets": [0, len(text)]}
    head = json.dumps(header).encode().ljust(DATA_START - 8)
    path.write_bytes((DATA_START - 8).to_bytes(8, "little") + head + text.encode())
    return read_index(LocalFiles(path.parent), path.name)


READERS = {
    "a row": ("a.jsonl", rows),
    "rows": ("a.json", written(lambda path: read_conversations([str(path)]))),
    **{
        f"{key} in a row": ("a.jsonl", lambda path, text, key=key: rows(path, json.dumps(row(**{key: text}))))
        for key in ("tool_calls", "arguments", "tools")
    },
    "tools in parquet": ("a.parquet", parquet),
    "a target's config": ("config.json", written(lambda path: target_config(path.parent))),
    "a draft's config": ("config.json", written(read_draft_config)),
    "DeepSpeed's file": ("zero2.json", written(lambda path: deepspeed_config(path, None, 1))),
    **{
        name: ("x", partial(of_a_run, name=name))
        for name in ("run.json", "metrics.jsonl", "evaluation.json", "by_context.json", "export/config.json")
    },
    "regenerated rows": ("a.jsonl", answers),
    "a store": ("store.json", written(lambda path: read_manifest(open_files(str(path.parent))))),
    "a shard's index": ("x.safetensors", shard),
}


@pytest.mark.parametrize("bomb", ["deep", "nine hundred levels", "digits"])
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_of_json_names_the_file_of_a_bomb(tmp_path, reader, bomb):
    name, read = READERS[reader]
    line = line_of(read, tmp_path / name, BOMBS[bomb])
    assert line.removeprefix("target '").startswith(str(tmp_path)), line
    assert any(word in line for word in ("nested", "recursion", "digits", "holds no object")), line
    assert any(word in line for word in ("; ", "repair")), line


def test_an_error_line_shows_no_more_than_a_screen_and_nothing_that_steers_a_terminal():
    line = str(UserError("a: \x1b[2J\ud800\n" + "x" * 10**6 + "; fix it"))
    assert line.startswith("a: \\x1b[2J\\ud800 xxx") and line.endswith("xxx; fix it") and len(line) < 1300


# Recipes --------------------------------------------------------------------------------------------------------------

LAUGHS = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in pairwise("abcdefghi"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "line 2, column 8: aliases (*name) are not accepted; write the value out"),
        ("model: &a [*a]", "aliases"),
        ("a: &a {x: 1}\nmodel: {<<: *a}", "aliases"),
        ("model: " + "[" * 5000, "nested deeper than 100 levels"),
        ("model: " + "{a: " * 5000, "nested deeper than 100 levels"),
        ("model: {target: a}\nmodel: {target: b}", "line 2, column 1: the key 'model' appears twice"),
        ("model: {target: a, target: b}", "the key 'target' appears twice"),
        ("model: {target: a}\ntraining: {seed: " + "1" * 5000 + "}", "a whole number of 5,000 digits"),
        ("model: {target: a}\ndata: {today: 2026-13-45}", "month must be in 1..12"),
        ("model: {target: !!python/object/apply:os.system [ls]}", "tags ('tag:yaml.org,2002:python/object/apply:os"),
        ("model: {target: !!int x}", "tags"),
        ("model: {target: !!binary aGk=}", "tags"),
        ('model: {target: "\\ud800"}', "half of a surrogate pair"),
        ("#" + "x" * 300_000, "has more than 262,144 bytes"),
    ],
)
def test_a_hostile_recipe_is_refused_with_line_and_reason(tmp_path, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    line = line_of(load_recipe, path)
    assert line.startswith(f"{path}: ") and message in line, line


OVERRIDES = ["data.train=" + "[" * 5000, "data.train=&a [*a]", "data.train=[a, {b: 1, b: 2}]", "data.today=2026-99-01"]
OVERRIDES += ["training.seed=" + "9" * 5000, ".".join("a" * 2000) + "=1", "x" * 10**6]


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda override: override[:20])
def test_a_hostile_override_is_refused_with_its_beginning(tmp_path, target, override):
    line = line_of(load_recipe, write_recipe(tmp_path, target), [override])
    assert line.startswith("command line: '") and override[:10] in line


# Chat templates -------------------------------------------------------------------------------------------------------

ROW = Conversation("rows.jsonl:3", ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}), None)
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
DOUBLED = (
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "part"),
    [
        (LOOP, "of processor time"),
        ("{% macro m(n) %}{{ m(n - 1) ~ m(n - 1) if n }}{% endmacro %}{{ m(60) }}", "of processor time"),
        (DOUBLED + "{{ ns.x }}", "of"),
        ("{{ 'a' * 10**10 }}", "takes more than 1.0 GiB of memory"),
        ("{{ '%9999999999s' % 'x' }}", "takes more than 1.0 GiB of memory"),
        ("{{ 'x'|center(10**11) }}", "takes more than 1.0 GiB of memory"),
        ("{{ 'a' * 2**21 }}", "prints 2,097,152 characters, more than "),
    ],
)
def test_an_endless_or_greedy_template_is_stopped_at_the_limit_of_the_row(tokenizer, monkeypatch, template, part):
    monkeypatch.setattr(templates, "SECONDS", 0.5)

    def state():
        return resource.getrlimit(resource.RLIMIT_AS), *map(signal.getsignal, (signal.SIGPROF, signal.SIGVTALRM))

    before = state()
    line = line_of(encode_conversation, tokenizer, ROW, template)
    assert line.startswith("rows.jsonl:3: the chat template ") and part in line and "data.chat_template" in line, line
    assert signal.getitimer(signal.ITIMER_PROF) == signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert state() == before
    assert len(encode_conversation(tokenizer, ROW, TEMPLATE).ids)


@pytest.mark.parametrize(
    "template",
    [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% for a in [1] %}" * 60 + "{% endfor %}" * 60,
        "{% set ns = namespace(x=[1]) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|tojson }}",
        "{% for i in range(10**12) %}{% endfor %}",
        "{{ cycler() }}",
    ],
)
def test_whatever_a_template_raises_makes_the_row_unusable(tokenizer, template):
    with pytest.raises(Unusable, match="the chat template refuses it"):
        encode_conversation(tokenizer, ROW, template)


@pytest.mark.parametrize("template", [TEMPLATE, "{% generation %}{{ messages[1].content }}{% endgeneration %}"])
def test_a_row_of_all_private_use_characters_is_unusable(tokenizer, template):
    content = "".join(map(chr, PRIVATE_USE))
    row = Conversation("a:1", ({"role": "user", "content": content}, {"role": "assistant", "content": content}), None)
    with pytest.raises(Unusable, match="private-use"):
        encode_conversation(tokenizer, row, template)


@pytest.mark.parametrize("row", [{"text": "a \ud800"}, {"messages": [{"role": "user", "content": "a \ud800"}]}])
def test_a_prompt_of_half_a_character_is_named(tmp_path, tokenizer, row):
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    line = line_of(read_prompts, tmp_path / "prompts.jsonl", tokenizer, TEMPLATE, 99)
    assert line.endswith("prompts.jsonl:1: half of a surrogate pair in the text, which is not a character; fix the row")


def _render_what_cannot_be_interrupted(tokenizer):
    templates.SECONDS, templates.GRACE = 0.2, 0.5
    encode_conversation(tokenizer, ROW, DOUBLED + "{{ ns.x == ns.y }}")


class Killed(encode.SampleEncoder):
    def outcome(self, conversation):
        os.kill(os.getpid(), signal.SIGVTALRM)


def test_a_process_that_cannot_be_interrupted_is_ended_and_its_rows_are_named(tokenizer):
    """Comparing two such lists takes 2**60 steps of C code, which does not check for signals."""
    process = multiprocessing.get_context("fork").Process(target=_render_what_cannot_be_interrupted, args=(tokenizer,))
    process.start()
    process.join(HANG_SECONDS)
    assert process.exitcode == -signal.SIGVTALRM
    line = line_of(list, encode.encode_all(Killed(tokenizer, None, 50), iter(3 * [ROW]), 2))
    assert line.startswith("rows.jsonl:3 to rows.jsonl:3: a tokenising process died"), line
    assert "data.workers" in line and "data.chat_template" in line


def test_a_template_has_its_seconds_for_all_renderings_of_a_row_together(tokenizer, monkeypatch):
    monkeypatch.setattr(templates, "SECONDS", 0.1)
    monkeypatch.setattr(templates, "SECONDS_A_MESSAGE", 0.0)
    messages = tuple({"role": ("user", "assistant")[number % 2], "content": f"{number}"} for number in range(200))
    slow = "{% for a in range(99999) %}{% endfor %}" + TEMPLATE
    began = time.process_time()
    line = line_of(encode_conversation, tokenizer, Conversation("a:1", messages, None), slow)
    assert line.startswith("a:1: the chat template runs for more than 0.1 s of processor time"), line
    assert time.process_time() - began < 10


# Rows that are too large ----------------------------------------------------------------------------------------------


def test_a_row_too_large_for_memory_is_refused_before_it_is_tokenised_or_dropped(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(encode, "LONGEST_ROW", 1000)
    call = partial(prepared, tmp_path, tokenizer, {"text": "one two three"}, {"text": "four " * 400}, max_length=50)
    for policy in ("stop", "truncate", "split"):
        line = line_of(partial(call, too_long=policy))
        assert line.startswith(f"{tmp_path / 'data.jsonl'}:2: more than 1,000 characters in one row (2,000 characters)")
        assert "cut it into several rows" in line
    summary = call(too_long="drop").summary
    assert summary.kept == 1 and summary.dropped == {"more than 1,000 characters in one row": 1}
    assert call(too_long="truncate", malformed="drop").summary.dropped == summary.dropped
    monkeypatch.setattr(encode, "LONGEST_TOKEN", 40)  # of 50 tokens
    assert call(too_long="truncate", cache_dir=tmp_path / "another").summary.kept == 2
