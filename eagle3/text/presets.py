"""Datasets that people train drafts on, by a short name: where each lies (presets.yaml), and how its rows become
conversations."""

import difflib
import re
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from eagle3.errors import UserError
from eagle3.text.download import DatasetSource

FORM = re.compile(r"preset:[^:@]*(?P<held_out>:held_out)?(@(?P<revision>.+))?")


@dataclass(frozen=True)
class Preset:
    """One dataset of the hub.

    dataset, config, files: as in `DatasetSource`. train, held_out: splits. chat: the column that holds whole conversations,
    in OpenAI's or ShareGPT's form; or, for sets of single questions, questions: columns joined by an empty line where they
    are not empty, and answer. licence: as the set's page gives it. size: conversations
    of `train`. unverified: what of these no public place told.
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


@cache
def presets() -> dict[str, Preset]:
    """All presets by name."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return TypeAdapter(dict[str, Preset]).validate_python(table)


def preset_source(source: str) -> DatasetSource:
    """Of `preset:NAME`, `preset:NAME:held_out`, either with `@REVISION`. Raises UserError for an unknown name or part."""
    known, name = presets(), re.split("[:@]", source)[1]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise UserError(
            f"{source}: there is no preset of that name; did you mean preset:{near}? There are {', '.join(sorted(known))}"
        )
    preset, parts = known[name], FORM.fullmatch(source)
    if parts is None:
        raise UserError(
            f"{source}: not the form of a preset; write preset:{name}, preset:{name}:held_out or ...@revision"
        )
    if parts["held_out"] and preset.held_out is None:
        raise UserError(
            f"{source}: this set has no held-out split; leave data.held_out out, and data.held_out_fraction is held out"
        )
    return DatasetSource(
        source,
        preset.dataset,
        split=preset.held_out if parts["held_out"] else preset.train,
        config=preset.config,
        files=preset.files,
        revision=parts["revision"],
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
