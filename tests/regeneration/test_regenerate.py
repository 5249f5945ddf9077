"""Regenerating data: whose words a row contains, what is left out and counted, and that a kill neither loses nor
duplicates a row.

The server is a small real one on this machine. It speaks the protocol, and fails if a prompt tells it to.
"""

import fcntl
import json
import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from limits import HANG_SECONDS, wait_until
from places import LAUNCHERS
from prepare_cases import jsonl
from tiny_run import launch

from eagle3.errors import UserError
from eagle3.regeneration.answers import AnswerFile
from eagle3.regeneration.endpoint import Endpoint, LeftOut, endpoint_urls, exposed, find_model
from eagle3.regeneration.regenerate import Regeneration, RegenerationSummary
from eagle3.regeneration.turns import Generation, plan_of
from eagle3.text.conversations import Conversation, read_conversations

KEY = "sk-nobody-may-see-this"
LOOKUP = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}

# What the server answers to a prompt that begins with such a word:
MESSAGES = {
    "EMPTY": {"content": None},
    "THINK": {"reasoning_content": "Let me see."},
    "TAG": {"content": "<think>Hm.</think>Yes."},
    "PARTS": {"content": [{"type": "text", "text": "Yes."}]},
}
GHENT = '{"place": "Ghent"}'
ARGUMENTS = {"CALL": GHENT, "BADCALL": '{"place": """}', "OBJECTCALL": {"place": "Ghent"}, "NULLCALL": None}
REASONS = {"CUT": "length", "FILTER": "content_filter", "ODD": "repetition"} | dict.fromkeys(ARGUMENTS, "tool_calls")


