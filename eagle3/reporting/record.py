"""What a run folder holds, read once for report and card; a run may lack any of its files, and any number may be null."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from pydantic import BaseModel, ValidationError

from eagle3.console import all_without_passwords
from eagle3.errors import UserError
from eagle3.parsing import parse_json, parse_yaml
from eagle3.reporting.schemas import ByContext, DraftFile, Evaluation, Metrics, RecipeFile, Started, first_problem
from eagle3.text.download import is_dataset
from eagle3.training.run_folder import RunFolder

Record = dict[str, Any]

MOVE_AWAY = "move it away, and report and card are made without it"


class Pace(NamedTuple):
    """Of all training steps together. seconds: spent in steps, without measurements, checkpoints and judging."""

    tokens: int
    supervised: int
    seconds: float


@dataclass(frozen=True)
class RunRecord:
    """recipe: resolved, as text and as values, without passwords. train, held_out, skipped: records of metrics.jsonl;
    exports: the steps whose weights were exported, the last one's lie there. started: run.json. draft: the export's
    config.json. Empty for what the folder lacks; absent says what and why."""

    folder: RunFolder
    recipe_text: str
    recipe: Record
    train: tuple[Record, ...]
    held_out: tuple[Record, ...]
    skipped: tuple[Record, ...]
    exports: tuple[int, ...]
    started: Record
    evaluation: Record
    by_context: Record
    draft: Record
    absent: tuple[str, ...]

    def key(self, name: str) -> Any:
        """The recipe's value of `section.key`; None where there is none."""
        value: Any = self.recipe
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    @property
    def exported(self) -> Record:
        """The held-out record of the draft that was exported; of a run that exported none, the first of the best. Empty where
        nothing was measured."""
        known = [record for record in self.held_out if record.get("simulated_acceptance_length") is not None]
        if self.exports:
            known = [record for record in known if record["step"] == self.exports[-1]]
        return max(known, key=lambda record: record["simulated_acceptance_length"], default={})

    @property
    def pace(self) -> Pace:
        tokens, speeds = column(self.train, "tokens"), column(self.train, "tokens_per_second")
        with np.errstate(divide="ignore"):
            seconds = np.where(speeds > 0, tokens / speeds, np.nan)
        supervised = column(self.train, "supervised")
        return Pace(int(np.nansum(tokens)), int(np.nansum(supervised)), float(np.nansum(seconds)))

    def supervised_until(self, steps: np.ndarray) -> np.ndarray:
        """Supervised tokens that training had seen after these steps."""
        done, seen = column(self.train, "step"), np.nancumsum(column(self.train, "supervised"))
        return np.append(0, seen)[np.searchsorted(done, steps, side="right")]


def read_run(path: Path) -> RunRecord:
    """Raises UserError where `path` holds no run, or one of its files is damaged."""
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
        "started": (folder.run, Started, "written at the start of a run; this one began before that was so"),
        "evaluation": (
            folder.evaluation,
            Evaluation,
            "launchers/evaluate.py writes it; the run judged nothing, or has not ended",
        ),
        "by_context": (folder.by_context, ByContext, "launchers/evaluate.py --by-context writes it"),
        "draft": (folder.export / "config.json", DraftFile, "the run has not ended"),
    }
    found = {name: _read_json(file, kind) for name, (file, kind, _) in files.items()}
    there = [
        (folder.recipe, folder.recipe.is_file(), "the resolved recipe"),
        (folder.metrics, records, "no step was recorded yet"),
        *((file, found[name], why) for name, (file, _, why) in files.items()),
    ]
    absent = tuple(f"{file.relative_to(path)}: {why}" for file, content, why in there if not content)
    return RunRecord(folder, text, recipe, **by_kind, exports=exports, **found, absent=absent)


def column(records: Sequence[Record], name: str) -> np.ndarray:
    """float64 [records]: a number of each; nan where it is null or missing."""
    return np.array([record.get(name) for record in records], np.float64)


def columns(records: Sequence[Record], name: str, least: int = 0) -> np.ndarray:
    """float64 [records, most numbers, or `least`]: a list of each; nan where it has none."""
    lists = [record.get(name) or [] for record in records]
    found = np.full((len(lists), max([least, *map(len, lists)])), np.nan)
    for row, values in zip(found, lists, strict=True):
        row[: len(values)] = values
    return found


def _read_metrics(path: Path) -> list[Record]:
    """All whole lines: a kill may have cut the last one off, before its end of line."""
    text = _read_text(path, MOVE_AWAY)
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [_parsed(line, Metrics, f"{path}:{number}", "remove that line") for number, line in enumerate(lines, 1)]


def _read_json(path: Path, kind: type[BaseModel]) -> Record:
    """The object in a file; empty where there is no file."""
    return _parsed(_read_text(path, MOVE_AWAY), kind, str(path), MOVE_AWAY) if path.is_file() else {}


def _read_text(path: Path, remedy: str) -> str:
    """Empty where there is no file. Raises UserError for what is no text, or cannot be read."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: damaged (not UTF-8: {error.reason} at byte {error.start}); {remedy}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error


def _parsed(text: str, kind: type[BaseModel], origin: str, remedy: str) -> Record:
    """Raises UserError for what is no JSON, or not of this kind."""
    try:
        found = parse_json(text)
        if "\\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair, which no page can hold
        kind.model_validate(found, strict=True)
    except ValueError as error:
        raise UserError(f"{origin}: damaged ({first_problem(error)}); {remedy}") from error
    return found


def _read_recipe(path: Path) -> tuple[str, Record]:
    """As text and as values, both without passwords: value by value, for YAML may break and escape a long text."""
    remedy = "put the run's recipe there"
    try:
        values = all_without_passwords(parse_yaml(_read_text(path, remedy)) or {})
        RecipeFile.model_validate(values, strict=True)
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML ({error}); {remedy}") from error
    except ValidationError as error:
        raise UserError(f"{path}: damaged ({first_problem(error)}); {remedy}") from error
    return (yaml.safe_dump(values, sort_keys=False) if values else ""), values


def target_name(run: RunRecord) -> str:
    """The hub id, or the last part of a folder's path."""
    target = str(run.key("model.target") or "an unknown target")
    if target == "demo":
        return "a demonstration target"
    return hub_id_of(run) or Path(target).name


def hub_id_of(run: RunRecord) -> str | None:
    return run.started.get("target", {}).get("hub_id")


def source_name(source: str) -> str:
    """Of one of data.train: datasets by id, files and folders by their last part."""
    known = source.startswith(("preset:", "demo_answers", "standard_library"))
    return source if known or (is_dataset(source) and not Path(source).expanduser().exists()) else Path(source).name
