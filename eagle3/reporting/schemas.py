"""The contents of a run's files, as far as the page, the card and the comparison read them.

Files may have been written by a person or a different program. These models only check a file's contents and name the
key with a problem; the records themselves are used as they are.
"""

from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Numbers = list[float | None]


class Judgement(BaseModel):
    """The part of a result file that says what was judged. Result files are sealed, so the rest is as it was
    written."""

    draft: str
    draft_digest: str
    target: str
    target_digest: str


class InputDigests(BaseModel):
    """The part of inputs.json that is used."""

    target: str = Field(alias="model.target")


class RopeParameters(BaseModel):
    rope_type: str = "default"
    factor: Amount | None = None


class DraftFile(BaseModel):
    """The contents of an export's config.json."""

    vocab_size: Count
    draft_vocab_size: Count
    max_position_embeddings: Count
    rope_parameters: RopeParameters | None = None
    eagle_config: dict[str, Any] | None = None


class Target(BaseModel):
    hub_id: str | None
    architecture: str
    layers: Count
    hidden_size: Count
    context: Count


class Draft(BaseModel):
    parameters: Count
    context: Count


class Machine(BaseModel):
    system: str
    processor: str
    cores: Count
    memory_gib: Amount
    gpu: str | None
    processes: Count


class Vocabulary(BaseModel):
    size: Count
    target_size: Count
    coverage: Share


class Histogram(BaseModel):
    edges: list[Amount]
    counts: list[Count]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.counts or len(self.edges) != len(self.counts) + 1 or self.edges != sorted(self.edges):
            raise ValueError("Edges should ascend and be one more than counts")
        return self


class Prepared(BaseModel):
    rows: Count
    truncated: Count
    dropped: dict[str, Count]
    kinds: dict[str, str] = {}  # reason -> its kind
    empty_answers: Count


class SourceUsed(BaseModel):
    source: str
    available: Count
    used: Count
    tokens: Count
    supervised: Count


class DataPart(BaseModel):
    samples: Count
    tokens: Count
    supervised: Count
    longest: Count
    lengths: Histogram | None = None
    prepared: Prepared | None = None
    sources: list[SourceUsed] = []


class Data(BaseModel):
    datasets: list[str]
    train: DataPart
    held_out: DataPart


class LargestStream(BaseModel):
    tokens: Count
    documents: Count
    supervised: Share
    spans: Count = 1


class Memory(BaseModel):
    """The memory estimate. If the planner made none, estimate_gib is null and `why` gives the reason."""

    before_gib: Amount
    estimate_gib: Amount | None
    why: str | None = None
    parts_gib: dict[str, Amount] | None = None
    stream: LargestStream | None = None
    measured: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.estimate_gib is not None and None in (self.parts_gib, self.stream, self.measured):
            raise ValueError("An estimate should have parts_gib, stream and measured")
        return self


class Started(BaseModel):
    """The contents of run.json."""

    started: str
    continues: bool
    steps: Count
    layout: dict[str, Count]
    machine: Machine
    versions: dict[str, str]
    target: Target
    draft: Draft
    vocabulary: Vocabulary
    data: Data
    memory: Memory


class RecipeModel(BaseModel):
    target: str | None = None


class RecipeData(BaseModel):
    train: list[str | dict[str, Any]] | None = None
    max_length: Count | None = None


class RecipeTraining(BaseModel):
    global_batch_size: Count | None = None
    ttt_steps: Count | None = None
    step_decay: Amount | None = None
    gradient_clipping: Amount | None = None
    skip_above_norm: Amount | None = None


class RecipeEvaluation(BaseModel):
    draft_tokens: Count | None = None


class RecipeFile(BaseModel):
    """The parts of recipe.yaml that are used, and not only shown."""

    model: RecipeModel | None = None
    data: RecipeData | None = None
    training: RecipeTraining | None = None
    evaluation: RecipeEvaluation | None = None


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