class Server(ThreadingHTTPServer):
    """Answers "A2 to <prompt>", where 2 is the number of messages that it was sent, unless the prompt begins with a
    word that it knows."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, model: str = "tiny", key: str | None = None, seconds: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.key, self.seconds = model, key, seconds
        self.bodies: list[dict] = []
        self.at_a_time = self.most_at_a_time = 0
        self.dying, self.dies_after = False, math.inf
        self.refusing = False
        self.failing: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> "Server":
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address) -> None:
        """Ignores errors: a client that was killed is not the server's mistake."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None: ...

    def say(self, status: int, value: dict) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def refuses(self) -> bool:
        server = self.server
        if server.dying:
            self.close_connection = True
            return True
        if server.key and self.headers["Authorization"] != f"Bearer {server.key}":
            self.say(401, {"error": {"message": f"wrong key {self.headers['Authorization']}"}})
            return True
        return False

    def do_GET(self) -> None:
        if not self.refuses():
            self.say(200, {"data": [{"id": self.server.model}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            server.at_a_time += 1
            server.most_at_a_time = max(server.most_at_a_time, server.at_a_time)
            server.dying |= len(server.bodies) > server.dies_after
        time.sleep(server.seconds)
        with server.lock:
            server.at_a_time -= 1
        if not self.refuses():
            self.answer(body["messages"])

    def answer(self, messages: list[dict]) -> None:
        prompt = messages[-1]["content"]
        word = "REFUSE" if self.server.refusing else prompt.split()[0] if prompt else ""
        if word == "REFUSE":
            return self.say(400, {"object": "error", "message": f"too long\nby far, {self.headers['Authorization']}"})
        if word in ("FAIL", "FAILTWICE"):
            with self.server.lock:
                self.server.failing[prompt] += 1
            if word == "FAIL" or self.server.failing[prompt] <= 2:
                return self.say(500, {"error": {"message": "out of memory"}})
        if word == "DIE":
            self.server.dying = self.close_connection = True
            return None
        message = {"role": "assistant", "content": f"A{len(messages)} to {prompt}"} | MESSAGES.get(word, {})
        if word in ARGUMENTS:
            function = {"name": "lookup", "arguments": ARGUMENTS[word]}
            call = {"id": "own", "index": 0, "type": "function", "function": function}
            message |= {"content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": REASONS.get(word, "stop")}
        return self.say(200, {"choices": [choice], "usage": {"completion_tokens": 3}})


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as started:
        yield started


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def asking(*prompts: str) -> list[dict]:
    """A row for each prompt."""
    return [{"messages": [user(prompt)]} for prompt in prompts]


def numbered(count: int) -> list[str]:
    return [f"prompt {number}" for number in range(count)]


def assistant(content: str, **further) -> dict:
    return {"role": "assistant", "content": content, **further}


def called(identity: str, place: str) -> dict:
    return {"id": identity, "type": "function", "function": {"name": "lookup", "arguments": f'{{"place": "{place}"}}'}}


def prompt_of(row: dict) -> str:
    return row["messages"][0]["content"]


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def settings(turns="all", reasoning="keep", truncated="drop", max_tokens=50, **sampling) -> Generation:
    return Generation("tiny", turns, reasoning, truncated, max_tokens, **sampling)


def ask(
    out: Path, rows: list[dict], *servers: Server, concurrency=4, timeout=HANG_SECONDS, report=print, **changes
) -> RegenerationSummary:
    conversations = read_conversations([jsonl(out.with_name("prompts.jsonl"), *rows)])
    generation = settings(**changes)
    limits = {"concurrency": concurrency, "timeout": timeout, "patience": (0.01, 0.02, 0.05)}
    endpoints = [Endpoint(url, None, "tiny", **limits) for url in endpoint_urls([server.url for server in servers])]
    with AnswerFile(out, asdict(generation)) as file:
        return Regeneration(conversations, len(conversations), file, generation, report, print).run(endpoints)


def answers(tmp_path: Path, server: Server, *rows: dict, **changes) -> list[list[dict]]:
    """The messages of the rows, in the order of their prompts."""
    ask(tmp_path / "out.jsonl", list(rows), server, concurrency=1, **changes)
    return [row["messages"] for row in rows_of(tmp_path / "out.jsonl")]


# Whose words stand in a row -------------------------------------------------------------------------------------------

TALK = [{"role": "system", "content": "Be brief."}, user("one"), assistant("old 1"), user("two"), assistant("old 2")]


def test_by_default_every_answer_is_the_targets_own_given_its_own_earlier_ones(tmp_path, server):
    [messages] = answers(tmp_path, server, {"messages": TALK})
    assert messages == [TALK[0], user("one"), assistant("A2 to one"), user("two"), assistant("A4 to two")]
    assert [body["messages"] for body in server.bodies] == [messages[:2], messages[:4]]


def test_the_last_turn_alone_is_asked_for_after_the_original_ones(tmp_path, server):
    assert answers(tmp_path, server, {"messages": TALK}, turns="last") == [[*TALK[:4], assistant("A4 to two")]]
    assert [body["messages"] for body in server.bodies] == [TALK[:4]]


@pytest.mark.parametrize("turns", ["all", "last"])
def test_a_prompt_without_an_answer_gets_one_and_a_greeting_that_opens_stays(tmp_path, server, turns):
    greeted = {"messages": [assistant("Hello!"), user("two"), assistant("old")]}
    first, second = answers(tmp_path, server, *asking("one"), greeted, turns=turns)
    assert first == [user("one"), assistant("A1 to one")]
    assert second == [assistant("Hello!"), user("two"), assistant("A2 to two")]


def test_rows_are_read_back_as_they_are_and_the_same_prompt_is_asked_for_once(tmp_path, server):
    rows = [{"messages": [user("one"), assistant(f"old {number}")]} for number in range(3)]
    summary = ask(tmp_path / "out.jsonl", [*rows, {"messages": [user("two")]}], server)
    assert (summary.answered, summary.repeated, summary.rows, summary.tokens) == (2, 2, 2, 6)
    talks = [one.messages for one in read_conversations([str(tmp_path / "out.jsonl")])]
    assert sorted(talks, key=repr) == [(user(word), assistant(f"A1 to {word}")) for word in ("one", "two")]
    assert all(list(row) == ["id", "messages"] for row in rows_of(tmp_path / "out.jsonl"))
    # a folder with the answers is data: nothing beside them is taken for rows
    (tmp_path / "prompts.jsonl").unlink()
    assert len(read_conversations([str(tmp_path)])) == 2


def test_reasoning_stands_apart_or_is_dropped_also_from_the_context(tmp_path, server):
    row = {"messages": [user("one"), assistant("old", reasoning_content="Old thought."), user("THINK")]}
    [kept] = answers(tmp_path, server, row, turns="last")
    assert kept == [*row["messages"], assistant("A3 to THINK", reasoning_content="Let me see.")]
    (tmp_path / "drop").mkdir()
    [dropped] = answers(tmp_path / "drop", server, row, turns="last", reasoning="drop")
    assert dropped == [user("one"), assistant("old"), user("THINK"), assistant("A3 to THINK")]
    assert [body["messages"] for body in server.bodies] == [kept[:3], dropped[:3]]


def test_a_think_tag_in_the_content_is_left_there_and_counted(tmp_path, server):
    summary = ask(tmp_path / "out.jsonl", asking("TAG"), server)
    assert summary.unparsed_reasoning == 1 and "reasoning parser" in str(summary)
    assert rows_of(tmp_path / "out.jsonl")[0]["messages"][1]["content"] == "<think>Hm.</think>Yes."


def tool_talk(place: str) -> dict:
    call = {"type": "function", "function": {"name": "lookup", "arguments": {"place": place}}}
    asked, result = {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "rain"}
    messages = [user("CALL it"), asked, result, assistant("old"), user("two"), assistant("old 2")]
    return {"messages": messages, "tools": [LOOKUP]}


def test_arguments_that_are_no_string_become_one_and_an_odd_content_is_a_failure(tmp_path, server):
    rows = [{"messages": [user(word)], "tools": [LOOKUP]} for word in ("OBJECTCALL", "NULLCALL", "PARTS")]
    summary = ask(tmp_path / "out.jsonl", rows, server, concurrency=1)
    calls = [row["messages"][1]["tool_calls"][0]["function"] for row in rows_of(tmp_path / "out.jsonl")]
    assert [call["arguments"] for call in calls] == [GHENT, "{}"]
    assert summary.failed == 1
    assert "choices.0.message.content: Input should be a valid string" in summary.examples["failed"]


def test_a_tool_that_is_no_function_is_sent_as_it_is(tmp_path, server):
    tools = [{"type": "web_search"}, {"type": "web_search_2", "name": "search"}, LOOKUP["function"]]
    ask(tmp_path / "out.jsonl", [{"messages": [user("one")], "tools": tools}], server)
    assert server.bodies[0]["tools"] == [*tools[:2], LOOKUP]


def test_a_value_that_json_does_not_have_is_left_out(tmp_path, server):
    arguments = {"place": "Ghent", "day": date(2020, 2, 3)}
    call = {"type": "function", "function": {"name": "lookup", "arguments": arguments}}
    odd = [{**user("one"), "name": date(2020, 2, 3)}], [user("one"), {"role": "assistant", "tool_calls": [call]}]
    for place, messages in enumerate(odd):
        path = tmp_path / f"{place}.parquet"
        pq.write_table(pa.Table.from_pylist([{"messages": messages}]), path)
        [conversation] = read_conversations([str(path)])
        with pytest.raises(LeftOut, match="a value that JSON does not have") as left_out:
            plan_of(conversation, settings())
        assert "date" in left_out.value.detail


def test_half_a_surrogate_pair_counts_only_where_it_would_be_sent():
    half = {"role": "user", "content": "\ud83d"}
    with pytest.raises(LeftOut, match="surrogate"):
        plan_of(Conversation("here", (half,), None), settings())
    assert plan_of(Conversation("here", (user("one"), {**half, "role": "assistant"}), None), settings()).asked == {1}


def test_results_follow_a_call_that_the_target_makes_too_and_carry_its_id(tmp_path, server):
    ask(tmp_path / "out.jsonl", [tool_talk("Ghent")], server)
    [row] = rows_of(tmp_path / "out.jsonl")
    result = {"role": "tool", "content": "rain", "tool_call_id": "call_0"}
    answer = assistant("", tool_calls=[called("call_0", "Ghent")])
    assert row["messages"][:3] == [user("CALL it"), answer, result]
    assert row["messages"][3:] == [assistant("A3 to rain"), user("two"), assistant("A5 to two")]
    assert row["tools"] == [LOOKUP] and all(body["tools"] == [LOOKUP] for body in server.bodies)


def test_a_row_ends_where_the_target_calls_otherwise_than_the_original(tmp_path, server):
    plain = {"messages": [user("CALL now"), assistant("old"), user("two"), assistant("old")], "tools": [LOOKUP]}
    answering = {"messages": [user("one"), *tool_talk("Ghent")["messages"][1:]], "tools": [LOOKUP]}
    summary = ask(tmp_path / "out.jsonl", [tool_talk("Bruges"), plain, answering], server, concurrency=1)
    call = assistant("", tool_calls=[called("own", "Ghent")])
    rows = [row["messages"] for row in rows_of(tmp_path / "out.jsonl")]
    assert rows == [[user("CALL it"), call], [user("CALL now"), call], [user("one"), assistant("A1 to one")]]
    assert list(summary.cut.values()) == [3] and "3 cut short" in str(summary)


def test_with_the_last_turn_alone_original_calls_and_results_are_context(tmp_path, server):
    row = tool_talk("Bruges")
    [messages] = answers(tmp_path, server, row, turns="last")
    assert messages[1]["tool_calls"] == [called("call_0", "Bruges")] and messages[2]["tool_call_id"] == "call_0"
    assert [messages[3], messages[5]] == [assistant("old"), assistant("A5 to two")] and len(server.bodies) == 1


def test_what_decides_the_answers_is_sent_and_what_is_not_given_is_left_to_the_server(tmp_path, server):
    ask(tmp_path / "a.jsonl", asking("one"), server)
    assert server.bodies.pop() == {"model": "tiny", "messages": [user("one")], "max_tokens": 50}
    sampling, variables = {"temperature": 0.0, "top_p": 0.9, "seed": 7}, {"enable_thinking": False}
    ask(tmp_path / "b.jsonl", asking("one"), server, **sampling, template_variables=variables)
    assert (sampling | {"chat_template_kwargs": variables}).items() <= server.bodies.pop().items()


# What is left out -----------------------------------------------------------------------------------------------------


def test_every_answer_that_is_none_to_learn_from_is_counted_by_reason_and_not_asked_for_again(tmp_path, server):
    rows = asking("REFUSE", "CUT", "CUT again", "FILTER", "ODD", "EMPTY", "BADCALL", "one")
    rows += [{"text": "No turns."}, {"messages": [TALK[0], user("a"), assistant("b"), assistant("c")]}]
    summary = ask(tmp_path / "out.jsonl", rows, server, concurrency=1)
    expected = {
        **{"refused by the server": 1, "truncated at the length limit": 2, "stopped by the server's content filter": 1},
        **{"finish_reason repetition": 1, "an empty answer": 1, "plain text, which has no turns": 1},
        "a tool call whose arguments are not a JSON object": 1,
        "an assistant's turn that follows another of its own": 1,
    }
    assert summary.left_out == expected and summary.rows == summary.answered == 1
    assert "prompts.jsonl:1: 400: too long by far" in summary.examples["refused by the server"]
    requests = len(server.bodies)
    again = ask(tmp_path / "out.jsonl", rows, server)
    assert len(server.bodies) == requests and again.left_out == expected and again.rows == 1
    assert (again.answered, again.earlier) == (0, 8)


def test_truncated_answers_are_kept_on_demand_and_end_their_row(tmp_path, server):
    row = {"messages": [user("CUT"), assistant("old"), user("two"), assistant("old")]}
    [messages] = answers(tmp_path, server, row, truncated="keep")
    assert messages == [user("CUT"), assistant("A1 to CUT")]


def test_a_run_that_is_only_refused_ends_with_the_servers_reason_and_records_nothing(tmp_path, server):
    rows = asking(*(f"REFUSE {number}" for number in range(60)))
    with pytest.raises(UserError, match="first 32 conversations asked for gave no row .refused by .*: 400: too long"):
        ask(tmp_path / "out.jsonl", rows, server)
    assert (tmp_path / "out.jsonl.record" / "left_out.jsonl").read_text() == ""
    ask(tmp_path / "out.jsonl", asking("one"), server, max_tokens=20)  # other settings: nothing was kept


def test_rows_of_an_earlier_run_do_not_show_that_this_runs_server_is_right(tmp_path, server):
    out, left_out = tmp_path / "out.jsonl", tmp_path / "out.jsonl.record" / "left_out.jsonl"
    ask(out, asking("one"), server)
    rows = asking(*numbered(60))
    server.refusing = True
    with pytest.raises(UserError, match="first 32 conversations asked for gave no row"):
        ask(out, rows, server)
    assert left_out.read_text() == ""
    server.refusing = False
    assert ask(out, rows, server).rows == 61


def test_a_few_refusals_without_an_answer_are_counted_and_asked_again(tmp_path, server):
    out, left_out = tmp_path / "out.jsonl", tmp_path / "out.jsonl.record" / "left_out.jsonl"
    refused = [f"REFUSE {number}" for number in range(3)]
    ask(out, asking("one"), server)
    summary = ask(out, asking("one", *refused, "CUT"), server, concurrency=1)
    assert (summary.left_out["refused by the server"], summary.unrecorded, summary.rows) == (3, 3, 1)
    assert "3 of those left out are asked again by the next run" in str(summary)
    assert [row["reason"] for row in rows_of(left_out)] == ["truncated at the length limit"]  # the server answered that
    summary = ask(out, asking(*refused, "two"), server, concurrency=1)
    assert (summary.unrecorded, summary.rows) == (0, 2) and len(rows_of(left_out)) == 4


# Servers that fail ----------------------------------------------------------------------------------------------------


def test_a_request_that_fails_is_tried_again_and_one_that_always_does_is_left_to_the_next_run(tmp_path, server):
    rows = asking("one", "FAILTWICE", "FAIL")
    summary = ask(tmp_path / "out.jsonl", rows, server)
    assert (summary.answered, summary.failed, summary.left_out) == (2, 1, {})
    assert "FAIL" not in str(summary) and "500: out of memory" in str(summary)
    assert server.failing == {"FAILTWICE": 3, "FAIL": 4}
    ask(tmp_path / "out.jsonl", rows, server)
    assert server.failing["FAIL"] == 8 and server.failing["FAILTWICE"] == 3


def test_a_slow_answer_is_a_failure_after_the_time_limit(tmp_path):
    with Server(seconds=0.6) as server:
        summary = ask(tmp_path / "out.jsonl", asking("one"), server, timeout=0.1)
    assert summary.failed == 1 and "no whole answer within 0.1 s" in summary.examples["failed"]


def test_an_endpoint_that_dies_is_named_and_asked_nothing_more_and_the_other_does_its_work(tmp_path, server):
    lines = []
    with Server(seconds=0.01) as dying:
        dying.dies_after, server.seconds = 10, 0.03
        summary = ask(tmp_path / "out.jsonl", asking(*numbered(80)), dying, server, report=lines.append)
    assert summary.rows == summary.answered == 80 and server.bodies
    assert sorted(map(prompt_of, rows_of(tmp_path / "out.jsonl"))) == sorted(numbered(80))
    assert len(lines) == 1 and lines[0].startswith(f"{dying.url}/v1 is left out: ")
    assert 10 < len(dying.bodies) <= 10 + 4  # none of the four at a time asks it again


def test_when_the_last_endpoint_dies_all_that_came_is_kept_and_a_rerun_asks_for_the_rest(tmp_path, server):
    rows = asking("one", "two", "DIE", *numbered(20))
    with pytest.raises(UserError, match=r"no endpoint is left .*keeps 2 rows.*run the same command again"):
        ask(tmp_path / "out.jsonl", rows, server, concurrency=1)
    server.dying = False
    summary = ask(tmp_path / "out.jsonl", [row for row in rows if prompt_of(row) != "DIE"], server)
    assert (summary.earlier, summary.answered, summary.rows) == (2, 20, 22)


def test_an_endpoint_that_comes_back_with_another_model_is_left_out(tmp_path, server):
    lines, rows = [], asking("FAILTWICE now", *numbered(6))
    server.model = "replaced"
    with Server() as other:
        summary = ask(tmp_path / "out.jsonl", rows, server, other, concurrency=1, report=lines.append)
    assert summary.rows == 7 and lines == [f"{server.url}/v1 is left out: it now serves replaced"]


def test_no_more_requests_are_in_flight_than_asked_for_and_no_more_conversations_held(tmp_path):
    drawn = answered = most = 0
    conversations = read_conversations([jsonl(tmp_path / "prompts.jsonl", *asking(*numbered(60)))])

    class Counting(AnswerFile):
        def add(self, row: dict) -> None:
            nonlocal answered
            answered += 1
            super().add(row)

    def drawing():
        nonlocal drawn, most
        for conversation in conversations:
            drawn += 1
            most = max(most, drawn - answered)
            yield conversation

    with Server(seconds=0.1) as server, Counting(tmp_path / "out.jsonl", asdict(settings())) as file:
        [url] = endpoint_urls([server.url])
        endpoint = Endpoint(url, None, "tiny", concurrency=5, timeout=HANG_SECONDS)
        Regeneration(drawing(), 60, file, settings(), print, print).run([endpoint])
    assert server.most_at_a_time == 5 and most <= 6 and answered == 60


# The launcher ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def called_here(launcher):
    """The launcher, run in this process: its exit code and what it said."""

    def call(*words: object) -> tuple[int, str]:
        code, out, err = launcher("regenerate.py", *words)
        return code, out + err

    return call


def test_after_a_kill_rows_are_neither_lost_nor_doubled_and_the_key_is_seen_nowhere(tmp_path, called_here, monkeypatch):
    rows = asking(*numbered(60), "REFUSE it")
    source, out = jsonl(tmp_path / "prompts.jsonl", *rows), tmp_path / "out.jsonl"
    with Server(key=KEY, seconds=0.1) as server:
        words = ("--data", source, "--out", str(out), "--endpoint", server.url, "--concurrency", "3")
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        process = launch(sys.executable, str(LAUNCHERS / "regenerate.py"), *words)
        wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 10, process)
        server.seconds = 60.0  # so that it is in the middle when it is killed
        try:
            code, second = called_here(*words)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert code == 2 and "another process writes it; wait for it" in second
        output = process.stdout.read()
        process.stdout.close()

        whole = out.read_bytes()
        intact = whole[: whole.rindex(b"\n") + 1]
        out.write_bytes(intact + b'{"id": "torn", "mess')
        server.bodies.clear()
        server.seconds = 0.0
        monkeypatch.delenv("OPENAI_API_KEY")
        (tmp_path / "key").write_text(KEY + "\n")
        code, resumed = called_here(*words, "--api-key-file", str(tmp_path / "key"))
        (tmp_path / "key").unlink()
        assert code == 0 and f"data.train=[{out}]" in resumed and "400: too long by far, Bearer [key]" in resumed
        assert out.read_bytes().startswith(intact), "what was there stays as it was"
        assert len(server.bodies) == 61 - intact.count(b"\n"), "asked for what was missing and no more"
        assert sorted(map(prompt_of, rows_of(out))) == sorted(numbered(60))
        summary = json.loads((tmp_path / "out.jsonl.record" / "summary.json").read_text())
        assert summary["rows"] == 60 and summary["left_out"] == {"refused by the server": 1}

        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        code, other = called_here(*words, "--temperature", "0")
        assert code == 2 and "temperature not set, but now it is 0.0; use the former again, or name" in other
        server.key = "another"
        code, wrong = called_here(*words)
        assert code == 2 and "no endpoint can be used" in wrong and "401" in wrong and "--api-key-file" in wrong
    texts = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(KEY in text for text in [*texts, output, second, resumed, other, wrong])


def test_a_dead_endpoint_at_the_start_is_named_and_last_turn_supervision_is_recommended(tmp_path, server, called_here):
    source = jsonl(tmp_path / "prompts.jsonl", {"messages": TALK})
    words = ("--data", source, "--out", str(tmp_path / "out.jsonl"), "--turns", "last")
    code, output = called_here(*words, "--endpoint", "http://127.0.0.1:9", server.url)
    assert code == 0 and "warning: http://127.0.0.1:9/v1 is left out: ConnectError" in output
    assert "data.supervise=last_turn" in output and "1 rows of 1 conversations" in output


def test_a_run_with_failures_ends_with_exit_code_1_and_one_without_a_row_with_2(tmp_path, server, called_here):
    for name, rows, expected, told in (
        ("out", asking("one", "FAIL"), 1, ("1 failed",)),
        ("none", [{"text": "No turns."}], 2, ("has no row", "1 left out: plain text")),
    ):
        words = ("--out", str(tmp_path / f"{name}.jsonl"), "--endpoint", server.url)
        code, output = called_here("--data", jsonl(tmp_path / "prompts.jsonl", *rows), *words)
        assert code == expected and all(part in output for part in told)


def test_malformed_rows_are_listed_before_anything_is_asked_for_or_left_out_and_counted(tmp_path, server, called_here):
    source = tmp_path / "prompts.jsonl"
    source.write_text(json.dumps({"messages": [user("one")]}) + '\n\n[1]\n{"messages": [\n')
    words = ("--data", str(source), "--out", str(tmp_path / "out.jsonl"), "--endpoint", server.url)
    code, output = called_here(*words)
    assert code == 2 and not server.bodies
    assert f"error: {source}: 2 of 3 rows read are malformed" in output
    assert f"  {source}:3: the row is [1]" in output and f"  {source}:4: not valid JSON" in output
    assert output.endswith("  fix them, or leave malformed rows out with --malformed drop\n")
    code, output = called_here(*words, "--malformed", "drop")
    assert code == 0 and f"1 left out: malformed row (the row: not an object) (first {source}:3)" in output
    summary = json.loads((tmp_path / "out.jsonl.record" / "summary.json").read_text())
    assert (summary["read"], summary["rows"], sum(summary["left_out"].values())) == (1, 1, 2)


def test_every_mistake_is_one_line_with_the_value_and_the_remedy(tmp_path, server, refused):
    source = jsonl(tmp_path / "prompts.jsonl", {"messages": [user("one")]})
    good = {"--data": source, "--out": tmp_path / "out.jsonl", "--endpoint": server.url}
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "other.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "key").write_text("two words")
    (tmp_path / "blocked.jsonl.record" / "left_out.jsonl").mkdir(parents=True)
    cases = [
        ({"--data": tmp_path / "none.jsonl"}, "none.jsonl: no such file"),
        ({"--endpoint": "localhost:30000"}, "not an address of the form http://host:port"),
        ({"--endpoint": "http://host:99999"}, "is not an address"),
        ({"--endpoint": "http://me:secret@host:1"}, "use --api-key-file"),
        ({"--endpoint": "http://me:secret/x@host:1"}, "use --api-key-file"),
        ({"--endpoint": f"{server.url}/v1/chat/completions"}, "is not an address of the form"),
        ({"--endpoint": f"{server.url}/elsewhere"}, "not answered as OpenAI does"),
        ({"--endpoint": "http://127.0.0.1:9"}, "no endpoint can be used (http://127.0.0.1:9/v1: ConnectError"),
        ({"--out": tmp_path / "missing" / "out.jsonl"}, "there is no folder"),
        ({"--out": tmp_path / "folder.jsonl"}, "is a folder"),
        ({"--out": tmp_path / "out.json"}, "has to end in .jsonl"),
        ({"--out": source}, "is among the data that is read"),
        ({"--data": tmp_path}, "is among the data that is read"),
        ({"--out": tmp_path / "other.jsonl"}, "says how they came"),
        ({"--out": tmp_path / "blocked.jsonl"}, "left_out.jsonl: cannot be written (Is a directory)"),
        ({"--max-tokens": "0"}, "--max-tokens: 0 is out of range; give 1 or more"),
        ({"--concurrency": "-3"}, "--concurrency: -3"),
        ({"--temperature": "nan"}, "--temperature: nan"),
        ({"--top-p": "0"}, "--top-p: 0 "),
        ({"--timeout": "0"}, "--timeout: 0 "),
        ({"--model": "unknown"}, "does not serve 'unknown' but tiny; name that"),
        ({"--template-variables": "{x}"}, "is not JSON"),
        ({"--template-variables": "3"}, "is not a JSON object"),
        ({"--api-key-file": tmp_path / "nokey"}, "cannot be read (FileNotFoundError)"),
        ({"--api-key-file": tmp_path / "key"}, "write the key alone into it"),
    ]
    for changes, expected in cases:
        line = refused("regenerate.py", *chain.from_iterable((good | changes).items()))
        assert line.startswith("error: ") and expected in line, (changes, line)
        assert "two words" not in line and "secret" not in line


def test_the_key_of_the_environment_does_not_travel_in_the_clear(tmp_path, server, called_here, monkeypatch):
    words = ("--data", jsonl(tmp_path / "a.jsonl", {"messages": TALK}), "--out", str(tmp_path / "out.jsonl"))
    far = (*words, "--endpoint", server.url, "http://192.0.2.1:9")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    code, output = called_here(*far)
    assert code == 2 and "OPENAI_API_KEY: would go unencrypted to http://192.0.2.1:9/v1; unset it, or give" in output
    assert KEY not in output and not server.bodies
    monkeypatch.setattr("eagle3.regeneration.endpoint.PROBE_SECONDS", 0.1)
    (tmp_path / "key").write_text(KEY)
    assert called_here(*far, "--api-key-file", str(tmp_path / "key"))[0] == 0
    urls = ["https://host/v1", "http://localhost:1/v1", "http://127.0.0.2:1/v1", "http://[::1]:1/v1"]
    assert not any(map(exposed, urls)) and exposed("http://localhost.example:1/v1")


def test_endpoints_of_unlike_models_are_refused_and_v1_may_be_written(server):
    assert endpoint_urls([server.url, "https://host/llm/v1/"]) == [f"{server.url}/v1", "https://host/llm/v1"]
    with Server("other") as other:
        urls = endpoint_urls([server.url, other.url])
        with pytest.raises(UserError, match="different models"):
            find_model(urls, None, None, print)
    with pytest.raises(UserError, match="named twice"):
        endpoint_urls([server.url, f"{server.url}/v1"])


def test_a_file_locked_by_another_is_left_as_it_is(tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_bytes(b'{"id": "torn')
    with out.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process writes it; wait for it, or name another file"):
            AnswerFile(out, {})
    assert out.read_bytes() == b'{"id": "torn'
