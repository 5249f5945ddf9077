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

KINDS = ("train", "held_out", "skipped")
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
    config.json. None, or nothing, for what the folder lacks; absent says what and why."""

    folder: RunFolder
    recipe_text: str | None
    recipe: Record
    train: tuple[Record, ...]
    held_out: tuple[Record, ...]
    skipped: tuple[Record, ...]
    exports: tuple[int, ...]
    started: Record | None
    evaluation: Record | None
    by_context: Record | None
    draft: Record | None
    absent: tuple[str, ...]

    def key(self, name: str) -> Any:
        """The recipe's value of `section.key`; None where there is none."""
        value: Any = self.recipe
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    @property
    def exported(self) -> Record | None:
        """The held-out record of the draft that was exported; of a run that exported none, the first of the best."""
        known = [record for record in self.held_out if record.get("simulated_acceptance_length") is not None]
        if self.exports:
            known = [record for record in known if record["step"] == self.exports[-1]]
        return max(known, key=lambda record: record["simulated_acceptance_length"], default=None)

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
    by_kind = {kind: tuple(record for record in records if record["kind"] == kind) for kind in KINDS}
    exports = tuple(record["step"] for record in records if record["kind"] == "exported")
    optional = {
        "started": (folder.run, "written at the start of a run; this one began before that was so"),
        "evaluation": (folder.evaluation, "launchers/evaluate.py writes it; the run judged nothing, or has not ended"),
        "by_context": (folder.by_context, "launchers/evaluate.py --by-context writes it"),
        "draft": (folder.export / "config.json", "the run has not ended"),
    }
    kinds = {"started": Started, "evaluation": Evaluation, "by_context": ByContext, "draft": DraftFile}
    found = {name: read_json(file, kinds[name]) for name, (file, _) in optional.items()}
    lacking = {
        folder.recipe: (text is None, "the resolved recipe"),
        folder.metrics: (not records, "no step was recorded yet"),
        **{file: (found[name] is None, why) for name, (file, why) in optional.items()},
    }
    absent = tuple(f"{file.relative_to(path)}: {why}" for file, (lacks, why) in lacking.items() if lacks)
    return RunRecord(folder, text, recipe, **by_kind, exports=exports, **found, absent=absent)


def column(records: Sequence[Record], name: str) -> np.ndarray:
    """float64 [records]: a number of each; nan where it is null or missing."""
    return np.array([_number(record.get(name)) for record in records], np.float64)


def columns(records: Sequence[Record], name: str) -> np.ndarray:
    """float64 [records, most numbers]: a list of each; nan where it has none."""
    lists = [record.get(name) or [] for record in records]
    found = np.full((len(lists), max(map(len, lists), default=0)), np.nan)
    for row, values in zip(found, lists, strict=True):
        row[: len(values)] = [_number(value) for value in values]
    return found


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _read_metrics(path: Path) -> list[Record]:
    """All whole lines: a kill may have cut the last one off, before its end of line."""
    records, text = [], _read_text(path, MOVE_AWAY) or ""
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            records.append(_parsed(line, Metrics))
        except ValueError as error:
            raise UserError(f"{path}:{number}: damaged ({error}); remove that line") from error
    return records


def _read_text(path: Path, remedy: str) -> str | None:
    """None where there is no file. Raises UserError for what is no text, or cannot be read."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: damaged (not UTF-8: {error.reason} at byte {error.start}); {remedy}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error


def read_json(path: Path, kind: type[BaseModel], remedy: str = MOVE_AWAY) -> Record | None:
    """The object in a file, None where there is no file. Raises UserError for what is not of this kind."""
    text = _read_text(path, remedy)
    if text is None:
        return None
    try:
        return _parsed(text, kind)
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); {remedy}") from error


def _parsed(text: str, kind: type[BaseModel]) -> Record:
    """Raises ValueError for what is no JSON, or not of this kind."""
    found = parse_json(text)
    if "\\ud" in text.lower():
        json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair, which no page can hold
    try:
        kind.model_validate(found, strict=True)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from error
    return found


def _read_recipe(path: Path) -> tuple[str | None, Record]:
    """As text and as values, both without passwords: value by value, for YAML may break and escape a long text."""
    text = _read_text(path, "put the run's recipe there")
    if text is None:
        return None, {}
    try:
        values = all_without_passwords(parse_yaml(text) or {})
        RecipeFile.model_validate(values, strict=True)
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML ({error}); put the run's recipe there") from error
    except ValidationError as error:
        raise UserError(f"{path}: damaged ({first_problem(error)}); put the run's recipe there") from error
    return (yaml.safe_dump(values, sort_keys=False) if values else ""), values


def target_name(run: RunRecord) -> str:
    """The hub id, or the last part of a folder's path."""
    target = str(run.key("model.target") or "an unknown target")
    if target == "demo":
        return "a demonstration target"
    return hub_id_of(run) or Path(target).name


def hub_id_of(run: RunRecord) -> str | None:
    return ((run.started or {}).get("target") or {}).get("hub_id")


def source_name(source: str) -> str:
    """Of one of data.train: datasets by id, files and folders by their last part."""
    known = source.startswith(("preset:", "demo_answers", "standard_library"))
    return source if known or (is_dataset(source) and not Path(source).expanduser().exists()) else Path(source).name


def yielded(judged: Record) -> int:
    """Tokens that all verifications of an evaluation.json added, without the first ones, which prefills give."""
    return round(judged["acceptance_length"] * judged["verifications"])
