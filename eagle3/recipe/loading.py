"""Load recipes from YAML files and command lines, and explain errors in them in one line."""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from eagle3.errors import SharedUserError, shown
from eagle3.parsing import parse_yaml
from eagle3.recipe.data import FORMS, Section, Source
from eagle3.recipe.schema import Recipe

LARGEST = 1 << 18  # most bytes in a recipe file; the YAML parser takes about ten seconds for them
NAME = "name a YAML file with --recipe"  # remedy in error messages
LONGEST_KEY = 100  # most characters of a key that are shown in an error message
# Names that other trainers give to some of our keys, too different to be found by similarity; for error messages.
OTHER_NAMES = {
    "lr": "training.learning_rate",
    **dict.fromkeys(("batch_size", "train_batch_size"), "training.global_batch_size"),
    **dict.fromkeys(("num_epochs", "num_train_epochs"), "training.epochs"),
    **dict.fromkeys(("steps", "num_steps", "total_steps"), "training.max_steps"),
    **dict.fromkeys(("seq_len", "seq_length", "max_seq_length", "max_len", "max_length"), "data.max_length"),
    "gradient_accumulation_steps": "training.accumulation",
    **dict.fromkeys(("grad_clip", "max_grad_norm"), "training.gradient_clipping"),
    "warmup_ratio": "training.warmup_fraction",
    "save_steps": "training.checkpoint_every",
    "output_dir": "output.dir",
}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a YAML recipe and apply `section.key=value` overrides. Raises UserError with file, key, value and remedy,
    and OSError if the system refuses the file."""
    path = Path(path)
    try:
        exists = path.is_file()
        near = difflib.get_close_matches(path.name, (each.name for each in path.parent.glob("*.yaml")), n=1)
        example = path.parent.joinpath(*near) if near else "recipes/quickstart.yaml"
        for wrong, flaw in (
            (path.is_dir(), f"is a folder, not a recipe; {NAME}"),
            (not exists, f"no such recipe; {NAME}, for example {example}"),
            (path.suffix in (".jsonl", ".parquet"), f"is data, not a recipe; name it in one, as data.train=[{path}]"),
            (exists and path.stat().st_size > LARGEST, f"has more than {LARGEST:,} bytes, which no recipe has; {NAME}"),
        ):
            if wrong:
                raise SharedUserError(f"{path}: {flaw}")
        values = parse_yaml(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SharedUserError(f"{path}: not valid YAML ({error}); fix the file") from error
    if not isinstance(values, dict):
        raise SharedUserError(f"{path}: holds {type(values).__name__}, not sections; begin with `model:`")
    return checked_recipe(values, path, overrides)


def checked_recipe(values: dict, origin: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Make a recipe from its values and the overrides. If it is invalid, raises UserError naming the override at fault
    or, if no override is, `origin`."""
    for override in overrides:
        apply_override(values, override)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        # Report an unknown key first: it may be the missing one, misspelt.
        problem = min(error.errors(), key=lambda details: details["type"] != "extra_forbidden")
        culprits = [override for override in overrides if _may_cause(problem, override.partition("=")[0])]
        where, source = (f"command line: {shown(culprits[-1])}", "override") if culprits else (origin, "recipe")
        raise SharedUserError(_explain(where, problem, f"fix the {source}")) from error


def _may_cause(problem: dict, key: str) -> bool:
    """Whether an override of `key` may cause the problem: `key` must be the problem's place, a section around it, or a
    key inside it."""
    place = _key_of(problem)
    return f"{place}.".startswith(f"{key}.") or f"{key}.".startswith(f"{place}.")


def _key_of(problem: dict) -> str:
    """The problem's place, without the tags that tell apart the forms of an entry of data.train."""
    return ".".join(str(part) for part in problem["loc"] if part not in FORMS)


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, with every default written out."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def leaves(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in nested sections that is no section with keys, as (section.key, value)."""
    if isinstance(values, dict) and values:
        for name, inner in values.items():
            yield from leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, values


def apply_override(values: dict, override: str) -> None:
    """Set `section.key=value` in a recipe's values. Raises UserError if the override is malformed."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise SharedUserError(f"command line: {shown(override)} is not an override; write section.key=value")
    if not text.strip():
        raise SharedUserError(
            f"command line: {shown(override)} has no value; write {key:.100}=VALUE, or null if it may be none"
        )
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise SharedUserError(
                f"command line: {shown(override)}: {section:.60} is not a section; write section.key=value"
            )
    try:
        values[name] = parse_yaml(text)
    except yaml.YAMLError as error:
        raise SharedUserError(
            f"command line: {shown(override)}: the value is not valid YAML ({error}); fix or quote it"
        ) from error


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key below a section, subsections included, as `section.key`."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from keys_of(kind, f"{prefix}{name}.")


def _explain(where: Path | str, error: dict, remedy: str) -> str:
    key, value, problem = _key_of(error)[:LONGEST_KEY], error["input"], error["msg"].removeprefix("Value error, ")
    value_text = f" (value {shown(value)})"
    match error["type"]:
        case "extra_forbidden":
            suggestion = _key_meant(key)
            hint = f"did you mean {suggestion}?" if suggestion else "train.py --print-recipe shows all keys"
            return f"{where}: {key}: unknown key{value_text}; {hint}"
        case "missing" if isinstance(error["loc"][-1], str):
            return f"{where}: {key}: missing; add it, see recipes/quickstart.yaml"
    listed = problem + (f", as in {key}=[{value:.100}]" if isinstance(value, str) else "")
    problem = {
        "list_type": listed,
        "tuple_type": listed,
        "dict_type": f"{problem}, as in {key}={{name: value}}",
        "model_type": f"is a section; write {key}={{key: value}}, or its keys below it, indented, or leave it out",
        "path_type": "is no path; name a file or folder",
    }.get(error["type"], problem)
    return f"{where}: {key}{'' if isinstance(value, dict) else value_text}: {problem:.300}; {remedy}"


def _key_meant(key: str) -> str | None:
    """The recipe key that an unknown `key` most likely means, by its last part; None if nothing is similar."""
    place, _, name = key.rpartition(".")
    if place.startswith("data.train."):
        matches = difflib.get_close_matches(name, Source.model_fields, n=1)
        return f"{place}.{matches[0]}" if matches else None
    recipe_keys = [*keys_of(Recipe)]
    names = [each.rpartition(".")[2] for each in recipe_keys]
    matches = difflib.get_close_matches(name, names, n=1) or [each for each in names if each.startswith(name)]
    candidates = [each for each in recipe_keys if each.rpartition(".")[2] in matches]
    return OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(key, candidates, n=1, cutoff=0.0)), None)
