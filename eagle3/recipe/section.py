"""The base class of a recipe's sections, and the types of their values."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from eagle3.errors import shown

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Precision = Literal["float32", "bfloat16"]


def no_url(value: Any) -> Any:
    """Reject a URL in place of a local path: Path would turn it into folders, one named after its user and password."""
    if isinstance(value, str) and "://" in value:
        raise ValueError("is a URL; name a local file or folder, and copy remote data there first")
    return value


def _home(value: Any) -> Any:
    """Expand a leading ~ like a shell, because shells do not expand it after the = of an override."""
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~") else value


Named = Annotated[str, BeforeValidator(_home)]
LocalText = Annotated[Named, BeforeValidator(no_url)]
LocalPath = Annotated[Path, BeforeValidator(_home), BeforeValidator(no_url)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_booleans_as_numbers(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            kind = cls.model_fields[name].annotation if name in cls.model_fields else bool
            has_boolean = any(isinstance(item, bool) for item in (value if isinstance(value, list) else [value]))
            if has_boolean and not any(form is bool or isinstance(form, bool) for form in (kind, *get_args(kind))):
                choices = f" ({', '.join(map(str, get_args(kind)))})" * (get_origin(kind) is Literal)
                raise ValueError(
                    f"{name} is {shown(value)}: a number or text was expected{choices}, not true or false (for YAML "
                    "on, off, yes and no are these, unless quoted)"
                )
        return values


def paths_in(value: Any, key: str = "") -> Iterator[tuple[str, Path]]:
    """Every path in a recipe, a section or a value, with its key. This is the rule for what a recipe names: a key whose
    type is a path needs no other mention."""
    if isinstance(value, Path):
        yield key, value
    elif isinstance(value, Section):
        for name in type(value).model_fields:
            yield from paths_in(getattr(value, name), f"{key}.{name}".lstrip("."))
    elif isinstance(value, list | tuple | dict):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths_in(each, f"{key}[{name}]")
