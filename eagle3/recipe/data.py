"""What a recipe's sections are made of, and its section `data`."""

import datetime
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from eagle3.text.datasets import dataset_named

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


# Not allowed in data.template_variables: apply_chat_template's arguments, and variables that templates get anyway.
TEMPLATE_ARGUMENTS = (
    *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now"),
    *("bos_token", "eos_token", "pad_token", "unk_token"),
)


class Spans(Section):
    """Selects the supervised tokens of a document that a step learns from."""

    length: Count = Field(512, description="supervised tokens in a span")
    per_document: Count = Field(
        4, description="spans per document; a document with fewer supervised tokens uses all of them"
    )


class Source(Section):
    """A source of training data, and how much of it an epoch has."""

    path: Named = Field(description="like an entry of data.train")
    weight: Annotated[float, Field(gt=0, le=1000)] | None = Field(
        None, description="how often an epoch has each sample: 0.5 for half of them"
    )
    samples: Annotated[int, Field(ge=1, le=10**9)] | None = Field(
        None, description="samples in an epoch, in place of a weight"
    )

    @model_validator(mode="after")
    def _either_weight_or_samples(self) -> "Source":
        if (self.weight is None) == (self.samples is None):
            raise ValueError(f"{self.path} needs either weight or samples; to take all of it, write the path")
        return self


FORMS = ("as a path", "with its share")
# A path alone, or with its share. Told apart by their form, so that an error is about the one that was meant.
PathOrSource = Annotated[
    Annotated[Named, Tag(FORMS[0])] | Annotated[Source, Tag(FORMS[1])],
    Discriminator(lambda value: FORMS[isinstance(value, dict | Source)]),
]


class Data(Section):
    train: Annotated[list[PathOrSource], Field(min_length=1)] = Field(
        ["preset:ultrachat"],
        description="JSON, JSONL or parquet files, presets (`preset:ultrachat`, see docs/data.md), dataset ids, "
        "`standard_library` (with :files or :held_out_files for texts), or `demo_answers` (with target: demo); "
        "{path, weight} or {path, samples} for a share of one",
    )
    held_out: list[Named] | None = Field(None, description="like train; default: held_out_fraction of train")
    held_out_fraction: Fraction = 0.02
    chat_template: LocalPath | None = Field(None, description="Jinja file to use instead of the tokenizer's template")
    template_variables: dict[str, Any] = Field(
        {}, description="passed to the chat template, such as {enable_thinking: false}"
    )
    supervise: Literal["all_turns", "last_turn"] = Field("all_turns", description="assistant turns to learn from")
    reasoning: Literal["keep", "drop"] = Field("keep", description="whether to keep the reasoning in assistant turns")
    today: datetime.date = Field(
        datetime.date(2026, 1, 1),
        description="the date given to chat templates that ask for it, fixed so that samples do not change from day "
        "to day",
    )
    text: Literal["plain", "rendered"] = Field(
        "plain",
        description="format of `text` rows: plain, or rendered by the chat template, whose turns are then masked",
    )
    max_length: Annotated[int, Field(ge=2)] = Field(4096, description="most tokens in a sample")
    too_long: Literal["stop", "drop", "truncate", "split"] = Field(
        "stop", description="what to do with longer samples; split: cut plain text into pieces of max_length"
    )
    unusable: Literal["stop", "drop"] = Field("stop", description="what to do with samples that cannot be masked")
    malformed: Literal["stop", "drop"] = Field("stop", description="what to do with rows that cannot be read")
    max_samples: Count | None = Field(None, description="use only this many rows for training, and download no more")
    max_held_out: Count | None = Field(None, description="the same for data.held_out")
    spans: Spans | None = Field(
        None,
        description="{length, per_document}: supervise this many random spans of each document, with live states new "
        "ones in each epoch; default: all supervised tokens (docs/windows.md)",
    )
    workers: Count | None = Field(None, description="processes that tokenise; default: one per core")
    cache_dir: Annotated[Path, BeforeValidator(no_url)] = Field(  # ~ is expanded where the path is used
        Path("~/.cache/eagle3"), description="folder for tokenised data and the demo target, by content hash"
    )
    seed: int = Field(0, description="seed of the sample order and the held-out split")

    @property
    def train_paths(self) -> list[str]:
        return [source.path if isinstance(source, Source) else source for source in self.train]

    @property
    def mixed(self) -> bool:
        """Whether an epoch has a share of a source."""
        return any(isinstance(source, Source) for source in self.train)

    @model_validator(mode="after")
    def _sources_fit_the_other_keys(self) -> "Data":
        for source in (*self.train_paths, *(self.held_out or [])):
            if source.startswith("preset:"):
                dataset_named(source)
        if self.mixed and self.max_samples is not None:
            raise ValueError("max_samples counts rows of all sources together; with {path, weight}, give samples there")
        if self.too_long == "split" and not self.held_out and self.held_out_fraction:
            raise ValueError(
                "too_long is 'split' but held_out names nothing: pieces of one text would be trained on and held out; "
                "name held_out, or set held_out_fraction to 0"
            )
        return self

    @field_validator("template_variables")
    @classmethod
    def _not_the_programs_own(cls, variables: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(variables.keys() & TEMPLATE_ARGUMENTS):
            raise ValueError(f"{taken[0]} cannot be set here: the rows and this program fill it; leave it out")
        return variables
