"""Reads a run folder once, for the report and the card, and derives acceptance from its contents.

Any of a run's files may be missing, and any number may be null. Files may have been written by a person or a different
program, so pydantic checks what is read from them and names the key with a problem; the records themselves are used as
they are.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from pydantic import BaseModel, NonNegativeInt, ValidationError

from eagle3.console import all_without_passwords
from eagle3.draft.config import draft_digest, read_draft_config
from eagle3.errors import UserError
from eagle3.parsing import parse_json, parse_yaml
from eagle3.planning.payoff import Cell, PayOff
from eagle3.recipe.loading import load_recipe
from eagle3.sealed import unsealed
from eagle3.text.datasets import source_of_id
from eagle3.training.run_folder import RunFolder

Record = dict[str, Any]

MOVE_AWAY = "move it away, and report and card are made without it"
FEW = 700  # verifications; with fewer, the acceptance length is uncertain by more than about 0.05


class Contents(BaseModel):
    """Any JSON object."""


class Sealed(Contents):
    """A sealed record, whose content is as it was written."""

    digest: str


class Judgement(Sealed):
    """The part of a result file that says what was judged."""

    draft: str
    draft_digest: str
    target: str
    target_digest: str


class Metrics(Contents, extra="allow"):
    """A line of metrics.jsonl."""

    step: NonNegativeInt
    kind: str
    # A skipped step names its samples.
    __pydantic_extra__: dict[str, float | list[float | None] | list[str] | None]


class Pace(NamedTuple):
    """Totals over all training steps."""

    tokens: int
    supervised: int
    seconds: float  # time in steps, without measurements, checkpoints and judging


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run folder. Fields are empty for missing files."""

    folder: RunFolder
    # The resolved recipe as text and as values, without passwords.
    recipe_text: str
    recipe: Record
    # Records of metrics.jsonl, by kind.
    train: tuple[Record, ...]
    held_out: tuple[Record, ...]
    skipped: tuple[Record, ...]
    exports: tuple[int, ...]  # steps whose weights were exported; the export folder has those of the last one
    started: Record  # run.json
    evaluation: Record
    by_context: Record
    draft: Record  # the export's config.json; empty if there is none
    absent: tuple[str, ...]  # which files are missing or not this run's, and why
    foreign: tuple[str, ...]  # those that are not this run's

    def key(self, name: str) -> Any:
        """The recipe's value of `section.key`; None if it has none."""
        value: Any = self.recipe
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    @property
    def exported(self) -> Record:
        """The held-out record of the exported draft or, if none was exported, the best one (the first of equals). Empty
        if nothing was measured."""
        known = [record for record in self.held_out if record.get("acceptance_length") is not None]
        if self.exports:
            known = [record for record in known if record["step"] == self.exports[-1]]
        return max(known, key=lambda record: record["acceptance_length"], default={})

    @property
    def pace(self) -> Pace:
        tokens, speeds = column(self.train, "tokens"), column(self.train, "tokens_per_second")
        with np.errstate(divide="ignore"):
            seconds = np.where(speeds > 0, tokens / speeds, np.nan)
        supervised = column(self.train, "supervised")
        return Pace(int(np.nansum(tokens)), int(np.nansum(supervised)), float(np.nansum(seconds)))

    def supervised_until(self, steps: np.ndarray) -> np.ndarray:
        """Number of supervised tokens that training had seen after each of these steps."""
        logged, totals = column(self.train, "step"), np.nancumsum(column(self.train, "supervised"))
        return np.append(0, totals)[np.searchsorted(logged, steps, side="right")]


