"""Reads a run folder once, for the report and the card, and derives acceptance from its contents.

Any of a run's files may be missing, and any number of a training step may be null. Files may have been written by a
person or a different program, so pydantic checks what is read from them and names the key with a problem.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import yaml
from pydantic import BaseModel, NonNegativeInt, TypeAdapter, ValidationError

from eagle3.console import all_without_passwords
from eagle3.draft.config import draft_digest, read_draft_config
from eagle3.durable import unsealed
from eagle3.errors import UserError
from eagle3.evaluation.context_results import ContextJudgement
from eagle3.evaluation.results import Conditions, Judgement, SpeculativeResult
from eagle3.parsing import parse_json, parse_yaml
from eagle3.planning.payoff import PayOff
from eagle3.recipe.loading import load_recipe
from eagle3.text.datasets import dataset_named
from eagle3.training.run_folder import RunFolder

Record = dict[str, Any]
Result = TypeVar("Result")

MOVE_AWAY = "move it away, and report and card are made without it"
# The files of a run folder that a report shows, in the order of `read_run`: why one may be absent.
WHY_ABSENT = (
    "the resolved recipe",
    "no step was recorded yet",
    "written at the start of a run",
    "launchers/evaluate.py writes it; the run judged nothing, or has not ended",
    "launchers/evaluate.py --by-context writes it",
    "the run has not ended",
)


class MetricsLine(BaseModel, extra="allow", strict=True):
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
    """The contents of a run folder. Fields are empty or None for missing files."""

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
    evaluation: Judgement | None
    by_context: ContextJudgement | None
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
    def windows(self) -> list[ContextJudgement]:
        """The judgements by context, of each window that was judged."""
        return self.by_context.windows if self.by_context else []

    @property
    def pay_offs(self) -> list[PayOff]:
        """What the draft is worth, by each kind of costs, with each window."""
        return [pay_off for judged in self.windows for pay_off in judged.pay_off]

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
    records, config = _read_metrics(folder.metrics), folder.export / "config.json"
    evaluation = _read(folder.evaluation, Judgement, "evaluation")
    by_context = _read(folder.by_context, ContextJudgement, "by_context")
    started, draft = _read(folder.run, Record, "run"), _read(config, Record)
    exported = read_draft_config(config) and draft_digest(folder.export) if draft else None  # refuses what is no draft
    foreign = {
        file: difference
        for file, judged in ((folder.evaluation, evaluation), (folder.by_context, by_context))
        if judged and (difference := _difference(folder, judged, exported))
    }
    contents = {
        folder.recipe: recipe,
        folder.metrics: records,
        folder.run: started,
        folder.evaluation: evaluation,
        folder.by_context: by_context,
        config: draft,
    } | dict.fromkeys(foreign)
    absent = tuple(
        f"{file.relative_to(path)}: {foreign.get(file, why)}"
        for (file, content), why in zip(contents.items(), WHY_ABSENT, strict=True)
        if not content
    )
    by_kind = {
        kind: tuple(record for record in records if record["kind"] == kind)
        for kind in ("train", "held_out", "skipped", "exported")
    }
    return RunRecord(
        folder,
        text,
        recipe,
        exports=tuple(record["step"] for record in by_kind.pop("exported")),
        **by_kind,
        started=started or {},
        evaluation=contents[folder.evaluation],
        by_context=contents[folder.by_context],
        draft=draft or {},
        absent=absent,
        foreign=tuple(f"{file.name}: {difference}" for file, difference in foreign.items()),
    )


def _difference(folder: RunFolder, judged: Conditions, exported: str | None) -> str:
    """How what was judged differs from the run's export or target; empty if it does not. exported: the export's digest;
    None if there is no export."""
    target = (_read(folder.inputs, Record) or {}).get("model.target", judged.target_digest)
    others = [f"the draft {judged.draft}"] if judged.draft_digest != exported else []
    others += [f"the target {judged.target}"] if judged.target_digest != target else []
    return f"is of {' and '.join(others)}, not of this run's; judge again with launchers/evaluate.py" if others else ""


def column(records: Sequence[Record], name: str) -> np.ndarray:
    """One number from each record: float64 [records], nan if it is null or missing."""
    return np.array([record.get(name) for record in records], np.float64)


def columns(records: Sequence[Record], name: str) -> np.ndarray:
    """A list of numbers from each record: float64 [records, longest list], nan where a list has no number."""
    lists = [record.get(name) or [] for record in records]
    table = np.full((len(lists), max(map(len, lists), default=0)), np.nan)
    for row, values in zip(table, lists, strict=True):
        row[: len(values)] = values
    return table


def _read_metrics(path: Path) -> list[Record]:
    """Read all complete lines. A kill may have cut off the last one."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    read = (_parsed(line, MetricsLine, f"{path}:{number}", "remove that line") for number, line in enumerate(lines, 1))
    return [record.model_dump() for record in read]


def _read(path: Path, kind: type[Result], key: str = "") -> Result | None:
    """Read a JSON file; None if there is none. key: as for _parsed."""
    return _parsed(path.read_bytes(), kind, str(path), MOVE_AWAY, key) if path.is_file() else None


def _parsed(content: bytes, kind: type[Result], origin: str, remedy: str, key: str = "") -> Result:
    """Parse the JSON object in a text. Raises UserError if it is not valid JSON, or not of this kind. key: that of a
    sealed record."""
    try:
        record = parse_json(content)
        json.dumps(record, ensure_ascii=False).encode()  # fails for lone surrogates, which a page cannot contain
        parsed = TypeAdapter(kind).validate_python(record)
        if key:
            unsealed(record, key)
    except ValueError as error:
        raise UserError(f"{origin}: damaged ({first_problem(error)}); {remedy}") from error
    return parsed


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
    return source if known or (dataset_named(source) and not Path(source).expanduser().exists()) else Path(source).name


# How numbers are written ----------------------------------------------------------------------------------------------


def interval_text(figures: SpeculativeResult) -> str:
    """The 95% confidence interval of an acceptance length."""
    return "{:.2f} to {:.2f}".format(*figures.interval) if figures.interval else "–"


def number(value: float | None) -> str:
    return "–" if value is None or not np.isfinite(value) else f"{value:.2f}"


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
