"""The contents of a run's files, as far as the page, the card and the comparison read them.

Files may have been written by a person or a different program. These models only check a file's contents and name the
key with a problem; the records themselves are used as they are.
"""

from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

Count = Annotated[int, Field(ge=0)]
Numbers = list[float | None]


class Sealed(BaseModel):
    """A sealed record, whose content is as it was written."""

    digest: str


class Judgement(Sealed):
    """The part of a result file that says what was judged."""

    draft: str
    draft_digest: str
    target: str
    target_digest: str


class InputDigests(BaseModel):
    """The part of inputs.json that is used."""

    target: str = Field(alias="model.target")


class DraftFile(BaseModel):
    """An export's config.json, which its own reader looks at."""


class Metrics(BaseModel):
    """A line of metrics.jsonl. Numbers may be null."""

    step: Count
    kind: str
    loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    step_losses: Numbers | None = None
    accuracy: Numbers | None = None
    acceptance_rate: Numbers | None = None
    simulated_acceptance_length: float | None = None
    tokens: float | None = None
    supervised: float | None = None
    tokens_per_second: float | None = None
    memory_gib: float | None = None
    contexts: Numbers | None = None
    acceptance_by_context: Numbers | None = None
    supervised_by_context: Numbers | None = None


def first_problem(error: ValueError) -> str:
    """The first problem, as `key: what is expected, not what is there`; if the text is not JSON, the parser's
    message."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    place, value = ".".join(map(str, first["loc"])), first["input"]
    what = first["msg"] if first["type"] == "missing" else f"{first['msg']}, not {value!r:.60}"
    return f"{place}: {what}" if place else what