def read_run(path: Path) -> RunRecord:
    """Read a run folder. Raises UserError if `path` holds no run, or if one of its files is damaged."""
    folder = RunFolder(path)
    if not folder.recipe.is_file() and not folder.metrics.is_file():
        raise UserError(f"{path}: holds no run (neither recipe.yaml nor metrics.jsonl); name a run's output.dir")
    text, recipe = _read_recipe(folder.recipe)
    records = _read_metrics(folder.metrics)
    by_kind = {
        kind: tuple(record for record in records if record["kind"] == kind)
        for kind in ("train", "held_out", "skipped", "exported")
    }
    exports = tuple(record["step"] for record in by_kind.pop("exported"))
    files = {
        "started": (folder.run, Sealed, "written at the start of a run"),
        "evaluation": (
            folder.evaluation,
            Judgement,
            "launchers/evaluate.py writes it; the run judged nothing, or has not ended",
        ),
        "by_context": (folder.by_context, Judgement, "launchers/evaluate.py --by-context writes it"),
        "draft": (folder.export / "config.json", Contents, "the run has not ended"),
    }
    contents = {name: _read_json(file, kind) for name, (file, kind, _) in files.items()}
    if contents["draft"]:
        read_draft_config(folder.export / "config.json")  # refuses what is no draft's
    judged = [name for name in ("evaluation", "by_context") if contents[name]]
    foreign, exported = {}, draft_digest(folder.export) if judged and contents["draft"] else None
    for name in judged:
        if difference := _difference(folder, contents[name], exported):
            contents[name], foreign[name] = {}, difference
    there = [
        (folder.recipe, folder.recipe.is_file(), "the resolved recipe"),
        (folder.metrics, records, "no step was recorded yet"),
        *((file, contents[name], foreign.get(name, why)) for name, (file, _, why) in files.items()),
    ]
    absent = tuple(f"{file.relative_to(path)}: {why}" for file, content, why in there if not content)
    others = tuple(f"{name}.json: {difference}" for name, difference in foreign.items())
    return RunRecord(folder, text, recipe, **by_kind, exports=exports, **contents, absent=absent, foreign=others)


def _difference(folder: RunFolder, judged: Record, exported: str | None) -> str | None:
    """How what was judged differs from the run's export or target; None if it does not. exported: the export's digest;
    None if there is no export."""
    target = _read_json(folder.inputs, Contents).get("model.target", judged["target_digest"])
    known = {"draft": exported, "target": target}
    others = [f"the {name} {judged[name]}" for name, digest in known.items() if judged[f"{name}_digest"] != digest]
    return (
        f"is of {' and '.join(others)}, not of this run's; judge again with launchers/evaluate.py" if others else None
    )


def column(records: Sequence[Record], name: str) -> np.ndarray:
    """One number from each record: float64 [records], nan if it is null or missing."""
    return np.array([record.get(name) for record in records], np.float64)


def columns(records: Sequence[Record], name: str, least: int = 0) -> np.ndarray:
    """A list of numbers from each record: float64 [records, longest list or `least`], nan where a list has no
    number."""
    lists = [record.get(name) or [] for record in records]
    table = np.full((len(lists), max([least, *map(len, lists)])), np.nan)
    for row, values in zip(table, lists, strict=True):
        row[: len(values)] = values
    return table


def _read_metrics(path: Path) -> list[Record]:
    """Read all complete lines. A kill may have cut off the last one."""
    text = _read_text(path)
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [_parsed(line, Metrics, f"{path}:{number}", "remove that line") for number, line in enumerate(lines, 1)]


def _read_json(path: Path, kind: type[Contents]) -> Record:
    """Read the JSON object in a file; empty if there is no file. A sealed one is stored under its file's stem."""
    return _parsed(_read_text(path), kind, str(path), MOVE_AWAY, path.stem) if path.is_file() else {}


