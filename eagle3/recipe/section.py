"""The base class of a recipe's sections, and the types of their values."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidatorFunctionWrapHandler, field_validator

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

    @field_validator("*", mode="wrap")
    @classmethod
    def _no_boolean_becomes_a_number(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        taken, given = validate(value), value if isinstance(value, list) else [value]
        if taken is not value and any(isinstance(each, bool) for each in given):
            raise ValueError("a number was expected, not true or false (in YAML also yes, no, on and off)")
        return taken
