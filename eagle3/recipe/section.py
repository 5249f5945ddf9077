"""What every section of a recipe is, and the kinds of values that keys have."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from eagle3.errors import shown

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Precision = Literal["float32", "bfloat16"]


def no_url(value: Any) -> Any:
    """A path would take it for folders, and the first of them would be named after whoever the URL lets in."""
    if isinstance(value, str) and "://" in value:
        raise ValueError("is a URL; name a file or folder here, and copy to it what is elsewhere")
    return value


def _home(value: Any) -> Any:
    """A leading ~ as a shell reads it, which it does not do behind the = of an override."""
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
            given = any(isinstance(item, bool) for item in (value if isinstance(value, list) else [value]))
            if given and bool not in (kind, *get_args(kind)):
                choices = f" ({', '.join(map(str, get_args(kind)))})" * (get_origin(kind) is Literal)
                raise ValueError(
                    f"{name} is {shown(value)}: a number or text was expected{choices}, not true or false (for YAML on, off, "
                    "yes and no are these, unless quoted)"
                )
        return values