def _read_text(path: Path) -> str:
    """Read the text of a file; empty if there is no file. Raises UserError if it is not text."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: damaged (not UTF-8: {error.reason} at byte {error.start}); {MOVE_AWAY}") from error


def _parsed(text: str, kind: type[Contents], origin: str, remedy: str, key: str = "") -> Record:
    """Parse the JSON object in a text. Raises UserError if it is not valid JSON, or not of this kind. key: that of a
    sealed record."""
    try:
        record = parse_json(text)
        if "\\ud" in text.lower():
            json.dumps(record, ensure_ascii=False).encode()  # fails for lone surrogates, which a page cannot contain
        kind.model_validate(record, strict=True)
        if issubclass(kind, Sealed):
            record = unsealed(record, key)
    except ValueError as error:
        raise UserError(f"{origin}: damaged ({first_problem(error)}); {remedy}") from error
    return record


def first_problem(error: ValueError) -> str:
    """The first problem, as `key: what is expected, not what is there`; if the text is not JSON, the parser's
    message."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    what = first["msg"] if first["type"] == "missing" else f"{first['msg']}, not {first['input']!r:.60}"
    return f"{first['loc'][0]}: {what}" if first["loc"] else what


def _read_recipe(path: Path) -> tuple[str, Record]:
    """Read the recipe as text and as values, without passwords. Passwords are removed value by value, since YAML may
    wrap text."""
    if not path.is_file():
        return "", {}
    load_recipe(path)  # refuses what is no recipe
    values = all_without_passwords(parse_yaml(path.read_text(encoding="utf-8")))
    return yaml.safe_dump(values, sort_keys=False), values


def target_name(run: RunRecord) -> str:
    """The target's hub id, or the last part of its folder."""
    target = str(run.key("model.target") or "an unknown target")
    if target == "demo":
        return "a demonstration target"
    return hub_id_of(run) or Path(target).name


def hub_id_of(run: RunRecord) -> str | None:
    return run.started.get("target", {}).get("hub_id")


def source_name(source: str | Record) -> str:
    """Name of a source in data.train: a dataset's id, or the last part of a path. With its share, if it has one."""
    if not isinstance(source, str):
        share = f"{source['samples']:,} samples" if source.get("samples") else f"weight {source.get('weight')}"
        return f"{source_name(source['path'])} ({share})"
    known = source.startswith(("preset:", "demo_answers", "standard_library"))
    return source if known or (source_of_id(source) and not Path(source).expanduser().exists()) else Path(source).name


# Acceptance according to the records, and how numbers are written -----------------------------------------------------


class Curve(NamedTuple):
    """Acceptance length by context."""

    contexts: np.ndarray  # in tokens, ascending
    lengths: np.ndarray  # [n], nan if not measured
    interval: np.ndarray  # [n, 2], 95% confidence, or nan


def measured_curve(by_context: Record) -> Curve:
    """The acceptance curve in a by_context.json."""
    rows = sorted(by_context["contexts"], key=lambda row: row["context"])
    return Curve(column(rows, "context"), column(rows, "acceptance_length"), columns(rows, "interval", least=2))


def estimated_curve(run: RunRecord) -> Curve | None:
    """The acceptance curve of the exported draft's held-out record. nan for contexts with fewer than FEW verifications;
    None if all have fewer."""
    names = ("contexts", "acceptance_by_context", "verifications_by_context")
    contexts, lengths, verifications = (columns([run.exported], name)[0] for name in names)
    known = verifications >= FEW
    if not len(contexts) or not (known & np.isfinite(lengths)).any():
        return None
    return Curve(contexts, np.where(known, lengths, np.nan), np.full((len(contexts), 2), np.nan))


def rule(result: Record) -> str:
    """How tokens were chosen (greedily or by sampling), according to an evaluation.json or by_context.json."""
    return f"at temperature {result['temperature']:g}" if result.get("temperature") else "greedy"


def tree(result: Record) -> str | None:
    """The trees that were drafted, according to an evaluation.json or by_context.json; None for chains."""
    if result.get("topk", 1) == 1:
        return None
    return f"trees of {result.get('tree_tokens')} tokens, {result['topk']} branches a node"


