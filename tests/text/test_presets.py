"""Presets and dataset ids: the real `datasets` library streams from a hub on this machine, which has each dataset in
the layout that its page shows."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from local_hub import LocalHub, local_hub
from places import ROOT, SUPPORT
from prepare_cases import jsonl, turns

from eagle3.errors import UserError
from eagle3.text.conversations import read_conversations
from eagle3.text.datasets import dataset_named, presets

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Iterator[LocalHub]:
    with local_hub(tmp_path_factory.mktemp("hub")) as served:
        yield served


@pytest.fixture(scope="module")
def ask(hub, tmp_path_factory) -> Iterator[Ask]:
    """Reads in a process that takes `hub` for the Hugging Face hub."""
    home = tmp_path_factory.mktemp("home")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(SUPPORT / "preset_reader.py")]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:

        def read(source: str, **request: object) -> dict[str, Any]:
            process.stdin.write(json.dumps({"source": source, **request}) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield read
        process.stdin.close()


@pytest.fixture
def kept(ask, tmp_path) -> Ask:
    """Like `ask`, with a folder for copies."""
    return partial(ask, downloads=str(tmp_path))


def readme(folder: Path, splits: dict[str, str], config: str = "default") -> None:
    """The part of a dataset's card that says which files are which split."""
    lines = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    lines += [line for name, path in splits.items() for line in (f"  - split: {name}", f"    path: {path}")]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def parquet(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def sharegpt(*contents: str | None) -> list[dict]:
    return [{"from": ("human", "gpt")[place % 2], "value": text} for place, text in enumerate(contents)]


def publish(hub: LocalHub) -> dict[str, list[list[dict]]]:
    """Every preset's dataset in its own layout, a few rows each; returns the conversations by source."""
    folder = hub.folder("Aeala/ShareGPT_Vicuna_unfiltered")
    rows = [{"id": "a", "conversations": sharegpt("Hi", "Yes")}, {"id": "b", "conversations": []}]
    (folder / "ShareGPT_V4.3_unfiltered_cleaned_split.json").write_text(json.dumps(rows, indent=1))
    (folder / "ShareGPT_2023.05.04v0_Wasteland_Edition.json").write_text(json.dumps(rows * 3))
    folder = hub.folder("HuggingFaceH4/ultrachat_200k")
    names = ("train_sft", "test_sft", "train_gen", "test_gen")
    readme(folder, {name: f"data/{name}-*" for name in names})
    for name in names:
        row = {"prompt": "Hi", "prompt_id": "1", "messages": turns("Hi", name)}
        parquet(folder / "data" / f"{name}-00000-of-00001-abc.parquet", [row])
    folder = hub.folder("mlabonne/open-perfectblend")
    readme(folder, {"train": "data/train-*"})
    rows = [{"conversations": sharegpt(*talk), "source": "x"} for talk in (("1 + 1?", "2"), ("2?", None))]
    parquet(folder / "data/train-00000-of-00002.parquet", rows)
    parquet(folder / "data/train-00001-of-00002.parquet", [{"conversations": sharegpt("3?", "4"), "source": "y"}])
    folder = hub.folder("Magpie-Align/Magpie-Qwen2.5-Pro-1M-v0.1")
    parquet(folder / "data/train-00000-of-00001.parquet", [{"uuid": "u", "conversations": sharegpt("Why?", "So.")}])
    folder = hub.folder("nvidia/OpenCodeInstruct")
    readme(folder, {"train": "data/train-*"}, config="train")
    row = {"id": "1", "input": "Sort.", "output": "sorted(x)", "domain": "generic"}
    parquet(folder / "data/train-00000-of-00001.parquet", [row, {"id": "2", "input": "", "output": "x"}])
    folder = hub.folder("ise-uiuc/Magicoder-Evol-Instruct-110K")
    jsonl(folder / "data-evol_instruct-decontaminated.jsonl", {"instruction": "Reverse it.", "response": "x[::-1]"})
    for name in ("LongAlign-10k", "LongWriter-6k"):
        jsonl(hub.folder(f"THUDM/{name}") / "long.jsonl", {"messages": turns(name, "Read."), "length": 9})
    folder = hub.folder("Yukang/LongAlpaca-12k")
    rows = [
        {"instruction": "Sum it up.", "input": "", "output": "Short.", "file": "a.txt"},
        {"instruction": "Translate.", "input": "oui", "output": "yes", "file": ""},
        {"instruction": "Empty.", "input": "", "output": None, "file": ""},
    ]
    (folder / "LongAlpaca-12k.json").write_text(json.dumps(rows))
    return {
        "preset:sharegpt": [turns("Hi", "Yes")],
        "preset:ultrachat": [turns("Hi", "train_sft")],
        "preset:ultrachat:held_out": [turns("Hi", "test_sft")],
        "preset:perfectblend": [turns("1 + 1?", "2"), turns("3?", "4")],
        "preset:magpie": [turns("Why?", "So.")],
        "preset:opencodeinstruct": [turns("Sort.", "sorted(x)")],
        "preset:magicoder-evol-instruct": [turns("Reverse it.", "x[::-1]")],
        "preset:longalign": [turns("LongAlign-10k", "Read.")],
        "preset:longalpaca": [turns("Sum it up.", "Short."), turns("Translate.\n\noui", "yes")],
        "preset:longwriter": [turns("LongWriter-6k", "Read.")],
    }


def test_every_preset_gives_the_conversations_of_its_dataset(hub, ask):
    expected = publish(hub)
    assert {source.split(":")[1] for source in expected} == presets().keys()
    for source, conversations in expected.items():
        answer = ask(source)
        assert [row[1] for row in answer.get("rows", [answer])] == conversations, source
        assert answer["rows"][0][0] == f"{source} row 1"
    messages = ask("preset:perfectblend")["told"]
    assert "preset:perfectblend: 1 rows without a question or an answer are left out" in messages
    # The number is the row's number in the dataset, even after a row that is left out.
    assert ask("preset:perfectblend")["rows"][1][0] == "preset:perfectblend row 3"


def test_a_dataset_id_may_name_its_split_and_its_revision(hub, ask):
    for revision in ("main", "v2"):
        folder = hub.folder("ann/talks", revision)
        for split in ("train", "test"):
            jsonl(folder / f"{split}.jsonl", {"text": f"{split} of {revision}"})
    texts = [ask(f"ann/talks{part}")["rows"][0][2] for part in ("", ":test", "@v2", ":test@v2")]
    assert texts == ["train of main", "test of main", "train of v2", "test of v2"]
    assert "'v3'" in ask("ann/talks@v3")["error"]
    message = ask("ann/talks:tset")["error"]
    assert message.startswith("ann/talks:tset: ") and "tset" in message.partition("cannot be read")[2]
    message = ask("ann/none")["error"]
    assert message.startswith("ann/none: no file or folder here, and as a dataset id it cannot be read (")
    assert "huggingface.co/datasets/ann/none by hand and name those" in message and "\n" not in message


def test_no_more_rows_travel_than_are_wanted(hub, ask):
    letters = random.Random(0)
    folder = hub.folder("ann/long")
    for file in range(3):
        rows = [{"text": f"{file} {number} " + letters.randbytes(10_000).hex()} for number in range(100)]
        jsonl(folder / f"train-{file}.jsonl", *rows)
    rows = ask("ann/long", limit=5)["rows"]
    assert [row[2].split()[:2] for row in rows] == [["0", str(number)] for number in range(5)]
    assert hub.bytes_of("train-0.jsonl") > 0 and hub.bytes_of("train-1.jsonl") == hub.bytes_of("train-2.jsonl") == 0
    rows = ask("ann/long")["rows"]
    assert [row[2].split()[0] for row in rows] == ["0"] * 100 + ["1"] * 100 + ["2"] * 100


def test_rows_travel_once_and_stay_what_they_were_and_a_whole_set_serves_its_first_rows(hub, kept, tmp_path):
    for name in ("once", "whole"):
        jsonl(hub.folder(f"ann/{name}") / "train.jsonl", *({"text": f"row {number}"} for number in range(9)))
    first = kept("ann/once", limit=4)
    assert [row[2] for row in first["rows"]] == ["row 0", "row 1", "row 2", "row 3"]
    [copy] = tmp_path.iterdir()
    whole = kept("ann/whole")["rows"]
    [copy_of_whole] = {*tmp_path.iterdir()} - {copy}
    for name in ("once", "whole"):
        shutil.rmtree(hub.folder(f"ann/{name}"))
    again = kept("ann/once", limit=4)
    assert again["rows"] == first["rows"] and str(copy) in again["told"][0]
    assert "cannot be read" in kept("ann/once", limit=5)["error"]  # this is another download
    assert kept("ann/whole", limit=4)["rows"] == whole[:4]
    # Part of a set is never taken for the whole later.
    jsonl(hub.folder("ann/odd") / "train.jsonl", *[{"prompt": "x"}] * 12)
    for _ in range(2):
        assert "ann/odd: 10 of 10 rows read are malformed" in kept("ann/odd")["error"]
    assert {*tmp_path.iterdir()} == {copy, copy_of_whole}


def test_malformed_rows_of_a_dataset_are_refused_or_left_out_of_those_wanted_and_travel_once(hub, kept):
    wrong = {"text": None, "messages": [{"role": "robot", "content": "x"}]}
    rows = [wrong if number in (1, 3) else {"text": f"{number}", "messages": None} for number in range(8)]
    folder = hub.folder("ann/mixed")
    jsonl(folder / "train.jsonl", *rows)
    refused = kept("ann/mixed", limit=3)["error"]
    assert "2 of 5 rows read are malformed (2: unknown role)" in refused
    shutil.rmtree(folder)  # refused rows need not be downloaded again
    for drop in range(2):
        answer = kept("ann/mixed", limit=3, drop=True)
        assert [row[2] for row in answer["rows"]] == ["0", "2", "4"] and answer["malformed"] == {"unknown role": 2}
    assert kept("ann/mixed", limit=3)["error"] == refused


def test_columns_that_json_does_not_have_are_left_behind_or_named(hub, kept):
    when = datetime(2020, 2, 3)
    parquet(hub.folder("ann/dated") / "data/train-0.parquet", [{"messages": turns("Hi", "Yes"), "when": when}])
    parquet(hub.folder("ann/bare") / "data/train-0.parquet", [{"prompt": "Hi", "when": when}])
    parquet(hub.folder("ann/inner") / "data/train-0.parquet", [{"messages": [{**turns("Hi")[0], "name": when}]}])
    assert kept("ann/dated")["rows"][0][1] == turns("Hi", "Yes")
    assert "ann/bare row 1: the row has the keys ['prompt', 'when']" in kept("ann/bare")["error"]
    assert kept("ann/inner")["error"].startswith("ann/inner row 1: Object of ")


def flip(rows: Path) -> None:
    content = bytearray(rows.read_bytes())
    content[content.index(b"row 2") + 4] ^= 1  # row 3: as valid a row as it was
    rows.write_bytes(content)


def test_a_copy_that_is_not_as_it_was_written_is_downloaded_again_with_a_warning(hub, kept, tmp_path):
    jsonl(hub.folder("ann/damaged") / "train.jsonl", *({"text": f"row {number}"} for number in range(9)))
    first = kept("ann/damaged", limit=4)
    [copy] = tmp_path.glob("ann-damaged-*/rows.jsonl")
    whole = copy.read_bytes()
    flip(copy)
    again = kept("ann/damaged", limit=4)
    assert again["rows"] == first["rows"] and f"{copy.parent} is damaged" in again["told"][0]
    assert copy.read_bytes() == whole
    shutil.rmtree(hub.folder("ann/damaged"))
    flip(copy)
    assert "cannot be read" in kept("ann/damaged", limit=4)["error"]


def test_a_copy_made_by_another_rule_is_not_read():
    source = dataset_named("preset:opencodeinstruct")
    changed = replace(source, answer="solution")
    assert source.copy(Path(), None) != changed.copy(Path(), None)


def test_a_network_that_fails_is_tried_again_and_then_named_in_one_line(hub, ask):
    for name in ("shaky", "dead"):
        (hub.folder(f"ann/{name}") / f"{name}.jsonl").write_text('{"text": "here"}\n')
    hub.broken["shaky.jsonl"] = 2
    assert ask("ann/shaky")["rows"][0][2] == "here" and hub.broken["shaky.jsonl"] == 0
    hub.broken["dead.jsonl"] = 1000
    message = ask("ann/dead")["error"]
    assert message.startswith("ann/dead: ") and "fix the name or the network" in message and "\n" not in message


def test_reading_tells_how_far_it_is(hub, ask):
    (hub.folder("ann/slow") / "train.jsonl").write_text('{"text": "x"}\n' * 3)
    for limit, counts in (None, ["1", "2", "3", "3"]), (2, ["1/2", "2/2"]):
        messages = [line for line in ask("ann/slow", limit=limit)["told"] if line.startswith("reading ann/slow")]
        assert [line.split(", ")[0] for line in messages] == [f"reading ann/slow: {n} conversations" for n in counts]
        assert messages[-1].endswith(" in all")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("preset:ultrachatt", "no such preset; write preset:NAME, preset:NAME:held_out or .*longalign, "),
        ("preset:", "no such preset"),
        ("preset:ultrachat:test", "no such preset"),
        ("preset:ultrachat@", "no such preset"),
        ("preset:longalign:held_out", "has no held-out split; leave data.held_out out"),
        ("ann/talks@", "no such file or folder"),
        ("ann/talks:a b", "no such file or folder"),
        ("ann/talks:train[:10]", "nor a dataset's id .owner/name, owner/name:split"),
        ("ann/talks/more", "no such file or folder"),
        ("ann/standard_library:a b", "nor a dataset's id"),
        ("standard_libary:files", "docs/data.md shows how to name standard_library"),
    ],
)
def test_a_source_of_no_known_form_is_refused_without_a_network(source, message):
    with pytest.raises(UserError, match=message) as caught:
        read_conversations([source])
    assert str(caught.value).startswith(f"{source}: ")


def test_other_columns_are_left_behind_and_so_is_a_row_with_a_message_that_is_no_object():
    ultrachat = presets()["ultrachat"]
    row = {"prompt": "Hi", "prompt_id": "1", "messages": turns("Hi", "Yes"), "text": "Hi"}
    assert ultrachat.convert(row) == {"messages": turns("Hi", "Yes")}
    for messages in (["Hi", "Yes"], "Hi", 5, [*turns("Hi"), None]):
        assert ultrachat.convert({"messages": messages}) is None


def test_the_documentation_has_the_table_of_presets():
    documented = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    for name, preset in presets().items():
        splits = " / ".join(filter(None, (preset.split, preset.held_out)))
        columns = f"`{preset.columns}`" if preset.chat else preset.columns
        assert f"| `preset:{name}` | {preset.path} | {splits} | {columns} | " in documented
