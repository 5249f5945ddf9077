"""Datasets that people train drafts on, by a short name: where each lies and how its rows become conversations.

What is written here of a set was read in public places: the sets' own pages, and the scripts of SpecForge
(scripts/prepare_data.py) and speculators, whose names are kept. None was downloaded for it: `unverified` says what of an
entry no such place told.
"""

import difflib
from dataclasses import dataclass
from functools import partial

from eagle3.data.download import DatasetSource
from eagle3.errors import UserError


@dataclass(frozen=True)
class Preset:
    """One dataset of the hub.

    dataset, config, files: as in `DatasetSource`. train, held_out: splits. chat: the column that holds whole conversations,
    in OpenAI's or ShareGPT's form; or, for sets of single questions, questions: columns joined by an empty line where they
    are not empty, and answer. licence: as the set's page gives it. size: conversations of `train`.
    """

    dataset: str
    licence: str
    note: str
    size: str
    train: str = "train"
    held_out: str | None = None
    config: str | None = None
    files: tuple[str, ...] = ()
    chat: str | None = None
    questions: tuple[str, ...] = ()
    answer: str = ""
    unverified: str = ""

    @property
    def columns(self) -> str:
        return self.chat or f"{' + '.join(self.questions)} → {self.answer}"


ONE_LIST = "one JSON list, so the whole file travels whatever data.max_samples is"


def presets() -> dict[str, Preset]:
    """All presets by name."""
    return {
        "sharegpt": Preset(
            dataset="Aeala/ShareGPT_Vicuna_unfiltered",
            files=("ShareGPT_V4.3_unfiltered_cleaned_split.json",),
            chat="conversations",
            licence="Apache-2.0",
            size="94k",
            note=f"users' talks with ChatGPT; {ONE_LIST} (464 MB)",
            unverified="size",
        ),
        "ultrachat": Preset(
            dataset="HuggingFaceH4/ultrachat_200k",
            train="train_sft",
            held_out="test_sft",
            chat="messages",
            licence="MIT",
            size="208k",
            note="synthetic talks of several turns",
        ),
        "perfectblend": Preset(
            dataset="mlabonne/open-perfectblend",
            chat="conversations",
            licence="Apache-2.0",
            size="1.4M",
            note="chat, mathematics, code and instructions, mixed; a few rows without text are left out",
        ),
        "magpie": Preset(
            dataset="Magpie-Align/Magpie-Qwen2.5-Pro-1M-v0.1",
            chat="conversations",
            licence="not stated",
            size="1M",
            note="single questions with answers of Qwen2.5-72B-Instruct",
            unverified="licence, who answered",
        ),
        "opencodeinstruct": Preset(
            dataset="nvidia/OpenCodeInstruct",
            config="train",
            questions=("input",),
            answer="output",
            licence="CC-BY-4.0",
            size="5M",
            note="programming questions with answers",
        ),
        "magicoder-evol-instruct": Preset(
            dataset="ise-uiuc/Magicoder-Evol-Instruct-110K",
            files=("data-evol_instruct-decontaminated.jsonl",),
            questions=("instruction",),
            answer="response",
            licence="Apache-2.0",
            size="110k",
            note="programming questions with answers of GPT-4",
            unverified="who answered",
        ),
        "longalign": Preset(
            dataset="THUDM/LongAlign-10k",
            files=("long.jsonl",),
            chat="messages",
            licence="not stated",
            size="10k",
            note="questions about texts of 8k to 64k tokens, English and Chinese",
            unverified="licence",
        ),
        "longalpaca": Preset(
            dataset="Yukang/LongAlpaca-12k",
            files=("LongAlpaca-12k.json",),
            questions=("instruction", "input"),
            answer="output",
            licence="CC-BY-NC-4.0",
            size="12k",
            note=f"questions about long texts, and short ones; {ONE_LIST} (498 MB)",
            unverified="whether short rows use `input`",
        ),
        "longwriter": Preset(
            dataset="THUDM/LongWriter-6k",
            files=("long.jsonl",),
            chat="messages",
            licence="Apache-2.0",
            size="6k",
            note="answers of 2k to 32k words, English and Chinese",
            unverified="the column's name, the words of an answer",
        ),
    }


def preset_source(source: str) -> DatasetSource:
    """Of `preset:NAME`, `preset:NAME:held_out`, either with `@REVISION`. Raises UserError for an unknown name or part."""
    name, at, revision = source.removeprefix("preset:").partition("@")
    name, colon, part = name.partition(":")
    known = presets()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise UserError(
            f"{source}: there is no preset of that name; did you mean preset:{near}? There are {', '.join(sorted(known))}"
        )
    preset = known[name]
    if (colon and part != "held_out") or (at and not revision):
        raise UserError(
            f"{source}: not the form of a preset; write preset:{name}, preset:{name}:held_out or ...@revision"
        )
    if part and preset.held_out is None:
        raise UserError(
            f"{source}: this set has no held-out split; leave data.held_out out, and data.held_out_fraction is held out"
        )
    return DatasetSource(
        source,
        preset.dataset,
        split=preset.held_out if part else preset.train,
        config=preset.config,
        files=preset.files,
        revision=revision or None,
        convert=partial(as_conversation, preset),
        columns=preset.columns,
    )


def as_conversation(preset: Preset, row: dict) -> dict | None:
    """A row of the dataset in one of the forms that conversations have; None where a question, an answer or a message's
    text is missing, or a message is no object. Columns that conversations do not have are left behind."""
    if preset.chat:
        messages = row.get(preset.chat)
        whole = isinstance(messages, list) and all(
            isinstance(message, dict) and message.get("content", message.get("value")) is not None
            for message in messages
        )
        return {preset.chat: messages} if messages and whole else None
    question = "\n\n".join(row[column] for column in preset.questions if row.get(column))
    answer = row.get(preset.answer)
    if not question or not answer:
        return None
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def presets_table() -> str:
    """All presets as a Markdown table, for docs/data.md."""
    lines = [
        "| Preset | Dataset | Splits | Columns | Conversations | Licence | What it is | Not verified |",
        "|---" * 8 + "|",
    ]
    for name, preset in sorted(presets().items()):
        splits = " / ".join(filter(None, (preset.train, preset.held_out)))
        columns = f"`{preset.columns}`" if preset.chat else preset.columns
        lines.append(
            f"| `preset:{name}` | {preset.dataset} | {splits} | {columns} | {preset.size} | {preset.licence} | {preset.note} "
            f"| {preset.unverified} |"
        )
    return "\n".join(lines)