def context_rows(by_context: Record) -> list[tuple[list[str], list[float]]]:
    """The rows of a by_context.json as text, with ascending contexts.

    Each row has the context in tokens, the acceptance length, its 95% confidence interval, and the numbers of prompts
    and verifications. With it comes, for each i, the share of verifications that accepted all of the drafts 0..i.
    """
    return [
        (
            [
                tokens_label(row["context"]),
                number(row.get("acceptance_length")),
                _interval_text(row),
                f"{row['conversations']:,}",
                f"{row['verifications']:,}",
            ],
            row.get("position_acceptance") or [],
        )
        for row in sorted(by_context["contexts"], key=lambda row: row["context"])
    ]


def set_rows(evaluation: Record) -> list[tuple[list[str], list[float]]]:
    """The rows for an evaluation.json's prompt sets as text.

    Each row has the set's name, the acceptance length, its 95% confidence interval, the mean over conversations, the
    numbers of conversations and verifications, and how many times as fast decoding was. With it comes, for each i, the
    share of verifications that accepted all of the drafts 0..i.
    """
    rows = []
    for row in evaluation.get("sets") or []:
        speed = row.get("speed")
        cells = [
            row["name"],
            number(row.get("acceptance_length")),
            _interval_text(row),
            number(row.get("mean_acceptance_length")),
            f"{row['conversations']:,}",
            f"{row['verifications']:,}",
            number(speed and speed["speculative"] / speed["plain"]),
        ]
        rows.append((cells, row.get("position_acceptance") or []))
    return rows


def _interval_text(row: Record) -> str:
    low, high = row.get("interval") or (None, None)
    return "–" if low is None or high is None else f"{low:.2f} to {high:.2f}"


def windows_judged(by_context: Record) -> list[Record]:
    """The judgement in a by_context.json and those of the same draft with other windows; empty if there is none."""
    return [by_context, *by_context.get("other_windows", [])] if by_context.get("contexts") else []


def window_in_words(judged: Record) -> str:
    """The window of a judgement, if it is not the one that the draft was trained with."""
    window, trained = judged.get("window"), judged.get("trained_window")
    if window == trained:
        return ""
    return f"with a window of {window:,} keys" if window else "with full attention"


def pay_offs(judged: Record) -> list[PayOff]:
    """What the draft is worth, by each kind of costs in a judgement by context."""
    window = window_in_words(judged)
    return [
        PayOff(
            ", ".join(filter(None, (each["source"], window))),
            [Cell(*(cell[name] for name in Cell._fields)) for cell in each["cells"]],
        )
        for each in judged.get("pay_off", [])
    ]


def all_pay_offs(by_context: Record) -> list[PayOff]:
    """The same of every window that was judged."""
    return [pay_off for judged in windows_judged(by_context) for pay_off in pay_offs(judged)]


def number(value: float | None) -> str:
    return "–" if value is None or not np.isfinite(value) else f"{value:.2f}"


def curve_text(curve: Curve) -> str:
    pairs = zip(curve.contexts, curve.lengths, strict=True)
    return ", ".join(f"{length:.2f} at {tokens_label(context)}" for context, length in pairs if np.isfinite(length))


def tokens_label(tokens: float) -> str:
    """A number of tokens as 512, 1k, 1.5k, 128k or 1M, where k is 1,024, as usual for contexts."""
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g}{letter}"
    return f"{tokens:g}"


def short(value: float, digits: int = 3) -> str:
    """Shorten a number: 1,234 stays; 372,235 becomes 372k, and 1,234,567 1.23M."""
    for least, unit, letter in ((10**9, 10**9, "G"), (10**6, 10**6, "M"), (10**4, 10**3, "k")):
        if abs(value) >= least:
            return f"{value / unit:.{digits}g}{letter}"
    return f"{value:,}"


def mean(values: np.ndarray) -> np.ndarray:
    """Mean over the first axis, ignoring nan; nan where every value is nan."""
    return np.ma.filled(np.ma.masked_invalid(values).mean(0), np.nan)
